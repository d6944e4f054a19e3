"""What is published, tried as its users get it: built, checked, installed where nothing else is.

    python -m tests.dist DIST            what `make dist` left in DIST; `make test-dist`
    python -m tests.dist DIST PYTHON     every command once, by a Python that has tokenmill

Nothing here may need more than the package itself: an import of what only tests install would be
seen by nobody else before a release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from setup import readme

ROOT = Path(__file__).resolve().parent.parent
NEEDS_TORCH = "pip install 'tokenmill[torch]'"
DATA = """
import tokenmill

def loader(rank=0, world_size=1):
    return tokenmill.Loader("store", seq_len=64, batch_size=2, rank=rank, world_size=world_size)

if __name__ == "__main__":
    import json
    feed = loader()
    batch = next(iter(feed))
    assert batch.input_ids.shape == (2, 64), batch.input_ids.shape
    json.dump(feed.state_dict(), open("state.json", "w"))
"""
# Each command with its exit code and a part of what it says; `python` runs a program instead.
SMOKE: list[tuple[str, int, str]] = [
    ("version", 0, "gigatoken"),
    ("plan corpus.jsonl -t bytes", 0, "to build"),
    ("build corpus.jsonl -t bytes -o store", 0, "documents   300"),
    ("build corpus.jsonl -t bytes -o parts --part 1/1", 0, ""),
    ("finish parts", 0, "documents   300"),
    ("verify store", 0, "whole and right"),
    ("inspect store --doc 3", 0, "row 3"),
    ("inspect store --config", 0, 'tokenizer = "bytes"'),
    ("grep store grain", 0, "grain"),
    ("layout store --seq-len 64", 0, "best-fit"),
    ("python data.py", 0, ""),
    ("trace store --doc 3 --state state.json --batch-size 2 --ranks 1", 0, "3"),
    ("ledger state.json --store store --batch-size 2 --ranks 1", 0, "store"),
    ("annotate store --columns lang", 0, "lang"),
    ("select store --where tokens<999 -o few.view", 0, "few.view"),
    ("ban store --match banned.txt -o kept.view", 0, "kept.view"),
    ("dedup store -o unique.view", 0, "unique.view"),
    ("view store --export page.html", 0, ""),
    ("export store --to megatron -o megatron", 0, "megatron"),
    ("export store --to parquet -o parquet", 0, "parquet"),
    ("import megatron -t bytes -o again", 0, "documents"),
    ("convert megatron --to datatrove -o datatrove -t bytes", 0, "datatrove"),
    ("audit data.py:loader --store store --labels next --batches 4", 0, "verdict"),
    ("prune store", 0, ""),
    ("forget again --match banned.txt", 0, "forgotten"),
    ("train store --model tiny --steps 1", 1, NEEDS_TORCH),
    ("diagnose corpus.jsonl -t bytes --seconds 0.1 --model tiny", 0, "tokens"),
]


def smoke(python: str, folder: Path) -> None:
    """Run every command of an installed tokenmill; the demo last, as it takes longest."""
    rows = [{"text": f"grain {k} of the mill", "lang": "en"} for k in range(300)]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "banned.txt").write_text("grain 7 of\n")
    (folder / "data.py").write_text(DATA)
    tried = set()
    for line, code, said in [*SMOKE, ("demo", 0, "")]:
        first, *rest = line.split()
        command = (
            [python, *rest] if first == "python" else [python, "-m", "tokenmill", first, *rest]
        )
        tried.add(first)
        run(command, folder, code=code, said=said)
    wanted = run([python, "-c", LIST], folder).split()
    if missed := {*wanted} - tried:
        raise SystemExit(f"error: no trial of {sorted(missed)}")


LIST = "from tokenmill.cli.main import app; print(*(each.name for each in app.registered_commands))"


def run(command: list[str], folder: Path, *, code: int = 0, said: str = "") -> str:
    kept = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    out = done.stdout + done.stderr
    if done.returncode != code or said not in out:
        raise SystemExit(
            f"error: {command} ended with {done.returncode}, not {code}; {said=}\n{out}"
        )
    return done.stdout


def check(dist: Path) -> Path:
    """See that both files have what they should; returns the wheel."""
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    tracked = run(["git", "ls-files"], ROOT).split("\n")[:-1]
    with tarfile.open(source) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    if missing := sorted({*tracked} - names - NOT_SHIPPED):
        raise SystemExit(f"error: {source.name} lacks {missing}")
    with zipfile.ZipFile(wheel) as packed_wheel:
        inside = {*packed_wheel.namelist()}
        (metadata,) = (each for each in inside if each.endswith(".dist-info/METADATA"))
        told = packed_wheel.read(metadata).decode()
    code = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    if missing := sorted(code - inside):
        raise SystemExit(f"error: {wheel.name} lacks {missing}")
    parts = {"tokenmill/engines/kernel.abi3.so", "tokenmill/sources/fields.abi3.so"}
    if shutil.which("cc") and not parts <= inside:
        raise SystemExit(f"error: {wheel.name} lacks the compiled part, though there is a compiler")
    if others := sorted(name for name in inside if not name.startswith("tokenmill")):
        raise SystemExit(f"error: {wheel.name} would put {others} beside tokenmill")
    if readme().strip() not in told:
        raise SystemExit(f"error: {wheel.name} does not show the README with whole links")
    return wheel


NOT_SHIPPED = {".gitignore", ".gitattributes"}


def main() -> None:
    dist, *python = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if not python:
            wheel = check(Path(dist).resolve())
            run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
            python = [str(folder / "venv/bin/python")]
            pins = ["--prefer-binary", "--quiet", "-c", str(ROOT / "constraints.txt")]
            run([*python, "-m", "pip", "install", *pins, str(wheel)], folder)
        (folder / "work").mkdir()
        smoke(os.path.abspath(python[0]), folder / "work")  # noqa: PTH100 (a link is kept)


if __name__ == "__main__":
    main()
