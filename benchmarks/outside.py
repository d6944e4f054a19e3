"""Measures builds as their users wait for them, by the clock around the command.

    python -m benchmarks.outside             400 MB; writes results/outside.json
    python -m benchmarks.outside --part 1/3  in pieces, one after the other, from one commit
    python -m benchmarks.outside --quick     a trial on a little text, one round; prints its tables

What a one-line build takes is left out; everything else counts, also what a build's own rate does
not see: the last unit, syncing, finishing, the end of the workers. Tokenizers are some that no
other table has. Rows are those of `benchmarks.build`; memory is not watched.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, WORK, build, corpora, machine, measure, render, vocabularies, words
from benchmarks.roster import OUTSIDE, OUTSIDE_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.roster import Contender

FULL, QUICK = (4, 400_000_000), (1, 24_000_000)  # rounds, bytes
NUM_FILES = 2


def groups(num_bytes: int, workers: int) -> Iterator[tuple[build.Group, Sequence[Contender]]]:
    """The tables: two tokenizers on each of two texts, and each kind of `words` on the first."""
    corpus, *others = [
        corpora.prepare(name, num_bytes=num_bytes, num_files=NUM_FILES, formats=("jsonl",))
        for name in corpora.available()[:2]
    ]
    byte_level, by_words = vocabularies.prepare_others(), words.prepare()
    for text in (corpus, *others):
        for name, path in byte_level.items():
            yield _group(text, name, path, workers), OUTSIDE
    for name, path in by_words.items():
        yield _group(corpus, name, path, workers), OUTSIDE_WORDS


def _group(corpus: corpora.Corpus, name: str, path: Path, workers: int) -> build.Group:
    return build.Group(
        table="outside", corpus=corpus, tokenizer_name=name, tokenizer=path, workers=workers
    )


def run(rounds: int, num_bytes: int, *, part: int, parts: int) -> dict[str, Any]:
    """The tables of a part and everything a reader needs to judge them."""
    workers = build.num_workers()
    rows: list[dict[str, Any]] = []
    tables = [*groups(num_bytes, workers)]
    for group, contenders in tables[
        (part - 1) * len(tables) // parts : part * len(tables) // parts
    ]:
        rows += build.measure_group(group, contenders, rounds, is_watched=False)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "workers": workers,
        "memory_budget": build.MEMORY,
        "memory_kind": measure.MEMORY_KIND,
        "rounds": rounds,
        "measurements": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial with little of everything")
    parser.add_argument("--part", default="1/1", help="which of how many parts, such as 2/3")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    results = run(*(QUICK if asked.quick else FULL), part=part, parts=parts)
    # What the parts before the last one found is kept out of git, where it would be a change.
    begun = WORK / "outside-begun.json"
    if part > 1:
        before = json.loads(begun.read_text())
        if any(before[each] != results[each] for each in ("commit", "machine", "versions")):
            raise SystemExit(f"the parts before were measured elsewhere; begin with 1/{parts}")
        results["measurements"] = before["measurements"] + results["measurements"]
        results["command"] = f"python -m benchmarks.outside --part 1/{parts}, ... {parts}/{parts}"
    target = begun if part < parts else RESULTS / "outside.json"
    target = WORK / "outside-quick.json" if asked.quick else target
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(render.outside_section(results))


if __name__ == "__main__":
    main()
