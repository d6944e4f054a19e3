"""Rows of a batch, taken apart and put together, beside the plain way to do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.records import TokenBatch
from tokenmill.supervised.chat import PLAIN, PieceCut
from tokenmill.supervised.rows import RowText
from tokenmill.supervised.shaper import RowPieces, TextBoundaries

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPECIAL = 1000


class CharacterBorders(TextBoundaries):
    """A token is a character."""

    def __init__(self) -> None:
        pass

    def tokens_in(
        self, text: str, ids: NDArray[np.uint32], start: int, end: int, *, touching: bool
    ) -> tuple[int, int]:
        assert [ord(character) for character in text] == ids.tolist()
        assert touching
        return start, end


@st.composite
def rows(draw: st.DrawFn) -> RowText:
    strings = draw(st.lists(st.text("abc", max_size=4), min_size=1, max_size=5))
    kinds = [PLAIN if n % 2 == 0 else SPECIAL + n for n in range(len(strings))]
    strings = [text or "s" if n % 2 else text for n, text in enumerate(strings)]
    text = "".join(strings)
    marks = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    ranges = list(zip(marks[::2], marks[1::2], strict=False))
    return RowText(text, ranges, PieceCut(strings, kinds))


def expected(row: RowText) -> tuple[list[int], list[int]]:
    ids, mask, place = [], [], 0
    counts = [any(low <= n < high for low, high in row.ranges) for n in range(len(row.text))]
    for text, kind in zip(*row.cut, strict=True):
        inside = counts[place : place + len(text)]
        ids += [ord(character) for character in text] if kind == PLAIN else [kind]
        mask += [int(each) for each in inside] if kind == PLAIN else [int(any(inside))]
        place += len(text)
    return ids, mask


@given(st.lists(rows(), max_size=6))
def test_rows_in_a_batch_are_what_each_is_alone(batch: list[RowText]) -> None:
    pieces = RowPieces()
    for row in batch:
        pieces.add(row)
    texts = pieces.plain_texts().texts()
    assert all(texts)
    tokens = TokenBatch.from_lists([[ord(character) for character in text] for text in texts])
    boundaries = cast("Any", CharacterBorders())
    joined, mask = pieces.put_together(tokens, boundaries, boundaries)
    found = [
        (joined[n].tolist(), mask[joined.offsets[n] : joined.offsets[n + 1]].tolist())
        for n in range(len(joined))
    ]
    assert found == [expected(row) for row in batch]
