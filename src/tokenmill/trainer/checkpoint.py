"""Checkpoints: folders that are whole, or not there.

    run/checkpoints/step-00000500/   model.pt  optimizer.pt  rng.pt  checkpoint.json

A folder is written under a temporary name, every file synced, and renamed when it is complete; so
whatever has its final name can be loaded, and what a crash leaves behind is swept up by the next
run. Tensors are loaded with `weights_only`: a checkpoint is data, not a program.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.config import format_size
from tokenmill.errors import TrainingError, UsageError
from tokenmill.store.durable import sync_folder, write_synced

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION = 1
FACTS = "checkpoint.json"
PREFIX = "step-"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one, on disk."""

    path: Path
    facts: dict[str, Any]
    """Step, loader state, options: everything that is not a tensor."""

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def load(self, part: str, *, device: torch.device | str = "cpu") -> Any:
        """The tensors of one file."""
        return torch.load(self.path / f"{part}.pt", map_location=device, weights_only=True)

    def require(self, essentials: Mapping[str, object]) -> None:
        """Refuse to go on with a run that differs in what gives its weights their meaning."""
        saved = self.facts["essentials"]
        for name, ours in essentials.items():
            if saved.get(name) != ours:
                raise UsageError(
                    f"the run in {str(self.path.parent.parent)!r} has {name}={saved.get(name)!r},"
                    f" and this command {name}={ours!r}: its weights would mean something else",
                    hint=f"resume with what it was begun with, or begin anew in another --out"
                    f" (it was begun with {_said(saved)})",
                )


def _said(essentials: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in essentials.items())


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def complete(self) -> list[Checkpoint]:
        """Those that are whole, oldest first."""
        found = []
        for path in sorted(self.folder.glob(f"{PREFIX}*")):
            facts = _read_facts(path)
            if facts is not None:
                found.append(Checkpoint(path, facts))
        return found

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.complete()), None)

    def write(
        self, *, step: int, tensors: Mapping[str, object], facts: Mapping[str, object]
    ) -> Path:
        """Write one, and remove those that are too old."""
        final = self.folder / f"{PREFIX}{step:08}"
        if _read_facts(final) is not None:
            return final
        staged = self.folder / f"{UNFINISHED}{final.name}-{secrets.token_hex(4)}"
        try:
            staged.mkdir(parents=True)
            sizes = {f"{n}.pt": _save(staged / f"{n}.pt", part) for n, part in tensors.items()}
            members = {"version": VERSION, "step": step, **facts, "files": sizes}
            write_synced(staged / FACTS, json.dumps(members, indent=1).encode())
            sync_folder(staged)
            shutil.rmtree(final, ignore_errors=True)  # of that name, and not whole
            staged.rename(final)
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise self._write_error(error, final) from error
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old.path, ignore_errors=True)
        return final

    def _write_error(self, error: Exception, final: Path) -> TrainingError:
        free = shutil.disk_usage(self.folder.parent).free if self.folder.parent.exists() else 0
        return TrainingError(
            f"cannot write the checkpoint {str(final)!r}: {error} ({format_size(free)} free there)",
            hint="make space and go on from the checkpoint before with --resume; --keep 1 keeps"
            " only one",
        )

    def sweep(self) -> None:
        """Remove what a crash has left behind."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def _save(path: Path, part: object) -> int:
    with path.open("xb") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def _read_facts(path: Path) -> dict[str, Any] | None:
    """The facts of a checkpoint that is whole; None for anything else."""
    try:
        facts = json.loads((path / FACTS).read_bytes())
        sizes = {name: (path / name).stat().st_size for name in facts["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if sizes == facts["files"] and facts.get("version") == VERSION else None


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Where the random numbers of this process stand."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put the random numbers where they stood."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
