"""Builds from many small files: few units, and every row keeps its file."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.builder.stores import begin_older_store, byte_ids, documents, tree
from tests.web import serve

import tokenmill
from tokenmill.cli import show
from tokenmill.errors import SourceError, StoreError, TooManyRejectsError
from tokenmill.inspection import inspect
from tokenmill.store import facts

if TYPE_CHECKING:
    from tokenmill.builder.progress import BuildResult

KINDS = ["parquet", "jsonl", "jsonl.gz", "csv", "txt"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(inputs: str | list[str] = "in", out: str = "store", **options: Any) -> BuildResult:
    settings: dict[str, Any] = {"tokenizer": "bytes", "memory": "1GB", "max_rejects": 1.0}
    settings["serial"] = "workers" not in options
    return tokenmill.build(inputs, out=out, **(settings | options))


def write_small(path: Path, texts: list[str]) -> None:
    """A file of the format that its name says."""
    kind = path.name.partition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"1,{text}\n" for text in texts))
    elif kind == "txt":
        path.write_text("".join(texts))
    else:
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if kind.endswith("gz") else data)


def write_many(kinds: list[str], count: int = 200, folder: str = "in") -> dict[str, list[str]]:
    """Many small files, of these kinds in turn: path -> texts."""
    Path(folder).mkdir(exist_ok=True)
    made: dict[str, list[str]] = {}
    for number in range(count):
        path = Path(f"{folder}/{number:03d}.{kinds[number % len(kinds)]}")
        texts = [f"{number}-{row} {'word ' * (number % 13)}end" for row in range(1 + number % 4)]
        texts = ["".join(texts)] if path.suffix == ".txt" else texts
        write_small(path, texts)
        made[path.as_posix()] = texts
    return made


def all_texts(made: dict[str, list[str]]) -> list[str]:
    return [text for _, texts in sorted(made.items()) for text in texts]


def units_of(store: str) -> list[str]:
    return [unit.name for unit in facts.read_manifest(Path(store)).units]


@pytest.mark.parametrize("kinds", [["parquet"], ["jsonl"], ["jsonl.gz"], KINDS], ids="-".join)
def test_many_small_files_make_few_units_and_every_row_keeps_its_place(kinds: list[str]) -> None:
    made = write_many(kinds)
    result = build(val=0.2)
    assert result.units_built <= 4
    assert sum(path.is_file() for path in Path("store").rglob("*")) <= 4 * 5 + 5
    assert result.totals.rows == len(all_texts(made))
    seen: dict[str, dict[int, str]] = {}
    for split in ("train", "val"):
        with tokenmill.Store("store", split=split) as store:
            for number in range(len(store)):
                source = store.source(number)
                assert source.line == source.row + 1
                seen.setdefault(source.path, {})[source.row] = store.decode(number)
    assert seen == {path: dict(enumerate(texts)) for path, texts in made.items()}
    report = tokenmill.verify("store", sample=60)
    assert report.ok
    assert (report.documents_reencoded, report.mismatches) == (60, 0)
    assert build(val=0.2).nothing_to_do


def test_the_bytes_are_those_of_any_number_of_workers_and_parts() -> None:
    write_many(KINDS, 400)
    Path("in/050.jsonl").write_bytes(b'{"text": "good"}\n{bad\n')
    options: dict[str, Any] = {"val": 0.2, "unit_bytes": 4000}
    assert build(**options).units_built > 8
    whole = tree(Path("store"))
    build(out="two", workers=2, memory="2GB", **options)
    assert tree(Path("two")) == whole
    for part in (3, 1, 2):
        build(out="parts", part=f"{part}/3", **options)
    tokenmill.finish("parts")
    assert tree(Path("parts")) == whole


@pytest.mark.parametrize("kinds", [["txt"], ["parquet"], KINDS], ids="-".join)
def test_a_limit_takes_the_first_rows_in_the_order_of_the_paths(kinds: list[str]) -> None:
    made = write_many(kinds, 600)
    texts = all_texts(made)
    for limit in (20, 450):
        result = build(limit=limit)
        assert documents(Path("store")) == byte_ids(texts[:limit])
        assert result.totals.rows - result.totals.skipped == limit
    build()
    assert documents(Path("store")) == byte_ids(texts)
    build(out="fresh")
    assert tree(Path("store")) == tree(Path("fresh"))


def test_a_rejected_row_is_told_with_its_file_and_its_place_in_it() -> None:
    write_many(["parquet", "jsonl", "csv", "txt"])
    # Some are rejected as they are read, others as they are encoded.
    long = "x" * 600
    pq.write_table(pa.table({"text": ["a", None, long]}), "in/100.parquet")
    Path("in/101.jsonl").write_text('{"text": "a"}\n\n' + f'{{"text": "{long}"}}\n{{bad\n')
    Path("in/102.csv").write_text(f"id,text\n1,a\n1,2,3\n1,{long}\n")
    Path("in/103.txt").write_bytes(b"caf\xe9")
    options: dict[str, Any] = {"max_length": 500, "too_long": "reject"}
    result = build(**options)
    assert result.totals.rejected == 7
    with tokenmill.Store("store") as store:
        found = [(each.file, each.row, each.offset, each.reason) for each in store.rejects()]
        assert store.reject_counts() == Counter(reason for *_, reason in found)
    assert found == [
        ("in/100.parquet", 1, None, "null-text"),
        ("in/100.parquet", 2, None, "too-long"),
        ("in/101.jsonl", 1, 15, "too-long"),
        ("in/101.jsonl", 2, 628, "invalid-json"),
        ("in/102.csv", 1, None, "malformed-row"),
        ("in/102.csv", 2, None, "too-long"),
        ("in/103.txt", 0, None, "invalid-utf8"),
    ]
    with pytest.raises(TooManyRejectsError) as caught:
        build(out="strict", max_rejects=0.0, **options)
    assert "rows in the 200 files from 'in/000.parquet' to 'in/199.txt' were" in str(caught.value)
    assert "the first: null-text at row 1 of 'in/100.parquet': the text is null" in str(
        caught.value
    )


def test_a_file_that_cannot_be_read_is_told_by_its_name_and_the_rest_is_resumed() -> None:
    write_many(["parquet"], 400)
    options: dict[str, Any] = {"unit_bytes": 20_000}
    good = Path("in/399.parquet").read_bytes()
    Path("in/399.parquet").write_bytes(good[:-10])
    with pytest.raises(SourceError, match=r"'in/399\.parquet' cannot be read as what its name"):
        build(**options)
    Path("in/399.parquet").write_bytes(good)
    result = build(**options)
    assert (result.units_built, result.units_resumed) == (1, result.units_total - 1)
    assert result.units_total > 5


def test_a_change_costs_the_group_it_is_in_and_a_touch_costs_nothing() -> None:
    write_many(["jsonl"], 400)
    options: dict[str, Any] = {"unit_bytes": 8000}
    total = build(**options).units_total
    assert total > 5
    os.utime("in/123.jsonl", ns=(1, 1))
    result = build(**options)
    assert (result.units_built, result.units_resumed) == (0, total)
    data = Path("in/123.jsonl").read_bytes().replace(b"word", b"Word")
    Path("in/123.jsonl").write_bytes(data)
    result = build(**options)
    assert (result.units_built, result.units_resumed) == (1, total - 1)
    # Files that come last are in the last group; others may move the end of theirs.
    write_small(Path("in/400.jsonl"), ["more"])
    assert build(**options).units_built <= 2
    write_small(Path("in/200x.jsonl"), ["more " * 100])
    assert build(**options).units_built <= 4
    made = write_many(["jsonl"], 400) | {"in/400.jsonl": ["more"], "in/200x.jsonl": ["more " * 100]}
    for name in ("in/007.jsonl", "in/300.jsonl"):
        Path(name).unlink()
        del made[name]
    with pytest.raises(StoreError, match=r"not among the inputs \('in/007\.jsonl', 'in/300"):
        build(**options)
    build(prune=True, **options)
    assert documents(Path("store")) == byte_ids(all_texts(made))
    build(out="fresh", **options)
    assert tree(Path("store")) == tree(Path("fresh"))


def test_few_files_are_units_of_their_own_until_they_are_many() -> None:
    write_many(["parquet"], 63)
    assert build().units_built == 63
    made = write_many(["parquet"], 64)
    result = build()
    assert result.units_total <= 3
    assert documents(Path("store")) == byte_ids(all_texts(made))
    with pytest.raises(StoreError, match="not among the inputs"):
        build("in/000.parquet")
    Path("in/063.parquet").unlink()
    assert build(prune=True).units_total == 63
    assert tokenmill.verify("store", sample=10).ok


def test_masks_come_out_of_groups_as_out_of_files() -> None:
    Path("in").mkdir()
    rows = [{"prompt": f"say {k}: ", "completion": "word " * (k % 7 + 1)} for k in range(300)]
    for number in range(100):
        lines = [json.dumps(row) + "\n" for row in rows[3 * number : 3 * number + 3]]
        Path(f"in/{number:03d}.jsonl").write_text("".join(lines))
    Path("all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"format": "prompt-completion", "max_length": 20}
    assert build(**options).units_built <= 3
    build("all.jsonl", "one", **options)
    with tokenmill.Store("store") as store, tokenmill.Store("one") as one:
        assert store.has_mask
        assert len(store) == len(one) > 300
        for number in range(len(one)):
            assert store[number].tolist() == one[number].tolist()
            masks = store.mask(number), one.mask(number)
            assert masks[0] is not None
            assert masks[1] is not None
            assert masks[0].tolist() == masks[1].tolist()
            found, expected = store.source(number), one.source(number)
            assert found.path == f"in/{expected.row // 3:03d}.jsonl"
            assert (found.row, found.piece) == (expected.row % 3, expected.piece)
    Path("in/050.txt").write_text("no fields")
    with pytest.raises(SourceError, match=r"'in/050\.txt' is a text file"):
        build(**options)


def test_what_inspect_shows_of_groups() -> None:
    write_many(["parquet"], 100)
    Path("in/large.jsonl").write_text(json.dumps({"text": "x" * 300_000}) + "\n")
    build()
    found = inspect("store", doc=5)
    assert found.document is not None
    assert (found.document.path, found.document.row) == ("in/002.parquet", 2)
    text = show.sources_text(found)
    assert text.startswith("in/large.jsonl (300 kB, 1 row)\n")
    assert "of small files (" in text
    assert text.endswith("250 rows)")


def test_a_store_of_before_keeps_its_units_and_their_order() -> None:
    """Groups were of text files alone, and came in the order of their own names."""
    made = write_many(["parquet"], 80) | write_many(["txt"], 600)
    assert build(out="new").units_built < 12
    begin_older_store(Path("old"), like=Path("new"))
    Path("in/007.txt").write_bytes(b"caf\xe9")
    build(out="old")
    sources = [source.path for source in facts.read_manifest(Path("old")).sources]
    texts = [path for path in sources if path.startswith("text//")]
    assert sources == [*(path for path in sorted(made) if path.endswith("parquet")), *texts]
    assert len(texts) > 1
    assert texts == [*sorted(path for path in texts if path != "text//first"), "text//first"]
    with tokenmill.Store("old") as store:
        (reject,) = store.rejects()
        assert (reject.file, reject.row) == ("in/007.txt", 7)
        assert {store.receipt(unit.name).version for unit in store.manifest.units} == {1}
    assert build(out="old").nothing_to_do
    before = tree(Path("old"))
    for path in [Path("old/tokenmill.json"), *sorted(Path("old/shards").glob("*.json"))[::3]]:
        path.unlink()
    assert build(out="old").units_resumed > 10
    assert tree(Path("old")) == before
    with pytest.raises(StoreError, match=r"of another build \(eos '.*' -> none, add_eos True"):
        build(out="old", eos=False)


@pytest.mark.slow
def test_small_files_of_a_server_are_read_by_groups() -> None:
    made = write_many(["jsonl", "parquet", "txt"], 99)
    with serve(Path("in")) as server:
        urls = [f"{server.address}/{Path(name).name}" for name in made]
        result = build(urls, workers=2, memory="2GB")
        assert result.units_built <= 3
        assert documents(Path("store")) == byte_ids(all_texts(made))
        assert build(urls).nothing_to_do
        with tokenmill.Store("store") as store:
            assert store.source(1).path == urls[1]
        assert tokenmill.verify("store", sample=10).documents_reencoded == 10
