"""One training run: store, feeder, trainer, journal, checkpoints and signals, put together.

    resume -> step, step, ... -> (log) -> (evaluate) -> (save) -> ... -> evaluate, save

What is done every so many steps is decided by the number of the step alone, so that all ranks do
the same, and a resumed run does what the interrupted one would have done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import statistics
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
import xxhash
from torch import distributed

from tokenmill.errors import MissingExtraError, StoreError, TrainingError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.stalls import StallMeter
from tokenmill.store.facts import Checksum, Count, Fact, FileFacts, read_fact
from tokenmill.store.layout import seal, sync_folder, unseal, write_synced
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.loop import (
    Collector,
    LateReader,
    Setup,
    Trainer,
    TrainRanks,
    inputs_of,
    is_out_of_memory,
    memory_error,
    peak_bytes,
    peak_flops,
    settle,
)
from tokenmill.trainer.options import TrainProgress, TrainResult
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from tokenmill.store.reader import Store
    from tokenmill.trainer.loop import Reading
    from tokenmill.trainer.options import TrainOptions


# -------------------------------------------------------------------------------------------------
# Loss on the split val: the same rows every time, in their order.

NO_SPLIT = (
    "this store has no split val, so nothing is evaluated; to have one, build it with:"
    " tokenmill build ... --val 0.01"
)


class Evaluation:
    """What is looked at, and how."""

    def __init__(self, store: Store, setup: Setup, *, cu_seqlens_capacity: int) -> None:
        options, ranks = setup.options, setup.ranks
        self.setup = setup
        loader = Loader(
            store,
            seq_len=setup.seq_len,
            batch_size=setup.micro_batch,
            packing=options.packing,
            boundaries=options.boundaries,
            shuffle=False,
            rank=ranks.rank,
            world_size=ranks.world_size,
            epochs=1,
            # As in training: another size would compile once more.
            cu_seqlens_capacity=cu_seqlens_capacity,
        )
        rows = setup.micro_batch * ranks.world_size
        self.num_batches = min(len(loader), -(-options.eval_rows // rows))
        self._loader = loader

    @torch.no_grad()
    def loss(self, trainer: Trainer) -> float:
        """Mean over the labels that count. Waits for the device."""
        totals = torch.zeros(2, device=self.setup.device)
        self._loader.seek(0)
        trainer.model.eval()
        feeder = DeviceFeeder(self._loader, device=self.setup.device, fields=self.setup.fields)
        with feeder:
            for _, batch in zip(range(self.num_batches), feeder, strict=False):
                loss, count = trainer.local_forward(*inputs_of(batch, self.setup.fields))
                totals += torch.stack((loss, count))
        trainer.model.train()
        if self.setup.ranks.world_size > 1:
            distributed.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))


# -------------------------------------------------------------------------------------------------
# What a run writes down: `metrics.jsonl`, one object per line, and TensorBoard files if asked.
#
# A run that is resumed from step k has first the lines after k taken out: they are made again.

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Journal:
    """Writes lines of numbers; on other ranks than the first it writes nothing."""

    def __init__(
        self, out: Path, *, resumed_at: int, tensorboard: bool = False, is_writer: bool = True
    ) -> None:
        self._file = None
        self._board: Any = None
        if not is_writer:
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / METRICS
        _cut_after(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._board = _open_board(out / TENSORBOARD, resumed_at)

    def write(self, step: int, numbers: dict[str, float | int | None]) -> None:
        """One line, and one point of every curve."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines up to a step; a last line that a crash cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    staged = path.with_suffix(".jsonl.new")
    staged.write_text("".join(kept), encoding="utf-8")
    staged.replace(path)


def require_tensorboard() -> None:
    """Say before the run, not after its first steps, that the package is missing."""
    if find_spec("tensorboard") is None:
        raise MissingExtraError(
            "tensorboard", extra="tensorboard", purpose="writing TensorBoard files"
        )


def _open_board(folder: Path, step: int) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


# -------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM end a run after the step, not in it.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that a signal came; a second one acts at once."""

    def __init__(self, on_request: Callable[[], None] | None = None) -> None:
        self.signal: int | None = None
        self._on_request = on_request
        self._before: dict[int, object] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While the block runs. Only the main thread can listen; elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            for number in SIGNALS:
                signal.signal(number, self._note)
        try:
            yield self
        finally:
            self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if self._on_request is not None:
            self._on_request()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def pass_on(self) -> None:
        """Do now what the signal would have done without us."""
        if self.signal is not None:
            signal.raise_signal(self.signal)


# -------------------------------------------------------------------------------------------------
# Checkpoints: folders that are whole, or not there.
#
#   | run/checkpoints/step-00000500/   model.pt  optimizer.pt  rng.pt  checkpoint.json
#
# A folder is written under a temporary name, every file synced, and renamed when it is complete;
# what a crash leaves behind is swept up by the next run. So whatever has its final name was whole
# once, and is refused, never passed over, if it is not any more. checkpoint.json is sealed as the
# files of a store are, and has the checksum of every other file. Tensors are loaded with
# `weights_only`: a checkpoint is data, not a program.

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
        _check_members(members, step=int(path.name.removeprefix(PREFIX)))
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


class _Members(Fact, frozen=True, kw_only=True):
    """What `write` writes; older checkpoints lack those that have a default."""

    version: Count
    step: Count
    tokens: Count = 0
    loader: dict[str, Any]
    essentials: dict[str, Any]
    options: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    files: dict[str, Count]
    checksums: dict[str, Checksum] | None = None


def _check_members(members: object, *, step: int) -> None:
    """ValueError unless the members are those that `write` writes, and no others."""
    version = members.get("version") if isinstance(members, dict) else None
    if type(version) is int and version != VERSION:
        raise ValueError(f"it has version {version}, and this release reads {VERSION}")
    found = read_fact(members, _Members, where=FACTS)
    for name in ("options", "versions", "checksums"):
        # A member that older checkpoints lack is left out, never null.
        if name in cast("dict[str, Any]", members) and getattr(found, name) is None:
            raise ValueError(f"its member {name!r} is null")
    if found.step != step:
        raise ValueError(f"it is of step {found.step}, and its folder of step {step}")
    for name in found.files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"it names the file {name!r}, which no checkpoint has")
    if found.checksums is not None and found.checksums.keys() != found.files.keys():
        raise ValueError("its checksums are not those of its files")


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


if TYPE_CHECKING:
    OnProgress = Callable[[TrainProgress], None]

PARTS_OF_A_RUN = 10
"""Checkpoints, and evaluations, of a run that does not say how often ..."""
LEAST_STEPS = 100
"""... but not more often than every so many steps."""
UNCHECKED = (
    "{path!r} was written by an older tokenmill, without checksums: its tensors are taken as they"
    " are; the next checkpoint has them"
)


def run_training(
    store: Store, val: Store | None, options: TrainOptions, *, on_progress: OnProgress | None = None
) -> TrainResult:
    """Train on a store. The ranks of torchrun are found in the environment."""
    if options.tensorboard:
        require_tensorboard()
    ranks = TrainRanks.from_environment()
    setup = settle(options, vocab_size=store.vocab_size, ranks=ranks)
    with _process_group(setup):
        run = TrainingRun(store, val, setup, on_progress if ranks.rank == 0 else None)
        try:
            return run.run()
        except Exception as error:
            if is_out_of_memory(error):
                raise memory_error(setup) from error
            raise
        finally:
            run.close()


@contextlib.contextmanager
def _process_group(setup: Setup) -> Iterator[None]:
    """The ranks in touch with each other; nothing where there is one, or where they are already."""
    if setup.device.type == "cuda":
        torch.cuda.set_device(setup.device)
    if setup.ranks.world_size == 1 or distributed.is_initialized():
        yield
        return
    is_cuda = setup.device.type == "cuda"
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo", device_id=setup.device if is_cuda else None
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


class TrainingRun:
    """Everything of one run in this process."""

    def __init__(
        self, store: Store, val: Store | None, setup: Setup, on_progress: OnProgress | None
    ) -> None:
        options = setup.options
        self.setup = setup
        self.options = options
        self.store = store
        self.out = Path(options.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", keep=options.keep)
        self.notes: list[str] = [] if val is not None else [NO_SPLIT]
        self._tell = on_progress
        self._begun = time.perf_counter()
        self._seen = TrainProgress(phase="starting", steps=options.steps)
        self._rates: list[float] = []
        self._stops = False
        """Whether any rank was asked to stop, as all ranks know it."""
        self._resources = contextlib.ExitStack()
        self._collector = Collector()
        self._resources.callback(self._collector.close)
        self._resume_from = self._find_resume()
        self._say("starting", *self.notes, self._opening())
        loader = self._make_loader()
        self.feeder = DeviceFeeder(loader, device=setup.device, fields=setup.fields)
        self._resources.enter_context(self.feeder)
        self.meter = self._resources.enter_context(StallMeter())
        self.evaluation: Evaluation | None = None
        if val is not None:
            capacity = loader.capacity(setup.seq_len)
            self.evaluation = Evaluation(val, setup, cu_seqlens_capacity=capacity)

    def _find_resume(self) -> Checkpoint | None:
        if not self.options.resume and (paths := self.checkpoints.paths()):
            step = int(paths[-1].name.removeprefix(PREFIX))
            raise UsageError(
                f"{str(self.out)!r} holds a run already, at step {step:,}",
                hint="go on with it: --resume; or begin another in another folder: --out FOLDER",
            )
        newest = self.checkpoints.newest()
        if newest is not None:
            newest.require(self._essentials())
            if not newest.is_checked:
                self.notes.append(UNCHECKED.format(path=str(newest.path)))
        return newest

    def _essentials(self) -> dict[str, object]:
        return {**self.options.essentials(), "vocab_size": self.setup.vocab_size}

    def _opening(self) -> str:
        """What is about to be done, and what was decided for the user, in one line."""
        setup = self.setup
        compiled = ", compiled in the first step" if setup.compiles else ""
        lean = ", activations computed again" if setup.checkpointing else ""
        how = "" if self.options.micro_batch or self.options.accumulate else " (chosen to fit)"
        ranks = f" on each of {setup.ranks.world_size} ranks" if setup.ranks.world_size > 1 else ""
        at = f", from step {self._resume_from.step:,}" if self._resume_from else ""
        return (
            f"training {self.options.model}, {self._parameters / 1e6:,.1f}M parameters,"
            f" {str(setup.dtype).removeprefix('torch.')}{compiled}{lean} on {setup.device};"
            f" {setup.batch_tokens:,} tokens a step: {setup.accumulate} x {setup.micro_batch} rows"
            f" of {setup.seq_len:,}{ranks}{how}{at}"
        )

    @property
    def _parameters(self) -> int:
        return self.setup.config.num_parameters(self.setup.vocab_size)

    def _make_loader(self) -> Loader:
        options, ranks = self.options, self.setup.ranks
        loader = Loader(
            self.store,
            seq_len=options.seq_len,
            batch_size=self.setup.micro_batch,
            packing=options.packing,
            boundaries=options.boundaries,
            shuffle=options.shuffle,
            seed=options.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        if self._resume_from is not None:
            try:
                loader.load_state_dict(self._resume_from.facts["loader"])
            except RecursionError as error:
                raise self._resume_from.damaged("nests its loader's state too deep") from error
        return loader

    def run(self) -> TrainResult:
        """All steps that are left."""
        # Reading ahead begins while the model is made.
        batches = self.meter.watch(self.feeder)
        self.trainer = Trainer(self.setup, batches=batches)
        start = self._load()
        is_first = self.setup.ranks.rank == 0
        if is_first:
            self.checkpoints.sweep()
        self.journal = Journal(
            self.out,
            resumed_at=start,
            tensorboard=self.options.tensorboard,
            is_writer=is_first,
        )
        self._resources.callback(self.journal.close)
        self.reader = LateReader(self.setup.device)
        request = StopRequest(lambda: self._say(self._seen.phase, "stopping after this step"))
        with request.listening():
            stopped = self._steps(start, request)
            is_done = start == self.options.steps
            checkpoint = self._save() if stopped or is_done else self._finish()
        if stopped:
            request.pass_on()
        return self._result(start, checkpoint)

    def _load(self) -> int:
        found = self._resume_from
        if found is None:
            return 0
        device, rank = self.setup.device, self.setup.ranks.rank
        if found.step > self.options.steps:
            raise UsageError(
                f"the run in {str(self.out)!r} has made {found.step:,} steps already, more than"
                f" steps={self.options.steps:,}",
                hint=f"use --steps with a number above {found.step}",
            )
        state = {name: found.load(name, device=device) for name in ("model", "optimizer")}
        states = found.load("rng")
        try:
            set_random_states(states, device, rank=rank)
            self.trainer.load_state(state, step=found.step)
        except ValueError as error:
            raise found.damaged(f"is not of this run: {error}", name="") from error
        return found.step

    def _steps(self, start: int, request: StopRequest) -> bool:
        """Step by step to the end; True if it was asked to stop before."""
        options, trainer = self.options, self.trainer
        often = max(LEAST_STEPS, options.steps // PARTS_OF_A_RUN)
        save_every, eval_every = options.save_every or often, options.eval_every or often
        for step in range(start + 1, options.steps + 1):
            trainer.step()
            self._collector.after_step(step - start)
            if step == start + 1:
                self.reader.begin(step)  # compiling is no part of the rate
            is_logged = step % options.log_every == 0 or step in (start + 1, options.steps)
            stops = self._log(step, request) if is_logged else False
            if step == options.steps:
                break
            if stops or (request.signal is not None and self.setup.ranks.world_size == 1):
                return True
            is_evaluated = self.evaluation is not None and step % eval_every == 0
            if is_evaluated:
                self._evaluate()
            if step % save_every == 0:
                self._save()
            if is_evaluated or step % save_every == 0:
                self.reader.begin(step)
        return False

    def _log(self, step: int, request: StopRequest) -> bool:
        """Send this step's numbers on their way, write those that have arrived; True to stop."""
        trainer, is_alone = self.trainer, self.setup.ranks.world_size == 1
        trainer.stop_wanted = request.signal is not None
        # All ranks must see the same numbers at the same step: they decide by them.
        readings = list(self.reader.read(wait=not is_alone))
        self.reader.send(step, trainer.row)
        self._write(readings)
        return self._stops

    def _write(self, readings: list[Reading]) -> None:
        for reading in readings:
            row, setup = reading.row, self.setup
            self._stops = self._stops or row.stop > 0
            rate = None
            if reading.steps and reading.seconds > 0:
                rate = reading.steps * setup.batch_tokens / reading.seconds
                self._rates.append(rate)
            self._seen = self._progress(
                "training",
                step=reading.step,
                loss=row.loss,
                learning_rate=row.learning_rate,
                grad_norm=row.grad_norm,
                tokens=reading.step * setup.batch_tokens,
                tokens_per_second=rate or self._seen.tokens_per_second,
                mfu=self._mfu(rate) or self._seen.mfu,
                **self._waits(),
                memory_bytes=peak_bytes(setup.device),
                eta_seconds=self._eta(reading.step),
            )
            self.journal.write(reading.step, journal_line(self._seen, rate=rate))
            self._send(self._seen)

    def _progress(self, phase: str, **changes: Any) -> TrainProgress:
        seconds = time.perf_counter() - self._begun
        return replace(self._seen, phase=phase, seconds=seconds, message=None, **changes)

    def _waits(self) -> dict[str, float | None]:
        report = self.meter.report()
        return {
            "wait_share": report.wait_share,
            "wait_p50_ms": report.p50_ms,
            "wait_p99_ms": report.p99_ms,
        }

    def _mfu(self, rate: float | None) -> float | None:
        setup = self.setup
        peak = peak_flops(setup.device, setup.dtype)
        if peak is None or rate is None:
            return None
        flops = setup.config.flops_per_token(setup.seq_len, setup.vocab_size)
        return rate * flops / (peak * setup.ranks.world_size)

    def _eta(self, step: int) -> float | None:
        if not self._rates:
            return None
        rate = statistics.median(self._rates[-20:])
        return (self.options.steps - step) * self.setup.batch_tokens / rate

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        self._send(self._progress("evaluating"))
        loss = self.evaluation.loss(self.trainer)
        self._write(list(self.reader.read(wait=True)))
        self._seen = self._progress("training", val_loss=loss)
        self.journal.write(self.trainer.step_number, {"val_loss": loss})
        self._send(self._seen)

    def _save(self) -> Path:
        """A checkpoint of this step, written by the first rank."""
        self._write(list(self.reader.read(wait=True)))
        self._send(self._progress("saving"))
        ranks, device = self.setup.ranks, self.setup.device
        states: list[Any] = [random_states(device)]
        if ranks.world_size > 1:
            mine = states[0]
            states = [None] * ranks.world_size
            distributed.all_gather_object(states, mine)
        self._collector.pause()
        step = self.trainer.step_number
        if ranks.rank:
            return self.checkpoints.folder
        facts = {
            "loader": self.feeder.state_dict(),
            "essentials": self._essentials(),
            "options": self.options.as_json(),
            "tokens": step * self.setup.batch_tokens,
            "versions": {"torch": torch.__version__},
        }
        tensors = {**self.trainer.state(), "rng": states}
        return self.checkpoints.write(step=step, tensors=tensors, facts=facts)

    def _finish(self) -> Path:
        if self.evaluation is not None:
            self._evaluate()
        return self._save()

    def _result(self, start: int, checkpoint: Path) -> TrainResult:
        seen = self._seen
        rate = statistics.median(self._rates) if self._rates else None
        return TrainResult(
            out=self.out,
            steps=self.trainer.step_number,
            resumed_from=start or None,
            parameters=self._parameters,
            loss=float("nan") if seen.loss is None else seen.loss,
            val_loss=seen.val_loss,
            tokens=self.trainer.step_number * self.setup.batch_tokens,
            seconds=time.perf_counter() - self._begun,
            tokens_per_second=rate,
            mfu=self._mfu(rate),
            wait_share=seen.wait_share,
            wait_p50_ms=seen.wait_p50_ms,
            wait_p99_ms=seen.wait_p99_ms,
            memory_bytes=peak_bytes(self.setup.device),
            checkpoint=checkpoint,
            notes=self.notes,
        )

    def _say(self, phase: str, *messages: str) -> None:
        for message in messages:
            self._send(replace(self._seen, phase=phase, message=message))

    def _send(self, progress: TrainProgress) -> None:
        if self._tell is not None:
            self._tell(progress)

    def close(self) -> None:
        """End threads, close files."""
        self._resources.close()


def journal_line(seen: TrainProgress, *, rate: float | None) -> dict[str, float | int | None]:
    """What is written down of a step."""
    return {
        "loss": seen.loss,
        "tokens": seen.tokens,
        "tokens_per_second": rate,
        "mfu": seen.mfu if rate is not None else None,
        "wait_share": seen.wait_share,
        "wait_p50_ms": seen.wait_p50_ms,
        "wait_p99_ms": seen.wait_p99_ms,
        "memory_bytes": seen.memory_bytes,
        "seconds": round(seen.seconds, 3),
        "lr": seen.learning_rate,
        "grad_norm": seen.grad_norm,
    }
