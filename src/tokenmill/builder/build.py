"""The verb `build`: raw text in, a checked store out. The same call again resumes.

    discover the input  ->  who the store is  ->  what is left to do  ->  workers  ->  manifest

Everything before the workers start only reads. From then on each unit commits by itself, and the
manifest, written last from the receipts, makes the store complete.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from tokenmill._version import __version__
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
from tokenmill.builder.plan import PlanRules, WorkPlan, plan_work
from tokenmill.builder.progress import BuildResult, Progress
from tokenmill.config import BuildConfig, BuildResources, parse_size
from tokenmill.errors import StoreError, UsageError
from tokenmill.runners import Job, LocalRunner, SerialRunner
from tokenmill.runners.cores import physical_cores, pinning
from tokenmill.sources import discover
from tokenmill.sources.base import MEGABYTE, SourceOptions
from tokenmill.store.assemble import assemble_manifest
from tokenmill.store.commit import remove_manifest, sweep
from tokenmill.store.facts import Counts
from tokenmill.store.layout import StoreLayout, unit_name
from tokenmill.store.lock import StoreLock
from tokenmill.store.manifest import read_manifest, write_manifest
from tokenmill.store.receipt import rewrite_receipt
from tokenmill.store.runs import append_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Unpack

    from tokenmill.runners import Runner
    from tokenmill.sources import Discovery
    from tokenmill.store.manifest import Manifest
    from tokenmill.store.sealed import Json

    PathInput = str | os.PathLike[str]

_WORKER_ENVIRONMENT = {
    # One thread per worker: the workers are the parallelism.
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # glibc gives each thread an arena of its own, and none of them returns what it once held.
    "MALLOC_ARENA_MAX": "2",
}


def build(
    inputs: PathInput | Sequence[PathInput],
    *,
    tokenizer: PathInput,
    out: PathInput,
    text_field: str = "text",
    separator: str | None = None,
    workers: int | None = None,
    memory: int | str | None = None,
    limit: int | None = None,
    val: float = 0.0,
    eos: str | bool | None = None,
    bos: str | bool = False,
    special_tokens: str = "text",
    engine: str = "auto",
    max_rejects: float = 0.01,
    unit_bytes: int | str | None = None,
    prune: bool = False,
    rebuild: bool = False,
    pin: bool = False,
    serial: bool = False,
    profile: PathInput | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildResult:
    """Turn text into a store of tokens, or bring an existing one up to date.

    `eos` and `bos` take a token, True for the tokenizer's own, or False for none. `prune` drops
    what files no longer among the inputs left in the store; `rebuild` drops what was built with
    another tokenizer or configuration. Without them such a store is refused.
    """
    run = make_run(
        inputs,
        tokenizer=tokenizer,
        out=out,
        on_progress=on_progress,
        text_field=text_field,
        separator=separator,
        workers=workers,
        memory=memory,
        limit=limit,
        val=val,
        eos=eos,
        bos=bos,
        special_tokens=special_tokens,
        engine=engine,
        max_rejects=max_rejects,
        unit_bytes=unit_bytes,
        prune=prune,
        rebuild=rebuild,
        pin=pin,
        serial=serial,
    )
    result = run.run()
    if profile is not None:
        Path(profile).write_text(json.dumps(run.profile, indent=1) + "\n")
    return result


class BuildOptions(TypedDict, total=False):
    """The options of `build`, for functions that pass them on."""

    text_field: str
    separator: str | None
    workers: int | None
    memory: int | str | None
    limit: int | None
    val: float
    eos: str | bool | None
    bos: str | bool
    special_tokens: str
    engine: str
    max_rejects: float
    unit_bytes: int | str | None
    prune: bool
    rebuild: bool
    pin: bool
    serial: bool


def make_run(
    inputs: PathInput | Sequence[PathInput],
    *,
    tokenizer: PathInput,
    out: PathInput,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[BuildOptions],
) -> BuildRun:
    """Check the options and put them into a run that can be carried out or estimated."""
    eos, bos = options.get("eos"), options.get("bos", False)
    unit_bytes, memory = options.get("unit_bytes"), options.get("memory")
    config = BuildConfig(
        text_field=options.get("text_field", "text"),
        separator=options.get("separator"),
        unit_bytes=None if unit_bytes is None else parse_size(unit_bytes),
        special_tokens=options.get("special_tokens", "text"),
        eos=eos if isinstance(eos, str) else None,
        add_eos=eos is not False,
        add_bos=bos is not False,
        bos=bos if isinstance(bos, str) else None,
        val_fraction=options.get("val", 0.0),
        limit=options.get("limit"),
        max_reject_fraction=options.get("max_rejects", 0.01),
    )
    resources = BuildResources(
        workers=options.get("workers"),
        memory=None if memory is None else parse_size(memory),
        engine=options.get("engine", "auto"),
        pin=options.get("pin", False),
        serial=options.get("serial", False),
    )
    return BuildRun(
        inputs=_as_list(inputs),
        tokenizer=tokenizer,
        layout=StoreLayout(Path(out)),
        config=config,
        resources=resources,
        prune=options.get("prune", False),
        rebuild=options.get("rebuild", False),
        on_progress=on_progress,
    )


def _as_list(inputs: PathInput | Sequence[PathInput]) -> list[PathInput]:
    if isinstance(inputs, str | os.PathLike):
        return [inputs]
    return list(inputs)


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

    def run(self) -> BuildResult:
        """Carry out the build."""
        self.started = time.monotonic()
        self.profile: dict[str, object] = {}
        discovery = discover(self.inputs, self.source_options())
        self._check_folder()
        with StoreLock(self.layout) as lock:
            request = request_identity(self.tokenizer, self.config, self.layout)
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

    def source_options(self, *, batch_bytes: int = 8 * MEGABYTE) -> SourceOptions:
        """How the input is read; document sizes follow from the budget alone."""
        budget = self.resources.memory or default_budget()
        return SourceOptions(
            text_field=self.config.text_field,
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
        append_run(self.layout, _run_record(result))
        self.profile = _profile(result, monitor)
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
            bos_id=None if identity.bos is None else identity.bos.id,
            eos_id=None if identity.eos is None else identity.eos.id,
            val_fraction=self.config.val_fraction,
            max_reject_fraction=self.config.max_reject_fraction,
            memory_bytes=memory.worker_bytes,
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
            stem, _, number = name.rpartition("-")
            by_file.setdefault(stem, []).append(int(number))
        for file in plan.files:
            stem = unit_name(file.path, index=0).rpartition("-")[0]
            for index in sorted(by_file.get(stem, ())):
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
        reports = [] if monitor is None else list(monitor.units.values())
        ready = None if monitor is None else monitor.engine
        engines = manifest.engines
        stages = {} if monitor is None else monitor.stage_seconds
        return BuildResult(
            store=str(self.layout.root),
            nothing_to_do=monitor is None,
            splits=manifest.splits,
            totals=manifest.totals,
            built=sum((report.counts for report in reports), Counts()),
            units_total=len(manifest.units),
            units_built=len(reports),
            units_resumed=len(plan.done),
            engine=ready.name if ready else ", ".join(sorted({entry.name for entry in engines})),
            reference=ready.reference
            if ready
            else ", ".join(sorted({entry.reference for entry in engines})),
            engine_note=ready.note if ready else None,
            checked_documents=sum(entry.checked_documents for entry in engines),
            mismatches=sum(entry.mismatches for entry in engines),
            redone_units=tuple(report.unit for report in reports if report.engine.redone),
            workers=memory.workers,
            seconds=time.monotonic() - self.started,
            startup_seconds=0.0 if monitor is None else monitor.startup_seconds,
            stage_seconds=stages,
            limiting_stage=_limiting_stage(stages),
            peak_memory_bytes=0 if monitor is None else monitor.peak_bytes,
            memory_budget_bytes=memory.budget,
            dtype=manifest.identity.dtype.name,
            skipped_files=tuple((skipped.path, skipped.reason) for skipped in discovery.skipped),
            warnings=() if monitor is None else tuple(monitor.warnings),
        )


def _limiting_stage(stages: dict[str, float]) -> str | None:
    """Where most of the workers' time went; writing counts as far as it was waited for."""
    if not stages:
        return None
    held_up = {name: stages.get(name, 0.0) for name in ("read", "parse", "encode", "check")}
    held_up["write"] = stages.get("wait", 0.0)
    return max(held_up, key=lambda name: held_up[name])


def _run_record(result: BuildResult) -> dict[str, Json]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tokenmill": __version__,
        "host": platform.node(),
        "python": platform.python_version(),
        "workers": result.workers,
        "seconds": round(result.seconds, 3),
        "startup_seconds": round(result.startup_seconds, 3),
        "units_built": result.units_built,
        "input_bytes": result.built.input_bytes,
        "tokens": result.built.tokens,
        "peak_memory_bytes": result.peak_memory_bytes,
        "memory_budget_bytes": result.memory_budget_bytes,
        "stage_seconds": {name: round(value, 3) for name, value in result.stage_seconds.items()},
    }


def _profile(result: BuildResult, monitor: Monitor) -> dict[str, object]:
    return {
        "seconds": result.seconds,
        "startup_seconds": result.startup_seconds,
        "workers": result.workers,
        "stage_seconds": dict(result.stage_seconds),
        "limiting_stage": result.limiting_stage,
        "units": [
            {
                "unit": report.unit,
                "pid": report.pid,
                "input_bytes": report.counts.input_bytes,
                "tokens": report.counts.tokens,
                "stage_seconds": report.stage_seconds,
            }
            for report in monitor.units.values()
        ],
    }
