"""Measures exports and imports beside the projects' own writers and readers: `make bench`.

    python -m benchmarks.interop            everything; writes results/interop.json
    python -m benchmarks.interop --quick    a trial on a little text, one round; prints its tables

The tokens are those of feed.py, several times: so many that starting workers does not decide. A
contender writes all rounds, then reads what it wrote, in one fresh process; what is timed, and why
that is fair, is said in contenders/interop.py.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenmill
from benchmarks import ROOT, WORK, environments, feed, machine, measure, render
from benchmarks import vocabularies as tokenizers
from benchmarks.command import run_command
from benchmarks.interop_tables import LIMIT, OWN, PEER
from tokenmill.interop.imports import import_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    tokens: feed.Size
    copies: int
    """How often the tokens stand in the store that tokenmill exports."""
    seq_len: int = 2048


FULL = Size(rounds=3, tokens=feed.FULL, copies=8)
QUICK = Size(rounds=1, tokens=feed.QUICK, copies=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Who writes and reads a format."""

    format: str
    name: str
    role: str
    module: str
    workers: int = 1
    environment: str = ""


def _own(name: str) -> list[Contender]:
    module = "interop_tokenmill"
    return [
        Contender(format=name, name="tokenmill", role=OWN, module=module, workers=workers)
        for workers in (1, 0)
    ]


def _copies() -> list[Contender]:
    """The limit, measured before everything and after it: disks have better and worse minutes."""
    return [
        Contender(
            format="copy", name="a plain copy", role=LIMIT, module="interop_copy", workers=workers
        )
        for workers in (1, 0)
    ]


def _peer(name: str, peer: str, module: str, environment: str = "") -> list[Contender]:
    made = Contender(format=name, name=peer, role=PEER, module=module, environment=environment)
    return [*_own(name), made]


CONTENDERS: tuple[Contender, ...] = (
    *_copies(),
    *_peer("megatron", "Megatron-core", "interop_megatron", "feeding"),
    *_peer("datatrove", "datatrove", "interop_datatrove", "feeding"),
    *_own("olmo"),
    *_own("nanogpt"),
    *_own("llmc"),
    *_peer("mds", "MosaicML", "interop_mosaicml", "mosaicml"),
    *_peer("litdata", "LitData", "interop_litdata", "feeding"),
    *_peer("arrow", "datasets", "interop_datasets", "feeding"),
    *_peer("parquet", "pyarrow", "interop_plain"),
    *_peer("pt", "torch.save", "interop_plain"),
    *_peer("npz", "numpy.savez", "interop_plain"),
    *_copies(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What is written: by peers from a pair, by tokenmill from a store of copies of it."""

    pair: Path
    store: Path
    tokenizer: str
    documents: int
    tokens: int


def prepare_tokens(size: Size, found: feed.Tokens) -> Tokens:
    """The store with copies of the pair; an import that is done already does nothing."""
    tokenizer = str(tokenizers.prepare()[found.tokenizer])
    pairs = found.folder / f"pairs-{size.copies}"
    store = found.folder / f"store-of-{size.copies}-pairs"
    pairs.mkdir(exist_ok=True)
    for number in range(size.copies):
        for suffix in (".bin", ".idx"):
            target = pairs / f"part-{number}{suffix}"
            if not target.exists():
                target.hardlink_to(found.pair.with_suffix(suffix))
    import_store(pairs, tokenizer=tokenizer, out=store, format="megatron")
    opened = tokenmill.Store(store)
    return Tokens(
        pair=found.pair,
        store=store,
        tokenizer=tokenizer,
        documents=opened.num_documents,
        tokens=opened.num_tokens,
    )


def measure_one(contender: Contender, size: Size, tokens: Tokens) -> Any:
    """One fresh process; its report."""
    with tempfile.TemporaryDirectory(dir=_work()) as folder:
        job = {
            "format": contender.format,
            "tokens": str(tokens.pair),
            "store": str(tokens.store),
            "tokenizer": tokens.tokenizer,
            "folder": folder,
            "rounds": size.rounds,
            "workers": contender.workers,
            "seq_len": size.seq_len,
        }
        name = contender.environment
        python = environments.prepare(name) if name else None
        return measure.run(contender.module, job, python=python)


def _work() -> str:
    folder = WORK / "interop"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def measure_all(
    size: Size, tokens: Tokens, contenders: Sequence[Contender]
) -> list[dict[str, Any]]:
    """A row of numbers, or a reason for having none, per contender."""
    rows = []
    for contender in contenders:
        print(f"{contender.format}: {contender.name}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {
            "format": contender.format,
            "contender": contender.name,
            "role": contender.role,
            "workers": contender.workers,
            "error": None,
        }
        try:
            row |= measure_one(contender, size, tokens)
        except (environments.NotInstalledError, measure.ContenderError) as error:
            row["error"] = str(error).replace(str(ROOT), "")
            print(f"  {row['error']}", file=sys.stderr, flush=True)
        rows.append(row)
    shutil.rmtree(WORK / "interop", ignore_errors=True)
    return rows


def run(size: Size, contenders: Sequence[Contender] = CONTENDERS) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    found = feed.prepare_tokens(size.tokens)
    tokens = prepare_tokens(size, found)
    feed.fill_page_cache(tokens.store)
    used = {contender.environment for contender in contenders}
    results = machine.origin() | {
        "machine": machine.describe(),
        "rounds": size.rounds,
        "seq_len": size.seq_len,
        "corpus": found.corpus,
        "tokenizer": found.tokenizer,
        "documents": tokens.documents,
        "tokens": tokens.tokens,
        "peer_tokens": found.tokens,
        "measurements": measure_all(size, tokens, contenders),
        "versions": machine.versions(),
    }
    results["peer_versions"] = environments.peer_versions(used)
    return results


def main() -> None:
    run_command(
        "interop",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.interop_section,
    )


if __name__ == "__main__":
    main()
