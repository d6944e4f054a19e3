"""Where and with what a measurement was made. Names no path and no person."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks import ROOT


def describe() -> dict[str, object]:
    """Processor, cores, memory, system and Python of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def versions() -> dict[str, str]:
    """Every package of this environment."""
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return dict(sorted(found.items()))


def versions_of(python: Path) -> dict[str, str]:
    """Every package of another environment."""
    command = [str(python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.lower().split("==", 1) for line in listed.splitlines() if "==" in line)


def origin(*, commit: str | None = None) -> dict[str, str]:
    """Date, commit and command of this run; `commit` is for a copy without its history."""
    arguments = " ".join(Path(each).name if each.startswith("/") else each for each in sys.argv[1:])
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _commit(),
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {arguments}".strip(),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "src", "benchmarks", "pyproject.toml").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()
