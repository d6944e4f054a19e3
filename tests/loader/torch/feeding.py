"""Stores and loaders for the tests of the torch side, and what is compared with what."""

from __future__ import annotations

import threading
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.loader.stores import write_store

from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from tokenmill.loader.batch import Batch

LENGTHS = [[5, 17, 1, 9, 30, 2], [12, 3, 8], [26, 4, 4, 19, 7]]
"""Documents of three shards: shorter and longer than a row, and many to a row."""
ALL_FIELDS = ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "loss_mask")
LAYOUTS: list[dict[str, Any]] = [
    {"packing": "concat"},
    {"packing": "concat", "boundaries": "mask"},
    {"packing": "best-fit", "boundaries": "mask", "pad_id": 256},
    {"packing": "pad", "pad_id": 256},
    {"packing": "concat", "labels": "same"},
    {"packing": "best-fit", "boundaries": "mask", "labels": "same"},
]


def make_store(folder: Path, *, has_mask: bool = False) -> Path:
    """Ids count up from 50,000: they fit in uint16 and not in int16.

    By the mask, those count that are divided by 3 or 7; that are nearly half of them.
    """
    path = folder / ("masked" if has_mask else "store")
    ids = count(50_000)
    shards = [[list(islice(ids, n)) for n in lengths] for lengths in LENGTHS]
    masks = [[[int(i % 3 == 0 or i % 7 == 0) for i in one] for one in shard] for shard in shards]
    write_store(path, shards, masks=masks if has_mask else None)
    return path


def make_loader(store: Path, **options: Any) -> Loader:
    settings: dict[str, Any] = {"seq_len": 8, "batch_size": 2, "epochs": 2, "seed": 1, **options}
    return Loader(store, **settings)


def assert_same(tensors: Mapping[str, torch.Tensor], batch: Batch, fields: Sequence[str]) -> None:
    """Tensors hold what a batch of an int64 loader holds."""
    assert list(tensors.keys()) == list(fields)
    for name in fields:
        expected = getattr(batch, name)
        assert tensors[name].is_contiguous()
        assert np.array_equal(tensors[name].cpu().numpy(), expected), name
        assert tensors[name].shape == expected.shape


def tokenmill_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenmill")]


def feeder_threads() -> list[threading.Thread]:
    return [thread for thread in tokenmill_threads() if thread.name == "tokenmill feeder"]
