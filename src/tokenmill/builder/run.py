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
    MemoryPlan,
    default_budget,
    divide_budget,
    max_document_bytes,
)
from tokenmill.builder.messages import WorkerSettings
from tokenmill.builder.monitor import Monitor
from tokenmill.builder.outcome import make_result, profile_of, run_record
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
from tokenmill.store.receipt import rewrite_receipt
from tokenmill.store.runs import append_run

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from tokenmill.builder.lengths import RowLengths
    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.config import BuildConfig, BuildResources, RowShape
    from tokenmill.runners import Runner
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
}


def fields_of(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields that rows are read for, and whether all must be there; none for plain text."""
    if shape is None:
        return (), True
    from tokenmill.supervised.reading import needed_fields

    return needed_fields(shape)


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

    def run(self) -> BuildResult:
        """Carry out the build."""
        self.started = time.monotonic()
        self.profile: dict[str, object] = {}
        discovery = self.discover()
        self._check_folder()
        with StoreLock(self.layout) as lock:
            request = self.request()
            memory = self.memory_plan(request)
            options = self.source_options(batch_bytes=memory.batch_bytes)
            rules = PlanRules(
                options=options,
                config=request.identity.fingerprint,
                limit=self.config.limit,
                workers=memory.workers,
            )
            plan = plan_work(self.layout, discovery.files, rules=rules)
            self._refuse_mixtures(plan, request)
            if (manifest := self._finished(plan, request)) is not None:
                return self._result(manifest, discovery, plan, memory, monitor=None)
            self.lock_token = lock.token
            return self._work(plan, request, memory, options, discovery)

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
            max_document_bytes=max_document_bytes(budget),
        )

    def memory_plan(self, request: Request) -> MemoryPlan:
        """Divide the budget among the workers that were asked for, or as many as fit."""
        files = request.identity.tokenizer.files
        most = 1 if self.resources.serial else self.resources.workers or physical_cores()
        return divide_budget(
            self.resources.memory or default_budget(),
            tokenizer_bytes=sum(facts.bytes for facts in files.values()),
            most_workers=most,
            least_workers=most if self.resources.workers else 1,
        )

    def _check_folder(self) -> None:
        """A folder with other things in it is no place for a store."""
        root = self.layout.root
        if not root.exists():
            return
        if not root.is_dir():
            raise UsageError(
                f"{str(root)!r} is a file; a store is a folder", hint="choose another --out"
            )
        known = {"shards", "tokenmill.json", "tokenizer", ".lock"}
        names = {entry.name for entry in root.iterdir()}
        if names and not names & known:
            raise StoreError(
                f"the folder {str(root)!r} holds other things ({min(names)!r}, ...) and no "
                "store; a build would mix with them",
                hint="choose a new or empty folder with --out",
            )

    def _refuse_mixtures(self, plan: WorkPlan, request: Request) -> None:
        root = self.layout.root
        if plan.other_config and not self.rebuild:
            difference = describe_difference(self.layout, request.identity)
            raise StoreError(
                f"the store {str(root)!r} has {plan.other_config:,} units of another build "
                f"({difference}); adding to them would mix tokens of two kinds in one store",
                hint="choose another --out, or replace the old units with --rebuild",
            )
        if plan.foreign and not self.prune:
            names = ", ".join(map(repr, plan.foreign[:3])) + (", ..." if plan.foreign[3:] else "")
            raise StoreError(
                f"the store {str(root)!r} has {len(plan.foreign_units):,} units of files that are "
                f"not among the inputs ({names}); a store holds exactly what its command names",
                hint="name those files too, choose another --out, or drop their units with --prune",
            )

    def _finished(self, plan: WorkPlan, request: Request) -> Manifest | None:
        """The manifest of a store that already is what was asked for."""
        if plan.tasks or plan.stale or plan.foreign or plan.touched:
            return None
        try:
            manifest = read_manifest(self.layout.root)
        except StoreError:
            return None
        units = {unit.name for unit in manifest.units}
        same = manifest.identity == request.identity and units == set(plan.done)
        return manifest if same and not self.layout.tmp.exists() else None

    def _work(
        self,
        plan: WorkPlan,
        request: Request,
        memory: MemoryPlan,
        options: SourceOptions,
        discovery: Discovery,
    ) -> BuildResult:
        self.layout.create()
        if plan.rebuilt or plan.stale or plan.foreign or plan.touched:
            remove_manifest(self.layout)
        keep_tokenizer(self.layout, request)
        for receipt, file in plan.touched:
            facts = dataclasses.replace(receipt.source, version=file.version)
            renewed = dataclasses.replace(receipt, source=facts)
            rewrite_receipt(self.layout, renewed)
            plan.done[receipt.unit.name] = renewed
        sweep(self.layout, plan.done.values())
        monitor = Monitor(
            budget=memory.budget,
            bytes_total=plan.bytes_to_do,
            units_total=plan.units_to_do,
            on_progress=self.on_progress,
            num_workers=min(memory.workers, len(plan.tasks)),
            started=self.started,
        )
        with monitor:
            if plan.tasks:
                self._run_tasks(plan, request, memory, options, monitor)
            monitor.tell("finishing")
            units = self._units_in_order(plan, monitor)
            manifest = assemble_manifest(self.layout, request.identity, units=units)
            write_manifest(self.layout, manifest)
            monitor.tell("done")
        result = self._result(manifest, discovery, plan, memory, monitor=monitor)
        append_run(self.layout, run_record(result))
        self.profile = profile_of(result, monitor)
        return result

    def _run_tasks(
        self,
        plan: WorkPlan,
        request: Request,
        memory: MemoryPlan,
        options: SourceOptions,
        monitor: Monitor,
    ) -> None:
        identity = request.identity
        settings = WorkerSettings(
            store=str(self.layout.root),
            lock_token=self.lock_token,
            config=identity.fingerprint,
            options=options,
            tokenizer=describe_kept(self.layout, request),
            special_tokens=self.config.special_tokens,
            engine=self.resources.engine,
            vocab_size=identity.tokenizer.vocab_size,
            bos_id=identity.bos_id,
            eos_id=identity.eos_id,
            val_fraction=self.config.val_fraction,
            max_reject_fraction=self.config.max_reject_fraction,
            memory_bytes=memory.worker_bytes,
            shape=self.config.shape,
        )
        job = Job(function="tokenmill.builder.worker:start_worker", payload=settings)
        try:
            self._runner(memory).run(job, plan.tasks, on_event=monitor.on_event)
        finally:
            # The workers are gone; what one that was killed had begun is of no use to anyone.
            shutil.rmtree(self.layout.tmp, ignore_errors=True)

    def _runner(self, memory: MemoryPlan) -> Runner:
        if self.resources.serial:
            return SerialRunner()
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

    def _result(
        self,
        manifest: Manifest,
        discovery: Discovery,
        plan: WorkPlan,
        memory: MemoryPlan,
        *,
        monitor: Monitor | None,
    ) -> BuildResult:
        return make_result(
            manifest,
            store=str(self.layout.root),
            discovery=discovery,
            plan=plan,
            memory=memory,
            monitor=monitor,
            seconds=time.monotonic() - self.started,
            lengths=self._lengths(),
        )

    def _lengths(self) -> RowLengths | None:
        shape = self.config.shape
        if shape is None or not (shape.has_mask or shape.max_length):
            return None
        from tokenmill.builder.lengths import measure_rows

        return measure_rows(self.layout.root, shape)
