from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.loader.torch.feeding import make_loader, make_store
from torch import distributed

from tokenmill.errors import UsageError
from tokenmill.torch import distributed_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_ranks_are_not_guessed() -> None:
    with pytest.raises(UsageError, match=r"torch\.distributed is not initialised"):
        distributed_ranks()


def test_ranks_are_those_of_the_process_group(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1
    )
    try:
        assert distributed_ranks() == {"rank": 0, "world_size": 1}
        group = distributed.new_group([0])
        assert distributed_ranks(group) == {"rank": 0, "world_size": 1}
        loader = make_loader(make_store(tmp_path), **distributed_ranks())
        assert loader.world_size == 1
    finally:
        distributed.destroy_process_group()
