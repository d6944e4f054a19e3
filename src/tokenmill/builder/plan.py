"""What a build finds out before it writes anything: who the store is, what memory each worker has,
and which units are complete, which are to be built, which go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import psutil
import xxhash

from tokenmill._version import __version__
from tokenmill.builder.encode import LEAST_WHOLE_BYTES, LONG_FACTOR
from tokenmill.engines.base import SpecialTokens, TokenizerInfo, TokenizerKind, trim_heap
from tokenmill.engines.load import TokenizerFiles, describe, find_tokenizer, resolve_token
from tokenmill.errors import MemoryBudgetError, StoreError, TokenizerError, UsageError
from tokenmill.options import UNITS_BY_INPUT, WAYS_OF_READING
from tokenmill.sources import base
from tokenmill.sources.base import MEGABYTE, Source, SourceFile, SourceOptions, Unit, UnitCopy
from tokenmill.sources.discovery import make_group
from tokenmill.store import facts
from tokenmill.store.facts import BoundaryToken, StoreIdentity, TokenizerFacts, facts_of
from tokenmill.store.layout import RECEIPT_FILE, StoreLayout, unit_name, unit_prefix
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tokenmill.options import BuildOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSettings:
    """All that decides a build, made once; small enough to be sent to any machine."""

    options: BuildOptions  # without the inputs, which may be many, and what cannot be sent
    identity: StoreIdentity
    source: SourceOptions
    memory: MemoryPlan


# -------------------------------------------------------------------------------------------------
# Who a store is: its tokenizer, its boundary tokens and its configuration, with one fingerprint.
#
# Units carry the fingerprint in their facts. Two units with different fingerprints must never
# get into one store, since nothing in the ids would show it.


class Request(NamedTuple):
    """The tokenizer and configuration that a build asks for."""

    files: TokenizerFiles
    identity: StoreIdentity
    info: TokenizerInfo | None  # None where the store's own word was taken for it

    def describe(self) -> TokenizerInfo:
        """The tokenizer, whatever it costs."""
        policy = SpecialTokens(self.identity.special_tokens)
        return self.info or describe(self.files, policy=policy)


def request_identity(
    options: BuildOptions,
    layout: StoreLayout,
    before_describing: Callable[[TokenizerKind, int], None] | None = None,
    when_harmless: Callable[[TokenizerFiles, bool], None] = lambda *_: None,
    *,
    by_name: bool = False,
) -> Request:
    """Resolve tokenizer and configuration; cheap if the store was built with the same ones.

    `by_name`: whether the names of the input tell more than one split.

    `before_describing` is told the kind of a tokenizer that is to be described, and its bytes, and
    `when_harmless` which files engines may load, and whether the rest is known or being found out.
    """
    files = find_tokenizer(options.tokenizer)
    settings = options.identity(by_name=by_name)
    shape = options.shape
    ways = _ways(options, settings)
    is_chat = shape is not None and shape.is_chat
    if is_chat:
        from tokenmill.supervised.chat import digest, read_sources, version_used, with_template

        files = with_template(files, options.chat_template)
        sources = read_sources(files.files)
        for way in ways:
            way["chat_template"] = digest(sources)
        assert shape is not None
        if (version := version_used(sources, shape)) is not None:
            # Stores of before go on as they were begun, by prefixes alone.
            ways += [dict(way) for way in ways]
            for way in ways[: len(ways) // 2]:
                way["template_version"] = version
    contents = {
        name: facts_of(files.data if path == files.main else path.read_bytes())
        for name, path in files.files.items()
    }
    manifest = facts.known_manifest(layout)
    known = None if manifest is None else manifest.identity
    if (
        known is not None
        and known.tokenizer.files == contents
        and known.tokenizer.kind == str(files.kind)
        and dict(known.config) in ways
    ):
        return Request(files, known, None)
    if before_describing is not None:
        before_describing(files.kind, sum(file.bytes for file in contents.values()))
    info = describe(
        files,
        policy=SpecialTokens(options.special_tokens),
        when_harmless=functools.partial(when_harmless, files),
    )
    if shape is not None and shape.fim:
        from tokenmill.supervised.fim import fim_tokens

        fim_tokens(info)  # refused before anything is written
    asked = options.eos, options.bos
    eos_name, bos_name = (each if isinstance(each, str) else None for each in asked)
    # A chat has the tokens that its template writes, and no others.
    eos = None if options.eos is False or is_chat else resolve_token(info, "eos", eos_name)
    bos = None if options.bos is False else resolve_token(info, "bos", bos_name)
    fingerprint_of = functools.partial(
        facts.config_fingerprint, tokenizer=info.fingerprint, eos=eos, bos=bos
    )
    begun = _begun_with(layout)
    settings = next((way for way in ways if fingerprint_of(config=way) in begun), settings)
    fingerprint = fingerprint_of(config=settings)
    if options.format == "text" and options.eos is None and eos and fingerprint not in begun:
        _refuse_end_of_turn(files, info, eos[0])
    kind, vocab_size = str(info.kind), info.vocab_size
    tokenizer = TokenizerFacts(
        kind=kind, fingerprint=info.fingerprint, vocab_size=vocab_size, files=contents
    )
    identity = StoreIdentity(
        created_by=f"tokenmill {__version__}",
        tokenizer=tokenizer,
        eos=None if eos is None else BoundaryToken(token=eos[0], id=eos[1], position="end"),
        bos=None if bos is None else BoundaryToken(token=bos[0], id=bos[1], position="start"),
        special_tokens=options.special_tokens,
        config=settings,
        fingerprint=fingerprint,
        mask=shape is not None and shape.has_mask,
    )
    return Request(files, identity, info)


def _refuse_end_of_turn(files: TokenizerFiles, info: TokenizerInfo, eos: str) -> None:
    """TokenizerError where a tokenizer for chats names its end of a turn, and has an end of text.

    A store that was begun keeps what it has.
    """
    from tokenmill.supervised.chat import ends_of_text, ends_turns

    ends = ends_of_text(info) if ends_turns(files, eos) else []
    if ends:
        raise TokenizerError(
            f"this tokenizer names {eos!r} as its end token, which ends a turn of a chat, and it "
            f"has {' and '.join(map(repr, ends))} too; plain texts that end as turns do teach "
            "a model to end its turn where a document ends",
            hint=f"say which of them ends a document: --eos {shlex.quote(ends[0])}, or --eos "
            f"{shlex.quote(eos)}",
        )


def _ways(
    options: BuildOptions, settings: dict[str, str | int | float | bool | None]
) -> list[dict[str, str | int | float | bool | None]]:
    """The configuration that is asked for, and those that a store which has one of them keeps."""
    ways = [settings]
    is_free = options.split_by_name is None
    if is_free and "split_by_name" not in settings:
        # The names tell no more than one split now, and told several when it was begun.
        ways.append(settings | {"split_by_name": True})
    if is_free or "split_by_name" not in settings:
        # Stores of before read more, and have another cut.
        new = {"files", "split_by_name"}
        plain = {name: value for name, value in settings.items() if name not in new}
        of_text = {name: value for name, value in plain.items() if name != "groups"}
        ways += [plain, of_text, of_text | {"unit_bytes": options.unit_size}]
    return ways


def _begun_with(layout: StoreLayout) -> set[str]:
    """Fingerprints of what a store that has no manifest was begun with."""
    found = {record.fingerprint for record in facts.read_records(layout)}
    with contextlib.suppress(FileNotFoundError), os.scandir(layout.shards) as entries:
        for match in filter(None, (RECEIPT_FILE.fullmatch(entry.name) for entry in entries)):
            with contextlib.suppress(StoreError):
                return found | {facts.read_receipt(layout, match["unit"]).config}
    return found


def describe_difference(layout: StoreLayout, asked: StoreIdentity) -> str:
    """What is different about a store's own configuration, in words."""
    manifest = facts.known_manifest(layout)
    if manifest is None:
        return "its units carry another fingerprint"
    known = manifest.identity
    changes = []
    if known.tokenizer.fingerprint != asked.tokenizer.fingerprint:
        old, new = (each.tokenizer.fingerprint[:12] for each in (known, asked))
        changes.append(f"tokenizer {old} -> {new}")
    for name, *tokens in (("eos", known.eos, asked.eos), ("bos", known.bos, asked.bos)):
        if tokens[0] != tokens[1]:
            old, new = (repr(token.token) if token else "none" for token in tokens)
            changes.append(f"{name} {old} -> {new}")
    # That an older store is cut otherwise is nobody's wish, and would be kept.
    before = known.config | {"unit_bytes": known.config.get("unit_bytes") or UNITS_BY_INPUT}
    for name in dict.fromkeys((*asked.config, *before)):
        value = asked.config.get(name)
        if name not in {"eos", "bos", *WAYS_OF_READING} and before.get(name) != value:
            changes.append(f"{name} {before.get(name)!r} -> {value!r}")
    return ", ".join(changes) or "its units carry another fingerprint"


# -------------------------------------------------------------------------------------------------
# One memory budget, divided among the processes of a build, and a worker kept within its share.
#
#     budget = driver + workers x (engine + batches in flight + engine cache) + one large document
#
# What a share must hold was measured (docs/decisions/0003-memory-budget.md): the interpreter with
# its libraries, the tokenizer as both engines hold it, and the copies of a batch on its way from
# raw bytes to shard. What is left is the cache of the fast engine, which grows with the text: the
# worker watches its own size and has the engine drop the cache when its share is full. One document
# may be far larger than a batch; workers take turns at those.

_DRIVER_BYTES = 110 * MEGABYTE
_LIBRARIES_BYTES = 110 * MEGABYTE
# More for each process whose store is at a URL: network libraries, and parts being sent.
UPLOAD_BYTES = 80 * MEGABYTE
# Memory of the fast and the reference engine together, per byte of tokenizer file.
_TOKENIZER_FACTOR = 18
# Copies of a batch alive at once: raw and parsed ahead, text and ids in work, ids to write.
BATCH_FACTOR = 14
# The least that makes the fast engine's cache worth having.
_CACHE_BYTES = 48 * MEGABYTE
# Memory per byte of a document that a reference engine encodes whole, at about a token a byte. The
# fast engine needs far less, but which engine is used may not decide which rows are rejected.
LARGE_DOCUMENT_FACTOR = 160

_USUAL_ROOM = 192 * MEGABYTE
_SMALLEST_BATCH = 1 * MEGABYTE
_LARGEST_BATCH = 8 * MEGABYTE


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How a budget is spent."""

    budget: int
    workers: int
    worker_bytes: int  # size at which a worker drops its caches
    batch_bytes: int
    # Follows from the budget alone: it decides which rows are rejected, and so may not depend on
    # the number of workers.
    max_document_bytes: int = 0
    room_bytes: int = 0  # what a reader may hold at once beside its batches
    hard_bytes: int = 0  # where a worker gets no more memory: its share and one large document
    worker_cpus: int = 1  # of a cluster's node, so that no more workers start there than fit


def default_budget() -> int:
    """A quarter of the memory that this process may use."""
    return usable_memory() // 4


def usable_memory() -> int:
    """Memory of the machine, or of the control group that limits this process."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def max_document_bytes(budget: int) -> int:
    """The largest document that a budget can take; a larger one is a rejected row."""
    return LONG_FACTOR * whole_bytes(budget)


def whole_bytes(budget: int) -> int:
    """The largest document, or piece of one, that a budget lets an engine encode whole."""
    return max(budget // (4 * LARGE_DOCUMENT_FACTOR), LEAST_WHOLE_BYTES)


def budget_for_document(size: int) -> str:
    """The smallest round budget, as one writes it, that takes a document of so many bytes."""
    budget = -(-size // LONG_FACTOR) * 4 * LARGE_DOCUMENT_FACTOR
    return f"{-(-budget // 10**8) * 100}MB"


def divide_budget(
    budget: int,
    *,
    tokenizer_bytes: int,
    most_workers: int,
    least_workers: int = 1,
    upload_bytes: int = 0,
) -> MemoryPlan:
    """Shares for as many workers as fit, up to `most_workers`; refuses where too few do."""
    document = whole_bytes(budget)
    driver = _DRIVER_BYTES + upload_bytes
    fixed = upload_bytes + _LIBRARIES_BYTES + _TOKENIZER_FACTOR * tokenizer_bytes + _CACHE_BYTES
    free = budget - driver - LARGE_DOCUMENT_FACTOR * document
    workers = min(most_workers, free // (fixed + BATCH_FACTOR * _SMALLEST_BATCH))
    if workers < least_workers:
        share = fixed + BATCH_FACTOR * _SMALLEST_BATCH
        # The large document takes a quarter of any budget.
        smallest = (driver + least_workers * share) * 4 // 3
        smallest = -(-smallest // (10 * 10**6)) * 10 * 10**6
        raise MemoryBudgetError(
            f"a memory budget of {format_size(budget)} is too small for {least_workers} "
            f"worker{'s' if least_workers > 1 else ''} with this tokenizer, each of which needs "
            f"{format_size(share)} beside {format_size(driver)} for the driver and a "
            "quarter of the budget for large documents",
            hint=f"the smallest that works is --memory {smallest // 10**6}MB"
            + (", or use fewer --workers" if least_workers > 1 else ""),
        )
    share = free // workers
    batch = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, (share - fixed) // (2 * BATCH_FACTOR)))
    # Taken from what the engine's cache could grow to.
    spare = share - fixed - BATCH_FACTOR * batch
    room = max(4 * batch, spare // 2, min(spare, _USUAL_ROOM))
    return MemoryPlan(
        budget=budget,
        workers=workers,
        worker_bytes=share,
        batch_bytes=batch,
        max_document_bytes=max_document_bytes(budget),
        room_bytes=room,
        hard_bytes=share + LARGE_DOCUMENT_FACTOR * document,
    )


def worker_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... and the most themselves."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


# What a driver was seen to take; its share of a budget is larger, to be on the safe side.
_DRIVER_USED_BYTES = 60 * MEGABYTE


def memory_needed(workers: int, *, tokenizer_bytes: int, has_cache: bool) -> int:
    """About what a build takes with so many workers, large documents left out.

    The cache of a fast engine is counted as small as it may be; it grows up to the budget.
    """
    cache = _CACHE_BYTES if has_cache else 0
    worker = _LIBRARIES_BYTES + _TOKENIZER_FACTOR * tokenizer_bytes + cache
    return _DRIVER_USED_BYTES + workers * worker


def budget_with(plan: MemoryPlan, more_bytes: int) -> str:
    """A budget, as one writes it, whose readers have so many bytes more room."""
    # Batches may grow first; of what is left half is room; a quarter of all is a large document's.
    batches = BATCH_FACTOR * (_LARGEST_BATCH - plan.batch_bytes)
    more = (2 * (more_bytes + plan.room_bytes) + batches + MEGABYTE) * plan.workers * 4 // 3
    return f"{-(-(plan.budget + more) // 10**8) * 100}MB"


# Mapped and never used: stacks of threads, what allocators keep.
_SPARE_BYTES = 8 * MEGABYTE


def limit_memory(most_bytes: int) -> Callable[[], None]:
    """Make this process get no more memory than that; what is returned takes the limit back.

    For a process of one's own that works on what may be hostile. Beyond the limit Python, numpy and
    Arrow raise MemoryError, to be caught around the work (`BuildWorker.work` does) and told as an
    error that names the file; native code that cannot raise ends the process with SIGABRT, which
    `LocalRunner` tells as such an error and does not try again. Only Linux has such a limit.
    """
    if sys.platform != "linux":
        return lambda: None
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        sizes = dict(line.split(":", 1) for line in file if line.startswith(("VmData", "VmRSS")))
    mapped, used = (int(sizes[name].split()[0]) * 1024 for name in ("VmData", "VmRSS"))
    limit = mapped + max(0, most_bytes - used) + _SPARE_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, before)


def release_free_memory() -> None:
    """Give memory that was freed but kept by the allocators back to the system."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    trim_heap()


# -------------------------------------------------------------------------------------------------
# The units of a build, by what the store has of them.
#
# Resume is nothing but this: plan the units again and keep those whose receipt still holds. A
# receipt holds if its configuration, its slice and its source file are the ones of the plan. A file
# that was only touched is recognised by its bytes, and so is one with its old size and time that
# was changed after the receipt was written (docs/decisions/0016). What the files do not say is
# never taken from an earlier run.


_COPIES = 2  # of units of a stream, for each worker: one that it commits, and one in work


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Units of one file for one worker: a single one, or every n-th of a stream until it ends.

    With `ahead` the worker does not build the units of the stream: it finds them, as a task with a
    copy of its records for each.
    """

    file: SourceFile
    first: int
    step: int | None = None  # None: the one unit `first`; else as far as the stream goes
    done: frozenset[int] = frozenset()  # units of the stream that are complete already
    # Unit -> rows of it that are before the limit; units without an entry are taken whole.
    row_limits: Mapping[int, int] = field(default_factory=dict)
    last: int | None = None  # unit of the stream that the limit reaches
    ahead: int | None = None  # so many copies may wait or be in work
    unit: Unit | None = None  # where it is one, and known
    copy: UnitCopy | None = None  # what the unit is read from, if it is there
    # Rows of its files that were forgotten, and are left out.
    forgotten: tuple[facts.ForgottenUnit, ...] = ()
    # Of two tasks that may be given out, that with the smaller one goes first: a build that is
    # followed has here the place of the file in the plan.
    place: int = 0

    @property
    def finds_tasks(self) -> bool:
        return self.ahead is not None

    def __str__(self) -> str:
        return self.file.title if self.unit is None else self.unit.title

    def units(self, source: Source, units: Iterator[Unit]) -> Iterator[Unit]:
        """Those of the units of its file that the task names."""
        if self.step is None:
            yield next(unit for unit in units if unit.index == self.first)
            return
        last = None if self.last is None else self.last + 1
        for unit in itertools.islice(units, self.first, last, self.step):
            if not source.exists(unit):
                return
            if unit.index not in self.done:
                yield unit


@dataclass(kw_only=True, slots=True)
class WorkPlan:
    """The units of a build, sorted into complete ones and work."""

    files: tuple[SourceFile, ...]
    tasks: list[Task] = field(default_factory=list)
    # Unit name -> what its receipt, which holds, claims.
    done: dict[str, facts.Claim] = field(default_factory=dict)
    # Units whose file has a new version but the same bytes: their receipts are written anew.
    touched: list[tuple[str, SourceFile]] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)  # names of all units that the plan knows
    # Units of each file, those of other parts too; None where only its end tells. Files after a
    # limit have none, and are not in the list.
    num_units: list[int | None] = field(default_factory=list)
    # Units in the store that are not in the plan although their file is an input.
    stale: list[str] = field(default_factory=list)
    # Input files of units in the store that are no inputs now, and those units.
    foreign: list[str] = field(default_factory=list)
    foreign_units: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)  # of the store, and to be built again
    # Those of `rebuilt` and `stale` whose text is among the inputs as it was, and is cut anew.
    outgrown: list[str] = field(default_factory=list)
    # Rows that were forgotten and are to be built again, and of which nobody knows which they are:
    # their files changed, or are cut in another way.
    lost: list[facts.ForgottenUnit] = field(default_factory=list)
    other_config: int = 0  # units of the store that were built with another configuration
    bytes_to_do: int = 0  # input of the tasks, uncompressed; an estimate where it is compressed
    units_to_do: int | None = 0  # None where a compressed file hides it
    rows_to_do: int | None = None  # known where there is a limit

    @property
    def inputs(self) -> dict[str, SourceFile]:
        """The files by their paths, those in groups too."""
        return {m.path: m for file in self.files for m in (file, *file.members)}

    def workers(self, most: int) -> int:
        """How many of the workers start."""
        finds_tasks = any(task.finds_tasks for task in self.tasks)
        return most if finds_tasks else min(most, len(self.tasks))


def plan_work(
    layout: StoreLayout,
    files: Sequence[SourceFile],
    settings: BuildSettings,
    *,
    part: BuildPart | None = None,
) -> WorkPlan:
    """Compare the units of the input with the receipts of the store.

    For a part, its own units alone: what the others have is neither looked at nor touched.
    """
    plan = WorkPlan(files=tuple(files))
    planner = _Planner(layout=layout, settings=settings, part=part, plan=plan)
    planner.run()
    if part is None:
        _find_leftovers(plan, layout, planner.existing, settings.identity.fingerprint)
    inputs = plan.inputs
    for name in (*plan.rebuilt, *plan.stale):
        found = facts.find_receipt(layout, name)
        if found is not None and found.config == settings.identity.fingerprint:
            plan.outgrown += [name] if _is_unchanged(found, inputs) else []
    known = facts.read_forgotten(layout)
    if known is not None:
        _leave_out(plan, known, inputs, settings.source)
    return plan


def _leave_out(
    plan: WorkPlan,
    known: facts.Forgotten,
    inputs: Mapping[str, SourceFile],
    options: SourceOptions,
) -> None:
    """Tell tasks which rows were forgotten; those that cannot be told apart any more are `lost`."""
    for each in known.units:
        paths = _paths(each)
        tasks = [
            place
            for place, task in enumerate(plan.tasks)
            if not set(paths).isdisjoint(m.path for m in task.file.members or (task.file,))
            and (each.unit.path != task.file.path or _may_build(task, each.unit.index))
        ]
        if tasks and not _is_as_it_was(each, inputs, options):
            plan.lost.append(each)
            continue
        for place in tasks:
            task = plan.tasks[place]
            plan.tasks[place] = dataclasses.replace(task, forgotten=(*task.forgotten, each))


def _paths(each: facts.ForgottenUnit) -> tuple[str, ...]:
    return each.unit.members or (each.unit.path,)


def still_forgotten(
    plan: WorkPlan, known: facts.Forgotten, options: SourceOptions
) -> tuple[facts.ForgottenUnit, ...]:
    """Rows that were forgotten, without those of files that are among the input and changed."""
    inputs = plan.inputs
    return tuple(
        each
        for each in known.units
        if inputs.keys().isdisjoint(_paths(each)) or _is_as_it_was(each, inputs, options)
    )


def is_read(plan: WorkPlan, each: facts.ForgottenUnit) -> bool:
    """Whether rows that were forgotten are of files among the input."""
    return not plan.inputs.keys().isdisjoint(_paths(each))


def _may_build(task: Task, index: int) -> bool:
    """Whether a task for units of one file may have that of a number."""
    return task.first == index if task.step is None else index not in task.done


def _is_as_it_was(
    each: facts.ForgottenUnit, inputs: Mapping[str, SourceFile], options: SourceOptions
) -> bool:
    """Whether a unit of which rows were forgotten would be read, and cut, as it was."""
    wanted, paths = each.unit, _paths(each)
    files = [inputs[path] for path in paths if path in inputs]
    if len(files) != len(paths):
        return False
    file = make_group(wanted.path, files) if wanted.members else files[0]
    unit = Unit(file=file, index=wanted.index, start=wanted.start, end=wanted.end)
    if not wanted.members:
        # A file that is in a group now is one unit as a whole, whatever it was before.
        planned = next(itertools.islice(base.plan_units(file, options), wanted.index, None), None)
        if planned is None or (planned.start, planned.end) != (wanted.start, wanted.end):
            return False
    if (file.size, file.version) == (each.source.size, each.source.version):
        return True
    if file.size != each.source.size or not each.source.digest:
        return False
    with contextlib.closing(base.open_source(file, options)) as source:
        return source.digest(unit) == each.source.digest


@dataclass(kw_only=True, slots=True)
class _Planner:
    layout: StoreLayout
    settings: BuildSettings
    part: BuildPart | None
    plan: WorkPlan
    rows_left: int | None = field(init=False)
    existing: set[str] = field(init=False)  # units that have a receipt
    # Prefix of a file's units -> the highest number that the store has.
    last_units: dict[str, int] = field(default_factory=dict)
    _taken: int = 0  # rows of the last unit that are before the limit
    _num_units: int = 0  # of this file
    _source: Source | None = None  # the open file: only a limit or a touched file needs it

    def __post_init__(self) -> None:
        self.rows_left = self.settings.options.limit
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.layout.shards)  # noqa: PTH208 (names alone: there may be millions)
        matches = map(RECEIPT_FILE.fullmatch, names)
        self.existing = {match["unit"] for match in matches if match is not None}
        for name in self.existing:
            prefix, _, index = name.rpartition("-")
            self.last_units[prefix] = max(self.last_units.get(prefix, -1), int(index))

    def run(self) -> None:
        files = self.plan.files
        streams = {file.path for file in files if base.is_stream(file, self.settings.source)}
        of_streams: list[Task] = []
        for place, file in enumerate(files):
            if self.rows_left == 0:
                break
            self._num_units = 0
            try:
                if file.path not in streams:
                    self._plan_units(file)
                elif (task := self._plan_stream(file)) is not None:
                    is_next = self.settings.options.followed
                    (self.plan.tasks if is_next else of_streams).append(
                        dataclasses.replace(task, ahead=self._ahead(1), place=place)
                        if is_next and self._is_shared(file)
                        else task
                    )
            finally:
                if self._source is not None:
                    self._source.close()
                    self._source = None
            is_open = file.path in streams and self.rows_left is None
            self.plan.num_units.append(None if is_open else self._num_units)
        # Long tasks first. Those that find others go each to a worker of its own, being fewer.
        self.plan.tasks[:0] = self._share(of_streams)

    def _share(self, streams: list[Task]) -> list[Task]:
        """Tasks for one worker each; what is more than a worker's share of the work is for all."""
        options, workers = self.settings.options, self.settings.memory.workers
        if options.runner == "ray":
            # Each decompresses all of it: the next may be on another machine.
            num_files = len({task.file.path for task in (*streams, *self.plan.tasks)})
            lanes = max(1, workers // max(1, num_files))
            lane = functools.partial(dataclasses.replace, step=lanes)
            return [lane(task, first=first) for task in streams for first in range(lanes)]
        shared, whole = list[Task](), list[Task]()
        for task in streams:
            is_large = base.text_size(task.file) * workers > self.plan.bytes_to_do
            (shared if is_large and self._is_shared(task.file) else whole).append(task)
        ahead = self._ahead(len(shared))
        return [*(dataclasses.replace(task, ahead=ahead) for task in shared), *whole]

    def _is_shared(self, file: SourceFile) -> bool:
        """Whether a stream may be for all workers: it has units enough, and they are here."""
        options, size = self.settings.options, base.text_size(file)
        is_here = options.runner == "local" and not options.serial
        return is_here and size > base.unit_bytes_for(size, self.settings.source)

    def _ahead(self, streams: int) -> int:
        """Copies of the units of each of so many streams."""
        return max(_COPIES, _COPIES * (self.settings.memory.workers + 1) // max(1, streams))

    def _is_mine(self, name: str) -> bool:
        """Whether the unit, or the stream, of this name is to be planned."""
        return self.part is None or self.part.has(name)

    def _open(self, file: SourceFile) -> Source:
        self._source = self._source or base.open_source(file, self.settings.source)
        return self._source

    def _plan_units(self, file: SourceFile) -> None:
        units = list(base.plan_units(file, self.settings.source))
        size = base.text_size(file)
        for place, unit in enumerate(units):
            if self.rows_left == 0:
                return
            row_limit = self._take_rows(unit)
            if not self._is_mine(_name(unit)) or self._keep_if_complete(unit, row_limit):
                continue
            self._count_rows()
            limits = {} if row_limit is None else {unit.index: row_limit}
            self.plan.tasks.append(Task(file=file, first=unit.index, unit=unit, row_limits=limits))
            share = size * (place + 1) // len(units) - size * place // len(units)
            self.plan.bytes_to_do += share if unit.text_bytes is None else unit.text_bytes
            if self.plan.units_to_do is not None:
                self.plan.units_to_do += 1

    def _plan_stream(self, file: SourceFile) -> Task | None:
        """What is left to do of it; its end is known only if a limit or a run reached it."""
        complete: set[int] = set()
        limits: dict[int, int] = {}
        last: int | None = None
        prefix = unit_prefix(file.path)
        is_mine = self._is_mine(prefix)
        if not is_mine and self.rows_left is None:
            return None
        units = base.plan_units(file, self.settings.source)
        # With a limit as many as exist, else those that the store has.
        if self.rows_left is not None:
            units = itertools.takewhile(lambda unit: self._open(file).exists(unit), units)
        else:
            units = itertools.islice(units, self.last_units.get(prefix, -1) + 1)
        for unit in units:
            if self.rows_left == 0:
                break
            row_limit = self._take_rows(unit)
            if row_limit is not None:
                limits[unit.index] = row_limit
            if is_mine and self._keep_if_complete(unit, row_limit):
                complete.add(unit.index)
            elif is_mine:
                self._count_rows()
            claim = self.plan.done.get(_name(unit))
            if self.rows_left == 0 or (claim is not None and claim.is_last):
                last = unit.index
                break
        if not is_mine or (last is not None and complete >= set(range(last + 1))):
            return None
        self.plan.units_to_do = None
        self.plan.bytes_to_do += base.text_size(file)
        done = frozenset(complete)
        return Task(file=file, first=0, step=1, done=done, row_limits=limits, last=last)

    def _take_rows(self, unit: Unit) -> int | None:
        """How many rows of the unit are before the limit; None if it is taken whole."""
        self._num_units += 1
        if self.rows_left is None:
            return None
        found = facts.find_receipt(self.layout, _name(unit))
        if found is not None and _is_same_slice(found, unit) and self._is_same(found, unit.file):
            rows = found.counts.rows
        else:
            rows = self._open(unit.file).count_rows(unit)
        taken = min(rows, self.rows_left)
        self.rows_left -= taken
        self._taken = taken
        return taken if taken < rows else None

    def _count_rows(self) -> None:
        """The rows that were just taken are to be done."""
        if self.rows_left is not None:
            self.plan.rows_to_do = (self.plan.rows_to_do or 0) + self._taken

    def _keep_if_complete(self, unit: Unit, row_limit: int | None) -> bool:
        name = _name(unit)
        self.plan.planned.add(name)
        if name not in self.existing:
            return False
        found = facts.find_receipt(self.layout, name)
        if found is not None and found.config != self.settings.identity.fingerprint:
            self.plan.other_config += 1
        elif found is not None and self._still_holds(found, unit, row_limit):
            self.plan.done[name] = found.claim
            return True
        self.plan.rebuilt.append(name)
        return False

    def _still_holds(self, found: facts.Receipt, unit: Unit, row_limit: int | None) -> bool:
        """Whether the unit comes out the same from today's file, under today's limits."""
        largest, bounds = self.settings.source.max_document_bytes, found.bounds
        smallest = bounds.smallest_too_large_bytes
        if bounds.largest_row_bytes > largest or (smallest is not None and smallest <= largest):
            return False
        rows = found.counts.rows
        used = rows if row_limit is None else row_limit
        if rows - found.counts.skipped != used or not _is_same_slice(found, unit):
            return False
        file, source = unit.file, found.source
        if self._is_same(found, file):
            return True
        if source.size != file.size or self._open(file).digest(unit) != source.digest:
            return False
        if source.version != file.version or self._changed_since(found, file):
            self.plan.touched.append((found.unit.name, file))
        return True

    def _is_same(self, found: facts.Receipt, file: SourceFile) -> bool:
        """Whether the file need not be read to know that it is the one of the receipt."""
        is_alike = (found.source.size, found.source.version) == (file.size, file.version)
        reads_all = self.settings.options.verify_sources
        return is_alike and not reads_all and not self._changed_since(found, file)

    def _changed_since(self, found: facts.Receipt, file: SourceFile) -> bool:
        # Sizes and times can be put back as they were; when that was done cannot.
        receipt = f"{self.layout.root}/shards/{found.unit.name}.json"
        return file.changed >= os.stat(receipt).st_mtime_ns  # noqa: PTH116 (a path object takes longer)


def _name(unit: Unit) -> str:
    return unit_name(unit.file.path, index=unit.index)


def _is_same_slice(found: facts.Receipt, unit: Unit) -> bool:
    return (found.unit.start, found.unit.end) == (unit.start, unit.end)


def _is_unchanged(found: facts.Receipt, inputs: Mapping[str, SourceFile]) -> bool:
    """Whether all that a unit was read from is among the inputs as it was."""
    paths = found.unit.members or (found.unit.path,)
    files = [inputs[path] for path in paths if path in inputs]
    if len(files) != len(paths):
        return False
    file = make_group(found.unit.path, files) if found.unit.members else files[0]
    return (file.size, file.version) == (found.source.size, found.source.version)


def _find_leftovers(
    plan: WorkPlan, layout: StoreLayout, existing: set[str], fingerprint: str
) -> None:
    """Units of the store that are not kept: those that the plan lacks, and those of other files."""
    inputs = {member.path for file in plan.files for member in (file, *file.members)}
    foreign = set()
    for name in sorted(existing - plan.done.keys()):
        receipt = None
        with contextlib.suppress(StoreError):
            receipt = facts.read_receipt(layout, name)
        if name not in plan.planned:
            plan.stale.append(name)
            plan.other_config += receipt is not None and receipt.config != fingerprint
        # A group may be planned that lost files.
        paths = () if receipt is None else receipt.unit.members or (receipt.unit.path,)
        if strangers := [path for path in paths if path not in inputs]:
            plan.foreign_units.append(name)
            foreign.update(strangers)
    plan.foreign.extend(sorted(foreign))


# -------------------------------------------------------------------------------------------------
# Parts of a build: which units a part has, found from their names alone, by a hash of the name
# modulo the number of parts.
#
# So parts need not know of each other, a unit keeps its part when files are added, and every part
# may be run again. Units of a stream (a compressed file) stay together and go by the name of their
# file: reading the last of them means decompressing all the others.

_PART = re.compile(r"([0-9]+)/([0-9]+)")
_SHOWN = 3  # units that an error names; a count is given of the others


class BuildPart(NamedTuple):
    """Part `number` of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, name: str) -> bool:
        """Whether the unit, or the stream, of this name is this part's."""
        return part_of(name, self.of) == self.number


def parse_part(text: str) -> BuildPart:
    """BuildPart(3, 64) of '3/64'."""
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a part of a build",
            hint="write its number and the number of parts: 3/64 is the third of 64",
        )
    part = BuildPart(int(match[1]), int(match[2]))
    if part.of == 0:
        raise UsageError(f"part {text!r}: no parts make no build", hint="use 1/1 or more parts")
    if not 1 <= part.number <= part.of:
        raise UsageError(
            f"part {text!r} does not exist: parts are counted from 1",
            hint=f"use 1/{part.of} to {part.of}/{part.of}",
        )
    return part


def part_of(name: str, parts: int) -> int:
    """Which of the parts has the unit, or the stream, of this name; from 1."""
    return xxhash.xxh3_64_intdigest(name.encode()) % parts + 1


def describe_missing(tasks: Iterable[Task], parts: int) -> tuple[str, list[int]]:
    """Units that are not there, in words, and the parts that have them."""
    by_part: dict[int, list[str]] = {}
    for task in {str(task): task for task in tasks}.values():  # tasks may share a stream
        name = unit_prefix(task.file.path)
        if task.step is None:
            name = unit_name(task.file.path, index=task.first)
        by_part.setdefault(part_of(name, parts), []).append(str(task))
    named = [f"{name} (part {part}/{parts})" for part in sorted(by_part) for name in by_part[part]]
    more = f" and {len(named) - _SHOWN:,} more" if named[_SHOWN:] else ""
    return ", ".join(named[:_SHOWN]) + more, sorted(by_part)
