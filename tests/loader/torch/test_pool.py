from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.loader.stores import write_store

from tokenmill.errors import UsageError
from tokenmill.loader.torch.feeder import TokenPool, free_memory, require_memory
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def gather(pool: TokenPool, *pieces: tuple[int, int]) -> list[int]:
    """The tokens of pieces (first, tokens) of the pool."""
    lengths = torch.tensor([length for _, length in pieces])
    ends = lengths.cumsum(0)
    shifts = torch.tensor([first for first, _ in pieces]) - (ends - lengths)
    found: list[int] = pool.gather(pool.find(ends, shifts, num_places=int(ends[-1]))).tolist()
    return found


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_000, torch.uint16), (100_000, torch.int32)])
def test_a_pool_holds_streams_back_to_back_in_their_own_width(
    tmp_path: Path, vocab_size: int, dtype: torch.dtype
) -> None:
    largest = vocab_size - 1
    first = write_store(tmp_path / "a", [[[1, 2, largest]], [[4, 5]]], vocab_size=vocab_size)
    second = write_store(tmp_path / "b", [[[6, 7, 8]]], vocab_size=vocab_size)
    streams = [TokenStream(first), TokenStream(second)]
    pool = TokenPool(streams, pad_id=40_000, pad_tokens=3, device=CPU)

    assert pool.bases.tolist() == [0, 5]
    assert pool.padding == 8
    assert gather(pool, (0, 8)) == [1, 2, largest, 4, 5, 6, 7, 8]
    assert gather(pool, (6, 2), (pool.padding, 3), (2, 1)) == [7, 8, *[40_000] * 3, largest]
    assert pool.gather(torch.tensor([1])).dtype == dtype


def test_tokens_that_do_not_fit_are_refused_with_numbers() -> None:
    assert free_memory(CPU) > 0
    require_memory(1, CPU)
    with pytest.raises(UsageError, match=r"needs 1000000.00 GB on 'cpu' .* GB are free"):
        require_memory(10**15, CPU)
