"""Torch tensors from the loader: batches on whatever device, datasets, and the device feeder.

    batches --stacked--> narrow arrays --(the bus)--> narrow tensors --unstacked--> fields
    loader (thread: narrow arrays) -> lane (pinned) -> copy stream (widens) -> consumer's stream

Several steps travel together, (steps, ...) of each field. Tokens travel once, `seq_len + 1` of them
in their stored width; inputs and labels are made of them where they are used. Masks of stores
travel with the tokens, a byte each. What the host alone knows to mask (padding, boundaries of
documents) travels as `loss_mask`, and only if there is any.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import math
import operator
import sys
import time
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
)

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import MissingExtraError, UsageError
from tokenmill.loader.batch import IGNORED, Window, batches_of
from tokenmill.loader.loader import Loader, ReadAhead

if find_spec("torch") is None:
    raise MissingExtraError("torch", extra="torch", purpose="feeding tensors")

import torch
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch.nn.attention.flex_attention import BlockMask

    from tokenmill.loader.batch import AttentionShape, Batch, Bools
    from tokenmill.loader.mixture import StoreInput
    from tokenmill.store.format import TokenArray

__all__ = [
    "BatchDataset",
    "ContextSlice",
    "DeviceFeeder",
    "TensorBatch",
    "TokenDataset",
    "distributed_ranks",
    "slice_row",
    "to_tensors",
]

Arrays: TypeAlias = dict[str, NDArray[np.generic]]
Tensors: TypeAlias = dict[str, torch.Tensor]
# Steps, their seq_len, what was read for them, and the shapes of their documents, if any field is
# of documents.
Parcel: TypeAlias = "tuple[range, int, Arrays, Sequence[AttentionShape]]"

DEFAULT_FIELDS = ("input_ids", "labels")
_COPIED_FIELDS = ("position_ids", "doc_ids", "cu_seqlens")
FIELDS = (*DEFAULT_FIELDS, *_COPIED_FIELDS, "loss_mask")


class TensorBatch(dict[str, torch.Tensor]):
    """The tensors of one step by name: `batch.labels`, `batch["labels"]`, `step(**batch)`.

    A model of transformers shifts `labels` itself: give it batches of a `Loader(labels="same")`,
    or those of tokenmill.hf, which have all else that it wants too.
    """

    __slots__ = ("attention_pairs", "max_seqlen", "num_documents", "step")

    labels_are: ClassVar[str] = "next"
    """"next": a label is the token after its input; "same": its input, and the model shifts."""
    step: int | None
    """Number of the step; None in a copy that another library made of the tensors alone."""
    max_seqlen: int | None
    """Tokens of the longest range of `cu_seqlens`, or a few more; one of few numbers. Of fields
    that say nothing of documents, `seq_len`."""
    num_documents: int | None
    """Ranges of `cu_seqlens` that have a token; None where no field is of documents."""
    attention_pairs: int | None
    """Pairs of tokens of which one looks at the other, in causal attention within the ranges."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] = (),
        *,
        step: int | None = None,
        max_seqlen: int | None = None,
        num_documents: int | None = None,
        attention_pairs: int | None = None,
    ) -> None:
        super().__init__(tensors)
        self.step = step
        self.max_seqlen = max_seqlen
        self.num_documents = num_documents
        self.attention_pairs = attention_pairs

    # A call with `**batch` copies a dict without asking it, unless it iterates in a way of its own.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def keys(self) -> Any:
        """The names of the tensors."""
        _notice_second_shift(self)
        return super().keys()

    def items(self) -> Any:
        """The tensors by their names."""
        _notice_second_shift(self)
        return super().items()

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name!r}, only {[*self.keys()]}") from None

    def block_mask(self, block_size: int = 128) -> BlockMask:
        """Causal attention within the ranges of `cu_seqlens`, for torch's `flex_attention`.

        Of a batch of (rows, seq_len); one for all layers. Nothing waits for the device.
        """
        return block_mask(self._boundaries(), self._row_shape(), block_size=block_size)

    def context_slice(self, *, rank: int, size: int) -> ContextSlice:
        """What peer `rank` of `size` context-parallel peers holds of every document; all of them
        must have this batch."""
        if self.labels_are == "same":
            raise UsageError(
                "labels of the same places are shifted by the model, and the next token of where a"
                " part is cut is on another peer: the model would learn a token of elsewhere",
                hint='make the loader with labels="next", and give a model of transformers its'
                " part of them as shift_labels",
            )
        most = self.max_seqlen or self._row_shape()[1]
        tokens = math.prod(self._row_shape())
        return context_slice(self._boundaries(), tokens, max_seqlen=most, rank=rank, size=size)

    def _boundaries(self) -> torch.Tensor:
        if "cu_seqlens" not in self:
            raise UsageError(
                f"this batch has only {[*super().keys()]}, and where documents begin is not among"
                " them",
                hint='ask for it: DeviceFeeder(loader, fields=("input_ids", "labels",'
                ' "position_ids", "cu_seqlens"))',
            )
        return self["cu_seqlens"]

    def _row_shape(self) -> tuple[int, int]:
        shapes = [tensor.shape for tensor in self.values() if tensor.dim() == 2]
        if not shapes:
            raise UsageError(
                "this batch has no field of rows, which would say how long they are",
                hint='ask for one besides cu_seqlens, like fields=("input_ids", "cu_seqlens")',
            )
        rows, length = shapes[0]
        return rows, length

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorBatch:
        """The same batch on another device."""
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self.items()}
        return KINDS[self.labels_are](
            moved,
            step=self.step,
            max_seqlen=self.max_seqlen,
            num_documents=self.num_documents,
            attention_pairs=self.attention_pairs,
        )


class FedBatch(TensorBatch):
    """A batch of a DeviceFeeder, which is unpacked as a pair too: `input_ids, labels = batch`."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        # The keys would be there otherwise. A DataLoader needs those, and is never given this.
        return iter((self.input_ids, self.labels))


# Types of their own, because that is what other libraries keep of a batch that they copy.


class SameBatch(TensorBatch):
    """A batch whose labels are those of the same places: the model shifts them."""

    __slots__ = ()
    labels_are = "same"


class FedSameBatch(FedBatch):
    """The same of a DeviceFeeder."""

    __slots__ = ()
    labels_are = "same"


KINDS: dict[str, type[TensorBatch]] = {"next": TensorBatch, "same": SameBatch}
FED_KINDS: dict[str, type[TensorBatch]] = {"next": FedBatch, "same": FedSameBatch}


# -------------------------------------------------------------------------------------------------
# Labels that would be shifted twice, here and in a model of transformers: it would learn the token
# after the next, and its loss would look right.
#
# A batch notices it when somebody asks for its names: code of transformers, or a call with
# `**batch` where a model of transformers is in sight. What another model does is its own affair.

TWICE = (
    "the labels of this batch are the next tokens, and {whom} shifts labels by itself:"
    " the model would learn the token after the next"
)
TWICE_HINT = (
    'take rows from tokenmill.hf, or give the Loader or TokenDataset labels="same"; for a loss of'
    " your own, that wants the next tokens, give the Trainer a collator of your own"
)


def _notice_second_shift(batch: TensorBatch) -> None:
    if batch.labels_are == "same" or "transformers" not in sys.modules:
        return
    if "labels" not in batch or "shift_labels" in batch:
        return
    frame = sys._getframe(2)
    module = str(frame.f_globals.get("__name__"))
    if module.startswith("transformers."):
        collator = getattr(frame.f_locals.get("self"), "data_collator", None)
        made_by = getattr(collator, "__module__", None) or ""
        if module == "transformers.trainer_utils" and not made_by.startswith("transformers."):
            return  # a collator of the user's, for whom columns are removed
        if module == "transformers.trainer" and frame.f_code.co_name != "compute_loss":
            return  # moves it to the device
        raise UsageError(TWICE.format(whom="the Trainer's model"), hint=TWICE_HINT)
    if frame.f_code.co_code[frame.f_lasti] != dis.opmap["DICT_MERGE"]:
        return
    if "shift_labels" in str(frame.f_code.co_consts):
        return
    if (model := _model_in_sight(frame)) is not None:
        warnings.warn(
            f"{TWICE.format(whom=type(model).__name__)}; {TWICE_HINT}", UserWarning, stacklevel=3
        )


def _model_in_sight(frame: FrameType) -> torch.nn.Module | None:
    """A model of transformers with a loss, under a name that the code uses."""
    known = sys.modules.get("transformers.modeling_utils")
    names = set(frame.f_code.co_names)
    seen = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in names)]
    for each in [each for each in seen if isinstance(each, torch.nn.Module)]:
        seen += [child for name, child in each.named_children() if name in names]
    for each in seen:
        # As torch's own wrappers call what they wrap, and PEFT's.
        wrapped: Any = getattr(each, "module", getattr(each, "_orig_mod", each))
        get_base_model: Any = getattr(type(wrapped), "get_base_model", lambda model: model)
        wrapped = get_base_model(wrapped)
        if known is not None and isinstance(wrapped, known.PreTrainedModel):
            found: torch.nn.Module = wrapped
            return found
    return None


def to_tensors(
    batch: Batch, *, fields: Sequence[str] = DEFAULT_FIELDS, dtype: torch.dtype = torch.int64
) -> TensorBatch:
    """Contiguous tensors of a batch, on the CPU.

    >>> to_tensors(loader.batch(0), fields=("input_ids", "labels", "position_ids"))
    """
    fields = check_fields(fields, dtype)
    mask = None if batch.mask is None else batch.mask[None]
    arrays = stacked([batch], fields, tokens=batch.tokens[None], mask=mask)
    made = widened(share(arrays), fields, dtype, batch.labels_are)
    steps = range(batch.step, batch.step + 1)
    shapes = attention_shapes([batch], fields)
    return unstacked(made, steps, batch.seq_len, shapes, kind=KINDS[batch.labels_are])[0]


def attention_shapes(batches: Sequence[Batch], fields: Sequence[str]) -> list[AttentionShape]:
    """Those of the batches; none where no field needs their documents looked up."""
    has_documents = any(name in fields for name in _COPIED_FIELDS)
    return [batch.attention_shape for batch in batches] if has_documents else []


def share(arrays: Arrays) -> Tensors:
    """Tensors on the memory of the arrays."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def check_fields(fields: Sequence[str], dtype: torch.dtype) -> tuple[str, ...]:
    """What a consumer wants of each batch; `dtype` is that of `input_ids` and `labels`."""
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
    return chosen


def stacked(
    batches: Sequence[Batch], fields: Sequence[str], *, tokens: TokenArray, mask: Bools | None
) -> Arrays:
    """All that is needed of batches for their fields: (batches, ...), as narrow as it can be.

    There is a `loss_mask` if any of them masks a label; where the tokens have a mask, which knows
    of padding too, only if boundaries of documents are masked besides.
    """
    names = [name for name in _COPIED_FIELDS if name in fields]
    has_labels = "labels" in fields or "loss_mask" in fields
    if mask is not None:
        sends_loss_mask = has_labels and any(batch.masks_boundaries for batch in batches)
    else:
        sends_loss_mask = "loss_mask" in fields or (
            "labels" in fields
            and any(not (batch.all_count or _all_but_first(batch)) for batch in batches)
        )
    if sends_loss_mask:
        names.append("loss_mask")
    arrays: Arrays = {}
    for name in names:
        parts = [getattr(each, name) for each in batches]
        if name == "cu_seqlens":
            # The one field whose size depends on the documents: filled up as it is in each of them.
            most = max(map(len, parts))
            parts = [np.append(part, np.repeat(part[-1:], most - len(part))) for part in parts]
        arrays[name] = np.stack(parts)
    if "input_ids" in fields or "labels" in fields:
        arrays["tokens"] = tokens
    if has_labels and mask is not None:
        arrays["mask"] = mask
    return arrays


def _all_but_first(batch: Batch) -> bool:
    """Whether all labels count, but the first of a row where none can."""
    return bool(batch.loss_mask[:, int(batch.labels_are == "same") :].all())


def widened(
    sent: Tensors, fields: Sequence[str], dtype: torch.dtype, labels_are: str = "next"
) -> Tensors:
    """The fields of all steps, of what was sent for them."""
    counts, mask = sent.get("loss_mask"), sent.get("mask")
    lead = int(labels_are == "next")
    if mask is not None:
        labels = mask.narrow(-1, lead, mask.shape[-1] - lead)
        counts = labels if counts is None else counts.logical_and(labels)
    made: Tensors = {}
    for name in fields:
        if name in DEFAULT_FIELDS:
            tokens = sent["tokens"]
            first = lead if name == "labels" else 0
            part = tokens.narrow(-1, first, tokens.shape[-1] - lead)
            # One call for memory and copy. Without `copy` a view of the same dtype would stay one.
            made[name] = part.to(dtype, copy=True, memory_format=torch.contiguous_format)
        elif name == "loss_mask":
            assert counts is not None
            made[name] = counts.contiguous() if lead else counts.clone()
            if not lead:
                made[name][..., 0] = False
        else:
            made[name] = sent[name]
    if "labels" in made and counts is not None:
        made["labels"].masked_fill_(counts.logical_not(), IGNORED)
    if "labels" in made and not lead:
        made["labels"][..., 0] = IGNORED
    return made


def unstacked(
    made: Tensors,
    steps: range,
    seq_len: int,
    shapes: Sequence[AttentionShape] = (),
    *,
    kind: type[TensorBatch] = TensorBatch,
) -> list[TensorBatch]:
    """The batch of each step. They share memory, and nothing else.

    By `data` each gets a version of its own: writing to one batch would spoil the backward pass of
    another.
    """
    columns = [[part.data for part in tensor.unbind()] for tensor in made.values()]
    rows = zip(*columns, strict=True)
    if not shapes:
        return [
            kind(zip(made, tensors, strict=True), step=step, max_seqlen=seq_len)
            for step, tensors in zip(steps, rows, strict=True)
        ]
    batches = []
    for step, tensors, (size, *numbers) in zip(steps, rows, shapes, strict=True):
        named = dict(zip(made, tensors, strict=True))
        if "cu_seqlens" in named:
            named["cu_seqlens"] = named["cu_seqlens"][:size]
        longest, documents, pairs = numbers
        batch = kind(
            named,
            step=step,
            max_seqlen=longest,
            num_documents=documents,
            attention_pairs=pairs,
        )
        batches.append(batch)
    return batches


Sent: TypeAlias = "tuple[Tensors, range, int, Sequence[AttentionShape], torch.cuda.Event | None]"


# -------------------------------------------------------------------------------------------------
# Batches on the device before they are asked for.
#
# One thread reads ahead by `depth` parcels of up to 16 steps. It holds neither the feeder nor its
# iterator, so that both can be dropped at any time and take the thread with them. What counts as
# consumed is what was handed out: the loader is at the step after the last batch taken, however far
# the thread is.
#
# What the thread sends at a time is a parcel: some steps, and their arrays.
# Python's lock is why steps travel together: each call of the thread takes it from the training
# loop for some tens of microseconds, and a parcel needs no more calls than a step. The first
# parcels hold 1, 2, 4, ... steps, as the loader's chunks do, so that the first batch does not wait
# for others.

MOST_STEPS = 16
# Of a parcel with more than one step: it is some megabytes, of which several are on their way.
MOST_TOKENS = 1 << 18


def parcels(loader: Loader, fields: Sequence[str], *, first: int) -> Iterator[Parcel]:
    """From a step on, until the steps end."""
    for chunk in loader.chunks(first):
        window, places, tokens, mask = chunk
        most = max(1, min(MOST_STEPS, MOST_TOKENS // max(1, window.rows.shape[1] * window.seq_len)))
        begin, rest = 0, batches_of(chunk)
        while batches := list(islice(rest, most)):
            here = slice(begin, begin + len(batches))
            its_mask = None if mask is None else mask[here]
            arrays = stacked(batches, fields, tokens=tokens[here], mask=its_mask)
            steps = window.steps[places.start + begin : places.start + here.stop]
            yield steps, window.seq_len, arrays, attention_shapes(batches, fields)
            begin = here.stop


# -------------------------------------------------------------------------------------------------
# How arrays get to the device: pinned memory that is used again and again, and one copy stream.
#
# The thread waits until the lane's last copy is done, writes, copies, makes tensors and records an
# event; the consumer's stream waits for it, and the host never does. Stream order alone does not
# protect pinned memory: the host could rewrite what a copy still reads.


class CudaLane:
    """Pinned memory by name: allocated once, and again only for larger arrays."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pinned: Tensors = {}
        self._sent: torch.cuda.Event | None = None

    def send(self, arrays: Arrays) -> Tensors:
        """The arrays on the device, as far as the copy stream, which is current, has come."""
        if self._sent is not None:
            self._sent.synchronize()
        sent = {}
        for name, array in arrays.items():
            dtype, kept = torch.from_numpy(array[:0]).dtype, self._pinned.get(name)
            if kept is None or kept.dtype != dtype or len(kept) < array.size:
                kept = self._pinned[name] = torch.empty(array.size, dtype=dtype, pin_memory=True)
            room = kept[: array.size].view(array.shape)
            np.copyto(room.numpy(), array)
            sent[name] = room.to(self._stream.device, non_blocking=True)
        return sent

    def seal(self) -> torch.cuda.Event:
        """Passed when all that was made of the arrays is there."""
        # Blocking: the thread sleeps for the copy instead of spinning on a core.
        self._sent = torch.cuda.Event(blocking=True)
        self._sent.record(self._stream)
        return self._sent


def send(
    fields: Sequence[str],
    dtype: torch.dtype,
    labels: str,
    parcel: Parcel,
    lane: CudaLane | None,
) -> Sent:
    """The tensors of a parcel, and what to wait for before they are used.

    Without a lane the consumer reads the arrays where they are.
    """
    steps, seq_len, arrays, shapes = parcel
    sent = share(arrays) if lane is None else lane.send(arrays)
    made = widened(sent, fields, dtype, labels)
    return made, steps, seq_len, shapes, None if lane is None else lane.seal()


_STALE = -1  # no step: makes an iterator begin anew


class DeviceFeeder:
    """Iterates over a loader's steps, as tensors on a device.

    >>> with DeviceFeeder(loader, device="cuda") as feeder:
    ...     for batch in feeder:
    ...         loss = model(batch.input_ids, batch.labels)

    Iterating goes on at `loader.step`, and begins anew after the last step, as the loader's own
    iteration does; `state_dict()` says what has been consumed. Batches are yours to keep; one that
    is kept also keeps the memory of those that were sent with it, half a million tokens at most.

    With `reuse_buffers=True` every batch is in the same tensors instead (for each size of
    `cu_seqlens` in another one), as CUDA graphs need it: it is valid until the next one is asked
    for, on the stream that is current then. (Capture with capture_error_mode="thread_local": the
    feeder's thread uses CUDA meanwhile.)
    """

    def __init__(
        self,
        loader: Loader,
        *,
        device: torch.device | str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        dtype: torch.dtype = torch.int64,
        depth: int = 3,
        reuse_buffers: bool = False,
    ) -> None:
        if depth < 1:
            raise UsageError(f"depth={depth} leaves no batch to read ahead", hint="use depth=3")
        self.loader = loader
        self.device = _device(device)
        self.depth = depth
        self.wait_seconds = 0.0
        """How long consumers have waited for batches, in all."""
        self.last_wait_seconds = 0.0
        """How long the last batch was waited for."""
        self.build_wait_seconds = 0.0
        """Of `wait_seconds`, while the loader waited for the build that it follows."""
        self.asked: float | None = None
        """Since when a batch is waited for (of `time.perf_counter`), if one is."""
        # One for all epochs: each would leave the allocator's cached blocks behind with it.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._fields = check_fields(fields, dtype)
        self._send = partial(send, self._fields, dtype, loader.labels)
        self._kept: dict[object, torch.Tensor] | None = {} if reuse_buffers else None
        # Its iterator holds what reads ahead: where that is dropped, the thread must end.
        self._ahead: Callable[[], ReadAhead[Sent] | None] = lambda: None
        self._next_step = _STALE
        self._has_ended = False

    def __iter__(self) -> Iterator[TensorBatch]:
        self.close()
        if self._has_ended and self.loader.step == self.loader.num_steps:
            self.loader.seek(0)
        self._has_ended = False
        # Reading ahead begins now, not when the first batch is asked for.
        return self._follow(self._start())

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def num_ready(self) -> int:
        """Parcels of steps that wait to be taken: `depth` where the thread keeps up."""
        ahead = self._ahead()
        return 0 if ahead is None else ahead.num_ready

    def _start(self) -> ReadAhead[Sent]:
        self._next_step = self.loader.step
        stream = self._stream
        lanes = [None if stream is None else CudaLane(stream) for _ in range(self.depth)]
        made = parcels(self.loader, self._fields, first=self._next_step)
        ahead = ReadAhead(
            map(self._send, made, cycle(lanes)),
            depth=self.depth,
            name="tokenmill feeder",
            # The thread's work is queued on the copy stream, whose device becomes current with it.
            within=contextlib.nullcontext if stream is None else partial(torch.cuda.stream, stream),
        )
        self._ahead = weakref.ref(ahead)
        return ahead

    def _follow(self, ahead: ReadAhead[Sent]) -> Iterator[TensorBatch]:
        batches: list[TensorBatch] = []
        event: torch.cuda.Event | None = None
        opened_on: torch.cuda.Stream | None = None
        try:
            while True:
                if ahead.is_closed:
                    raise UsageError(
                        "the feeder was closed, or iterated anew, while this iterator was in use",
                        hint="iterate over the feeder again: it goes on where it was",
                    )
                if self._next_step != self.loader.step:
                    # The loader was moved, by load_state_dict or seek: what was read is of no use.
                    ahead.close()
                    ahead, batches = self._start(), []
                waited, asked = self.loader.waited_for_build(), time.perf_counter()
                self.asked = asked
                if not batches:
                    (batches, event), opened_on = _received(ahead, self.loader.labels), None
                batch = batches.pop() if batches else None
                if batch is not None and event is not None:
                    # Once for a parcel, unless the consumer goes over to another stream.
                    current = torch.cuda.current_stream(self.device.index)
                    # By `is`: torch's streams say of None that it is not unequal to them.
                    if opened_on is None or current != opened_on:
                        current.wait_event(event)
                        _note_use(batch, current)
                        opened_on = current
                self.asked = None
                self.last_wait_seconds = time.perf_counter() - asked
                self.wait_seconds += self.last_wait_seconds
                self.build_wait_seconds += self.loader.waited_for_build() - waited
                if batch is None:
                    self._has_ended = True
                    return
                self._next_step += 1
                self.loader.seek(self._next_step)
                if self._kept is not None:
                    _move_into(self._kept, batch)
                yield batch
                del batch
        finally:
            ahead.close()

    def state_dict(self) -> dict[str, object]:
        """The loader's state: all batches handed out so far come before it."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a state; an iterator in use follows."""
        self.loader.load_state_dict(state)
        self._has_ended = False
        self._next_step = _STALE  # the step may be the same, and its rows others

    def close(self) -> None:
        """End the thread, if one is running; the feeder can be iterated again."""
        if (ahead := self._ahead()) is not None:
            ahead.close()

    def __enter__(self) -> DeviceFeeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Functions, so that the feeder's frame holds no tensor of a batch that was handed out.


def _received(
    ahead: ReadAhead[Sent], labels: str
) -> tuple[list[TensorBatch], torch.cuda.Event | None]:
    """The batches of the next parcel, last first: the thread sends the one after it meanwhile."""
    for made, steps, seq_len, shapes, event in ahead:
        return unstacked(made, steps, seq_len, shapes, kind=FED_KINDS[labels])[::-1], event
    return [], None


def _note_use(tensors: Tensors, stream: torch.cuda.Stream) -> None:
    """Of tensors that belong to the copy stream: their memory is not given out again too early."""
    for tensor in tensors.values():
        tensor.record_stream(stream)


def _move_into(kept: dict[object, torch.Tensor], tensors: Tensors) -> None:
    """Put the tensors into those that are kept for their names and shapes."""
    for name, tensor in [*tensors.items()]:
        room = kept.setdefault((name, tensor.shape), tensor)
        if room is tensor:
            # Not the tensor itself, which shares memory with those of other steps.
            room = kept[name, tensor.shape] = torch.empty_like(tensor)
        tensors[name] = room.copy_(tensor)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the feeder has no way to the device {str(found)!r}, only to the CPU and to CUDA",
            hint='use device="cpu" and move the batches with batch.to(...)',
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device={str(device)!r}, and torch {torch.__version__} finds no CUDA device",
            hint='use device="cpu", or device=None for whatever there is',
        )
    # "cuda" alone would mean another device in a thread that makes another one current.
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


# -------------------------------------------------------------------------------------------------
# Datasets for torch's DataLoader, and for torchdata's StatefulDataLoader.
#
# `BatchDataset` keeps the loader's stream whatever the number of workers: worker w of k makes
# every k-th batch from the w-th on, and DataLoader takes them in turn.


class TokenDataset(Dataset[Tensors]):
    """The rows of a store, as dicts of one-dimensional tensors.

    >>> rows = TokenDataset("my-store", seq_len=2048)
    >>> DataLoader(rows, batch_size=16, shuffle=True, num_workers=2)

    Order and resumption are the sampler's; for those of a loader use `BatchDataset`, and for the
    Trainer of transformers `tokenmill.hf.TrainerDataset`. `labels="same"` as of a Loader.
    """

    def __init__(
        self,
        store: StoreInput,
        *,
        seq_len: int,
        packing: str = "concat",
        boundaries: str = "keep",
        labels: str = "next",
        pad_id: int | None = None,
        split: str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        options = {
            "source": store,
            "seq_len": seq_len,
            "packing": packing,
            "boundaries": boundaries,
            "labels": labels,
            "pad_id": pad_id,
            "split": split,
        }
        self.__setstate__((options, check_fields(fields, dtype), dtype))

    # A process that is spawned opens the store itself.
    def __getstate__(self) -> tuple[dict[str, Any], tuple[str, ...], torch.dtype]:
        return self._options, self._fields, self._dtype

    def __setstate__(self, state: tuple[dict[str, Any], tuple[str, ...], torch.dtype]) -> None:
        self._options, self._fields, self._dtype = state
        if "cu_seqlens" in self._fields:
            raise UsageError(
                "a single row has no cu_seqlens: they count through all rows of a batch",
                hint="leave them out, or take whole batches with BatchDataset",
            )
        self._loader = Loader(**self._options, batch_size=1, shuffle=False, prefetch=0)
        # Open: a process that is spawned reads what the store was now, though it may have grown.
        self._options = {**self._options, "source": self._loader.mixture.stores[0], "split": None}
        layouts = self._loader.layouts()
        if len(layouts) > 1:
            raise UsageError(
                f"a mixture of {len(layouts)} stores has no rows of its own to number",
                hint="use BatchDataset(Loader(mixture, ...))",
            )
        self.layout = layouts[0]

    def __len__(self) -> int:
        return self.layout.num_rows

    def __getitem__(self, row: SupportsIndex) -> Tensors:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[SupportsIndex]) -> list[Tensors]:
        """Several rows, read in one go; DataLoader asks for a batch in this way."""
        numbers = [operator.index(row) for row in rows]
        if outside := [number for number in numbers if not -len(self) <= number < len(self)]:
            raise IndexError(f"row {outside[0]} of a layout of {len(self):,} rows")
        wanted = np.array(numbers, np.int64)[None] % len(self)
        zeros = np.zeros_like(wanted)
        window = Window(self._loader, self._loader.seq_len, range(1), zeros, wanted, zeros)
        batch = next(batches_of(window.read(0, 1)))
        tensors = to_tensors(batch, fields=self._fields, dtype=self._dtype)
        columns = [tensor.unbind() for tensor in tensors.values()]
        kind = type(tensors)  # a DataLoader keeps it, and with it what the labels are
        return [kind(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]


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
        self._fields, self._dtype = check_fields(fields, dtype), dtype

    def __len__(self) -> int:
        return len(self.loader) - self.loader.step

    def __iter__(self) -> Iterator[TensorBatch]:
        _refuse_to_deal_twice(self.loader)
        worker = get_worker_info()
        number, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        made = partial(to_tensors, fields=self._fields, dtype=self._dtype)
        return _Steps(self.loader, made, first=self.loader.step + number, stride=stride)


def _refuse_to_deal_twice(loader: Loader) -> None:
    """Accelerate deals out what one rank reads, or takes its part of what each reads."""
    frame = sys._getframe() if loader.world_size > 1 else None
    while frame is not None:
        whose = type(frame.f_locals.get("self")).__name__
        if frame.f_globals.get("__name__") == "accelerate.data_loader" and whose in (
            "DataLoaderDispatcher",
            "IterableDatasetShard",
        ):
            raise UsageError(
                f"accelerate deals out batches among processes, and this loader reads those of"
                f" rank {loader.rank} of {loader.world_size} alone: rows of other ranks would"
                " never be read",
                hint="use tokenmill.hf.TrainerDataset, or do not prepare this DataLoader"
                " (accelerator.prepare) and move its batches to the device yourself",
            )
        frame = frame.f_back


class _Steps:
    """Every stride-th batch of a loader; stateful, as StatefulDataLoader wants iterators to be."""

    def __init__(
        self, loader: Loader, made: Callable[[Batch], TensorBatch], *, first: int, stride: int
    ) -> None:
        # A loader of its own to move: the user's stays where it is.
        self._loader = copy.copy(loader)
        self._made, self._stride = made, stride
        self._go_to(first)

    def _go_to(self, step: int) -> None:
        self._next = step
        self._batches = self._loader.batches(first=step, stride=self._stride)

    def __iter__(self) -> Iterator[TensorBatch]:
        return self

    def __next__(self) -> TensorBatch:
        batch = next(self._batches)
        self._next = batch.step + self._stride
        return self._made(batch)

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
#   size=2, rows of 8        rank 0: 0 1 6 7      rank 1: 2 3 4 5
#
# Labels are next tokens already, so `input_ids`, `labels`, `position_ids`, `doc_ids` and
# `loss_mask` are cut alike. `cu_seqlens` counts whole rows and cannot be cut: with attention within
# documents, chunks of rows are unequal work. `context_slice` cuts every document instead.


Rows = TypeVar("Rows", bound="torch.Tensor | NDArray[Any]")


def slice_row(array: Rows, *, rank: int, size: int, order: str = "zigzag") -> Rows:
    """What peer `rank` of `size` holds of each row; rows are along the last axis.

    >>> slice_row(batch.input_ids, rank=0, size=2)
    """
    _check_peer(rank, size)
    if order not in ("zigzag", "contiguous"):
        raise UsageError(
            f"order={order!r} is not known", hint='use order="zigzag" or order="contiguous"'
        )
    rows: Any = array
    num_chunks = size if order == "contiguous" else 2 * size
    *lead, seq_len = rows.shape
    if seq_len % num_chunks:
        raise UsageError(
            f"rows of {seq_len} tokens cannot be cut into {num_chunks} equal chunks"
            f" for {size} context-parallel peers",
            hint=f"use a seq_len that is a multiple of {num_chunks}",
        )
    chunks = rows.reshape(*lead, num_chunks, seq_len // num_chunks)
    last = rank if order == "contiguous" else num_chunks - 1 - rank
    # A plain slice picks both chunks: a list of two would be copied to the device, and waited for.
    taken: Rows = chunks[..., rank : last + 1 : max(1, last - rank), :].reshape(*lead, -1)
    # Neighbouring chunks come as a view; of a tensor, many want to take a view in turn.
    contiguous: Callable[[], Rows] | None = getattr(taken, "contiguous", None)
    return taken if contiguous is None else contiguous()


# -------------------------------------------------------------------------------------------------
# Attention within documents, of the boundaries alone: masks of blocks, and parts for peers.
#
# Of no tensor here the host has to know a value, so it never waits for the device, and all shapes
# follow from those of the batch.


def _starts(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where the range of each token begins in the flattened batch."""
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]


def block_mask(
    cu_seqlens: torch.Tensor, shape: tuple[int, int], *, block_size: int = 128
) -> BlockMask:
    """What `create_block_mask` makes, without asking about every pair of tokens.

    Ranges follow each other: a block of queries looks at all blocks from the one where the range of
    its first query begins to its own; at those in full that are in the range of its last query too.
    """
    from torch.nn.attention.flex_attention import BlockMask  # importing it takes a second

    rows, length = shape
    row_starts = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * length
    starts = _starts(cu_seqlens, rows * length).view(shape) - row_starts[:, None]
    blocks = torch.arange(-(-length // block_size), device=starts.device)
    firsts = blocks * block_size
    lasts = (firsts + block_size - 1).clamp(max=length - 1)
    q, kv = blocks[None, :, None], blocks[None, None, :]
    reached = (kv <= q) & (lasts[kv] >= starts[:, firsts, None])
    full = (kv < q) & (firsts[kv] >= starts[:, lasts, None])
    if block_size == 1:
        full = reached
    if length % block_size:
        full = full & (q < len(blocks) - 1)  # a block that is not whole is never full
    in_part, in_full = _listed(reached & ~full), _listed(full)

    def mask_mod(
        row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (key >= starts[row, query])

    return BlockMask.from_kv_blocks(*(*in_part, *in_full, block_size, mask_mod, (length, length)))


def _listed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys there are for each block of queries of one head, and which."""
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSlice:
    """What one of several context-parallel peers holds of a batch, and what it attends to.

    The tokens of its two parts of each document stand one after the other, equally many on each
    peer. Their keys and values are gathered from all peers, in the order of their ranks:

    >>> part = batch.context_slice(rank=rank, size=size)
    >>> ids = batch.input_ids.flatten()[part.index]         # labels and position_ids likewise
    >>> keys = all_gather(k)[part.kv_index]                 # values likewise
    >>> flash_attn_varlen_func(q, keys, values, part.cu_seqlens_q, part.cu_seqlens_k,
    ...                        part.max_seqlen_q, part.max_seqlen_k, causal=True)

    Causal means here what it does in flash attention since 2.1: the last query sees the last key.
    """

    index: torch.Tensor
    """Places of the peer's tokens in the flattened batch."""
    kv_index: torch.Tensor
    """Places of the keys in those that were gathered: for each part, its document up to its end.
    What follows after the last part is of no use, so that shapes stay the same."""
    cu_seqlens_q: torch.Tensor
    """Where parts begin in the peer's tokens, two for each entry of the batch's `cu_seqlens`."""
    cu_seqlens_k: torch.Tensor
    """Where the keys of each part begin in `kv_index`."""
    max_seqlen_q: int
    max_seqlen_k: int


def context_slice(
    cu_seqlens: torch.Tensor, tokens: int, *, max_seqlen: int, rank: int, size: int
) -> ContextSlice:
    """Every document in 2 * size chunks, of which peer r has the r-th and the r-th from the end.

    Chunks of a document are as long as each other, or one token longer: the tokens that are left
    over go round the peers, through all documents, to the last chunk of a peer first.
    """
    _check_peer(rank, size)
    if tokens % size:
        raise UsageError(
            f"a batch of {tokens:,} tokens cannot be cut into {size} equal parts",
            hint=f"use rows of a multiple of {size} tokens",
        )
    device, num_chunks = cu_seqlens.device, 2 * size
    begins, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    whole, left = lengths // num_chunks, lengths % num_chunks
    dealt_after = left.cumsum(0)
    peers = torch.arange(size, device=device)

    def received(dealt: torch.Tensor) -> torch.Tensor:
        """Of tokens that are dealt out one by one, how many each peer has."""
        return (dealt[:, None] + size - 1 - peers) // size

    more = received(dealt_after) - received(dealt_after - left)  # 0, 1 or 2 for (document, peer)
    heads = whole[:, None] + (more > 1)
    tails = whole[:, None] + (more > 0)
    chunks = torch.cat((heads, tails.flip(1)), dim=1)  # (document, chunk): how long
    ends = begins[:, None] + chunks.cumsum(1)
    mine = torch.stack((peers, num_chunks - 1 - peers), dim=1)  # (peer, part): which chunk
    # (peer, document, part), one after the other: every peer has equally many tokens.
    lengths_q = chunks[:, mine].transpose(0, 1).reshape(size, -1)
    ends_q = ends[:, mine].transpose(0, 1).reshape(size, -1)
    index = _ranges((ends_q - lengths_q).flatten(), lengths_q.flatten(), tokens).view(size, -1)
    gathered = torch.empty_like(index.flatten())
    gathered[index.flatten()] = torch.arange(tokens, device=device)
    # Keys of a part: from the start of its document to the end of its chunk, if it has a token.
    begins_k = begins.repeat_interleave(2)
    lengths_k = (ends_q[rank] - begins_k) * (lengths_q[rank] > 0)
    # A document's two parts have no more keys than it has tokens, one chunk and one token.
    most = tokens + tokens // num_chunks + len(lengths)
    unused = most - lengths_k.sum(0, keepdim=True)
    keys = _ranges(
        torch.cat((begins_k, begins_k.new_zeros(1))), torch.cat((lengths_k, unused)), most
    )
    return ContextSlice(
        index=index[rank],
        kv_index=gathered[keys.clamp(max=tokens - 1)],
        cu_seqlens_q=_ends_of(lengths_q[rank]),
        cu_seqlens_k=_ends_of(lengths_k),
        max_seqlen_q=max_seqlen // num_chunks + 1,
        max_seqlen_k=max_seqlen,
    )


def _ranges(begins: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """The numbers of all ranges, one range after the other."""
    shifts = begins - lengths.cumsum(0) + lengths
    return torch.arange(total, device=begins.device) + shifts.repeat_interleave(
        lengths, output_size=total
    )


def _ends_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _check_peer(rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            f"rank {rank} of {size} context-parallel peers does not exist",
            hint=f"use a rank from 0 to {max(size, 1) - 1}",
        )
