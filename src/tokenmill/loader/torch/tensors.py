"""A batch as tensors, on whatever device.

    batches --Form.stacked--> narrow arrays --(the bus)--> narrow tensors --Form.tensors--> fields

Several steps travel together, (steps, ...) of each field. Tokens travel once, `seq_len + 1` of them
in their stored width; inputs and labels are made of them where they are used. Masks of stores
travel with the tokens, a byte each. What the host alone knows to mask (padding, borders of
documents) travels as `loss_mask`, and only if there is any.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.errors import UsageError
from tokenmill.loader.batch import IGNORED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.batch import Batch

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
