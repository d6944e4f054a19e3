"""Is an account of a step right? `python -m benchmarks.stalls_gpu`, two minutes on a GPU.

    python -m benchmarks.stalls_gpu --json stalls_gpu.json     on a machine with a CUDA device
    --steps N, --rounds N                                      shorter or longer
    --commit ID                                                for a copy without its history

examples/slow_loop.py cleans texts in its loader, tokenizes in its loop, and reads its loss in every
step. It runs as it is under `python -m tokenmill.stalls`, which says what taking each of these out
would save; and by itself, with all three and without each of them, in turns. What a step is
shorter by is compared with what was said: they may differ by 5 points.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, ROOT, machine

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOP = ROOT / "examples" / "slow_loop.py"
FAULTS = {
    "clean": ("a slow collate", "clean"),
    "tokenize": ("a tokenizer in the loop", "tokenizer.encode("),
    "item": ("`loss.item()`", "loss.item()"),
}
"""What can be taken out: its name, and what the account's line has."""
MOST_POINTS = 5.0


def step_ms(printed: str) -> float:
    match = re.search(r"([\d.]+) ms a step", printed)
    if match is None:
        raise ValueError(f"the loop has not said what a step takes: {printed!r}")
    return float(match[1])


def run_loop(steps: int, *without: str, command: tuple[str, ...] = ()) -> Any:
    arguments = ["--steps", str(steps), *(["--without", *without] if without else [])]
    line = [sys.executable, *command, str(LOOP), *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr}")
    return done


def account_of(steps: int) -> dict[str, Any]:
    """What the account said, and what a step of the whole run took under it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "account.json"
        command = ("-m", "tokenmill.stalls", "--steps", f"10-{steps - 1}", "--json", str(path))
        done = run_loop(steps, command=command)
        account = json.loads(path.read_text())
    print(done.stderr, flush=True)
    return {"account": account, "printed": done.stderr, "watched_ms": step_ms(done.stdout)}


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
    taken: dict[str, list[float]] = {name: [] for name in ("all", *FAULTS, "none")}
    accounts = []
    for number in range(rounds):
        for name, times in taken.items():
            without = tuple(FAULTS) if name == "none" else () if name == "all" else (name,)
            times.append(step_ms(run_loop(steps, *without).stdout))
            print(f"round {number + 1}: {name}: {times[-1]:.2f} ms a step", flush=True)
        accounts.append(account_of(steps))
    return {"step_ms": taken, "accounts": accounts}


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was said and what was measured, for each thing that can be taken out."""
    whole = statistics.median(results["step_ms"]["all"])
    made = []
    for name, (what, text) in FAULTS.items():
        said = [found(each["account"], text) for each in results["accounts"]]
        measured = 1 - statistics.median(results["step_ms"][name]) / whole
        share = 100 * statistics.median(each[0] for each in said)
        gain = 100 * statistics.median(each[1] for each in said)
        row = {"what": what, "share": share, "gain": gain, "measured": 100 * measured}
        made.append(row | {"difference": gain - 100 * measured})
    measured = 1 - statistics.median(results["step_ms"]["none"]) / whole
    gain = 100 * statistics.median(each["account"]["all_gain"] for each in results["accounts"])
    made.append(
        {
            "what": "all that is advised, and all three",
            "share": None,
            "gain": gain,
            "measured": 100 * measured,
            "difference": gain - 100 * measured,
        }
    )
    return made


def stalls_body(results: Mapping[str, Any]) -> str:
    """What is shown of the results, below their origin."""
    times = {name: statistics.median(each) for name, each in results["step_ms"].items()}
    watched = [each["watched_ms"] for each in results["accounts"]]
    account = results["accounts"][0]["account"]
    window_ms = 1000 * account["seconds"] / account["steps"]
    facts = (
        f"{results['device']}; {results['rounds']} rounds of {results['steps']} steps, medians. "
        f"A step takes {times['all']:.1f} ms, {times['none']:.1f} ms without all three, and "
        f"{window_ms:.1f} ms while it is looked at ({statistics.median(watched):.1f} ms with what "
        "beginning and ending that takes)."
    )
    lines = [
        facts,
        "",
        "| taken out | its part of a step | said to save | saves | points apart |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows(results):
        share = "" if row["share"] is None else f"{row['share']:.1f}%"
        lines.append(
            f"| {row['what']} | {share} | {row['gain']:.1f}% | {row['measured']:.1f}% "
            f"| {row['difference']:+.1f} |"
        )
    return "\n".join(lines)


def _device() -> str:
    code = "import torch; print(torch.cuda.get_device_name(), 'CUDA', torch.version.cuda, sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "no CUDA device"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
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
    worst = max(abs(row["difference"]) for row in rows(results)[: len(FAULTS)])
    if worst > MOST_POINTS:
        sys.exit(f"what was said is {worst:.1f} points from what was measured")


if __name__ == "__main__":
    main()
