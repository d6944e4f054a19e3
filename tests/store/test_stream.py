from __future__ import annotations

import pickle
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store

from tokenmill.errors import StoreError
from tokenmill.store import stream as stream_module
from tokenmill.store.stream import MappedTokens, ReservedTokens, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LENGTHS = [[3, 5, 1], [], [7], [2, 2]]


@pytest.fixture(
    scope="module",
    params=["as this system has it", "as every system has it", "with many documents"],
)
def stream(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TokenStream]:
    store = numbered_store(tmp_path_factory.mktemp("stream") / "store", LENGTHS)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as every system has it":
            patch.setattr("tokenmill.store.stream.MAX_SHARDS", 0)
        if request.param == "with many documents":
            patch.setattr("tokenmill.store.stream.FEW_DOCUMENTS", 0)
        yield TokenStream(store)


def test_linux_reads_from_one_range_of_addresses(stream: TokenStream) -> None:
    expected = MappedTokens if stream_module.MAX_SHARDS == 0 else ReservedTokens
    if sys.platform == "linux":
        assert type(stream._source) is expected


def read(stream: TokenStream, pieces: Sequence[tuple[int, int]], *, pad: int = 999) -> list[int]:
    starts, lengths = np.array(pieces, np.int64).reshape(-1, 2).T
    found: list[int] = stream.read(starts, lengths, pad=pad).tolist()
    return found


def test_pieces_come_back_to_back_in_the_order_asked_for(stream: TokenStream) -> None:
    assert read(stream, [(4, 2), (0, 3), (4, 1)]) == [4, 5, 0, 1, 2, 4]
    assert read(stream, []) == []


def test_a_piece_may_cross_shards_and_an_empty_shard(stream: TokenStream) -> None:
    assert read(stream, [(7, 4), (0, 20)]) == [7, 8, 9, 10, *range(20)]


def test_a_piece_below_zero_is_padding(stream: TokenStream) -> None:
    assert read(stream, [(-1, 2), (19, 1), (-1, 5), (8, 3)]) == [999] * 2 + [19] + [999] * 5 + [
        8,
        9,
        10,
    ]


def test_tokens_that_were_read_can_be_written(stream: TokenStream) -> None:
    tokens = stream.read(np.array([0]), np.array([3]), pad=0)
    tokens[0] = 7
    assert read(stream, [(0, 3)]) == [0, 1, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 18), st.integers(1, 20)), max_size=8))
def test_any_pieces_are_those_of_the_joined_shards(
    stream: TokenStream, wanted: list[tuple[int, int]]
) -> None:
    pieces = [(start, min(length, 20 - start)) for start, length in wanted]
    expected = [999 if start < 0 else start + i for start, length in pieces for i in range(length)]
    assert read(stream, pieces) == expected


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 19), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_pieces_are_cut_where_documents_begin_inside_them(
    stream: TokenStream, wanted: list[tuple[int, int]], repeats: int
) -> None:
    begins = {0, 3, 8, 9, 16, 18}
    pieces = [(start, min(length, 20 - start)) for start, length in wanted] * repeats
    starts, lengths = np.array(pieces, np.int64).T
    expected: list[tuple[int, int]] = []
    for start, length in pieces:
        cuts = [p for p in range(start + 1, start + length) if start >= 0 and p in begins]
        borders = [start, *cuts, start + length]
        expected += [(a, b - a) for a, b in pairwise(borders)]
    cut = stream.cut_at_documents(starts, lengths)
    assert list(zip(*(column.tolist() for column in cut), strict=True)) == expected


def test_positions_and_documents_name_each_other(stream: TokenStream) -> None:
    spans = [stream.document_span(k) for k in range(len(stream.store))]
    assert spans == [(0, 3), (3, 5), (8, 1), (9, 7), (16, 2), (18, 2)]
    numbers = [stream.document_at(position) for position in range(20)]
    assert numbers == [k for k, (_, length) in enumerate(spans) for _ in range(length)]
    with pytest.raises(IndexError, match="position 20 of a stream of 20 tokens"):
        stream.document_at(20)


def test_a_stream_survives_pickling(stream: TokenStream) -> None:
    assert read(pickle.loads(pickle.dumps(stream)), [(7, 4)]) == [7, 8, 9, 10]


def test_reading_data_that_is_not_in_memory_gives_the_same(
    stream: TokenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read is taken for a slow one, so that the next brings its pages first."""
    monkeypatch.setattr("tokenmill.store.stream.SLOW_SECONDS_PER_PIECE", -1.0)
    cold = TokenStream(stream.store, scattered=True)
    for _ in range(3):
        assert read(cold, [(7, 4), (-1, 2), (0, 20)]) == [7, 8, 9, 10, 999, 999, *range(20)]
        assert cold._source._is_slow  # type: ignore[union-attr]


@pytest.mark.parametrize("most_shards", [0, 100])
def test_a_shard_that_was_cut_after_opening_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_shards: int
) -> None:
    monkeypatch.setattr("tokenmill.store.stream.MAX_SHARDS", most_shards)
    store = numbered_store(tmp_path / "store", LENGTHS)
    stream = TokenStream(store)
    (shard,) = [shard for shard in store.shards if shard.name.startswith("part-2")]
    path = store.layout.shard_file(shard.name, "bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert read(stream, [(0, 9)]) == [*range(9)]
    with pytest.raises(StoreError, match=r"part-2.*has 12 bytes instead of 14"):
        read(stream, [(9, 7)])


def test_tokens_outlive_their_stream(tmp_path: Path) -> None:
    stream = TokenStream(numbered_store(tmp_path / "store", LENGTHS))
    tokens = stream.read(np.array([0]), np.array([20]), pad=0)
    del stream
    assert tokens.tolist() == [*range(20)]
