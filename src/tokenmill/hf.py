"""Batches that models and trainers of Hugging Face take as they are: the home of transformers.

    TrainerDataset   rows for transformers' Trainer, with its collator and its callback
    ModelFeeder      a loader's batches on the device, for `model(**batch)` in a loop of one's own
    as_dataset       the documents of a store as a `datasets.Dataset`, in place, for TRL

What these models want is not what a loop of one's own wants, and nothing tells where they differ:

- They shift labels themselves, so `labels` are those of the same places (`labels="same"`).
- Attention stays within documents only by `position_ids`, and only without a cache of keys and
  without an `attention_mask`; with flash attention only where all rows are one, with the names
  `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`.
- Accelerate has rank 0 read an iterable dataset for all ranks, and skips by reading. So the Trainer
  gets numbered rows: a number is a row's place in the run, whoever reads it.
"""

from __future__ import annotations

import inspect
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import MissingExtraError, UsageError
from tokenmill.loader.batch import IGNORED
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, open_split
from tokenmill.store.reader import Pair
from tokenmill.torch import DeviceFeeder, to_tensors

if find_spec("transformers") is None:
    raise MissingExtraError("transformers", extra="transformers", purpose="feeding its models")

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler
from transformers import TrainerCallback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenmill.loader.mixture import StoreInput
    from tokenmill.store.reader import MappedShard, Store
    from tokenmill.torch import Tensors

__all__ = ["ModelFeeder", "ModelInputs", "TrainerDataset", "as_dataset"]

FIELDS = ("input_ids", "labels", "position_ids")
MASKING = "transformers.masking_utils"  # since 4.53; before, position ids kept no documents apart
LEAVES_OUT = "give it rows of one document each, with packing='pad', or let it see whole rows"


class ModelInputs:
    """What a model's `forward` is called with, of rows with labels of the same places.

    A collator for `DataLoader` and Trainer. With flash attention all rows become one, since only
    then it looks at where documents begin; else rows stay rows, since a mask for all of them at
    once would have the square of their number. With `documents=False` attention goes over whole
    rows, and no position ids are given.
    """

    def __init__(
        self, model: torch.nn.Module, *, flatten: bool | None = None, documents: bool = True
    ) -> None:
        inner = unwrapped(model)
        config = getattr(inner, "config", None)
        if config is None:
            raise UsageError(
                f"a {type(model).__name__} has no config as models of transformers have, which says"
                " what attention it uses",
                hint="give the model that is trained; for another one use tokenmill.torch",
            )
        attention = str(getattr(config, "_attn_implementation", None))
        self.flatten = documents and ("flash" in attention if flatten is None else flatten)
        self.documents = documents
        # The Trainer takes away from rows what a model does not name.
        self.fields = FIELDS if documents else FIELDS[:2]
        if documents and "flash" not in attention and find_spec(MASKING) is None:
            raise UsageError(
                f"this transformers keeps no documents apart with attention {attention!r}",
                hint="pip install 'transformers>=4.53.1'",
            )
        if self.flatten and isinstance(model, torch.nn.DataParallel):
            raise _cut_boundaries(len(model.device_ids))
        takes = inspect.signature(inner.forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
        if documents and "position_ids" not in takes and not takes_any:
            raise UsageError(
                f"{type(inner).__name__} takes no position_ids, by which alone its attention would"
                " stay within documents",
                hint=f"{LEAVES_OUT}, with documents=False",
            )
        self._name = type(inner).__name__
        self._num_embedded = getattr(_embedding(inner), "num_embeddings", None)
        # A cache of keys would silently switch the masks of documents off.
        self._others = {"use_cache": False} if "use_cache" in takes or takes_any else {}

    def check(self, loader: Loader) -> None:
        """Refuse a model that has no embedding for an id of the loader's stores."""
        for store in loader.mixture.stores:
            if self._num_embedded is None or store.vocab_size <= self._num_embedded:
                continue
            # A tokenizer may have tokens that no text of the store has.
            largest = max(store.largest_id() or 0, loader.pad_id)
            if largest >= self._num_embedded:
                raise UsageError(
                    f"{str(store.path)!r} has the id {largest:,}, of a tokenizer of"
                    f" {store.vocab_size:,}, and {self._name} embeddings for"
                    f" {self._num_embedded:,}: training would end at that id, on a GPU with an"
                    " assertion that does not name it",
                    hint="build the store with the model's own tokenizer, or if tokens were added"
                    f" to it: model.resize_token_embeddings({store.vocab_size})",
                )

    def try_on(self, model: torch.nn.Module, loader: Loader) -> None:
        """Refuse a model in which a document sees the one before it: tried with two, eight tokens
        each. That position ids are taken does not say what becomes of them."""
        inner = unwrapped(model)
        weight: Any = getattr(_embedding(inner), "weight", None)
        if not self.documents or loader.packing.name == "pad" or not _is_whole(weight):
            return
        ids = torch.arange(1, 17, device=weight.device)[None] % weight.shape[0]
        changed = (ids + 16) % weight.shape[0]
        places = torch.arange(16, device=weight.device)[None]
        texts = (
            ids,
            ids.where(places >= 8, changed),
            ids.where((places < 8) | (places > 14), changed),
        )
        modes = [(module, module.training) for module in inner.modules()]
        inner.eval()
        try:
            # Flash attention takes no 32 bits, which the Trainer's own autocast spares it.
            with torch.no_grad(), torch.autocast(weight.device.type, torch.bfloat16, self.flatten):
                # The last eight: tuned prompts may come before a text.
                said, other, own = (
                    inner(**self.of({"input_ids": text, "position_ids": places % 8}))
                    .logits[0, -8:]
                    .float()
                    for text in texts
                )
        except Exception as error:
            warnings.warn(
                f"whether {self._name} keeps documents apart could not be tried:"
                f" {type(error).__name__}: {error}",
                UserWarning,
                stacklevel=2,
            )
            return
        finally:
            for module, training in modes:
                module.training = training
        by_others = float((said - other).abs().max())
        by_own = float((said - own)[-1].abs().max())
        # Rounding may differ where experts get other tokens too, by a millionth of that.
        if by_others > 0.03 * by_own:
            raise UsageError(
                f"{self._name} does not keep documents apart: other tokens in the document before"
                f" changed what it says of the next by {by_others:.2g}, those of its own by"
                f" {by_own:.2g}",
                hint=f"{LEAVES_OUT}, with documents=False",
            )

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Rows of a TrainerDataset as one batch."""
        fields = [row.fields if isinstance(row, _FlatRow) else row for row in rows]
        return self.of({name: torch.stack([each[name] for each in fields]) for name in self.fields})

    def of(self, tensors: Mapping[str, torch.Tensor], longest: int | None = None) -> dict[str, Any]:
        """The same of rows that are a batch; `longest` a bound that is known already."""
        inputs: dict[str, Any] = {name: tensors[name] for name in self.fields if name in tensors}
        if self.documents:
            # Fused kernels index with 64 bits, and so do embeddings.
            inputs["position_ids"] = inputs["position_ids"].long()
        if self.flatten:
            inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
            ends = tensors.get("cu_seqlens")
            if ends is None:
                begins = (inputs["position_ids"][0] == 0).nonzero().flatten()
                ends = torch.cat((begins, begins.new_tensor([inputs["input_ids"].numel()]))).int()
            if longest is None:
                longest = int(ends.diff().max())
            inputs.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
            inputs.update(max_length_q=longest, max_length_k=longest)
        return inputs | self._others


def _cut_boundaries(gpus: int) -> UsageError:
    return UsageError(
        f"DataParallel, of one process with {gpus} GPUs, cuts cu_seq_lens_q into parts as it does"
        " rows: flash attention would leave most tokens out",
        hint=f"start a process for each GPU: torchrun --nproc-per-node={gpus} train.py",
    )


def _embedding(model: torch.nn.Module) -> Any:
    """What gives a model's ids their vectors; None where it does not say."""
    try:
        return model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _is_whole(weight: Any) -> bool:
    """Whether weights are all here, and not on no device or shared out among ranks."""
    return (
        weight is not None
        and type(weight.data) is torch.Tensor
        and not weight.is_meta
        and weight.dim() == 2  # shared out they are flat, or empty
        and weight.numel() > 0
    )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model within what torch wraps around it."""
    while (inner := getattr(model, "module", getattr(model, "_orig_mod", None))) is not None:
        model = inner
    return model


# -------------------------------------------------------------------------------------------------
# For a loop of one's own.


class ModelFeeder(DeviceFeeder):
    """Iterates over a loader's steps, as what a model is called with, on the model's device.

    >>> loader = Loader(store, seq_len=2048, batch_size=16, labels="same", boundaries="mask")
    >>> for batch in ModelFeeder(loader, model):
    ...     model(**batch).loss.backward()

    Everything else is a DeviceFeeder's.
    """

    def __init__(
        self,
        loader: Loader,
        model: torch.nn.Module,
        *,
        device: torch.device | str | None = None,
        depth: int = 3,
        flatten: bool | None = None,
        documents: bool = True,
    ) -> None:
        if loader.labels != "same":
            raise UsageError(
                f"labels={loader.labels!r} of this loader are the next tokens, and"
                f" {type(unwrapped(model)).__name__} shifts labels by itself: it would learn the"
                " token after the next",
                hint='make it with Loader(..., labels="same")',
            )
        self._inputs = ModelInputs(model, flatten=flatten, documents=documents)
        self._inputs.check(loader)
        if loader.window and not self._inputs.flatten:
            raise UsageError(
                f"window={loader.window!r} of this loader is in cu_seqlens, at which"
                f" {type(unwrapped(model)).__name__} looks with flash attention alone: with the one"
                " it has it would see whole documents",
                hint='give the model attn_implementation="flash_attention_2", or make the loader'
                " without window=",
            )
        if device is None:
            device = next((each.device for each in model.parameters()), None)
        self._inputs.try_on(model, loader)
        fields = self._inputs.fields + (("cu_seqlens",) if self._inputs.flatten else ())
        super().__init__(loader, device=device, fields=fields, depth=depth)

    def __iter__(self) -> Iterator[Any]:
        # Where documents end is known to the host before, and not asked of the device.
        return (self._inputs.of(batch, batch.max_seqlen) for batch in super().__iter__())


# -------------------------------------------------------------------------------------------------
# For the Trainer.
#
# Row k of the run is row k of a loader with batches of one row, on one rank: the stream of rows
# does not depend on how it is dealt out. The Trainer deals out numbers, which cost nothing to skip.
# The callback has it count through the run instead of drawing numbers, sees from the checkpoint
# that the run is the same one, and where it stands.


class TrainerDataset(Dataset[Any]):
    """Rows of a store or mixture for transformers' Trainer, right for its models as they are.

    >>> rows = TrainerDataset("my-store", seq_len=2048, model=model, split="train")
    >>> Trainer(model, args, train_dataset=rows, data_collator=rows.collate,
    ...         callbacks=[rows.callback])

    Every rank reads its own rows, in the order of a loader: shuffled by `seed`, anew in each epoch.
    An epoch is every row of a store once, or as many rows as the stores of a mixture have; a last
    batch that does not come out even takes the first rows of the next epoch, which goes on after
    them. A run goes on from the Trainer's checkpoint with the row after the last one used, reading
    none of those before, on any number of GPUs and with any batch size.

    Without the callback the Trainer draws numbers by itself: each row once in an epoch, in an order
    of its own. Evaluation needs none.
    """

    def __init__(
        self,
        source: StoreInput | Mixture,
        *,
        seq_len: int,
        model: torch.nn.Module,
        packing: str = "concat",
        boundaries: str = "mask",
        shuffle: bool | str = True,
        seed: int = 0,
        pad_id: int | None = None,
        split: str | None = None,
        flatten: bool | None = None,
        documents: bool = True,
    ) -> None:
        if isinstance(source, Mixture) and any(stage.seq_len for stage in source.stages):
            raise UsageError(
                "a stage of this mixture changes seq_len, and the Trainer's batches have one number"
                " of rows",
                hint="train each stage by itself, or in a loop of your own with ModelFeeder",
            )
        self.loader = Loader(
            source,
            seq_len=seq_len,
            batch_size=1,
            packing=packing,
            boundaries=boundaries,
            labels="same",
            shuffle=shuffle,
            seed=seed,
            pad_id=pad_id,
            prefetch=0,
            split=split,
        )
        self.collate = ModelInputs(model, flatten=flatten, documents=documents)
        """The `data_collator` of these rows."""
        self.callback = RunCallback(self)
        """What the Trainer is to be given in `callbacks`."""
        self.collate.check(self.loader)

    def __len__(self) -> int:
        steps = self.loader.num_steps
        return sum(each.num_rows for each in self.loader.layouts()) if steps is None else steps

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Several rows, read in one go; DataLoader asks for a batch in this way."""
        is_placed = all(isinstance(number, _Place) for number in numbers)
        if not is_placed and len(self.loader.mixture.stages) > 1:
            raise UsageError(
                "the stages of a mixture come one after the other, and the Trainer drew rows in an"
                " order of its own",
                hint="give the Trainer callbacks=[rows.callback] too",
            )
        if outside := [n for n in numbers if not is_placed and not -len(self) <= n < len(self)]:
            raise IndexError(f"row {outside[0]} of {len(self):,} rows")
        steps = self.loader.num_steps
        places = [int(n) % (steps or len(self)) if n < 0 or steps else int(n) for n in numbers]
        tensors = to_tensors(self.loader.gather(places), fields=FIELDS)
        rows = zip(*(tensor.unbind() for tensor in tensors.values()), strict=True)
        made = [dict(zip(FIELDS, row, strict=True)) for row in rows]
        return [_FlatRow(row) for row in made] if self.collate.flatten else made

    def __getstate__(self) -> dict[str, Any]:
        # Workers need no callback, which knows the Trainer's dataloader.
        return {name: value for name, value in self.__dict__.items() if name != "callback"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback = RunCallback(self)


class _FlatRow:
    """A row for flash attention, which another collator would make a batch of without masks."""

    __slots__ = ("fields",)

    def __init__(self, fields: Tensors) -> None:
        self.fields = fields

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # what other collators ask for
        raise UsageError(
            "flash attention keeps documents apart only in batches of one row, which this collator"
            " does not make",
            hint="give the Trainer data_collator=rows.collate too",
        )


class _Place(int):
    """Number of a row in the whole run, not in what a sampler takes for the dataset."""

    __slots__ = ()


class _Run(Sampler[int]):
    """The rows of a run in their order, an epoch of the Trainer at a time."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.epoch = first, count, 0

    def set_epoch(self, epoch: int) -> None:
        """Accelerate says it to samplers before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        start = self.first + self.epoch * self.count
        return map(_Place, range(start, start + self.count))


KEY = "tokenmill"  # of our state among those that the Trainer keeps in trainer_state.json


class RunCallback(TrainerCallback):  # type: ignore[misc]  # it has no types here
    """Has the Trainer take rows in the order of the run, and go on where a checkpoint was made."""

    def __init__(self, dataset: TrainerDataset) -> None:
        self.dataset = dataset
        self._offset = 0  # of a row in the run, to what the Trainer counts
        self._batches = self._rows = self._updates = 0

    def on_train_begin(self, args: Any, state: Any, *_: Any, **known: Any) -> None:
        """Put the order of the run in the place of the Trainer's."""
        train_dataloader = known["train_dataloader"]
        samplers: list[Any] = [getattr(train_dataloader, "batch_sampler", None)]
        while (inner := getattr(samplers[-1], "batch_sampler", None)) is not None:
            samplers.append(inner)
        if train_dataloader.dataset is not self.dataset or not isinstance(
            samplers[-1], BatchSampler
        ):
            raise UsageError(
                "this callback belongs to a TrainerDataset, and the Trainer trains on something"
                f" else: {type(train_dataloader.dataset).__name__}",
                hint="give it Trainer(train_dataset=rows, ..., callbacks=[rows.callback])",
            )
        if type(train_dataloader).__name__ == "DataLoaderDispatcher":
            raise UsageError(
                "dispatch_batches=True has rank 0 read the rows of all ranks and send them on, and"
                " each can read its own",
                hint="leave it out of the Trainer's accelerator_config",
            )
        if args.n_gpu > 1 and self.dataset.collate.flatten:
            raise _cut_boundaries(args.n_gpu)
        if known.get("model") is not None:
            self.dataset.collate.try_on(known["model"], self.dataset.loader)
        # As accelerate counts them: of all ranks.
        self._rows = getattr(train_dataloader, "total_batch_size", samplers[-1].batch_size)
        self._batches = len(train_dataloader)
        self._accumulated = args.gradient_accumulation_steps
        self._updates = max(1, -(-self._batches // self._accumulated))
        skips = not args.ignore_data_skip
        self._offset = self._consumed(state) - self._counted(state.global_step, within=skips)
        run = _Run(self._offset, self._batches * self._rows)
        for sampler in samplers:
            sampler.sampler = run

    def _counted(self, updates: int, *, within: bool = True) -> int:
        """Rows that the Trainer counts as used after so many updates, or before their epoch."""
        epochs, more = divmod(updates, self._updates)
        batches = epochs * self._batches + (more * self._accumulated if within else 0)
        return batches * self._rows

    def _consumed(self, state: Any) -> int:
        """Rows of the run that were used before the first one of now."""
        saved = state.stateful_callbacks.get(KEY)
        if saved is not None:
            self.dataset.loader.load_state_dict(saved["attributes"]["loader"])
            return int(saved["attributes"]["rows"])
        if not state.global_step:
            return 0
        rows = self._counted(state.global_step)
        warnings.warn(
            "the checkpoint says nothing of the rows of a TrainerDataset; going on with row"
            f" {rows:,}, which {state.global_step:,} steps of this batch size come to",
            UserWarning,
            stacklevel=2,
        )
        return rows

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Have the position in the state before anything saves it."""
        loader, rows = self.dataset.loader, self._offset + self._counted(state.global_step)
        loader.seek(rows % loader.num_steps if loader.num_steps else rows)
        saved = {"rows": rows, "loader": loader.state_dict()}
        state.stateful_callbacks[KEY] = {"args": {}, "attributes": saved}


# -------------------------------------------------------------------------------------------------
# For TRL, and whatever else takes a `datasets.Dataset`.


def as_dataset(store: StoreInput, *, split: str | None = None, trainer: str | None = None) -> Any:
    """The documents of a store as a `datasets.Dataset`: `input_ids` and `labels`, nothing copied.

    >>> SFTTrainer(model, train_dataset=as_dataset("chats", split="train"), args=SFTConfig(...))

    Labels are -100 where the store says that a token does not count; those of a store with masks
    take 4 bytes of memory a token, everything else stays in the store's own files. Such a store has
    `assistant_masks` too, since TRL before 1.7 leaves labels out where it packs rows. Of a store of
    pairs there are, in memory, the columns that a trainer of TRL makes for itself: `trainer="dpo"`
    has `prompt_ids`, `chosen_ids` and `rejected_ids`, `"reward"` the last two with the prompt in
    each. Either would take those of the other, and learn from answers alone.
    """
    opened = open_split(store, split)
    if opened.has_pairs != (trainer is not None) or trainer not in (None, "dpo", "reward"):
        what = "pairs, which" if opened.has_pairs else "no pairs, which alone"
        raise UsageError(
            f"trainer={trainer!r} for {what} DPOTrainer and RewardTrainer read in columns of the"
            " same names that mean something else",
            hint="of pairs say trainer='dpo' or trainer='reward'; of other stores nothing",
        )
    if find_spec("datasets") is None:
        raise MissingExtraError("datasets", extra="trl", purpose="a datasets.Dataset of a store")
    import datasets
    import pyarrow as pa

    if trainer is not None:
        return _pairs_dataset(opened, whole=trainer == "reward")
    # One type for all shards: files of other projects, read in place, may be one large shard.
    is_large = any(shard.tokens > np.iinfo(np.int32).max for shard in opened.shards)
    kind = pa.LargeListArray if is_large else pa.ListArray
    parts = [_shard_columns(opened, shard, kind) for shard in range(len(opened.shards))]
    columns: dict[str, Any] = {"input_ids": opened.dtype, "labels": opened.dtype}
    if opened.has_mask:
        columns |= {"labels": "int32", "assistant_masks": "uint8"}
    made = {
        name: pa.chunked_array(
            [part[place] for part in parts],
            type=(pa.large_list if is_large else pa.list_)(pa.from_numpy_dtype(dtype)),
        )
        for place, (name, dtype) in enumerate(columns.items())
    }
    table = datasets.table.InMemoryTable(pa.table(made))
    return datasets.Dataset(table, fingerprint=opened.content[:16])


def _pairs_dataset(store: Store, *, whole: bool) -> Any:
    import datasets
    import pyarrow as pa

    type_ = pa.list_(pa.from_numpy_dtype(store.dtype))
    pairs: list[Any] = [store.pair(number) for number in range(store.num_pairs)]
    names: tuple[str, ...] = Pair._fields
    if whole:
        pairs = [[np.append(prompt, answer) for answer in answers] for prompt, *answers in pairs]
        names = names[1:]
    columns = {
        name: pa.array([pair[place] for pair in pairs], type=type_)
        for place, name in enumerate(names)
    }
    table = datasets.table.InMemoryTable(pa.table(columns))
    kind = "reward" if whole else "dpo"
    return datasets.Dataset(table, fingerprint=f"{store.content[:16]}-{kind}")


def _shard_columns(store: Store, number: int, kind: Any) -> tuple[Any, ...]:
    import pyarrow as pa

    shard: MappedShard = store.map_shard(number)
    lengths = shard.index.lengths
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    starts = shard.index.offsets // shard.index.dtype.itemsize
    tokens, mask = shard.tokens[: len(shard.tokens)], shard.mask
    if not np.array_equal(starts, ends[:-1]):
        # Of other projects' files, read in place: documents need not be one after the other.
        places = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
        tokens, mask = tokens[places], None if mask is None else mask[: len(mask)][places]
    offsets = pa.array(ends if kind is pa.LargeListArray else ends.astype(np.int32))
    ids = kind.from_arrays(offsets, pa.array(tokens[: ends[-1]]))
    if mask is None:
        return ids, ids
    mask = mask[: ends[-1]]
    labels = np.where(mask != 0, tokens[: ends[-1]].astype(np.int32), np.int32(IGNORED))
    return (
        ids,
        kind.from_arrays(offsets, pa.array(labels)),
        kind.from_arrays(offsets, pa.array(mask)),
    )
