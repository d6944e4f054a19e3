"""Input files that are damaged or made to harm: their text, or a sentence, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack, times, tried
from tests.hostile.guard import run_guarded
from tests.sources.reading import read

import tokenmill
from tokenmill.errors import SourceError, TokenmillError
from tokenmill.sources.base import SourceOptions, open_decompressed, open_source, plan_units
from tokenmill.sources.discovery import discover, source_file
from tokenmill.sources.tables import open_native

PLAIN = SourceOptions()
CHATS = SourceOptions(fields=("messages",))


def ipc(path: Path, column: Any, *, name: str = "text", stream: bool = False) -> bytearray:
    """The bytes of an Arrow file, which is written too."""
    table = pa.table({name: column})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)
    return bytearray(path.read_bytes())


def replaced(data: bytearray, old: bytes, new: bytes) -> bytes:
    """The data with the one place that holds `old` changed."""
    assert data.count(old) == 1
    return bytes(data.replace(old, new))


# ----- memory beyond a file ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "offsets", [(0, 4, 120), (0, 4, 2**31 - 1), (0, 9, 8), (-4, 4, 8), (0, -1, 8), (8, 4, 0)]
)
@pytest.mark.parametrize(("kind", "code"), [(pa.string(), "i"), (pa.large_binary(), "q")], ids=str)
def test_offsets_that_leave_the_data_of_an_arrow_file_are_refused(
    tmp_path: Path, stream: bool, offsets: tuple[int, ...], kind: Any, code: str
) -> None:
    path = tmp_path / "a.arrow"
    data = ipc(path, pa.array([b"abcd", b"efgh"], kind), stream=stream)
    good = struct.pack(f"<3{code}", 0, 4, 8)
    path.write_bytes(replaced(data, good, struct.pack(f"<3{code}", *offsets)))
    with pytest.raises(SourceError, match="cannot be read as what its name says"):
        read(path, PLAIN)
    tried("arrow offsets")


@pytest.mark.parametrize("offsets", [(0, 1, 9), (0, 7, 2), (-1, 1, 2), (0, 2**31 - 1, 2)])
def test_lists_that_leave_their_values_are_refused(
    tmp_path: Path, offsets: tuple[int, ...]
) -> None:
    path = tmp_path / "a.arrow"
    rows = [[{"role": "user", "content": "abcdef"}], [{"role": "user", "content": "ghi"}]]
    data = ipc(path, pa.array(rows), name="messages")
    found = data.rindex(struct.pack("<3i", 0, 1, 2))
    data[found : found + 12] = struct.pack("<3i", *offsets)
    path.write_bytes(data)
    with pytest.raises(SourceError, match="cannot be read as what its name says"):
        read(path, CHATS)
    tried("arrow offsets")


@pytest.mark.parametrize("index", [2, 100, -1, -128])
@pytest.mark.parametrize("options", [PLAIN, SourceOptions(fields=("text",))], ids=["one", "fields"])
def test_an_index_beyond_its_dictionary_is_refused(
    tmp_path: Path, index: int, options: SourceOptions
) -> None:
    path = tmp_path / "a.arrow"
    column = pa.array(["left", "right", "left", "right"], pa.dictionary(pa.int8(), pa.string()))
    data = ipc(path, column)
    found = data.rindex(bytes([0, 1, 0, 1, 0, 0, 0, 0]))
    data[found + 2 : found + 3] = struct.pack("b", index)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"ind(ex|ices)"):
        read(path, options)
    tried("arrow offsets")


def test_a_view_beyond_its_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    data = ipc(path, pa.array(["x" * 20, "y" * 30], pa.string_view()))
    view = struct.pack("<i4sii", 30, b"yyyy", 0, 20)
    for size, start in ((4000, 20), (30, 2**30), (30, -8), (-30, 20)):
        path.write_bytes(replaced(data, view, struct.pack("<i4sii", size, b"yyyy", 0, start)))
        with pytest.raises(SourceError):
            read(path, PLAIN)
        tried("arrow offsets")


# ----- damage of every kind ------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="guards are placed on Linux")
@pytest.mark.parametrize("place", [-1, "len(data)"], ids=["before", "after"])
def test_a_byte_beside_a_mapped_file_ends_the_process(tmp_path: Path, place: object) -> None:
    """The check that the attacks below rely on."""
    (tmp_path / "a").write_bytes(b"x" * 4096)
    (tmp_path / "peek.py").write_text(
        "import ctypes, mmap, sys\n"
        "import numpy as np\n"
        f"file = open({str(tmp_path / 'a')!r}, 'rb')\n"
        "data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)\n"
        "print(data.tobytes() == b'x' * 4096, flush=True)\n"
        f"ctypes.string_at(data.ctypes.data + {place}, 1)\n"
    )
    run = run_guarded("peek", path=tmp_path)
    assert (run.stdout, run.returncode) == ("True\n", -signal.SIGSEGV), run.stderr


@pytest.mark.parametrize("part", range(times(short=1, long=20)))
def test_damaged_files_of_every_format_are_read_or_refused(tmp_path: Path, part: int) -> None:
    seed, cases = times(short=7, long=11), times(short=450, long=2000)
    given = seed, part * cases, (part + 1) * cases, tmp_path
    run = run_guarded("tests.hostile.input_fuzz", *given)
    assert run.returncode == 0, f"{(tmp_path / 'case').read_text()}\n{run.stderr[-3000:]}"
    counts = json.loads(run.stdout)
    assert counts["read"]
    assert counts["read"] + counts["refused"] == cases
    tried("input files with bytes changed, cut or doubled", cases)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("has_dictionary", [True, False])
def test_a_changed_byte_in_a_page_with_a_checksum_is_refused(
    tmp_path: Path, version: str, has_dictionary: bool
) -> None:
    path = tmp_path / "a.parquet"
    # The texts beside it stand in the statistics too, where a change is of no account.
    table = pa.table({"text": ["a", "ijklmnop" * 4, "z"]})
    pq.write_table(
        table,
        path,
        compression="none",
        write_page_checksum=True,
        use_dictionary=has_dictionary,
        data_page_version=version,
    )
    data = bytearray(path.read_bytes())
    place = data.index(b"ijklmnop" * 4)
    for byte in range(place - 4, place + 32):
        changed = data.copy()
        changed[byte] ^= 1
        path.write_bytes(changed)
        with pytest.raises(SourceError, match="CRC checksum"):
            read(path, PLAIN)
        tried("parquet pages changed without their checksum")


def test_a_footer_with_a_bad_entry_of_a_column_is_refused(tmp_path: Path) -> None:
    # Where Arrow is asked for such an entry by itself, it ends the whole process.
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", None]}), path)
    data = path.read_bytes()
    (size,) = struct.unpack("<i", data[-8:-4])
    for place in range(len(data) - 8 - size, len(data) - 8):
        for bit in range(times(short=1, long=8)):
            changed = bytearray(data)
            changed[place] ^= 16 >> bit or 16 << bit - 4
            path.write_bytes(changed)
            with contextlib.suppress(SourceError):
                assert read(path, PLAIN).documents == ["a", "b"]
            tried("parquet footers with one bit changed")


@pytest.mark.parametrize("options", [PLAIN, SourceOptions(fields=("text",))], ids=["one", "fields"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_two_columns_of_one_name_are_refused(
    tmp_path: Path, suffix: str, options: SourceOptions
) -> None:
    path = tmp_path / f"a.{suffix}"
    table = pa.table([["one"], ["two"]], names=["text", "text"])
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("text,text\none,two\n")
    with pytest.raises(SourceError, match="has 2 columns 'text'"):
        read(path, options)
    tried("tables with a column twice")


@pytest.mark.parametrize(
    "value",
    [
        pa.array([2**62], pa.timestamp("s")),
        pa.array([2**30], pa.date32()),
        pa.array([2**62], pa.duration("s")),
        pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"]),
    ],
    ids=lambda value: str(value.type),
)
def test_values_that_python_has_none_for_are_refused(tmp_path: Path, value: Any) -> None:
    ipc(tmp_path / "a.arrow", value, name="messages")
    with pytest.raises(SourceError, match="cannot be read as what its name says"):
        read(tmp_path / "a.arrow", CHATS)
    tried("values of tables that python has none for")


@pytest.mark.parametrize("limit", [None, 1])
def test_a_buffer_that_claims_more_memory_than_there_is_is_refused(
    tmp_path: Path, limit: int | None
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"text": ["abcdefgh" * 500] * 2})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    frame = struct.pack("<q", 8000) + b"\x28\xb5\x2f\xfd"
    huge = struct.pack("<q", 1 << 60) + frame[8:]
    path.write_bytes(replaced(bytearray(path.read_bytes()), frame, huge))
    with pytest.raises(TokenmillError, match=r"a\.arrow") as caught:
        tokenmill.build(
            path, tokenizer="bytes", out=tmp_path / "store", memory="1GB", serial=True, limit=limit
        )
    assert caught.value.hint
    tried("buffers that claim more memory than there is")


@pytest.mark.parametrize("depth", [500, 100_000])
def test_json_nested_deeply_costs_its_row_at_most(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.jsonl"
    deep = b"[" * depth + b"]" * depth
    rows = [b'{"text":' + deep + b"}", b'{"text":"b"}', deep, b'{"text":"c","x":' + deep + b"}"]
    path.write_bytes(b"\n".join(rows))
    got = read(path, PLAIN)
    assert got.documents == ["b", "c"]
    assert [row for row, _ in got.rejects] == [0, 2]
    tried("json nested deeply", 3)


# ----- text that is no Unicode ---------------------------------------------------------------

GOOD = ("a", "é", "€", "\U0001f600", "\U0010ff80", "\U0010ffff", "﷐", "\ufeff", "\0", "\ud7ff")
BAD = (
    b"\xed\xa0\xbd\xed\xb8\x80",  # a character in CESU-8
    b"\xed\xa0\x80",
    b"\xed\xbf\xbf",
    b"\xc0\x80",  # overlong forms
    b"\xc1\xbf",
    b"\xe0\x80\x80",
    b"\xe0\x9f\xbf",
    b"\xf0\x80\x80\x80",
    b"\xf0\x8f\xbf\xbf",
    b"\xf4\x90\x80\x80",  # beyond the last character
    b"\xf5\x80\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xff",
    b"\x80",
    b"\xc3",  # cut off
    b"\xe2\x82",
    b"\xf0\x9f\x98",
    b"\xf4\x8f\xbe",
)
VALUES = st.lists(
    st.sampled_from([*(text.encode("utf-8") for text in GOOD if text != "\0"), *BAD])
    | st.binary(max_size=4),
    max_size=4,
).map(b"".join)
PLACES = ("value", "other", "key")


def as_lines(values: list[bytes], place: str) -> bytes:
    rows = {
        "value": b'{"text": "%b"}',
        "other": b'{"x": "%b", "text": "a"}',
        "key": b'{"%b": 1, "text": "a"}',
    }
    return b"".join(rows[place] % value + b"\n" for value in values)


def as_table(values: list[bytes]) -> Any:
    """A table whose strings need not be UTF-8."""
    return pa.table({"text": pa.array(values, pa.binary()).view(pa.string())})


@attack(short=60, long=6000, parts=2)
@given(values=st.lists(VALUES, min_size=1, max_size=5), place=st.sampled_from(PLACES))
def test_lines_of_json_with_invalid_utf8_anywhere_are_rejected(
    values: list[bytes], place: str
) -> None:
    plain = [bytes(byte for byte in each if byte not in b'"\\' and byte >= 32) for each in values]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(as_lines(plain, place))
        for options in (PLAIN, SourceOptions(batch_bytes=8), SourceOptions(fields=("text",))):
            check_decoded(read(path, options).rejects, plain)
    tried("json with bytes that are no utf-8", len(values))


def check_decoded(rejects: list[tuple[int, str]], values: list[bytes]) -> None:
    """The rejected rows are those that Python's strict decoder refuses, and for that reason."""
    assert rejects == [(n, "invalid-utf8") for n, value in enumerate(values) if not is_text(value)]


def is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@attack(short=60, long=6000, parts=2)
@given(values=st.lists(VALUES, min_size=1, max_size=5), columns=st.integers(1, 3))
def test_tables_and_text_with_invalid_utf8_lose_those_rows_alone(
    values: list[bytes], columns: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(as_table(values), folder / "a.parquet")
        ipc(folder / "a.arrow", as_table(values).column(0))
        ipc(folder / "b.arrow", as_table(values).column(0).dictionary_encode())
        for path in folder.iterdir():
            for options in (PLAIN, SourceOptions(fields=("text",))):
                check_decoded(read(path, options).rejects, values)
        plain = [bytes(byte for byte in each if byte not in b'",\r\n\0') for each in values]
        check_texts(folder / "a.txt", b"\x1e".join([*plain, b""]), plain)
        check_csv(folder / "a.csv", plain, columns)
    tried("tables and text with bytes that are no utf-8", len(values))


def check_texts(path: Path, data: bytes, values: list[bytes]) -> None:
    if b"\x1e" in b"".join(values) or data.startswith(b"\xef\xbb\xbf"):
        return
    path.write_bytes(data)
    check_decoded(read(path, SourceOptions(separator="\x1e")).rejects, values)


def check_csv(path: Path, values: list[bytes], columns: int) -> None:
    """Values of the text, of another column, and of rows that have too many or too few."""
    rows = [(b"1", each, b"2", b"3")[:columns] for each in values]
    path.write_bytes(b"id,text\n" + b"".join(b",".join(row) + b"\n" for row in rows))
    got = read(path, PLAIN)
    if columns == 2:
        check_decoded(got.rejects, values)
        assert [text.encode() for _, text in got.texts] == [*filter(is_text, values)]
    else:
        assert got.rejects == [(n, "malformed-row") for n in range(len(values))]
    path.write_bytes(b"id,text\n" + b"".join(each + b"x,ok\n" for each in values))
    assert read(path, PLAIN).documents == ["ok"] * len(values)


@pytest.mark.parametrize(
    "escape", ["\\ud800", "\\udc00", "\\udc00\\ud800", "\\ud83dx", "\\uD83D\\n"]
)
def test_escapes_of_half_a_character_cost_their_row(tmp_path: Path, escape: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a{escape}"}}\n{{"text": "b"}}\n{{"x": "{escape}", "text": "c"}}\n')
    got = read(path, PLAIN)
    assert got.documents == ["b", "c"]
    assert got.rejects == [(0, "lone-surrogate")]
    tried("json with escapes of half a character")


def test_nested_text_of_a_table_that_is_no_utf8_costs_its_row(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    raw = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.binary())]))
    rows = [[{"role": b"user", "content": value}] for value in (b"a", b"\xed\xa0\x80", b"c")]
    path = tmp_path / "a.arrow"
    ipc(path, pa.array(rows, raw).view(kind), name="messages")
    got = read(path, CHATS)
    assert got.rejects == [(1, "invalid-utf8")]
    assert len(got.documents) == 2
    tried("tables and text with bytes that are no utf-8")


# ----- what is no file ------------------------------------------------------------------------

NAMES = (
    "a.jsonl",
    "a.json",
    "a.txt",
    "a.csv",
    "a.parquet",
    "a.arrow",
    "a.jsonl.gz",
    "a",
    "state.json",
)


def make_special(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name + ".other")
            path.with_name(path.name + ".other").symlink_to(path.name)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop"])
def test_what_is_no_file_is_left_out_of_a_folder_and_refused_by_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "good.txt").write_text("text")
    (tmp_path / "data" / "round").symlink_to("..")
    for name in NAMES:
        make_special(tmp_path / "data" / name, kind)
        with pytest.raises(SourceError, match=r"only files are read|symbolic links"):
            discover([f"data/{name}"], PLAIN)
        tried("pipes, sockets, devices and loops of links as input")
    found = discover(["data"], PLAIN)
    assert [each.path for group in found.files for each in group.members] == ["data/good.txt"]
    left = {Path(each.path).name for each in found.skipped}
    assert left >= set(NAMES)
    assert all("only files" in each.reason or "links" in each.reason for each in found.skipped)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "state.json"])
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"text")
    file = source_file(str(path))
    options = SourceOptions(separator="\n")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceError, match="only files are read"):
        open_source(file, options)
    if file.format in ("parquet", "arrow", "csv"):
        with pytest.raises(SourceError, match="only files are read"):
            list(plan_units(file, options))
    with pytest.raises(SourceError, match="only files are read"):
        open_decompressed(file)
    with pytest.raises(SourceError, match="only files are read"):
        open_native(file.location)
    tried("pipes in the place of a file")
