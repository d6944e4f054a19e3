"""Runs one way in a fresh process and watches the memory of it and its children from outside.

Memory is the sum of resident sets: a page that two processes share counts twice, as it does in the
budget of a build. Looking takes time as well, on machines with thousands of processes most of all,
so the pause between two looks is long beside the look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tokenmill import files
from tokenmill.builder.plan import (
    default_budget,
    divide_budget,
    max_document_bytes,
    usable_memory,
)
from tokenmill.diagnosis.values import Demand, Recommendation, WayResult
from tokenmill.diagnosis.ways import WAYS, WayJob, store_path, take_sample
from tokenmill.engines import REFERENCES
from tokenmill.engines.load import load_engine
from tokenmill.engines.locate import resolve_eos
from tokenmill.errors import MemoryBudgetError, TokenizerError, UsageError
from tokenmill.inspection import measure_lengths
from tokenmill.monitor import tree, tree_bytes
from tokenmill.runners.local import physical_cores
from tokenmill.store.reader import Store
from tokenmill.trainer.options import PEAKS, PRESETS, preset
from tokenmill.words import compact, count, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenmill.diagnosis.values import SampleFacts
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.inspection import Lengths
    from tokenmill.options import DiagnoseOptions


LOOK_SECONDS = 0.05
LOOK_SHARE = 0.03
"""Most of the time that looking may take."""
LATEST_SECONDS = 300.0
KEPT_POINTS = 240
# As the build starts its workers: the child sees the modules that this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.diagnosis.ways import run_job; run_job()"
)


def run_way(job: WayJob) -> WayResult:
    """Carry out the job; what goes wrong in it is told by the result."""
    with tempfile.TemporaryDirectory(dir=job.folder) as folder, tempfile.TemporaryFile() as err:
        told, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        told.write_text(json.dumps(dataclasses.asdict(job)))
        process = psutil.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(told), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
        try:
            memory = _watch(process)
        finally:
            if process.poll() is None:
                for member in reversed(tree(process)):
                    with contextlib.suppress(psutil.Error):
                        member.kill()
            process.wait()
        if answer.exists():
            result = WayResult(**json.loads(answer.read_text()))
        else:
            err.seek(0)
            lines = err.read().decode("utf-8", errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
            result = job.failed(f"its process ended with exit code {process.returncode}{said}")
    peak = max((num_bytes for _, num_bytes in memory), default=0)
    return dataclasses.replace(result, peak_memory_bytes=peak, memory=thin(memory))


def _watch(process: psutil.Popen) -> list[tuple[float, int]]:
    """Memory over time until the process ends."""
    started = time.monotonic()
    memory: list[tuple[float, int]] = []
    while process.poll() is None and time.monotonic() - started < LATEST_SECONDS:
        look = time.monotonic()
        memory.append((look - started, tree_bytes(process)))
        time.sleep(max(LOOK_SECONDS, (time.monotonic() - look) / LOOK_SHARE))
    return memory


def thin(points: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most so many points, the largest of each stretch, so that no peak is lost."""
    step = -(-len(points) // KEPT_POINTS) or 1
    return tuple(
        max(points[first : first + step], key=lambda point: point[1])
        for first in range(0, len(points), step)
    )


# -------------------------------------------------------------------------------------------------
# Several worker counts and batch sizes, and which of them to use on this machine.

SWEPT = ("batched", "pool", "build")
BATCHES = (1, 8, 64, 512)
NEAR_BEST = 0.95
SPARE = 1.25
ROUND_TO = 250 * 10**6


def worker_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4 ... and the cores themselves."""
    return (*(1 << power for power in range((cores - 1).bit_length())), cores)


def sweep_jobs(job: WayJob, *, cores: int) -> list[WayJob]:
    """What is to be tried beside the ways as they were measured."""
    settings = [("batched", cores, batch) for batch in BATCHES]
    settings += [(way, n, job.batch) for way in ("pool", "build") for n in worker_counts(cores)]
    return [
        dataclasses.replace(job, way=way, workers=workers, batch=batch)
        for way, workers, batch in settings
    ]


def points(results: Iterable[WayResult]) -> tuple[WayResult, ...]:
    """The settings that could be measured, each once."""
    order = [*WAYS]
    found = {
        (order.index(result.key), result.workers, result.batch): result
        for result in results
        if result.problem is None and result.key in SWEPT
    }
    return tuple(found[setting] for setting in sorted(found))


def recommend(
    swept: Sequence[WayResult], *, sample: SampleFacts, tokenizer_bytes: int
) -> Recommendation | None:
    """The smallest settings within a few percent of the best; None without a build."""
    build, pool, batch = (
        smallest_near_best([point for point in swept if point.key == key])
        for key in ("build", "pool", "batched")
    )
    if build is None:
        return None
    memory = memory_for(build, sample=sample, tokenizer_bytes=tokenizer_bytes)
    near = f"tokens/s, the smallest within {1 - NEAR_BEST:.0%} of the best"
    peak = format_size(build.peak_memory_bytes)
    largest = f"the largest document seen has {format_size(sample.largest_document_bytes)}"
    reasons = [
        f"tokenmill build --workers {build.workers}: {compact(build.tokens_per_second)} {near}",
        f"--memory {memory // 10**6}MB: {peak} were used at the peak, and {largest}",
    ]
    if memory > default_budget():
        reasons.append(
            f"that is more than a quarter of this machine ({format_size(default_budget())}),"
            " which a build takes by itself"
        )
    if pool is not None:
        workers = count(pool.workers, "worker")
        reasons.append(f"a process pool: {workers}, {compact(pool.tokens_per_second)} {near}")
    if batch is not None:
        samples = f"{count(batch.batch, 'sample')} a call"
        speed = compact(batch.tokens_per_second)
        reasons.append(f"batches in the loop: {samples}, {speed} {near}")
    return Recommendation(
        build_workers=build.workers,
        build_memory_bytes=memory,
        pool_workers=None if pool is None else pool.workers,
        batch=None if batch is None else batch.batch,
        reasons=tuple(reasons),
    )


def smallest_near_best(tried: Sequence[WayResult]) -> WayResult | None:
    """The setting with the fewest workers and the smallest batch that is nearly the best."""
    enough = NEAR_BEST * max((point.tokens_per_second for point in tried), default=0.0)
    near = [point for point in tried if point.tokens_per_second >= enough]
    return min(near, key=lambda point: (point.workers, point.batch), default=None)


def memory_for(build: WayResult, *, sample: SampleFacts, tokenizer_bytes: int) -> int:
    """A budget for a build: what was seen and some more, and never one that rejects documents."""
    wanted = round(SPARE * build.peak_memory_bytes)
    while True:
        budget = -(-wanted // ROUND_TO) * ROUND_TO
        large_enough = max_document_bytes(budget) >= sample.largest_document_bytes
        if large_enough and _fits(budget, build.workers, tokenizer_bytes):
            return budget
        if budget > usable_memory():
            return usable_memory() // 10**6 * 10**6
        wanted = budget + 1


def _fits(budget: int, workers: int, tokenizer_bytes: int) -> bool:
    limits = {"most_workers": workers, "least_workers": workers}
    try:
        divide_budget(budget, tokenizer_bytes=tokenizer_bytes, **limits)
    except MemoryBudgetError:
        return False
    return True


# -------------------------------------------------------------------------------------------------
# Takes the sample, runs every way on it, then the sweep: all that is measured, in order.

BATCH = 64
ALONE = ("one-by-one", "joined", "loader")
"""Ways that are one thread, whatever the number of workers."""


def usable_cores() -> int:
    """Cores that this process may use, threads of a core counted one by one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_all(request: DiagnoseOptions, info: TokenizerInfo) -> dict[str, Any]:
    """Measure everything that was asked for, by the names that a `Diagnosis` has."""
    # Fail here and with its own words, not once in every way.
    load_engine(info, choice=REFERENCES[info.kind])
    with tempfile.TemporaryDirectory(prefix="tokenmill-diagnose-") as folder:
        base = WayJob(
            way="",
            folder=folder,
            tokenizer=str(request.tokenizer),
            kind=info.kind.value,
            workers=request.workers or usable_cores(),
            batch=BATCH,
            seconds=request.seconds,
            seq_len=request.seq_len,
        )
        build_workers = request.workers or physical_cores()
        # The build comes before the loader, which reads what it wrote.
        workers = {"build": build_workers, "loader": build_workers}
        jobs = [
            dataclasses.replace(base, way=way, workers=workers.get(way, base.workers))
            for way in WAYS
            if way != "dataloader" or find_spec("torch") is not None
        ]
        swept = sweep_jobs(base, cores=base.workers) if request.sweep else []
        more = [job for job in swept if job not in jobs]
        numbers = itertools.count(1)

        def tell(what: str) -> None:
            if request.on_step is not None:
                request.on_step(next(numbers), 1 + len(jobs) + len(more), what)

        def run(job: WayJob) -> WayResult:
            setting = "" if job.way in ALONE else f", {count(job.workers, 'worker')}"
            batch = f", {count(job.batch, 'sample')} a call" if job.way == "batched" else ""
            tell(f"{WAYS[job.way].title}{setting}{batch}")
            return run_way(job)

        tell("reading a sample")
        sample = take_sample(
            request.texts,
            folder=Path(folder),
            most_bytes=round(request.sample_mb * 1e6),
            text_field=request.text_field,
            separator=request.separator,
        )
        ways = tuple(map(run, jobs))
        tried = points([*ways, *map(run, more)]) if request.sweep else ()
        size = sum(path.stat().st_size for path in info.files.values())
        return {
            "sample": sample,
            "lengths": _lengths(folder, ways),
            "ways": ways,
            "sweep": tried,
            "recommendation": recommend(tried, sample=sample, tokenizer_bytes=size),
        }


def _lengths(folder: str, ways: tuple[WayResult, ...]) -> Lengths | None:
    """Tokens per document of the sample, from the store that the build made of it."""
    for way in ways:
        if way.key == "build" and way.problem is None:
            store = Store(store_path(folder, workers=way.workers))
            shards = range(len(store.shards))
            return measure_lengths(store.map_shard(shard).index.lengths for shard in shards)
    return None


# -------------------------------------------------------------------------------------------------
# What a GPU takes: as given, or estimated from the model's size and the GPU's peak.
#
# Tokens/s are peak FLOP/s x share of it that is used (MFU) / FLOPs of one token.
#
# It is an estimate of a training that is not limited by its input, and no more exact than the MFU,
# which the user may set. Peaks are the vendors' figures for dense bfloat16, or fp16 where there is
# none.


def check_known(options: DiagnoseOptions) -> None:
    """UsageError where the model or the GPU of an estimate is not known."""
    if options.model is not None:
        preset(options.model)
    if _key(options.gpu) not in GPUS:
        raise UsageError(
            f"the peak of a GPU {options.gpu!r} is not known here",
            hint=f"use one of {', '.join(PEAKS)}, or give a rate: --tokens-per-second N",
        )


def demands(wanted: DiagnoseOptions, *, vocab_size: int) -> tuple[Demand, ...]:
    """The rate that was given, that of the model, or those of all presets where neither was."""
    if wanted.tokens_per_second is not None:
        return (
            Demand(
                name="as given",
                tokens_per_second=wanted.tokens_per_second,
                gpus=wanted.gpus,
                origin="as given, for each GPU",
                is_estimate=False,
            ),
        )
    # The smallest is for tests on a CPU; no GPU is bought to train it.
    names = [name for name in PRESETS if name != "tiny"] if wanted.model is None else [wanted.model]
    return tuple(_estimate(name, wanted, vocab_size=vocab_size) for name in names)


def _estimate(name: str, wanted: DiagnoseOptions, *, vocab_size: int) -> Demand:
    model, gpu = PRESETS[name], GPUS[_key(wanted.gpu)]
    peak = PEAKS[gpu]
    flops = model.flops_per_token(wanted.seq_len, vocab_size)
    parameters = model.num_parameters(vocab_size) / 1e6
    return Demand(
        name=name,
        tokens_per_second=peak * wanted.mfu / flops,
        gpus=wanted.gpus,
        origin=f"{parameters:,.0f}M parameters with this vocabulary, {flops / 1e9:,.2f} GFLOPs"
        " for each token",
        basis=f"an estimate: {wanted.mfu:.0%} of the {peak / 1e12:,.0f} TFLOP/s of one {gpu}, at"
        f" {wanted.seq_len:,} tokens of context",
        is_estimate=True,
    )


def _key(gpu: str) -> str:
    return gpu.upper().replace(" ", "").replace("-", "")


GPUS = {_key(name): name for name in PEAKS}
"""As anyone may write it -> as it is listed."""


# -------------------------------------------------------------------------------------------------
# What to type: the commands that would mend a starved training, with the user's own paths.

STORE = "store"
SHOWN_INPUTS = 8


def fix_commands(
    request: DiagnoseOptions, info: TokenizerInfo, recommendation: Recommendation | None
) -> tuple[str, ...]:
    """Build once, then load: a command and a line of Python."""
    inputs = [files.shown(each) for each in request.texts[:SHOWN_INPUTS]]
    command = ["tokenmill", "build", *inputs, "--tokenizer", str(request.tokenizer), "--out", STORE]
    if request.text_field != "text":
        command += ["--text-field", request.text_field]
    if request.separator is not None:
        command += ["--separator", _escaped(request.separator)]
    if eos_note(info):
        command += ["--eos", "TOKEN"]
    if recommendation is not None:
        command += ["--workers", str(recommendation.build_workers)]
        command += ["--memory", f"{recommendation.build_memory_bytes // 10**6}MB"]
    shown = shlex.join(command)
    if len(request.texts) > SHOWN_INPUTS:
        shown = shown.replace(" --tokenizer", " ... --tokenizer", 1)
    loader = f'tokenmill.Loader("{STORE}", seq_len={request.seq_len}, batch_size=8)'
    return shown, f"import tokenmill; loader = {loader}"


def eos_note(info: TokenizerInfo) -> list[str]:
    """What the user must still decide, where the tokenizer does not say it."""
    try:
        resolve_eos(info)
    except TokenizerError as error:
        return [f"For the build: {error.message}."]
    return []


def _escaped(separator: str) -> str:
    return separator.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
