"""One training run: store, feeder, trainer, journal, checkpoints and signals, put together.

    resume -> step, step, ... -> (log) -> (evaluate) -> (save) -> ... -> evaluate, save

What is done every so many steps is decided by the number of the step alone, so that all ranks do
the same, and a resumed run does what the interrupted one would have done.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import statistics
import threading
import time
import zipfile
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xxhash
from torch import distributed

from tokenmill import words
from tokenmill.errors import (
    MissingExtraError,
    StoreError,
    TokenmillError,
    TrainingError,
    UsageError,
)
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.order import weights_to_parts
from tokenmill.stalls import StallMeter
from tokenmill.store.facts import Checksum, Count, Fact, FileFacts, read_fact
from tokenmill.store.layout import seal, sync_folder, unseal, write_synced
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer import loop
from tokenmill.trainer.feeds import TextFeeder
from tokenmill.trainer.options import TrainNumbers, TrainProgress, TrainResult, parse_mixture
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from io import BufferedIOBase, BufferedReader
    from types import FrameType

    from numpy.typing import NDArray

    from tokenmill.store.following import Follower
    from tokenmill.store.reader import Store
    from tokenmill.trainer.loop import Reading, Setup, TrainRanks
    from tokenmill.trainer.options import TrainingData, TrainOptions

    OnProgress = Callable[[TrainProgress], None]


# -------------------------------------------------------------------------------------------------
# What a run writes down: `metrics.jsonl`, one object per line, and TensorBoard files if asked.
#
# A run that is resumed from step k has first the lines after k taken out: they are made again.

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
# What is written down of a step, and what it is called in `TrainProgress`.
LINE = {
    **{name: name for name in ("loss", "tokens", "tokens_per_second", "mfu", "wait_share")},
    **{name: name for name in ("wait_p50_ms", "wait_p99_ms", "memory_bytes", "seconds")},
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
}


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
        if path.exists():
            _cut_after(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / TENSORBOARD), purge_step=resumed_at + 1)

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
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
        for each in (self._file, self._board):
            if each is not None:
                each.close()


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines up to a step; a last line that a crash cut short goes too."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    staged = path.with_suffix(".jsonl.new")
    staged.write_text("".join(kept), encoding="utf-8")
    staged.replace(path)


# -------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM end a run after the step, not in it.
#
# A step may take minutes in which Python runs none of its handlers. So signals are also counted by
# a thread, to which the interpreter writes each one as it comes: it speaks where the main thread
# does not, and ends the run in the middle of the step if it is asked again.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 1.0  # for the main thread to end by itself, if it can


class StopRequest:
    """Remembers that a signal came; a second one acts at once."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.signal: int | None = None
        self._on_request = on_request
        self._before: dict[int, Any] = {}
        self._ends: list[socket.socket] = []
        self._wakeup = -1

    def __enter__(self) -> StopRequest:
        """Listen. Only the main thread can; elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._ends = [*socket.socketpair()]
            self._ends[1].setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            threading.Thread(target=self._count, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self._ends:
            signal.set_wakeup_fd(self._wakeup)
            self._ends[1].close()  # which ends the thread
            self._ends = []

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        self._on_request()

    def _count(self) -> None:
        """In a thread: see each signal as it comes."""
        came = 0
        with self._ends[0] as end:
            while number := end.recv(1):
                came += number[0] in SIGNALS
                if not came:
                    continue
                time.sleep(GRACE_SECONDS)
                if came > 1 and self._ends:  # still listening: the main thread is in its step
                    os.write(2, b"ended in the middle of a step\n")
                    os._exit(128 + number[0])
                if self.signal is None and self._ends:
                    os.write(2, b"stopping after this step; the same again ends it now\n")


# -------------------------------------------------------------------------------------------------
# Checkpoints: folders that are whole, or not there.
#
#   run/checkpoints/step-00000500/   model.pt  optimizer.pt  rng.pt  checkpoint.json
#
# A folder is written under a temporary name, every file synced, and renamed when it is complete;
# what a crash leaves is swept up by the next run. So whatever has its final name was whole once,
# and is refused, never passed over, if it is not any more. checkpoint.json is sealed as the files
# of a store are, and has the checksum of every other file. Tensors are loaded with `weights_only`:
# a checkpoint is data, not a program.

VERSION = 1
FACTS = "checkpoint.json"
PREFIX = "step-"
UNFINISHED = ".unfinished-"
MOST_FACTS_BYTES = 16 << 20
_NAME = re.compile(PREFIX + r"([0-9]{8,18})")
_FILE = re.compile(r"[a-z]+\.pt")
_NO_LINKS = os.O_NOFOLLOW | os.O_NONBLOCK  # a link is not followed, and a pipe not waited for


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one, on disk."""

    path: Path
    facts: dict[str, Any]  # step, loader state, options: everything that is not a tensor

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def load(self, part: str, *, device: torch.device | str = "cpu") -> Any:
        """The tensors of one file, its checksum compared before."""
        name = f"{part}.pt"
        if name not in self.facts["files"]:
            raise self.damaged(f"names no file {name!r}")
        with _open(self.path, name) as file:
            if "checksums" in self.facts and _checksum(file) != self.facts["checksums"][name]:
                raise self.damaged("was changed: its checksum is another", name=name)
            try:
                with zipfile.ZipFile(file) as archive:
                    if any(member.compress_type for member in archive.infolist()):
                        # It could grow to any size.
                        raise ValueError("it is packed, and torch packs nothing")
                file.seek(0)
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
        said = ", ".join(f"{name}={value}" for name, value in saved.items())
        for name, ours in essentials.items():
            if saved.get(name) != ours:
                raise UsageError(
                    f"the run in {str(self.path.parent.parent)!r} has {name}={saved.get(name)!r},"
                    f" and this command {name}={ours!r}: its weights would mean something else",
                    hint=f"resume with what it was begun with, or begin anew in another --out"
                    f" (it was begun with {said})",
                )


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def paths(self) -> list[Path]:
        """Those that were written, oldest first, whatever has become of them since."""
        found = [path for path in self.folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=_step_of)

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
        staged = self._unfinished(final)
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
            parent = self.folder.parent
            free = shutil.disk_usage(parent).free if parent.exists() else 0
            raise TrainingError(
                f"cannot write the checkpoint {str(final)!r}: {error} ({format_size(free)} free"
                " there)",
                hint="make space and go on from the checkpoint before with --resume; --keep 1 keeps"
                " only one",
            ) from error
        for old in self.paths()[: -self.keep]:
            self._remove(old)
        return final

    def _unfinished(self, path: Path) -> Path:
        return self.folder / f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}"

    def _remove(self, path: Path) -> None:
        """Take its name from it first: a crash in the middle must not leave half of one."""
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path.rename(self._unfinished(path)), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a crash has left."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


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
        _check_members(members, step=_step_of(path))
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
    feeding: dict[str, Any] | None = None
    files: dict[str, Count]
    checksums: dict[str, Checksum] | None = None


def _check_members(members: object, *, step: int) -> None:
    """ValueError unless the members are those that `write` writes, and no others."""
    version = members.get("version") if isinstance(members, dict) else None
    if type(version) is int and version != VERSION:
        raise ValueError(f"it has version {version}, and this release reads {VERSION}")
    found = read_fact(members, _Members, where=FACTS)
    for name in ("options", "versions", "feeding", "checksums"):
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
    with contextlib.suppress(TrainingError):
        for name, checksum in read_checkpoint(path).facts.get("checksums", {}).items():
            with _open(path, name) as file:
                if _checksum(file) != checksum:
                    return False
        return True
    return False


def _open(path: Path, name: str) -> BufferedReader:
    """A file of a checkpoint: a plain one, and no link to anywhere."""
    try:
        file = open(path / name, "rb", opener=lambda name, flags: os.open(name, flags | _NO_LINKS))  # noqa: SIM115
    except OSError as error:
        raise _damaged(path, name, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _damaged(path, name, "is no plain file")
    return file


def _checksum(file: BufferedIOBase) -> str:
    """xxh3-128 of a file, which is then at its beginning again."""
    file.seek(0)
    found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    file.seek(0)
    return found


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
        return FileFacts(bytes=file.seek(0, os.SEEK_END), checksum=_checksum(file))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Where the random numbers of this process are."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: object, device: torch.device, *, rank: int = 0) -> None:
    """Put the random numbers where they were, if this rank was there; ValueError if it is none."""
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


# -------------------------------------------------------------------------------------------------
# The run itself.

PARTS_OF_A_RUN = 10  # checkpoints, and evaluations, of a run that does not say how often
LEAST_STEPS = 100  # but not more often than every so many steps
MOST_EVAL_ROWS = 256
STEPS_OF_EVALUATION = 8
LONG_STEP = 60.0  # seconds, about which one is told before
SHOWN_SOURCES = 8  # of a mixture, in its note
FREEZE_AFTER = 3  # steps until all that lives as long as the run has been made
NO_SPLIT = "this store has no split val, so nothing is evaluated; to have one, build it with: {how}"
NOT_YET = (
    "not evaluated after step {step:,}: the build has not come to enough documents of the split val"
)
TELLS_WAIT_SECONDS = 0.5
UNCHECKED = (
    "{path!r} was written by an older tokenmill, without checksums: its tensors are taken as they"
    " are; the next checkpoint has them"
)


def run_training(
    source: TrainingData, options: TrainOptions, *, on_progress: OnProgress | None = None
) -> TrainResult:
    """Train on a store. The ranks of torchrun are found in the environment."""
    if options.tensorboard and find_spec("tensorboard") is None:
        raise MissingExtraError(
            "tensorboard", extra="tensorboard", purpose="writing TensorBoard files"
        )
    ranks = loop.TrainRanks.from_environment()
    setup = loop.settle(options, vocab_size=source.train.vocab_size, ranks=ranks)
    loop.require_memory(setup)
    with _process_group(setup.device, ranks), contextlib.ExitStack() as resources:
        try:
            told = on_progress if ranks.rank == 0 else None
            return TrainingRun(source, setup, told, resources).run()
        except Exception as error:
            if loop.is_out_of_memory(error):
                raise loop.memory_error(setup) from error
            raise


@contextlib.contextmanager
def ranks_in_touch(options: TrainOptions) -> Iterator[None]:
    """Before a run begins: when this returns, every rank has come here."""
    ranks = loop.TrainRanks.from_environment()
    device = loop.find_device(options.device, local_rank=ranks.local_rank)
    with _process_group(device, ranks):
        if ranks.world_size > 1:
            distributed.barrier()
        yield


@contextlib.contextmanager
def _process_group(device: torch.device, ranks: TrainRanks) -> Iterator[None]:
    """The ranks in touch with each other; nothing where there is one, or where they are already."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    if ranks.world_size == 1 or distributed.is_initialized():
        yield
        return
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo", device_id=device if is_cuda else None
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _lengths(loader: Loader) -> NDArray[np.integer]:
    """Of the documents of the batch that comes next."""
    lengths = np.diff(loader.batch(loader.step).cu_seqlens)
    return lengths[lengths > 0]


def _mixture_text(mixture: Mixture, *, by: str) -> str:
    """Which shares of the tokens a mixture draws, of the first of its sources."""
    parts = weights_to_parts(mixture.stages[0].weights)
    shares = [
        f"{name} {part / sum(parts):.1%}" for name, part in zip(mixture.names, parts, strict=True)
    ]
    more = f" and {len(shares) - SHOWN_SOURCES:,} more" if len(shares) > SHOWN_SOURCES else ""
    return f"mixed by {by}: {', '.join(shares[:SHOWN_SOURCES])}{more}"


def _ended_with(error: TokenmillError, steps: int, checkpoint: Path | None) -> TokenmillError:
    """The error that ended the batches, and what is kept of the run."""
    kept = "before its first step"
    if checkpoint is not None:
        kept = f"after {words.count(steps, 'step')}, which are kept in {str(checkpoint)!r}"
    ended = copy.copy(error)
    ended.message = f"{error.message}; the training ended with it {kept}"
    ended.args = (ended.message,)
    return ended


class TrainingRun:
    """Everything of one run in this process."""

    def __init__(
        self,
        source: TrainingData,
        setup: Setup,
        on_progress: OnProgress | None,
        resources: contextlib.ExitStack,
    ) -> None:
        self.setup, self.options = setup, setup.options
        self.out = Path(self.options.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", keep=self.options.keep)
        self.essentials = {**self.options.essentials(), "vocab_size": setup.vocab_size}
        self.parameters = setup.config.num_parameters(setup.vocab_size)
        self._follower = source.follower
        self._built = (lambda: None) if source.beside is None else source.beside.describe
        splits, config = source.train.manifest.splits, source.train.manifest.identity.config
        may_come = bool(config.get("val_fraction") or config.get("split_by_name"))
        # Whether there is a split val, or will be.
        self._evaluates = source.val is not None or (
            self._follower is not None and (may_come or "val" in splits)
        )
        how = "tokenmill build ... --val 0.01" if self.options.tokenizer is None else "--val 0.01"
        self.notes: list[str] = [] if self._evaluates else [NO_SPLIT.format(how=how)]
        self._tell = on_progress or (lambda _: None)
        self._begun = time.perf_counter()
        self._seen = TrainProgress(phase="starting", steps=self.options.steps)
        self._rates: list[float] = []
        self._shares: list[float] = []  # of the device's peak
        # Whether any rank was asked to stop, as all ranks know it.
        self._stops = False
        # Of a run that follows a build: what ended its batches, and which comes first in this step.
        self._unfed: TokenmillError | None = None
        self._whole_step = 0
        self._resources = resources
        self._resume_from = self._find_resume()
        seconds = loop.step_seconds(setup)
        if seconds is not None and seconds > LONG_STEP:
            self.notes.append(
                f"a step will take about {words.spoken(seconds)} on {setup.device};"
                " --batch-tokens and --model make it shorter"
            )
        self.feeder: TextFeeder | DeviceFeeder
        if self.options.feed != "store":
            self.feeder = resources.enter_context(TextFeeder(source.train, setup))
            self.notes.append(f"fed by {self.feeder.describe()}")
        # Ranks would wait for the one that has the longest documents.
        is_dealt = setup.has_documents and setup.ranks.world_size > 1
        dealt = {"balance": "attention", "accumulate": setup.accumulate} if is_dealt else {}
        mixed: Store | Mixture | Follower = source.follower or source.train
        if (mixture := parse_mixture(self.options.mixture)) is not None:
            by, weights = mixture
            mixed = Mixture.from_store(source.train, by=by, weights=weights)
            self.notes.append(_mixture_text(mixed, by=by))
        loader = self._open(
            mixed,
            follow=source.follower is not None,
            shuffle=self.options.shuffle,
            seed=self.options.seed,
            window=self.options.windows,
            **dealt,
        )
        # What a store's rows became; of text that is tokenized in the loop nobody knows.
        self.feeding: dict[str, Any] = {}
        if self.options.feed == "store":
            self.feeding = {"feeding": {**loader.recipe(), "micro_batches": setup.accumulate}}
        self.setup, kernel, notes = loop.choose_kernel(setup, lambda: _lengths(loader))
        self.notes += notes
        if (windows := self.options.windows) is not None:
            parts = [
                "all of a document" if reach is None else f"{reach:,} tokens"
                for _, reach in windows
            ]
            later = [
                f"; {part} from token {begin:,} on"
                for part, (begin, _) in zip(parts[1:], windows[1:], strict=True)
            ]
            self.notes.append(f"attention looks back {parts[0]}{''.join(later)}")
        for message in (*self.notes, self._opening(kernel)):
            self._tell(replace(self._seen, message=message))
        if self._resume_from is not None:
            try:
                loader.load_state_dict(self._resume_from.facts["loader"])
            except RecursionError as error:
                raise self._resume_from.damaged("nests its loader's state too deep") from error
            if grown := loader.growth():
                self.notes.append(grown[0].describe(self.setup.accumulate))
                self._tell(replace(self._seen, message=self.notes[-1]))
        if self.options.feed == "store":
            self.feeder = resources.enter_context(
                DeviceFeeder(loader, device=setup.device, fields=setup.fields)
            )
        # Of a mixture it is written down what was seen of each source.
        self._mixed = loader if 1 < len(loader.mixture.names) <= SHOWN_SOURCES else None
        self._first_batch = loader.step  # as the loader counts: the first one of step 1
        self.meter = resources.enter_context(StallMeter())
        # As in training: another size of cu_seqlens would compile once more.
        sizes = loader.cu_seqlens_sizes()
        self._open_val = functools.partial(
            self._open, shuffle=False, epochs=1, cu_seqlens_capacity=sizes
        )
        self._val = None if source.val is None else self._open_val(source.val)

    def _find_resume(self) -> Checkpoint | None:
        newest = self.checkpoints.newest()
        if newest is not None:
            newest.require(self.essentials)
            if "feed" in newest.facts["essentials"]:
                raise UsageError(
                    f"the run in {str(self.out)!r} tokenized its text while it trained, and where"
                    " in the text it was is not known",
                    hint="begin another in another folder: --out FOLDER",
                )
            before = (newest.facts.get("options") or {}).get("window")
            if before != self.options.window:
                self.notes.append(
                    f"--window is {self.options.window or 'not given'} from here on, and was"
                    f" {before or 'not given'} in the {newest.step:,} steps before"
                )
            if "checksums" not in newest.facts:
                self.notes.append(UNCHECKED.format(path=str(newest.path)))
        return newest

    def _opening(self, kernel: str) -> str:
        """What is about to be done, and what was decided for the user, in one line."""
        setup = self.setup
        compiled = ", compiled in the first step" if setup.compiles else ""
        layers = setup.config.num_layers
        which = "" if setup.recomputed == layers else f" of {setup.recomputed} of {layers} layers"
        lean = f", activations{which} computed again" if setup.recomputed else ""
        within = f", attention within documents by {kernel}" if setup.has_documents else ""
        how = "" if self.options.micro_batch or self.options.accumulate else " (chosen to fit)"
        ranks = f" on each of {setup.ranks.world_size} ranks" if setup.ranks.world_size > 1 else ""
        at = f", from step {self._resume_from.step:,}" if self._resume_from else ""
        return (
            f"training {self.options.model}, {self.parameters / 1e6:,.1f}M parameters,"
            f" {str(setup.dtype).removeprefix('torch.')}{compiled}{within}{lean} on {setup.device};"
            f" {setup.batch_tokens:,} tokens a step: {setup.accumulate} x {setup.micro_batch} rows"
            f" of {setup.seq_len:,}{ranks}{how}{at}"
        )

    def _open(self, source: Store | Mixture | Follower, **said: Any) -> Loader:
        return Loader(
            source,
            seq_len=self.setup.seq_len,
            batch_size=self.setup.micro_batch,
            packing=self.options.packing,
            boundaries=self.options.boundaries,
            rank=self.setup.ranks.rank,
            world_size=self.setup.ranks.world_size,
            **said,
        )

    def run(self) -> TrainResult:
        """All steps that are left."""
        # Reading ahead begins while the model is made.
        batches: Iterable[Any] = self.meter.watch(self.feeder)
        if self._follower is not None:
            batches = self._followed(batches)
            self._resources.enter_context(self._telling_of_waits())
        self.trainer = loop.Trainer(self.setup, batches=batches)
        start = 0 if self._resume_from is None else self._load(self._resume_from)
        self._first_batch -= start * self.setup.accumulate
        is_first = self.setup.ranks.rank == 0
        if is_first:
            self.checkpoints.sweep()
        self.journal = Journal(
            self.out, resumed_at=start, tensorboard=self.options.tensorboard, is_writer=is_first
        )
        self._resources.callback(self.journal.close)
        self.reader = loop.LateReader(self.setup.device)
        with StopRequest(self._stop) as request:
            try:
                stopped = self._steps(start, request)
            except TokenmillError as error:
                if error is not self._unfed:
                    raise
                stopped = request.signal is not None
                checkpoint = self._save_whole_step()
                if not stopped:
                    raise _ended_with(error, self.trainer.step_number, checkpoint) from error
            else:
                if not stopped and start < self.options.steps:
                    self._evaluate()
                checkpoint = self._save()
        if stopped and request.signal is not None:
            signal.raise_signal(request.signal)  # what it would have done without us
        rate = statistics.median(self._rates) if self._rates else None
        made = self.trainer.step_number
        seen = self._progress(
            "done",
            steps=made,
            tokens=made * self.setup.batch_tokens,
            tokens_per_second=rate,
            mfu=statistics.median(self._shares) if self._shares else None,
            memory_bytes=loop.peak_bytes(self.setup.device),
        )
        return TrainResult(
            out=self.out,
            resumed_from=start or None,
            parameters=self.parameters,
            loss=math.nan if seen.loss is None else seen.loss,
            checkpoint=checkpoint or self.checkpoints.folder,
            notes=self.notes,
            **{each.name: getattr(seen, each.name) for each in fields(TrainNumbers)},
        )

    def _stop(self) -> None:
        """In the handler of a signal: after this step, or now where it waits for a build."""
        self._tell(replace(self._seen, message="stopping after this step"))
        # Other ranks may have the batch already, and wait for this one in the step.
        if self._follower is not None and self.setup.ranks.world_size == 1:
            self._follower.end_waiting()

    def _followed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a store that is built meanwhile; `_unfed` is the error that ends them."""
        try:
            yield from batches
        except TokenmillError as error:
            self._unfed = error
            raise
        self._unfed = TrainingError("the build was waited for, and the run was to end")
        raise self._unfed

    @contextlib.contextmanager
    def _telling_of_waits(self) -> Iterator[None]:
        """Say meanwhile what the run waits for."""
        ended, feeder, follower = threading.Event(), self.feeder, self._follower
        assert isinstance(feeder, DeviceFeeder)
        assert follower is not None

        def tell() -> None:
            while not ended.wait(TELLS_WAIT_SECONDS):
                seen = replace(self._progress("waiting"), built=follower.describe())
                if feeder.asked is not None and follower.is_waiting:
                    self._tell(seen)

        thread = threading.Thread(target=tell, name="tokenmill waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _load(self, found: Checkpoint) -> int:
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
        options, trainer, is_alone = self.options, self.trainer, self.setup.ranks.world_size == 1
        often = max(LEAST_STEPS, options.steps // PARTS_OF_A_RUN)
        save_every, eval_every = options.save_every or often, options.eval_every or often
        for step in range(start + 1, options.steps + 1):
            if isinstance(self.feeder, DeviceFeeder):
                self._whole_step = self.feeder.loader.step
            trainer.step()
            if step == start + FREEZE_AFTER:
                loop.freeze_collector(self._resources)
            if step == start + 1:
                self.reader.begin(step)  # compiling is no part of the rate
                trainer.pairs = 0
            if step % options.log_every == 0 or step in (start + 1, options.steps):
                trainer.stop_wanted = request.signal is not None
                # Write what has arrived, and send this step's numbers on their way. All ranks must
                # see the same numbers at the same step: they decide by them.
                readings = list(self.reader.read(wait=not is_alone))
                self.reader.send(step, trainer.row, pairs=trainer.pairs)
                trainer.pairs = 0
                self._write(readings)
                if self._stops and step < options.steps:
                    return True
            if step == options.steps:
                break
            if request.signal is not None and is_alone:
                return True
            is_evaluated = self._evaluates and step % eval_every == 0
            if is_evaluated:
                self._evaluate()
            if step % save_every == 0:
                self._save()
            if is_evaluated or step % save_every == 0:
                self.reader.begin(step)
                trainer.pairs = 0
        return False

    def _write(self, readings: list[Reading]) -> None:
        for reading in readings:
            row, setup, report = reading.row, self.setup, self.meter.report()
            self._stops = self._stops or row.stop > 0
            rate = eta = None
            mfu = None
            if reading.steps and reading.seconds > 0:
                tokens = reading.steps * setup.batch_tokens
                rate = tokens / reading.seconds
                self._rates.append(rate)
                # As on this rank, which may have other documents than the next.
                mfu = self._mfu(rate, pairs=reading.pairs * setup.ranks.world_size / tokens)
                self._shares += [] if mfu is None else [mfu]
            if self._rates:
                left = (self.options.steps - reading.step) * setup.batch_tokens
                eta = left / statistics.median(self._rates[-20:])
            self._seen = seen = self._progress(
                "training",
                step=reading.step,
                loss=row.loss,
                learning_rate=row.learning_rate,
                grad_norm=row.grad_norm,
                tokens=reading.step * setup.batch_tokens,
                tokens_per_second=rate or self._seen.tokens_per_second,
                mfu=mfu or self._seen.mfu,
                wait_share=report.wait_share,
                wait_p50_ms=report.p50_ms,
                wait_p99_ms=report.p99_ms,
                build_wait_seconds=report.build_wait_seconds,
                memory_bytes=loop.peak_bytes(setup.device),
                eta_seconds=eta,
            )
            line = {name: getattr(seen, attribute) for name, attribute in LINE.items()}
            line |= {"tokens_per_second": rate, "seconds": round(seen.seconds, 3)}
            if self._mixed is not None:
                drawn = self._mixed.seen(self._first_batch + reading.step * setup.accumulate)
                line |= {f"tokens/{name}": each["tokens"] for name, each in drawn.items()}
            if self._follower is not None:
                line["build_wait_seconds"] = report.build_wait_seconds
            self.journal.write(reading.step, line if rate is not None else {**line, "mfu": None})
            self._tell(seen)

    def _progress(self, phase: str, **changes: Any) -> TrainProgress:
        changes |= {"seconds": time.perf_counter() - self._begun, "built": self._built()}
        return replace(self._seen, phase=phase, message=None, **changes)

    def _mfu(self, rate: float, *, pairs: float) -> float | None:
        """Of a rate, and of how many tokens each one looked at."""
        setup = self.setup
        peak = loop.peak_flops(setup.device, setup.dtype)
        flops = setup.config.flops_per_token(setup.seq_len, setup.vocab_size, pairs=pairs)
        return None if peak is None else rate * flops / (peak * setup.ranks.world_size)

    def _evaluate(self) -> None:
        if self._val is None and self._evaluates:
            self._val = self._find_val()
        if self._val is None:
            return
        self._tell(self._progress("evaluating"))
        loss = self._val_loss(self._val)
        self._write(list(self.reader.read(wait=True)))
        self._seen = self._progress("training", val_loss=loss)
        self.journal.write(self.trainer.step_number, {"val_loss": loss})
        self._tell(self._seen)

    def _find_val(self) -> Loader | None:
        """Of a store that is built meanwhile, once all rows are there: they are the same always."""
        assert self._follower is not None
        is_finished, store = self._follower.is_finished, self._follower.current
        found, is_there = None, torch.zeros((), device=self.setup.device)
        if "val" in store.manifest.splits:
            found = self._open_val(store.of_split("val"))
            rows = self.setup.micro_batch * self.setup.ranks.world_size
            wanted = -(-self._eval_rows() // rows) * rows
            is_there += int(is_finished or found.layouts()[0].num_whole >= wanted)
        if self.setup.ranks.world_size > 1:
            distributed.all_reduce(is_there, distributed.ReduceOp.MIN)
        if is_there > 0:
            return found
        self._tell(replace(self._seen, message=NOT_YET.format(step=self.trainer.step_number)))
        return None

    def _eval_rows(self) -> int:
        few = MOST_EVAL_ROWS
        if self.setup.device.type == "cpu":  # where all of them may take longer than the run
            few = STEPS_OF_EVALUATION * self.setup.batch_tokens // self.setup.seq_len
        return self.options.eval_rows or max(1, min(MOST_EVAL_ROWS, few))

    @torch.no_grad()
    def _val_loss(self, loader: Loader) -> float:
        """Mean over the labels that count, of the same rows every time. Waits for the device."""
        setup, trainer = self.setup, self.trainer
        rows = setup.micro_batch * setup.ranks.world_size
        num_batches = min(len(loader), -(-self._eval_rows() // rows))
        totals = torch.zeros(2, device=setup.device)
        loader.seek(0)
        trainer.model.eval()
        with DeviceFeeder(loader, device=setup.device, fields=setup.fields) as feeder:
            for _, batch in zip(range(num_batches), feeder, strict=False):
                loss, count = trainer.local_forward(*loop.inputs_of(batch, setup))
                totals += torch.stack((loss, count))
        trainer.model.train()
        if setup.ranks.world_size > 1:
            distributed.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))

    def _save_whole_step(self) -> Path | None:
        """A checkpoint after the last step that was made whole, if one was."""
        assert isinstance(self.feeder, DeviceFeeder)
        if not self.trainer.step_number:
            return None
        self.feeder.loader.seek(self._whole_step)
        return self._save()

    def _save(self) -> Path:
        """A checkpoint of this step, written by the first rank."""
        self._write(list(self.reader.read(wait=True)))
        self._tell(self._progress("saving"))
        ranks, step = self.setup.ranks, self.trainer.step_number
        states: list[Any] = [random_states(self.setup.device)] * ranks.world_size
        if ranks.world_size > 1:
            distributed.all_gather_object(states, states[0])
        gc.collect()  # a good time: nothing is being waited for
        if ranks.rank:
            return self.checkpoints.folder
        facts = {
            "loader": self.feeder.state_dict(),
            "essentials": self.essentials,
            "options": self.options.as_json(),
            "tokens": step * self.setup.batch_tokens,
            "versions": {"torch": torch.__version__},
            **self.feeding,
        }
        tensors = {**self.trainer.state(), "rng": states}
        return self.checkpoints.write(step=step, tensors=tensors, facts=facts)
