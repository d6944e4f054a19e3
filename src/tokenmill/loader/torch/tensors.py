"""A batch as tensors, on whatever device.

    batches --Form.stacked--> narrow arrays --(the bus)--> narrow tensors --Form.tensors--> fields

Several steps travel together, (steps, ...) of each field. Tokens travel once, `seq_len + 1` of them
in their stored width; inputs and labels are made of them where they are used. Masks of stores
travel with the tokens, a byte each. What the host alone knows to mask (padding, borders of
documents) travels as `loss_mask`, and only if there is any.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tokenmill.errors import UsageError
from tokenmill.loader.batch import IGNORED, Draw, Window
from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.batch import Batch
    from tokenmill.store.reader import Store


if TYPE_CHECKING:
    Arrays = dict[str, NDArray[np.generic]]
    Tensors = dict[str, torch.Tensor]

DEFAULT_FIELDS = ("input_ids", "labels")
_COPIED_FIELDS = ("position_ids", "doc_ids", "cu_seqlens")
FIELDS = (*DEFAULT_FIELDS, *_COPIED_FIELDS, "loss_mask")


class TensorBatch(dict[str, torch.Tensor]):
    """The tensors of one step by name: `batch.labels`, `batch["labels"]`, `model(**batch)`."""

    __slots__ = ("max_seqlen", "step")

    step: int | None
    """Number of the step; None in a copy that another library made of the tensors alone."""
    max_seqlen: int | None
    """Longest document part that `cu_seqlens` can name: the same number in every step."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] = (),
        *,
        step: int | None = None,
        max_seqlen: int | None = None,
    ) -> None:
        super().__init__(tensors)
        self.step = step
        self.max_seqlen = max_seqlen

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name!r}, only {[*self]}") from None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorBatch:
        """The same batch on another device."""
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self.items()}
        return TensorBatch(moved, step=self.step, max_seqlen=self.max_seqlen)


def to_tensors(
    batch: Batch, *, fields: Sequence[str] = DEFAULT_FIELDS, dtype: torch.dtype = torch.int64
) -> TensorBatch:
    """Contiguous tensors of a batch, on the CPU.

    >>> to_tensors(loader.batch(0), fields=("input_ids", "labels", "position_ids"))
    """
    form = Form.of(fields, dtype=dtype)
    arrays = form.stacked([batch], has_mask=batch.mask is not None)
    if form.has_ids:
        arrays["tokens"] = batch.tokens[None]
    if form.has_labels and batch.mask is not None:
        arrays["mask"] = batch.mask[None]
    (tensors,) = unstacked(form.tensors(share(arrays)))
    return TensorBatch(tensors, step=batch.step, max_seqlen=batch.max_seqlen)


def unstacked(tensors: Tensors) -> list[Tensors]:
    """The tensors of each step. They share memory, and nothing else.

    By `data` each gets a version of its own: writing to one batch would spoil the backward pass of
    another.
    """
    columns = [[part.data for part in tensor.unbind()] for tensor in tensors.values()]
    return [dict(zip(tensors, step, strict=True)) for step in zip(*columns, strict=True)]


def share(arrays: Arrays) -> Tensors:
    """Tensors on the memory of the arrays."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a consumer wants of each batch."""

    fields: tuple[str, ...]
    dtype: torch.dtype
    """Of `input_ids` and `labels`; the others have one dtype each."""

    @classmethod
    def of(cls, fields: Sequence[str], *, dtype: torch.dtype) -> Form:
        """The form of these fields, checked."""
        chosen = (fields,) if isinstance(fields, str) else tuple(fields)
        if unknown := [name for name in chosen if name not in FIELDS]:
            raise UsageError(
                f"a batch has no fields {unknown}", hint=f"choose among: {', '.join(FIELDS)}"
            )
        if not chosen or len(set(chosen)) < len(chosen):
            raise UsageError(
                f"fields={chosen} must name at least one field, and none twice",
                hint=f"choose among: {', '.join(FIELDS)}",
            )
        if dtype not in (torch.int64, torch.int32):
            raise UsageError(
                f"dtype={dtype} cannot hold every id and the {IGNORED} of ignored labels",
                hint="use torch.int64 or torch.int32",
            )
        return cls(fields=chosen, dtype=dtype)

    @property
    def has_ids(self) -> bool:
        return "input_ids" in self.fields or "labels" in self.fields

    @property
    def has_labels(self) -> bool:
        """Whether it matters which labels count."""
        return "labels" in self.fields or "loss_mask" in self.fields

    def alike(self, batches: Iterable[Batch], *, most: int) -> Iterator[list[Batch]]:
        """Batches in runs of at most `most` whose arrays have the same shapes."""
        for _, run in groupby(batches, key=self._varying_size):
            while part := list(islice(run, most)):
                yield part

    def _varying_size(self, batch: Batch) -> int:
        """Of the one field whose size depends on the documents."""
        return len(batch.cu_seqlens) if "cu_seqlens" in self.fields else 0

    def stacked(self, batches: Sequence[Batch], *, has_mask: bool) -> Arrays:
        """All that is needed of batches beside the tokens: (batches, ...), as narrow as it can be.

        There is a `loss_mask` if any of them masks a label; where the tokens have a mask
        (`has_mask`), which knows of padding too, only if borders of documents are masked besides.
        """
        names = [name for name in _COPIED_FIELDS if name in self.fields]
        if self._sends_loss_mask(batches, has_mask=has_mask):
            names.append("loss_mask")
        return {name: np.stack([getattr(batch, name) for batch in batches]) for name in names}

    def _sends_loss_mask(self, batches: Sequence[Batch], *, has_mask: bool) -> bool:
        if has_mask:
            return self.has_labels and any(batch.masks_borders for batch in batches)
        return "loss_mask" in self.fields or ("labels" in self.fields and any(map(_masks, batches)))

    def tensors(self, sent: Tensors) -> Tensors:
        """The fields, of what was sent for some batches."""
        counts = _loss_mask(sent) if self.has_labels else None
        made = {name: self._field(name, sent, counts) for name in self.fields}
        if "labels" in made and counts is not None:
            made["labels"].masked_fill_(counts.logical_not(), IGNORED)
        return made

    def _field(self, name: str, sent: Tensors, counts: torch.Tensor | None) -> torch.Tensor:
        if name == "loss_mask":
            assert counts is not None
            return counts.contiguous()
        if name not in DEFAULT_FIELDS:
            return sent[name]
        tokens = sent["tokens"]
        part = tokens.narrow(-1, 1 if name == "labels" else 0, tokens.shape[-1] - 1)
        # One call for memory and copy. Without `copy` a view of the same dtype would stay a view.
        return part.to(self.dtype, copy=True, memory_format=torch.contiguous_format)


def _loss_mask(sent: Tensors) -> torch.Tensor | None:
    """Which labels count; None where all do."""
    counts, mask = sent.get("loss_mask"), sent.get("mask")
    if mask is None:
        return counts
    labels = mask.narrow(-1, 1, mask.shape[-1] - 1)
    return labels if counts is None else counts.logical_and(labels)


def _masks(batch: Batch) -> bool:
    return not (batch.all_count or batch.loss_mask.all())


# -------------------------------------------------------------------------------------------------
# Datasets for torch's DataLoader, and for torchdata's StatefulDataLoader.
#
#   | TokenDataset   rows by number, in the layout's own order: any sampler, any number of workers
#   | BatchDataset   the ready batches of a loader: DataLoader(BatchDataset(loader),
#   batch_size=None)
#
# `BatchDataset` keeps the loader's stream whatever the number of workers: worker w of k makes
# every k-th batch from the w-th on, and DataLoader takes them in turn. Labels are the next tokens
# already; a model that shifts labels itself (as those of transformers do) must be told not to.

if TYPE_CHECKING:
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
        self._loader_options = loader.options

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
        window = Window(draw, layouts=[self.layout], options=self._loader_options, capacity=1)
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


# -------------------------------------------------------------------------------------------------
# Which part of every global batch this process takes, as torch.distributed knows it.


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


# -------------------------------------------------------------------------------------------------
# Cuts the rows of a batch for context parallelism: every peer holds a part of each row.
#
# Peers of one group pass the same `rank` to the loader, get the same rows, and cut them here. With
# causal attention the later tokens cost more, so `zigzag` gives each peer one early and one late
# chunk (ring attention's balanced order):
#
#   | size=2, rows of 8        rank 0: 0 1 6 7      rank 1: 2 3 4 5
#
# Labels are next tokens already, so `input_ids`, `labels`, `position_ids`, `doc_ids` and
# `loss_mask` are cut alike. `cu_seqlens` counts whole rows and cannot be cut.


class ContextOrder(StrEnum):
    """Which chunks of a row a peer takes."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"


class _Rows(Protocol):
    """What numpy arrays and torch tensors have in common, as far as types can tell."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Rows = TypeVar("Rows", bound=_Rows)


def slice_row(array: Rows, *, rank: int, size: int, order: str = "zigzag") -> Rows:
    """What peer `rank` of `size` holds of each row; rows lie along the last axis.

    >>> slice_row(batch.input_ids, rank=0, size=2)
    """
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            f"rank {rank} of {size} context-parallel peers does not exist",
            hint=f"use a rank from 0 to {max(size, 1) - 1}",
        )
    if order not in tuple(ContextOrder):
        raise UsageError(
            f"order={order!r} is not known", hint='use order="zigzag" or order="contiguous"'
        )
    num_chunks = size if order == ContextOrder.CONTIGUOUS else 2 * size
    *lead, seq_len = array.shape
    if seq_len % num_chunks:
        raise UsageError(
            f"rows of {seq_len} tokens cannot be cut into {num_chunks} equal chunks"
            f" for {size} context-parallel peers",
            hint=f"use a seq_len that is a multiple of {num_chunks}",
        )
    rows: Any = array
    chunks = rows.reshape(*lead, num_chunks, seq_len // num_chunks)
    last = rank if order == ContextOrder.CONTIGUOUS else num_chunks - 1 - rank
    # A plain slice picks both chunks: a list of two would be copied to the device, and waited for.
    taken: Rows = chunks[..., rank : last + 1 : max(1, last - rank), :].reshape(*lead, -1)
    # Neighbouring chunks come as a view; of a tensor, many want to take a view in turn.
    contiguous: Callable[[], Rows] | None = getattr(taken, "contiguous", None)
    return taken if contiguous is None else contiguous()
