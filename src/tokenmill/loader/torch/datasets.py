"""Datasets for torch's DataLoader, and for torchdata's StatefulDataLoader.

    TokenDataset   rows by number, in the layout's own order: any sampler, any number of workers
    BatchDataset   the ready batches of a loader: DataLoader(BatchDataset(loader), batch_size=None)

`BatchDataset` keeps the loader's stream whatever the number of workers: worker w of k makes every
k-th batch from the w-th on, and DataLoader takes them in turn. Labels are the next tokens already;
a model that shifts labels itself (as those of transformers do) must be told not to.
"""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tokenmill.errors import UsageError
from tokenmill.loader.batch import BatchFormat, Draw
from tokenmill.loader.loader import Loader
from tokenmill.loader.options import Boundaries
from tokenmill.loader.torch.tensors import DEFAULT_FIELDS, Form, to_tensors
from tokenmill.loader.window import Window

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from tokenmill.loader.torch.tensors import TensorBatch
    from tokenmill.store.reader import Store

    Row = dict[str, torch.Tensor]


class TokenDataset(Dataset["Row"]):
    """The rows of a store, as dicts of one-dimensional tensors.

    >>> rows = TokenDataset("my-store", seq_len=2048)
    >>> DataLoader(rows, batch_size=16, shuffle=True, num_workers=2)

    Order and resumption are the sampler's; for those of a loader use `BatchDataset`.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        seq_len: int,
        packing: str = "concat",
        boundaries: str = "keep",
        pad_id: int | None = None,
        split: str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self._open(
            {
                "source": store,
                "seq_len": seq_len,
                "packing": packing,
                "boundaries": boundaries,
                "pad_id": pad_id,
                "split": split,
            },
            Form.of(fields, dtype=dtype),
        )

    def _open(self, options: dict[str, Any], form: Form) -> None:
        if "cu_seqlens" in form.fields:
            raise UsageError(
                "a single row has no cu_seqlens: they count through all rows of a batch",
                hint="leave them out, or take whole batches with BatchDataset",
            )
        self._options = options
        self._form = form
        loader = Loader(**options, batch_size=1, shuffle=False, prefetch=0)
        layouts = loader.layouts()
        if len(layouts) > 1:
            raise UsageError(
                f"a mixture of {len(layouts)} stores has no rows of its own to number",
                hint="use BatchDataset(Loader(mixture, ...))",
            )
        self.layout = layouts[0]
        self._pad_id = loader.options.pad_id
        self._format = BatchFormat(
            dtype=None, mask_borders=loader.options.boundaries is Boundaries.MASK, capacity=1
        )

    def __len__(self) -> int:
        return self.layout.num_rows

    def __getitem__(self, row: SupportsIndex) -> Row:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[SupportsIndex]) -> list[Row]:
        """Several rows, read in one go; DataLoader asks for a batch in this way."""
        tensors = self._read(np.array([self._number(row) for row in rows], np.int64))
        columns = [tensor.unbind() for tensor in tensors.values()]
        return [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]

    def _number(self, row: SupportsIndex) -> int:
        number = operator.index(row)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"row {row} of a layout of {len(self):,} rows")
        return number

    def _read(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> TensorBatch:
        zeros = np.zeros((1, len(rows)), np.int64)
        draw = Draw(range(1), self.layout.seq_len, zeros, rows[None], zeros)
        window = Window(draw, layouts=[self.layout], pad_id=self._pad_id, format=self._format)
        batch = next(window.chunk(0, 1).batches())
        return to_tensors(batch, fields=self._form.fields, dtype=self._form.dtype)

    # A process that is spawned opens the store itself.
    def __getstate__(self) -> tuple[dict[str, Any], Form]:
        return self._options, self._form

    def __setstate__(self, state: tuple[dict[str, Any], Form]) -> None:
        self._open(*state)


class BatchDataset(IterableDataset["TensorBatch"]):
    """The batches of a loader, from `loader.step` on.

    >>> DataLoader(BatchDataset(loader), batch_size=None, num_workers=2)

    StatefulDataLoader saves and restores its position by itself. With a plain DataLoader the loader
    stays where it is, since workers read ahead; move it with the batches that were consumed, and
    save its state:

    >>> loader.seek(batch.step + 1)
    >>> state = loader.state_dict()     # later: loader.load_state_dict(state), before iterating
    """

    def __init__(
        self,
        loader: Loader,
        *,
        fields: Sequence[str] = DEFAULT_FIELDS,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.loader = loader
        self._form = Form.of(fields, dtype=dtype)

    def __len__(self) -> int:
        return len(self.loader) - self.loader.step

    def __iter__(self) -> Iterator[TensorBatch]:
        worker = get_worker_info()
        number, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _Steps(self.loader, self._form, first=self.loader.step + number, stride=stride)


class _Steps:
    """Every stride-th batch of a loader; stateful, as StatefulDataLoader wants iterators to be."""

    def __init__(self, loader: Loader, form: Form, *, first: int, stride: int) -> None:
        # A loader of its own to move: the user's stays where it is.
        self._loader = copy.copy(loader)
        self._form = form
        self._stride = stride
        self._go_to(first)

    def _go_to(self, step: int) -> None:
        self._next = step
        self._batches = self._loader.batches(first=step, stride=self._stride)

    def __iter__(self) -> Iterator[TensorBatch]:
        return self

    def __next__(self) -> TensorBatch:
        batch = next(self._batches)
        self._next = batch.step + self._stride
        return to_tensors(batch, fields=self._form.fields, dtype=self._form.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The state of a loader at the next step of this worker."""
        end = self._loader.num_steps
        self._loader.seek(self._next if end is None else min(self._next, end))
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._go_to(self._loader.step)
