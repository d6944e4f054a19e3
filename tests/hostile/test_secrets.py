"""Keys in addresses: refused where they stand before a server, and kept nowhere behind a '?'."""

from __future__ import annotations

import os
import re
import shlex
import traceback
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.command import tokenmill as tokenmill_command
from tests.hostile.attack import LONG, attack, tried
from tests.web import serve

import tokenmill
from tokenmill import files
from tokenmill.engines.load import find_tokenizer
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.interop.base import local_path
from tokenmill.store.layout import open_layout, visit_layout
from tokenmill.store.reader import open_files
from tokenmill.supervised.chat import with_template

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.web import Server

SECRET = "hunter2/x@y?z#w"
SCHEMES = ("s3", "s3a", "gs", "gcs", "hf", "http", "https", "HTTPS", "ftp", "sftp", "abfs")
ANY = st.characters(codec=None) | st.sampled_from("/@:?#%[]\\ \n&=+'\"")
BYTES = find_tokenizer("bytes")
TAKERS: tuple[Callable[[str], object], ...] = (
    files.is_remote,
    files.stat,
    files.open_binary,
    files.matches,
    files.read_bytes,
    find_tokenizer,
    open_layout,
    visit_layout,
    tokenmill.Store,
    lambda address: open_files(address, cache=None, cache_bytes=None),
    lambda address: local_path(address, hint=""),
    lambda address: with_template(BYTES, address),
    lambda address: tokenmill.build([address], tokenizer="bytes", out="none"),
    lambda address: tokenmill.layout(address, seq_len=8),
    lambda address: tokenmill.train(address),
    lambda address: tokenmill.train("none", out=address),
)


def told(error: BaseException) -> str:
    """All that a traceback would print, causes and notes included."""
    return "".join(traceback.format_exception(error))


@attack(short=60, long=3000)
@given(
    scheme=st.sampled_from(SCHEMES),
    user=st.text(ANY.filter(lambda c: c not in "/\\?#[")),
    password=st.builds("{}hunter2{}".format, st.text(ANY), st.text(ANY)),
    taker=st.sampled_from(TAKERS),
)
@example(scheme="s3", user="AKIA", password="ab/hunter2", taker=files.is_remote)
@example(scheme="http", user="me", password="12345/@hunter2", taker=files.is_remote)
@example(scheme="https", user="me", password="p@hunter2@d", taker=files.is_remote)
@example(scheme="sftp", user="me", password="://hunter2", taker=files.is_remote)
def test_no_password_of_any_characters_is_taken_or_told(
    scheme: str, user: str, password: str, taker: Callable[[str], object]
) -> None:
    for slashes in ("://", ":/"):
        with pytest.raises(UsageError) as caught:
            taker(f"{scheme}{slashes}{user}:{password}@place/a.jsonl")
        assert caught.value.hint
        assert "hunter2" not in f"{caught.value}"
        assert caught.value.__cause__ is None
    tried("an address with a password")


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/a:b@c/d?e=f",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/a",
        "s3://bucket/part-?.jsonl",
        "hf://datasets/org/name@main/a",
        "http://host:8000/a?X-Amz-Signature=s&user=a@b".replace("@", "%40"),
        "https://host/@user/a:b",
        "http://[::1]:8000/a",
        "abfs://container@account.dfs.core.windows.net/a",
        "sftp://me@host/a",
        "github://org:repo@main/a",
        "memory://a/b@c",
    ],
)
def test_addresses_without_passwords_are_taken(address: str) -> None:
    assert files.is_remote(address)


def test_a_signature_in_the_address_of_an_object_store_is_refused() -> None:
    for name in ("X-Amz-Signature", "x-goog-signature", "sig", "token", "AWSAccessKeyId"):
        with pytest.raises(UsageError) as caught:
            files.is_remote(f"s3://bucket/a?x=1&{name}=hunter2")
        assert "hunter2" not in str(caught.value)


COMMANDS = (
    "build A -t bytes -o out",
    "build x.jsonl -t A -o out --debug",
    "build x.jsonl -t bytes -oA",
    "build x.jsonl -t bytes --out=A",
    "build x.jsonl -t bytes -o out --format chat --chat-template A",
    "build x.jsonl -t bytes -o out --monitor A",
    "build x.jsonl -t bytes -o out --runner ray --address A",
    "finish A",
    "plan A -t bytes",
    "inspect A --json",
    "verify A --debug",
    "layout A --seq-len A",
    "export A --to mds --out out",
    "import A -t bytes --out out",
    "convert A --to mds --out A",
    "train A -o A --debug",
    "diagnose A -t A --report A --stalls A",
    "demo -o A",
)


@pytest.mark.parametrize("command", COMMANDS if LONG else COMMANDS[1:18:6])
@pytest.mark.parametrize("scheme", ["s3", "https"] if LONG else ["https"])
def test_no_command_takes_or_tells_a_password(tmp_path: Path, command: str, scheme: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    words = [
        re.sub("A$", f"{scheme}://AKIA:{SECRET}@place/a", word) for word in shlex.split(command)
    ]
    done = run(tmp_path, *words)
    assert done.returncode == (1 if "--debug" in words else 2), done
    said = done.stdout + done.stderr
    assert "do not belong in an address" in said
    for part in ("AKIA", "hunter2", "place"):
        assert part not in said, done
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"], "nothing was written"
    tried("a command with a password in an address")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    variables = {**os.environ, **places}
    return tokenmill_command(*words, folder=folder, code=None, environment=variables)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="needs aiohttp, which is not here")
    folder = tmp_path_factory.mktemp("served")
    (folder / "a.jsonl").write_text('{"text": "a b c"}\n' * 20)
    tokenmill.build([folder / "a.jsonl"], tokenizer="bytes", out=folder / "store")
    with serve(folder) as server:
        yield server


SIGNED = (
    ("build A/a.jsonl -t bytes -o out --monitor line.jsonl --profile profile.json", 0),
    ("verify A/store --debug", 0),
    ("inspect A/store", 0),
    ("build A/none.jsonl -t bytes -o x --debug", 1),
    ("build A/a.jsonl A/none.jsonl -t bytes -o x", 1),
    ("build A/a.jsonl -t A/a.jsonl -o x", 1),
    ("build A/a.jsonl -t bytes -o x --text-field no", 1),
    ("build A/a.jsonl -t bytes -o A/x", 2),
    ("plan A/a.jsonl -t bytes", 0),
    ("layout A/store --seq-len 8 --packing best-fit", 0),
    ("export A/store --to megatron --out exported", 0),
    ("inspect A/none", 1),
    ("inspect A/store --json --doc 0", 0),
    ("import A/a.jsonl -t bytes --out x", 2),
    ("diagnose A/a.jsonl -t bytes --model tiny --seconds 0.05 --report page.html", 0),
    ("train A/store -o run --model tiny --seq-len 8 --steps 1 --batch-tokens 16", 0),
    ("train A/none -o run --model tiny --seq-len 8 --steps 1 --batch-tokens 16", 1),
)


@pytest.mark.parametrize(("command", "code"), SIGNED if LONG else SIGNED[:4])
def test_a_signature_is_in_no_output_and_no_file(
    tmp_path: Path, server: Server, command: str, code: int
) -> None:
    query = "X-Amz-Signature=hunter2')x&sig=hunter2"
    words = [
        re.sub("^A(/.*)$", lambda found: f"{server.address}{found[1]}?{query}", word)
        for word in shlex.split(command)
    ]
    done = run(tmp_path, *words)
    assert done.returncode == code, done
    assert "hunter2" not in done.stdout + done.stderr, done
    assert "this is a fault" not in done.stderr
    for path in tmp_path.rglob("*"):
        assert "hunter2" not in path.name
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path
    tried("a command with a signature in an address")


@attack(short=60, long=3000)
@given(
    query=st.builds("{}hunter2{}".format, st.text(ANY), st.text(ANY)),
    kind=st.sampled_from([OSError, ValueError, TimeoutError]),
)
def test_no_error_of_a_library_tells_what_is_behind_the_question_mark(
    query: str, kind: type[Exception]
) -> None:
    url = f"https://host/a.jsonl?{query}"
    found = files.as_remote_error(kind(f"cannot get {url} (or {query})"), url)
    assert "hunter2" not in f"{found.url} {found.reason} {found.hint} {found}"
    tried("an error of a network library")


def test_an_error_is_told_without_a_cause_that_tells_more(server: Server) -> None:
    for action in (files.stat, files.open_binary, files.read_bytes, tokenmill.Store):
        with pytest.raises((TokenmillError, OSError)) as caught:
            action(f"{server.address}/none.jsonl?sig={SECRET}")
        assert SECRET not in told(caught.value)
