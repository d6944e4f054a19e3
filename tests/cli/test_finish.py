from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cli


def test_parts_are_built_then_finished_and_each_says_what_comes_next(
    cli: Cli, corpus: Path
) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "my store", "--memory", "1GB")
    # One small file is one unit: it has one of the two parts, and the other has nothing.
    parts = [cli(*args, "--part", f"{number}/2", "--json").json for number in (1, 2)]
    assert sorted(part["totals"]["documents"] for part in parts) == [0, 200]
    [number] = [part["part"] for part in parts if part["units_total"]]
    shown = cli(*args, "--part", number)
    assert f"part        {number}; what follows is of it alone" in shown.out
    assert "next        tokenmill finish 'my store'" in shown.out
    finished = cli("finish", "my store", "--json").json
    assert (finished["totals"]["documents"], finished["part"]) == (200, None)
    again = cli("finish", "my store")
    assert again.out.startswith("nothing to do: my store is complete; its inputs were not looked")


def test_a_part_that_was_never_run_is_named_with_the_command(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--memory", "1GB", "--json")
    built = {n: cli(*args, "--part", f"{n}/2").json["units_total"] for n in (1, 2)}
    [empty] = [n for n, units in built.items() if not units]
    cli(*args[:4], "-o", "other", *args[6:], "--part", f"{empty}/2")
    outcome = cli("finish", "other", code=1)
    assert outcome.err.startswith("error: 'other' lacks 'corpus.jsonl' (part ")
    assert f"hint: run these parts again, then finish: --part {3 - empty}/2" in outcome.err
    refused = cli(*args, "--part", "3/2", code=2)
    assert "error: part '3/2' does not exist: parts are counted from 1" in refused.err
