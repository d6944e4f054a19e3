"""moto's S3 on the loopback address, with a folder uploaded to it, and faults on order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
BUCKET = "bucket"


class S3:
    """A running server: what it was asked, and what it is to refuse."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self.log: list[str] = []
        self.slow_downs = 0
        """Requests for objects that are still answered with 503."""
        self.denied = ""
        """Requests that contain this are answered with 403."""
        self.delay_seconds = 0.0
        self.most_at_once = 0
        self._running = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            self.log.append(f"{request} {environ.get('HTTP_RANGE', '')}")
            is_get = request.startswith("GET") and "list-type" not in request
            slow = is_get and self.slow_downs > 0
            self.slow_downs -= slow
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        time.sleep(self.delay_seconds)
        with self._lock:
            self._running -= 1
        if slow or (self.denied and self.denied in request):
            status, body = ("503 Slow Down", SLOW_DOWN) if slow else ("403 Forbidden", DENIED)
            start_response(status, [("Content-Type", "application/xml")])
            return [body]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextlib.contextmanager
def serve_s3() -> Iterator[tuple[str, S3]]:
    """The server's address, and the server."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = S3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", app
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def upload(folder: Path, *, prefix: str) -> str:
    """Copy a folder into the bucket; its URL."""
    import fsspec

    s3 = fsspec.filesystem("s3")
    with contextlib.suppress(FileExistsError):
        s3.mkdir(BUCKET)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            s3.pipe_file(f"{BUCKET}/{prefix}/{name}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"
