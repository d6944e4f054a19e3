"""Is an account of a step right? `python -m benchmarks.stalls_gpu`, four minutes on a GPU.

    python -m benchmarks.stalls_gpu --json stalls_gpu.json     on a machine with a CUDA device
    --steps N, --rounds N                                      shorter or longer
    --commit ID                                                for a copy without its history

examples/slow_loop.py cleans texts in its loader, tokenizes in its loop, and reads its loss in every
step. It runs as it is under `python -m tokenmill.stalls`, which says what taking each of these out
would save; and by itself, with all three and without each of them, in turns, all in one process:
two may differ by more than what is looked for. What a step is shorter by than with all three, just
before and just after, is compared with what was said: they may differ by 5 points.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, ROOT, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LOOP = ROOT / "examples" / "slow_loop.py"
FAULTS = {
    "clean": ("a slow collate", "clean"),
    "tokenize": ("a tokenizer in the loop", "tokenizer.encode("),
    "item": ("`loss.item()`", "loss.item()"),
}
"""What can be taken out: its name, and what the account's line has."""
MOST_POINTS = 5.0
BEFORE_STEPS, AFTER_STEPS = 20, 20
LAUNCHES = 300  # fewer than the queue has room for


def step_ms(printed: str) -> float:
    match = re.search(r"([\d.]+) ms a step", printed)
    if match is None:
        raise ValueError(f"the loop has not said what a step takes: {printed!r}")
    return float(match[1])


def run_loop(main: Callable[[], None], steps: int, *without: str) -> float:
    """Milliseconds of a step, in this process."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, [str(LOOP), "--steps", str(steps)]
    sys.argv += ["--without", *without] if without else []
    try:
        with contextlib.redirect_stdout(printed):
            main()
    finally:
        sys.argv = before
    return step_ms(printed.getvalue())


def account_of(steps: int) -> dict[str, Any]:
    """What the account said, and what a step of the whole run took under it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "account.json"
        window = f"{BEFORE_STEPS}-{steps - AFTER_STEPS}"
        command = ["-m", "tokenmill.stalls", "--steps", window, "--json", str(path)]
        line = [sys.executable, *command, str(LOOP), "--steps", str(steps)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr}")
        account = json.loads(path.read_text())
    print(done.stderr, flush=True)
    return {"account": account, "printed": done.stderr, "watched_ms": step_ms(done.stdout)}


def launch_us(*, is_profiled: bool) -> float:
    """Microseconds of the host for a launch, with and without torch's profiler."""
    import torch

    def launched() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            value.add_(1)
        taken = 1e6 * (time.perf_counter() - began) / LAUNCHES
        torch.cuda.synchronize()
        return taken

    value = torch.zeros(1, device="cuda")
    launched()
    with contextlib.ExitStack() as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_profiled:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            opened.enter_context(torch.profiler.profile(activities=activities))
            launched()
        return statistics.median(launched() for _ in range(9))


def found(account: Mapping[str, Any], text: str) -> tuple[float, float]:
    """Of the line that has this text, or function: its part of the time, and what was said that
    taking it out saves."""
    seconds = sum(
        line["seconds"]
        for part in account["parts"]
        for line in part["lines"]
        if text in line["text"] or line["what"] == text
    )
    gains = [
        each["gain"]
        for each in account["advice"]
        if text in each["text"] or each["where"].endswith(f"  {text}")
    ]
    return seconds / account["seconds"], max(gains, default=0.0)


def measure(*, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step for each way, and the accounts."""
    main = runpy.run_path(str(LOOP))["main"]
    run_loop(main, steps)  # the first of a process is slower
    taken: dict[str, list[float]] = {name: [] for name in ("all", *FAULTS, "none", "all again")}
    accounts = []
    for number in range(rounds):
        # In another order each time: what is slow for a while is slow for another one.
        middle = [*FAULTS, "none"]
        middle = middle[number % len(middle) :] + middle[: number % len(middle)]
        for name in ("all", *middle, "all again"):
            without = tuple(FAULTS) if name == "none" else (name,) if name in FAULTS else ()
            taken[name].append(run_loop(main, steps, *without))
            print(f"round {number + 1}: {name}: {taken[name][-1]:.2f} ms a step", flush=True)
        accounts.append(account_of(steps))
    launch = {name: launch_us(is_profiled=name == "profiled") for name in ("plain", "profiled")}
    return {"step_ms": taken, "launch_us": launch, "accounts": accounts}


def saved(step_ms: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Percent of a step, in each round."""
    rounds = zip(step_ms[name], step_ms["all"], step_ms["all again"], strict=True)
    return [100 * (1 - without / ((first + last) / 2)) for without, first, last in rounds]


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was said and what was measured, for each thing that can be taken out."""
    accounts = [each["account"] for each in results["accounts"]]
    said = {
        name: (what, [found(each, text) for each in accounts])
        for name, (what, text) in FAULTS.items()
    }
    all_said = [(math.nan, each["all_gain"]) for each in accounts]
    said["none"] = ("all that is advised, and all three", all_said)
    made = []
    for name, (what, pairs) in said.items():
        gains = [100 * gain for _, gain in pairs]
        measured = saved(results["step_ms"], name)
        gain, saves = statistics.median(gains), statistics.median(measured)
        made.append(
            {
                "what": what,
                "share": 100 * statistics.median(share for share, _ in pairs),
                "gain": gain,
                "gains": (min(gains), max(gains)),
                "measured": saves,
                "measurements": (min(measured), max(measured)),
                "difference": gain - saves,
            }
        )
    return made


def stalls_body(results: Mapping[str, Any]) -> str:
    """What is shown of the results, below their origin."""
    times = results["step_ms"]
    whole = statistics.median([*times["all"], *times["all again"]])
    accounts = [each["account"] for each in results["accounts"]]

    def each_ms(*names: str) -> str:
        found = [1000 * each[names[0]] / (each["steps"] if names[1:] else 1) for each in accounts]
        return f"{statistics.median(found):.1f} ms"

    launch = results["launch_us"]
    facts = (
        f"{results['device']}; {results['rounds']} rounds of {results['steps']} steps, medians "
        f"(least to most). A step takes {whole:.1f} ms, and {statistics.median(times['none']):.1f} "
        f"ms without all three. Of the runs that were looked at: "
        f"{each_ms('watched_seconds', 'steps')} a step, "
        f"{each_ms('plain_step_seconds')} just before and after, and "
        f"{each_ms('seconds', 'steps')} in the account. A launch takes the host "
        f"{launch['plain']:.1f} us, and {launch['profiled']:.1f} us under torch's profiler."
    )
    lines = [
        facts,
        "",
        "| taken out | its part of a step | said to save | saves | points apart |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows(results):
        share = "" if math.isnan(row["share"]) else f"{row['share']:.1f}%"
        said, measured = (
            f"{row[name]:.1f}% ({row[ends][0]:.1f} to {row[ends][1]:.1f})"
            for name, ends in (("gain", "gains"), ("measured", "measurements"))
        )
        apart = f"{row['difference']:+.1f}"
        lines.append(f"| {row['what']} | {share} | {said} | {measured} | {apart} |")
    return "\n".join(lines)


def _device() -> str:
    code = "import torch; print(torch.cuda.get_device_name(), 'CUDA', torch.version.cuda, sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "no CUDA device"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--commit", help="for a copy without its history")
    parser.add_argument("--json", type=Path, default=RESULTS / "stalls_gpu.json")
    options = parser.parse_args()
    results = machine.origin(commit=options.commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "device": _device(),
        "steps": options.steps,
        "rounds": options.rounds,
        **measure(steps=options.steps, rounds=options.rounds),
    }
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(stalls_body(results))
    worst = max(abs(row["difference"]) for row in rows(results))
    if worst > MOST_POINTS:
        sys.exit(f"what was said is {worst:.1f} points from what was measured")


if __name__ == "__main__":
    main()
