"""What a training run has shown, and will: the verbs `trace` and `ledger`.

    a saved state -> the loader of the run -> a document's showings, or the tokens of every source

Nothing is logged while a run trains: the order of rows is a function of its seed, and a state says
how far it has come. What a state does not say, which stores they were and how rows became batches,
is in the recipe that `tokenmill train` keeps in its checkpoints, or in what the caller says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill._version import __version__
from tokenmill.errors import StateError, TokenmillError, UsageError
from tokenmill.interop.tensors import read_saved
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage, open_split
from tokenmill.options import LedgerOptions, TraceOptions, as_list, with_options
from tokenmill.search import Search
from tokenmill.selection import made_again
from tokenmill.store.documents import Documents, Grouping
from tokenmill.store.layout import unseal
from tokenmill.words import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenmill.files import PathInput
    from tokenmill.loader.loader import Drawn, Showing
    from tokenmill.store.format import Ints
    from tokenmill.store.reader import SourceRow, Store

MOST_STATE_BYTES = 64 << 20  # of a file of JSON
MOST_DOCUMENTS = 20  # of those that hold a text, and are traced
STEP_FOLDERS = ("checkpoints/step-*", "step-*", "checkpoint-*")
# What a folder of a checkpoint has, of our trainer and of others.
STATE_FILES = ("checkpoint.json", "trainer_state.json")
_OF_STATE = {"position", "stores", "mixture", "layouts", "seen", "checksum"}
_OF_RECIPE = {"sources", "stages", "max_epochs", "batch_size", "world_size"}


# -------------------------------------------------------------------------------------------------
# The state of a run, wherever it was saved.


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """A state of a loader, and what is beside it."""

    path: Path
    state: dict[str, Any]
    recipe: dict[str, Any] | None
    """What `Loader.recipe` gave; None where nobody kept it."""

    @property
    def micro_batches(self) -> int | None:
        """Steps of the loader that `tokenmill train` makes one step of; None for other loops."""
        found = None if self.recipe is None else self.recipe.get("micro_batches")
        return found if type(found) is int and found > 0 else None


def read_run(path: PathInput) -> SavedRun:
    """The state in a run's folder (the newest one), a checkpoint's, or a file, and its recipe.

    A file is JSON, or what torch.save wrote. The state may be anywhere in it.
    """
    file = _state_file(Path(path))
    if file.suffix == ".json":
        with file.open("rb") as opened:
            data = opened.read(MOST_STATE_BYTES + 1)
        try:
            if len(data) > MOST_STATE_BYTES:
                raise ValueError("it is too large for one")
            saved: object = (
                unseal(data, path=file) if file.name == STATE_FILES[0] else json.loads(data)
            )
        except (ValueError, RecursionError) as error:
            raise StateError(
                f"{str(file)!r} is no state: {error}",
                hint="give the folder of a run or checkpoint, or a file that a state was saved to",
            ) from error
    else:
        saved = read_saved(file)
    states = _distinct(each for each in _objects(saved) if each.keys() >= _OF_STATE)
    recipes = _distinct(each for each in _objects(saved) if each.keys() >= _OF_RECIPE)
    if len(states) != 1 or len(recipes) > 1:
        what = "no state of a loader" if not states else f"{len(states)} states of loaders"
        raise StateError(
            f"{str(file)!r} holds {what}: what a run has shown cannot be told from it",
            hint="save what loader.state_dict() gives, and loader.recipe() beside it: "
            "torch.save({'loader': loader.state_dict(), 'recipe': loader.recipe()}, FILE)",
        )
    return SavedRun(path=file, state=states[0], recipe=recipes[0] if recipes else None)


def _state_file(path: Path) -> Path:
    if path.is_file():
        return path
    for name in STATE_FILES:
        if (path / name).is_file():
            return path / name
    for pattern in STEP_FOLDERS:
        found = [each for each in path.glob(pattern) if each.name.rpartition("-")[2].isdecimal()]
        if found:
            return _state_file(max(found, key=lambda each: int(each.name.rpartition("-")[2])))
    what = "has no checkpoint" if path.is_dir() else "is not there"
    raise StateError(
        f"{str(path)!r} {what}, so nothing says how far a run has come",
        hint="give the folder of a run, like run/, of a checkpoint, like"
        " run/checkpoints/step-00001000, or a file that a loader's state was saved to",
    )


def _objects(value: object, depth: int = 0) -> Iterator[dict[str, Any]]:
    """All dicts in a value, itself the first."""
    if isinstance(value, dict) and depth < 12:
        yield value
        for each in value.values():
            yield from _objects(each, depth + 1)
    elif isinstance(value, list | tuple) and depth < 12:
        for each in value[:1000]:
            yield from _objects(each, depth + 1)


def _distinct(found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    different: list[dict[str, Any]] = []
    for each in found:
        if each not in different:
            different.append(each)
    return different


# -------------------------------------------------------------------------------------------------
# The loader of a run, opened again.


def open_loader(
    run: SavedRun,
    stores: Sequence[Store] = (),
    *,
    batch_size: int | None = None,
    ranks: int | None = None,
) -> Loader:
    """A loader that is where the run was saved; the state says whether it is the same one.

    Stores are those to be used instead of the ones that the recipe names, by what they hold.
    """
    recipe = dict(run.recipe or _recipe_of(run.state, batch_size=batch_size, ranks=ranks))
    wanted: Mapping[str, Any] = run.state["stores"]
    opened = {}
    try:
        again = _Opening(stores)
        for name, told in recipe["sources"].items():
            known = (store for store in stores if _held(store, str(wanted.get(name))))
            opened[name] = next(known, None) or again.open(told, name)
        loader = _loader(recipe, opened)
        if run.recipe is None and _layouts(loader, wanted) != run.state["layouts"]:
            loader = _loader({**recipe, "labels": "same"}, opened)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise StateError(
            f"what {str(run.path)!r} says of how its loader was opened cannot be understood:"
            f" {error!r}",
            hint="save what loader.recipe() gives, as it is",
        ) from error
    loader.load_state_dict(run.state)
    return loader


def _held(store: Store, content: str) -> bool:
    """Whether a store holds this, or held it before it grew."""
    return store.content == content or store.as_it_was(content) is not None


def _layouts(loader: Loader, contents: Mapping[str, Any]) -> list[str]:
    """What a state says of the layouts, were this the loader that it is of."""
    layouts = zip(loader.layouts(), contents.values(), strict=True)
    return [layout.fingerprint_of(str(content)) for layout, content in layouts]


class _Opening:
    """Opens what recipes tell of (`Store.told`), and makes views again that are in no file."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._by_content = {store.content: store for store in stores}
        self._groups: dict[str, dict[str, Store]] = {}

    def open(self, told: Mapping[str, Any], name: str) -> Store:
        if told["store"] is None:
            which = f"its source {name!r}" if name else "its store"
            raise UsageError(
                f"the state does not say where {which} is",
                hint="name the stores of the run: --store STORE, for each",
            )
        if not (steps := told.get("made")):
            return open_split(told["store"], told["split"])
        *before, last = steps
        if last["verb"] == "group":
            key = json.dumps([told["store"], before, last["by"], told["split"]])
            if key not in self._groups:
                store = self.open({**told, "made": before}, name) if before else self._first(told)
                self._groups[key] = Grouping(store, last["by"]).views()
            return self._groups[key][last["name"]]
        store = self.open({**told, "made": before}, name) if before else self._first(told)
        return made_again(store, last)

    def _first(self, told: Mapping[str, Any]) -> Store:
        if (found := self._by_content.get(told["content"])) is not None:
            return found
        store = open_split(told["store"], told["split"])
        return store.as_it_was(told["content"]) or store  # views were made of what it held


def _loader(recipe: Mapping[str, Any], stores: Mapping[str, Store]) -> Loader:
    names = ("seq_len", "batch_size", "world_size", "packing", "labels", "shuffle", "seed", "last")
    said = {name: recipe[name] for name in (*names, "balance", "accumulate")}
    if recipe["window"]:
        said["window"] = [tuple(part) for part in recipe["window"]]
    caps = [None if cap is None else Fraction(cap) for cap in recipe["max_epochs"]]
    if list(stores) == [""]:
        (cap,) = caps
        return Loader(stores[""], epochs=None if cap is None else float(cap), **said, prefetch=0)
    stages = [
        Stage(
            tokens=stage["tokens"],
            weights=dict(zip(stores, map(Fraction, stage["weights"]), strict=True)),
            seq_len=stage["seq_len"],
        )
        for stage in recipe["stages"]
    ]
    capped: Any = {n: cap for n, cap in zip(stores, caps, strict=True) if cap is not None}
    sources = {name: (store, 1) for name, store in stores.items()}
    mixture = Mixture(sources, stages=stages, max_epochs=capped)
    return Loader(mixture, **said, prefetch=0)


def _recipe_of(
    state: Mapping[str, Any], *, batch_size: int | None, ranks: int | None
) -> dict[str, Any]:
    """What a state says by itself, of a run in one stage, and what the caller says."""
    update = state.get("update") or {}
    mixture, position = state["mixture"], state["position"]
    if position.get("stage") or position.get("past"):
        raise StateError(
            "the state is of a run with several stages, and says of none but its own what it was",
            hint="save loader.recipe() beside loader.state_dict()",
        )
    batch_size = update.get("batch_size", batch_size)
    if batch_size is None:
        raise UsageError(
            "the state does not say how many rows a step has, so no step can be named",
            hint="say it: --batch-size ROWS, of one rank, and --ranks N; or save loader.recipe()"
            " beside loader.state_dict()",
        )
    names: list[str] = mixture["sources"]
    caps = mixture["max_epochs"] or [None] * len(names)
    return {
        "sources": {name: {"store": None, "split": None} for name in names},
        "stages": [{"tokens": None, "weights": mixture["weights"], "seq_len": None}],
        "max_epochs": caps,
        "packing": state["packing"],
        "seq_len": state["seq_len"],
        "batch_size": batch_size,
        "world_size": update.get("world_size", ranks or 1),
        "labels": "next",
        "shuffle": state["shuffle"],
        "seed": state["seed"],
        "last": "pad",
        "balance": "attention" if update else None,
        "accumulate": update.get("accumulate", 1),
        "window": update.get("window", []),
    }


# -------------------------------------------------------------------------------------------------
# `trace`.


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentTrace:
    """Where a document was shown, and will be."""

    document: int
    name: str
    """Of its source in a mixture; '' where there is one store."""
    source: SourceRow
    tokens: int
    num_shown: int
    shown: tuple[Showing, ...]
    """The last ones."""
    coming: tuple[Showing, ...]
    """The next ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """What `tokenmill trace` found."""

    store: str
    state: str
    step: int
    """Of the loader: the next one that the run makes. Showings count steps as this does."""
    micro_batches: int | None
    """Steps of the loader in one of `tokenmill train`; None for other loops."""
    ranks: int
    documents: tuple[DocumentTrace, ...]
    num_documents: int
    """That were asked for; of those that hold a text, only the first are traced."""


@with_options(TraceOptions)
def trace(asked: TraceOptions) -> TraceResult:
    """Find on which steps, ranks and places of rows a run has shown a document, and will.

    >>> found = tokenmill.trace("store", state="run", doc=123)
    >>> [(shown.step, shown.rank, shown.place) for shown in found.documents[0].shown]

    The exact inverse of `loader.rows(step)`. `row` is a row of an input file instead of a document,
    `text` all documents that hold it.
    """
    run = read_run(asked.state)
    store = _store_of(run, asked)
    documents = _asked_for(asked, store)
    loader = open_loader(run, [store], batch_size=asked.batch_size, ranks=asked.ranks)
    mixture = loader.mixture
    traced = [
        _trace(loader, name, number, document=document, limit=asked.limit)
        for document in documents[:MOST_DOCUMENTS]
        for name, each in zip(mixture.names, mixture.stores, strict=True)
        for number in each.numbers_of(store, document)
    ]
    if not traced:
        raise UsageError(
            f"document {documents[0]:,} of the split {store.split!r} of {str(store.path)!r} is not"
            f" in what the run of {str(run.path)!r} reads, so it was never shown",
            hint="trace another document; see what a view leaves out: tokenmill inspect VIEW",
        )
    return TraceResult(
        store=str(store.path),
        state=str(run.path),
        step=loader.step,
        micro_batches=run.micro_batches,
        ranks=loader.world_size,
        documents=tuple(traced),
        num_documents=len(documents),
    )


def _store_of(run: SavedRun, asked: TraceOptions) -> Store:
    """The store that was asked for, as the run has it; StateError where the run has it not."""
    wanted = set(run.state["stores"].values())
    told = [*(run.recipe or {"sources": {}})["sources"].values()]
    wanted.update(each["content"] for each in told if "content" in each)
    splits = {each["split"] for each in told}
    for split in dict.fromkeys([*splits, asked.split]):
        store = open_split(asked.store, split)
        held = {store.content, store.base.content} & wanted
        if held or any(store.as_it_was(content) for content in wanted):
            return store
    for each in told if isinstance(asked.store, str | os.PathLike) else ():
        with contextlib.suppress(TokenmillError):  # a run's stores may be gone
            source = open_split(each["store"] or "", each["split"])
            store = open_split(asked.store, each["split"])
            if source.base.content == store.base.content:
                return store
    raise StateError(
        f"the run of {str(run.path)!r} does not read {str(asked.store)!r}: none of its stores holds"
        " what this one does",
        hint="name a store of the run, as it was then; --split says which of its splits",
    )


def _asked_for(asked: TraceOptions, store: Store) -> list[int]:
    given = {name: getattr(asked, name) for name in ("doc", "row", "text")}
    said = [name for name, value in given.items() if value is not None]
    if len(said) != 1:
        what = f"{listed([f'--{name}' for name in said])} are" if said else "nothing is"
        raise UsageError(
            f"{what} given, and one thing can be traced",
            hint="say which document: --doc 123, --row FILE:ROW or --text 'an exact text'",
        )
    if asked.doc is not None:
        return [asked.doc]
    if asked.row is not None:
        return documents_of_row(store, asked.row)
    assert asked.text is not None
    hits = Search(store, asked.text).hits()
    starts = [shard.first_document for shard in store.shards]
    found = {starts[each.shard] + k for each in hits for k in each.documents.tolist()}
    if not found:
        raise UsageError(
            f"no document of {store!r} holds {asked.text!r}",
            hint=f"see what does: tokenmill grep {shlex.quote(str(store.path))} TEXT",
        )
    return sorted(found)


def documents_of_row(store: Store, row: str) -> list[int]:
    """The documents that a row of an input file became, as 'FILE:ROW', rows counted from 0."""
    file, colon, number = row.rpartition(":")
    if not colon or not number.isdecimal():
        raise UsageError(
            f"row={row!r} is no row of a file",
            hint="write FILE:ROW, with rows counted from 0, as grep and inspect show them",
        )
    wanted = int(number)
    units = {unit.name: store.manifest.sources[unit.source].path for unit in store.manifest.units}
    files: dict[str, list[int]] = {}
    for at, shard in enumerate(store.shards):
        members = store.receipt(shard.unit).unit.members or (units[shard.unit],)
        for member, path in enumerate(members):
            if path == file or path.endswith(f"/{file}"):
                found = store.documents_of_row(at, member, wanted)
                files.setdefault(path, []).extend(found)
    if len(files) > 1:
        raise UsageError(
            f"{file!r} is the end of several names: {listed([*map(repr, files)][:5])}",
            hint="write more of it",
        )
    rows = [document for documents in files.values() for document in documents]
    if not rows:
        what = f"row {wanted} of {file!r}" if files else f"a file {file!r}"
        why = "it was rejected, is in another split, or is not there" if files else "no source has"
        raise UsageError(
            f"{store!r} has no document of {what}: {why}",
            hint=f"see its sources: tokenmill inspect {shlex.quote(str(store.path))}",
        )
    return rows


def _trace(loader: Loader, name: str, number: int, *, document: int, limit: int) -> DocumentTrace:
    """Of a document that has a number in a source, and another one where it was asked for."""
    store = loader.mixture.stores[loader.mixture.names.index(name)]
    shown: list[Showing] = []
    coming: list[Showing] = []
    num_shown = 0
    # A step of which rows are dealt may have rows that are drawn after those of the next one.
    for each in loader.trace(number, source=name):
        if each.step is None or each.step < loader.step:
            num_shown += 1
            shown = [*shown, each][-limit:] if limit else []
            continue
        last = coming[limit - 1].step if 0 < limit <= len(coming) else None
        if not limit or (last is not None and each.step >= last + loader.accumulate):
            break
        coming.append(each)
    coming.sort(key=lambda each: each.step or 0)
    return DocumentTrace(
        document=document,
        name=name,
        source=store.source(number),
        tokens=len(store[number]),
        num_shown=num_shown,
        shown=tuple(shown),
        coming=tuple(coming[:limit]),
    )


# -------------------------------------------------------------------------------------------------
# `ledger`: the tokens that a run has been given, by where they are from.
#
#   rows that were drawn -> the pieces of documents in them -> tokens of each document -> groups
#
# Rows of epochs that are over are looked at once, whatever their number; of the epoch that goes on,
# those that were drawn. What is held is a number for each document of a source.

MOST_VALUES = 200  # of an annotation that is counted by without being asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerGroup:
    """The documents of a source that have one value of a column, and what was seen of them."""

    name: str
    documents: int
    tokens: int
    seen: int
    """Tokens that the model was given as inputs: each as often as it was."""
    epochs: float
    """Of a group: how often each of its tokens was seen, on average. Of a source: as the loader
    counts them, rows drawn of the rows of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSource(LedgerGroup):
    """A source of a run: a store, or what of one is mixed by itself."""

    store: str
    split: str | None
    content: str
    """Fingerprint of the documents."""
    manifest: str
    """sha256 of the store's manifest."""
    rows: int
    by: Mapping[str, tuple[LedgerGroup, ...]]
    """Column -> its groups, the one of which most was seen first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerResult:
    """What `tokenmill ledger` found: what a run has seen until its state was saved."""

    run: str
    step: int
    """Of the loader: the next one. `tokenmill train` makes one of so many `micro_batches`."""
    micro_batches: int | None
    ranks: int
    packing: str
    seed: int
    rows: int
    places: int
    """Inputs of all rows, padding included."""
    seen: int
    """Of those, tokens of documents."""
    sources: tuple[LedgerSource, ...]


@with_options(LedgerOptions)
def ledger(asked: LedgerOptions) -> LedgerResult:
    """Count the tokens that a run has seen, by store, source file and annotation, and the epochs.

    >>> seen = tokenmill.ledger("run")
    >>> {group.name: group.seen for group in seen.sources[0].by["source"]}

    Nothing is logged for it: it follows from a saved state. A token is seen as often as the model
    was given it as an input, on whatever rank.
    """
    run = read_run(asked.run)
    stores = [open_split(path, asked.split) for path in as_list(asked.store or ())]
    loader = open_loader(run, stores, batch_size=asked.batch_size, ranks=asked.ranks)
    by = asked.by.split(",") if isinstance(asked.by, str) else asked.by
    columns = None if by is None else [each.strip() for each in by]
    counted = [_seen(loader, place) for place in range(len(loader.mixture.names))]
    sources = tuple(_ledger_of(loader, place, each, columns) for place, each in enumerate(counted))
    return LedgerResult(
        run=str(run.path),
        step=loader.step,
        micro_batches=run.micro_batches,
        ranks=loader.world_size,
        packing=loader.packing.name,
        seed=loader.seed,
        rows=sum(each.rows for each in counted),
        places=sum(each.places for each in counted),
        seen=sum(source.seen for source in sources),
        sources=sources,
    )


@dataclass(slots=True)
class _Seen:
    """What was drawn of a source."""

    documents: Ints  # tokens seen of each document of its store, as that is now
    rows: int = 0
    places: int = 0
    passes: Fraction = Fraction(0)


def _seen(loader: Loader, place: int) -> _Seen:
    now = loader.mixture.stores[place]
    found = _Seen(np.zeros(now.num_documents, np.int64))
    # Of what the source held before it grew, by the fingerprint of that.
    held: dict[str, tuple[Store, Ints, Ints]] = {}
    for each in loader.drawn(place):
        store = each.layout.stream.store
        if store.content not in held:
            seen = found.documents if store.content == now.content else _none(store)
            held[store.content] = store, np.cumsum(store.lengths(), dtype=np.int64), seen
        _, ends, seen = held[store.content]
        _count(each, ends, seen)
        rows = len(each.rows) * each.times
        found.rows += rows
        found.places += rows * each.seq_len
        found.passes += Fraction(rows, each.layout.num_rows)
    for content, (store, _, seen) in held.items():
        if content != now.content:
            _add_earlier(found.documents, now, store, seen)
    return found


def _none(store: Store) -> Ints:
    return np.zeros(store.num_documents, np.int64)


def _count(drawn: Drawn, ends: Ints, seen: Ints) -> None:
    """Add the inputs of some rows to those of their documents."""
    starts, lengths = drawn.layout.segments(drawn.rows)
    # Places of a row: those of its inputs, and after them that of its last label, unless a row's
    # labels are its inputs.
    capacity = drawn.layout.seq_len + 1
    at = (np.cumsum(lengths) - lengths) % capacity
    inputs = np.clip(drawn.seq_len - at, 0, lengths)
    is_text = (starts >= 0) & (inputs > 0)
    documents = ends.searchsorted(starts[is_text], side="right")
    np.add.at(seen, documents, inputs[is_text] * drawn.times)


def _add_earlier(documents: Ints, now: Store, before: Store, seen: Ints) -> None:
    """Add what was seen of documents before the store grew to the same documents as it is now."""
    own = {
        (shard.name, entry): shard.first_document
        for shard, entry in zip(now.shards, now.entries(), strict=True)
    }
    for shard, entry in zip(before.shards, before.entries(), strict=True):
        here = slice(shard.first_document, shard.first_document + shard.documents)
        first = own.get((shard.name, entry))
        if first is not None:
            documents[first : first + shard.documents] += seen[here]
            continue
        for local in np.flatnonzero(seen[here]).tolist():  # its unit was cut in another place
            number = now.number_of(shard.first_document + local, before)
            if number is None:
                raise StateError(
                    f"{str(now.path)!r} does not hold all that it held when the run began",
                    hint="give a copy of the store as it was: --store STORE",
                )
            documents[number] += seen[shard.first_document + local]


def _ledger_of(
    loader: Loader, place: int, seen: _Seen, columns: Sequence[str] | None
) -> LedgerSource:
    store, name = loader.mixture.stores[place], loader.mixture.names[place]
    by = {}
    for column in _usual_columns(store) if columns is None else columns:
        grouping = Grouping(store, column)
        sums = grouping.sums(seen.documents)
        groups = (
            LedgerGroup(
                name=each.name,
                documents=each.documents,
                tokens=each.tokens,
                seen=sums[each.name],
                epochs=sums[each.name] / each.tokens if each.tokens else 0.0,
            )
            for each in grouping.groups
        )
        by[column] = tuple(sorted(groups, key=lambda each: (-each.seen, each.name)))
    return LedgerSource(
        name=name,
        store=str(store.path),
        split=store.split,
        content=store.content,
        manifest=hashlib.sha256(store.base.manifest.to_bytes()).hexdigest(),
        documents=store.num_documents,
        tokens=store.num_tokens,
        seen=int(seen.documents.sum()),
        rows=seen.rows,
        epochs=float(seen.passes),
        by=by,
    )


def _usual_columns(store: Store) -> list[str]:
    """The files that a store was built of, and annotations that have few values."""
    documents = Documents(store.of_split(None))
    facts = {name: documents.annotation(name).facts for name in documents.annotations}
    few = [
        name
        for name, each in facts.items()
        if each.type == "flag" or (each.type == "text" and each.values <= MOST_VALUES)
    ]
    return ["source", *few]


# The same for people, and for catalogues.


def ledger_markdown(found: LedgerResult) -> str:
    """A ledger as a page in Markdown."""
    said = (
        f"{found.seen:,} tokens in {found.rows:,} rows, before step {found.step:,} of the loader"
        f" (packing {found.packing}, seed {found.seed}); {found.places - found.seen:,} places of"
        " rows were padding."
    )
    lines = [
        f"# What {_cell(found.run)} has seen",
        "",
        said,
        "",
        "| source | store | split | documents | tokens | seen | epochs |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {_cell(each.name)} | {_cell(each.store)} | {_cell(each.split or 'all')} |"
        f" {each.documents:,} | {each.tokens:,} | {each.seen:,} | {each.epochs:.4f} |"
        for each in found.sources
    ]
    for source in found.sources:
        of = f" of {_cell(source.name)}" if source.name else ""
        for column, groups in source.by.items():
            lines += [
                "",
                f"## By {_cell(column)}{of}",
                "",
                f"| {_cell(column)} | documents | tokens | seen | epochs |",
                "| --- | ---: | ---: | ---: | ---: |",
            ]
            lines += [
                f"| {_cell(each.name)} | {each.documents:,} | {each.tokens:,} | {each.seen:,} |"
                f" {each.epochs:.4f} |"
                for each in groups
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A name that others chose, as text in a table."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", plain)


def ledger_croissant(found: LedgerResult) -> dict[str, Any]:
    """A ledger as a Croissant description: the stores as files, what was seen as records."""
    stores = {(each.store, each.manifest): None for each in found.sources}
    records = [
        {"source": source.name, "store": source.store, "column": column, "value": each.name}
        | {"documents": each.documents, "tokens": each.tokens, "seen": each.seen}
        | {"epochs": each.epochs}
        for source in found.sources
        for column, groups in [("", (source,)), *source.by.items()]
        for each in groups
    ]
    types = dict.fromkeys(("source", "store", "column", "value"), "sc:Text")
    types |= dict.fromkeys(("documents", "tokens", "seen"), "sc:Integer") | {"epochs": "sc:Float"}
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": f"{re.sub(r'[^A-Za-z0-9]+', '-', Path(found.run).stem).strip('-') or 'run'}-ledger",
        "description": f"The {found.seen:,} tokens that a training run was given before step"
        f" {found.step:,}, by store, file and annotation, as tokenmill {__version__} counts them"
        " from the saved state of its loader.",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": f"store-{number}",
                "name": f"store-{number}",
                "description": "Manifest of a store, which names its tokens by their checksums.",
                "contentUrl": f"{path}/tokenmill.json",
                "encodingFormat": "application/json",
                "sha256": digest,
            }
            for number, (path, digest) in enumerate(stores)
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "seen",
                "name": "seen",
                "description": "A source of the run (without a column), or its documents that have"
                " a value: tokens that there are, and that the model was given.",
                "field": [
                    {
                        "@type": "cr:Field",
                        "@id": f"seen/{name}",
                        "name": f"seen/{name}",
                        "dataType": kind,
                    }
                    for name, kind in types.items()
                ],
                "data": [
                    {f"seen/{name}": value for name, value in each.items()} for each in records
                ],
            }
        ],
    }


# As the specification of Croissant 1.0 has it.
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
