"""The explorer: a local server, and the page that it sends to the browser.

The page requests tiles of attention weights as it needs them. The server keeps looks, which hold q and k and recompute
any weight exactly. Nothing is loaded from other sites.
"""

from .server import explorer, serve

__all__ = ["explorer", "serve"]
