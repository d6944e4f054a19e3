"""JSON Lines: every trap costs its own line and no other, and no cut changes the rows."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.reading import Reading, compress, read, read_copies

from tokenmill.errors import SourceError
from tokenmill.sources import base
from tokenmill.sources.base import SourceOptions, open_source, plan_units
from tokenmill.sources.discovery import source_file
from tokenmill.sources.lines import decide

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ["gz", "zst", "bz2", "xz"]
pytestmark = pytest.mark.usefixtures("ways_to_read_fields")


def read_lines(folder: Path, data: bytes, **options: object) -> Reading:
    path = folder / "a.jsonl"
    path.write_bytes(data)
    return read(path, SourceOptions(**options))  # type: ignore[arg-type]


def reason_of(folder: Path, line: bytes, **options: object) -> str:
    """The reason for one bad line between two good ones, which must survive."""
    good = b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n'
    got = read_lines(folder, good, **options)
    assert got.texts == [(0, "before"), (2, "after")]
    ((row, reason),) = got.rejects
    assert row == 1
    assert got.details[0].offset == len(b'{"text": "before"}\n')
    alone = read_lines(folder, line + b"\n", **options)
    assert alone.rejects == [(0, reason)]
    return reason


def text_of(folder: Path, line: bytes, **options: object) -> str:
    """The text of one odd line, which must be the same alone and between others."""
    alone = read_lines(folder, line + b"\n", **options)
    got = read_lines(folder, b'{"text": "x"}\n' + line + b"\nbad\n", **options)
    assert alone.rejects == []
    assert got.documents[-1:] == alone.documents
    (text,) = alone.documents
    return text


def test_rows_come_in_order_with_their_text(tmp_path: Path) -> None:
    data = b"".join(json.dumps({"id": i, "text": f"t{i}"}).encode() + b"\n" for i in range(1000))
    got = read_lines(tmp_path, data, batch_bytes=500)
    assert got.texts == [(i, f"t{i}") for i in range(1000)]
    assert got.num_batches > 10
    assert got.num_bytes == len(data)
    assert [(end.num_lines, end.is_last) for end in got.ends] == [(1000, True)]


def test_a_byte_order_mark_at_the_start_is_not_text(tmp_path: Path) -> None:
    got = read_lines(tmp_path, b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    assert got.documents == ["a", "b"]


def test_a_byte_order_mark_on_a_later_line_is_an_invalid_line(tmp_path: Path) -> None:
    got = read_lines(tmp_path, b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n{"text": "c"}\n')
    assert (got.documents, got.rejects) == (["a", "c"], [(1, "invalid-json")])


def test_crlf_line_ends_are_line_ends(tmp_path: Path) -> None:
    got = read_lines(tmp_path, b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert got.documents == ["a", "b"]
    assert got.ends[0].num_lines == 3


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert read_lines(tmp_path, b'{"text": "a"}\n{"text": "b"}').documents == ["a", "b"]


def test_blank_and_white_space_lines_are_lines_but_no_rows(tmp_path: Path) -> None:
    got = read_lines(tmp_path, b'\n \t\r\n{"text": "a"}\n\n\n{"text": "b"}\n\n')
    assert got.texts == [(0, "a"), (1, "b")]
    assert got.ends[0].num_lines == 7


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\n\n\n"])
def test_a_file_without_rows_has_one_unit_without_rows(tmp_path: Path, data: bytes) -> None:
    got = read_lines(tmp_path, data)
    assert (got.num_rows, len(got.ends), got.ends[0].is_last) == (0, 1, True)


def test_white_space_around_an_object_does_not_matter(tmp_path: Path) -> None:
    assert text_of(tmp_path, b' \t{"text": "a"} \r') == "a"


@pytest.mark.parametrize(
    "line",
    [
        b"bad",
        b'{"text": "a"',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a"}{"text": "b"}',
        b'{"text": "a"} null {"text": "b"}',
        b'{"text": "a"},',
        b'{"text": "a",}',
        b'{"text": "tab\there"}',
        b'{"text": "\\x"}',
        b"{'text': 'a'}",
        b'{"text": "a"}\x0c',
        b"}",
        b"{",
        b"{}}",
    ],
)
def test_a_line_that_is_not_json_is_rejected(tmp_path: Path, line: bytes) -> None:
    assert reason_of(tmp_path, line) == "invalid-json"


def test_an_object_on_two_lines_is_two_bad_lines_whatever_stands_around(tmp_path: Path) -> None:
    # As many values as lines, so a count of both would not notice.
    got = read_lines(tmp_path, b'{"text": "a"}{"text": "b"}\n{"text":\n"c"}\n')
    assert got.rejects == [(0, "invalid-json"), (1, "invalid-json"), (2, "invalid-json")]
    for halves in (b'{"x": {}\n,"text": "c"}\n', b'{"x": 1, "y":\n{"text": "c"}}\n'):
        got = read_lines(tmp_path, b'{"text": "a"}{"text": "b"}\n' + halves)
        assert got.rejects == [(0, "invalid-json"), (1, "invalid-json"), (2, "invalid-json")]


@pytest.mark.parametrize("line", [b"null", b"5", b"[1]", b'"text"', b"true", b'[{"text": "a"}]'])
def test_a_line_that_is_no_object_is_rejected(tmp_path: Path, line: bytes) -> None:
    assert reason_of(tmp_path, line) == "not-an-object"


@pytest.mark.parametrize("line", [b"{}", b'{"txt": "a"}', b'{"text\\u0000": "a"}', b'{"Text": ""}'])
def test_a_line_without_the_field_is_rejected(tmp_path: Path, line: bytes) -> None:
    assert reason_of(tmp_path, line) == "missing-field"


def test_a_null_text_is_rejected(tmp_path: Path) -> None:
    assert reason_of(tmp_path, b'{"text": null}') == "null-text"


@pytest.mark.parametrize("value", [b"1", b"true", b"[]", b"{}", b'["a"]', b"1e5", b"NaN"])
def test_a_text_that_is_no_string_is_rejected(tmp_path: Path, value: bytes) -> None:
    assert reason_of(tmp_path, b'{"text": ' + value + b"}") == "not-a-string"


@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_invalid_utf8_in_the_text_is_rejected(tmp_path: Path, text: bytes) -> None:
    assert reason_of(tmp_path, b'{"text": "' + text + b'"}') == "invalid-utf8"


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", rb"a\ud83dz", rb"\ude00\ud83d"])
def test_a_lone_surrogate_escape_is_rejected(tmp_path: Path, text: bytes) -> None:
    assert reason_of(tmp_path, b'{"text": "' + text + b'"}') == "lone-surrogate"


def test_a_pair_of_surrogate_escapes_is_one_character(tmp_path: Path) -> None:
    assert text_of(tmp_path, rb'{"text": "\ud83d\ude00"}') == "\U0001f600"


def test_a_raw_nul_byte_is_rejected_and_an_escaped_one_is_text(tmp_path: Path) -> None:
    assert reason_of(tmp_path, b'{"text": "a\0b"}') == "invalid-json"
    assert reason_of(tmp_path, b'{"text": "a"}\0}') == "invalid-json"
    assert text_of(tmp_path, rb'{"text": "a\u0000b"}') == "a\0b"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a", "text": "b"}', "b"),
        (b'{"text": 1, "text": "b"}', "b"),
        (b'{"text": null, "text": "b"}', "b"),
        (b'{"x": 1, "x": "y", "text": "b"}', "b"),
    ],
)
def test_the_last_of_duplicate_keys_wins(tmp_path: Path, line: bytes, text: str) -> None:
    assert text_of(tmp_path, line) == text


def test_a_duplicate_key_that_ends_in_null_is_rejected(tmp_path: Path) -> None:
    assert reason_of(tmp_path, b'{"text": "a", "text": null}') == "null-text"


@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 6000,
        b'"\\ud800"',
        b'{"text": 1}',
        b"[" * 3000 + b"]" * 3000,
    ],
)
def test_odd_values_in_other_fields_do_not_matter(tmp_path: Path, value: bytes) -> None:
    assert text_of(tmp_path, b'{"x": ' + value + b', "text": "fine"}') == "fine"
    if value.isdigit():
        line = b'{"x": ' + value + b', "text": 1, "text": "fine"}'  # decided by Python
        assert text_of(tmp_path, line) == "fine"


def test_a_key_may_be_written_with_escapes(tmp_path: Path) -> None:
    assert text_of(tmp_path, rb'{"te\u0078t": "a"}') == "a"


def test_a_dotted_field_reaches_into_objects(tmp_path: Path) -> None:
    data = b'{"data": {"text": "a"}}\n{"data": {"x": 1}}\n{"data": null}\n{"data": 5}\n{}\n'
    got = read_lines(tmp_path, data, text_field="data.text")
    assert got.documents == ["a"]
    assert [reason for _, reason in got.rejects] == [
        "missing-field",
        "null-text",
        "missing-field",
        "missing-field",
    ]


def test_a_key_that_is_literally_dotted_goes_first_unless_null(tmp_path: Path) -> None:
    data = (
        b'{"data.text": "literal", "data": {"text": "nested"}}\n'
        b'{"data.text": null, "data": {"text": "nested"}}\n'
        b'{"data": 5, "data.text": "literal"}\n'
        b'{"data.text": null}\n'
        b'{"data.text": 5, "data": {"text": "nested"}}\n'
    )
    got = read_lines(tmp_path, data, text_field="data.text")
    assert got.documents == ["literal", "nested", "literal"]
    assert got.rejects == [(3, "null-text"), (4, "not-a-string")]


def test_a_line_over_the_limit_is_rejected_with_its_true_size(tmp_path: Path) -> None:
    line = b'{"text": "' + b"x" * 5000 + b'"}'
    data = b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n' + line
    for batch_bytes in (10, 100, 6000, 100_000):
        got = read_lines(tmp_path, data, batch_bytes=batch_bytes, max_document_bytes=1000)
        assert got.texts == [(0, "a"), (2, "b")]
        assert got.rejects == [(1, "too-large"), (3, "too-large")]
        assert [each.size for each in got.details] == [len(line)] * 2
        assert [each.offset for each in got.details] == [14, 14 + len(line) + 15]


def test_a_byte_order_mark_counts_to_the_size_of_its_line(tmp_path: Path) -> None:
    line = b'\xef\xbb\xbf{"text": "' + b"x" * 88 + b'"}\n'
    for batch_bytes in (1, 50, 1000):
        got = read_lines(tmp_path, line, batch_bytes=batch_bytes, max_document_bytes=102)
        assert got.rejects == [(0, "too-large")]


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    line = b'{"text": "' + b"x" * 88 + b'"}'
    for batch_bytes in (1, 50, 100, 101, 1000):
        options = {"batch_bytes": batch_bytes, "max_document_bytes": len(line)}
        assert len(read_lines(tmp_path, line + b"\n" + line, **options).documents) == 2
        options["max_document_bytes"] -= 1
        assert read_lines(tmp_path, line + b"\n" + line, **options).documents == []


def test_one_line_of_100_mb_is_passed_over_without_being_held(tmp_path: Path) -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    path = tmp_path / "a.jsonl"
    size = 100 << 20
    with path.open("wb") as out:
        out.write(b'{"text": "a"}\n{"text": "')
        for _ in range(size >> 20):
            out.write(b"x" * (1 << 20))
        out.write(b'"}\n{"text": "b"}\n')
    tracemalloc.start()
    got = read(path, SourceOptions(batch_bytes=1 << 20, max_document_bytes=4 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.texts == [(0, "a"), (2, "b")]
    assert [each.size for each in got.details] == [size + 12]
    assert peak < 20 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, kind: str) -> None:
    lines = [b'{"text": "%d"}\n' % i for i in range(300)]
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(b"".join(compress(line, kind) for line in [*lines, b""]))
    got = read(path, SourceOptions(unit_bytes=500, batch_bytes=64))
    assert got.documents == [str(i) for i in range(300)]
    assert len(got.ends) > 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("members", [1, 2])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, kind: str, members: int) -> None:
    whole = compress(b'{"text": "abc"}\n' * 1000, kind)
    path = tmp_path / f"a.jsonl.{kind}"
    for cut in (1, 5, len(whole) // 2, len(whole) - 3):
        path.write_bytes((whole * members)[:-cut])
        with pytest.raises(SourceError, match=r"a\.jsonl"):
            read(path, SourceOptions())


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_behind_a_compressed_stream_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(b'{"text": "abc"}\n' * 10, kind) + b"garbage, not a stream")
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        read(path, SourceOptions())


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_is_no_complete_compressed_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(b"")
    with pytest.raises(SourceError, match="empty"):
        read(path, SourceOptions())


@pytest.mark.parametrize("package", ["zlib_ng", "zlib"])
def test_gzip_files_are_read_and_refused_as_arrow_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    if package == "zlib":
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    else:
        pytest.importorskip("zlib_ng")
    dice, path, outcomes = random.Random(0), tmp_path / "a.jsonl.gz", Counter[str]()
    for number in range(150):
        data = bytearray(b"".join(_gzip_members(dice)))
        match number % 5:
            case 0:
                del data[dice.randrange(1, len(data)) :]
            case 1:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            case 2:
                data += bytes(dice.randrange(1, 600)) + dice.randbytes(dice.randrange(9))
            case 3:
                data += dice.randbytes(dice.randrange(1, 40))
        path.write_bytes(data)
        opened = base.open_decompressed(source_file(str(path)))
        expected = _all_or_error(pa.CompressedInputStream(pa.OSFile(str(path)), "gzip"))
        assert _all_or_error(opened) == expected
        outcomes[expected if isinstance(expected, str) else "whole"] += 1
    assert outcomes["whole"] >= 30
    assert outcomes["Truncated compressed stream"] > 10
    assert len(outcomes) > 5


def _gzip_members(dice: random.Random) -> Iterator[bytes]:
    """Members of many sizes; some end blocks early, and some are zlib's, which Arrow takes too."""
    for _ in range(dice.randrange(1, 5)):
        text = dice.randbytes(dice.choice([0, 1, 100, 5000])) * dice.choice([1, 2, 30])
        level, bits = dice.randrange(10), dice.choice([15, 31, 31])
        coder = zlib.compressobj(level, zlib.DEFLATED, bits)
        flush = dice.choice([zlib.Z_NO_FLUSH, zlib.Z_FULL_FLUSH])
        yield coder.compress(text) + coder.flush(flush) + coder.compress(text) + coder.flush()


def _all_or_error(stream: Any) -> bytes | str:
    found, buffer = bytearray(), bytearray(10_000)
    try:
        while count := stream.readinto(memoryview(buffer)):
            found += buffer[:count]
    except OSError as error:
        return str(error)
    finally:
        stream.close()
    return bytes(found)


def test_zero_padding_between_xz_streams_is_allowed(tmp_path: Path) -> None:
    stream = compress(b'{"text": "a"}\n', "xz")
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(stream + b"\0" * 8 + stream + b"\0" * 4)
    assert read(path, SourceOptions()).documents == ["a", "a"]


def test_units_of_a_stream_may_be_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(compress(b"".join(b'{"text": "%d"}\n' % i for i in range(100)), "gz"))
    options = SourceOptions(unit_bytes=300, batch_bytes=50)
    file = source_file(str(path))
    source = open_source(file, options)
    units = [unit for unit, _ in zip(plan_units(file, options), range(4), strict=False)]
    forward = [[b.texts.texts() for b in source.read(unit)] for unit in units]
    backward = [[b.texts.texts() for b in source.read(unit)] for unit in reversed(units)]
    assert forward == backward[::-1]
    next(source.read(units[1]))  # left in the middle
    assert [b.texts.texts() for b in source.read(units[1])] == forward[1]
    source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_units_hold_their_records_unless_one_is_far_too_large(
    tmp_path: Path, kind: str
) -> None:
    lines = [b'{"text": "%d"}\n' % i for i in range(100)]
    lines[30] = b'{"text": "%s"}\n' % (b"x" * 250)  # over the limit, and ends in the next unit
    lines[60] = b'{"text": "%s"}\n' % (b"x" * 1000)  # over two units
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(b"\xef\xbb\xbf" + b"".join(lines), kind))
    options = SourceOptions(unit_bytes=300, batch_bytes=50, max_document_bytes=200)
    got = read(path, options)
    assert got.rejects == [(30, "too-large"), (60, "too-large")]
    assert read_copies(source_file(str(path)), options, got) == len(got.ends) - 1


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 1000)
    file = source_file(str(path))
    source = open_source(file, SourceOptions(batch_bytes=100))
    (unit,) = plan_units(file, SourceOptions())
    batches = source.read(unit)
    next(batches)
    with path.open("ab") as out:
        out.write(b'{"text": "b"}\n')
    with pytest.raises(SourceError, match="changed while"):
        list(batches)
    with pytest.raises(SourceError, match="changed while"):
        open_source(file, SourceOptions())
    source.close()


def test_the_digest_of_a_unit_changes_with_its_own_bytes_only(tmp_path: Path) -> None:
    data = bytearray(b"".join(b'{"text": "%03d"}\n' % i for i in range(60)))
    before = [end.digest for end in read_lines(tmp_path, bytes(data), unit_bytes=160).ends]
    assert len(set(before)) == len(before) == 6
    for position in range(0, len(data), 31):
        changed = bytearray(data)
        if changed[position] == ord("\n"):
            continue
        changed[position] ^= 1
        after = [end.digest for end in read_lines(tmp_path, bytes(changed), unit_bytes=160).ends]
        assert [a != b for a, b in zip(before, after, strict=True)].count(True) == 1


PIECES = st.sampled_from(
    [
        b'{"text": "a"}',
        b'{"text": "b \\n \\u00e9 \\ud83d\\ude00"}',
        b'{"id": 1, "text": "' + "\u00e9\u65e5\U0001f600".encode() + b'"}',
        b'{"text": ""}',
        b"",
        b" ",
        b"\r",
        b" " * 120,
        b"null",
        b"{}",
        b'{"text": null}',
        b'{"text": 1}',
        b'{"text": "\xff"}',
        b'{"x": "\xff", "text": "q"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": "a"}{"text": "b"}',
        b'{"x": NaN, "text": "n"}',
        b'{"x": 1e999, "text": "n"}',
        b'{"text": "nul\0"}',
        b'{"text":',
        b'"c"}',
        b"}",
        b"{",
        b",",
        b'{"x": {"text": "in"}}',
        b'{"text": "long ' + b"y" * 120 + b'"}',
    ]
)
LINES = st.lists(
    st.lists(PIECES | st.binary(max_size=8), min_size=1, max_size=2).map(b"".join), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(
    lines=LINES,
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    end=st.sampled_from([b"", b"\n", b"\r\n"]),
    unit_bytes=st.integers(1, 200),
    batch_bytes=st.integers(1, 200),
    kind=st.sampled_from([None, *KINDS]),
)
def test_no_cut_changes_the_rows(
    lines: list[bytes],
    mark: bytes,
    end: bytes,
    unit_bytes: int,
    batch_bytes: int,
    kind: str | None,
) -> None:
    data = mark + b"\n".join(lines) + end
    with tempfile.TemporaryDirectory() as folder:
        whole = read_lines(Path(folder), data, max_document_bytes=100)
        path = Path(folder) / ("b.jsonl" if kind is None else f"b.jsonl.{kind}")
        path.write_bytes(data if kind is None else compress(data, kind))
        cut = read(
            path,
            SourceOptions(unit_bytes=unit_bytes, batch_bytes=batch_bytes, max_document_bytes=100),
        )
    assert cut.texts == whole.texts
    assert cut.rejects == whole.rejects
    assert sum(e.num_lines for e in cut.ends) == sum(e.num_lines for e in whole.ends)
    assert cut.num_bytes == whole.num_bytes == len(data)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "data", "x", "data.text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from(["text", "data", "x", "data.text"]), JSON_VALUES)
    | JSON_VALUES,
    field=st.sampled_from(["text", "data.text"]),
    escape=st.booleans(),
    flip=st.none() | st.tuples(st.integers(0, 200), st.integers(1, 255)),
)
def test_blocks_and_single_lines_agree_on_every_row(
    row: object, field: str, escape: bool, flip: tuple[int, int] | None
) -> None:
    line = bytearray(json.dumps(row, ensure_ascii=escape).encode("utf-8", "surrogatepass"))
    if flip is not None:
        line[flip[0] % len(line)] ^= flip[1]
    if b"\n" in line or not line.strip(b" \t\r") or line.startswith(b"\xef\xbb\xbf"):
        return
    with tempfile.TemporaryDirectory() as folder:
        got = read_lines(Path(folder), bytes(line), text_field=field)
    expected = decide(bytes(line).strip(b" \t\r"), field)
    assert got.num_rows == 1
    if isinstance(expected, bytes):
        assert got.documents == [expected.decode()]
    else:
        assert [reason for _, reason in got.rejects] == [expected[0]]


@given(
    lines=st.lists(
        st.sampled_from(
            [
                b'{"a": 1}',
                b'  {"a": "\xc3\xa9"} ',
                b"",
                b" ",
                b'{"a": 2}\r',
                b"[1]",
                b'{"\xff"}',
                b"{",
            ]
        ),
        max_size=12,
    ),
    batch_bytes=st.sampled_from([4, 30, 1000]),
)
@settings(max_examples=60)
def test_whole_lines_are_their_rows_whatever_stands_beside_them(
    lines: list[bytes], batch_bytes: int
) -> None:
    data = b"\n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        got = read_lines(Path(folder), data, fields=("a",), batch_bytes=batch_bytes)
    rows = [line.strip() for line in lines if line.strip()]
    assert [(row, text.strip()) for row, text in got.texts] == [
        (row, line.decode()) for row, line in enumerate(rows) if b"\xff" not in line
    ]
    assert got.rejects == [(n, "invalid-utf8") for n, line in enumerate(rows) if b"\xff" in line]
    places = [place for place in line_starts(lines) if place is not None]
    assert got.places == [place for n, place in enumerate(places) if b"\xff" not in rows[n]]


def line_starts(lines: list[bytes]) -> list[int | None]:
    """Where each line begins, None for blank ones."""
    starts = [len(b"\n".join(lines[:n])) + (n > 0) for n in range(len(lines))]
    return [at if line.strip() else None for at, line in zip(starts, lines, strict=True)]


@pytest.mark.parametrize("every", [2, 50])
def test_lines_in_doubt_between_others_keep_their_places(tmp_path: Path, every: int) -> None:
    lines = [
        b'{"text": "a", "text": "t%d"}' % n if n % every else b'{"text": "t%d"}' % n
        for n in range(300)
    ]
    lines[7], lines[100] = b'{"text": null}', b'{"text": 5}'
    got = read_lines(tmp_path, b"\n".join(lines))
    assert got.texts == [(n, f"t{n}") for n in range(300) if n not in (7, 100)]
    assert got.rejects == [(7, "null-text"), (100, "not-a-string")]
