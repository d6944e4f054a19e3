"""moto's S3 on the loopback address, with a folder uploaded to it, and faults on order."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
BROKEN = b"<Error><Code>InternalError</Code><Message>We had an error.</Message></Error>"
BUCKET = "bucket"
SECRET = "the-secret"
_ANSWERS = {
    "500": ("500 Internal Server Error", BROKEN),
    "503": ("503 Slow Down", SLOW_DOWN),
    "403": ("403 Forbidden", DENIED),
}


@dataclass
class Refusal:
    """What the server does with requests that contain `match`, so many times."""

    kind: str
    """A status; or cut (the connection, before anything is done), lost (it is done, and then the
    connection is cut before the answer)."""
    match: str
    times: int = 1_000_000


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
        self.refusals: list[Refusal] = []
        self.delay_seconds = 0.0
        self.most_at_once = 0
        self._running = 0

    def _refusal(self, request: str) -> str | None:
        for refusal in self.refusals:
            if refusal.times > 0 and refusal.match in request:
                refusal.times -= 1
                return refusal.kind
        return None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            self.log.append(f"{request} {environ.get('HTTP_RANGE', '')}")
            is_get = request.startswith("GET") and "list-type" not in request
            slow = is_get and self.slow_downs > 0
            self.slow_downs -= slow
            refusal = "503" if slow else self._refusal(request)
            if self.denied and self.denied in request:
                refusal = "403"
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        time.sleep(self.delay_seconds)
        with self._lock:
            self._running -= 1
        if refusal in _ANSWERS:
            status, body = _ANSWERS[refusal]
            start_response(status, [("Content-Type", "application/xml")])
            return [body]
        if refusal == "lost":
            list(self._app(environ, lambda *_: None))
        if refusal is not None:
            start_response("200 OK", [])
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextlib.contextmanager
def serve_s3() -> Iterator[tuple[str, S3]]:
    """The server's address, and the server."""
    pytest.importorskip("moto.moto_server.werkzeug_app", reason="needs moto[s3], which is not here")
    pytest.importorskip("s3fs", reason="needs s3fs, which is not here")
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


@contextlib.contextmanager
def s3_session() -> Iterator[S3]:
    """A server that the environment names, with an empty bucket; what was connected is let go."""
    import fsspec

    from tokenmill import files

    with serve_s3() as (address, server), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "the-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)
        # What earlier servers of this process were given is moto's until it is told to forget it.
        urllib.request.urlopen(f"{address}/moto-api/reset", data=b"").close()
        forget_connections()
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield server
    forget_connections()


def forget_connections() -> None:
    """A process keeps its connections to S3; those of another server would be of no use."""
    import fsspec

    from tokenmill import files

    fsspec.get_filesystem_class("s3").clear_instance_cache()
    files._shared_filesystem.cache_clear()


def remote_tree(url: str) -> dict[str, bytes]:
    """Every object of a store with its bytes, the log left out."""
    import fsspec

    fs, name = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    found = {path.removeprefix(f"{name}/"): fs.cat_file(path) for path in fs.find(name)}
    found.pop("runs.jsonl", None)
    return found


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
