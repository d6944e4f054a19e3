"""Measures tokenmill's build beside the engine alone and beside its peers: `make bench`.

    python -m benchmarks.build            everything; writes results/build.json
    python -m benchmarks.build --quick    a trial on a little text, one round; prints its tables

Every measurement is a fresh process. The contenders of one table take turns (A B C, A B C, ...), so
that a machine that slows down slows all of them; medians are reported with the smallest and the
largest value. After the timed rounds one more round watches memory (see measure.py). Input files
are read once before, so all of them find their input in the page cache.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, WORK, corpora, environments, machine, measure, render
from benchmarks import vocabularies as tokenizers
from benchmarks.command import run_command
from benchmarks.roster import ENGINES_AND_BUILDS, PEERS, Contender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.corpora import Corpus

MEMORY = "1.5GB"
FEW_BYTES = 20_000
OUT = WORK / "out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    num_bytes: int
    slice_bytes: int
    """For the peers, which are slow."""
    num_corpora: int
    num_tokenizers: int


FULL = Size(
    rounds=3, num_bytes=180_000_000, slice_bytes=20_000_000, num_corpora=9, num_tokenizers=9
)
QUICK = Size(rounds=1, num_bytes=24_000_000, slice_bytes=2_000_000, num_corpora=1, num_tokenizers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The contenders of one table, and what they are given."""

    table: str
    corpus: Corpus
    tokenizer_name: str
    tokenizer: Path
    workers: int

    def job(self, contender: Contender, corpus: Corpus | None = None) -> dict[str, object]:
        """What the contender is told; its output folder is fresh."""
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        return {
            "files": [str(p) for p in (corpus or self.corpus).files(contender.file_format)],
            "tokenizer": str(self.tokenizer),
            "out": str(OUT),
            "workers": self.workers,
            "memory": MEMORY,
            "mode": contender.mode,
        }


def measure_group(
    group: Group, contenders: Sequence[Contender], rounds: int, *, is_watched: bool = True
) -> list[dict[str, Any]]:
    """All rounds of one table: a row of numbers, or a reason for having none, per contender.

    Memory is watched in a round more, if it is.
    """
    rows = {contender.name: _empty_row(group, contender) for contender in contenders}
    _fill_page_cache(group.corpus)
    for number in range(rounds + is_watched):
        for contender in contenders:
            row = rows[contender.name]
            if row["error"] is None:
                _say(f"{group.table} {group.corpus.name} {group.tokenizer_name} {contender.name}")
                _measure_once(group, contender, row, watched=number == rounds)
    _check_agreement(list(rows.values()))
    return list(rows.values())


def _measure_once(
    group: Group, contender: Contender, row: dict[str, Any], *, watched: bool
) -> None:
    try:
        place = _place(contender)
        if watched:
            _, seen = measure.watch(contender.module, group.job(contender), **place)
            row["peak_memory_bytes"] = seen.peak_bytes
            return
        startup = _startup_seconds(group, contender, place)
        report = measure.run(contender.module, group.job(contender), **place)
    except (environments.NotInstalledError, measure.ContenderError) as error:
        row["error"] = str(error).replace(str(ROOT), "")
        _say(f"  {row['error']}")
        return
    finally:
        shutil.rmtree(OUT, ignore_errors=True)
    row["seconds"].append(round(report["seconds"], 4))
    row["startup_seconds"].append(round(startup + report["startup_seconds"], 4))
    row["documents"], row["tokens"] = report["documents"], report["tokens"]
    row["own_peak_memory_bytes"] = report["peak_memory_bytes"]
    row["stage_seconds"] = report["stage_seconds"]


def _startup_seconds(group: Group, contender: Contender, place: Mapping[str, Any]) -> float:
    """What a contender that cannot tell its own start-up takes for next to no text."""
    if not contender.starts_processes:
        return 0.0
    few = corpora.prepare(
        group.corpus.name, num_bytes=FEW_BYTES, num_files=group.workers, formats=("jsonl",)
    )
    seconds: float = measure.run(contender.module, group.job(contender, few), **place)["seconds"]
    return seconds


def _empty_row(group: Group, contender: Contender) -> dict[str, Any]:
    return {
        "table": group.table,
        "corpus": group.corpus.name,
        "tokenizer": group.tokenizer_name,
        "contender": contender.name,
        "error": None,
        "seconds": [],
        "startup_seconds": [],
        "text_bytes": group.corpus.text_bytes,
        "input_bytes": group.corpus.input_bytes[contender.file_format],
        "peak_memory_bytes": None,
    }


def _place(contender: Contender) -> Mapping[str, Any]:
    """The interpreter and the environment variables of a contender."""
    if contender.environment == "candidate":
        return {"environment": environments.release_candidate()}
    if contender.environment:
        return {"python": environments.prepare(contender.environment)}
    return {}


def _fill_page_cache(corpus: Corpus) -> None:
    for path in corpus.folder.iterdir():
        with path.open("rb") as stream:
            while stream.read(1 << 22):
                pass


def _check_agreement(rows: Sequence[Mapping[str, Any]]) -> None:
    """A contender that makes other tokens does other work; its time would not be comparable."""
    found = {row["contender"]: row["tokens"] for row in rows if row["seconds"]}
    if len(set(found.values())) > 1:
        _say(f"  warning: contenders differ in the number of tokens: {found}")


def num_workers() -> int:
    """One per core this process may use, as the engine's own threads are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _groups(size: Size, workers: int) -> list[tuple[Group, Sequence[Contender]]]:
    names = corpora.available()[: size.num_corpora]
    vocabularies = list(tokenizers.prepare().items())[: size.num_tokenizers]
    large = [
        corpora.prepare(name, num_bytes=size.num_bytes, num_files=4 * workers) for name in names
    ]
    small = corpora.prepare(
        names[0], num_bytes=size.slice_bytes, num_files=workers, formats=("jsonl",)
    )
    plan = [("engine", corpus, ENGINES_AND_BUILDS) for corpus in large]
    plan.append(("peers", small, PEERS))
    return [
        (
            Group(
                table=table,
                corpus=corpus,
                tokenizer_name=name,
                tokenizer=path,
                workers=workers,
            ),
            contenders,
        )
        for table, corpus, contenders in plan
        for name, path in vocabularies
    ]


def run(size: Size) -> dict[str, Any]:
    """All tables and everything a reader needs to judge them."""
    workers = num_workers()
    results: dict[str, Any] = machine.origin() | {
        "machine": machine.describe(),
        "workers": workers,
        "memory_budget": MEMORY,
        "memory_kind": measure.MEMORY_KIND,
        "rounds": size.rounds,
        "measurements": [],
    }
    for group, contenders in _groups(size, workers):
        results["measurements"] += measure_group(group, contenders, size.rounds)
    results["versions"] = machine.versions()
    used = {contender.environment for contender in PEERS}
    results["peer_versions"] = environments.peer_versions(used)
    return results


def main() -> None:
    run_command(
        "build",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.build_section,
    )


if __name__ == "__main__":
    main()
