"""The page in which a small Transformer learns in the browser: written to a folder for any file host, or served here.

Its sources are in static/watch/ and import some of the explorer's modules; the page is one flat folder of all of them.
"""

from __future__ import annotations

import posixpath
import re
import sys
import threading
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..errors import RegardError
from ..foundation.files import write_atomic
from .server import STATIC, url_of

_LINK = re.compile(r"""((?:\bfrom |\bimport |new URL\(|\bhref=|\bsrc=)")((?:\.\.?/)?[\w./]+\.(?:js|css|svg))(?=")""")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def watch_files() -> dict[str, bytes]:
    """The files of the page by name: index.html and all that it links to, with links rewritten to the flat folder."""
    contents: dict[str, bytes] = {}
    pending = ["watch/index.html"]
    while pending:
        path = pending.pop()
        name = posixpath.basename(path)
        if name in contents:
            continue
        text = (STATIC / path).read_text(encoding="utf-8")
        folder = posixpath.dirname(path)
        pending += [posixpath.normpath(posixpath.join(folder, link[2])) for link in _LINK.finditer(text)]
        contents[name] = _LINK.sub(lambda link: f"{link[1]}./{posixpath.basename(link[2])}", text).encode()
    return contents


def write_watch_page(folder: Path) -> Path:
    """Write the page into a folder and return its index.html, to be opened through any file server."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in watch_files().items():
        write_atomic(folder / name, content)
    return folder / "index.html"


def serve_watch_page(
    port: int = 0,
    *,
    open_browser: bool = False,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C; port 0 picks a free one."""
    contents = watch_files()

    class PageHandler(BaseHTTPRequestHandler):
        """Sends the page's files and nothing else."""

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].removeprefix("/") or "index.html"
            content = contents.get(name)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", f"{_TYPES.get(Path(name).suffix, 'text/plain')}; charset=utf-8")
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *values: object) -> None:
            """Log nothing: a line per request would scroll the address away."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), PageHandler)
    except OSError as error:
        why = error.strerror or str(error)
        raise RegardError(f"cannot listen on port {port} of 127.0.0.1: {why}; --port 0 picks a free one") from None
    url = url_of("127.0.0.1", server.socket)
    say(f"regard: {url} (press Ctrl-C to stop)")
    if open_browser:
        threading.Timer(0.5, webbrowser.open, [url]).start()
    with server:
        server.serve_forever()
