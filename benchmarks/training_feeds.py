"""Ways to feed the same trainer, as people do it: what `benchmarks.training_gpu` compares.

    cached    one batch that is on the device: what a step costs with nothing to wait for
    again     the same once more: by how much two measurements of one thing differ
    tokenmill DeviceFeeder over a store
    single    tokenizers' `encode`, text by text, in the training loop
    batched   tokenizers' `encode_batch` in the loop: as many texts as a batch has rows, all cores
    workers   a DataLoader whose workers call `encode`; its batches come in pinned memory

All but the cached batch cut the same texts, end to end with an end token between them, into rows of
`seq_len + 1`. Each is opened when its turn comes and closed after it, so that none works while
another is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenmill import Loader
from tokenmill.torch import DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from tokenmill.trainer.loop import Setup


@dataclass(frozen=True, kw_only=True)
class Material:
    """What there is to train on, as text and as a store."""

    texts: Sequence[str]
    tokenizer: Tokenizer
    eos: int
    store: Path
    num_workers: int


def rows(encoded: Iterable[Sequence[int]], *, eos: int, length: int) -> Iterator[NDArray[np.int64]]:
    """Texts end to end, cut into rows."""
    held: list[int] = []
    for ids in encoded:
        held.extend(ids)
        held.append(eos)
        while len(held) >= length:
            yield np.array(held[:length], np.int64)
            del held[:length]


def encode_single(material: Material, *, first: int = 0, stride: int = 1) -> Iterator[list[int]]:
    """Text by text."""
    texts = itertools.cycle(material.texts)
    for text in itertools.islice(texts, first, None, stride):
        yield material.tokenizer.encode(text, add_special_tokens=False).ids


def encode_batched(material: Material, *, at_once: int) -> Iterator[list[int]]:
    """So many texts in one call."""
    texts = itertools.cycle(material.texts)
    while True:
        some = list(itertools.islice(texts, at_once))
        for found in material.tokenizer.encode_batch(some, add_special_tokens=False):
            yield found.ids


class Rows(IterableDataset[torch.Tensor]):
    """Rows that a worker makes of its share of the texts."""

    def __init__(self, material: Material, length: int) -> None:
        self.material = material
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encoded = encode_single(self.material, first=info.id, stride=info.num_workers)
        for row in rows(encoded, eos=self.material.eos, length=self.length):
            yield torch.from_numpy(row)


def batch_of(stacked: torch.Tensor, device: torch.device) -> SimpleNamespace:
    """Inputs and labels on the device."""
    moved = stacked.to(device, non_blocking=stacked.is_pinned())
    return SimpleNamespace(input_ids=moved[:, :-1].contiguous(), labels=moved[:, 1:].contiguous())


def in_the_loop(
    encoded: Iterator[list[int]], material: Material, setup: Setup
) -> Iterator[SimpleNamespace]:
    """Batches that are made when they are asked for."""
    made = rows(encoded, eos=material.eos, length=setup.seq_len + 1)
    while True:
        some = np.stack(list(itertools.islice(made, setup.micro_batch)))
        yield batch_of(torch.from_numpy(some), setup.device)


@contextlib.contextmanager
def open_cached(material: Material, setup: Setup) -> Iterator[Iterator[Any]]:
    yield itertools.repeat(next(in_the_loop(encode_single(material), material, setup)))


@contextlib.contextmanager
def open_tokenmill(material: Material, setup: Setup) -> Iterator[Iterator[Any]]:
    loader = Loader(
        material.store, split="train", seq_len=setup.seq_len, batch_size=setup.micro_batch
    )
    with DeviceFeeder(loader, device=setup.device) as feeder:
        yield iter(feeder)


@contextlib.contextmanager
def open_single(material: Material, setup: Setup) -> Iterator[Iterator[Any]]:
    yield in_the_loop(encode_single(material), material, setup)


@contextlib.contextmanager
def open_batched(material: Material, setup: Setup) -> Iterator[Iterator[Any]]:
    encoded = encode_batched(material, at_once=setup.micro_batch)
    yield in_the_loop(encoded, material, setup)


@contextlib.contextmanager
def open_workers(material: Material, setup: Setup) -> Iterator[Iterator[Any]]:
    loader = DataLoader(
        Rows(material, setup.seq_len + 1),
        batch_size=setup.micro_batch,
        num_workers=material.num_workers,
        pin_memory=setup.device.type == "cuda",
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    try:
        yield (batch_of(stacked, setup.device) for stacked in batches)
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]


FEEDS = {
    "cached": open_cached,
    "again": open_cached,
    "tokenmill": open_tokenmill,
    "single": open_single,
    "batched": open_batched,
    "workers": open_workers,
}
