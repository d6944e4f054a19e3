"""The part in C that reads fields of JSON lines: what it reads, and what it leaves to others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engines import find_kernel
from tokenmill.sources.lines import FieldReader

NO_PART = "the compiled part is not there, or is turned off"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "more", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def fields_of(
    line: bytes, *template: tuple[bool, str], first: int | None = None
) -> tuple[bytes, int] | None:
    """The template filled with fields of a line, and where a part begins; None if it is left."""
    reader = FieldReader.of(template, first=first)
    if reader is None:
        pytest.skip(NO_PART)
    around = b"{" + line + b"}"
    read = reader.read(around, np.array([1]), np.array([1 + len(line)]))  # type: ignore[arg-type]
    assert read.texts.offsets[0] == 0
    assert len(read.texts) == 1
    return (read.texts.bytes_at(0), int(read.places[0])) if read.is_read[0] else None


def test_lines_are_read_by_the_compiled_part_where_it_is_there() -> None:
    assert (FieldReader.of([(True, "text")]) is None) == (find_kernel() is None)
    assert FieldReader.of([(True, "data.text")]) is None
    assert FieldReader.of([(False, "many")] * 99 + [(True, "text")]) is None


@settings(max_examples=300, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from(["text", "x", "y"]), VALUES),
    texts=st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=40)] * 2),
    names=st.sampled_from([("text", "more"), ("more", "text"), ("text", "text")]),
    escape=st.booleans(),
    separators=st.sampled_from([(",", ":"), (" ,\t", " : ")]),
    cut=st.none() | st.integers(0, 200),
)
def test_what_is_read_of_a_line_is_what_it_says(
    row: dict[str, Any],
    texts: tuple[str, str],
    names: tuple[str, str],
    escape: bool,
    separators: tuple[str, str],
    cut: int | None,
) -> None:
    row = row | {"text": texts[0], "more": texts[1]}
    line = json.dumps(row, ensure_ascii=escape, separators=separators)
    template = (True, names[0]), (False, "\u2192"), (True, names[1])
    found = fields_of(line.encode("utf-8", "surrogatepass")[:cut], *template, first=1)
    if cut is not None and cut < len(line.encode("utf-8", "surrogatepass")):
        assert found is None
        return
    has_odd = any(word in line for word in ("NaN", "Infinity", "\\ud", "\\uD"))
    expected = "\u2192".join(row[name] for name in names).encode(), len(row[names[0]].encode())
    assert found == expected or (found is None and has_odd)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"text": "a", "text": "b"}',
        b'{"te\\u0078t": "a"}',
        b'{"text": "a", "\\u0078": 1}',
        b'{"text": null}',
        b'{"text": 5}',
        b'{"text": "\\ud83d\\u0041"}',
        b'{"text": "\\ud83d\\ud83d"}',
        b'{"text": "\\ude00"}',
        b'{"text": "\\ude00\\ude00"}',
        b'{"text": "\\u12g4"}',
        b'{"text": "\\x"}',
        b'{"text": "\\"}',
        b'{"text": "a\tb"}',
        b'{"text": "a", "x": 01}',
        b'{"text": "a", "x": 1.}',
        b'{"text": "a", "x": .5}',
        b'{"text": "a", "x": +1}',
        b'{"text": "a", "x": 1e}',
        b'{"text": "a", "x": -}',
        b'{"text": "a", "x": nul}',
        b'{"text": "a", "x": NaN}',
        b'{"text": "a", "x": [1,]}',
        b'{"text": "a", "x": {"y" 1}}',
        b'{"text": "a",}',
        b'{"text": "a"} 1',
        b'{"text": "a"}{}',
        b'{"text": "a", "x": ' + b"9" * 4001 + b"}",
        b'{"text": "a", "x": ' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"text": "a", "x": ' + b'{"y":' * 64 + b"1" + b"}" * 64 + b"}",
        b'["text"]',
    ],
)
def test_a_line_in_doubt_is_left_to_others(line: bytes) -> None:
    assert fields_of(line, (True, "text")) is None


@pytest.mark.parametrize(
    "other",
    [
        *(b"0", b"-0.5e+10", b"12E-3", b"[]", b"{}", b"[[1, 2], {}]", b"true", b"false", b"null"),
        b'{"text": "inner"}',
        b"9" * 4000,
        b"[" * 63 + b"]" * 63,
        b'{"y":' * 63 + b"1" + b"}" * 63,
        b'"\\ud83d\\ude00\\/\\\\"',
    ],
)
def test_other_fields_may_hold_what_they_like(other: bytes) -> None:
    line = b' \t{ "x" : ' + other + b' , "text" : "\\u00e9\\n" }\r '
    assert fields_of(line, (True, "text")) == ("\u00e9\n".encode(), 0)


def test_what_does_not_fit_together_is_refused() -> None:
    reader = FieldReader.of([(True, "text")])
    if reader is None:
        pytest.skip(NO_PART)
    line = b'{"text": "some"}'

    def fill(**wrong: Any) -> None:
        given: dict[str, Any] = {
            "data": line,
            "starts": np.array([0]),
            "ends": np.array([len(line)]),
            "names": (b"text",),
            "parts": (0,),
            "first": -1,
            "out": np.empty(len(line) + 8, np.uint8),
            "offsets": np.empty(2, np.int64),
            "places": np.empty(1, np.int64),
            "is_read": np.empty(1, np.bool_),
        }
        reader._fill(*(given | wrong).values())

    fill()
    for start, end in ((-1, 3), (3, 2), (0, len(line) + 1), (0, 2**62)):
        with pytest.raises(ValueError, match="lines must be within the data"):
            fill(starts=np.array([start]), ends=np.array([end]))
    for wrong in ({"starts": np.zeros(2, np.int64)}, {"offsets": np.empty(1, np.int64)}):
        with pytest.raises(ValueError, match="a start, an end and a place for each line"):
            fill(**wrong)
    with pytest.raises(ValueError, match="no room for the texts"):
        fill(out=np.empty(3, np.uint8))
    for parts in ((1,), (-1,), (0,) * 99):
        with pytest.raises(ValueError, match="too many fields, or one without a name"):
            fill(parts=parts)
    with pytest.raises(TypeError):
        fill(names=("text",))
