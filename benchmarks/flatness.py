"""Memory over time while a large input is built: run by hand.

    python -m benchmarks.flatness                      5 GB with --memory 1.5GB
    python -m benchmarks.flatness --gigabytes 0.5      a trial; the stored result stays

Repeating a corpus would hide what is looked for: engines cache the words they have seen, and a
repeated text has no new ones. So every copy maps the letters of every fourth of its documents
through an alphabet of its own: words that no copy before it held, in real lengths and real
punctuation, for as long as the input lasts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, WORK, corpora, machine, measure, render
from benchmarks import vocabularies as tokenizers
from benchmarks.build import MEMORY, num_workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FULL_GIGABYTES = 5.0
FILE_BYTES = 250_000_000
ALTERED_EVERY = 4
SAMPLE_SECONDS = 0.5
KEPT_SAMPLES = 400


def alphabet(copy: int) -> bytes:
    """A table for bytes.translate that maps letters to letters, another one for every copy."""
    letters = list(string.ascii_lowercase)
    random.Random(copy).shuffle(letters)
    lower = "".join(letters)
    plain = (string.ascii_lowercase + string.ascii_uppercase).encode()
    return bytes.maketrans(plain, (lower + lower.upper()).encode())


def varied_lines(documents: list[dict[str, str]]) -> Iterator[bytes]:
    """JSON lines without end: the documents again and again, part of them altered in each copy."""
    copy = 0
    while True:
        table = alphabet(copy)
        for index, document in enumerate(documents):
            text = document["text"]
            if (index + copy) % ALTERED_EVERY == 0:
                text = text.encode().translate(table).decode()
            line = json.dumps({"id": f"{copy}-{document['id']}", "text": text}, ensure_ascii=False)
            yield line.encode() + b"\n"
        copy += 1


def write_input(folder: Path, *, num_bytes: int) -> list[Path]:
    """Files of varied lines, about `num_bytes` in all."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name = corpora.available()[0]
    lines = varied_lines([json.loads(line) for line in corpora.base_lines(name)])
    paths: list[Path] = []
    while num_bytes > 0:
        path = folder / f"part-{len(paths):03}.jsonl"
        left = min(FILE_BYTES, num_bytes)
        with path.open("wb") as stream:
            while left > 0:
                written = stream.write(next(lines))
                left -= written
                num_bytes -= written
        paths.append(path)
    return paths


def thinned(watched: measure.Watched) -> tuple[list[float], list[int]]:
    """At most KEPT_SAMPLES samples; each keeps the largest value of those it stands for."""
    step = max(1, len(watched.seconds) // KEPT_SAMPLES + 1)
    starts = range(0, len(watched.seconds), step)
    seconds = [round(watched.seconds[i], 1) for i in starts]
    return seconds, [max(watched.memory_bytes[i : i + step]) for i in starts]


def run(gigabytes: float, tokenizer: str | None) -> dict[str, Any]:
    """Build the input once, watched."""
    vocabularies = tokenizers.prepare()
    name = tokenizer or list(vocabularies)[-1]  # the largest vocabulary: the hardest case
    folder = WORK / "flatness"
    paths = write_input(folder / "input", num_bytes=int(gigabytes * 1e9))
    workers = num_workers()
    job = {
        "files": [str(path) for path in paths],
        "tokenizer": str(vocabularies[name]),
        "out": str(folder / "store"),
        "workers": workers,
        "memory": MEMORY,
    }
    shutil.rmtree(folder / "store", ignore_errors=True)
    try:
        report, watched = measure.watch("tokenmill_build", job, sample_seconds=SAMPLE_SECONDS)
        input_bytes = sum(path.stat().st_size for path in paths)
    finally:
        shutil.rmtree(folder)
    seconds, memory = thinned(watched)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "tokenizer": name,
        "workers": workers,
        "memory_budget": MEMORY,
        "memory_kind": measure.MEMORY_KIND,
        "sample_seconds": SAMPLE_SECONDS,
        "input_bytes": input_bytes,
        "documents": report["documents"],
        "tokens": report["tokens"],
        "build_seconds": report["seconds"],
        "own_peak_memory_bytes": report["peak_memory_bytes"],
        "seconds": seconds,
        "memory_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=FULL_GIGABYTES)
    parser.add_argument("--tokenizer", help="gpt2, qwen3, ...; the largest unless named")
    arguments = parser.parse_args()
    results = run(arguments.gigabytes, arguments.tokenizer)
    if arguments.gigabytes >= FULL_GIGABYTES:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "flatness.json").write_text(json.dumps(results, indent=1) + "\n")
    print(render.flatness_section(results))


if __name__ == "__main__":
    main()
