"""Builds of rows that a Python program has: what they are, how they resume, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.builder.stores import documents, make_texts, tree
from tests.interop import peers

import tokenmill
from tokenmill.errors import (
    MemoryBudgetError,
    SourceError,
    TokenizerError,
    TokenmillError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS: list[dict[str, Any]] = [
    {"text": text, "n": number} for number, text in enumerate(make_texts(200))
]


def build(rows: object, out: object, **options: Any) -> tokenmill.BuildResult:
    given: dict[str, Any] = {"tokenizer": "bytes", "serial": True, **options}
    return tokenmill.build(rows, out=out, **given)  # type: ignore[arg-type]


def expected(rows: list[dict[str, Any]] = ROWS) -> list[list[int]]:
    return [[*row["text"].encode(), 256] for row in rows]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ROWS,
        lambda: iter(ROWS),
        lambda: tuple(ROWS),
        lambda: (row["text"] for row in ROWS),
        lambda: pa.Table.from_pylist(ROWS),
        lambda: pa.Table.from_pylist(ROWS).to_reader(max_chunksize=7),
        lambda: pa.Table.from_pylist(ROWS).combine_chunks().to_batches()[0],
        lambda: pa.chunked_array([[row["text"] for row in ROWS]]),
        lambda: pa.Table.from_pylist(ROWS).set_column(
            0, "text", pa.array([row["text"] for row in ROWS]).dictionary_encode()
        ),
    ],
    ids=["list", "iterator", "tuple", "texts", "table", "reader", "batch", "column", "dictionary"],
)
def test_rows_are_built_whatever_holds_them(make: Any, tmp_path: Path) -> None:
    result = build(make(), tmp_path / "s")
    assert documents(tmp_path / "s") == expected()
    assert (result.totals.rows, result.totals.documents) == (200, 200)
    with tokenmill.Store(tmp_path / "s") as store:
        origin = store.source(7)
    assert (origin.path.partition(".")[0], origin.row) == ("python:rows", 7)
    assert not (tmp_path / "s" / ".rows").exists()
    report = tokenmill.verify(tmp_path / "s", sample=5)
    assert (report.ok, report.documents_unavailable) == (True, 5)
    assert "rows of a Python program" in report.notes[0].problem
    assert build(make(), tmp_path / "s").nothing_to_do


PEERS = """
import json, sys
import datasets, pandas, polars
import tokenmill

out, rows = sys.argv[1], json.loads(sys.argv[2])
datasets.disable_progress_bars()
dataset = datasets.Dataset.from_list(rows)
frame = pandas.DataFrame(rows)
objects = {
    "dataset": dataset,
    "chosen": dataset.shuffle(seed=3).select(range(50)),
    "streamed": dataset.to_iterable_dataset(),
    "splits": datasets.DatasetDict(train=dataset, validation=dataset.select(range(9))),
    "frame": frame,
    "part of a frame": frame[frame.n % 2 == 1],
    "series": frame["text"],
}
kinds = polars.Enum(row["text"] for row in rows)
frame = polars.DataFrame(rows, schema_overrides={"text": kinds})
objects |= {
    "polars": polars.DataFrame(rows),
    "polars chunks": polars.concat([frame.head(50), frame.tail(150)], rechunk=False),
    "polars series": polars.DataFrame(rows)["text"],
}
found = {}
for name, rows in objects.items():
    options = {"tokenizer": "bytes", "out": f"{out}/{name}", "serial": True}
    result = tokenmill.build(rows, **options)
    again = tokenmill.build(rows, **options)
    with tokenmill.Store(f"{out}/{name}", split="train") as store:
        texts = [store.decode(number).removesuffix("<|endoftext|>") for number in range(len(store))]
    whole = objects["dataset"] if name == "splits" else rows
    theirs = [*rows] if "series" in name else whole["text"]
    if name == "streamed":
        theirs = [row["text"] for row in rows]
    splits = {split: total.documents for split, total in result.splits.items()}
    found[name] = [texts == [*theirs], again.nothing_to_do, splits]
filtered = tokenmill.build(
    dataset, tokenizer="bytes", out=f"{out}/where", where="n >= 150", serial=True
)
found["where"] = [filtered.totals.filtered, dataset.filter(lambda row: row["n"] < 150).num_rows]
print(json.dumps(found))
"""


def test_datasets_and_frames_are_built_as_they_are_read(tmp_path: Path) -> None:
    peers.require("polars")
    source = Path(tokenmill.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PEERS, str(tmp_path), json.dumps(ROWS)],
        capture_output=True,
        text=True,
        timeout=peers.SECONDS,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{peers.PEERS}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("where") == [150, 150]
    counts = {"chosen": {"train": 50}, "splits": {"train": 200, "val": 9}}
    counts["part of a frame"] = {"train": 100}
    for name, (is_equal, is_known, splits) in found.items():
        assert (is_equal, is_known) == (True, True), name
        assert splits == counts.get(name, {"train": 200}), name


def test_names_of_rows_tell_splits_as_names_of_files_do(tmp_path: Path) -> None:
    given = {"train": ROWS[:20], "test": iter(ROWS[20:25]), "validation": pa.table({"text": ["x"]})}
    result = build(given, tmp_path / "s")
    assert {name: split.documents for name, split in result.splits.items()} == {
        "train": 20,
        "test": 5,
        "val": 1,
    }
    together = build({"a": ROWS[:3], "b": ROWS[3:5]}, tmp_path / "t")
    assert documents(tmp_path / "t") == expected(ROWS[:5])
    assert set(together.splits) == {"train"}


def test_rows_that_cannot_be_used_are_rejected_and_listed(tmp_path: Path) -> None:
    rows: list[Any] = [*ROWS[:50], {"text": None}, {"n": 1}, 5, "a text", {"text": "\ud800"}]
    result = build(rows, tmp_path / "s", max_rejects=0.1)
    assert (result.totals.documents, result.totals.rejected) == (51, 4)
    with tokenmill.Store(tmp_path / "s") as store:
        assert [each.row for each in store.rejects()] == [50, 51, 52, 54]
        assert set(store.reject_counts()) == {
            "null-text",
            "missing-field",
            "not-an-object",
            "lone-surrogate",
        }


def test_only_the_rows_before_a_limit_are_taken(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield from ROWS

    assert build(endless(), tmp_path / "s", limit=150).totals.rows == 150
    table = pa.Table.from_pylist(ROWS)
    assert build(table.to_reader(max_chunksize=40), tmp_path / "t", limit=150).totals.rows == 150
    assert documents(tmp_path / "s") == documents(tmp_path / "t") == expected(ROWS[:150])


def test_chats_and_templates_are_built_of_rows_too(tmp_path: Path) -> None:
    result = build(ROWS, tmp_path / "s", template="{n}: {text}")
    assert documents(tmp_path / "s")[3] == [*f"3: {ROWS[3]['text']}".encode(), 256]
    table = pa.Table.from_pylist(ROWS)
    assert build(table, tmp_path / "t", template="{n}: {text}").totals.tokens == (
        result.totals.tokens
    )


KILLED = """
import os, sys
import tokenmill
from tests.builder.test_objects import ROWS

def stop(progress):
    if progress.units_done >= 2:
        os._exit(9)

def rows():
    for number, row in enumerate(ROWS):
        if sys.argv[2] == "reading" and number == 100:
            os._exit(9)
        yield row

tokenmill.build(
    rows(), tokenizer="bytes", out=sys.argv[1], serial=True, unit_bytes=2000, on_progress=stop
)
"""


@pytest.mark.parametrize("when", ["reading", "building"])
def test_a_build_that_was_killed_goes_on_with_the_same_rows(when: str, tmp_path: Path) -> None:
    source = Path(tokenmill.__file__).parents[1]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "s"), when],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}"},
        check=False,
    )
    assert done.returncode == 9
    assert (tmp_path / "s" / ".rows").is_dir()
    result = build(iter(ROWS), tmp_path / "s", unit_bytes=2000)
    assert bool(result.units_resumed) == (when == "building")
    assert not (tmp_path / "s" / ".rows").exists()
    build(ROWS, tmp_path / "whole", unit_bytes=2000)
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")
    # Other rows are another input.
    changed = [*ROWS[:-1], {"text": "z" * len(ROWS[-1]["text"].encode()), "n": 199}]
    again = build(changed, tmp_path / "s", unit_bytes=2000)
    assert again.units_built >= 1
    assert documents(tmp_path / "s") == expected(changed)


def test_workers_share_rows_and_make_the_same_store(tmp_path: Path) -> None:
    build(iter(ROWS), tmp_path / "one", unit_bytes=4000)
    build(iter(ROWS), tmp_path / "two", unit_bytes=4000, serial=False, workers=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_an_error_of_the_iterator_is_the_programs_own_and_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "one"
        raise RuntimeError("the database is gone")

    with pytest.raises(RuntimeError, match="the database is gone"):
        build(broken(), tmp_path / "s")
    assert {path.name for path in (tmp_path / "s").iterdir()} <= {".lock", ".lock-workers"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (5, "the input is int, which has no rows"),
        ([1, 2], "the first row is int; rows are dicts or texts"),
        ({"text": "a"}, "a mapping names tables or iterables of rows, and 'text' is str"),
        ({"a/b": [{"text": "a"}]}, "is no name for rows"),
        (iter([]), "there is not one row"),
        ([{"text": "a", "x": {1}}], "row 0 cannot be written as JSON: set has no order"),
        (pa.table({"body": ["a"]}), "has no column 'text'; its columns are: body"),
        (pa.table([["a"], ["b"]], names=["text", "text"]), "there are several columns 'text'"),
    ],
)
def test_what_has_no_rows_is_refused(rows: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TokenmillError) as caught:
        build(rows, tmp_path / "s")
    assert problem in caught.value.message
    assert caught.value.hint


def test_names_of_files_are_never_taken_for_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    for names in (iter([str(path)]), (each for each in [path])):
        with pytest.raises(UsageError, match="would be tokenized as a text"):
            build(names, tmp_path / "s")
    assert build([path], tmp_path / "s").totals.documents == 1


def test_what_takes_files_is_refused_for_rows(tmp_path: Path) -> None:
    for more in ({"part": "1/2"}, {"exclude": "*"}, {"runner": "ray"}):
        with pytest.raises(UsageError, match="is for files, and the input is rows"):
            build(ROWS, tmp_path / "s", **more)
    with pytest.raises(UsageError, match="plan is for files"):
        tokenmill.plan(ROWS, tokenizer="bytes")
    left = iter(ROWS)
    with pytest.raises(TokenizerError):
        build(left, tmp_path / "s", tokenizer=tmp_path / "missing")
    with pytest.raises(MemoryBudgetError):
        build(left, tmp_path / "s", memory="10MB")
    assert next(left) == ROWS[2]  # one was looked at for each
    with pytest.raises(SourceError, match="no column") as caught:
        build(iter(ROWS), tmp_path / "s", where="lang == 'en'")
    assert "the rows came from an iterator, which is used up" in str(caught.value.hint)
