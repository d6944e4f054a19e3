"""Parts of a build, in any order, twice, or killed: finished, they are the plain build's bytes."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builder.stores import make_texts, tree, write_jsonl

import tokenmill
from tokenmill.builder.plan import BuildPart, parse_part, part_of
from tokenmill.errors import BuildError, StoreError, StoreLockedError, UsageError
from tokenmill.store.layout import StoreLayout, StoreLock, unseal

if TYPE_CHECKING:
    from tokenmill.builder.progress import BuildResult

INPUTS = ["data", "more.jsonl.gz"]
OPTIONS: dict[str, Any] = {"unit_bytes": 3000, "val": 0.2, "max_rejects": 1.0, "memory": "1GB"}
COMMAND = """
import sys, tokenmill
tokenmill.build(["data", "more.jsonl.gz"], tokenizer="bytes", out=sys.argv[1], part=sys.argv[2],
                workers=2, unit_bytes=3000, val=0.2, max_rejects=1.0, memory="1GB")
"""


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Plain, compressed and small text files, and the store that one build makes of them."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for number in range(3):
        write_jsonl(Path(f"data/{number}.jsonl"), [*make_texts(60, seed=number), b"{bad", ""])
    for number in range(4):
        Path(f"data/note{number}.txt").write_text(f"note {number}")
    raw = write_jsonl(Path("raw"), make_texts(80, seed=9)).read_bytes()
    Path("more.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
    build("whole")
    found = tree(Path("whole"))
    assert sum(name.startswith("shards/") and name.endswith(".json") for name in found) > 20
    return found


def build(out: str, part: str | None = None, **options: Any) -> BuildResult:
    settings = {"tokenizer": "bytes", "serial": "workers" not in options, **OPTIONS, **options}
    return tokenmill.build(settings.pop("inputs", INPUTS), out=out, part=part, **settings)


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_in_any_order_and_some_twice_give_the_bytes_of_one_build(
    whole: dict[str, bytes], parts: int
) -> None:
    order = [*range(1, parts + 1), 1]
    random.Random(parts).shuffle(order)
    results = {number: build("store", f"{number}/{parts}") for number in order}
    assert not Path("store/tokenmill.json").exists()
    again = build("store", f"1/{parts}")
    assert (again.units_built, again.part) == (0, f"1/{parts}")
    finished = tokenmill.finish("store")
    assert tree(Path("store")) == whole
    totals = [result.totals for result in results.values()]
    assert sum(each.tokens for each in totals) == finished.totals.tokens > 0
    assert sum(each.rejected for each in totals) == finished.totals.rejected == 3
    assert sum(result.units_total for result in results.values()) == finished.units_total
    log = Path("store/runs.jsonl")
    runs = [unseal(line, path=log) for line in log.read_bytes().splitlines(keepends=True)]
    assert {run.get("part") for run in runs} == {f"{n}/{parts}" for n in order} | {None}
    assert tokenmill.finish("store").nothing_to_do
    assert build("store", f"1/{parts}").nothing_to_do
    assert tree(Path("store")) == whole


def test_parts_at_the_same_time_and_one_killed_leave_each_other_alone(
    whole: dict[str, bytes],
) -> None:
    command = [sys.executable, "-c", COMMAND, "store"]
    victim = subprocess.Popen([*command, "1/3"])
    others = [subprocess.Popen([*command, part]) for part in ("2/3", "3/3", "2/3")]
    started = time.monotonic()
    while not list(Path().glob("store/tmp/part-1-of-3-*/*")) and victim.poll() is None:
        assert time.monotonic() - started < 60
        time.sleep(0.001)
    victim.kill()
    victim.wait()
    assert [other.wait(60) for other in others] == [0, 0, 0]
    build("store", "1/3")
    tokenmill.finish("store")
    assert tree(Path("store")) == whole


def test_finish_names_what_is_missing_and_the_part_that_has_it(whole: dict[str, bytes]) -> None:
    # The compressed file belongs to one part as a whole.
    done = {number: build("store", f"{number}/5").units_built for number in (1, 2, 4, 5)}
    assert all(done.values())
    before = tree(Path("store"))
    with pytest.raises(
        BuildError, match=r"lacks bytes [\d,]+ to [\d,]+ of 'data/\d\.jsonl' \(part 3/5\)"
    ) as caught:
        tokenmill.finish("store")
    assert "--part 3/5" in str(caught.value.hint)
    assert tree(Path("store")) == before
    build("store", "3/5")
    tokenmill.finish("store")
    assert tree(Path("store")) == whole


def test_the_number_of_parts_may_change_on_the_way(whole: dict[str, bytes]) -> None:
    build("store", "1/2")
    for number in (1, 2, 3):
        build("store", f"{number}/3")
    tokenmill.finish("store")
    assert tree(Path("store")) == whole


def test_a_plain_build_takes_over_what_parts_have_done(whole: dict[str, bytes]) -> None:
    part = build("store", "2/3")
    result = build("store")
    assert result.units_resumed == part.units_built > 0
    assert tree(Path("store")) == whole


def test_new_files_are_added_to_a_finished_store_in_parts(whole: dict[str, bytes]) -> None:
    write_jsonl(Path("data/new.jsonl"), make_texts(60, seed=20))
    for number in (1, 2):
        build("whole", f"{number}/2")
    assert Path("whole/tokenmill.json").exists()
    tokenmill.finish("whole")
    build("fresh")
    assert tree(Path("whole")) == tree(Path("fresh"))


def test_a_limit_is_the_same_over_all_parts(whole: dict[str, bytes]) -> None:
    for number in (3, 1, 2):
        build("store", f"{number}/3", limit=100, inputs="data/*.jsonl")
    tokenmill.finish("store")
    build("fresh", limit=100, inputs="data/*.jsonl")
    assert tree(Path("store")) == tree(Path("fresh"))


def test_parts_with_other_options_or_inputs_are_refused(whole: dict[str, bytes]) -> None:
    build("store", "1/2")
    with pytest.raises(
        StoreError, match="part 1/2 of 'store' was started with other values of val_"
    ):
        build("store", "2/2", val=0.5)
    with pytest.raises(StoreError, match="store 'whole' was built with another"):
        build("whole", "1/900", eos=False)
    build("store", "2/2", inputs="data")
    with pytest.raises(StoreError, match=r"part 1/2 and part 2/2 were started with different"):
        tokenmill.finish("store")
    with pytest.raises(UsageError, match="cannot prune"):
        build("store", "2/2", prune=True)


def test_files_that_are_gone_are_dropped_by_finish_only_if_asked(whole: dict[str, bytes]) -> None:
    Path("data/0.jsonl").unlink()
    build("whole", "1/2")
    with pytest.raises(StoreError, match=r"data/0\.jsonl"):
        tokenmill.finish("whole")
    tokenmill.finish("whole", prune=True)
    with pytest.raises(UsageError, match="is finished, and what its parts were asked for"):
        tokenmill.finish("whole", prune=True)
    build("fresh")
    assert tree(Path("whole")) == tree(Path("fresh"))


def test_a_build_and_parts_keep_each_other_out_and_parts_do_not(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    refused = pytest.raises(StoreLockedError, match="parts of a build are at work")
    with StoreLock(layout, parts=True), StoreLock(layout, parts=True), refused:
        StoreLock(layout).acquire()
    with StoreLock(layout), pytest.raises(StoreLockedError, match="is building into"):
        StoreLock(layout, parts=True).acquire()


def test_inputs_with_a_key_are_named_again_and_never_kept(whole: dict[str, bytes]) -> None:
    from tokenmill.store.facts import read_records, write_record

    build("store", "1/1")
    layout = StoreLayout(Path("store"))
    (record,) = read_records(layout)
    write_record(layout, record.but(inputs=None))
    with pytest.raises(UsageError, match="did not keep the names of their inputs"):
        tokenmill.finish("store")
    tokenmill.finish("store", INPUTS)
    assert tree(Path("store")) == whole


def test_a_store_that_nobody_built_cannot_be_finished(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "memory://nothing"):
        with pytest.raises(StoreError, match=f"there is no store at '{name}', and no part of one"):
            tokenmill.finish(name)
    (tmp_path / "shards").mkdir()
    with pytest.raises(StoreError, match="not built in parts, and its build has not finished"):
        tokenmill.finish(tmp_path)


@given(st.text(min_size=1, max_size=20), st.integers(1, 500))
def test_every_unit_has_exactly_one_part(name: str, parts: int) -> None:
    owners = [number for number in range(1, parts + 1) if BuildPart(number, parts).has(name)]
    assert owners == [part_of(name, parts)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is not a part of a build") for text in ("3", "a/b", "-1/4", "1/2/3", "")),
        *((text, "parts are counted from 1") for text in ("0/4", "5/4")),
        ("1/0", "no parts make no build"),
    ],
)
def test_what_is_no_part_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_part(text)


def test_parts_share_the_units_evenly() -> None:
    names = [f"corpus-0123456789abcdef-{index:05d}" for index in range(6400)]
    counts = [0] * 64
    for name in names:
        counts[part_of(name, 64) - 1] += 1
    assert min(counts) > 60
    assert max(counts) < 145


def test_parts_build_into_a_store_behind_a_url(whole: dict[str, bytes]) -> None:
    import fsspec

    url = "memory://parts/store"
    for number in (2, 3, 1, 2):
        build(url, f"{number}/3")
    tokenmill.finish(url)
    bucket = fsspec.filesystem("memory")
    root = "/parts/store/"
    found = {path.removeprefix(root): bucket.cat(path) for path in bucket.find(root)}
    del found["runs.jsonl"]
    assert found == whole
