"""Serving: an HTTP API over run directories, with continuous batching.

``create_api`` builds the ASGI application and ``serve_api`` runs it. Each model has a ``Scheduler``, the thread that
owns it.
"""

from .app import create_api, serve_api

__all__ = ["create_api", "serve_api"]
