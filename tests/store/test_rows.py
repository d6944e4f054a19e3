from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.store.format import RowRuns, check_runs, place_of, row_lengths, split_counts


@given(
    rows=st.sets(st.integers(0, 60), max_size=40).map(sorted),
    cuts=st.lists(st.integers(0, 40), max_size=4).map(sorted),
)
def test_runs_give_back_every_row_however_the_rows_were_batched(
    rows: list[int], cuts: list[int]
) -> None:
    runs = RowRuns()
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        runs.add(np.array(rows[first:last], np.int64))
    lengths = runs.lengths()
    assert [place_of(lengths, (), document=k).row for k in range(len(rows))] == rows
    assert runs.pieces() == ()
    check_runs(lengths, documents=len(rows), rows=61)


@given(
    pieces=st.dictionaries(st.integers(0, 40), st.integers(1, 4), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4).map(sorted),
)
def test_pieces_give_back_the_row_of_every_document(
    pieces: dict[int, int], cuts: list[int]
) -> None:
    rows = sorted(pieces)
    runs = RowRuns()
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        some = [row for row in rows[first:last] for _ in range(pieces[row])]
        runs.add(np.array(some, np.int64))
    expected = [(row, k, pieces[row]) for row in rows for k in range(pieces[row])]
    places = range(len(expected))
    assert [place_of(runs.lengths(), runs.pieces(), document=k) for k in places] == expected
    several = [count for count in pieces.values() if count > 1]
    assert split_counts(runs.pieces()) == (len(several), sum(several))
    check_runs(runs.lengths(), documents=len(expected), rows=41, pieces=runs.pieces())
    lengths = np.arange(1, len(expected) + 1)
    joined = [sum(n + 1 for n, e in enumerate(expected) if e[0] == row) for row in rows]
    assert row_lengths(lengths, runs.pieces()).tolist() == joined


@pytest.mark.parametrize("pieces", [(1,), (0, 1), (-1, 2), (0, 4), (2, 2), (0, 2, 0, 2)])
def test_pieces_that_do_not_fit_their_documents_are_refused(pieces: tuple[int, ...]) -> None:
    check_runs((0, 2), documents=3, rows=2, pieces=(1, 2))
    with pytest.raises(ValueError, match=r"pieces|row runs"):
        check_runs((0, 2), documents=3, rows=2, pieces=pieces)


def test_a_shard_of_all_rows_is_one_run_over_many_batches() -> None:
    runs = RowRuns()
    for first in range(0, 1000, 100):
        runs.add(np.arange(first, first + 100))
    assert runs.lengths() == (0, 1000)


def test_the_numbers_alternate_between_rows_passed_over_and_rows_taken() -> None:
    runs = RowRuns()
    runs.add(np.array([2, 3, 4, 6, 7, 8, 9]))
    assert runs.lengths() == (2, 3, 1, 4)


@pytest.mark.parametrize("rows", [[3, 2], [0, 0], [0]])
def test_rows_out_of_order_are_our_own_bug(rows: list[int]) -> None:
    runs = RowRuns()
    runs.add(np.array([0]))
    with pytest.raises(ValueError, match="ascend"):
        runs.add(np.array(rows))


@pytest.mark.parametrize(
    ("runs", "documents", "rows"),
    [
        ((0, 3), 2, 3),
        ((0, 3), 3, 2),
        ((0,), 0, 5),
        ((0, 2, 0, 1), 3, 9),
        ((0, 0), 0, 9),
        ((-1, 2), 2, 9),
    ],
)
def test_runs_that_do_not_fit_their_unit_are_refused(
    runs: tuple[int, ...], documents: int, rows: int
) -> None:
    with pytest.raises(ValueError, match="row runs"):
        check_runs(runs, documents=documents, rows=rows)
