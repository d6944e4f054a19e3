"""A web server on the loopback address that serves a folder, ranges included."""

from __future__ import annotations

import contextlib
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, *args: object, folder: Path, log: list[str]) -> None:
        self._folder = folder
        self._log = log
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self._folder / self.path.lstrip("/").partition("?")[0]
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(data) - 1)
        body = data[first : last + 1]
        self._log.append(f"{self.command} {self.headers.get('Range')}")
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep quiet."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The server's address and a log of its requests."""
    log: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, folder=folder, log=log))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
