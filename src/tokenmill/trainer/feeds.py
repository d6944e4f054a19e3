"""Batches of text that is tokenized while a run trains: what `tokenmill train --feed` compares.

    store         what the loader reads: see tokenmill.torch
    encode        the tokenizer's package is called for each document, when a batch is asked for
    encode_batch  it is called for 64 documents at once, on all cores
    workers       a DataLoader whose workers call it for each document

Text is read as the store's build read it, its validation documents left out, and rows are cut of it
end to end, as `--packing concat` does: without workers and on one rank, these are the rows of the
store in the order of its documents. Ids are those of the tokenizer's own package, called plainly;
nothing is read ahead but by workers. The next text after the last is the first again.
"""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenmill.engines.base import failure_of
from tokenmill.engines.load import load_reference
from tokenmill.errors import SourceError, TrainingError, UsageError
from tokenmill.loader.batch import IGNORED
from tokenmill.records import TextBatch, in_validation
from tokenmill.runners.local import usable_cores
from tokenmill.sources.base import SourceOptions, is_stream, open_source, plan_units, text_size
from tokenmill.sources.discovery import discover, source_file
from tokenmill.sources.objects import OF_PYTHON
from tokenmill.store.layout import TRAIN
from tokenmill.where import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.sources.base import SourceFile, Unit
    from tokenmill.store.reader import Store
    from tokenmill.trainer.loop import Setup

    Ids = NDArray[np.uint32]

TEXTS_AT_ONCE = 64  # of `encode_batch`
BATCH_BYTES = 1 << 20  # of text that is read in one go
UNITS_OF_A_SHARE = 4  # that the text is cut into at least, where it can be


class Share(NamedTuple):
    """Of the text, what one of several readers has."""

    number: int
    of: int


class TextBatches(NamedTuple):
    """Inputs and labels of a micro-batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor


# -------------------------------------------------------------------------------------------------
# The text of a store.


@dataclass(frozen=True, kw_only=True)
class StoreText:
    """What was, or would be, built into a store: its documents of the split train, as text."""

    files: tuple[SourceFile, ...]
    options: SourceOptions
    val_fraction: float

    @classmethod
    def of(cls, store: Store, text: str | os.PathLike[str] | None) -> StoreText:
        """Of a store's own sources, or of other files that are read in the same way."""
        config = store.manifest.identity.config
        if config.get("format") is not None:
            raise UsageError(
                f"this store was built with more than plain text (format={config['format']!r}, or a"
                " template or longest length); tokenizing in the loop would make other rows of it",
                hint="use --feed store",
            )
        if text is None and "import" in config:
            raise UsageError(
                "this store was imported: nobody knows the text that its tokens were",
                hint="name the text: --text FILES; or use --feed store",
            )
        if text is None and (skipped := store.manifest.totals.skipped):
            raise UsageError(
                f"a limit left out {skipped:,} rows of what this store was built of, and tokenizing"
                " in the loop would read them too",
                hint="name text of those rows alone: --text FILES; or use --feed store",
            )
        rejects = store.manifest.identity.special_tokens == "reject"
        if rejects and (text is not None or store.manifest.totals.rejected):
            raise UsageError(
                "this store was built with --special-tokens reject, which leaves out documents that"
                " have such a token in their text, and tokenizing in the loop would not",
                hint="use --feed store",
            )
        where = config.get("where")
        options = SourceOptions(
            text_field=config.get("text_field") or "text",
            where=None if where is None else parse(where),
            separator=config.get("separator"),
            by_name=config.get("split_by_name") is True,
            batch_bytes=BATCH_BYTES,
        )
        val_fraction = float(config.get("val_fraction") or 0)
        files = _sources(store) if text is None else discover([text], options).files
        files = tuple(file for file in files if file.split in (None, TRAIN))
        return cls(files=files, options=options, val_fraction=val_fraction)

    def texts(self, share: Share) -> Iterator[str]:
        """The documents of a share, again and again."""
        units = self._units(share)
        while True:
            number = -1
            for number, text in enumerate(self._texts(units, share)):  # noqa: B007
                yield text
            if number < 0:
                names = ", ".join(repr(file.path) for file in self.files[:3])
                raise SourceError(
                    f"there is no text to train on in {names}",
                    hint="name files that have some: --text FILES",
                )

    def _units(self, share: Share) -> list[Unit] | None:
        """The units of a share; None where there are too few, or where they are not known."""
        if share.of == 1 or any(is_stream(file, self.options) for file in self.files):
            return None
        size = sum(map(text_size, self.files)) // (UNITS_OF_A_SHARE * share.of)
        options = replace(self.options, unit_bytes=max(BATCH_BYTES, size))
        units = [unit for file in self.files for unit in plan_units(file, options)]
        return units[share.number :: share.of] if len(units) >= share.of else None

    def _texts(self, units: list[Unit] | None, share: Share) -> Iterator[str]:
        if units is not None:
            yield from itertools.chain.from_iterable(map(self._read, units))
            return
        everything = itertools.chain.from_iterable(map(self._read_file, self.files))
        yield from itertools.islice(everything, share.number, None, share.of)

    def _read_file(self, file: SourceFile) -> Iterator[str]:
        for unit in plan_units(file, self.options):
            with closing(open_source(file, self.options)) as source:
                if not source.exists(unit):
                    return
            yield from self._read(unit)

    def _read(self, unit: Unit) -> Iterator[str]:
        with closing(open_source(unit.file, self.options)) as source:
            for batch in source.read(unit):
                texts = batch.texts
                if self.val_fraction:
                    texts = texts.take(np.flatnonzero(~in_validation(texts, self.val_fraction)))
                yield from filter(None, texts.texts())


def _sources(store: Store) -> Iterator[SourceFile]:
    """The files of which documents are in the split train."""
    has_train = {
        unit.source
        for unit in store.manifest.units
        if any(shard.split == TRAIN for shard in unit.shards)
    }
    for number, entry in enumerate(store.manifest.sources):
        if number not in has_train:
            continue
        members = store.receipt(f"{entry.prefix}-00000").unit.members
        if entry.path.startswith(OF_PYTHON):
            raise SourceError(
                f"{entry.path!r}, which this store was built of, was rows of a Python program, and"
                " no file holds them",
                hint="name the text: --text FILES; or use --feed store",
            )
        try:
            file = source_file(entry.path, members=members)
            if file.size != entry.size:
                raise SourceError(f"it had {entry.size:,} bytes, and has {file.size:,}")
            yield file
        except (OSError, SourceError) as error:
            why = getattr(error, "message", error)
            raise SourceError(
                f"{entry.path!r}, which this store was built of, cannot be read from here: {why}",
                hint="go to the folder where it was built, or name the text: --text FILES",
            ) from error


# -------------------------------------------------------------------------------------------------
# From texts to batches.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that makes batches of text: what a worker is given."""

    feed: str
    text: StoreText
    kind: str
    folder: str
    special_tokens: str
    bos_id: int | None
    eos_id: int | None
    rows: int
    seq_len: int
    masks_boundaries: bool
    share: Share

    @classmethod
    def of(cls, store: Store, setup: Setup) -> Recipe:
        options, identity = setup.options, store.manifest.identity
        return cls(
            feed=options.feed,
            text=StoreText.of(store, options.text),
            kind=identity.tokenizer.kind,
            folder=str(store.tokenizer_dir),
            special_tokens=identity.special_tokens,
            bos_id=identity.bos_id,
            eos_id=identity.eos_id,
            rows=setup.micro_batch,
            seq_len=setup.seq_len,
            masks_boundaries=options.boundaries == "mask",
            share=Share(setup.ranks.rank, setup.ranks.world_size),
        )

    def batches(self, share: Share, *, threads: int) -> Iterator[TextBatches]:
        """Batches of a share of the text."""
        documents = map(self._framed, self._encoded(self.text.texts(share), threads))
        return self._cut(documents)

    def _encoded(self, texts: Iterator[str], threads: int) -> Iterator[Ids]:
        """Ids of each text."""
        engine = load_reference(
            self.kind, Path(self.folder), special_tokens=self.special_tokens, threads=threads
        )
        one: Any = getattr(engine, "encode_one", None) if self.feed != "encode_batch" else None
        many = TEXTS_AT_ONCE if self.feed == "encode_batch" else 1
        while True:
            some = list(itertools.islice(texts, many))
            try:
                found = [one(*some)] if one else engine.encode(TextBatch.from_texts(some))
            except BaseException as error:  # the packages raise bare Exception, or panic
                raise _unencodable(error, engine) from error
            yield from (ids for ids in found if len(ids))

    def _framed(self, ids: Ids) -> Ids:
        ends = [
            np.array([each], np.uint32) for each in (self.bos_id, self.eos_id) if each is not None
        ]
        if self.bos_id is None:
            return np.concatenate((ids, *ends)) if ends else ids
        return np.concatenate((ends[0], ids, *ends[1:]))

    def _cut(self, documents: Iterable[Ids]) -> Iterator[TextBatches]:
        """Rows end to end: a row begins with the last label of the one before it."""
        need = self.rows * self.seq_len + 1
        held, begins, count = list[Any](), list[Any](), 0
        for document in documents:
            held.append(document)
            begin = np.zeros(len(document), np.bool_)
            begin[0] = True
            begins.append(begin)
            count += len(document)
            if count < need:
                continue
            flat, marks, first = np.concatenate(held), np.concatenate(begins), 0
            while count - first >= need:
                last = first + need
                yield self._batch(flat[first:last], marks[first:last])
                first = last - 1
            held, begins, count = [flat[first:]], [marks[first:]], count - first

    def _batch(self, ids: Ids, begins: NDArray[np.bool_]) -> TextBatches:
        tokens = torch.from_numpy(ids.astype(np.int64))
        labels = tokens[1:].clone()
        if self.masks_boundaries:
            labels[torch.from_numpy(begins[1:].copy())] = IGNORED
        shape = self.rows, self.seq_len
        return TextBatches(tokens[:-1].reshape(shape), labels.reshape(shape))


def _unencodable(error: BaseException, engine: Engine) -> BaseException:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        return error
    return TrainingError(
        f"{engine.name} failed on a text of the training: {failure_of(error)}",
        hint="a build says which row it is, and goes on without it: use --feed store",
    )


class _WorkerBatches(IterableDataset[TextBatches]):
    """What a worker of a DataLoader makes of its share of this rank's share."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __iter__(self) -> Iterator[TextBatches]:
        info, whole = get_worker_info(), self._recipe.share
        assert info is not None
        share = Share(whole.number * info.num_workers + info.id, whole.of * info.num_workers)
        return self._recipe.batches(share, threads=1)


def _leave_signals(_: int) -> None:
    """In a worker: the run ends it, not Ctrl-C, and what ends it is not told to the run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class TextFeeder:
    """Iterates over batches on the device; they are made when they are asked for, or by workers."""

    def __init__(self, store: Store, setup: Setup) -> None:
        self.recipe = Recipe.of(store, setup)
        self._device = setup.device
        options, here = setup.options, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = max(1, len(usable_cores()) // here)
        self.threads = cores if options.feed == "encode_batch" else 1
        self.workers = 0
        if options.feed == "workers":
            self.workers = options.feed_workers or max(1, cores - 1)
        self._made: Any = None

    def describe(self) -> str:
        """What feeds the run."""
        files, recipe = len(self.recipe.text.files), self.recipe
        how = {
            "encode": "a document in a call",
            "encode_batch": f"{TEXTS_AT_ONCE} documents in a call, {self.threads} threads",
            "workers": f"a document in a call, in {self.workers} DataLoader workers",
        }
        return (
            f"the text of {files:,} {'file' if files == 1 else 'files'}, tokenized while training:"
            f" {how[recipe.feed]}"
        )

    def __iter__(self) -> Iterator[TextBatches]:
        if not self.workers:
            made = self.recipe.batches(self.recipe.share, threads=self.threads)
        else:
            loader = DataLoader(
                _WorkerBatches(self.recipe),
                batch_size=None,
                num_workers=self.workers,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=_leave_signals,
                multiprocessing_context="fork",
            )
            made = self._made = iter(loader)
        return map(self._on_device, cast("Iterator[Sequence[torch.Tensor]]", made))

    def _on_device(self, batch: Sequence[torch.Tensor]) -> TextBatches:
        if self._device.type != "cuda":
            return TextBatches(*batch)
        pinned = (each if each.is_pinned() else each.pin_memory() for each in batch)
        return TextBatches(*(each.to(self._device, non_blocking=True) for each in pinned))

    def state_dict(self) -> dict[str, Any]:
        """Nothing that could be gone on from."""
        return {"feed": self.recipe.feed}

    def __enter__(self) -> TextFeeder:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        if self._made is not None:
            self._made._shutdown_workers()
            self._made = None
