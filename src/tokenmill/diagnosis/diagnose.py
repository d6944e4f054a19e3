"""The verb `diagnose`: time the ways, hold them against what the GPU takes, say what to do."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.builder.memory import usable_memory
from tokenmill.diagnosis import advice
from tokenmill.diagnosis.commands import eos_note, fix_commands
from tokenmill.diagnosis.demand import (
    DEFAULT_GPU,
    DEFAULT_MFU,
    DEFAULT_SEQ_LEN,
    Wanted,
    demands,
)
from tokenmill.diagnosis.evidence import findings, read_evidence
from tokenmill.diagnosis.measuring import Request, measure_all, usable_cores
from tokenmill.diagnosis.values import Diagnosis, Machine
from tokenmill.errors import UsageError
from tokenmill.remote import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.diagnosis.evidence import Evidence
    from tokenmill.diagnosis.measuring import Measurements, OnStep
    from tokenmill.diagnosis.values import Demand, Verdict

    PathInput = str | os.PathLike[str]


def diagnose(
    inputs: PathInput | Sequence[PathInput] = (),
    *,
    tokenizer: PathInput | None = None,
    tokens_per_second: float | None = None,
    model: str | None = None,
    gpu: str = DEFAULT_GPU,
    gpus: int = 1,
    mfu: float = DEFAULT_MFU,
    seq_len: int = DEFAULT_SEQ_LEN,
    text_field: str = "text",
    separator: str | None = None,
    seconds: float = 1.0,
    sample_mb: float = 32.0,
    workers: int | None = None,
    sweep: bool = False,
    stalls: PathInput | None = None,
    timeline: PathInput | None = None,
    run: PathInput | None = None,
    report: PathInput | None = None,
    on_step: OnStep | None = None,
) -> Diagnosis:
    """Time ways to tokenize this text, and say which of them would starve a training.

    `tokens_per_second` is what one GPU takes; without it `model` and `gpu` give an estimate.
    `stalls`, `timeline` and `run` are files to be summed up and drawn beside it; with one of them
    `inputs` may be left out. `report` writes the HTML page.
    """
    wanted = Wanted(
        tokens_per_second=tokens_per_second,
        model=model,
        gpu=gpu,
        gpus=gpus,
        mfu=mfu,
        seq_len=seq_len,
    )
    page = None if report is None else _writable(Path(report))
    evidence = read_evidence(stalls=stalls, run=run, timeline=timeline)
    asked = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if asked:
        request = Request(
            inputs=tuple(str(each) for each in asked),
            tokenizer=_required(tokenizer),
            text_field=text_field,
            separator=separator,
            seconds=seconds,
            sample_mb=sample_mb,
            workers=workers,
            seq_len=seq_len,
            sweep=sweep,
        )
        found = _conclude(request, wanted, measure_all(request, on_step=on_step), evidence)
    else:
        found = _evidence_alone(evidence)
    if page is not None:
        from tokenmill.diagnosis.report import write_report

        write_report(found, page)
    return found


def _required(tokenizer: PathInput | None) -> str:
    if tokenizer is None:
        raise UsageError(
            "text alone cannot be timed: the tokenizer is missing",
            hint="name it: --tokenizer tokenizer.json",
        )
    return str(tokenizer)


def _writable(report: Path) -> Path:
    """The path, if a file can lie there: better known before a minute of measuring."""
    if report.is_dir() or not report.absolute().parent.is_dir():
        raise UsageError(
            f"no report can be written to {str(report)!r}",
            hint="name a file in a folder that exists, such as --report report.html",
        )
    return report


def _conclude(
    request: Request, wanted: Wanted, measured: Measurements, evidence: Evidence
) -> Diagnosis:
    cores = usable_cores()
    needs = demands(wanted, vocab_size=measured.info.vocab_size)
    verdicts = advice.judge_all(measured.ways, needs, cores=cores)
    return Diagnosis(
        inputs=tuple(map(shown, request.inputs)),
        tokenizer=request.tokenizer,
        machine=machine(),
        sample=measured.sample,
        lengths=measured.lengths,
        demands=needs,
        ways=measured.ways,
        verdicts=verdicts,
        sweep=measured.sweep,
        recommendation=measured.recommendation,
        advice=tuple(_words(needs, verdicts, measured) + findings(evidence)),
        commands=fix_commands(request, measured.info, measured.recommendation),
        evidence=evidence,
    )


def _words(
    needs: Sequence[Demand], verdicts: Sequence[Verdict], measured: Measurements
) -> list[str]:
    by_key = {way.key: way for way in measured.ways}
    if len(needs) == 1:
        said = advice.conclusion(needs[0], measured.ways, verdicts)
    else:
        said = [advice.line_for(need, measured.ways, verdicts) for need in needs]
    return [
        *said,
        *advice.disturbance(measured.ways, cores=usable_cores()),
        *advice.little_text(measured.sample),
        *advice.cost_of_building(by_key.get("build"), measured.sample),
        *advice.seams(by_key.get("joined")),
        *advice.failures(measured.ways),
        *eos_note(measured.info),
    ]


def _evidence_alone(evidence: Evidence) -> Diagnosis:
    if not evidence:
        raise UsageError(
            "there is nothing to diagnose",
            hint="name text and a tokenizer: tokenmill diagnose data.jsonl --tokenizer T; "
            "or a run: tokenmill diagnose --run run/ --report report.html",
        )
    return Diagnosis(
        inputs=(),
        tokenizer=None,
        machine=machine(),
        sample=None,
        lengths=None,
        demands=(),
        ways=(),
        verdicts=(),
        sweep=(),
        recommendation=None,
        advice=tuple(findings(evidence)),
        commands=(),
        evidence=evidence,
    )


def machine() -> Machine:
    """This machine, in a few facts."""
    return Machine(
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        cpu=_cpu_name(),
        python=platform.python_version(),
        tokenmill=__version__,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
