"""Input that takes far more memory or time than its size tells, against the budget."""

from __future__ import annotations

import cProfile
import json
import lzma
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.builder.stores import tree
from tests.hostile.attack import attack, times, tried

import tokenmill
from tokenmill.monitor import tree_bytes
from tokenmill.sources.base import SourceOptions
from tokenmill.sources.lines import JsonlParser, LineBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tokenmill.records import Reject

_PARTS = [
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b'"text"', b'"text":', b'"a"', b'{"text":"b"}'),
    *(b"null", b"true", b"1", b"-0", b"01", b"1e999", b"NaN", b"Infinity", b"9" * 400),
    *(b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\\u0000", b"\\x", b"\0", b"\t", b" ", b"\r"),
    *(b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"//", b"/**/", b"'", b"[" * 2000),
]
_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
_objects = st.dictionaries(st.sampled_from(["text", "a", "text.b", ""]), _values, max_size=3)
_written = st.tuples(_objects, st.booleans()).map(
    lambda pair: json.dumps(pair[0], ensure_ascii=pair[1]).encode(errors="surrogatepass")
)
_made_up = st.lists(st.sampled_from(_PARTS), max_size=8).map(b"".join)


@st.composite
def _lines(draw: st.DrawFn) -> bytes:
    """A line: a good one, one with a part of something else in it, or one of such parts alone."""
    line = draw(st.one_of(_written, _made_up, _made_up.map(lambda body: b"{" + body + b"}")))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(line)))
        line = (
            line[:place] + draw(st.sampled_from(_PARTS)) + line[place + draw(st.integers(0, 2)) :]
        )
    return line.replace(b"\n", b" ")


def _read(parser: JsonlParser, lines: list[bytes]) -> tuple[dict[int, bytes], tuple[Reject, ...]]:
    data = bytearray(b"\n".join(lines) + b"\n")
    # Not at the front of a file, where a mark would be taken off.
    block = LineBlock(7, len(data), buffer=data, low=0, high=len(data))
    batch = parser.rows(block, first_row=0)
    assert batch.num_rows == len(batch.texts) + len(batch.rejects)
    texts = {int(row): batch.texts.bytes_at(place) for place, row in enumerate(batch.rows)}
    return texts, batch.rejects


@attack(short=100, long=5_000)
@given(lines=st.lists(_lines(), min_size=1, max_size=12), field=st.sampled_from(["text", "text.b"]))
def test_a_line_is_decided_the_same_alone_and_among_others(lines: list[bytes], field: str) -> None:
    tried("JSON lines, alone and among others", len(lines))
    options = SourceOptions(text_field=field)
    lines = [line for line in lines if line.strip(b" \t\r")] or [b"{}"]
    texts, rejects = _read(JsonlParser(options), lines)
    reasons = {reject.row: reject[1:3] for reject in rejects}
    for row, line in enumerate(lines):
        alone, refused = _read(JsonlParser(options), [line])
        assert texts.get(row) == alone.get(0), line
        assert reasons.get(row) == (refused[0][1:3] if refused else None), line


@pytest.mark.parametrize("end", [b"", b"\r"])
def test_lines_that_are_no_objects_take_no_more_steps_than_those_that_are(end: bytes) -> None:
    rows, steps = 2_000, {}
    for line in (b"{}", b"[]", b"5", b"null", b'"a"', b"{"):
        parser = JsonlParser(SourceOptions())
        _read(parser, [line + end])  # what comes first is made once
        profile = cProfile.Profile()
        _, rejects = profile.runcall(_read, parser, [line + end] * rows)
        assert len(rejects) == rows
        steps[line] = sum(entry.callcount for entry in profile.getstats())
        tried("lines that are no objects, by the steps they take", rows)
    assert max(steps, key=steps.__getitem__) == b"{}", steps


LINES = 60_000
BUDGET = 450_000_000
PYTHON = [sys.executable, "-m", "tokenmill"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process")


def _some(kinds: Iterable[str], *short: str) -> list[Any]:
    """All kinds, those marked slow that the short form leaves out."""
    marks = [pytest.mark.slow]
    return [kind if kind in short else pytest.param(kind, marks=marks) for kind in kinds]


def _peak_of(command: list[str]) -> tuple[int, str, int]:
    """Exit code, what was said, and the most memory that the tree of processes had at once."""
    peak = 0
    with tempfile.TemporaryFile("w+") as said:
        process = psutil.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, tree_bytes(process))
            time.sleep(0.02)
        said.seek(0)
        return process.returncode, said.read(), peak


def _build(path: Path, *options: str) -> tuple[int, str, int]:
    command = [*PYTHON, "build", str(path), "--out", str(path.with_suffix(".store")), "--quiet"]
    command += ["--tokenizer", "bytes", "--workers", "1", "--memory", str(BUDGET), *options]
    return _peak_of(command)


def _repeated(rows: int, text: str) -> pa.Table:
    """A table that is small in a file: each row holds the same text."""
    indices = pa.array(np.zeros(rows, np.int32))
    return pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([text]))})


def _plain(table: pa.Table) -> pa.Table:
    return table.cast(pa.schema([("text", pa.large_string())])).combine_chunks()


def _write_dictionary(path: Path) -> None:
    pq.write_table(_repeated(8_000, "x" * 40_000), path)


def _write_dictionary_arrow(path: Path) -> None:
    table = _repeated(8_000, "x" * 40_000)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_long_rows_last(path: Path) -> None:
    """Few long rows behind so many short ones that the mean says nothing."""
    texts = [""] * 100_000 + ["y" * 500_000] * 300
    options = {"use_dictionary": False, "row_group_size": 1 << 20, "write_batch_size": 8}
    pq.write_table(pa.table({"text": texts}), path, **options)


def _write_plain_batch(path: Path) -> None:
    table = _plain(_repeated(1_000_000, "abcd efg " * 30))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_batch(table.to_batches()[0])


def _write_lines(line: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(line * LINES)

    return write


GOOD: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "a dictionary of long rows": ("a.parquet", _write_dictionary, 8_000),
    "a dictionary of long rows in Arrow": ("a.arrow", _write_dictionary_arrow, 8_000),
    "long rows behind short ones": ("a.parquet", _write_long_rows_last, 300),
    "a plain Arrow batch": ("a.arrow", _write_plain_batch, 1_000_000),
    "lines of {}": ("a.jsonl", _write_lines("{}\n"), 0),
    "lines of []": ("a.jsonl", _write_lines("[]\n"), 0),
    "empty lines": ("a.jsonl", _write_lines("\n"), 0),
    "lines that do not parse": ("a.jsonl", _write_lines('{"text": 1,}\n'), 0),
    "lines good and bad by turns": ("a.jsonl", _write_lines('[]\n{"text":"a"}\n'), LINES),
    "lines with a key twice": ("a.jsonl", _write_lines('{"text":"a","text":"b"}\n'), LINES),
}


@linux
@pytest.mark.parametrize("kind", _some(GOOD, "a dictionary of long rows", "lines of []"))
def test_a_build_stays_within_its_budget(kind: str, tmp_path: Path) -> None:
    name, write, documents = GOOD[kind]
    write(tmp_path / name)
    tried("input that is larger than its file, built within the budget")
    code, said, peak = _build(tmp_path / name, "--max-rejects", "1", "--allow-empty", "--json")
    assert code == 0, said
    assert json.loads(said)["totals"]["documents"] == documents
    assert peak <= BUDGET


@linux
def test_a_unit_of_bad_rows_makes_a_small_list_and_exact_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = times(short=300_000, long=2_500_000)  # a few units
    path.write_text("{}\n" * rows)
    tried("rejected rows of a unit that is nothing else", rows)
    code, said, peak = _build(path, "--max-rejects", "1", "--allow-empty", "--json")
    assert code == 0, said
    totals = json.loads(said)["totals"]
    root = path.with_suffix(".store")
    store = tokenmill.Store(root)
    listed = 10_000 * len(store.manifest.units)
    assert (totals["rows"], totals["rejected"], totals["unlisted"]) == (rows, rows, rows - listed)
    assert peak <= BUDGET
    assert sum(file.stat().st_size for file in (root / "rejects").iterdir()) < 200 * listed
    assert store.reject_counts() == {"missing-field": rows}
    found = [row.row for row in store.rejects()]
    assert (found[:10_000], len(found)) == ([*range(10_000)], listed)
    assert tokenmill.verify(root).ok


_KINDS = {
    "missing-field": "{}",
    "not-an-object": "[]",
    "invalid-json": "{",
    "not-a-string": '{"text":1}',
    "good": '{"text":"a"}',
}


@attack(short=1, long=60)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from([*_KINDS]), st.sampled_from([1, 7, 4_000, 9_999, 12_000])),
        min_size=3,
        max_size=12,
    )
)
@example(runs=[("good", 3), ("missing-field", 9_999), *[("invalid-json", 1), ("good", 2)] * 3])
@example(
    runs=[("not-an-object", 40_000), ("not-a-string", 9_000), ("good", 1), ("missing-field", 7)]
)
def test_rejects_that_are_not_listed_are_counted_whatever_the_workers(
    runs: list[tuple[str, int]],
) -> None:
    kinds = [kind for kind, count in runs for _ in range(count)]
    tried("rejected rows that are counted and not listed", len(kinds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.jsonl").write_text("".join(f"{_KINDS[kind]}\n" for kind in kinds))
        for workers in (1, 2):
            tokenmill.build(
                folder / "a.jsonl",
                out=folder / str(workers),
                tokenizer="bytes",
                workers=None if workers == 1 else workers,
                serial=workers == 1,
                memory="1GB",
                unit_bytes=100_000,
                max_rejects=1.0,
                allow_empty=True,
            )
        assert tree(folder / "1") == tree(folder / "2")
        assert tokenmill.verify(folder / "1").ok
        store = tokenmill.Store(folder / "1")
        good = [row for row, kind in enumerate(kinds) if kind == "good"]
        assert store.reject_counts() == Counter(kinds) - Counter(good=len(kinds))
        totals = store.manifest.totals
        listed = Counter(row.unit for row in store.rejects())
        assert (totals.rejected, totals.documents) == (len(kinds) - len(good), len(good))
        assert totals.unlisted == totals.rejected - listed.total()
        assert max(listed.values(), default=0) <= 10_000
        some = range(0, len(good), max(1, len(good) // 100))
        assert [store.source(number).row for number in some] == [good[number] for number in some]


def _write_page(path: Path, rows: int = 500_000) -> None:
    table = _plain(_repeated(rows, "abcd efg " * 30))
    options = {"use_dictionary": False, "data_page_size": 1 << 30, "write_batch_size": 1 << 30}
    options |= {"max_rows_per_page": 1 << 30, "row_group_size": rows}
    pq.write_table(table, path, compression="zstd", **options)


def _write_zstd_batch(path: Path) -> None:
    table = _plain(_repeated(500_000, "abcd efg " * 30))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as writer,
    ):
        writer.write_batch(table.to_batches()[0])


def _write_xz(path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 192 << 20}]
    path.write_bytes(lzma.compress(b'{"text":"a"}\n' * 1000, filters=filters))


def _write_zstd_window(path: Path) -> None:
    # A frame of one raw block, whose header asks for a window of 128 MB.
    line = b'{"text":"a"}\n'
    block = (len(line) << 3 | 1).to_bytes(3, "little")
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([17 << 3]) + block + line)


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a page of Parquet": ("a.parquet", _write_page, "a page of"),
    "a compressed Arrow batch": ("a.arrow", _write_zstd_batch, "a record batch"),
    "an xz dictionary": ("a.jsonl.xz", _write_xz, "an xz dictionary"),
    "a zstd window": ("a.jsonl.zst", _write_zstd_window, "a zstd window"),
}


@linux
@pytest.mark.parametrize("kind", _some(REFUSED, "a page of Parquet"))
def test_what_cannot_be_read_in_parts_is_refused_with_the_budget_that_would_do(
    kind: str, tmp_path: Path
) -> None:
    name, write, what = REFUSED[kind]
    write(tmp_path / name)
    _check_refused(tmp_path / name, what, budget=BUDGET)


@linux
@pytest.mark.slow
def test_a_page_that_nearly_fills_the_budget_is_refused_with_the_one_that_would_do(
    tmp_path: Path,
) -> None:
    _write_page(tmp_path / "a.parquet", rows=(512 << 20) // 274)
    _check_refused(tmp_path / "a.parquet", "a page of 537 MB", budget=600_000_000)


def _check_refused(path: Path, what: str, *, budget: int) -> None:
    """Refused within the budget, and built within the one that the refusal names."""
    tried("parts of files that are larger than the budget")
    code, said, peak = _build(path, "--memory", str(budget))
    assert code == 1, said
    assert what in said
    assert path.name in said
    assert peak <= budget
    named = re.search(r"--memory (\d+)MB", said)
    assert named is not None, said
    # Its first rows are enough: what is too large has to be read for them.
    code, said, peak = _build(path, "--memory", f"{named[1]}MB", "--limit", "1000")
    assert code == 0, said
    assert peak <= int(named[1]) * 10**6


@linux
def test_one_row_that_decodes_to_gigabytes_is_an_error_of_its_file(tmp_path: Path) -> None:
    count = 60_000
    zeros, turns = np.zeros(count, np.int32), np.arange(count, dtype=np.int32) % 2
    content = pa.DictionaryArray.from_arrays(pa.array(zeros), pa.array(["a" * 40_000]))
    role = pa.DictionaryArray.from_arrays(pa.array(turns), pa.array(["user", "assistant"]))
    turn = pa.StructArray.from_arrays([role, content], ["role", "content"])
    row = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), turn)
    path, template = tmp_path / "a.parquet", tmp_path / "a.jinja"
    pq.write_table(pa.table({"messages": row}), path)
    template.write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    tried("a row of gigabytes in a file of kilobytes")
    code, said, peak = _build(path, "--format", "chat", "--chat-template", str(template))
    assert code == 1, said
    assert "came to the end of its share of the memory" in said
    assert "a.parquet" in said
    assert "--memory 900MB" in said
    assert peak <= BUDGET


def test_a_unit_of_bad_rows_is_refused_long_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[]\n" * 2_000_000)
    tried("a unit of bad rows, refused early")
    code, said, _ = _build(path)
    found = re.search(r"([\d,]+) of the first ([\d,]+) rows", said)
    assert code == 1
    assert found is not None, said
    assert int(found[2].replace(",", "")) < 400_000
