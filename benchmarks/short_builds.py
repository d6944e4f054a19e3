"""Measures what someone waits for who builds little: `make bench`.

    python -m benchmarks.short_builds            three rounds; writes results/short_builds.json
    python -m benchmarks.short_builds --quick    a trial on a little text; prints its tables

Everything is timed from outside, by the clock around fresh processes, so that interpreters, imports
and their end count for everyone. Two tables: how long a build takes until its first document is
encoded, beside what loading the tokenizer takes; and 20 MB, beside the peers. *First* is with an
empty cache folder, *again* with what the first left there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, WORK, corpora, environments, machine, render, vocabularies
from benchmarks.build import num_workers
from benchmarks.command import run_command
from benchmarks.roster import PEERS
from benchmarks.short_builds_table import OWN
from benchmarks.supervised import chat_tokenizer, write_chats
from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.corpora import Corpus

FOLDER = WORK / "short_builds"
CACHE, OUT, CHATS = FOLDER / "cache", FOLDER / "out", FOLDER / "chats.jsonl"
FEW_BYTES = 20_000
LARGE_VOCABULARY, LEARNED_BYTES = 256_000, 25_000_000
# As it is where people install it: with the bytecode of every module.
ENVIRONMENT = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
IMPORTS = "import tokenmill.cli.main, tokenmill.builder.run, tokenmill.sources.lines, "
IMPORTS += "tokenizers, gigatoken"
REFERENCE = f"{IMPORTS}, sys; tokenizers.Tokenizer.from_file(sys.argv[1])"
ENGINE = f"{IMPORTS}, sys; gigatoken.Tokenizer.from_json(open(sys.argv[1], 'rb').read())"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    num_bytes: int
    chats: int


FULL = Size(rounds=3, num_bytes=20_000_000, chats=20)
QUICK = Size(rounds=1, num_bytes=2_000_000, chats=20)


def tokenizers_of(size: Size) -> dict[str, Path]:
    """Those of the other tables, one more, and one with a large vocabulary."""
    found = vocabularies.prepare() | vocabularies.shared(("llama3_1",))
    if size is FULL:
        found["bpe-256k"] = _large()
    return found


def _large() -> Path:
    folder = WORK / "tokenizers" / "bpe-256k"
    if not (folder / "tokenizer.json").exists():
        _say("training a vocabulary of 256,000")
        train_bpe(_some_texts(), vocab_size=LARGE_VOCABULARY, folder=folder)
    return folder


def _some_texts() -> Iterator[str]:
    """The beginning of each corpus: in several languages there are tokens enough."""
    for name in corpora.available():
        left = LEARNED_BYTES
        for line in corpora.base_lines(name):
            yield json.loads(line)["text"]
            left -= len(line)
            if left <= 0:
                break


def seconds_of(command: Sequence[str], **environment: str) -> float:
    """The clock around a process."""
    began = time.perf_counter()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT | environment, **quiet)
    return time.perf_counter() - began


def seconds_until_first(command: Sequence[str]) -> float:
    """From the start of a build to the folder of its first unit; the build then goes on to its end.

    The folder is made right before the first batch of the unit is read and encoded.
    """
    began = time.perf_counter()
    environment = ENVIRONMENT | {"TOKENMILL_CACHE": str(CACHE)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while not _has_unit():
        if process.poll() is not None:
            raise RuntimeError(f"the build ended without a unit: exit code {process.returncode}")
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    if process.wait() != 0:
        raise RuntimeError(f"the build failed: exit code {process.returncode}")
    return seconds


def _has_unit() -> bool:
    """Whether a unit is begun, or is done: a short one may be in tmp/ for less than a look."""
    with contextlib.suppress(FileNotFoundError):  # tmp/ itself goes
        if any(path.is_dir() for path in OUT.glob("tmp/*")):
            return True
    return any(OUT.glob("shards/*.json"))


def build_command(files: Sequence[Path], tokenizer: Path, *options: str) -> list[str]:
    """The command, into a store that is not there."""
    shutil.rmtree(OUT, ignore_errors=True)
    command = [sys.executable, "-m", "tokenmill", "build", *map(str, files), "--quiet", "--json"]
    return [*command, "--tokenizer", str(tokenizer), "--out", str(OUT), *options]


def measure_start(
    name: str, tokenizer: Path, files: Sequence[Path], *options: str
) -> dict[str, Any]:
    """One round of a row of the first table."""
    _say(f"start {name}")
    path = str(tokenizer / "tokenizer.json")
    row: dict[str, Any] = {"tokenizer": name}
    for what, code in (("imports", IMPORTS), ("from_file", REFERENCE), ("engine", ENGINE)):
        row[what] = seconds_of([sys.executable, "-c", code, path])
    shutil.rmtree(CACHE, ignore_errors=True)
    for what in ("first", "again"):
        row[what] = seconds_until_first(build_command(files, tokenizer, *options))
    return row


def measure_peers(name: str, tokenizer: Path, corpus: Corpus, workers: int) -> dict[str, Any]:
    """One round of a table of the second kind: contender -> seconds, or why there are none."""
    files = [*corpus.files("jsonl")]
    row: dict[str, Any] = {"tokenizer": name}
    shutil.rmtree(CACHE, ignore_errors=True)
    for what in ("first", "again"):
        _say(f"20 MB {name} tokenmill {what}")
        command = build_command(files, tokenizer, "--workers", str(workers))
        row[f"{OWN}, {what}"] = seconds_of(command, TOKENMILL_CACHE=str(CACHE))
    for peer in (each for each in PEERS if each.starts_processes):
        _say(f"20 MB {name} {peer.name}")
        shutil.rmtree(OUT, ignore_errors=True)
        job = {
            "files": [str(file) for file in files],
            "tokenizer": str(tokenizer),
            "out": str(OUT),
            "workers": workers,
            "memory": "",
        }
        try:
            python = environments.prepare(peer.environment)
            module = f"benchmarks.contenders.{peer.module}"
            row[peer.name] = seconds_of([str(python), "-m", module, json.dumps(job)])
        except environments.NotInstalledError as error:
            row[peer.name] = str(error).replace(str(ROOT), "")
        except subprocess.CalledProcessError as error:
            row[peer.name] = f"exit code {error.returncode}"
    return row


def run(size: Size) -> dict[str, Any]:
    """All rounds, and everything a reader needs to judge them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    workers, corpus_name = num_workers(), corpora.available()[0]
    few, usual = (
        corpora.prepare(corpus_name, num_bytes=num_bytes, num_files=files, formats=("jsonl",))
        for num_bytes, files in ((FEW_BYTES, 1), (size.num_bytes, workers))
    )
    chat, chat_path = chat_tokenizer()
    write_chats(CHATS, size.chats)
    starts: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    for _ in range(size.rounds):
        for name, path in tokenizers_of(size).items():
            starts.append(measure_start(name, path, [*few.files("jsonl")]))
        options = ["--format", "chat", "--chat-template", str(_template())]
        starts.append(measure_start(f"{chat}, chats", chat_path, [CHATS], *options))
        for name, path in vocabularies.prepare().items():
            peers.append(measure_peers(name, path, usual, workers))
    shutil.rmtree(FOLDER, ignore_errors=True)
    used = {peer.environment for peer in PEERS if peer.starts_processes}
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "peer_versions": environments.peer_versions(used),
        "rounds": size.rounds,
        "workers": workers,
        "input_bytes": usual.input_bytes["jsonl"],
        "starts": starts,
        "peers": peers,
    }


def _template() -> Path:
    """A template as most models have it."""
    path = FOLDER / "template.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    return path


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    run_command(
        "short_builds",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.short_builds_section,
    )


if __name__ == "__main__":
    main()
