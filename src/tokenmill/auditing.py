"""`tokenmill audit`: reads batches of anybody's loader and says what is wrong, in numbers.

    loader --batches--> rows (ids, labels, boundaries, without padding) --checks--> findings
    store  --documents--> where in the text each row comes from

A loader is a function that gives batches (dicts, pairs or arrays of ids), or an iterable of them.
With a store, or text that becomes one, each row is looked up in its documents, so that what is left
out, repeated, cut off or trained on by mistake can be counted. What cannot be known without
something that was not given is listed as unchecked and never guessed: "nothing found" is said of
what was checked, and of nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tokenmill.builder.run import build
from tokenmill.engines.load import describe
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.loader.batch import IGNORED
from tokenmill.options import AuditOptions, with_options
from tokenmill.sources.discovery import TRAIN, split_told
from tokenmill.store.reader import Store
from tokenmill.words import count, listed, share

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.loader.order import Ints

    Ids = NDArray[np.int32]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """Something that makes training go wrong: which, how much of it, a row that shows it."""

    kind: str
    problem: str
    example: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What was read, what is wrong with it, and what could not be known."""

    loader: str
    ranks: int
    batches: int
    rows: int
    places: int  # of tokens, padding among them
    padding: int
    labels: str | None  # "next", "same", or neither
    epoch_is_whole: bool
    findings: tuple[AuditFinding, ...]
    remarks: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


# -------------------------------------------------------------------------------------------------
# RankRows: batches of whatever kind become rows.

NAMES = {
    "ids": "input_ids inputs input tokens x",
    "labels": "labels targets target label y",
    "positions": "position_ids positions input_pos",
    "counts": "loss_mask loss_masks assistant_masks completion_mask",
    "documents": "doc_ids document_ids seq_idx segment_ids sequence_ids",
    "ends": "cu_seqlens cu_seq_lens_q cu_seqlens_q",
    "attention": "attention_mask",
}
# What a batch is in a list of arrays without names.
PLACES = ("ids", "labels", "counts")
# Of the same id at the end of a row, from which on they are padding.
LEAST_RUN = 3
# Batches that are compared between epochs, and before and after a resume.
FEW = 4


class AuditRow(NamedTuple):
    """A row without its padding."""

    rank: int
    batch: int
    number: int  # in its batch
    ids: Ids
    labels: Ids | None
    counts: Bools | None  # as a loss mask says, at the places of labels
    restarts: Bools | None  # where positions begin again; None where there are none
    marks: Bools | None  # where documents begin by all else that a batch says
    has_attention: bool  # a mask of two dimensions came along
    padding: int
    trained_padding: int  # of which a label is not ignored

    @property
    def name(self) -> str:
        rank = f"rank {self.rank}, " if self.rank else ""
        return f"{rank}batch {self.batch}, row {self.number}"

    @property
    def is_divided(self) -> bool:
        """Whether the batch says where documents begin inside of the row."""
        return any(
            each is not None and bool(each[1:].any()) for each in (self.restarts, self.marks)
        )


def to_array(value: Any) -> NDArray[Any] | None:
    """Numbers of a batch on the CPU; None where it is none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "iub" else None
    if isinstance(value, list | tuple) and len(value):
        with contextlib.suppress(ValueError, TypeError):
            found = np.asarray(value)
            return found if found.dtype.kind in "iub" else None
    return None


def fields_of(batch: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a batch by what they are for."""
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[0], Mapping):
        # A mapping of inputs, and the labels.
        return fields_of(batch[0]) | {"labels": cast("NDArray[Any]", to_array(batch[1]))}
    found: dict[str, NDArray[Any] | None] = {}
    if isinstance(batch, Mapping):
        named: Mapping[str, Any] = batch
    elif hasattr(batch, "input_ids"):
        names = " ".join(NAMES.values()).split()
        named = {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    elif isinstance(batch, tuple | list) and any(np.ndim(to_array(e)) for e in batch):  # type: ignore[arg-type]
        named = {}
        found = dict(zip(PLACES, map(to_array, batch), strict=False))
    else:
        named, found = {}, {"ids": to_array(batch)}
    for kind, names_of in NAMES.items():
        for name in names_of.split():
            if kind not in found and name in named:
                found[kind] = to_array(named[name])
    arrays = {kind: array for kind, array in found.items() if array is not None}
    if "ids" not in arrays or arrays["ids"].ndim not in (1, 2):
        what = f"a {type(batch).__name__}"
        if named:
            what += f" with {listed(sorted(map(str, named)))}"
        raise UsageError(
            f"the loader gave {what}, in which no ids of rows were found; nothing can be said"
            " of it",
            hint="give dicts with input_ids (rows, tokens) and labels, or pairs of such arrays",
        )
    return arrays


def rows_of(batch: Any, *, rank: int, number: int, pads: Collection[int]) -> Iterator[AuditRow]:
    """The rows of a batch."""
    arrays = fields_of(batch)
    ids = np.atleast_2d(arrays["ids"])
    shape = ids.shape

    def like(kind: str) -> NDArray[Any] | None:
        found = arrays.get(kind)
        return None if found is None or found.size != ids.size else found.reshape(shape)

    labels, positions, counts = like("labels"), like("positions"), like("counts")
    documents, attention = like("documents"), like("attention")
    starts: Bools | None = None
    for named in (documents, attention if attention is not None and attention.max() > 1 else None):
        if named is not None:
            starts = np.zeros(shape, bool)
            starts[:, 1:] = named[:, 1:] != named[:, :-1]
    if starts is None and "ends" in arrays:
        # Over all rows, one after the other; the last one may be repeated.
        ends = arrays["ends"].ravel()
        starts = np.zeros(shape, bool)
        starts.reshape(-1)[ends[(ends > 0) & (ends < ids.size)]] = True
    square = arrays.get("attention")
    if starts is None and square is not None and square.ndim > 2 and square.shape[-1] == shape[1]:
        seen = square.reshape(len(square), -1, shape[1], shape[1])[:, 0]
        before = np.diagonal(seen, offset=-1, axis1=1, axis2=2)
        starts = np.zeros(shape, bool)
        starts[: len(before), 1:] = ~before if before.dtype == bool else before == 0
    for row in range(len(ids)):
        own = None if labels is None else labels[row]
        begin, end = kept_range(
            ids[row], own, None if attention is None else attention[row], pads=pads
        )
        kept = slice(begin, end)
        outside = np.ones(shape[1], bool)
        outside[kept] = False
        restarts = None
        if positions is not None:
            restarts = positions[row, kept] == 0
        yield AuditRow(
            rank=rank,
            batch=number,
            number=row,
            ids=ids[row, kept].astype(np.int32),
            labels=None if own is None else own[kept].astype(np.int32),
            counts=None if counts is None else counts[row, kept].astype(bool),
            restarts=restarts,
            marks=None if starts is None else starts[row, kept],
            has_attention=attention is not None and attention.max() <= 1,
            padding=shape[1] - (end - begin),
            trained_padding=0 if own is None else int((own[outside] != IGNORED).sum()),
        )


def kept_range(
    ids: NDArray[Any],
    labels: NDArray[Any] | None,
    attention: NDArray[Any] | None,
    *,
    pads: Collection[int],
) -> tuple[int, int]:
    """Where a row begins and ends without padding."""
    if attention is not None and not attention.all():
        kept = np.flatnonzero(attention)
        return (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    others = np.flatnonzero(ids != ids[-1])
    end = int(others[-1]) + 1 if len(others) else 0
    run = len(ids) - end
    is_pad = int(ids[-1]) in pads
    ignored = labels is not None and bool((labels[end + 1 :] == IGNORED).all())
    if run >= (2 if is_pad and ignored else LEAST_RUN if is_pad else WINDOW) and (
        is_pad or ignored
    ):
        # Its first may be the end of the last document.
        return 0, end + is_pad
    return 0, len(ids)


@dataclass(kw_only=True, slots=True)
class RankRows:
    """What one rank read."""

    rows: list[AuditRow] = field(default_factory=list)
    batches: int = 0
    is_whole: bool = False  # the loader ended by itself


def read_batches(
    loader: Any, *, batches: int, rank: int, pads: Collection[int], first: int = 0
) -> RankRows:
    """Up to so many batches."""
    found = RankRows()
    with naming("the loader"):
        iterator = iter(loader)
        for batch in itertools.islice(iterator, batches):
            found.rows += rows_of(batch, rank=rank, number=first + found.batches, pads=pads)
            found.batches += 1
        found.is_whole = found.batches < batches or next(iterator, None) is None
    return found


# -------------------------------------------------------------------------------------------------
# What is audited: a function, by its name or itself, or an iterable.

ASKED = ("rank", "world_size", "epoch", "skip")


class AuditedLoader:
    """Something that gives loaders."""

    def __init__(self, target: Any) -> None:
        self.target = target
        found: Any = load_function(target) if isinstance(target, str) else target
        is_class = inspect.isclass(found)
        self.is_function = is_class or (callable(found) and not hasattr(found, "__iter__"))
        if not self.is_function and not hasattr(found, "__iter__"):
            raise UsageError(
                f"{found!r} is neither a function nor an iterable, so it gives no batches",
                hint="name a function that gives a loader: tokenmill audit my_data:train_loader",
            )
        self.function: Callable[..., Any] = found if self.is_function else lambda: found
        self.takes = self._parameters() if self.is_function else ()

    @property
    def name(self) -> str:
        if isinstance(self.target, str):
            return self.target
        return str(getattr(self.target, "__name__", type(self.target).__name__))

    def _parameters(self) -> tuple[str, ...]:
        try:
            own = inspect.signature(self.function).parameters
        except ValueError:  # a type of C does not say
            return ()
        needed = [
            name
            for name, each in own.items()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            and name not in ASKED
        ]
        if needed:
            raise UsageError(
                f"{self.name} needs {listed(needed)}, which the audit does not know",
                hint=f"give defaults to all of its arguments but {listed(ASKED)}",
            )
        return tuple(name for name in ASKED if name in own)

    def make(self, **values: int) -> Any:
        """A loader, told of these what it takes."""
        with naming(self.name):
            return self.function(**{name: values[name] for name in self.takes if name in values})


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Say of an error that it is the loader's own."""
    try:
        yield
    except TokenmillError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name} failed: {type(error).__name__}: {error}",
            hint="it is an error of the loader itself; on the command line --debug shows where",
        ) from error


def load_function(target: str) -> Any:
    """What a name such as `my_data:train_loader` or `my_data.py:train_loader` stands for."""
    module, colon, name = target.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise UsageError(
            f"{target!r} does not name a function",
            hint="write it as MODULE:FUNCTION, such as my_data:train_loader or data.py:loader",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        if module.endswith(".py"):
            path = Path(module)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if not path.is_file() or spec is None or spec.loader is None:
                raise UsageError(f"there is no file {module!r}", hint="give the path of a .py file")
            made = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = made
            spec.loader.exec_module(made)
        else:
            try:
                made = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise
                file = f"{module.replace('.', '/')}.py"
                hint = f"start it in the folder of {error.name}, or name the file: {file}:{name}"
                raise UsageError(f"there is no module {error.name!r}", hint=hint) from error
        if not hasattr(made, name):
            raise UsageError(f"{module!r} has no {name!r}", hint=f"define it: def {name}(): ...")
        return getattr(made, name)
    finally:
        sys.path.pop(0)


def read_ranks(source: AuditedLoader, asked: AuditOptions, pads: Collection[int]) -> list[RankRows]:
    """What each rank reads in one epoch."""
    alike: dict[str, Any] = {"batches": asked.batches, "pads": pads}
    if "rank" in source.takes:
        return [
            read_batches(
                source.make(rank=rank, world_size=asked.ranks, epoch=0, skip=0), rank=rank, **alike
            )
            for rank in range(asked.ranks)
        ]
    if not isinstance(source.target, str):
        raise UsageError(
            f"ranks={asked.ranks}, but {source.name} takes no argument rank; it would give every"
            " rank the same rows here, whatever it does under torchrun",
            hint="let it take rank and world_size, or name it as a string: 'module:function', which"
            " is called in a process for each rank with torchrun's environment variables",
        )
    # As torchrun starts them: the loader asks the environment, or torch.distributed, who it is.
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        paths = [Path(folder) / f"{rank}" for rank in range(asked.ranks)]
        processes = [
            context.Process(
                target=_read_one_rank,
                args=(source.target, rank, asked.ranks, port, str(path), alike),
                daemon=False,
            )
            for rank, path in enumerate(paths)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        if lost := [str(rank) for rank, path in enumerate(paths) if not path.exists()]:
            raise UsageError(
                f"{source.name} failed on rank {listed(lost)} of {asked.ranks}; its error is above",
                hint="run it alone: tokenmill audit " + shlex.quote(source.target),
            )
        return [pickle.loads(path.read_bytes()) for path in paths]


def _read_one_rank(
    target: str, rank: int, world_size: int, port: int, path: str, alike: dict[str, Any]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    found = read_batches(AuditedLoader(target).make(epoch=0, skip=0), rank=rank, **alike)
    partial = Path(path + ".part")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)


# -------------------------------------------------------------------------------------------------
# Where rows come from: the longest runs of tokens that they share with the documents of a store.

WINDOW = 8  # tokens by which a place is recognised
CHANCE = 64  # tokens in which documents may begin alike
MOST_INDEXED = 8 << 20  # windows; of larger stores every second, third, ... is known
MOST_TOKENS = 200 << 20
MOST_ALIKE = 4096  # places that are compared, of those that begin alike


class Overlap(NamedTuple):
    """Tokens of a row that follow each other in the store."""

    at: int  # in the row
    place: int  # in the store
    length: int


def windows(ids: NDArray[Any], length: int = WINDOW) -> NDArray[np.uint64]:
    """A number for every `length` tokens in a row."""
    places = max(0, len(ids) - length + 1)
    found = np.zeros(places, np.uint64)
    for step in range(length):
        found *= np.uint64(0x9E3779B97F4A7C15)
        found += ids[step : step + places].astype(np.uint64) + np.uint64(1)
    found ^= found >> np.uint64(29)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    return found ^ (found >> np.uint64(32))


class Documents:
    """The tokens of a store's split in memory, and how often each was read."""

    def __init__(self, store: Store) -> None:
        if store.num_tokens > MOST_TOKENS:
            raise UsageError(
                f"{store.path!s} has {store.num_tokens:,} tokens; rows are looked up in memory,"
                f" among at most {MOST_TOKENS:,}",
                hint="audit a loader of a part of the text, built with: tokenmill build ..."
                " --limit N",
            )
        lengths = store.lengths().astype(np.int64)
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self.ids = np.empty(store.num_tokens, np.int32)
        for start, ids in zip(self.starts, store, strict=True):
            self.ids[start : start + len(ids)] = ids
        self.mask: Bools | None = None
        if store.has_mask:
            masks = [cast("Any", store.mask(number)) for number in range(len(store))]
            self.mask = np.concatenate([*masks, np.zeros(0)]).astype(bool)
        self.eos_id, self.bos_id = store.eos_id, store.bos_id
        self.times_read = np.zeros(len(self.ids), np.int32)
        self.was_label = np.zeros(len(self.ids), bool)
        self.after_row = np.zeros(len(self.ids) + 1, bool)  # a row ended before it
        keys = windows(self.ids)
        self.every = max(1, len(keys) // MOST_INDEXED)
        places = np.flatnonzero(keys % np.uint64(self.every) == 0)
        order = np.argsort(keys[places], kind="stable")
        self._places, self._keys = places[order], keys[places][order]
        self._edges: dict[tuple[str, int], tuple[NDArray[np.uint64], Ints]] = {}

    def find(self, ids: Ids) -> list[Overlap]:
        """The runs of a row, and that they were read."""
        keys = windows(ids)
        first = np.searchsorted(self._keys, keys, "left")
        last = np.searchsorted(self._keys, keys, "right")
        known = np.flatnonzero(last > first)
        runs: list[Overlap] = []
        done = seek = 0
        while (next_ := int(np.searchsorted(known, seek))) < len(known):
            at = int(known[next_])
            alike = self._longest(ids, at, self._places[first[at] : last[at]])
            best = int(alike[np.argmin(self.times_read[alike])])
            run = self._around(ids, at, best, done)
            if run.length < WINDOW:  # another text had the same number
                seek = at + 1
                continue
            before = self.starts[np.searchsorted(self.starts, run.place) :][:1]
            if run.at > done and len(before) and before[0] < run.place + min(WINDOW, run.length):
                # What is like the end of the document before it for a few tokens by chance.
                more = int(before[0]) - run.place
                run = Overlap(run.at + more, run.place + more, run.length - more)
                if run.length < WINDOW:
                    seek = at + 1
                    continue
            run = self._from_beginning(ids, runs, run)
            at = run.at + run.length
            if at < len(ids):
                # What is like the next document for a few tokens by chance.
                end = run.place + run.length
                past = end - int(np.append(0, self.ends)[np.searchsorted(self.ends, end, "right")])
                if past < min(WINDOW, run.length):
                    run = run._replace(length=run.length - past)
            done = seek = run.at + run.length
            runs.append(run)
        if self.every == 1:
            runs = list(self._with_short(ids, runs))
        for run in runs:
            self.times_read[run.place : run.place + run.length] += 1
        if runs and runs[-1].at + runs[-1].length == len(ids):
            self.after_row[runs[-1].place + runs[-1].length] = True
        return runs

    def _longest(self, ids: Ids, at: int, places: Ints) -> Ints:
        """Of places that begin alike, those that stay so longest."""
        if len(places) > MOST_ALIKE:
            least = np.argpartition(self.times_read[places], MOST_ALIKE)
            places = places[least[:MOST_ALIKE]]
        length = 4 * WINDOW
        while len(places) > 1:
            mine = ids[at : at + length]
            reach = np.minimum(places[:, None] + np.arange(len(mine)), len(self.ids) - 1)
            differs = self.ids[reach] != mine
            same = np.where(differs.any(axis=1), differs.argmax(axis=1), len(mine))
            places = places[same == same.max()]
            if same.max() < length:
                break
            length *= 4
        return places

    def _around(self, ids: Ids, at: int, place: int, least: int) -> Overlap:
        """What a row and the store have in common around a place of each."""
        after = min(len(ids) - at, len(self.ids) - place)
        other = np.flatnonzero(ids[at : at + after] != self.ids[place : place + after])
        length = int(other[0]) if len(other) else after
        room = min(at - least, place)
        before = ids[at - room : at] != self.ids[place - room : place]
        other = np.flatnonzero(before[::-1])
        more = int(other[0]) if len(other) else room
        return Overlap(at - more, place - more, length + more)

    def _from_beginning(self, ids: Ids, runs: list[Overlap], run: Overlap) -> Overlap:
        """The run from the beginning of its document on, if the one before has that by chance."""
        start = int(self.starts[self.document_at(run.place)])
        more = run.place - start
        if not runs or not 0 < more < CHANCE or runs[-1].at + runs[-1].length != run.at:
            return run
        before = runs[-1]
        if (
            more >= before.length
            or (ids[run.at - more : run.at] != self.ids[start : run.place]).any()
        ):
            return run
        runs[-1] = before._replace(length=before.length - more)
        return Overlap(run.at - more, start, run.length + more)

    def _with_short(self, ids: Ids, runs: Sequence[Overlap]) -> Iterator[Overlap]:
        """The runs, and documents or ends of documents that are shorter than a window."""
        done = 0
        for run in (*runs, Overlap(len(ids), 0, 0)):
            while done < run.at:
                found = self._short(ids, done, run.at)
                done += found.length or 1
                if found.length:
                    yield found
            if run.length:
                yield run
            done = max(done, run.at + run.length)

    def _short(self, ids: Ids, begin: int, end: int) -> Overlap:
        kinds = ["whole"] if begin else ["end", "whole"]
        if end == len(ids):
            kinds.append("begin")
        for length in range(min(WINDOW - 1, end - begin), 0, -1):
            key = windows(ids[begin : begin + length], length)
            for kind in kinds:
                if kind == "begin" and begin + length < end:
                    continue
                keys, places = self._edge(kind, length)
                first, last = (
                    np.searchsorted(keys, key[0], "left"),
                    np.searchsorted(keys, key[0], "right"),
                )
                if first < last:
                    alike = places[first:last]
                    return Overlap(begin, int(alike[np.argmin(self.times_read[alike])]), length)
        return Overlap(begin, 0, 0)

    def _edge(self, kind: str, length: int) -> tuple[NDArray[np.uint64], Ints]:
        """Numbers of the first or last tokens of documents, in order, and where they are."""
        if (kind, length) not in self._edges:
            sizes = self.ends - self.starts
            chosen = sizes == length if kind == "whole" else sizes >= length
            places = self.ends[chosen] - length if kind == "end" else self.starts[chosen]
            keys = windows(self.ids, length)[places] if len(places) else np.zeros(0, np.uint64)
            order = np.argsort(keys, kind="stable")
            self._edges[kind, length] = keys[order], places[order]
        return self._edges[kind, length]

    def copies(self) -> Iterator[tuple[Ints, Ints]]:
        """How often what begins at a place, or ends there, is in the store, and was read."""
        keys = windows(self.ids)
        if self.every > 1 or not len(keys):
            return
        _, kind, number = np.unique(keys, return_inverse=True, return_counts=True)
        for places in (slice(0, len(keys)), slice(WINDOW - 1, None)):
            total, times = np.ones(len(self.ids), np.int64), np.zeros(len(self.ids), np.int64)
            total[places] = number[kind]
            times[places] = np.bincount(kind, self.times_read[places])[kind]
            yield total, times

    def document_at(self, place: int) -> int:
        """Number of the document that holds a token."""
        return int(np.searchsorted(self.ends, place, "right"))

    def begins(self, runs: Sequence[Overlap], length: int) -> Bools:
        """Where documents, or parts of them, begin in a row."""
        found = np.zeros(length, bool)
        for run in runs:
            found[run.at] = True
            low, high = np.searchsorted(self.starts, (run.place, run.place + run.length))
            found[self.starts[low:high] - run.place + run.at] = True
        found[:1] = False
        return found


# -------------------------------------------------------------------------------------------------
# Checks.

OF_LABELS = {"next": "the next tokens", "same": "the tokens themselves"}
ENDS_A_TURN = re.compile(
    r"im_end|eot_id|eom_id|end_of_turn|turn_end|<\|end\|>|<\|eot\|>", re.IGNORECASE
)
NO_DATA = re.compile(
    r"(^|/)(README|LICENSE|NOTICE|dataset_infos?|\.gitattributes|CITATION)[^/]*$", re.IGNORECASE
)
LOOKED_AT = 5000  # documents of which the file is asked
MUCH_PADDING = 0.25
SEEN = 0.999  # of labels, to say what they are
SOME = 0.002  # of tokens or rows: less is the end of an epoch, or chance


def is_held_out(name: str) -> bool:
    """Whether any word of a file's name tells another split than that for training."""
    return any(split_told([word]) not in (None, TRAIN) for word in re.split(r"[_.\-]", name))


class Audit:
    """One audit: what is known, and what was found."""

    def __init__(self, asked: AuditOptions, store: Store | None) -> None:
        self.asked = asked
        self.store = store
        self.findings: list[AuditFinding] = []
        self.remarks: list[str] = []
        self.unchecked: list[str] = []
        self.engine: Engine | None = None if store is None else store.reference
        self.special: Mapping[str, int] = {}
        self.eos_id: int | None = None if store is None else store.eos_id
        self.bos_id: int | None = None if store is None else store.bos_id
        tokenizer = asked.tokenizer or (None if store is None else store.tokenizer_dir)
        if store is not None and store.manifest.identity.tokenizer.kind == "bytes":
            tokenizer = asked.tokenizer or "bytes"
        if tokenizer is not None:
            info = describe(str(tokenizer), policy=None)
            self.special = info.special_tokens
            known = {**info.other_tokens, **info.special_tokens}
            if self.eos_id is None:
                self.eos_id = known.get(info.eos_token or "")
            if self.bos_id is None:
                self.bos_id = known.get(info.bos_token or "")
        pads = {id_ for name, id_ in self.special.items() if "pad" in name.lower()}
        self.pads = pads | {each for each in (self.eos_id, self.bos_id) if each is not None} | {0}

    def find(self, kind: str, problem: str, *, example: str = "", hint: str = "") -> None:
        self.findings.append(AuditFinding(kind=kind, problem=problem, example=example, hint=hint))

    def text(self, ids: NDArray[Any]) -> str:
        """A few ids as they can be read."""
        return repr(self.engine.decode(ids.tolist())) if self.engine else str(ids.tolist())

    # ---------------------------------------------------------------------------------------------

    def labels(self, rows: Sequence[AuditRow]) -> str | None:
        """What labels are: the token itself, the next one, or neither."""
        having = [row for row in rows if row.labels is not None and len(row.ids) > 3]
        if not having:
            self.unchecked.append("labels: the batches have none")
            return None
        equal = dict.fromkeys(range(-1, 4), 0)
        total = dict.fromkeys(equal, 0)
        for row in having:
            labels = cast("Ids", row.labels)
            for shift in equal:
                # The label at a place beside the token so many places on.
                low, high = max(0, -shift), len(labels) - max(0, shift)
                mine = labels[low:high]
                counted = mine != IGNORED
                equal[shift] += int((mine == row.ids[low + shift : high + shift])[counted].sum())
                total[shift] += int(counted.sum())
        if not any(total.values()):
            self.find(
                "labels",
                f"every label of {count(len(having), 'row')} is {IGNORED}, so nothing is learned",
                hint="see why the loss mask leaves everything out",
            )
            return None
        shares = {shift: equal[shift] / max(1, total[shift]) for shift in equal}
        best = max(shares, key=lambda shift: (shares[shift], -abs(shift)))
        if best in (0, 1) and shares[best] >= SEEN:
            return "same" if best == 0 else "next"
        row = having[0]
        hint = "a label is the token itself (labels=same) or the one after it (labels=next)"
        if shares[best] >= SEEN:
            where = {2: "after the next one", 3: "three places on", -1: "before it"}[best]
            problem = f"each label is the token {where}: labels were shifted twice"
        else:
            problem = (
                f"labels are not the next tokens: {share(equal[1], max(1, total[1]))} of them are,"
                f" and {share(equal[0], max(1, total[0]))} are the tokens themselves"
            )
        shown = (
            f"{row.name}: ids {row.ids[:6].tolist()}, labels {cast('Ids', row.labels)[:6].tolist()}"
        )
        self.find("labels", problem, example=shown, hint=hint)
        return None

    def shifts(self, labels: str | None) -> None:
        """Whether the model shifts labels that are shifted already, or nobody does."""
        expected = self.asked.expected
        if labels is None:
            return
        if expected is None:
            self.unchecked.append(
                f"labels shifted twice: these are {OF_LABELS[labels]}; what the model expects was"
                " not given (--labels next|same)"
            )
        elif (labels, expected) == ("next", "same"):
            self.find(
                "shifted-twice",
                "labels are the next tokens already, and the model shifts them again, as all models"
                " of transformers do: it learns the token after the next one",
                hint="give it labels that equal input_ids",
            )
        elif labels != expected:
            self.find(
                "not-shifted",
                "labels are the tokens themselves, and the model does not shift them: it learns to"
                " repeat its input",
                hint="give it the next tokens: inputs row[:-1], labels row[1:]",
            )

    def padding(self, rows: Sequence[AuditRow], places: int) -> None:
        """Padding, and whether it is learned."""
        padded = sum(row.padding for row in rows)
        trained = [row for row in rows if row.trained_padding]
        if padded > MUCH_PADDING * places:
            worst = max(rows, key=lambda row: row.padding)
            self.find(
                "padding",
                f"{share(padded, places)} of all places are padding, on which the device"
                " computes too",
                example=f"{worst.name}: {count(len(worst.ids), 'token')}, {worst.padding:,} of"
                " padding",
                hint="pack documents into rows; see what each packing would leave: tokenmill"
                " layout",
            )
        if trained:
            number = sum(row.trained_padding for row in trained)
            self.find(
                "padding-is-learned",
                f"{count(number, 'label')} of padding in {count(len(trained), 'row')} count for"
                " the loss",
                example=f"{trained[0].name} ends in {trained[0].padding:,} equal ids with labels",
                hint=f"set the labels of padding to {IGNORED}",
            )

    def ranks(self, readings: Sequence[RankRows]) -> None:
        """Rows that several ranks read."""
        if len(readings) == 1:
            self.unchecked.append("ranks that see the same rows: one was read (--ranks 2)")
            return
        seen: dict[bytes, AuditRow] = {}
        double: list[tuple[AuditRow, AuditRow]] = []
        for reading in readings:
            for row in reading.rows:
                other = seen.setdefault(row.ids.tobytes(), row)
                if other.rank != row.rank and len(row.ids) > WINDOW:
                    double.append((other, row))
        total = sum(len(reading.rows) for reading in readings)
        if len(double) > max(1, SOME * total):
            one, two = double[0]
            self.find(
                "same-rows-on-ranks",
                f"{share(2 * len(double), total)} of the rows are read by more than one rank,"
                " so they"
                " are learned more than once",
                example=f"rank {one.rank}, {one.name} = {two.name}",
                hint="let each rank read rows of its own: pass rank and world_size on",
            )
        if empty := [str(rank) for rank, reading in enumerate(readings) if not reading.rows]:
            self.find("same-rows-on-ranks", f"rank {listed(empty)} got no rows at all")

    def epochs(self, source: AuditedLoader, first: RankRows, loader: Any) -> None:
        """Whether a second epoch comes in another order."""
        again: Any = None
        if "epoch" in source.takes:
            again = source.make(rank=0, world_size=self.asked.ranks, epoch=1, skip=0)
        elif first.is_whole and loader is not None and is_read_anew(loader):
            again = loader
        if again is None or first.batches < 2:
            batches = count(self.asked.batches, "batch", plural="batches")
            if first.batches < 2:
                why = "the first has one batch"
            elif not first.is_whole:
                why = f"the first did not end within {batches}, and the function takes no `epoch`"
            else:
                why = "the loader was read once, and the function takes no `epoch` (0, then 1)"
            self.unchecked.append(f"order of a second epoch: {why}")
            return
        second = read_batches(again, batches=first.batches, rank=0, pads=self.pads)
        mine, other = ([row.ids.tobytes() for row in each.rows] for each in (first, second))
        if mine and mine == other[: len(mine)] and len(set(mine)) > 1:
            self.find(
                "same-order",
                f"the second epoch has the same {count(len(mine), 'row')} in the same order as"
                " the first",
                hint="shuffle by a seed that changes with the epoch (set_epoch, or a new"
                " permutation)",
            )

    def resume(self, source: AuditedLoader, first: RankRows) -> None:
        """Whether a loader that was saved and made again goes on with the batch that comes next."""
        known = {"rank": 0, "world_size": self.asked.ranks, "epoch": 0}
        expected: list[AuditRow]
        if first.batches < 3:
            self.unchecked.append("resume: there are fewer than three batches")
            return
        used = min(FEW, first.batches // 2)
        if "skip" in source.takes:
            again = source.make(**known, skip=used)
            expected = [row for row in first.rows if used <= row.batch < 2 * used]
        elif source.is_function and hasattr(loader := source.make(**known), "state_dict"):
            iterator = iter(loader)
            for _ in itertools.islice(iterator, used):
                pass
            state = copy.deepcopy(loader.state_dict())
            rest = itertools.islice(iterator, used)
            expected = [
                row
                for number, batch in enumerate(rest)
                for row in rows_of(batch, rank=0, number=used + number, pads=self.pads)
            ]
            again = source.make(**known)
            again.load_state_dict(state)
        else:
            self.unchecked.append(
                "resume: the loader has no state_dict, and its function takes no `skip` (batches"
                " that were used before)"
                if source.is_function
                else "resume: the loader itself was given; a function that makes it can be called"
                " again (for a state_dict, or with `skip`, batches that were used before)"
            )
            return
        found = read_batches(again, batches=used, rank=0, pads=self.pads, first=used).rows
        if [row.ids.tobytes() for row in expected] != [row.ids.tobytes() for row in found]:
            begin = [row.ids.tobytes() for row in first.rows if row.batch < used]
            anew = [row.ids.tobytes() for row in found][: len(begin)] == begin
            what = (
                "begins anew with batch 0" if anew else "gives other rows than the run it continues"
            )
            self.find(
                "resume",
                f"resumed after {count(used, 'batch', plural='batches')}, the loader {what}",
                example=""
                if not expected
                else f"expected first: {self.text(expected[0].ids[:12])}",
                hint="save where the loader is, and go on there",
            )

    # --------------------------------------------------------------------------- with documents

    def lookup(self, rows: Sequence[AuditRow], labels: str | None, is_whole: bool) -> None:
        """All that is known by where in a store rows come from."""
        assert self.store is not None
        documents = Documents(self.store)
        found = [(row, documents.find(row.ids)) for row in rows]
        if labels == "next":
            for row, runs in found:
                # The last label of a row need not be an input of any.
                if runs and runs[-1].at + runs[-1].length == len(row.ids):
                    place = runs[-1].place + runs[-1].length
                    last = cast("Ids", row.labels)[-1]
                    if place < len(documents.ids) and documents.ids[place] == last:
                        documents.was_label[place] = True
        self._foreign(found)
        self._coverage(documents, rows, is_whole)
        self._ends(documents)
        self._doubled(documents, found)
        self._from_text(documents, found)
        self._prompts(documents, found, labels)
        begins = {id(row): documents.begins(runs, len(row.ids)) for row, runs in found}
        self.boundaries(rows, begins, matters=documents.mask is not None)

    def _foreign(self, found: Sequence[tuple[AuditRow, list[Overlap]]]) -> None:
        """Tokens that are not of the text."""
        lost, total, example = 0, 0, ""
        for row, runs in found:
            free = np.ones(len(row.ids), bool)
            for run in runs:
                free[run.at : run.at + run.length] = False
            free &= ~np.isin(row.ids, list({*self.special.values(), *self.pads}))
            lost, total = lost + int(free.sum()), total + len(row.ids)
            if not example and free.sum() > WINDOW:
                first = int(np.flatnonzero(free)[0])
                example = f"{row.name}, token {first}: {self.text(row.ids[first : first + 16])}"
        if lost > 10 * SOME * total:
            self.find(
                "other-text",
                f"{share(lost, total)} of the tokens read are not those of the text given",
                example=example,
                hint="give the store, split and tokenizer that the loader reads",
            )

    def _coverage(self, documents: Documents, rows: Sequence[AuditRow], is_whole: bool) -> None:
        """Tokens that never come, or come twice."""
        if not is_whole:
            self.unchecked.append(
                "tokens that never come or come twice: the epoch did not end within"
                f" {count(self.asked.batches, 'batch', plural='batches')} (--batches)"
            )
            return
        never = (documents.times_read == 0) & ~documents.was_label
        twice = documents.times_read > 1
        for copies, times in documents.copies():
            # Of texts that are there several times it does not matter which was read.
            never &= (copies == 1) | (times < copies)
            twice &= (copies == 1) | (times > copies)
        for id_, places in ((self.eos_id, documents.ends - 1), (self.bos_id, documents.starts)):
            if id_ is not None:
                edges = places[documents.ids[np.minimum(places, len(never) - 1)] == id_]
                never[edges] = False
        longest = max((len(row.ids) + row.padding for row in rows), default=0)
        batch = len([row for row in rows if row.batch == 0]) * longest
        total = len(documents.ids)
        allowed = max(SOME * total, batch + longest) if documents.every == 1 else 0.02 * total
        if never.sum() > min(allowed, 0.2 * total):
            sums = np.add.reduceat(never, documents.starts[documents.ends > documents.starts])
            sizes = (documents.ends - documents.starts)[documents.ends > documents.starts]
            whole, cut = (
                int((sums >= sizes - 2).sum()),
                int(((sums > 0) & (sums < sizes - 2)).sum()),
            )
            first = int(np.flatnonzero(never)[0])
            number = documents.document_at(first)
            self.find(
                "never-read",
                f"{share(int(never.sum()), total)} of the tokens never come in an epoch:"
                f" {count(whole, 'document')} not at all, {count(cut, 'document')} in part",
                example=f"document {number} from its token {first - int(documents.starts[number])}"
                f" on: {self.text(documents.ids[first : first + 16])}",
                hint="split what is longer than a row, and keep what is left over for the next one",
            )
        if twice.sum() > min(allowed, 0.2 * total):
            first = int(np.flatnonzero(twice)[0])
            self.find(
                "read-twice",
                f"{share(int(twice.sum()), total)} of the tokens come more than once in an epoch,"
                f" up to {int(documents.times_read.max())} times",
                example=f"document {documents.document_at(first)}:"
                f" {self.text(documents.ids[first : first + 16])}",
                hint="read each row once: on one rank, in one worker",
            )

    def _ends(self, documents: Documents) -> None:
        """End and begin tokens that the text has and the rows have not."""
        sizes = documents.ends - documents.starts
        edges = (
            ("eos", "end", documents.eos_id, documents.ends - 1, -1),
            ("bos", "begin", documents.bos_id, documents.starts, 1),
        )
        for name, verb, id_, places, beside in edges:
            if id_ is None:
                continue
            places = places[sizes > 1]
            places = places[documents.ids[places] == id_]
            near = documents.times_read[places + beside] > 0
            lost = near & (documents.times_read[places] == 0) & ~documents.after_row[places]
            if lost.sum() > max(2, 0.05 * near.sum()):
                number = documents.document_at(int(places[lost][0]))
                self.find(
                    f"no-{name}",
                    f"{share(int(lost.sum()), int(near.sum()))} of the documents do not {verb} with"
                    f" the token {self.text(np.array([id_]))}, as they do in the text given",
                    example=f"document {number}",
                    hint="keep the token between documents: without it one runs into the next",
                )

    def _doubled(
        self, documents: Documents | None, found: Sequence[tuple[AuditRow, list[Overlap]]]
    ) -> None:
        """Two end or begin tokens where there should be one."""
        for name, id_ in (("eos", self.eos_id), ("bos", self.bos_id)):
            if id_ is None:
                continue
            double, single, example = 0, 0, ""
            for row, runs in found:
                here = row.ids == id_
                pairs = here[1:] & here[:-1]
                for run in runs if documents is not None else ():
                    # As the text itself has them.
                    pairs[run.at : run.at + run.length - 1] = False
                single += int(here.sum())
                double += int(pairs.sum())
                if pairs.any() and not example:
                    at = int(np.flatnonzero(pairs)[0])
                    example = (
                        f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 8])}"
                    )
            if double > max(1, 0.02 * single):
                self.find(
                    f"double-{name}",
                    f"{count(double, 'time')} the token {self.text(np.array([id_]))} comes"
                    " twice in a row"
                    f" ({single:,} in all)",
                    example=example,
                    hint="either the tokenizer or the loader adds it; leave one of them out",
                )

    def _from_text(
        self, documents: Documents, found: Sequence[tuple[AuditRow, list[Overlap]]]
    ) -> None:
        """Special tokens that are parsed out of documents."""
        special = np.array(sorted(set(self.special.values())), np.int32)
        if not len(special):
            return
        times, example = 0, ""
        for row, runs in found:
            places: list[int] = []
            for one, two in itertools.pairwise(runs):
                # Between two parts of one document.
                end = one.place + one.length
                ends_at, goes_on = documents.document_at(end - 1), documents.document_at(two.place)
                gap = range(one.at + one.length, two.at)
                if gap and ends_at == goes_on and end <= two.place:
                    places += [at for at in gap if row.ids[at] in special]
            if documents.mask is None:
                edges = {self.eos_id, self.bos_id}
                for run in runs:
                    inside = np.isin(documents.ids[run.place : run.place + run.length], special)
                    places += [
                        run.at + int(at)
                        for at in np.flatnonzero(inside)
                        if int(row.ids[run.at + at]) not in edges
                    ]
            times += len(places)
            if places and not example:
                at = places[0]
                example = f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 8])}"
        if times:
            self.find(
                "special-from-text",
                f"{count(times, 'special token')} came from the text of documents: a page that"
                " spells"
                " one ends or begins what it likes",
                example=example,
                hint="encode text with special tokens as text (tokenmill's default)",
            )

    def _prompts(
        self,
        documents: Documents,
        found: Sequence[tuple[AuditRow, list[Overlap]]],
        labels: str | None,
    ) -> None:
        """Labels of what a mask leaves out, and answers without."""
        if documents.mask is None or labels is None:
            return
        wrong = right = wanted = missed = 0
        example = ""
        for row, runs in found:
            own = cast("Ids", row.labels) != IGNORED
            if row.counts is not None:
                own = own & row.counts
            learned = np.zeros(len(row.ids), bool)
            if labels == "same":
                learned[1:] = own[1:]
            else:
                learned[1:] = own[:-1]
            for run in runs:
                # What a row begins with has nothing before it to be foretold from.
                first = 1 if run.at == 0 else 0
                here = learned[run.at + first : run.at + run.length]
                answers = documents.mask[run.place + first : run.place + run.length]
                wrong += int((here & ~answers).sum())
                right += int((here & answers).sum())
                wanted += int(answers.sum())
                missed += int((answers & ~here).sum())
                if not example and (here & ~answers).sum() > 2:
                    at = run.at + first + int(np.flatnonzero(here & ~answers)[0])
                    example = f"{row.name}, token {at}: {self.text(row.ids[at : at + 12])}"
        if wrong > SOME * (wrong + right):
            self.find(
                "loss-on-prompts",
                f"{wrong + right:,} labels count for the loss where {wanted:,} tokens are answers:"
                f" {share(wrong, wrong + right)} of what is learned is prompts",
                example=example,
                hint=f"set the labels of prompts to {IGNORED}, or pass the mask of answers on",
            )
        if missed > 0.02 * wanted:
            self.find(
                "answers-not-learned",
                f"{share(missed, wanted)} of the tokens of answers have no label that counts",
                hint="see where the mask is cut off or shifted",
            )

    def boundaries(
        self, rows: Sequence[AuditRow], begins: Mapping[int, Bools], *, matters: bool
    ) -> None:
        """What batches say of where documents begin, beside where they do."""
        joined = silent = missing = extra = total = marked = still = 0
        masked = 0
        example = ""
        for row in rows:
            true = begins[id(row)]
            divided = row.is_divided
            masked += divided and row.has_attention
            if row.marks is not None and row.marks[1:].any() and row.restarts is not None:
                still += not row.restarts[1:].any()
            if not true.any():
                continue
            joined += 1
            if not divided:
                silent += 1
                continue
            said = np.zeros(len(true), bool)
            for each in (row.restarts, row.marks):
                if each is not None:
                    said |= each
            said[:1] = False
            total, marked = total + int(true.sum()), marked + int(said.sum())
            lost = true & ~said
            missing, extra = missing + int(lost.sum()), extra + int((said & ~true).sum())
            if lost.any() and not example:
                at = int(np.flatnonzero(lost)[0])
                example = f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 6])}"
        hint = "give position_ids that begin again with each document, or cu_seqlens"
        if silent and (matters or missing):
            self.find(
                "attention-across-documents",
                f"{share(silent, joined)} of the rows that hold several documents do not say"
                " where they"
                " begin, so each sees those before it",
                hint=hint,
            )
        elif silent:
            self.remarks.append(
                f"attention goes across documents in {share(silent, len(rows))} of the rows:"
                " nothing"
                " in the batch says where they begin"
            )
        # Fewer may be where text repeats itself and a row is taken for another place of it.
        if missing > 0.05 * max(1, total):
            self.find(
                "boundaries",
                f"{share(missing, total)} of the documents begin where the batch does not say so",
                example=example,
                hint=hint,
            )
        if extra > 0.1 * max(1, marked):
            self.remarks.append(
                f"{share(extra, marked)} of the boundaries in batches are inside of documents"
            )
        if still:
            self.find(
                "positions",
                f"positions do not begin again with documents in {count(still, 'row')}, though"
                " the batch"
                " says where those begin",
                hint=hint,
            )
        if masked and self.asked.expected == "same":
            self.find(
                "attention-across-documents",
                f"{count(masked, 'row')} come with position_ids that begin again and an"
                " attention_mask:"
                " transformers then attends across documents",
                hint="leave attention_mask out, and set use_cache=False",
            )

    def store_itself(self) -> None:
        """What is wrong with the text that the loader reads."""
        store = self.store
        assert store is not None
        step = max(1, len(store) // LOOKED_AT)
        if store.manifest.sources:
            paths = {store.source(number).path for number in range(0, len(store), step)}
            self._files(paths)
        if not store.has_mask and store.eos_id is not None:
            names = {id_: name for name, id_ in self.special.items()}
            name = names.get(store.eos_id, "")
            if ENDS_A_TURN.search(name):
                self.find(
                    "end-of-turn",
                    f"documents end in {name!r}, which ends a turn of a chat in this tokenizer:"
                    " after"
                    " pretraining it means both",
                    hint="build the store with the tokenizer's end of text: --eos '<|endoftext|>'",
                )

    def _files(self, paths: Iterable[str]) -> None:
        known = sorted(paths)
        stray = [path for path in known if NO_DATA.search(path)]
        if stray:
            self.find(
                "stray-files",
                f"{count(len(stray), 'file')} that are no data are trained on",
                example=", ".join(stray[:4]),
                hint="name the data files, or leave these out: --exclude",
            )
        names = [path for path in known if is_held_out(path.rpartition("/")[2])]
        if self.store is not None and self.store.split in ("train", None) and names:
            self.find(
                "held-out-files",
                f"{count(len(names), 'file')} that are named for validation or test are in the"
                " split"
                f" {self.store.split!r}",
                example=", ".join(names[:4]),
                hint="build with splits by file name, or name the training files alone",
            )


def is_read_anew(loader: Any) -> bool:
    """Whether reading it again is a second epoch; what has a state may just go on."""
    return iter(loader) is not loader and not hasattr(loader, "state_dict")


@with_options(AuditOptions)
def audit(asked: AuditOptions) -> AuditReport:
    """Read a loader's batches; say what is wrong with them.

    >>> tokenmill.audit(train_loader, store="store", model=model).findings
    """
    with contextlib.ExitStack() as resources:
        store = _open_store(asked, resources)
        run = Audit(asked, store)
        source = AuditedLoader(asked.loader)
        loader: Any = None
        if asked.ranks == 1:
            loader = source.make(rank=0, world_size=1, epoch=0, skip=0)
            readings = [read_batches(loader, batches=asked.batches, rank=0, pads=run.pads)]
        else:
            readings = read_ranks(source, asked, run.pads)
        rows = [row for reading in readings for row in reading.rows]
        if not rows:
            raise UsageError(
                f"{source.name} gave no batch, so there is nothing to look at",
                hint="see whether it was used up before: give a function that makes a new one",
            )
        is_whole = all(reading.is_whole for reading in readings)
        places = sum(len(row.ids) + row.padding for row in rows)
        run.padding(rows, places)
        labels = run.labels(rows)
        run.shifts(labels)
        if store is not None:
            run.lookup(rows, labels, is_whole)
            run.store_itself()
        else:
            run.unchecked.append(
                "tokens left out or repeated, ends of documents, loss on prompts, special"
                " tokens from"
                " text: the text was not given (--store STORE, or --text FILES -t TOKENIZER)"
            )
            run._doubled(None, [(row, []) for row in rows])
            run.boundaries(
                rows, {id(row): _after_ends(row, run.eos_id) for row in rows}, matters=False
            )
        run.ranks(readings)
        if asked.ranks == 1 or "rank" in source.takes:
            run.epochs(source, readings[0], loader)
            run.resume(source, readings[0])
        else:
            run.unchecked.append(
                "order of a second epoch, and resume: look at one rank (--ranks 1)"
            )
        return AuditReport(
            loader=source.name,
            ranks=len(readings),
            batches=sum(reading.batches for reading in readings),
            rows=len(rows),
            places=places,
            padding=sum(row.padding for row in rows),
            labels=labels,
            epoch_is_whole=is_whole,
            findings=tuple(run.findings),
            remarks=tuple(run.remarks),
            unchecked=tuple(run.unchecked),
        )


def _after_ends(row: AuditRow, eos_id: int | None) -> Bools:
    """Where documents begin, by the token before."""
    found = np.zeros(len(row.ids), bool)
    if eos_id is not None:
        found[1:] = row.ids[:-1] == eos_id
    return found


def _open_store(asked: AuditOptions, resources: contextlib.ExitStack) -> Store | None:
    if asked.store is not None:
        if isinstance(asked.store, Store):
            return asked.store
        return resources.enter_context(Store(asked.store, split=asked.split))
    if not asked.text:
        return None
    if asked.tokenizer is None:
        raise UsageError(
            "text without a tokenizer cannot be compared with ids",
            hint="name the tokenizer that the loader's ids are of: -t tokenizer.json",
        )
    folder = resources.enter_context(tempfile.TemporaryDirectory())
    info = describe(str(asked.tokenizer), policy=None)
    build(
        asked.text,
        tokenizer=asked.tokenizer,
        out=Path(folder) / "store",
        text_field=asked.text_field,
        separator=asked.separator,
        eos=info.eos_token is not None,
    )
    return resources.enter_context(Store(Path(folder) / "store", split="train"))
