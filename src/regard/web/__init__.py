"""The explorer: a server on the reader's own machine, and the page it sends to the browser.

The page asks for tiles of attention weights as it needs them; the server answers from looks it keeps, which hold q and
k and recompute any weight exactly. Nothing is fetched from anywhere else.
"""

from .server import explorer, serve

__all__ = ["explorer", "serve"]
