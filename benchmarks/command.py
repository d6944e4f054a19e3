"""What the benchmarks share as commands: `--quick`, a file of results, and the tables of them."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, WORK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def run_command(
    name: str,
    *,
    about: str | None,
    run: Callable[[bool], Mapping[str, Any]],
    section: Callable[[Mapping[str, Any]], str],
) -> None:
    """Measure, write results/NAME.json, and print its tables; a quick trial goes elsewhere."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial with little of everything")
    quick: bool = parser.parse_args().quick
    results = run(quick)
    target = WORK / f"{name}-quick.json" if quick else RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(section(results))
