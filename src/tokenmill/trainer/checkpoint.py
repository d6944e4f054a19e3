"""Checkpoints: folders that are whole, or not there.

    run/checkpoints/step-00000500/   model.pt  optimizer.pt  rng.pt  checkpoint.json

A folder is written under a temporary name, every file synced, and renamed when it is complete; what
a crash leaves behind is swept up by the next run. So whatever has its final name was whole once,
and is refused, never passed over, if it is not any more. checkpoint.json is sealed as the files of
a store are, and has the checksum of every other file. Tensors are loaded with `weights_only`: a
checkpoint is data, not a program.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import stat
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
import xxhash

from tokenmill.config import format_size
from tokenmill.errors import StoreError, TrainingError, UsageError
from tokenmill.store.durable import sync_folder, write_synced
from tokenmill.store.facts import FileFacts
from tokenmill.store.fields import Fields
from tokenmill.store.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION = 1
FACTS = "checkpoint.json"
PREFIX = "step-"
UNFINISHED = ".unfinished-"
MOST_FACTS_BYTES = 16 << 20
READ_BYTES = 1 << 20
_NAME = re.compile(PREFIX + r"([0-9]{8,18})")
_FILE = re.compile(r"[a-z]+\.pt")
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""A link is not followed, and a pipe not waited for."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one, on disk."""

    path: Path
    facts: dict[str, Any]
    """Step, loader state, options: everything that is not a tensor."""

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def is_checked(self) -> bool:
        """Whether it has checksums; older ones have none."""
        return "checksums" in self.facts

    def load(self, part: str, *, device: torch.device | str = "cpu") -> Any:
        """The tensors of one file, its checksum compared before."""
        name = f"{part}.pt"
        if name not in self.facts["files"]:
            raise self.damaged(f"names no file {name!r}")
        with _open(self.path, name) as file:
            if self.is_checked and _checksum(file) != self.facts["checksums"][name]:
                raise self.damaged("was changed: its checksum is another", name=name)
            try:
                _require_stored(file)
                return torch.load(file, map_location=device, weights_only=True)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # whatever torch makes of bytes that it did not write
                what = str(error).partition("\n")[0] or type(error).__name__
                raise self.damaged(f"cannot be loaded: {what[:200]}", name=name) from error

    def damaged(self, what: str, *, name: str = FACTS) -> TrainingError:
        """The refusal to go on from it."""
        return _damaged(self.path, name, what)

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

    def paths(self) -> list[Path]:
        """Those that were written, oldest first, whatever has become of them since."""
        found = [path for path in self.folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))

    def newest(self) -> Checkpoint | None:
        """The one to go on from; TrainingError if it is not as it was written."""
        paths = self.paths()
        return read_checkpoint(paths[-1]) if paths else None

    def write(
        self, *, step: int, tensors: Mapping[str, object], facts: Mapping[str, object]
    ) -> Path:
        """Write one, and remove those that are too old."""
        final = self.folder / f"{PREFIX}{step:08}"
        if _is_whole(final):
            return final
        staged = self.folder / f"{UNFINISHED}{final.name}-{secrets.token_hex(4)}"
        try:
            staged.mkdir(parents=True)
            files = {f"{n}.pt": _save(staged / f"{n}.pt", part) for n, part in tensors.items()}
            members = {
                "version": VERSION,
                "step": step,
                **facts,
                "files": {name: file.bytes for name, file in files.items()},
                "checksums": {name: file.checksum for name, file in files.items()},
            }
            write_synced(staged / FACTS, seal(cast("dict[str, Any]", members)))
            sync_folder(staged)
            self._remove(final)  # of that name, and not whole
            staged.rename(final)
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise self._write_error(error, final) from error
        for old in self.paths()[: -self.keep]:
            self._remove(old)
        return final

    def _remove(self, path: Path) -> None:
        """Take its name from it first: a crash in the middle must not leave half of one."""
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        away = self.folder / f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}"
        shutil.rmtree(path.rename(away), ignore_errors=True)

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


def read_checkpoint(path: Path) -> Checkpoint:
    """One of a run; TrainingError says what is wrong with it, and what to do."""
    if path.is_symlink() or not path.is_dir():
        raise _damaged(path, "", "is no folder but a link or a file")
    with _open(path, FACTS) as file:
        data = file.read(MOST_FACTS_BYTES + 1)
    if len(data) > MOST_FACTS_BYTES:
        raise _damaged(path, FACTS, f"is larger than {format_size(MOST_FACTS_BYTES)}")
    try:
        # Older ones have no checksums; a newer one that lost the name has members too many.
        is_sealed = b'"checksums"' in data
        members: Any = unseal(data, path=path / FACTS) if is_sealed else json.loads(data)
        _check_members(Fields(members, where=FACTS), members, step=path.name.removeprefix(PREFIX))
    except StoreError as error:
        problem = error.message.removeprefix(f"{str(path / FACTS)!r} ")
        raise _damaged(path, FACTS, problem) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, FACTS, f"cannot be understood: {error}") from error
    for name, size in members["files"].items():
        with _open(path, name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise _damaged(path, name, f"has {found:,} bytes, not {size:,}")
    return Checkpoint(path, members)


def _check_members(source: Fields, members: dict[str, Any], *, step: str) -> None:
    """ValueError unless the members are those that `write` writes, and no others."""
    if (version := source.integer("version")) != VERSION:
        raise ValueError(f"it has version {version}, and this release reads {VERSION}")
    if source.integer("step") != int(step):
        raise ValueError(f"it is of step {members['step']}, and its folder of step {int(step)}")
    for name in ("loader", "essentials"):
        source.mapping(name)
    for name in ("options", "versions"):
        source.mapping(name) if source.has(name) else None
    source.integer("tokens") if source.has("tokens") else None
    files = Fields(source.mapping("files"), where=f"{FACTS}.files")
    for name in members["files"]:
        if not _FILE.fullmatch(name):
            raise ValueError(f"it names the file {name!r}, which no checkpoint has")
        files.integer(name)
    if source.has("checksums"):
        checksums = source.child("checksums")
        for name in members["files"]:
            checksums.checksum(name)
        checksums.finish()
    source.finish()


def _is_whole(path: Path) -> bool:
    try:
        checkpoint = read_checkpoint(path)
        for name, checksum in checkpoint.facts.get("checksums", {}).items():
            with _open(path, name) as file:
                if _checksum(file) != checksum:
                    return False
    except TrainingError:
        return False
    return True


def _open(path: Path, name: str) -> BinaryIO:
    """A file of a checkpoint: a plain one, and no link to anywhere."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | _NO_LINKS)

    try:
        file = open(path / name, "rb", opener=without_links)  # noqa: SIM115
    except OSError as error:
        raise _damaged(path, name, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or (path / name).is_symlink():
        file.close()
        raise _damaged(path, name, "is no plain file")
    return file


def _checksum(file: BinaryIO) -> str:
    """xxh3-128 of a file, which is then at its beginning again."""
    seen = xxhash.xxh3_128()
    while block := file.read(READ_BYTES):
        seen.update(block)
    file.seek(0)
    return seen.hexdigest()


def _require_stored(file: BinaryIO) -> None:
    """ValueError for an archive with packed members: it could grow to any size."""
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type for member in archive.infolist()):
            raise ValueError("it is packed, and torch packs nothing")
    file.seek(0)


def _damaged(path: Path, name: str, what: str) -> TrainingError:
    known = Checkpoints(path.parent, keep=1).paths()
    before = known[: known.index(path)] if path in known else []
    away = path.with_name(f"damaged-{path.name}")
    move = f"mv {shlex.quote(str(path))} {shlex.quote(str(away))}"
    return TrainingError(
        f"{str(path / name)!r} {what}; a run that went on from this checkpoint could be another",
        hint=f"go on from {before[-1].name!r}, the one before: {move}, then --resume"
        if before
        else "restore its folder from a copy, or begin anew in another --out",
    )


def _save(path: Path, part: object) -> FileFacts:
    with path.open("x+b") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return FileFacts(bytes=size, checksum=_checksum(file))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Where the random numbers of this process stand."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: object, device: torch.device, *, rank: int = 0) -> None:
    """Put the random numbers where they stood, if this rank was there; ValueError if it is none."""
    if not isinstance(states, list) or not states or not isinstance(states[0], dict):
        raise ValueError("the random numbers are no list of states")
    if rank >= len(states):
        return
    try:
        torch.set_rng_state(states[rank]["cpu"].cpu())
        if device.type == "cuda" and "cuda" in states[rank]:
            torch.cuda.set_rng_state(states[rank]["cuda"].cpu(), device)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the random numbers have no such state: {error}") from error
