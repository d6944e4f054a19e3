"""Attention within documents on many ranks: how much longer than the mean the slowest takes.

    python -m benchmarks.balance                       a simulation; a minute

Rows of 32,768 tokens are drawn as a loader draws them, and dealt to ranks as they come, and with
balance="attention". Nothing is timed: a row costs the operations of a model of width 2,048, the
same for every token, and 12 * width for each pair of tokens in attention (`tokenmill layout`).
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

import tokenmill
from benchmarks import RESULTS, WORK, corpora, machine, render
from benchmarks import vocabularies as tokenizers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SEQ_LEN = 32_768
RANKS = (8, 64)
ROWS = (4, 8, 16)
"""Of each rank in an update: 4 are one step of the loader, more are accumulated over several. Of 4
there is also what two ranks take that have 8 rows together, and half of each document of them."""
MIX_TOKENS = 40_000_000


def mixed_lengths() -> NDArray[np.int64]:
    """Of tokens, 60% are in documents like those of the web, 20% in longer ones that fit a row, and
    20% in documents of one to four rows."""
    random = np.random.default_rng(0)
    number = 100_000  # of each, more than are taken
    web = random.lognormal(6.5, 1.1, number)
    longer = np.exp(random.uniform(np.log(4096), np.log(SEQ_LEN), number))
    longest = np.exp(random.uniform(np.log(SEQ_LEN), np.log(131_072), number))
    shares = ((0.6, web), (0.2, longer), (0.2, longest))
    parts = [drawn[np.cumsum(drawn) < share * MIX_TOKENS] for share, drawn in shares]
    lengths: NDArray[np.int64] = np.concatenate(parts).astype(np.int64) + 1
    random.shuffle(lengths)
    return lengths


def write_mix(path: Path) -> None:
    """Documents of these lengths, a byte a token."""
    with path.open("w") as file:
        for length in mixed_lengths().tolist():
            file.write(json.dumps({"text": "a" * length}) + "\n")


def stores(folder: Path, tokenizer: Path) -> dict[str, tokenmill.Store]:
    """Each corpus of this machine, all of them together, and the mix of lengths."""
    made = {}
    texts = corpora.available()
    for name in texts:
        (folder / f"{name}.jsonl").write_bytes(b"".join(corpora.base_lines(name)))
    for name in (*texts, "all of them"):
        inputs = [str(folder / f"{each}.jsonl") for each in texts if name in (each, "all of them")]
        tokenmill.build(inputs, tokenizer=str(tokenizer), out=folder / name)
        made[name] = tokenmill.Store(folder / name, split=None)
    write_mix(folder / "mix.jsonl")
    tokenmill.build(str(folder / "mix.jsonl"), tokenizer="bytes", out=folder / "mix")
    made["mix up to 128k"] = tokenmill.Store(folder / "mix", split=None)
    return made


def run() -> dict[str, Any]:
    folder = WORK / "balance"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    [(tokenizer, path), *_] = tokenizers.prepare().items()
    rows = []
    try:
        for name, store in stores(folder, path).items():
            for packing in ("concat", "best-fit"):
                for ranks in RANKS:
                    for each, peers in (*((number, 1) for number in ROWS), (ROWS[0], 2)):
                        report = tokenmill.layout(
                            store,
                            seq_len=SEQ_LEN,
                            packings=[packing],
                            batch_size=each * ranks,
                            ranks=ranks // peers,
                        )
                        row = asdict(report.loads[0]) | {"text": name, "peers": peers}
                        row |= {"ranks": ranks, "rows": each}
                        row["mean_document"] = store.num_tokens / store.num_documents
                        rows.append(row)
    finally:
        shutil.rmtree(folder)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "tokenizer": tokenizer,
        "seq_len": SEQ_LEN,
        "measurements": rows,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    results = run()
    (RESULTS / "balance.json").write_text(json.dumps(results, indent=1) + "\n")
    print(render.balance_section(results))


if __name__ == "__main__":
    main()
