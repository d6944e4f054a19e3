"""A web server on the loopback address: a folder by ranges, counted, with faults on order."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass
class Fault:
    """What the server does instead of answering."""

    kind: str
    """A status, or: cut (the connection), short (fewer bytes than asked), whole (ignores ranges),
    flip (one bit of the answer), stall (a second of silence, then nothing)."""
    match: str = ""
    """Only for paths that contain this."""
    times: int = 1_000_000


@dataclass
class Server:
    """A running server; every attribute may be changed while it runs."""

    folder: Path
    address: str = ""
    delay_seconds: float = 0.0
    together: threading.Barrier | None = None
    """Answers wait until so many are asked for at once."""
    release: threading.Event | None = None
    """Answers wait for this, for a minute at most."""
    faults: list[Fault] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    sent: int = 0
    """Bytes of answers."""
    most_at_once: int = 0
    is_gone: bool = False
    """Connections that are still open get no answer any more."""
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Forget what was asked so far."""
        self.log.clear()
        self.sent = self.most_at_once = 0

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._running > 0

    def asked(self, suffix: str) -> list[str]:
        return [line for line in self.log if line.split()[1].endswith(suffix)]

    def fault(self, path: str) -> str | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.match in path:
                    fault.times -= 1
                    return fault.kind
        return None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: object, server_state: Server) -> None:
        self._state = server_state
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        state = self._state
        with state.counted():
            state.log.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            time.sleep(state.delay_seconds)
            if state.together is not None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    state.together.wait(30)
            if state.release is not None:
                state.release.wait(60)
            fault = state.fault(self.path)
            if state.is_gone:
                self.close_connection = True
                return
            path = state.folder / self.path.lstrip("/").partition("?")[0]
            if fault is not None and fault.isdigit():
                self._refuse(int(fault))
            elif not path.is_file():
                self._refuse(404)
            else:
                self._send(path, fault, with_body=with_body)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, path: Path, fault: str | None, *, with_body: bool) -> None:
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if fault == "whole":
            wanted = None
        first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(data) - 1)
        if wanted and first >= len(data):
            self._refuse(416)
            return
        body = data[first : last + 1]
        if fault == "short":
            body = body[: len(body) // 2]
        if fault == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "stall":
            time.sleep(1)
            self.close_connection = True
        elif fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif with_body:
            self._state.sent += len(body)
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep quiet."""


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of the test."""


@contextlib.contextmanager
def listening(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on a thread of its own, which is gone afterwards."""
    server = _QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A server of the files in a folder."""
    state = Server(folder)
    with listening(partial(_Handler, server_state=state)) as state.address:
        try:
            yield state
        finally:
            state.is_gone = True
            if state.release is not None:
                state.release.set()
