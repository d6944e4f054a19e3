"""Which part of every global batch this process takes, as torch.distributed knows it."""

from __future__ import annotations

from typing import TypedDict

from torch import distributed

from tokenmill.errors import UsageError


class Ranks(TypedDict):
    """Two options of the loader."""

    rank: int
    world_size: int


def distributed_ranks(group: distributed.ProcessGroup | None = None) -> Ranks:
    """Rank and size of a process group, for the loader; of all processes unless one is given.

    Where a model is split over several processes, those must get the same rows: give the group of
    the data-parallel dimension, such as `mesh["dp"].get_group()`.

    >>> Loader(store, seq_len=2048, batch_size=16, **distributed_ranks())
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            "torch.distributed is not initialised, so it knows neither rank nor world_size;"
            " guessed ones could give every process the same rows",
            hint="call torch.distributed.init_process_group() first, or give the loader rank and"
            " world_size",
        )
    return Ranks(rank=distributed.get_rank(group), world_size=distributed.get_world_size(group))
