"""One build, step by step.

    discover the input  ->  who the store is  ->  what is left to do  ->  workers  ->  manifest

Everything before the workers start only reads. From then on each unit commits by itself, and the
manifest, written last from the receipts, makes the store complete.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.builder.identity import (
    Request,
    describe_difference,
    describe_kept,
    keep_tokenizer,
    request_identity,
)
from tokenmill.builder.memory import (
    UPLOAD_BYTES,
    MemoryPlan,
    default_budget,
    divide_budget,
    max_document_bytes,
)
from tokenmill.builder.messages import WorkerSettings
from tokenmill.builder.monitor import Monitor
from tokenmill.builder.outcome import held_by, make_result, profile_of, run_record
from tokenmill.builder.plan import PlanRules, WorkPlan, plan_work
from tokenmill.errors import StoreError, UsageError
from tokenmill.runners import Job, LocalRunner, SerialRunner
from tokenmill.runners.cores import physical_cores, pinning
from tokenmill.sources import discover
from tokenmill.sources.base import MEGABYTE, SourceOptions
from tokenmill.store.assemble import assemble_manifest
from tokenmill.store.commit import remove_manifest, sweep
from tokenmill.store.layout import StoreLayout, unit_name, unit_prefix
from tokenmill.store.lock import StoreLock
from tokenmill.store.manifest import read_manifest, write_manifest
from tokenmill.store.parts import read_records, remove_records
from tokenmill.store.place import refuse_other_things
from tokenmill.store.receipt import read_receipt, rewrite_receipt
from tokenmill.store.runs import append_runs

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from tokenmill.builder.lengths import RowLengths
    from tokenmill.builder.parts import Part
    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.config import BuildConfig, BuildResources, RowShape
    from tokenmill.runners import Runner
    from tokenmill.runners.ray import RayCluster
    from tokenmill.sources import Discovery
    from tokenmill.store.manifest import Manifest

    PathInput = str | os.PathLike[str]

_WORKER_ENVIRONMENT = {
    # One thread per worker: the workers are the parallelism.
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # glibc gives each thread an arena of its own, and none of them returns what it once held.
    "MALLOC_ARENA_MAX": "2",
    # Arrow's allocator would map a gigabyte at once, and a limit could not tell what is used.
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    # A stack for each of eight threads would be counted too.
    "ARROW_IO_THREADS": "2",
}


def fields_of(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields that rows are read for, and whether all must be there; none for plain text."""
    if shape is None:
        return (), True
    from tokenmill.supervised.reading import needed_fields

    return needed_fields(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a build found out before it writes anything."""

    discovery: Discovery
    request: Request
    memory: MemoryPlan
    options: SourceOptions
    plan: WorkPlan


@dataclass(kw_only=True)
class BuildRun:
    """One call of `build`: what it was asked for, and the steps that carry it out."""

    inputs: list[PathInput]
    tokenizer: PathInput
    layout: StoreLayout
    config: BuildConfig
    resources: BuildResources
    prune: bool
    rebuild: bool
    on_progress: Callable[[Progress], None] | None
    chat_template: str | None = None
    """A file with the template for chats; None takes the tokenizer's own."""
    document_bytes: int | None = None
    """Largest document, where it does not follow from this machine's budget but was said."""
    verify_sources: bool = False
    """Read every source that the store has units of, and compare."""
    keeps_reports: bool = False
    """Remember what each unit took, for a profile."""
    _cluster: RayCluster | None = None

    def run(self) -> BuildResult:
        """Carry out the build."""
        self.started = time.monotonic()
        self.profile: dict[str, object] = {}
        discovery = self.discover()
        self.check_folder()
        self.connect()
        with StoreLock(self.layout) as lock:
            work = self.prepare(discovery)
            self.refuse(work)
            if (manifest := self._finished(work)) is not None:
                return self._result(manifest, work, monitor=None)
            self.lock_token = lock.token
            return self._work(work)

    def prepare(self, discovery: Discovery, *, part: Part | None = None) -> Work:
        """What is to be done; nothing is written yet."""
        self.layout.upstream.begin()
        request = self.request()
        memory = self.memory_plan(request)
        options = dataclasses.replace(
            self.source_options(batch_bytes=memory.batch_bytes), room_bytes=memory.room_bytes
        )
        rules = PlanRules(
            options=options,
            config=request.identity.fingerprint,
            limit=self.config.limit,
            workers=memory.workers,
            verify_sources=self.verify_sources,
            part=part,
        )
        plan = plan_work(self.layout, discovery.files, rules=rules)
        return Work(discovery=discovery, request=request, memory=memory, options=options, plan=plan)

    def discover(self) -> Discovery:
        """The input files, all of a kind that the rows can come from."""
        discovery = discover(self.inputs, self.source_options())
        if self.config.shape is not None:
            from tokenmill.supervised.reading import refuse_plain_text

            refuse_plain_text(discovery.files, self.config.shape)
        return discovery

    def request(self) -> Request:
        """Tokenizer and configuration, resolved."""
        return request_identity(
            self.tokenizer, self.config, self.layout, chat_template=self.chat_template
        )

    def source_options(self, *, batch_bytes: int = 8 * MEGABYTE) -> SourceOptions:
        """How the input is read; document sizes follow from the budget alone."""
        budget = self.resources.memory or default_budget()
        fields, needs_all = fields_of(self.config.shape)
        return SourceOptions(
            text_field=self.config.text_field,
            fields=fields,
            needs_all_fields=needs_all,
            separator=self.config.separator,
            unit_bytes=self.config.unit_bytes,
            batch_bytes=batch_bytes,
            max_document_bytes=self.document_bytes or max_document_bytes(budget),
        )

    def memory_plan(self, request: Request) -> MemoryPlan:
        """Divide the budget among the workers that were asked for, or as many as fit.

        On a cluster the budget is that of a node, and the workers are those of all nodes.
        """
        files, asked = request.identity.tokenizer.files, self.resources.workers
        cluster = self.cluster() if self.resources.runner == "ray" else None
        most = 1 if self.resources.serial else asked or physical_cores()
        if cluster is not None:
            most = cluster.node_cpus()
        plan = divide_budget(
            self.resources.memory or default_budget(),
            tokenizer_bytes=sum(facts.bytes for facts in files.values()),
            most_workers=most,
            least_workers=most if asked and cluster is None else 1,
            upload_bytes=UPLOAD_BYTES if self.layout.upstream.url else 0,
        )
        if cluster is None:
            return plan
        cpus = most // plan.workers
        slots = cluster.slots(cpus)
        return dataclasses.replace(plan, workers=min(asked or slots, slots), worker_cpus=cpus)

    def connect(self) -> None:
        """Reach the cluster, where there is one to work on, before anything is written."""
        if self.resources.runner == "ray":
            self.cluster()

    def cluster(self) -> RayCluster:
        """The Ray cluster that the units are worked on by; the first call connects to it."""
        from tokenmill.runners.ray import RayCluster

        if self._cluster is None:
            address, cpus = self.resources.address, self.resources.workers or physical_cores()
            self._cluster = RayCluster(address, local_cpus=cpus)
        return self._cluster

    def close(self) -> None:
        """Let go of the cluster and of what a store behind a URL needs here."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        self.layout.upstream.close()

    def check_folder(self) -> None:
        """A folder with other things in it is no place for a store."""
        root = self.layout.root
        if not root.exists():
            return
        if not root.is_dir():
            raise UsageError(
                f"{str(root)!r} is a file; a store is a folder", hint="choose another --out"
            )
        refuse_other_things({entry.name for entry in root.iterdir()}, shown=str(root))

    def refuse(self, work: Work) -> None:
        """Stop before two kinds of tokens, or files that nobody asked for, stand in one store."""
        plan, request, store = work.plan, work.request, self.layout.name
        if plan.other_config and not self.rebuild:
            difference = describe_difference(self.layout, request.identity)
            raise StoreError(
                f"the store {store!r} has {plan.other_config:,} units of another build "
                f"({difference}); adding to them would mix tokens of two kinds in one store",
                hint="choose another --out, or replace the old units with --rebuild",
            )
        if plan.foreign and not self.prune:
            names = ", ".join(map(repr, plan.foreign[:3])) + (", ..." if plan.foreign[3:] else "")
            raise StoreError(
                f"the store {store!r} has {len(plan.foreign_units):,} units of files that are "
                f"not among the inputs ({names}); a store holds exactly what its command names",
                hint="name those files too, choose another --out, or drop their units with --prune",
            )

    def _finished(self, work: Work) -> Manifest | None:
        """The manifest of a store that already is what was asked for."""
        plan = work.plan
        if plan.tasks or plan.stale or plan.foreign or plan.touched:
            return None
        try:
            manifest = read_manifest(self.layout.root)
        except StoreError:
            return None
        units = {unit.name for unit in manifest.units}
        same = manifest.identity == work.request.identity and units == set(plan.done)
        left = self.layout.tmp.exists() or self.layout.parts.exists()
        return manifest if same and not left else None

    def _work(self, work: Work) -> BuildResult:
        plan = work.plan
        self.settle(work)
        sweep(self.layout, plan.done)
        with self.monitor(work) as monitor:
            if plan.tasks:
                self.run_tasks(work, monitor)
            monitor.tell("finishing")
            units = self._units_in_order(plan, monitor)
            manifest = assemble_manifest(self.layout, work.request.identity, units=units)
            write_manifest(self.layout, manifest)
            monitor.tell("done")
        result = self._result(manifest, work, monitor=monitor)
        of_parts = [run for record in read_records(self.layout) for run in record.runs]
        append_runs(self.layout, [*of_parts, run_record(result)])
        remove_records(self.layout)
        self.profile = profile_of(result, monitor)
        return result

    def settle(self, work: Work) -> None:
        """What comes before the first unit: folders, the tokenizer, receipts of touched files."""
        plan = work.plan
        self.layout.create()
        if plan.rebuilt or plan.stale or plan.foreign or plan.touched:
            remove_manifest(self.layout)
        keep_tokenizer(self.layout, work.request)
        for name, file in plan.touched:
            receipt = read_receipt(self.layout, name)
            facts = dataclasses.replace(receipt.source, version=file.version)
            rewrite_receipt(self.layout, dataclasses.replace(receipt, source=facts))

    def monitor(self, work: Work) -> Monitor:
        """The eye on the workers of this run."""
        return Monitor(
            budget=work.memory.budget,
            bytes_total=work.plan.bytes_to_do,
            units_total=work.plan.units_to_do,
            on_progress=self.on_progress,
            num_workers=min(work.memory.workers, len(work.plan.tasks)),
            keeps_reports=self.keeps_reports,
            started=self.started,
        )

    def _doubt(self, work: Work) -> str | None:
        """What a person should know about the masks that are made."""
        shape = self.config.shape
        if shape is None or shape.format != "chat" or shape.train_on == "all":
            return None
        from tokenmill.supervised.template_files import doubtful_header

        return doubtful_header(describe_kept(self.layout, work.request), shape)

    def run_tasks(self, work: Work, monitor: Monitor) -> None:
        """Have the workers build and commit every unit that is to be built."""
        if (doubt := self._doubt(work)) is not None:
            monitor.warn(doubt)
        memory, identity = work.memory, work.request.identity
        settings = WorkerSettings(
            store=str(self.layout.root),
            url=self.layout.upstream.url,
            corner=self.layout.corner,
            lock_token=self.lock_token,
            config=identity.fingerprint,
            options=work.options,
            tokenizer=describe_kept(self.layout, work.request),
            special_tokens=self.config.special_tokens,
            engine=self.resources.engine,
            vocab_size=identity.tokenizer.vocab_size,
            bos_id=identity.bos_id,
            eos_id=identity.eos_id,
            val_fraction=self.config.val_fraction,
            max_reject_fraction=self.config.max_reject_fraction,
            memory=memory,
            is_own_process=not self.resources.serial,
            shape=self.config.shape,
        )
        job = Job(function="tokenmill.builder.worker:start_worker", payload=settings)
        try:
            self._runner(memory).run(job, work.plan.tasks, on_event=monitor.on_event)
        finally:
            # The workers are gone; what one that was killed had begun is of no use to anyone.
            shutil.rmtree(self.layout.tmp, ignore_errors=True)

    def _runner(self, memory: MemoryPlan) -> Runner:
        if self.resources.serial:
            return SerialRunner()
        if self.resources.runner == "ray":
            from tokenmill.runners.ray import RayRunner

            return RayRunner(
                self.cluster(),
                num_workers=memory.workers,
                max_workers=self.resources.workers,
                cpus_per_task=memory.worker_cpus,
                environment=_WORKER_ENVIRONMENT,
            )
        return LocalRunner(
            memory.workers,
            environment=_WORKER_ENVIRONMENT,
            cores=pinning(memory.workers) if self.resources.pin else None,
        )

    def _units_in_order(self, plan: WorkPlan, monitor: Monitor) -> Iterator[str]:
        """All units, file by file in the order of the input, whoever built them and when."""
        built = {*monitor.units, *plan.done}
        by_file: dict[str, list[int]] = {}
        for name in built:
            prefix, _, number = name.rpartition("-")
            by_file.setdefault(prefix, []).append(int(number))
        for file in plan.files:
            for index in sorted(by_file.get(unit_prefix(file.path), ())):
                yield unit_name(file.path, index=index)

    def _result(self, manifest: Manifest, work: Work, *, monitor: Monitor | None) -> BuildResult:
        return make_result(
            held_by(manifest),
            store=self.layout.name,
            discovery=work.discovery,
            plan=work.plan,
            memory=work.memory,
            monitor=monitor,
            seconds=time.monotonic() - self.started,
            lengths=self._lengths(),
        )

    def _lengths(self) -> RowLengths | None:
        shape = self.config.shape
        if shape is None or not (shape.has_mask or shape.max_length):
            return None
        from tokenmill.builder.lengths import measure_rows

        return measure_rows(self.layout.upstream.url or self.layout.root, shape)
