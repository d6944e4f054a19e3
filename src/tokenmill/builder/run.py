"""One build, step by step.

    discover the input  ->  who the store is  ->  what is left to do  ->  workers  ->  manifest

Everything before the workers start only reads. From then on each unit commits by itself, and the
manifest, written last from the receipts, makes the store complete.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import secrets
import shlex
import shutil
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.builder import WORKER_ENVIRONMENT, progress
from tokenmill.builder import plan as planning
from tokenmill.builder.encode import Encoding, RowEncoder, cut_lengths, load_encoder
from tokenmill.builder.plan import BuildPart, BuildSettings, MemoryPlan, Request, Task, WorkPlan
from tokenmill.builder.progress import BuildResult, Monitor
from tokenmill.builder.worker import UnitReport, WorkerStart, enough_share, refuse_unknown
from tokenmill.engines import AUTO, PACKAGES, gigatoken
from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.engines.load import CHAT_TEMPLATE, find_tokenizer, load_ahead
from tokenmill.errors import (
    BuildError,
    SourceError,
    StoreError,
    TokenmillError,
    TooManyRejectsError,
    UsageError,
)
from tokenmill.files import PathInput, shown, unreadable
from tokenmill.markup import Told
from tokenmill.options import (
    MESSAGE_FORMATS,
    BuildOptions,
    FinishOptions,
    PlanOptions,
    RowShape,
    as_list,
    globs_of,
    with_options,
)
from tokenmill.runners.local import (
    LocalRunner,
    SerialRunner,
    fork,
    physical_cores,
    pinning,
    usable_cores,
)
from tokenmill.sources.base import (
    SMALLEST_UNIT_BYTES,
    SourceOptions,
    least_unit_bytes,
    open_decompressed,
    open_source,
    plan_units,
    reader_modules,
    text_size,
)
from tokenmill.sources.discovery import Discovery, corpus_files, discover
from tokenmill.sources.objects import rows_in
from tokenmill.store import facts, snapshots
from tokenmill.store import layout as layouts
from tokenmill.store.facts import (
    Building,
    Counts,
    Manifest,
    PartRecord,
    PlannedSource,
    UnknownFacts,
)
from tokenmill.store.format import index_bytes, token_dtype
from tokenmill.store.write import keep_tokenizer, remove_manifest, sweep
from tokenmill.where import UNDECIDED, has, parse, row_of, unknown_column
from tokenmill.words import count, duration, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenmill.engines.load import TokenizerFiles
    from tokenmill.runners.ray import RayCluster, RayRunner
    from tokenmill.sources.objects import Rows
    from tokenmill.store.layout import Json, StoreLayout
    from tokenmill.where import Condition


_MOST_SHOWN = 8
# What workers import for rows of several fields, and for chats.
_SHAPERS = ("tokenmill.supervised.shaper", "tokenmill.supervised.sandbox")
# Cores that describing a tokenizer and loading the fast engine keep busy.
_BUSY_AT_START = 2


def source_options(
    config: Mapping[str, object], shape: RowShape | None, *, max_document_bytes: int
) -> SourceOptions:
    """How the input of a store of this configuration is read."""
    fields: tuple[str, ...] = ()
    needs_all = True
    if shape is not None:
        from tokenmill.supervised.rows import needed_fields

        fields, needs_all = needed_fields(shape)
    separator, unit_bytes = config.get("separator"), config.get("unit_bytes")
    return SourceOptions(
        text_field=str(config["text_field"]),
        fields=fields,
        needs_all_fields=needs_all,
        where=parse(str(config["where"])) if config.get("where") is not None else None,
        separator=None if separator is None else str(separator),
        unit_bytes=unit_bytes if isinstance(unit_bytes, int) else None,
        in_order="groups" in config,
        by_name=config.get("split_by_name") is True,
        reads_strays="files" not in config,
        max_document_bytes=max_document_bytes,
    )


class Work(NamedTuple):
    """What a build found out before it writes anything."""

    discovery: Discovery
    request: Request
    settings: BuildSettings
    plan: WorkPlan


@dataclass(kw_only=True)
class BuildRun:
    """What was asked for, and the steps that carry it out: a build, a part of one, or its end.

    A part builds its units alone, beside other parts, and writes no manifest. Parts share nothing
    but the folder of the store. They never remove what they did not write themselves: leftovers of
    a part that was killed go when the build is finished.
    """

    inputs: list[PathInput]
    layout: StoreLayout
    options: BuildOptions
    # The only units to build; those of the others are neither looked at nor touched.
    part: BuildPart | None = None
    # Of how many parts this is the end: a unit that is not there is an error then.
    finishes: int | None = None
    # Largest document, where it does not follow from this machine's budget but was said.
    document_bytes: int | None = None
    # What is built instead of files: objects with rows.
    rows: Rows | None = None
    on_unit: Callable[[UnitReport], None] | None = None
    started: float = field(default_factory=time.monotonic)
    _cluster: RayCluster | None = None
    _local: LocalRunner | None = None
    _building: Building | None = None  # as readers who follow this build were told

    def run(self) -> BuildResult:
        """Carry out what was asked for."""
        discovery = self.discover() if self.rows is None else None
        layouts.refuse_other_folder(self.layout.root)
        if self.options.runner == "ray":
            self.cluster()  # reached before anything is written
        budget, told = self.options.memory_bytes, self.options.on_progress
        budget = budget or planning.default_budget()
        is_part = self.part is not None
        with layouts.StoreLock(self.layout, parts=is_part, memory_bytes=budget) as lock:
            state = Monitor(budget=budget, on_progress=told, phase="planning", started=self.started)
            state.tell()
            try:
                # Rows are written into the store's folder, which is to be this build's own.
                work = self.prepare(discovery or self.discover(), starts=True)
                self.refuse(work)
                finished = self._finished(work)
                return self._work(work, lock.token) if finished is None else finished
            except BaseException as error:
                self._tell_readers(error)
                raise
            finally:
                if self.part is None:
                    shutil.rmtree(self.layout.rows, ignore_errors=True)

    def prepare(self, discovery: Discovery, *, starts: bool = False) -> Work:
        """What is to be done; nothing is written yet. What will work may start meanwhile."""
        self.layout.upstream.begin()
        known = facts.read_forgotten(self.layout)
        if known is not None and known.pending is not None:
            raise StoreError(
                f"documents of {self.layout.name!r} are being forgotten, and that was interrupted:"
                " a build now could make them again",
                hint=f"end it first: tokenmill forget {shlex.quote(self.layout.name)}",
            )
        ahead: dict[str, Any] = {}
        if starts:
            start = functools.partial(self._start_ahead, discovery)
            load = functools.partial(self._load_ahead, discovery)
            ahead = {"before_describing": start, "when_harmless": load}
        by_name = len(discovery.told) > 1
        request = planning.request_identity(self.options, self.layout, **ahead, by_name=by_name)
        files, config = request.identity.tokenizer.files, request.identity.config
        memory = self.memory_plan(sum(file.bytes for file in files.values()))
        source = self.source_options(config)
        if config.get("unit_bytes") is not None:
            least = least_unit_bytes(discovery.text_bytes(source), in_order=source.in_order)
            source = dataclasses.replace(source, least_unit_bytes=least)
        if config != self.options.identity():
            discovery = discovery.grouped(source)  # in splits, or as an older store has it
        settings = BuildSettings(
            options=dataclasses.replace(self.options, inputs=(), on_progress=None),
            identity=request.identity,
            source=dataclasses.replace(
                source,
                batch_bytes=memory.batch_bytes,
                room_bytes=memory.room_bytes,
            ),
            memory=memory,
        )
        plan = planning.plan_work(self.layout, discovery.files, settings, part=self.part)
        return Work(discovery, request, settings, plan)

    def discover(self) -> Discovery:
        """The input files, all of a kind that the rows can come from."""
        options = self.source_options(self.options.identity())
        if self.rows is not None:
            # What is wrong with the rest is told before rows are read that may be read only once.
            tokenizer = find_tokenizer(self.options.tokenizer).files.values()
            self.memory_plan(sum(path.stat().st_size for path in tokenizer))
            discovery = self.rows.write(self.layout.rows, options, limit=self.options.limit)
        else:
            discovery = discover(
                self.inputs,
                options,
                include=globs_of(self.options.include),
                exclude=globs_of(self.options.exclude),
            )
        if self.options.shape is not None:
            from tokenmill.supervised.rows import refuse_plain_text

            refuse_plain_text(discovery.files, self.options.shape)
            of_messages = MESSAGE_FORMATS.get(self.options.format)
            if of_messages is not None and self._has_messages(discovery):
                self.options = dataclasses.replace(self.options, format=of_messages)
        if self.options.where is not None:
            _refuse_without_columns(discovery, parse(self.options.where))
        return discovery

    def _has_messages(self, discovery: Discovery) -> bool:
        """Whether prompts and answers are lists of messages, as the first row has them."""
        from tokenmill.supervised.rows import holds_messages

        shape = self.options.shape
        assert shape is not None
        if shape.template is not None or not discovery.files:
            return False
        options = self.source_options(self.options.identity())
        file = discovery.files[0].members[:1] or discovery.files[:1]
        with closing(open_source(file[0], options)) as source:
            unit = next(plan_units(file[0], options), None)
            for batch in source.read(unit) if unit is not None else ():
                if len(batch.texts):
                    return holds_messages(batch.texts.bytes_at(0), shape)
        return False

    def source_options(self, config: Mapping[str, object]) -> SourceOptions:
        """How a store of this configuration reads; document sizes follow from the budget alone."""
        budget, shape = self.options.memory_bytes or planning.default_budget(), self.options.shape
        # Rows of several fields are rendered, and their completions found, whole.
        has_fields = shape is not None and shape.has_fields
        most = planning.whole_bytes if has_fields else planning.max_document_bytes
        largest = self.document_bytes or most(budget)
        return source_options(config, shape, max_document_bytes=largest)

    def memory_plan(self, tokenizer_bytes: int) -> MemoryPlan:
        """Divide the budget among the workers that were asked for, or as many as fit.

        On a cluster the budget is that of a node, and the workers are those of all nodes.
        """
        asked = self.options.workers
        cluster = self.cluster() if self.options.runner == "ray" else None
        most = 1 if self.options.serial else asked or physical_cores()
        if cluster is not None:
            most = max([1, *cluster.node_cpus()])
        plan = planning.divide_budget(
            self.options.memory_bytes or planning.default_budget(),
            tokenizer_bytes=tokenizer_bytes,
            most_workers=most,
            least_workers=most if asked and cluster is None else 1,
            upload_bytes=planning.UPLOAD_BYTES if self.layout.upstream.url else 0,
        )
        if cluster is None:
            return plan
        cpus = most // plan.workers
        slots = cluster.slots(cpus)
        return dataclasses.replace(plan, workers=min(asked or slots, slots), worker_cpus=cpus)

    def cluster(self) -> RayCluster:
        """The Ray cluster that the units are worked on by; the first call connects to it."""
        from tokenmill.runners.ray import RayCluster

        if self._cluster is None:
            address, cpus = self.options.address, self.options.workers or physical_cores()
            self._cluster = RayCluster(address, local_cpus=cpus)
        return self._cluster

    def close(self) -> None:
        """Let go of the cluster and of what a store at a URL needs here."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._local is not None:
            self._local.close()
        self.layout.upstream.close()

    def refuse(self, work: Work) -> None:
        """Stop before two kinds of tokens, or files that nobody asked for, get into one store."""
        plan, request, store = work.plan, work.request, self.layout.name
        if self.part is not None and not self.options.rebuild:
            self._refuse_mixtures(request.identity.fingerprint)
        if plan.other_config and not self.options.rebuild:
            difference = planning.describe_difference(self.layout, request.identity)
            raise StoreError(
                f"the store {store!r} has {plan.other_config:,} units of another build "
                f"({difference}); adding to them would mix tokens of two kinds in one store",
                hint="choose another --out, or replace the old units with --rebuild"
                + (
                    "; to go on as before, with files of all names in train: --no-split-by-name"
                    if difference == "split_by_name None -> True"
                    else ""
                ),
            )
        # What an older build read of the same inputs goes with the rest of it.
        strays = {each.file.path for each in work.discovery.strays} if self.options.rebuild else ()
        foreign = [path for path in plan.foreign if path not in strays]
        if foreign and not self.options.prune:
            names = _some(foreign)
            raise StoreError(
                f"the store {store!r} has {len(plan.foreign_units):,} units of files that are "
                f"not among the inputs ({names}); a store holds exactly what its command names",
                hint="name those files too, choose another --out, or drop their units with --prune",
            )

        if plan.lost and self.options.forgotten != "removed":
            files = [path for each in plan.lost for path in each.unit.members or (each.unit.path,)]
            rows = sum(each.num_rows for each in plan.lost)
            raise StoreError(
                f"{rows:,} rows of {_some(files)} were forgotten in {store!r}, and these files"
                " changed since, or are cut or grouped in another way: a build cannot tell which"
                " rows they are now, and would make them again",
                hint="remove them from the files, as forgotten.json in the store lists them, then"
                " say so: --forgotten removed",
            )
        if self.finishes is not None and plan.tasks:
            missing, of_parts = planning.describe_missing(plan.tasks, self.finishes)
            again = ", ".join(f"{part}/{self.finishes}" for part in of_parts[:_MOST_SHOWN])
            more = ", ..." if of_parts[_MOST_SHOWN:] else ""
            raise BuildError(
                f"{store!r} lacks {missing}; a store without them would be read as if it were "
                "whole",
                hint=f"run these parts again, then finish: --part {again}{more}",
            )

    def _refuse_mixtures(self, fingerprint: str) -> None:
        asked, store = self.options.as_kept(), self.layout.name
        for record in facts.read_records(self.layout):
            if (record.fingerprint, record.config) != (fingerprint, asked):
                who = f"part {record.part}/{record.parts} of {store!r} was started"
                other = _differences(asked, record.config)
                break
        else:
            manifest = facts.known_manifest(self.layout)
            if manifest is None or manifest.identity.fingerprint == fingerprint:
                return
            who, other = f"the store {store!r} was built", []
        values = f"other values of {', '.join(other)}"
        what = values if other else "another tokenizer or other options"
        raise StoreError(
            f"{who} with {what}; parts of two kinds do not make one store",
            hint="give every part the same tokenizer and options, choose another --out, or replace "
            "what is there with --rebuild",
        )

    def _finished(self, work: Work) -> BuildResult | None:
        """The result for a store that already is what was asked for."""
        plan, manifest = work.plan, facts.known_manifest(self.layout)
        if manifest is None or manifest.identity != work.request.identity:
            return None
        if plan.tasks or plan.touched:
            return None
        if self.part is not None:
            # Of the same files: then no record is left in the finished store.
            files = {(file.path, file.size, file.version) for file in plan.files}
            known = {(source.path, source.size, source.version) for source in manifest.sources}
            return self._result(work, None, sorted(plan.done)) if files == known else None
        layout = self.layout
        left = (layout.tmp, layout.parts, layout.building)
        if plan.stale or plan.foreign or any(path.exists() for path in left):
            return None
        is_whole = {unit.name for unit in manifest.units} == set(plan.done)
        return self._result(work, None, manifest) if is_whole else None

    def _work(self, work: Work, lock_token: str) -> BuildResult:
        record = None if self.part is None else self._record(self.part, work)
        plan, memory = work.plan, work.settings.memory
        self.settle(work)
        if record is None:
            sweep(self.layout, plan.done)
        else:
            facts.write_record(self.layout, record)
        if plan.tasks or record is not None:
            self._building = _building(work)
            facts.write_building(self.layout, self._building)
        held: Manifest | list[str]
        snapshot: snapshots.Snapshot | None = None
        with Monitor(
            budget=memory.budget,
            bytes_total=plan.bytes_to_do,
            units_total=plan.units_to_do,
            on_progress=self.options.on_progress,
            num_workers=plan.workers(memory.workers),
            on_unit=self.on_unit,
            started=self.started,
        ) as monitor:
            if work.plan.tasks:
                self.run_tasks(work, monitor, lock_token)
            if record is None:
                monitor.tell("finishing")
                units = self._units_in_order(work.plan, monitor)
                held = facts.assemble_manifest(self.layout, work.request.identity, units=units)
                self._check_losses(held, work.settings.source)
                self._check_forgotten(held, work)
                facts.write_manifest(self.layout, held)
                snapshot = snapshots.tidy(self.layout, held)
                self._building = None
                facts.remove_building(self.layout)
            else:
                held = sorted({*work.plan.done, *monitor.units})
            monitor.tell("done")
        result = self._result(work, monitor, held, snapshot)
        kept = progress.run_record(result) | self._asked()
        if record is None:
            of_parts = [run for each in facts.read_records(self.layout) for run in each.runs]
            facts.append_runs(self.layout, [*of_parts, kept])
            facts.remove_records(self.layout)
        else:
            facts.write_record(self.layout, record.but(runs=(*record.runs, kept)))
            self.layout.remove_empty_tmp()
        return result

    def _asked(self) -> dict[str, Json]:
        """What the log keeps of what was asked for; nothing of rows, nor where a key is in it."""
        options, inputs = self.options, [*map(str, self.inputs)]
        if self.rows is not None or any(shown(each) != each for each in inputs):
            return {}
        # Of several builds the inputs add up, unless one dropped what was there.
        anew = {"anew": True} if options.prune or options.rebuild else {}
        engine = {} if options.engine == AUTO else {"engine": options.engine}
        return {"inputs": [*inputs], "options": options.as_kept() | engine, **anew}

    def _tell_readers(self, error: BaseException) -> None:
        """Who follows this build would wait for more; other parts go on."""
        if self._building is None or self.part is not None:
            return
        reason = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else "ended")
        with suppress(OSError, TokenmillError):
            facts.write_building(self.layout, self._building.but(failed=reason))

    def _check_losses(self, held: Manifest, source: SourceOptions) -> None:
        """A unit of a small input may lose more than the thresholds say; all may not."""
        totals, most = held.totals, self.options.max_rejects
        used = totals.rows - totals.skipped
        is_small = source.unit_bytes is None and source.least_unit_bytes < SMALLEST_UNIT_BYTES
        most_unknown = self.options.max_unknown
        is_unknown = totals.lost_bytes > most_unknown * totals.text_bytes
        if is_small and held.unknown is not None and is_unknown:
            raise refuse_unknown(held.unknown, totals, "of the input", most_unknown)
        if is_small and totals.rejected > most * used:
            raise TooManyRejectsError(
                f"{totals.rejected:,} of the {used:,} rows of the input were rejected, more than "
                f"the threshold of {most:.2%}; so many bad rows usually mean a wrong option or a "
                f"damaged file{self._first_reject(held)}",
                hint=f"look at them in {shlex.quote(f'{self.layout.name}/rejects')}, then correct "
                "the options or the input, or accept the loss with --max-rejects "
                f"{enough_share(totals.rejected, used)}",
            )

        if not totals.documents and not self.options.allow_empty:
            raise UsageError(
                f"no document came of the input{_losses(totals)}; from a store without any, nothing"
                " can be learned",
                hint="correct the paths or the options, or add --allow-empty; what was built is"
                " kept",
            )

    def _check_forgotten(self, held: Manifest, work: Work) -> None:
        """Whether all rows were left out that were forgotten; those of other files are dropped."""
        known = facts.read_forgotten(self.layout)
        if known is None:
            return
        kept = planning.still_forgotten(work.plan, known, work.settings.source)
        wanted = sum(each.num_rows for each in kept if planning.is_read(work.plan, each))
        if self.options.limit is None and held.totals.forgotten != wanted:
            raise StoreError(
                f"{held.totals.forgotten:,} of {wanted:,} rows that were forgotten are left out of"
                f" {self.layout.name!r}: the others may be in its shards again",
                hint="remove the store, and build it from files without those rows",
            )
        if kept != known.units:
            facts.write_forgotten(self.layout, known.but(units=kept))

    def _first_reject(self, held: Manifest) -> str:
        unit = next(unit.name for unit in held.units if unit.rejects is not None)
        try:
            with self.layout.rejects_file(unit).open("rb") as lines:
                first = json.loads(lines.readline())
        except OSError:  # it is in a bucket
            return ""
        place = f"row {first['row']:,} of {first['file']!r}"
        return f"; the first: {first['reason']} at {place}: {first['detail']}"

    def _record(self, part: BuildPart, work: Work) -> PartRecord:
        """What this part was asked for; what earlier runs of it said of themselves is kept."""
        inputs = tuple(map(str, self.inputs))
        records = facts.read_records(self.layout)
        before = [each.runs for each in records if (each.part, each.parts) == part]
        return PartRecord(
            part=part.number,
            parts=part.of,
            fingerprint=work.request.identity.fingerprint,
            config=self.options.as_kept(),
            runs=tuple(itertools.chain.from_iterable(before)),
            # A key in a URL is never kept; whoever finishes the build must name the inputs then.
            inputs=inputs if all(shown(each) == each for each in inputs) else None,
            max_document_bytes=work.settings.source.max_document_bytes,
        )

    def settle(self, work: Work) -> None:
        """What comes before the first unit: folders, the tokenizer, receipts of touched files."""
        plan = work.plan
        if self.part is not None:
            known = facts.known_manifest(self.layout)
            if known is None or known.identity != work.request.identity:
                remove_manifest(self.layout)  # of another configuration: replaced, as was asked
        self.layout.create()
        is_replaced = bool(plan.rebuilt or plan.stale or plan.foreign)
        if plan.tasks or is_replaced:
            snapshots.keep(self.layout)
        outgrown = set(plan.outgrown)
        # What was changed or dropped in the input is kept nowhere.
        gone = {*plan.rebuilt, *plan.stale, *plan.foreign_units} - outgrown
        snapshots.drop_those_with(self.layout, sorted(gone))
        snapshots.retire(self.layout, [name for name, _ in plan.touched], moved=False)
        if is_replaced or plan.touched:
            remove_manifest(self.layout)
        snapshots.retire(self.layout, plan.outgrown, moved=True)
        request = work.request
        keep_tokenizer(self.layout, request.files.files, request.identity.tokenizer.files)
        for name, file in plan.touched:
            receipt = facts.read_receipt(self.layout, name)
            source = receipt.source.but(version=file.version)
            facts.rewrite_receipt(self.layout, receipt.but(source=source))

    def run_tasks(self, work: Work, monitor: Monitor, lock_token: str) -> None:
        """Have the workers build and commit every unit that is to be built."""
        tokenizer, shape = work.request.describe(), self.options.shape
        if shape is not None and shape.is_chat and shape.train_on != "all":
            from tokenmill.supervised.chat import doubtful_header

            # What a person should know about the masks that are made.
            if (doubt := doubtful_header(tokenizer, shape)) is not None:
                monitor.warn(doubt)
        start = WorkerStart(
            settings=work.settings,
            store=str(self.layout.root),
            url=self.layout.upstream.url,
            corner=self.layout.corner,
            token=lock_token,
            tokenizer=tokenizer,
        )
        for doubt in filter(None, (_doubtful_names(work), _doubtful_end(work))):
            monitor.warn(doubt)
        try:
            runner = self._runner(work.settings.memory)
            runner.run(start, work.plan.tasks, on_event=monitor.on_event)
        finally:
            # The workers are gone; what one that was killed had begun is of no use to anyone.
            shutil.rmtree(self.layout.tmp, ignore_errors=True)

    def _runner(self, memory: MemoryPlan) -> SerialRunner | LocalRunner | RayRunner:
        if self.options.serial:
            return SerialRunner()
        if self.options.runner == "ray":
            from tokenmill.runners.ray import RayRunner

            return RayRunner(
                self.cluster(),
                num_workers=memory.workers,
                max_workers=self.options.workers,
                cpus_per_task=memory.worker_cpus,
                environment=WORKER_ENVIRONMENT,
            )
        return self._local_runner(memory)

    def _local_runner(self, memory: MemoryPlan) -> LocalRunner:
        if self._local is None:
            cores = pinning(memory.workers) if self.options.pin else None
            self._local = LocalRunner(memory.workers, environment=WORKER_ENVIRONMENT, cores=cores)
        return self._local

    def _start_ahead(self, discovery: Discovery, kind: TokenizerKind, tokenizer_bytes: int) -> None:
        """Start workers on this machine while the tokenizer is described: they have to import."""
        if self.finishes is None and self.options.runner != "ray" and not self.options.serial:
            # About as many as there are units, which are planned later.
            most = sum(1 + text_size(f) // discovery.least_unit_bytes for f in discovery.files)
            modules = [WorkerStart.__module__, *PACKAGES.get(kind, ())]
            modules += reader_modules(discovery.files)
            runner = self._local_runner(self.memory_plan(tokenizer_bytes))
            runner.start_ahead(most, modules)

    def _load_ahead(self, discovery: Discovery, files: TokenizerFiles, is_known: bool) -> None:
        """Have engines loaded where workers are forked while the tokenizer is described."""
        if self._local is None or self.options.engine not in (AUTO, "gigatoken"):
            return
        if files.kind is TokenizerKind.HUGGINGFACE:
            policy = SpecialTokens(self.options.special_tokens)
            # A unit needs the reference before it is committed and no sooner: with two cores it is
            # loaded beside the encoding rather than before it.
            at_once = is_known or len(usable_cores()) > _BUSY_AT_START
            path, load = files.path.absolute(), functools.partial(load_ahead, fork=fork)
            load = functools.partial(load, special_tokens=policy, at_once=at_once)
            self._local.call_ahead(functools.partial(load, path))
            shape = self.options.shape
            for module in () if shape is None else _SHAPERS[: 1 + shape.is_chat]:
                self._local.call_ahead(functools.partial(import_module, module))
            self._local.call_ahead(
                functools.partial(
                    gigatoken.import_for_batches,
                    sum(map(text_size, discovery.files)),
                    self._local.num_workers,
                )
            )

    def _units_in_order(self, plan: WorkPlan, monitor: Monitor) -> Iterator[str]:
        """All units, file by file in the order of the input, whoever built them and when."""
        built = {*monitor.units, *plan.done}
        by_file: dict[str, list[int]] = {}
        for name in built:
            prefix, _, number = name.rpartition("-")
            by_file.setdefault(prefix, []).append(int(number))
        for file in plan.files:
            for index in sorted(by_file.get(layouts.unit_prefix(file.path), ())):
                yield layouts.unit_name(file.path, index=index)

    def _result(
        self,
        work: Work,
        monitor: Monitor | None,
        held: Manifest | list[str],
        snapshot: snapshots.Snapshot | None = None,
    ) -> BuildResult:
        """What came of it; for a part, what its units hold."""
        lengths, shape = None, self.options.shape
        if self.part is None and shape is not None and (shape.has_mask or shape.max_length):
            lengths = progress.measure_rows(self.layout.upstream.url or self.layout.root, shape)
        return progress.make_result(
            held if isinstance(held, Manifest) else facts.tally_units(self.layout, held),
            work.request.identity,
            work,
            monitor,
            store=self.layout.name,
            units_total=len(held.units if isinstance(held, Manifest) else held),
            seconds=time.monotonic() - self.started,
            lengths=lengths,
            part=None if self.part is None else str(self.part),
            snapshot=None if snapshot is None else snapshot.name,
        )


# Of a file of JSON Lines that is looked into for the columns of a condition.
_LOOKED_INTO_BYTES = 1 << 16


def _refuse_without_columns(discovery: Discovery, condition: Condition) -> None:
    """SourceError for files without columns, and for JSON Lines that lack all that is asked for.

    Tables say which columns they have when they are opened; lines do not, so some are looked at.
    """
    files = [each for file in discovery.files for each in file.members or (file,)]
    for file in files:
        if not file.traits.has_fields:
            raise SourceError(
                f"{file.path!r} is a {file.traits.title} file, which has no columns that --where "
                "could ask for",
                hint="leave it out with --exclude, or build it into a store of its own",
            )
    of_lines = (file for file in files if file.format == "jsonl" and file.size)
    first = next(of_lines, None)
    if first is None:
        return
    try:
        with closing(open_decompressed(first)) as reader:
            lines = reader.read(_LOOKED_INTO_BYTES).split(b"\n")
    except (OSError, EOFError) as error:
        raise unreadable(first.path, error) from error
    # The last may be cut off.
    rows = [row for line in lines[:-1] or lines if (row := row_of(line)) is not None]
    lacking = [column for column in condition.columns if not any(has(row, column) for row in rows)]
    if rows and lacking and all(condition.verdict(row) == UNDECIDED for row in rows):
        names = [*dict.fromkeys(name for row in rows for name in row)]
        problem, hint = unknown_column(lacking[0], names)
        raise SourceError(
            f"the first {len(rows):,} rows of {first.path!r} have {problem}; no row would be used",
            hint=f"{hint}; where only later rows have it: {lacking[0]} is not null and (...)",
        )


def _losses(totals: Counts) -> str:
    """What became of the rows, where none became a document."""
    ways = {
        "empty": totals.empty,
        "rejected": totals.rejected,
        "left out by --where": totals.filtered,
        "left out by --limit": totals.skipped,
        "forgotten": totals.forgotten,
    }
    found = listed([f"{number:,} {way}" for way, number in ways.items() if number])
    return f", of {count(totals.rows, 'row')}: {found}" if found else ", which has no rows"


def _some(paths: Sequence[str]) -> str:
    """The first of some files."""
    return ", ".join(map(repr, paths[:3])) + (", ..." if paths[3:] else "")


def _building(work: Work) -> Building:
    """What the store will be made of: for those who read it meanwhile."""
    counts = itertools.chain(work.plan.num_units, itertools.repeat(0))
    return Building(
        identity=work.request.identity,
        sources=tuple(
            PlannedSource.of(file.path, size=file.size, version=file.version, units=units)
            for file, units in zip(work.plan.files, counts, strict=False)
        ),
    )


def _doubtful_names(work: Work) -> str | None:
    """What a person should know where names of files tell a split that their rows do not go to."""
    discovery, config = work.discovery, work.request.identity.config
    held_out = sorted(split for split in discovery.told if split not in (None, layouts.TRAIN))
    if config.get("split_by_name") is True or not held_out:
        return None
    members = (each for file in discovery.files for each in file.members or (file,))
    example = next(each.path for each in members if discovery.splits.get(each.path) in held_out)
    if len(discovery.told) == 1:
        return (
            f"all files are called {held_out[0]}, as {example!r} is, and are the split train of "
            "this store; --split-by-name makes them its split "
            f"{held_out[0]}"
        )
    if work.settings.options.split_by_name is False:
        return None
    return (
        f"files that are called {listed(held_out)}, such as {example!r}, are in the split train: "
        "the store was begun before names told splits, and is kept as it is; --rebuild with "
        "--split-by-name makes splits of them"
    )


def _doubtful_end(work: Work) -> str | None:
    """What a person should know where plain texts end as turns of a chat do."""
    eos = work.request.identity.eos
    if eos is None or work.settings.options.format != "text":
        return None
    from tokenmill.supervised.chat import ends_turns

    if not ends_turns(work.request.files, eos.token):
        return None
    return (
        f"documents end in {eos.token!r}, which ends a turn of a chat in this tokenizer: a model "
        "that is trained on them learns to end its turn where a document ends"
    )


def _differences(asked: Mapping[str, Json], before: Mapping[str, Json]) -> list[str]:
    """Names of the options that have other values."""
    found = []
    for name, value in asked.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            found += _differences(value, old)
        elif value != old:
            found.append(name)
    return found


# -------------------------------------------------------------------------------------------------
# The verb `build`: raw text in, a checked store out. The same call again resumes.


@with_options(BuildOptions)
def build(options: BuildOptions) -> BuildResult:
    """Turn text into a store of tokens, or update an existing one.

    `inputs` are files, or rows that the program has: a `datasets.Dataset`, a table of pandas,
    polars or pyarrow, an iterable of dicts or texts, or a mapping of names (of splits) to these.
    Rows are written into a file in the store's folder first, which goes at the end; the same rows
    given again resume.

    `eos` and `bos` take a token, True for the tokenizer's own, or False for none. `prune` drops
    what files no longer among the inputs left in the store; `rebuild` drops what was built with
    another tokenizer or configuration. Without them such a store is refused. `verify_sources` reads
    all files of units that are complete, and builds those again whose bytes are others. `monitor`
    names a file for the time line of the run (see `tokenmill.monitor`).

    `template` makes a text of several fields. `format="chat"` and `format="prompt-completion"` make
    stores with masks, which say what counts for the loss; docs/supervised.md tells all of it.

    `runner="ray"` works on a Ray cluster: the one at `address` ("auto" for the one that runs here),
    or one on this machine. `part="3/64"` builds the units of one of 64 independent parts, anywhere,
    and writes no manifest; `tokenmill.finish` does, when all parts are done.
    """
    run = make_run(options)
    is_plain = options.monitor is None and options.profile is None
    try:
        return run.run() if is_plain else progress.run_recorded(run)
    except TokenmillError as error:
        if run.rows is not None and run.rows.are_used_up:
            again = "the rows came from an iterator, which is used up: make it anew to go on"
            error.hint = f"{error.hint}; {again}" if error.hint else again
        raise
    finally:
        run.close()


def make_run(options: BuildOptions) -> BuildRun:
    """A run that can be carried out or estimated."""
    rows = rows_in(options.inputs)
    if rows is not None:
        _refuse_rows(options)
    inputs = [] if rows is not None else [corpus_files(each) for each in as_list(options.inputs)]
    part = planning.parse_part(options.part) if options.part else None
    layout = layouts.open_layout(options.out)
    if part and options.prune:
        raise UsageError(
            "a part of a build cannot prune: it does not see the units of the other parts",
            hint="give --prune to tokenmill finish, after all parts",
        )
    if part:
        corner = f"part-{part.number}-of-{part.of}-{secrets.token_hex(4)}"
        layout = dataclasses.replace(layout, corner=corner)
    return BuildRun(inputs=inputs, layout=layout, options=options, part=part, rows=rows)


def _refuse_rows(options: BuildOptions) -> None:
    """UsageError for what takes files, where rows of this program are given."""
    others = {
        "part": options.part,
        "runner='ray'": options.runner == "ray",
        "include": options.include,
        "exclude": options.exclude,
        "plan": isinstance(options, PlanOptions),
    }
    if named := [name for name, is_given in others.items() if is_given]:
        raise UsageError(
            f"{named[0]} is for files, and the input is rows that this program has",
            hint="write them into files first, such as: dataset.to_parquet('rows.parquet')",
        )


# -------------------------------------------------------------------------------------------------
# The verb `finish`: the parts of a build become a store.
#
# It plans the units once more, as a build does, and builds none: a unit that is not there is named
# with the part that has it. What the parts were asked for is in their records.

_RUN_WHERE = (
    "run it in the folder where the parts ran, or name the inputs: tokenmill finish STORE INPUT..."
)


@with_options(FinishOptions)
def finish(asked: FinishOptions) -> BuildResult:
    """Check that every unit of a build in parts is there, and write the manifest.

    The inputs are taken from what the parts left in the store; name them only where they hold keys.
    `prune` drops what files left that are no longer among them.
    """
    layout = layouts.open_layout(asked.store)
    try:
        layout.upstream.begin()
        records = facts.read_records(layout)
        if not records:
            return _nothing_to_finish(layout, prune=asked.prune)
        return _run(layout, records, asked).run()
    except SourceError as error:
        raise SourceError(error.message, hint=_RUN_WHERE) from error
    finally:
        layout.upstream.close()


def _run(layout: StoreLayout, records: list[PartRecord], asked: FinishOptions) -> BuildRun:
    record = _agreed(records)
    names = as_list(asked.inputs) or [*(record.inputs or ())]
    if not names:
        raise UsageError(
            "the parts did not keep the names of their inputs, since those hold a key",
            hint="name them: tokenmill finish STORE INPUT...",
        )
    kept = {path.name for path in layout.tokenizer.glob("*")}
    chat_template = layout.tokenizer / CHAT_TEMPLATE
    try:
        options = BuildOptions.of_kept(
            record.config,
            inputs=names,
            # The tokenizer `bytes` is the one that has no files.
            tokenizer=layout.tokenizer if kept - {CHAT_TEMPLATE} else "bytes",
            chat_template=str(chat_template) if CHAT_TEMPLATE in kept else None,
            out=layout.name,
            workers=1,
            prune=asked.prune,
            allow_empty=asked.allow_empty,
            on_progress=asked.on_progress,
        )
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"the parts were built by another version of tokenmill: {error}",
            hint="finish with the version that built them",
        ) from error
    run = BuildRun(inputs=names, layout=layout, options=options, finishes=record.parts)
    # Parts on machines of other sizes may differ in it; a unit that it matters for is missing.
    run.document_bytes = max(each.max_document_bytes for each in records)
    return run


def _agreed(records: list[PartRecord]) -> PartRecord:
    """What all parts were asked for; StoreError where they were not asked for the same."""
    first = records[0]
    for other in records[1:]:
        asked, also = ((each.fingerprint, each.config, each.inputs) for each in (first, other))
        if asked != also:
            raise StoreError(
                f"part {first.part}/{first.parts} and part {other.part}/{other.parts} were started "
                "with different inputs, options or tokenizers; together they would be neither",
                hint="run all parts with the same command, --part left out of the comparison",
            )
    # After a change of their number, most of the records are of the parts that were run last.
    return max(records, key=lambda each: (sum(r.parts == each.parts for r in records), each.parts))


def _nothing_to_finish(layout: StoreLayout, *, prune: bool) -> BuildResult:
    """The result for a store that is finished, whose inputs nobody knows any more.

    StoreError where no part was ever built.
    """
    if not layout.manifest.exists():
        if layout.shards.is_dir():
            raise StoreError(
                f"{layout.name!r} is not built in parts, and its build has not finished",
                hint="run that build again with the same command: it resumes",
            )
        raise StoreError(
            f"there is no store at {layout.name!r}, and no part of one",
            hint="check the name; parts are built with: tokenmill build ... -o "
            f"{shlex.quote(layout.name)} --part 1/64",
        )
    if prune:
        raise UsageError(
            f"{layout.name!r} is finished, and what its parts were asked for is kept no longer: "
            "finish cannot tell which files are gone",
            hint="run one of the parts again, which looks at the inputs, then finish --prune; or "
            "the build without --part, with --prune",
        )
    manifest = facts.read_manifest(layout.root)
    found: dict[str, Any] = {"store": layout.name, "units_total": len(manifest.units)}
    return progress.make_result(manifest, manifest.identity, **found, seconds=0.0)


# -------------------------------------------------------------------------------------------------
# The verb `plan`: what a build would do and cost, before it runs.
#
# The units are the real ones. Tokens, disk and time come from encoding a few megabytes of the input
# with the engine that the build would use, in this process.

_SAMPLE_BYTES = 4 << 20
_SAMPLE_UNITS = 8
_NO_STORE = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWorkers:
    """What a build would take with so many workers."""

    workers: int
    estimated_seconds: float
    estimated_memory_bytes: int
    """Without large documents; a fast engine's cache may grow beyond it, up to the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan(Told):
    """What a build would do; numbers with `estimated` come from a sample."""

    store: str
    files: int
    input_bytes: int
    """As the files are on disk."""
    units_to_build: int | None
    """None where compressed files hide it."""
    units_complete: int
    bytes_to_build: int
    """Text in the files to be worked on; an estimate where they are compressed."""
    workers: int
    memory_budget_bytes: int
    memory_per_worker_bytes: int
    max_document_bytes: int
    dtype: str
    vocab_size: int
    engine: str
    engine_note: str | None
    eos: str | None
    bos: str | None
    sample_bytes: int
    sample_documents: int
    sample_rejected: int
    sample_lost_bytes: int
    """Of the sample's text, what the tokenizer does not know."""
    sample_text_bytes: int
    unknown: UnknownFacts | None
    """What becomes of such text, and which it is; None where the sample has none."""
    max_unknown: float
    estimated_documents: int
    estimated_tokens: int
    estimated_disk_bytes: int
    estimated_seconds: float
    bytes_per_token: float
    skipped_files: tuple[tuple[str, str], ...]
    by_workers: tuple[PlannedWorkers, ...] = ()

    def __repr__(self) -> str:
        return (
            f"BuildPlan: about {count(self.estimated_documents, 'document')},"
            f" {count(self.estimated_tokens, 'token')},"
            f" {duration(self.estimated_seconds)}"
        )


@with_options(PlanOptions)
def plan(options: PlanOptions) -> BuildPlan:
    """What `build` with the same arguments would do and cost; writes nothing."""
    run = make_run(dataclasses.replace(options, out=options.out or _NO_STORE))
    try:
        return _estimate(run)
    finally:
        run.close()


def _estimate(run: BuildRun) -> BuildPlan:
    work = run.prepare(run.discover())
    identity, plan, memory = work.request.identity, work.plan, work.settings.memory
    encoder = load_encoder(
        work.request.describe(),
        identity,
        choice=run.options.engine,
        whole_bytes=planning.whole_bytes(memory.budget),
    )
    # A file that the build would have no room for can still be looked into here.
    options = dataclasses.replace(
        work.settings.source,
        batch_bytes=_SAMPLE_BYTES // _SAMPLE_UNITS,
        room_bytes=SourceOptions().room_bytes,
    )
    files = work.discovery.files
    tasks = plan.tasks or [Task(file=file, first=0) for file in files]
    sample, rate, found = _encode_sample(tasks, options, encoder)
    unknown, finder = None, encoder.unknown
    if finder is not None and sample["lost_bytes"]:
        unknown = UnknownFacts.of(finder.unknown.token, finder.unknown.id, found)
    share = plan.bytes_to_do / max(sample["input_bytes"], 1)
    if plan.rows_to_do is not None:
        share = plan.rows_to_do / max(sample["rows"], 1)
    bytes_to_do = share * sample["input_bytes"]
    seconds = bytes_to_do / rate
    documents, tokens = (round(sample[name] * share) for name in ("documents", "tokens"))
    dtype = token_dtype(identity.tokenizer.vocab_size)
    size = sum(file.bytes for file in identity.tokenizer.files.values())
    has_cache = encoder.engine.name != encoder.engine.reference.name
    most = max(memory.workers, run.options.workers or physical_cores())
    by_workers = tuple(
        PlannedWorkers(
            workers=workers,
            estimated_seconds=seconds / min(workers, plan.units_to_do or workers),
            estimated_memory_bytes=planning.memory_needed(
                workers, tokenizer_bytes=size, has_cache=has_cache
            ),
        )
        for workers in planning.worker_counts(most)
    )
    return BuildPlan(
        store=run.layout.name,
        files=sum(len(file.members) or 1 for file in files),
        input_bytes=sum(file.size for file in files),
        units_to_build=plan.units_to_do,
        units_complete=len(plan.done),
        bytes_to_build=round(bytes_to_do),
        workers=memory.workers,
        memory_budget_bytes=memory.budget,
        memory_per_worker_bytes=memory.worker_bytes,
        max_document_bytes=work.settings.source.max_document_bytes,
        dtype=dtype.name,
        vocab_size=identity.tokenizer.vocab_size,
        engine=encoder.engine.name,
        engine_note=encoder.engine.refusal,
        eos=None if identity.eos is None else identity.eos.token,
        bos=None if identity.bos is None else identity.bos.token,
        sample_bytes=sample["input_bytes"],
        sample_documents=sample["documents"],
        sample_rejected=sample["rejected"],
        sample_lost_bytes=sample["lost_bytes"],
        sample_text_bytes=sample["text_bytes"],
        unknown=unknown,
        max_unknown=run.options.max_unknown,
        estimated_documents=documents,
        estimated_tokens=tokens,
        estimated_disk_bytes=tokens * (dtype.itemsize + identity.mask) + index_bytes(documents),
        estimated_seconds=seconds / min(memory.workers, plan.units_to_do or memory.workers),
        bytes_per_token=sample["text_bytes"] / max(sample["tokens"], 1),
        skipped_files=work.discovery.not_read,
        by_workers=by_workers,
    )


def _encode_sample(
    tasks: Sequence[Task], options: SourceOptions, encoder: RowEncoder
) -> tuple[Counter[str], float, Counter[str]]:
    """What a build would make of a few megabytes, spread over what is to be done; bytes a second.

    And what of it the tokenizer does not know. The rate is that of the later half: an engine that
    keeps what it has seen begins slowly.
    """
    sample: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    spent: list[tuple[int, float]] = []
    number = min(_SAMPLE_UNITS, len(tasks))
    for task in (tasks[place * len(tasks) // number] for place in range(number)):
        most_bytes = sample["input_bytes"] + _SAMPLE_BYTES // number
        with closing(open_source(task.file, options)) as source:
            unit = next(task.units(source, plan_units(task.file, options)), None)
            last = sys.maxsize if unit is None else task.row_limits.get(unit.index, sys.maxsize)
            start = time.perf_counter()
            for batch in source.read(unit) if unit is not None else ():
                used = np.flatnonzero(batch.rows < last)
                left_out = int(np.count_nonzero(batch.left_out < last))
                rejected = sum(reject.row < last for reject in batch.rejects)
                texts = batch.texts if len(used) == len(batch.rows) else batch.texts.take(used)
                encoding = Encoding(keeps_texts=False, unknown_text=unknown)
                made = encoder.encode(texts, batch.rows[used], encoding)
                lengths = encoder.framed(made).lengths
                lengths, limit = lengths[lengths > 0], encoder.shape.piece_tokens
                pieces = lengths if limit is None else cut_lengths(lengths, limit)[0]
                if encoder.shape.has_pairs:
                    pieces = np.repeat(lengths, 2)
                rows = len(used) + rejected + left_out
                num_bytes = round(batch.num_bytes * rows / max(batch.num_rows, 1))
                sample["rows"] += rows
                sample["input_bytes"] += num_bytes
                sample["text_bytes"] += int(made.sizes.sum())
                sample["lost_bytes"] += 0 if made.lost is None else int(made.lost.num_bytes.sum())
                sample["documents"] += len(pieces)
                sample["rejected"] += rejected + len(made.rejects)
                sample["tokens"] += int(lengths.sum())
                begun, start = start, time.perf_counter()
                spent.append((num_bytes, start - begun))
                if sample["input_bytes"] >= most_bytes or rows < batch.num_rows:
                    break
    num_bytes, seconds = map(sum, zip(*spent[len(spent) // 2 :], strict=True)) if spent else (1, 1)
    return sample, max(num_bytes, 1) / max(seconds, 1e-9), unknown
