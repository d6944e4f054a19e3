"""Builds into an object store: the bytes of the local build, whatever the server or a kill does."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from tests.builder.stores import make_texts, tree, write_jsonl
from tests.command import tokenmill as tokenmill_command
from tests.command import tokenmill_here
from tests.loader import builds
from tests.store.s3_server import (
    BUCKET,
    S3,
    SECRET,
    Refusal,
    forget_connections,
    remote_tree,
    s3_session,
)

import tokenmill
from tokenmill import files as files_module
from tokenmill.errors import BuildError, StoreError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.store import following
from tokenmill.store.facts import Building, Receipt, facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.builder.progress import BuildResult

OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "val": 0.2, "unit_bytes": 20_000, "memory": "2GB"}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_session() as server, pytest.MonkeyPatch.context() as patch:
        # What a build leaves where temporary files lie is looked at.
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
        patch.setattr(tempfile, "tempdir", None)
        yield server


@pytest.fixture
def s3(server: S3) -> S3:
    server.log.clear()
    server.refusals.clear()
    server.slow_downs, server.denied, server.delay_seconds = 0, "", 0.0
    return server


@pytest.fixture
def out(s3: S3) -> str:
    return f"s3://{BUCKET}/{next(_NUMBERS)}/store"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        texts = [*make_texts(120, seed=number), b"{bad", ""]
        write_jsonl(folder / f"{number}.jsonl", texts)
    return folder


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store of the local build."""
    store = tmp_path_factory.mktemp("local") / "store"
    build(corpus, store)
    return tree(store)


def build(corpus: Path, out: str | Path, **options: Any) -> BuildResult:
    given = {**OPTIONS, "serial": True, "max_rejects": 1.0, **options}
    return tokenmill.build(corpus, out=out, **given)


def scratch() -> set[Path]:
    return set(Path(tempfile.gettempdir()).iterdir())


def test_a_build_into_a_bucket_gives_the_bytes_of_the_local_one(
    corpus: Path, expected: dict[str, bytes], out: str, s3: S3
) -> None:
    result = build(corpus, out, workers=2, serial=False)
    log = [*s3.log]
    assert remote_tree(out) == expected
    assert (result.store, result.units_built) == (out, len(receipts(expected)))
    lists = [at for at, line in enumerate(log) if "list-type" in line]
    writes = [at for at, line in enumerate(log) if line.startswith("PUT")]
    assert max(lists) < min(writes), "no commit depends on a listing, which may be behind"
    puts = [line.split("?")[0] for line in s3.log if line.startswith("PUT")]
    assert puts[-2].endswith("tokenmill.json"), "the manifest is one request, after all units"
    assert puts[-1].endswith("runs.jsonl")
    for unit in receipts(expected):
        at = puts.index(path_of(out, unit))
        files = [path_of(out, name) for name in expected if name.startswith(unit[:-5])]
        assert max(map(puts.index, files)) == at, "a receipt goes after the files of its unit"
    assert not scratch(), "nothing stays behind on this machine"
    with tokenmill.Store(out) as store:
        assert len(store) == result.splits["train"].documents


def receipts(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.startswith("shards/") and name.endswith(".json")]


def path_of(url: str, name: str) -> str:
    return f"PUT {url.removeprefix('s3:/')}/{name}"


def test_the_same_command_again_reads_the_receipts_and_writes_nothing(
    corpus: Path, out: str, s3: S3
) -> None:
    build(corpus, out)
    s3.log.clear()
    assert build(corpus, out).nothing_to_do
    assert {line.split()[0] for line in s3.log} == {"GET"}
    lists = [line for line in s3.log if "list-type" in line]
    assert len(lists) == 3, "each folder is listed once"


def test_new_input_is_added_and_changed_input_replaced_as_in_a_folder(
    corpus: Path, out: str, tmp_path: Path
) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    for path in corpus.iterdir():
        (inputs / path.name).write_bytes(path.read_bytes())
    for store in (out, tmp_path / "store"):
        build(inputs, store)
    write_jsonl(inputs / "1.jsonl", make_texts(30, seed=7))
    write_jsonl(inputs / "3.jsonl", make_texts(30, seed=8))
    for store in (out, tmp_path / "store"):
        build(inputs, store)
    assert remote_tree(out) == tree(tmp_path / "store")
    (inputs / "0.jsonl").unlink()
    with pytest.raises(StoreError, match=f"'{out}' has .* not among the inputs"):
        build(inputs, out)
    for store in (out, tmp_path / "store"):
        build(inputs, store, prune=True, rebuild=True, val=0.0)
    assert remote_tree(out) == tree(tmp_path / "store")


@pytest.mark.parametrize("kinds", [("500", "503"), ("cut", "lost")])
def test_requests_that_fail_are_made_again(
    kinds: tuple[str, str], corpus: Path, expected: dict[str, bytes], out: str, s3: S3
) -> None:
    matches = ["list-type", ".bin", ".idx", "00000.json", "rejects/", "tokenmill.json"]
    s3.refusals = [Refusal(kind, match, times=1) for kind in kinds for match in matches]
    build(corpus, out)
    assert remote_tree(out) == expected
    assert sum(refusal.times for refusal in s3.refusals) == 0, "every fault was met"


def test_large_files_go_in_parts_that_are_sent_again_one_by_one(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "PART_BYTES", 5 << 20)
    data = os.urandom(23 << 20)
    (tmp_path / "large").write_bytes(data)
    s3.refusals = [Refusal("503", "partNumber=2", times=1), Refusal("cut", "partNumber=4", times=1)]
    url = f"s3://{BUCKET}/parts/large"
    files_module.upload(tmp_path / "large", url)
    assert files_module.read_bytes(url) == data
    parts = [line for line in s3.log if "partNumber" in line]
    assert len(parts) >= 5 + 2
    assert sum("uploads" in line for line in s3.log) == 1, "one upload, of which parts were resent"


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (Refusal("403", "PUT"), r"cannot write 's3://.*403 Forbidden; finished units are kept"),
        (Refusal("403", "list-type"), r"cannot be read.*403 Forbidden|not given.*403"),
    ],
)
def test_a_refusal_is_told_at_once_and_without_secrets(
    refusal: Refusal, says: str, corpus: Path, out: str, s3: S3
) -> None:
    s3.refusals = [refusal]
    with pytest.raises((BuildError, StoreError), match=says) as caught:
        build(corpus, out)
    told = "".join(traceback.format_exception(caught.value))
    assert "credentials" in str(caught.value.hint)
    assert SECRET not in told
    assert sum(refusal.match in line for line in s3.log) <= 2, "asking again would not help"
    assert not scratch()


def test_only_we_ask_again_and_no_library_below(
    s3: S3, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "REQUEST_ATTEMPTS", 1)
    forget_connections()
    s3.refusals = [Refusal("503", "/a")]
    with pytest.raises(files_module.RemoteError, match=r"503 .* attempts"):
        files_module.read_bytes(f"{out}/a")
    forget_connections()
    assert len(s3.log) == files_module.OPENING_ATTEMPTS


def test_a_large_file_is_downloaded_without_parts_in_memory(
    s3: S3, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "default_block_size", 1 << 20)
    forget_connections()
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    files_module.upload(tmp_path / "a", f"{out}/a")
    s3.log.clear()
    files_module.download(f"{out}/a", tmp_path / "b")
    forget_connections()
    assert (tmp_path / "b").read_bytes() == bytes(3 << 20)
    assert [line for line in s3.log if "bytes=" in line or line.startswith("HEAD")] == []


def test_a_bucket_that_is_not_there_is_named(corpus: Path, s3: S3) -> None:
    with pytest.raises(BuildError, match=r"'s3://no-such-bucket/.*bucket is not there") as caught:
        build(corpus, "s3://no-such-bucket/store")
    assert "make the bucket first" in str(caught.value.hint)


def test_a_key_in_the_address_is_refused_and_not_repeated(corpus: Path, s3: S3) -> None:
    with pytest.raises(UsageError) as caught:
        build(corpus, f"s3://the-key:{SECRET}@{BUCKET}/store")
    told = "".join(traceback.format_exception(caught.value))
    assert "do not belong in an address" in told
    assert SECRET not in told
    assert not any(SECRET in line for line in s3.log)


@pytest.mark.parametrize("url", ["https://host/store", "hf://datasets/org/name"])
def test_what_is_only_read_is_refused_with_the_way_out(corpus: Path, url: str) -> None:
    with pytest.raises(UsageError, match="is for reading"):
        build(corpus, url)


def test_a_place_with_other_things_in_it_is_left_alone(corpus: Path, out: str) -> None:
    fsspec.filesystem("s3").pipe_file(f"{out}/thesis.tex", b"years of work")
    with pytest.raises(StoreError, match=r"holds other things \('thesis.tex'"):
        build(corpus, out)
    assert remote_tree(out) == {"thesis.tex": b"years of work"}


def test_secrets_are_nowhere_in_the_store_in_files_or_in_what_is_printed(
    corpus: Path, out: str, s3: S3, tmp_path: Path
) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        # An empty scratch folder for each: what a command leaves there is looked at too.
        here, scratch = Path.cwd(), str(tmp_path)
        done = tokenmill_command(*arguments, "--debug", folder=here, code=code, TMPDIR=scratch)
        return done.stdout + done.stderr

    command = ["build", str(corpus), "-t", "bytes", "-o", out, "--memory", "1GB"]
    command += ["--max-rejects", "1", "--workers", "1"]
    files = ("--profile", str(tmp_path / "profile"), "--monitor", str(tmp_path / "monitor"))
    said = run(*command, "--part", "1/2", *files)
    s3.refusals = [Refusal("403", "PUT")]
    said += run(*command, "--part", "2/2", code=1)
    s3.refusals = []
    kept = {f"part: {name}": data for name, data in remote_tree(out).items()}
    assert any(name.startswith("part: parts/") for name in kept)
    said += run(*command, "--part", "2/2")
    for name in ("finish", "verify"):
        done = tokenmill_here(name, out, "--debug", folder=tmp_path)
        said += done.stdout + done.stderr
    assert "403 Forbidden" in said
    assert out in said
    kept |= remote_tree(out)
    kept["log"] = fsspec.filesystem("s3").cat_file(f"{out}/runs.jsonl")
    kept |= {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert str(tmp_path / "monitor") in kept
    for name, data in {"what was printed": said.encode(), **kept}.items():
        for secret in (SECRET, "the-key"):
            assert secret.encode() not in data, name


def test_parts_and_finish_work_in_a_bucket_too(
    corpus: Path, expected: dict[str, bytes], out: str
) -> None:
    for part in ("2/2", "1/2"):
        build(corpus, out, part=part)
    tokenmill.finish(out)
    assert remote_tree(out) == expected


def test_a_store_in_a_bucket_is_verified_where_it_lies(
    corpus: Path, expected: dict[str, bytes], out: str
) -> None:
    build(corpus, out)
    before = scratch()
    report = tokenmill.verify(out, sample=20)
    assert (report.ok, report.documents_reencoded, report.mismatches) == (True, 20, 0)
    assert not report.notes
    assert report.bytes == sum(map(len, expected.values()))
    s3fs = fsspec.filesystem("s3")
    first, second, *_ = sorted(name for name in expected if name.endswith(".bin"))
    s3fs.pipe_file(f"{out}/{first}", bytes([expected[first][0] ^ 1]) + expected[first][1:])
    s3fs.rm_file(f"{out}/{second}")
    found = {finding.file: finding.problem for finding in tokenmill.verify(out).findings}
    assert set(found) == {first, second}
    assert "checksum" in found[first]
    assert found[second] == "is missing"
    assert scratch() == before
    with pytest.raises(StoreError, match=r"no store at 's3://bucket/nothing'"):
        tokenmill.verify(f"s3://{BUCKET}/nothing")


def test_other_filesystems_work_too(corpus: Path, expected: dict[str, bytes]) -> None:
    out = "memory://builds/store"
    build(corpus, out)
    assert remote_tree(out) == expected
    assert build(corpus, out).nothing_to_do


COMMAND = """
import json, sys, tokenmill
corpus, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenmill.build(corpus, out=out, workers=1, max_rejects=1.0, **options)
"""


MEASURED = """
import json, sys, tokenmill
result = tokenmill.build(sys.argv[1], out=sys.argv[2], **json.loads(sys.argv[3]))
print(result.peak_memory_bytes, result.totals.tokens)
"""


def start(corpus: Path, out: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COMMAND, str(corpus), out, json.dumps(OPTIONS)])


def wait_for(s3: S3, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not any(text in line for line in [*s3.log]) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(".bin", marks=pytest.mark.slow),
        "00001.json",
        pytest.param("tokenmill.json", marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_and_run_again_the_store_is_the_same(
    moment: str, corpus: Path, expected: dict[str, bytes], out: str, s3: S3
) -> None:
    s3.delay_seconds = 0.02
    process = start(corpus, out)
    wait_for(s3, f"PUT {out.removeprefix('s3:/')}", process)
    wait_for(s3, moment, process)
    process.kill()
    assert process.wait(20) in (-signal.SIGKILL, 0)
    s3.delay_seconds = 0.0
    wait_until_quiet(s3)
    left = remote_tree(out)
    assert Building.from_bytes(left.pop("building.json"), path="").failed is None
    for name, data in left.items():
        assert data == expected[name], f"{name}: what is there is whole"
    assert_claims_hold(out)
    build(corpus, out)
    assert remote_tree(out) == expected


def wait_until_quiet(s3: S3) -> None:
    """Workers of a killed build end by themselves."""
    seen = -1
    while seen != len(s3.log):
        seen = len(s3.log)
        time.sleep(0.5)


def assert_claims_hold(url: str) -> None:
    """Every file that a receipt names is there."""
    found = remote_tree(url)
    for name in receipts(found):
        for file, facts in Receipt.from_bytes(found[name], path=name).files.items():
            assert facts_of(found[f"shards/{file}"]) == facts


@pytest.mark.slow
def test_two_builds_at_once_make_the_same_store(
    corpus: Path, expected: dict[str, bytes], out: str
) -> None:
    processes = [start(corpus, out) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert remote_tree(out) == expected


def test_the_folder_of_a_killed_build_is_removed_by_the_next_one(
    corpus: Path, out: str, s3: S3
) -> None:
    s3.delay_seconds = 0.05
    before = scratch()
    process = start(corpus, out)
    wait_for(s3, ".bin", process)
    process.kill()
    process.wait()
    s3.delay_seconds = 0.0
    wait_until_quiet(s3)
    (left,) = scratch() - before
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    build(corpus, out)
    assert scratch() == before


def test_a_receipt_that_vanished_or_is_damaged_means_the_unit_is_built_again(
    corpus: Path, expected: dict[str, bytes], out: str
) -> None:
    build(corpus, out)
    s3fs = fsspec.filesystem("s3")
    first, second, third, *_ = receipts(expected)
    s3fs.rm_file(f"{out}/{first}")
    s3fs.pipe_file(f"{out}/{second}", expected[second][:-7])
    s3fs.rm_file(f"{out}/{third.replace('.json', '.bin')}")
    result = build(corpus, out)
    assert result.units_built == 3
    assert remote_tree(out) == expected


@pytest.mark.slow
def test_a_build_into_a_bucket_keeps_its_memory_budget(s3: S3, out: str, tmp_path: Path) -> None:
    budget = 640_000_000
    write_jsonl(tmp_path / "a.jsonl", ["the mill grinds what the river brings " * 250] * 4000)
    options = {"tokenizer": "bytes", "workers": 1, "memory": budget, "unit_bytes": 20_000_000}
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "a.jsonl"), out, json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    peak, tokens = map(int, done.stdout.split())
    assert tokens > 35_000_000
    assert sum("partNumber" in line for line in s3.log) >= 8, "the units are sent in parts"
    assert 0.2 * budget < peak <= budget


def test_a_worker_on_another_machine_brings_what_it_needs(out: str, tmp_path: Path) -> None:
    from tokenmill.store.layout import join_layout, open_layout

    fsspec.filesystem("s3").pipe_file(f"{out}/tokenizer/vocab.txt", b"a b c")
    driver = open_layout(out)
    near = join_layout(str(driver.root), url=out, token="t")
    far = join_layout(str(tmp_path / "not-here"), url=out, token="t")
    assert near.root == driver.root
    assert far.root != driver.root
    far.upstream.download([far.tokenizer / "vocab.txt", far.tokenizer / "none.txt"])
    assert [path.read_bytes() for path in far.tokenizer.iterdir()] == [b"a b c"]
    for layout in (near, far):
        layout.upstream.close()
    assert (driver.root.is_dir(), far.root.exists()) == (True, False)
    driver.upstream.close()
    assert not driver.root.exists()


def test_a_build_into_a_bucket_is_followed(
    tmp_path: Path, out: str, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "REMOTE_POLL_SECONDS", 0.05)
    s3.refusals = [Refusal("503", "building.json", times=2)]
    rows: dict[str, Any] = {"split": "train", "seq_len": 1024, "batch_size": 8}
    with builds.building(builds.options(builds.make_texts(tmp_path), out), units=8) as build:
        loader = Loader(out, follow=True, **rows)
        batches = iter(loader)
        found = [next(batches) for _ in range(16)]
        assert loader.follower is not None
        assert not loader.follower.is_finished
        state = loader.state_dict()
        build.let(1000)
        found += [next(batches) for _ in range(30)]
    finished = Loader(out, shuffle="nearby", **rows)
    again = [batch for batch, _ in zip(finished, range(46), strict=False)]
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(found, again, strict=True))
    finished.load_state_dict(state)
    assert np.array_equal(next(iter(finished)).input_ids, found[16].input_ids)
