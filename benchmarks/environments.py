"""Virtual environments for peers whose packages do not go together with ours, or with each other.

Each is made once from a file of exact versions in `peers/`. A peer that cannot be installed stays
in the table and says so.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks import ROOT, WORK, machine

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

RELEASE_CANDIDATE = ROOT / ".venv-rc"


class NotInstalledError(Exception):
    """A peer is not there; the message says why."""


def prepare(name: str) -> Path:
    """The Python of the peer's environment, which is made if need be."""
    pins = ROOT / "benchmarks" / "peers" / f"{name}.txt"
    folder = WORK / "venvs" / name
    python = folder / "bin" / "python"
    stamp = folder / "stamp"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(folder)])
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([str(python), *install, "--no-deps", "-r", str(pins)])
        stamp.write_text(wanted)
    return python


def made() -> dict[str, Path]:
    """Name -> Python of every peer's environment that is complete."""
    stamps = sorted((WORK / "venvs").glob("*/stamp"))
    return {stamp.parent.name: stamp.parent / "bin" / "python" for stamp in stamps}


def peer_versions(used: Collection[str]) -> dict[str, dict[str, str]]:
    """Versions of the packages in each environment that is used."""
    return {name: machine.versions_of(python) for name, python in made().items() if name in used}


def release_candidate() -> dict[str, str]:
    """The environment variables under which `import tokenizers` gives the release candidate."""
    if not (RELEASE_CANDIDATE / "tokenizers").is_dir():
        raise NotInstalledError("not installed: make bench could not get it")
    return {"PYTHONPATH": str(RELEASE_CANDIDATE)}


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError(f"not installed: {lines[-1] if lines else 'pip failed'}")
