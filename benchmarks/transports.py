"""Compares the ways to read files at a URL: `tokenmill.files`, on fsspec, and obstore alone.

    pip install obstore
    python -m benchmarks.transports         writes transports.json; see docs/decisions/0018

Each answer is that of a fresh process, and the server, on the loopback address, is another one. CPU
time is that of the reading process alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAYS = ("tokenmill", "obstore")
ROUNDS = 5
WAIT_SECONDS = 10
DATA = memoryview(bytes(256 << 20))
MIB = 1 << 20
SMALL = [(at * MIB, at * MIB + 4096) for at in range(256)]
LARGE = [(at * 4 * MIB, at * 4 * MIB + MIB) for at in range(64)]
Ranges = list[tuple[int, int]]


class Handler(BaseHTTPRequestHandler):
    """Ranges of 256 MiB of zeros; /slow answers late, /key tells what it was asked with."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(WAIT_SECONDS)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(DATA))
        body = DATA[first:last]
        if self.path.endswith("/key"):
            found = re.search("from-file|Basic", self.headers.get("Authorization", ""))
            body = memoryview((found[0] if found else "none").ljust(9).encode())
            last = first + len(body)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(DATA)}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 10:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep quiet."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def reader(way: str, address: str) -> Callable[[str, Ranges], list[Any]]:
    """Reads ranges of one file: /name of the web server, or s3://bucket/name."""
    if way == "tokenmill":
        from tokenmill import files

        def ours(name: str, ranges: Ranges) -> list[Any]:
            url = name if name.startswith("s3:") else address + name
            return files.read_ranges([(url, first, last) for first, last in ranges])

        return ours
    import obstore
    from obstore.store import HTTPStore, S3Store

    def theirs(name: str, ranges: Ranges) -> list[Any]:
        kind, place = (S3Store, "bucket") if name.startswith("s3:") else (HTTPStore, address)
        store = stores.setdefault(kind, kind(place, client_options={"allow_http": True}))
        starts, ends = zip(*ranges, strict=True)
        name = name.removeprefix("s3://bucket").lstrip("/")
        # Ranges near each other are one request only where that is asked for: here it is not.
        found = obstore.get_ranges(store, name, starts=starts, ends=ends, coalesce=0)
        return [memoryview(each) for each in found]

    stores: dict[Any, Any] = {}
    return theirs


def cpu_of(call: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text("ascii"))
    return int(found[1]) * 1024 if found else 0


def answer(way: str, question: str, address: str) -> object:
    """What one process finds out."""
    read = reader(way, address)
    if question == "fork":
        read("/a", SMALL[:1])
        child = os.fork()
        if child == 0:
            signal.alarm(WAIT_SECONDS)
            read("/a", SMALL[:1])
            os._exit(0)
        return "works" if os.waitpid(child, 0)[1] == 0 else "hangs"
    if question == "ctrl-c":
        read("/a", SMALL[:1])
        signal.setitimer(signal.ITIMER_REAL, 1)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        began = time.perf_counter()
        with contextlib.suppress(KeyboardInterrupt):
            read("/slow", SMALL[:1])
        return round(time.perf_counter() - began - 1, 1)
    if question in ("netrc", "profile"):
        try:
            (found,) = read("/key" if question == "netrc" else "s3://bucket/key", [(0, 9)])
        except Exception as error:  # whatever it is, the key was not used
            return type(error).__name__
        return bytes(found).decode().strip()
    scheme, _, size = question.partition(" ")
    name, ranges = {"http": "/a", "s3": "s3://bucket/a"}[scheme], {"4K": SMALL, "1M": LARGE}[size]
    read(name, ranges[:1])
    before = peak_bytes()
    seconds = statistics.median(cpu_of(lambda: read(name, ranges)) for _ in range(ROUNDS))
    return {"cpu_ms": round(1000 * seconds, 1), "peak_mb": round((peak_bytes() - before) / 1e6)}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.transports", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def run() -> dict[str, Any]:
    """The answers, and everything a reader needs to judge them."""
    questions = ["fork", "ctrl-c", "netrc", "profile", "http 4K", "s3 4K", "http 1M", "s3 1M"]
    answers: dict[str, dict[str, Any]] = {question: {} for question in questions}
    with serving() as address, tempfile.TemporaryDirectory() as home:
        (Path(home) / ".aws").mkdir()
        keys = "[default]\naws_access_key_id = from-file\naws_secret_access_key = x\n"
        (Path(home) / ".aws" / "credentials").write_text(keys)
        (Path(home) / ".netrc").write_text("machine localhost login me password x\n")
        environment = {name: each for name, each in os.environ.items() if name[:4] != "AWS_"}
        environment |= {"HOME": home, "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}
        for question in questions:
            keys_here = {} if question == "profile" else {"AWS_ACCESS_KEY_ID": "k"}
            secret = {"AWS_SECRET_ACCESS_KEY": "s"} if keys_here else {}
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.transports", way, question, address]
                done = subprocess.run(
                    command,
                    env=environment | keys_here | secret,
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                    check=True,
                )
                answers[question][way] = json.loads(done.stdout)
                print(question, way, answers[question][way], file=sys.stderr, flush=True)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": ROUNDS,
        "answers": answers,
    }


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        server = Server(("127.0.0.1", 0), Handler)
        print(f"http://localhost:{server.server_port}", flush=True)
        server.serve_forever()
    elif len(sys.argv) > 1:
        print(json.dumps(answer(*sys.argv[1:])))
    else:
        results = json.dumps(run(), indent=1)
        (ROOT / "benchmarks" / "results" / "transports.json").write_text(results + "\n")


if __name__ == "__main__":
    main()
