"""The verb `diagnose`: time the ways, hold them against what the GPU takes, say what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import platform
import shlex
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill._version import __version__
from tokenmill.builder.plan import (
    default_budget,
    divide_budget,
    usable_memory,
    whole_bytes,
    worker_counts,
)
from tokenmill.builder.run import source_options
from tokenmill.diagnosis import values
from tokenmill.diagnosis.values import STATES, Demand, Diagnosis, Recommendation, Verdict
from tokenmill.diagnosis.ways import (
    ALONE,
    LINES,
    ROWS,
    WAYS,
    WayJob,
    calls_of,
    run_way,
    take_sample,
)
from tokenmill.engines import REFERENCES
from tokenmill.engines.load import describe, find_tokenizer, load_engine, resolve_token
from tokenmill.errors import MemoryBudgetError, TokenizerError, UsageError
from tokenmill.files import shown
from tokenmill.inspection import Lengths, measure_lengths
from tokenmill.options import DiagnoseOptions, with_options
from tokenmill.runners.local import physical_cores, usable_cores
from tokenmill.sources.base import SourceOptions
from tokenmill.store.reader import Store
from tokenmill.trainer.options import PEAKS, PRESETS, preset
from tokenmill.words import compact, count, format_size, listed, spoken, times

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenmill.diagnosis.values import SampleFacts, WayResult
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import BuildOptions
    from tokenmill.supervised.shaper import Shaper


# -------------------------------------------------------------------------------------------------
# What the numbers mean, in plain words. Pure functions: values in, verdicts and sentences out.
#
# What a way feeds is held against what the GPUs take. With several GPUs each has a process of its
# own that does the same work, so a way that needs one core can run several times on a machine, and
# one that takes all cores cannot; scaling up to the number of cores is assumed to cost nothing.

STARVED, BORDERLINE, FED = "starved", "borderline", "fed"
LITTLE_TEXT = 1_000_000
# Share of the cores in use, and cores of other programs, from which on they get in the way.
FULL, DISTURBED = 0.9, 0.25
# How much slower a second of CPU may be where others use the same core or its cache.
SHARED = 2.0
MUCH = 5.0  # beyond that, how much faster it would be is a guess
# A way is called fast enough where the slower of its rounds feed this many times the need: other
# work on the machine, or a run of long documents, would make the GPU wait.
MARGIN = 1.25


def judge(way: WayResult, demand: Demand, *, cores: int) -> Verdict:
    """Hold a way against a demand: too slow only where no likely rate is enough."""
    copies = min(demand.gpus, max(1.0, cores / max(way.cpu_cores, way.workers)))
    feeds, needs = way.tokens_per_second * copies, demand.total
    low, high = (rate * copies for rate in way.interval)
    gain = gain_if_quiet(way, cores=cores)
    high *= gain
    state = STARVED if high < needs else FED if low >= MARGIN * needs else BORDERLINE
    return Verdict(
        way=way.key,
        demand=demand.name,
        state=state,
        feeds_tokens_per_second=feeds,
        low_tokens_per_second=low,
        high_tokens_per_second=high,
        needs_tokens_per_second=needs,
        on_busy_machine=gain > 1,
        wait_share=max(0.0, 1 - feeds / needs),
        wait_share_in_turn=needs / (needs + feeds),
        times_too_slow=needs / feeds if feeds else float("inf"),
    )


def gain_if_quiet(way: WayResult, *, cores: int) -> float:
    """How many times faster it could be without the others; 1 where some cores were free."""
    taken = way.cpu_cores + way.other_cores
    if way.other_cores < DISTURBED or taken < FULL * cores or way.cpu_cores <= 0:
        return 1.0
    return SHARED * max(1.0, min(max(way.workers, way.cpu_cores), taken) / way.cpu_cores)


def judge_all(
    ways: Sequence[WayResult], demands: Sequence[Demand], *, cores: int
) -> tuple[Verdict, ...]:
    """Every way that feeds a training with the right ids, and could be measured."""
    return tuple(
        judge(way, demand, cores=cores)
        for demand in demands
        for way in ways
        if way.feeds and way.problem is None and not way.changes_ids
    )


def sentence(verdict: Verdict, way: WayResult, demand: Demand) -> str:
    """One way in one sentence."""
    feeds = f"feeds {compact(verdict.feeds_tokens_per_second)} tokens/s"
    needs = compact(verdict.needs_tokens_per_second)
    if verdict.state == FED:
        about = "about " if demand.is_estimate else ""
        how_much = times(1 / verdict.times_too_slow)
        return f"{feeds}, {how_much} the {about}{needs} that {_who(demand)}: fast enough"
    takes = f"{_gpus(demand)} {needs}"
    if verdict.state == BORDERLINE:
        return f"{feeds} ({_range(verdict)}); {takes}: close{_busy(verdict)}"
    wait = f"would wait at least {_percent(verdict.wait_share)} of the time"
    share = _percent(verdict.wait_share_in_turn)
    in_turn = f", {share} if the loop tokenizes between steps and not ahead of them"
    slow = f"{times(verdict.times_too_slow)} too slow"
    who = "it" if demand.gpus == 1 else "they"
    return f"{feeds}; {takes}: {slow}, {who} {wait}{in_turn if way.in_loop else ''}"


def conclusion(demand: Demand, ways: Sequence[WayResult], verdicts: Sequence[Verdict]) -> list[str]:
    """What to do about one demand, in a few sentences."""
    by_key = {way.key: way for way in ways}
    mine = {verdict.way: verdict for verdict in verdicts if verdict.demand == demand.name}
    loader = mine.pop("loader", None)
    if not mine:
        return []
    takes = f"{_gpus(demand)} {compact(demand.total)} tokens/s"
    takes = takes[:1].upper() + takes[1:]
    if enough := [verdict for verdict in mine.values() if verdict.state == FED]:
        # The least work that is enough.
        best = min(enough, key=lambda verdict: by_key[verdict.way].cpu_cores)
        way = by_key[best.way]
        others = {
            STATES[state]: listed(
                [by_key[each.way].title for each in mine.values() if each.state == state]
            )
            for state in (BORDERLINE, STARVED)
        }
        named = "; ".join(f"{word}: {titles}" for word, titles in others.items() if titles)
        but = f" ({named})" if named else ""
        fine = (
            f"{takes}, and tokenizing while you train is fast enough for that: {way.title} feeds"
            f" {times(1 / best.times_too_slow)} as much{but}. The GPU's speed is no reason to"
            " change anything."
        )
        cores = way.cpu_cores * demand.total / way.tokens_per_second
        cost = (
            f"What it costs is CPU: {cores:.2f} cores to keep up, again in every epoch and every"
            " run. Tokenizing once saves that."
        )
        return [fine, cost]
    best = max(mine.values(), key=lambda verdict: verdict.feeds_tokens_per_second)
    title = by_key[best.way].title
    if any(verdict.state == BORDERLINE for verdict in mine.values()):
        best = max(mine.values(), key=lambda verdict: verdict.high_tokens_per_second)
        title = by_key[best.way].title
        feeds = f"{compact(best.feeds_tokens_per_second)} tokens/s ({_range(best)}"
        if best.on_busy_machine:
            said = (
                f"{takes}. Measured on a busy machine, the best of the usual ways ({title}) feeds"
                f" {feeds} on a quiet one): whether that is enough cannot be said here. Measure"
                " again when the machine is quiet; or tokenize once, before you train."
            )
        else:
            said = (
                f"{takes}, and the best of the usual ways ({title}) is close to that: {feeds})."
                " Other work on this machine would make the GPU wait. Tokenize once, before you"
                " train, and it is no longer close."
            )
    else:
        said = (
            f"{takes}, and no usual way feeds that from this machine. The best, {title}, is"
            f" {times(best.times_too_slow)} too slow: the GPU would wait at least"
            f" {_percent(best.wait_share)} of the time. Tokenize once, before you train."
        )
    if loader is None:
        return [said]
    feeds = f"From tokens on disk, tokenmill.Loader feeds {compact(loader.feeds_tokens_per_second)}"
    if loader.state != STARVED:
        return [said, f"{feeds} tokens/s, {times(1 / loader.times_too_slow)} what is needed."]
    slow = f"that too is {times(loader.times_too_slow)} too slow"
    return [said, f"{feeds} tokens/s here: {slow}. More cores are needed, whatever the way."]


def line_for(demand: Demand, ways: Sequence[WayResult], verdicts: Sequence[Verdict]) -> str:
    """One demand of several in one sentence: which ways are enough for it."""
    titles = {way.key: way.title for way in ways}
    mine = [verdict for verdict in verdicts if verdict.demand == demand.name]
    by_state = {
        state: [verdict for verdict in mine if verdict.state == state]
        for state in (FED, BORDERLINE, STARVED)
    }
    parts = [f"Model {demand.name}: {_gpus(demand)} {compact(demand.total)} tokens/s"]
    if enough := by_state[FED]:
        parts.append(f"enough: {listed([titles[each.way] for each in enough])}")
    if close := by_state[BORDERLINE]:
        parts.append(f"close: {listed([titles[each.way] for each in close])}")
    if not enough and not close:
        parts.append("nothing here is enough")
    if starved := by_state[STARVED]:
        slowest = [f"{titles[v.way]} ({_percent(v.wait_share)} waiting)" for v in starved]
        parts.append(f"too slow: {listed(slowest)}")
    return "; ".join(parts) + "."


def disturbance(ways: Sequence[WayResult], *, cores: int) -> list[str]:
    """Whether other programs had so much of the machine that the rates are too low."""
    slowed = [way for way in ways if way.problem is None and gain_if_quiet(way, cores=cores) > 1]
    if not slowed:
        return []
    worst = max(way.other_cores for way in slowed)
    gain = max(gain_if_quiet(way, cores=cores) for way in slowed)
    higher = times(gain) if gain < MUCH else "many times"
    said = (
        f"Measured on a busy machine: other programs took up to {worst:.1f} of the {cores} cores"
        f" meanwhile. On a quiet one the rates are higher, perhaps {higher} (by the CPU that"
        " they took, and what it costs to share cores)."
    )
    return [said]


def failures(ways: Sequence[WayResult]) -> list[str]:
    """The ways that could not be measured, with the reason."""
    return [f"Not measured: {way.title}: {way.problem}." for way in ways if way.problem]


def cost_of_building(build: WayResult | None, sample: SampleFacts) -> list[str]:
    """What tokenizing everything once would take on this machine."""
    if build is None or build.problem is not None or sample.text_bytes < LITTLE_TEXT:
        return []
    rate = build.text_bytes / build.seconds
    seconds = sample.estimated_text_bytes / rate + build.startup_seconds
    workers = count(build.workers, "worker")
    note = f"; {build.note}" if build.note else ""
    said = (
        f"Tokenizing the whole input once would take about {spoken(seconds)} here: tokenmill build"
        f" did {format_size(rate)} of text a second with {workers}{note}."
    )
    return [said]


def rendered(options: DiagnoseOptions) -> list[str]:
    """What the clock did not see, where rows are more than texts."""
    if not options.build.has_fields:
        return []
    said = "Rows became texts before the clock started: in a loop of your own, that comes on top."
    return [f"{said} The time of the build has it."]


def little_text(sample: SampleFacts) -> list[str]:
    """Whether there was enough text for rates that mean something."""
    if sample.text_bytes >= LITTLE_TEXT:
        return []
    found = f"{count(sample.documents, 'document')}, {format_size(sample.text_bytes)}"
    return [f"There was little text to measure ({found}): take the rates as a hint, not a number."]


def seams(joined: WayResult | None) -> list[str]:
    """Whether joining documents changes their tokens, and what it rests on."""
    if joined is None or not (joined.compared_documents or joined.delimited_documents):
        return []
    said = []
    compared = f"{joined.compared_documents:,}"
    if joined.differing_documents:
        share = _percent(joined.differing_documents / joined.compared_documents)
        said.append(
            f"Joined by its delimiter token, {joined.differing_documents:,} of {compared} documents"
            f" ({share}) get other ids than by themselves: what this tokenizer does where a text"
            " begins or ends, it does not do at the delimiter. So it is no way to get its tokens."
        )
    if held := joined.delimited_documents:
        said.append(
            f"{count(held, 'document')} of the sample hold the delimiter token in their text, and"
            " would be cut in two there if documents were joined by it."
        )
    if not said:
        said.append(
            f"Joined by its delimiter token, all {compared} documents that were compared have the"
            " ids that they have by themselves. That holds as long as no text contains the token."
        )
    return said


def _range(verdict: Verdict) -> str:
    low, high = compact(verdict.low_tokens_per_second), compact(verdict.high_tokens_per_second)
    return f"{low} to {high}"


def _busy(verdict: Verdict) -> str:
    return ", measured on a busy machine" if verdict.on_busy_machine else ""


def _gpus(demand: Demand) -> str:
    return _who(demand) + (" about" if demand.is_estimate else "")


def _who(demand: Demand) -> str:
    if demand.gpus > 1:
        return f"{demand.gpus} GPUs take"
    return "the GPU takes" if demand.is_estimate else "your GPU takes"


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.1%}"


# -------------------------------------------------------------------------------------------------
# Several worker counts and batch sizes, and which of them to use on this machine.

SWEPT = ("batched", "pool", "build")
BATCHES = (1, 8, 64, 512)
NEAR_BEST = 0.95
SPARE = 1.25
ROUND_TO = 250 * 10**6


def sweep_jobs(job: WayJob, *, cores: int) -> list[WayJob]:
    """What is to be tried beside the ways as they were measured."""
    settings = [(way, workers) for way in ("pool", "build") for workers in worker_counts(cores)]
    jobs = [dataclasses.replace(job, way="batched", workers=cores, batch=each) for each in BATCHES]
    return jobs + [dataclasses.replace(job, way=way, workers=number) for way, number in settings]


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
    near = f"tokens/s, the smallest that comes within {1 - NEAR_BEST:.0%} of the best"
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
    near = [point for point in tried if point.interval[1] >= enough]
    return min(near, key=lambda point: (point.workers, point.batch), default=None)


def memory_for(build: WayResult, *, sample: SampleFacts, tokenizer_bytes: int) -> int:
    """A budget for a build: what was seen and some more, and never one that rejects documents."""
    wanted = round(SPARE * build.peak_memory_bytes)
    workers = {"most_workers": build.workers, "least_workers": build.workers}
    while True:
        budget = -(-wanted // ROUND_TO) * ROUND_TO
        with contextlib.suppress(MemoryBudgetError):
            if whole_bytes(budget) >= sample.largest_document_bytes:
                divide_budget(budget, tokenizer_bytes=tokenizer_bytes, **workers)
                return budget
        if budget > usable_memory():
            return usable_memory() // 10**6 * 10**6
        wanted = budget + 1


# -------------------------------------------------------------------------------------------------
# Takes the sample, runs every way on it, then the sweep: all that is measured, in order.

BATCH = 64
NEEDS = {"dataloader": "torch", "with-transformers": "transformers"}  # packages that may be missing


def measure_all(request: DiagnoseOptions, info: TokenizerInfo) -> dict[str, Any]:
    """Measure everything that was asked for, by the names that a `Diagnosis` has."""
    # Fail here and with its own words, not once in every way.
    engine = load_engine(info, choice=REFERENCES[info.kind])
    build = request.build
    with tempfile.TemporaryDirectory(prefix="tokenmill-diagnose-") as folder:
        workers = request.workers or len(usable_cores())
        path = Path(build.tokenizer)
        base = WayJob(
            way="",
            folder=folder,
            # Programs run in another folder.
            tokenizer=str(path.resolve() if path.exists() else path),
            kind=info.kind.value,
            calls=calls_of(
                find_tokenizer(build.tokenizer),
                info,
                workers=workers,
                # A conversation has the token at its end inside it, too.
                avoid=info.eos_token if request.is_chat else None,
            ),
            workers=workers,
            batch=BATCH,
            seconds=request.seconds,
            seq_len=request.seq_len,
            shape=_with_template(request.changed("chat_template")),
        )
        build_workers = request.workers or physical_cores()
        has_folder = bool(base.calls.folder)
        # The build comes before the loader, which reads what it wrote.
        fewer = {"build": build_workers, "loader": build_workers}
        jobs = [
            dataclasses.replace(base, way=way, workers=fewer.get(way, workers))
            for way in WAYS
            if way not in NEEDS or (find_spec(NEEDS[way]) and (way == "dataloader" or has_folder))
        ]
        swept = sweep_jobs(base, cores=workers) if request.sweep else []
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
            options=source_options(
                build.identity(), build.shape, max_document_bytes=SourceOptions().max_document_bytes
            ),
            shaper=_shaper(build, engine),
        )
        ways = tuple(map(run, jobs))
        if request.scripts is not None:
            _keep_scripts(Path(request.scripts), Path(folder), ways)
        tried = points([*ways, *map(run, more)]) if request.sweep else ()
        size = sum(path.stat().st_size for path in info.files.values())
        return {
            "sample": sample,
            "lengths": _lengths(Path(folder), jobs, ways),
            "ways": ways,
            "sweep": tried,
            "recommendation": recommend(tried, sample=sample, tokenizer_bytes=size),
        }


def _keep_scripts(kept: Path, folder: Path, ways: tuple[WayResult, ...]) -> None:
    """The programs, and what they read."""
    for way in ways:
        if way.source:
            (kept / f"{way.key}.py").write_text(way.source, encoding="utf-8")
    for name in (LINES, ROWS):
        if (folder / name).exists():
            shutil.copyfile(folder / name, kept / name)


def _lengths(folder: Path, jobs: list[WayJob], ways: tuple[WayResult, ...]) -> Lengths | None:
    """Tokens per document of the sample, from the store that the build made of it."""
    for job, way in zip(jobs, ways, strict=True):
        if way.key == "build" and way.problem is None:
            store = Store(folder / job.store)
            shards = range(len(store.shards))
            return measure_lengths(store.map_shard(shard).index.lengths for shard in shards)
    return None


def _shaper(build: BuildOptions, engine: CheckedEngine) -> Shaper | None:
    """What makes texts of rows; None where a row has its text in one field."""
    if not build.has_fields or build.shape is None:
        return None
    from tokenmill.supervised.shaper import Shaper

    return Shaper(build.shape, engine)


def _with_template(options: dict[str, Any]) -> dict[str, Any]:
    """Options for a program that runs in another folder."""
    if (path := options.get("chat_template")) is not None:
        options["chat_template"] = str(Path(path).resolve())
    return options


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
        hint = f"use one of {', '.join(PEAKS)}, or give a rate: --tokens-per-second N"
        raise UsageError(f"the peak of a GPU {options.gpu!r} is not known here", hint=hint)


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


GPUS = {_key(name): name for name in PEAKS}  # as anyone may write it -> as it is listed


# -------------------------------------------------------------------------------------------------
# What to type: the commands that would mend a starved training, with the user's own paths.

STORE = "store"
SHOWN_INPUTS = 8


def fix_commands(
    request: DiagnoseOptions, info: TokenizerInfo, recommendation: Recommendation | None
) -> tuple[str, ...]:
    """Build once, then load: a command and a line of Python."""
    inputs = [shown(each) for each in request.texts[:SHOWN_INPUTS]]
    command = ["tokenmill", "build", *inputs, "--tokenizer", str(request.tokenizer), "--out", STORE]
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", "\t": "\\t"})
    for name, value in request.changed("text_field", "separator", "chat_template").items():
        text = value.translate(escapes) if name in ("separator", "template") else str(value)
        command += [f"--{name.replace('_', '-')}", text]
    if not request.is_chat and eos_note(info):
        command += ["--eos", "TOKEN"]
    if recommendation is not None:
        command += ["--workers", str(recommendation.build_workers)]
        command += ["--memory", f"{recommendation.build_memory_bytes // 10**6}MB"]
    typed = shlex.join(command)
    if len(request.texts) > SHOWN_INPUTS:
        typed = typed.replace(" --tokenizer", " ... --tokenizer", 1)
    loader = f'tokenmill.Loader("{STORE}", seq_len={request.seq_len}, batch_size=8)'
    return typed, f"import tokenmill; loader = {loader}"


def eos_note(info: TokenizerInfo) -> list[str]:
    """What the user must still decide, where the tokenizer does not say it."""
    try:
        resolve_token(info, "eos")
    except TokenizerError as error:
        return [f"For the build: {error.message}."]
    return []


@with_options(DiagnoseOptions)
def diagnose(options: DiagnoseOptions) -> Diagnosis:
    """Time ways to tokenize this text, and say which of them would starve a training.

    `tokens_per_second` is what one GPU takes; without it `model` and `gpu` give an estimate.
    `stalls`, `timeline` and `run` are files to be summed up and drawn beside it; with one of them
    `inputs` may be left out. `report` writes the HTML page.
    """
    check_known(options)
    page = None if options.report is None else Path(options.report)
    # Better known before a minute of measuring.
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        hint = "name a file in a folder that exists, such as --report report.html"
        raise UsageError(f"no report can be written to {str(page)!r}", hint=hint)
    if options.scripts is not None:
        try:
            Path(options.scripts).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "name a folder that can be made, such as --scripts ways"
            raise UsageError(f"no programs can be written: {error}", hint=hint) from error
    evidence = values.read_evidence(
        stalls=options.stalls, run=options.run, timeline=options.timeline
    )
    machine = values.Machine(
        cores=len(usable_cores()),
        memory_bytes=usable_memory(),
        cpu=_cpu_name(),
        python=platform.python_version(),
        tokenmill=__version__,
    )
    found = Diagnosis(machine=machine, advice=tuple(values.findings(evidence)), evidence=evidence)
    if options.texts:
        found = _measured(options, found)
    elif evidence == values.Evidence():
        raise UsageError(
            "there is nothing to diagnose",
            hint="name text and a tokenizer: tokenmill diagnose data.jsonl --tokenizer T; "
            "or a run: tokenmill diagnose --run run/ --report report.html",
        )
    if page is not None:
        from tokenmill.diagnosis.page import render

        page.write_text(render(found), encoding="utf-8")
    return found


def _measured(options: DiagnoseOptions, found: Diagnosis) -> Diagnosis:
    """With what the ways reached, and what it means."""
    if options.tokenizer is None:
        hint = "name it: --tokenizer tokenizer.json"
        raise UsageError("text alone cannot be timed: the tokenizer is missing", hint=hint)
    files, cores = find_tokenizer(options.tokenizer), found.machine.cores
    if options.is_chat:
        from tokenmill.supervised.chat import with_template

        files = with_template(files, options.chat_template)
    info = describe(files)
    measured = measure_all(options, info)
    ways, sample = measured["ways"], measured["sample"]
    needs = demands(options, vocab_size=info.vocab_size)
    verdicts = judge_all(ways, needs, cores=cores)
    by_key = {way.key: way for way in ways}
    if len(needs) == 1:
        said = conclusion(needs[0], ways, verdicts)
    else:
        said = [line_for(need, ways, verdicts) for need in needs]
    said += disturbance([*ways, *measured["sweep"]], cores=cores) + little_text(sample)
    said += cost_of_building(by_key.get("build"), sample) + seams(by_key.get("joined"))
    said += failures(ways) + rendered(options) + (eos_note(info) if not options.is_chat else [])
    return dataclasses.replace(
        found,
        **measured,
        inputs=tuple(map(shown, options.texts)),
        tokenizer=str(options.tokenizer),
        demands=needs,
        verdicts=verdicts,
        advice=(*said, *found.advice),
        commands=fix_commands(options, info, measured["recommendation"]),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
