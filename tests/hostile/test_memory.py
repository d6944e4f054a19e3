"""Input that takes far more memory or time than its size tells, against the budget."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack, tried

from tokenmill.sources.base import SourceOptions
from tokenmill.sources.blocks import Block
from tokenmill.sources.jsonl import JsonlParser

if TYPE_CHECKING:
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
    block = Block(7, len(data), buffer=data, low=0, high=len(data))
    batch, _ = parser.rows(block, first_row=0)
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
