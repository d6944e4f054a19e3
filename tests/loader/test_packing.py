from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store, write_store

from tokenmill.errors import StoreError
from tokenmill.loader.packing import BLOCK_DOCUMENTS, PART_PIECES, best_fit, length_blocks, pack
from tokenmill.store.plans import unpack_items

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Piece = tuple[int, int]

lengths_of_documents = st.lists(st.integers(0, 60), max_size=40)
seq_lens = st.integers(1, 24)


def packed(*blocks: Sequence[int], seq_len: int) -> list[list[Piece]]:
    """Rows, each a list of (position, tokens)."""
    rows: list[list[Piece]] = []
    for part in pack([np.array(block, np.int32) for block in blocks], seq_len=seq_len):
        starts, tokens = unpack_items(part.items)
        pieces = list(zip(starts.tolist(), tokens.tolist(), strict=True))
        borders = [*part.row_starts.tolist(), len(pieces)]
        rows += [pieces[first:last] for first, last in itertools.pairwise(borders)]
    return rows


def naive_pieces(lengths: Sequence[int], *, seq_len: int) -> list[Piece]:
    """Pieces of all documents, cut as the format says, in the order of the stream."""
    pieces, position = [], 0
    for length in lengths:
        first = 0
        while length - first > seq_len + 1:
            pieces.append((position + first, seq_len + 1))
            first += seq_len
        if length:
            pieces.append((position + first, length - first))
        position += length
    return pieces


def naive_rooms(lengths: Sequence[int], *, capacity: int) -> list[int]:
    """Room left in each bin by best-fit decreasing, one piece at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=300), capacity=st.integers(20, 45))
def test_groups_of_bins_end_as_full_as_bins_packed_one_piece_at_a_time(
    lengths: list[int], capacity: int
) -> None:
    runs = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity=capacity)
    longest_first = iter(sorted(lengths, reverse=True))
    rooms: dict[int, int] = {}
    for first, bins, per_bin in runs:
        for number in range(first, first + bins):
            taken = sum(itertools.islice(longest_first, per_bin))
            rooms[number] = rooms.get(number, capacity) - taken
    assert next(longest_first, None) is None
    assert sorted(rooms) == list(range(len(rooms)))
    assert sorted(rooms.values()) == naive_rooms(lengths, capacity=capacity)


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_every_piece_stands_in_exactly_one_row_and_no_row_is_over_full(
    lengths: list[int], seq_len: int
) -> None:
    rows = packed(lengths, seq_len=seq_len)
    assert sorted(itertools.chain(*rows)) == naive_pieces(lengths, seq_len=seq_len)
    assert all(sum(tokens for _, tokens in row) <= seq_len + 1 for row in rows)


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_every_token_is_there_once_and_a_second_time_only_where_its_document_goes_on(
    lengths: list[int], seq_len: int
) -> None:
    seen = np.zeros(sum(lengths), np.int64)
    for start, tokens in itertools.chain(*packed(lengths, seq_len=seq_len)):
        seen[start : start + tokens] += 1
    expected = [
        2 if place and place % seq_len == 0 and place + 1 < length else 1
        for length in lengths
        for place in range(length)
    ]
    assert seen.tolist() == expected


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_there_are_as_many_rows_as_naive_best_fit_needs(lengths: list[int], seq_len: int) -> None:
    tokens = [tokens for _, tokens in naive_pieces(lengths, seq_len=seq_len)]
    naive = naive_rooms(tokens, capacity=seq_len + 1)
    assert len(packed(lengths, seq_len=seq_len)) == len(naive)


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_rows_follow_their_first_documents_and_documents_their_numbers(
    lengths: list[int], seq_len: int
) -> None:
    rows = packed(lengths, seq_len=seq_len)
    ends = np.cumsum(lengths)
    firsts = [int(np.searchsorted(ends, row[0][0], side="right")) for row in rows]
    assert firsts == sorted(firsts)
    assert all(row == sorted(row) for row in rows)


@settings(deadline=None)
@given(blocks=st.lists(lengths_of_documents, max_size=4), seq_len=seq_lens)
def test_blocks_are_packed_one_by_one_and_positions_go_on(
    blocks: list[list[int]], seq_len: int
) -> None:
    expected: list[list[Piece]] = []
    position = 0
    for block in blocks:
        alone = packed(block, seq_len=seq_len)
        expected += [[(start + position, tokens) for start, tokens in row] for row in alone]
        position += sum(block)
    assert packed(*blocks, seq_len=seq_len) == expected


def test_a_small_stream_is_packed_like_this() -> None:
    #          0  1  2  3   4  5  6  documents
    lengths = [3, 5, 2, 0, 11, 1, 4]
    assert packed(lengths, seq_len=4) == [
        [(0, 3), (8, 2)],
        [(3, 5)],
        [(10, 5)],
        [(14, 5)],
        [(18, 3)],
        [(21, 1), (22, 4)],
    ]


def test_documents_far_longer_than_rows_are_packed_in_parts() -> None:
    lengths = np.array([2_100_000, 1_200_000, 1_000_000, 4], np.int32)
    parts = list(pack([lengths], seq_len=1))
    assert len(parts) == 2
    assert [part.documents for part in parts] == [1, 3]
    assert max(len(part.items) for part in parts) <= PART_PIECES
    starts, tokens = unpack_items(np.concatenate([part.items for part in parts]))
    assert sum(len(part.row_starts) for part in parts) == len(starts) == 4_300_000
    assert (tokens == 2).all()
    last_tokens = np.cumsum(lengths) - 1
    assert np.array_equal(np.sort(starts), np.delete(np.arange(lengths.sum()), last_tokens))


def test_blocks_of_documents_do_not_depend_on_the_shards(tmp_path: Path) -> None:
    sizes = (600_000, 1, 500_000)
    store = write_store(tmp_path, [[[7]] * size for size in sizes])
    blocks = list(length_blocks(store))
    assert [len(block) for block in blocks] == [BLOCK_DOCUMENTS, sum(sizes) - BLOCK_DOCUMENTS]
    rows = list(pack(blocks, seq_len=9))
    assert [len(part.row_starts) for part in rows] == [-(-len(block) // 10) for block in blocks]
    starts, _ = unpack_items(rows[1].items)
    assert starts[0] == BLOCK_DOCUMENTS


def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    store = numbered_store(tmp_path, [[3, 4], [5, 6, 2]])
    assert [block.tolist() for block in length_blocks(store)] == [[3, 4, 5, 6, 2]]
    path = store.layout.shard_file(store.shards[1].name, "idx")
    data = bytearray(path.read_bytes())
    data[34] += 1
    path.write_bytes(data)
    store.close()
    with pytest.raises(StoreError, match=r"tokenmill\.verify\("):
        list(length_blocks(store))
