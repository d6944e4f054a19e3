"""Files behind a URL: ranges, retries, and errors that keep secrets."""

from __future__ import annotations

import asyncio
import base64
import pickle
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

import aiohttp
import botocore.exceptions
import fsspec
import pytest
from tests.web import Fault, Server, listening, serve
from yarl import URL

from tokenmill import files
from tokenmill.errors import SourceError, UsageError
from tokenmill.files import Failure, RemoteError, StoppedError, read_bytes, read_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(DATA if name == "a.bin" else DATA[::-1])
    with serve(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://user:pw@host/a/b?X-Signature=s#f", "https://host/a/b"),
        ("http://token@host:80/a", "http://host:80/a"),
        ("s3://key:pw@bucket/a?b", "s3://bucket/a?b"),
        ("hf://datasets/org/name@main/a", "hf://datasets/org/name@main/a"),
        ("https://user:p@w@host/a", "https://host/a"),
        ("data/a@b?c", "data/a@b?c"),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url: str, safe: str) -> None:
    assert files.shown(url) == safe


@pytest.mark.parametrize(
    ("url", "joined"),
    [
        ("s3://bucket/store", "s3://bucket/store/x/y.bin"),
        ("s3://bucket/what?/", "s3://bucket/what?/x/y.bin"),
        ("https://host/store/", "https://host/store/x/y.bin"),
        ("https://host/store?sv=1&sig=2", "https://host/store/x/y.bin?sv=1&sig=2"),
    ],
)
def test_a_file_is_named_below_a_folder_and_before_its_query(url: str, joined: str) -> None:
    assert files.join(url, "x/y.bin") == joined


def test_ranges_come_in_the_order_in_which_they_were_asked_for(server: Server) -> None:
    a, b = f"{server.address}/a.bin", f"{server.address}/b.bin"
    wanted = [(b, 5, 10), (a, 0, len(DATA)), (a, 7, 7), (b, 0, 1), (a, 5, 10)]
    assert read_ranges(wanted) == [DATA[::-1][5:10], DATA, b"", DATA[-1:], DATA[5:10]]
    assert len(server.log) == 4, "nothing is asked for where nothing is wanted"
    assert read_ranges([]) == []


def test_only_the_ranges_that_failed_are_asked_for_again(server: Server) -> None:
    server.faults = [Fault("503", times=2), Fault("short", times=1), Fault("cut", times=1)]
    wanted = [(f"{server.address}/a.bin", k, k + 100) for k in range(0, 1000, 100)]
    assert b"".join(read_ranges(wanted)) == DATA[:1000]
    assert 12 < len(server.log) <= 16


def test_one_range_that_cannot_be_had_is_told_before_those_that_may_pass(server: Server) -> None:
    server.faults = [Fault("500", match="a.bin")]
    wanted = [(f"{server.address}/{name}", 0, 10) for name in ("a.bin", "none.bin", "a.bin")]
    with pytest.raises(RemoteError) as caught:
        read_ranges(wanted)
    assert (caught.value.failure, caught.value.url) == (Failure.MISSING, wanted[1][0])
    assert len(server.log) == 3


def test_a_whole_file_is_asked_for_again_too(server: Server) -> None:
    server.faults = [Fault("500", times=2), Fault("cut", times=1)]
    assert read_bytes(f"{server.address}/a.bin") == DATA
    server.faults = [Fault("403")]
    with pytest.raises(RemoteError, match="403 Forbidden") as caught:
        read_bytes(f"{server.address}/a.bin")
    assert caught.value.failure is Failure.DENIED
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.url, again.hint) == (
        str(caught.value),
        caught.value.url,
        caught.value.hint,
    )


def test_a_server_that_falls_silent_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STALL_SECONDS", 0.3)
    server.faults = [Fault("stall", times=2)]
    wanted = [(f"{server.address}/a.bin", k, k + 10) for k in range(5)]
    assert read_ranges(wanted) == [DATA[k : k + 10] for k in range(5)]
    server.faults = [Fault("stall", times=1)]
    assert read_bytes(f"{server.address}/a.bin") == DATA
    assert len(server.log) == 7 + 2


@pytest.mark.parametrize("waiting", ["for an answer", "before it asks again"])
def test_a_call_that_is_stopped_ends_within_a_moment(
    server: Server, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if waiting == "for an answer":
        server.release = threading.Event()
    else:
        server.faults = [Fault("500")]
        monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 1000)
    stop = threading.Event()

    def stop_when_asked() -> None:
        while not server.log or (server.release is None and server.is_busy):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_when_asked, daemon=True).start()
    with pytest.raises(StoppedError):
        read_ranges([(f"{server.address}/a.bin", 0, 10)], stop=stop)
    while asyncio.all_tasks(fsspec.asyn.get_loop()):
        time.sleep(0.01)
    assert len(server.log) == 1
    assert server.is_busy == (waiting == "for an answer"), "and its requests are given up"


def test_sizes_are_listed_where_the_server_lists(server: Server) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a", "b/c"):
        memory.pipe(f"/listed/{name}", DATA)
    assert files.list_sizes("memory://listed") == {"a": len(DATA)}
    assert files.list_sizes("memory://listed/none") == {}
    assert files.list_sizes(server.address) is None
    wanted = [("memory://listed/a", 10, 20), ("memory://listed/b/c", 0, 5)]
    assert read_ranges(wanted) == [DATA[10:20], DATA[:5]]
    with pytest.raises(RemoteError, match="0 bytes came instead of the 5 from byte 20,000"):
        read_ranges([("memory://listed/a", 20_000, 20_005)])


def client_error(status: int, code: str) -> OSError:
    """As s3fs raises it."""
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(5, "An error occurred")
    error.__cause__ = botocore.exceptions.ClientError(response, "GetObject")
    return error


def response_error(status: int) -> aiohttp.ClientResponseError:
    request = aiohttp.RequestInfo(URL("http://h/?s=hunter2"), "GET", {}, URL("http://h"))  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(request, (), status=status)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (response_error(404), Failure.MISSING),
        (response_error(403), Failure.DENIED),
        (response_error(429), Failure.PASSING),
        (response_error(502), Failure.PASSING),
        (response_error(416), Failure.WRONG),
        (client_error(503, "SlowDown"), Failure.PASSING),
        (client_error(403, "InvalidAccessKeyId"), Failure.DENIED),
        (client_error(404, "NoSuchKey"), Failure.MISSING),
        (client_error(301, "PermanentRedirect"), Failure.WRONG),
        (FileNotFoundError("http://h/?s=hunter2"), Failure.MISSING),
        (PermissionError("Forbidden"), Failure.DENIED),
        (botocore.exceptions.NoCredentialsError(), Failure.DENIED),
        (aiohttp.ClientPayloadError("cut, http://u:hunter2@h/a?s=hunter2 (x)"), Failure.PASSING),
        (aiohttp.ServerDisconnectedError(), Failure.PASSING),
        (ConnectionResetError(104, "reset"), Failure.PASSING),
        (TimeoutError(), Failure.PASSING),
        (aiohttp.InvalidURL("http://u:hunter2@h/a"), Failure.WRONG),
    ],
)
def test_what_network_libraries_raise_is_understood(error: Exception, failure: Failure) -> None:
    found = files.as_remote_error(error, "https://user:hunter2@host/a?s=hunter2")
    assert found.failure is failure
    assert (found.url, "hunter2" in str(found)) == ("https://host/a", False)
    assert found.reason
    assert found.hint


def test_inputs_keep_secrets_too(server: Server) -> None:
    for url in (f"{server.address}/none?s=hunter2", "http://127.0.0.1:1/a?s=hunter2"):
        for action in (files.open_binary, files.stat):
            with pytest.raises(SourceError, match=r"cannot read 'http://127") as caught:
                action(url)
            assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_an_input_is_read_on_after_failures_that_pass(server: Server) -> None:
    url = f"{server.address}/a.bin"
    server.faults = [Fault("503", times=2)]
    assert files.stat(url).size == len(DATA)
    with files.open_binary(url) as file:
        server.faults = [Fault("cut", times=1), Fault("500", times=1), Fault("cut", times=1)]
        file.seek(100)
        assert file.read(5000) == DATA[100:5100]
        assert file.read() == DATA[5100:]
        assert not [fault for fault in server.faults if fault.times]
    server.faults = [Fault("403")]
    server.reset()
    with pytest.raises(SourceError, match="403 Forbidden"), files.open_binary(url) as file:
        file.read(10)
    assert len(server.log) <= 3, "what will not pass is not asked for again"


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/a", "gs://hunter2@bucket/a"])
def test_keys_in_front_of_a_bucket_are_refused_before_anything_is_asked(url: str) -> None:
    for action in (files.stat, files.open_binary, files.matches, read_bytes):
        with pytest.raises(UsageError, match="do not belong") as caught:
            action(url)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_web_server_gets_the_password_of_a_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    (tmp_path / "netrc").write_text("machine localhost login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with listening(Handler) as address:
        assert read_bytes(f"{address}/a") == b"ok"
        assert read_bytes(f"{address.replace('127.0.0.1', 'localhost')}/a") == b"ok"
    given = base64.b64encode(b"me:hunter2").decode()
    assert asked == [None, f"Basic {given}"]


def test_files_are_sent_listed_read_and_removed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    urls = [f"memory://sent/{name}" for name in ("a", "sub/b")]
    for url in urls:
        files.upload(tmp_path / "a", url)
    assert files.list_folder("memory://sent") == {"a": len(DATA), "sub": None}
    assert files.read_many([*urls, "memory://sent/none"]) == [DATA, DATA, None]
    files.download(urls[1], tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == DATA
    files.remove([*urls, "memory://sent/none"])
    assert files.read_many(urls) == [None, None]


def test_the_remote_layer_loads_fsspec_only_when_it_is_used() -> None:
    code = "import sys, tokenmill.files; assert not {'fsspec', 'asyncio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_tried_again_by_a_process_that_ends() -> None:
    pool, asked = ThreadPoolExecutor(1), list[int]()
    pool.shutdown()

    def ask() -> None:
        asked.append(1)
        pool.submit(int)

    with pytest.raises(RemoteError, match="cannot schedule"):
        files.persistently("s3://bucket/name", ask, attempts=5)
    assert asked == [1]
