"""The verb `export_store`: a store out, in another project's format. The same call again resumes.

    open the splits -> plan parts -> what is left to do -> workers -> index files

Everything before the workers start only reads. Each part commits by itself; the index, written
last, makes the export complete.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import secrets
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from tokenmill.errors import BuildError, StoreError, UsageError
from tokenmill.interop.base import (
    WRITE_HINT,
    ExportOptions,
    ExportPlan,
    ExportTask,
    FileLink,
    PartDone,
    complete_settings,
    get_format,
    local_path,
)
from tokenmill.interop.records import rows_note
from tokenmill.loader.packing import find_packing
from tokenmill.options import PACKINGS
from tokenmill.runners.local import physical_cores
from tokenmill.store.durable import (
    checksum_of,
    replace_file,
    seal,
    sync_folder,
    unseal,
    write_error,
)
from tokenmill.store.layout import StoreLayout
from tokenmill.store.lock import StoreLock
from tokenmill.store.reader import Store
from tokenmill.store.receipts import read_manifest
from tokenmill.store.write import AHEAD_BYTES, WRITE_BYTES, begin_writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from tokenmill.files import PathInput
    from tokenmill.interop.base import Format, SharedFile
    from tokenmill.store.durable import Json


# -------------------------------------------------------------------------------------------------
# The files of an export's parts: written under other names, synced, renamed, receipted.
#
#   | out/.tokenmill-export/export.json       what is being exported here, and how
#   |                       <part>.json       the receipt of a part that is complete
#   |                       tmp/<part>-.../   files that have no name yet
#   |                       shared/<file>     files that many parts fill
#
# After a crash at any moment: a file that has its final name is whole, and a receipt's files are
# there. A shared file gets its name after the last part; until then receipts speak of its
# stretches.

if TYPE_CHECKING:
    OnBytes = Callable[[int], None]

BOOKS = ".tokenmill-export"
RECEIPT_VERSION = 1
COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ExportFolder:
    """The paths of an export."""

    root: Path

    @property
    def books(self) -> StoreLayout:
        """Where receipts, locks and temporary files are; laid out as a store's, as far as it is."""
        return StoreLayout(self.root / BOOKS)

    @property
    def tmp(self) -> Path:
        return self.books.tmp

    @property
    def shared(self) -> Path:
        return self.books.root / "shared"

    @property
    def title(self) -> Path:
        return self.books.root / "export.json"

    def receipt(self, part: str) -> Path:
        return self.books.root / "parts" / f"{part}.json"

    def create(self) -> None:
        """Make the folders that every export needs."""
        for folder in (self.books.root / "parts", self.tmp):
            folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.root)


class OutFile(io.FileIO):
    """A file of a part, or a range of a shared one, as every library that writes takes one."""

    def __init__(
        self, path: Path, *, name: str, on_bytes: OnBytes, offset: int | None = None
    ) -> None:
        super().__init__(path, "xb" if offset is None else "r+b")
        self.path = path
        self.name = name
        self.offset = offset
        self.bytes = 0
        """Written so far."""
        self._begun = 0
        self._hash = xxhash.xxh3_128()
        self._on_bytes = on_bytes
        if offset is not None:
            self.seek(offset)

    def write(self, block: Any) -> int:
        """Write all of a block, of any contiguous kind."""
        left = memoryview(block).cast("B")
        count = len(left)
        while left:
            # A write may be cut short, most often when the disk is nearly full.
            piece = left[:WRITE_BYTES]
            piece = piece[: super().write(piece)]
            self._hash.update(piece)
            left = left[len(piece) :]
        self.bytes += count
        if self.bytes - self._begun >= AHEAD_BYTES:
            begin_writing(self.fileno(), (self.offset or 0) + self._begun, self.bytes - self._begun)
            self._begun = self.bytes
        self._on_bytes(count)
        return count

    @property
    def checksum(self) -> str:
        """xxh3-128 of what was written so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Wait until all of it is on the disk."""
        self.close()
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


@dataclass(slots=True)
class PartFiles:
    """The files of one part while they are made; as a context manager: no commit, no trace."""

    folder: ExportFolder
    part: ExportTask
    link_mode: FileLink = FileLink.NEVER
    on_bytes: OnBytes = lambda _: None
    """Told of all that is written."""
    _staging: Path = field(init=False)
    _open: list[OutFile] = field(default_factory=list)
    _linked: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mark = f"{self.part.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._staging = self.folder.tmp / mark
        try:
            self._staging.mkdir(parents=True)
        except OSError as error:
            raise write_error(error, path=self._staging) from error

    def create(self, name: str) -> OutFile:
        """A new file of the part, to be written from its beginning to its end."""
        self._expect(name)
        file = OutFile(self._staged(name), name=name, on_bytes=self.on_bytes)
        self._open.append(file)
        return file

    def write(self, name: str, data: bytes) -> None:
        """A new file with these bytes."""
        self.create(name).write(data)

    def stretch(self, name: str, *, offset: int) -> OutFile:
        """A stretch of a shared file, from a byte on."""
        path = self.folder.shared / _flat(name)
        file = OutFile(path, name=name, on_bytes=self.on_bytes, offset=offset)
        self._open.append(file)
        return file

    def link_or_copy(self, name: str, source: Path, *, checksum: str | None = None) -> bool:
        """A file with the bytes of a store's file; True where it is a hard link to it.

        A copy is compared with `checksum`, which a link takes on trust: nothing is read for it.
        """
        self._expect(name)
        if self.link_mode is not FileLink.NEVER and self._try_link(name, source, checksum):
            return True
        copy_into(self.create(name), source, checksum=checksum)
        return False

    def _try_link(self, name: str, source: Path, checksum: str | None) -> bool:
        try:
            os.link(source, self._staged(name))
        except OSError as error:
            if self.link_mode is FileLink.IF_POSSIBLE:
                return False
            raise _unlinkable(source, self.folder.root, error) from error
        self._linked[name] = source.stat().st_size, checksum or ""
        return True

    def _staged(self, name: str) -> Path:
        return self._staging / _flat(name)

    def _expect(self, name: str) -> None:
        if name not in self.part.files:
            raise ValueError(f"part {self.part.name!r} did not plan the file {name!r}")

    def commit(self, export: str, facts: Mapping[str, Json], shared: tuple[str, ...] = ()) -> None:
        """Give the files their names, then write the receipt; `shared` are files to be named."""
        try:
            made = self._finish_all()
            if missing := set(self.part.files) - {*made, *self._linked, *shared}:
                raise ValueError(f"part {self.part.name!r} did not make {sorted(missing)}")
            for name in (*made, *self._linked):
                self._publish(self._staged(name), name)
            for name in shared:
                if (self.folder.shared / _flat(name)).exists():
                    self._publish(self.folder.shared / _flat(name), name)
            for parent in sorted({(self.folder.root / name).parent for name in self.part.files}):
                sync_folder(parent)
            self._write_receipt(export, facts, made, shared)
        except OSError as error:
            raise write_error(error, path=self.folder.root) from error
        self._staging.rmdir()

    def _finish_all(self) -> dict[str, OutFile]:
        for file in self._open:
            file.finish()
        return {file.name: file for file in self._open if file.offset is None}

    def _publish(self, staged: Path, name: str) -> None:
        target = self.folder.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)

    def _write_receipt(
        self,
        export: str,
        facts: Mapping[str, Json],
        made: Mapping[str, OutFile],
        shared: tuple[str, ...],
    ) -> None:
        files: dict[str, Json] = {
            name: {"bytes": (self.folder.root / name).stat().st_size} for name in made
        }
        for name, (size, checksum) in self._linked.items():
            files[name] = {"bytes": size, "checksum": checksum, "linked": True}
        for name in shared:
            size = (self.folder.root / name).stat().st_size
            files[name] = {"bytes": size}
        stretches: list[Json] = [
            {
                "file": file.name,
                "offset": file.offset,
                "bytes": file.bytes,
                "checksum": file.checksum,
            }
            for file in self._open
            if file.offset is not None
        ]
        members: dict[str, Json] = {
            "version": RECEIPT_VERSION,
            "export": export,
            "part": self.part.name,
            "files": files,
            "stretches": stretches,
            "facts": dict(facts),
        }
        receipt = self.folder.receipt(self.part.name)
        replace_file(self.folder.books, receipt, seal(members))

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._open:
            file.close()
        shutil.rmtree(self._staging, ignore_errors=True)


def copy_into(file: OutFile, source: Path, *, checksum: str | None, offset: int = 0) -> None:
    """Append the bytes of a file, from an offset on, and see that they have the checksum."""
    before = file.bytes
    seen = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as reader:
        reader.seek(offset)
        buffer = memoryview(bytearray(COPY_BYTES))
        while count := reader.readinto(buffer):
            file.write(buffer[:count])
            if before:
                seen.update(buffer[:count])
    found = seen.hexdigest() if before else file.checksum
    if checksum is not None and found != checksum:
        raise StoreError(
            f"{str(source)!r} was changed: its checksum is {found}, not the {checksum} that the"
            " store says; nothing of it was exported",
            hint="see what is damaged with: tokenmill verify STORE",
        )


def find_done(
    folder: ExportFolder, part: ExportTask, *, export: str, shared: Mapping[str, SharedFile]
) -> PartDone | None:
    """A part that is complete; None where it must be made (again). Sizes of files are checked."""
    path = folder.receipt(part.name)
    try:
        members = unseal(path.read_bytes(), path=path)
    except (OSError, StoreError):
        return None
    files, facts, stretches = members.get("files"), members.get("facts"), members.get("stretches")
    if members.get("export") != export or not isinstance(files, dict):
        return None
    if not isinstance(facts, dict) or not isinstance(stretches, list):
        return None
    sizes: dict[str, int] = {}
    for name, entry in files.items():
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if not isinstance(size, int) or not _has_size(folder.root / name, size):
            return None
        sizes[name] = size
    for stretch in stretches:
        name = str(stretch.get("file")) if isinstance(stretch, dict) else ""
        if name not in shared or not _has_shared(folder, shared[name]):
            return None
    return PartDone(part=part, files=sizes, facts=facts)


def title_of(path: Path) -> Mapping[str, Json]:
    """What an export says that a path is in, or a part of; nothing where none says it."""
    for folder in (path, *path.absolute().parents[:2]):
        title = ExportFolder(folder).title
        if title.is_file():
            try:
                return unseal(title.read_bytes(), path=title)
            except (OSError, StoreError):
                return {}
    return {}


def make_shared(folder: ExportFolder, shared: SharedFile) -> None:
    """The file whose stretches are to be written, of its full size; kept where it is there.

    One that has its name already is taken back: it is not complete after all.
    """
    path = folder.shared / _flat(shared.name)
    if _has_size(path, shared.bytes):
        return
    try:
        folder.shared.mkdir(parents=True, exist_ok=True)
        if _has_size(folder.root / shared.name, shared.bytes):
            (folder.root / shared.name).replace(path)
            return
        with path.open("wb") as file:
            file.truncate(shared.bytes)
    except OSError as error:
        raise write_error(error, path=path) from error


def _has_shared(folder: ExportFolder, shared: SharedFile) -> bool:
    staged = folder.shared / _flat(shared.name)
    return _has_size(staged, shared.bytes) or _has_size(folder.root / shared.name, shared.bytes)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _flat(name: str) -> str:
    """A name for the temporary folder, which has no folders in it."""
    return name.replace("/", "\\")


def _unlinkable(source: Path, out: Path, error: OSError) -> UsageError | BuildError:
    if error.errno in {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EACCES}:
        why = {
            errno.EXDEV: "they are on two file systems",
            errno.EMLINK: "the file has too many links already",
        }.get(error.errno, error.strerror or str(error))
        return UsageError(
            f"{str(source)!r} cannot be linked into {str(out)!r}: {why}",
            hint="choose an --out on the file system of the store, or copy where links do not"
            " work: --link-or-copy",
        )
    return write_error(error, path=out)


# -------------------------------------------------------------------------------------------------
# The worker of an export: makes the files of one part after the other, on several threads.

REPORT_BYTES = 4 << 20
WIDE_ID = 4
"""Bytes of an id where a format does not hold the store's own bytes, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportWorker:
    """What all parts of an export have in common."""

    stores: Mapping[str, Store]
    format: Format
    options: ExportOptions
    folder: ExportFolder
    export: str
    """Which export the receipts are of."""

    def work(self, part: ExportTask, report: Report) -> None:
        """Make and commit the files of a part."""
        store = self.stores[part.split]
        on_bytes = self._meter(part, store, report)
        with PartFiles(self.folder, part, self.options.link, on_bytes=on_bytes) as out:
            out.commit(self.export, self.format.write(store, part, self.options, out))

    def _meter(self, part: ExportTask, store: Store, report: Report) -> Callable[[int], None]:
        """Turns bytes that are written into reports of tokens, as far as bytes tell it."""
        width = store.dtype.itemsize if self.format.about.linkable else WIDE_ID
        written = reported = 0

        def on_bytes(count: int) -> None:
            nonlocal written, reported
            written += count
            if written - reported >= REPORT_BYTES:
                reported = written
                report(min(part.tokens, written // width))

        return on_bytes


# -------------------------------------------------------------------------------------------------
# Runs the parts of an export or import on threads: numpy, Arrow and the disk do the work.
#
# They all let other threads run, so that threads fill the cores as processes would, and none has
# to start. A thread cannot be stopped from outside: after an error, and when the program is
# interrupted, the others end where they next report.

if TYPE_CHECKING:
    OnProgress = Callable[[int, int], None]
    """Told how much is done, of how much; by any thread, one at a time."""
    Report = Callable[[int], None]
    """Told by a task, now and then, how much of it is done."""

T = TypeVar("T")
R = TypeVar("R")


class _Stopped(BaseException):
    """Ends a task whose result nobody waits for."""


def run_tasks(
    work: Callable[[T, Report], R],
    tasks: Sequence[T],
    *,
    workers: int | None,
    on_report: Callable[[T, int], None],
    on_done: Callable[[T, R], None],
) -> int:
    """Carry out all tasks; returns how many were worked on at a time.

    The first error is raised when nothing runs any more. `on_done` is called on this thread.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers={workers!r} is not a whole number of 1 or more")
    count = min(workers or physical_cores(), len(tasks))
    if not count:
        return 0
    stop = threading.Event()

    def run_one(task: T) -> R:
        def report(amount: int) -> None:
            if stop.is_set():
                raise _Stopped
            on_report(task, amount)

        return work(task, report)

    with ThreadPoolExecutor(count, thread_name_prefix="part") as pool:
        try:
            futures = {pool.submit(run_one, task): task for task in tasks}
            for future in as_completed(futures):
                on_done(futures[future], future.result())
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return count


@dataclass(kw_only=True)
class TaskProgress:
    """How much is done of many parts, those included that are being worked on."""

    total: int
    done: int
    on_progress: OnProgress | None
    _running: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, name: str, amount: int) -> None:
        """So much of a part is done."""
        with self._lock:
            self._running[name] = amount
            self._show()

    def finish(self, name: str, amount: int) -> None:
        """A part is done, and was so much."""
        with self._lock:
            self._running.pop(name, None)
            self.done += amount
            self._show()

    def _show(self) -> None:
        if self.on_progress is not None:
            self.on_progress(min(self.total, self.done + sum(self._running.values())), self.total)


INDEX = "index"
"""Name of the part that `finish` makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What an export made."""

    out: str
    format: str
    nothing_to_do: bool
    splits: Mapping[str, int]
    """Tokens of each."""
    documents: int
    tokens: int
    files: int
    bytes: int
    linked_bytes: int
    """Of these, bytes that are hard links to the store's own files."""
    parts: int
    parts_resumed: int
    notes: tuple[str, ...]
    """What to do with the files: lines to paste, what is lost."""
    workers: int
    seconds: float


def export_store(
    store: PathInput | Store,
    *,
    to: str,
    out: PathInput,
    split: str | Sequence[str] | None = None,
    seq_len: int | None = None,
    packing: str = "concat",
    file_tokens: int | None = None,
    link: str | bool = False,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    **settings: str | int | bool,
) -> ExportResult:
    """Write a store in another project's format; the same call again resumes.

    `split` names one split or several, None is all. `seq_len` gives rows of that many tokens where
    the format can hold rows, packed as `packing` says; documents otherwise. `link=True` makes hard
    links where the token file is the store's own bytes, `link="if-possible"` copies where the file
    system cannot link. Further options are settings of the format.
    """
    asked = ExportRequest(
        to=to,
        seq_len=seq_len,
        packing=packing,
        file_tokens=file_tokens,
        link=link,
        settings=settings,
    )
    return export_splits(
        open_splits(store, split), asked, out=out, workers=workers, on_progress=on_progress
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What an export was asked for, as it was asked."""

    to: str
    seq_len: int | None
    packing: str
    file_tokens: int | None
    link: str | bool
    settings: Mapping[str, str | int | bool]


def export_splits(
    stores: Mapping[str, Store],
    asked: ExportRequest,
    *,
    out: PathInput,
    workers: int | None,
    on_progress: OnProgress | None,
) -> ExportResult:
    """Export the stores of some splits together."""
    if not any(store.num_documents for store in stores.values()):
        raise UsageError(
            f"{' and '.join(stores) or 'the store'} has no documents: there is nothing to export",
            hint="see what the store has with: tokenmill inspect STORE",
        )
    format_ = get_format(asked.to)
    options = ExportOptions(
        splits=tuple(stores),
        seq_len=asked.seq_len,
        packing=find_packing(asked.packing).name,
        file_tokens=asked.file_tokens,
        link=_link(asked.link),
        settings=complete_settings(format_, asked.settings),
    )
    check_options(format_, options)
    return ExportRun(
        stores=stores,
        format=format_,
        options=options,
        folder=ExportFolder(local_path(out, hint=WRITE_HINT).absolute()),
        workers=workers,
        on_progress=on_progress,
    ).run()


@dataclass(kw_only=True)
class ExportRun:
    """One call of `export_store`."""

    stores: Mapping[str, Store]
    format: Format
    options: ExportOptions
    folder: ExportFolder
    workers: int | None
    on_progress: OnProgress | None

    def run(self) -> ExportResult:
        """Carry out the export."""
        self._started = time.monotonic()
        plan = self.format.plan(self.stores, self.options)
        _check_plan(plan)
        self._check_folder(plan)
        with StoreLock(self.folder.books):
            title = self._title()
            self._refuse_another(title)
            self.folder.create()
            shutil.rmtree(self.folder.tmp, ignore_errors=True)
            export = checksum_of(seal(title))
            if not self.folder.title.exists():
                replace_file(self.folder.books, self.folder.title, seal(title))
            try:
                return self._work(plan, export)
            finally:
                shutil.rmtree(self.folder.tmp, ignore_errors=True)

    def _work(self, plan: ExportPlan, export: str) -> ExportResult:
        shared = {file.name: file for file in plan.shared}
        index = ExportTask(
            name=INDEX,
            split="",
            tokens=0,
            files=(*plan.index_files, *shared),
        )
        found = [find_done(self.folder, part, export=export, shared=shared) for part in plan.parts]
        resumed = sum(each is not None for each in found)
        whole = find_done(self.folder, index, export=export, shared=shared)
        if whole is not None and resumed == len(plan.parts):
            notes = whole.facts.get("notes")
            lines = tuple(str(line) for line in notes) if isinstance(notes, list) else ()
            return self._result(plan, resumed, notes=lines, workers=0, nothing_to_do=True)
        self.folder.receipt(INDEX).unlink(missing_ok=True)
        for file in plan.shared:
            make_shared(self.folder, file)
        left = [part for part, done in zip(plan.parts, found, strict=True) if done is None]
        workers = self._run_parts(plan, left, export)
        done = [self._require_done(part, export, shared) for part in plan.parts]
        with PartFiles(self.folder, index) as out:
            lines = (*self.format.finish(self.stores, self.options, done, out), *self._notes())
            out.commit(export, {"notes": [*lines]}, shared=tuple(shared))
        shutil.rmtree(self.folder.shared, ignore_errors=True)
        return self._result(plan, resumed, notes=lines, workers=workers, nothing_to_do=False)

    def _notes(self) -> Iterator[str]:
        """What is not in the files, and should not be missed in silence."""
        about = self.format.about
        for split, store in self.stores.items():
            yield from rows_note(store, self.options, split, overlap=about.row_overlap)
        if not about.masks and any(store.has_mask for store in self.stores.values()):
            yield f"loss masks are left out: {about.name} has no place for them; all tokens count"

    def _run_parts(self, plan: ExportPlan, left: Sequence[ExportTask], export: str) -> int:
        total = sum(part.tokens for part in plan.parts)
        progress = TaskProgress(
            total=total,
            done=total - sum(part.tokens for part in left),
            on_progress=self.on_progress,
        )
        worker = ExportWorker(
            stores=self.stores,
            format=self.format,
            options=self.options,
            folder=self.folder,
            export=export,
        )
        return run_tasks(
            worker.work,
            left,
            workers=self.workers,
            on_report=lambda part, tokens: progress.report(part.name, tokens),
            on_done=lambda part, _: progress.finish(part.name, part.tokens),
        )

    @property
    def _links(self) -> bool:
        return self.options.link is not FileLink.NEVER

    def _require_done(self, part: ExportTask, export: str, shared: Mapping[str, Any]) -> PartDone:
        done = find_done(self.folder, part, export=export, shared=shared)
        if done is None:
            raise StoreError(
                f"files of the part {part.name!r} vanished from {str(self.folder.root)!r} while it"
                " was being written",
                hint="run the same command again, and let nothing else write into the folder",
            )
        return done

    def _title(self) -> dict[str, Json]:
        """What is exported, and how: everything that decides the bytes."""
        options = dataclasses.asdict(self.options)
        del options["link"]
        options["splits"] = list(self.options.splits)
        return {
            "format": self.format.about.name,
            "version": 1,
            "content": {split: store.content for split, store in self.stores.items()},
            "dtype": next(iter(self.stores.values())).dtype.name,
            "options": options,
        }

    def _refuse_another(self, title: Mapping[str, Json]) -> None:
        path = self.folder.title
        if not path.exists():
            return
        try:
            known = unseal(path.read_bytes(), path=path)
        except StoreError:
            known = {}
        if known == title:
            return
        if not any((self.folder.books.root / "parts").glob("*.json")):
            path.unlink()  # nothing came of it
            return
        changes = [name for name in title if known.get(name) != title[name]]
        raise UsageError(
            f"{str(self.folder.root)!r} holds another export: its {', '.join(changes)} differ",
            hint="choose another --out, or delete that folder first",
        )

    def _check_folder(self, plan: ExportPlan) -> None:
        """A folder with other things in it is no place for an export."""
        root = self.folder.root
        if not root.exists():
            return
        if not root.is_dir():
            raise UsageError(
                f"{str(root)!r} is a file; an export is a folder", hint="choose another --out"
            )
        known = {name for part in plan.parts for name in part.files}
        known |= {*plan.index_files, *(file.name for file in plan.shared)}
        found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        others = {name for name in found if not name.startswith(f"{BOOKS}/")}
        if (root / BOOKS).is_dir():
            others -= known
        if others:
            raise UsageError(
                f"the folder {str(root)!r} holds other things ({min(others)!r}, ...); an export"
                " would mix with them",
                hint="choose a new or empty folder with --out",
            )

    def _result(
        self,
        plan: ExportPlan,
        resumed: int,
        *,
        notes: tuple[str, ...],
        workers: int,
        nothing_to_do: bool,
    ) -> ExportResult:
        names = [name for part in plan.parts for name in part.files]
        names += [*plan.index_files, *(file.name for file in plan.shared)]
        facts = [(self.folder.root / name).stat() for name in names]
        return ExportResult(
            out=str(self.folder.root),
            format=self.format.about.name,
            nothing_to_do=nothing_to_do,
            splits={split: store.num_tokens for split, store in self.stores.items()},
            documents=sum(store.num_documents for store in self.stores.values()),
            tokens=sum(store.num_tokens for store in self.stores.values()),
            files=len(names),
            bytes=sum(each.st_size for each in facts),
            linked_bytes=sum(each.st_size for each in facts if self._links and each.st_nlink > 1),
            parts=len(plan.parts),
            parts_resumed=resumed,
            notes=notes,
            workers=workers,
            seconds=time.monotonic() - self._started,
        )


def open_splits(store: PathInput | Store, split: str | Sequence[str] | None) -> dict[str, Store]:
    """A store for each split that is asked for, None: for all it has."""
    wanted = [split] if isinstance(split, str) else split
    if isinstance(store, Store):
        if wanted is not None and [*wanted] != [store.split]:
            raise UsageError(
                f"the store was opened with split={store.split!r}, and split={split!r} is asked",
                hint="give the path of the store, or leave split out",
            )
        return {store.split or "train": store}
    text = os.fspath(store)
    if wanted is None and "://" not in text:
        wanted = list(read_manifest(Path(text).absolute()).splits) or ["train"]
    if wanted is None:
        wanted = list(Store(text, split=None).manifest.splits)
    return {name: Store(text, split=name) for name in wanted}


def check_options(format_: Format, options: ExportOptions) -> None:
    """Refuse what the format cannot do, before anything is opened for it."""
    about = format_.about
    if options.seq_len is not None and not about.rows:
        raise UsageError(
            f"{about.name} holds documents, not rows; seq_len={options.seq_len} says nothing there",
            hint="leave --seq-len out: its reader cuts rows itself",
        )
    if options.seq_len is None and about.rows_only:
        raise UsageError(
            f"{about.name} holds rows of one length", hint="give it with --seq-len 2048"
        )
    if options.seq_len is None and options.packing != next(iter(PACKINGS)):
        raise UsageError(
            f"packing={options.packing!r} is about rows, and whole documents are written",
            hint="say how long rows are with --seq-len, or leave --packing out",
        )
    if options.file_tokens is not None and not about.file_tokens:
        raise UsageError(
            f"file_tokens={options.file_tokens}: the files of {about.name} are not cut by tokens",
            hint="leave --file-tokens out",
        )
    for name in ("seq_len", "file_tokens"):
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"{name}={value!r} is not a whole number of 1 or more")
    if options.link is not FileLink.NEVER and not about.linkable:
        raise UsageError(
            f"files of {about.name} are not the store's own bytes, so they cannot be links",
            hint="leave --link out",
        )


def _check_plan(plan: ExportPlan) -> None:
    names = [part.name for part in plan.parts]
    files = [name for part in plan.parts for name in part.files] + [*plan.index_files]
    if len({*names, INDEX}) != len(names) + 1 or len({*files}) != len(files):
        raise ValueError("two parts or two files of an export have the same name")


def _link(value: str | bool) -> FileLink:
    if isinstance(value, bool):
        return FileLink.ALWAYS if value else FileLink.NEVER
    try:
        return FileLink(value)
    except ValueError:
        raise UsageError(
            f"link={value!r} is not known",
            hint=f"use True, False or one of: {', '.join(map(repr, map(str, FileLink)))}",
        ) from None
