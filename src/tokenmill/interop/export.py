"""The verb `export`: a store out, in another project's format. The same call again resumes.

    open the splits -> plan parts -> what is left to do -> threads -> index files

    out/.tokenmill-export/export.json     what is exported here, and how; in the end all files too
                          tmp/            files that have no name yet

Everything before the threads start only reads. A file gets its name when all of it is on the disk,
so that whatever has its name is whole, after a crash at any moment; index files are the last.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from tokenmill.errors import BuildError, StoreError, UsageError
from tokenmill.interop.base import (
    WRITE_HINT,
    ExportRequest,
    FileLink,
    complete_settings,
    get_format,
    local_path,
)
from tokenmill.interop.records import rows_note
from tokenmill.loader.packing import find_packing
from tokenmill.options import PACKINGS, with_settings
from tokenmill.runners.local import physical_cores
from tokenmill.store.facts import read_manifest
from tokenmill.store.layout import (
    StoreLayout,
    StoreLock,
    replace_file,
    seal,
    sync_folder,
    unseal,
    write_error,
)
from tokenmill.store.reader import Store
from tokenmill.store.write import HashedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from tokenmill.files import PathInput
    from tokenmill.interop.base import ConvertRequest, ExportOptions, ExportTask, Format
    from tokenmill.store.layout import Json

    OnBytes = Callable[[int], None]

BOOKS = ".tokenmill-export"
TITLE = "export.json"
COPY_BYTES = 4 << 20
REPORT_BYTES = 4 << 20
WIDE_ID = 4
"""Bytes of an id where a format does not hold the store's own bytes, about."""


# -------------------------------------------------------------------------------------------------
# The files of a part: written under tmp/, synced, renamed.


class OutFile(HashedFile):
    """A file of an export, as every library that writes takes one."""

    def __init__(self, path: Path, *, on_bytes: OnBytes) -> None:
        super().__init__(path)
        self.path = path
        self._on_bytes = on_bytes

    def write(self, block: Any) -> int:
        count = super().write(block)
        self._on_bytes(count)
        return count

    def sync(self) -> None:
        """Wait until all of it is on the disk, also where a library has closed it."""
        self.close()
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


@dataclass(slots=True)
class PartFiles:
    """The files of one part while they are made; as a context manager: no commit, no trace."""

    root: Path
    names: tuple[str, ...]
    checksums: dict[str, str]
    """Of files that were written by this run, all parts together."""
    link_mode: FileLink = FileLink.NEVER
    on_bytes: OnBytes = lambda _: None
    """Told of all that is written."""
    _open: dict[str, OutFile] = field(default_factory=dict)
    _made: set[str] = field(default_factory=set)

    def create(self, name: str) -> OutFile:
        """A new file of the part, to be written from its beginning to its end."""
        path = self._stage(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[name] = OutFile(path, on_bytes=self.on_bytes)
        except OSError as error:
            raise write_error(error, path=path) from error
        return self._open[name]

    def write(self, name: str, data: bytes) -> None:
        """A new file with these bytes."""
        self.create(name).write(data)

    def link_or_copy(self, name: str, source: Path, *, checksum: str | None = None) -> None:
        """A file with the bytes of a store's file, a hard link to it where that was asked for.

        A copy is compared with `checksum`, which a link takes on trust: nothing is read for it.
        """
        if self.link_mode is not FileLink.NEVER:
            path = self._stage(name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, path)
                return
            except OSError as error:
                if self.link_mode is not FileLink.IF_POSSIBLE:
                    raise _unlinkable(source, self.root, error) from error
        copy_into(self.create(name), source, checksum=checksum)

    def checksum(self, name: str) -> str:
        """xxh3-128 of a file that is complete; one that was there before is read for it."""
        if name not in self.checksums:
            seen = xxhash.xxh3_128()
            with (self.root / name).open("rb", buffering=0) as file:
                while block := file.read(COPY_BYTES):
                    seen.update(block)
            self.checksums[name] = seen.hexdigest()
        return self.checksums[name]

    def _stage(self, name: str) -> Path:
        """Where a file is until it gets its name."""
        if name not in self.names:
            raise ValueError(f"the file {name!r} was not planned")
        self._made.add(name)
        return self._staged(name)

    def _staged(self, name: str) -> Path:
        return self.root / BOOKS / "tmp" / name.replace("/", "\\")

    def commit(self) -> None:
        """Give the files their names."""
        if missing := set(self.names) - self._made:
            raise ValueError(f"the files {sorted(missing)} were planned and not made")
        try:
            for file in self._open.values():
                file.sync()
            for name in self.names:
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._staged(name).replace(target)
            for parent in sorted({(self.root / name).parent for name in self.names}):
                sync_folder(parent)
        except OSError as error:
            raise write_error(error, path=self.root) from error
        self.checksums.update({name: file.checksum for name, file in self._open.items()})

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._open.values():
            file.close()
        for name in self._made:
            self._staged(name).unlink(missing_ok=True)


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


def title_of(path: Path) -> Mapping[str, Json]:
    """What an export says that a path is in, or a part of; nothing where none says it."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / BOOKS / TITLE).is_file():
            return _read_title(folder)
    return {}


def _read_title(root: Path) -> dict[str, Json]:
    path = root / BOOKS / TITLE
    try:
        return unseal(path.read_bytes(), path=path)
    except (OSError, StoreError):
        return {}


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


# -------------------------------------------------------------------------------------------------
# The export itself.


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


@with_settings(ExportRequest)
def export(asked: ExportRequest) -> ExportResult:
    """Write a store in another project's format; the same call again resumes.

    `split` names one split or several, None is all. `seq_len` gives rows of that many tokens where
    the format can hold rows, packed as `packing` says; documents otherwise. `link=True` makes hard
    links where the token file is the store's own bytes, `link="if-possible"` copies where the file
    system cannot link. Further options are settings of the format.
    """
    return export_splits(open_splits(asked.store, asked.split), asked)


export_store = export


def export_splits(
    stores: Mapping[str, Store], asked: ExportRequest | ConvertRequest
) -> ExportResult:
    """Export the stores of some splits together."""
    if not any(store.num_documents for store in stores.values()):
        raise UsageError(
            f"{' and '.join(stores) or 'the store'} has no documents: there is nothing to export",
            hint="see what the store has with: tokenmill inspect STORE",
        )
    format_ = get_format(asked.to)
    options = dataclasses.replace(
        asked,
        packing=find_packing(asked.packing).name,
        link=_link(asked.link),
        settings=complete_settings(format_, asked.settings),
    )
    check_options(format_, options)
    root = local_path(asked.out, hint=WRITE_HINT).absolute()
    return Export(stores, format_, options, root, asked.workers, asked.on_progress).run()


@dataclass
class Export:
    """One call of `export`."""

    stores: Mapping[str, Store]
    format: Format
    options: ExportOptions
    root: Path
    workers: int | None
    on_progress: OnProgress | None
    checksums: dict[str, str] = field(default_factory=dict)

    def run(self) -> ExportResult:
        """Carry out the export."""
        self._started = time.monotonic()
        self._plan = plan = self.format.plan(self.stores, self.options)
        if len({*plan.files}) != len(plan.files):
            raise ValueError("two files of an export have the same name")
        self._check_folder()
        tmp = self.root / BOOKS / "tmp"
        with StoreLock(StoreLayout(self.root / BOOKS)):
            title = self._title()
            known = self._refuse_another(title)
            shutil.rmtree(tmp, ignore_errors=True)
            try:
                return self._work(title, known)
            finally:
                shutil.rmtree(tmp, ignore_errors=True)

    def _work(self, title: dict[str, Json], known: Mapping[str, Json]) -> ExportResult:
        plan, notes = self._plan, known.get("notes")
        sizes = known.get("files")
        sizes = sizes if isinstance(sizes, dict) else {}
        left = [
            part for part in plan.parts if not self._is_whole(part.files, {**sizes, **part.sizes})
        ]
        resumed = len(plan.parts) - len(left)
        if not left and self._is_whole(plan.index_files, sizes) and isinstance(notes, list):
            lines = tuple(map(str, notes))
            return self._result(resumed, notes=lines, workers=0, nothing_to_do=True)
        # Until it is complete again, an export has no index.
        for name in plan.index_files:
            (self.root / name).unlink(missing_ok=True)
        self._write_title({**title, "files": sizes})
        workers = self._run_parts(left)
        for part in plan.parts:
            if not self._is_whole(part.files, part.sizes):
                raise StoreError(
                    f"files of the part {part.files[0]!r} vanished from {str(self.root)!r} while it"
                    " was being written",
                    hint="run the same command again, and let nothing else write into the folder",
                )
        with PartFiles(self.root, plan.index_files, self.checksums) as out:
            finish = self.format.finish(self.stores, self.options, plan.parts, out)
            lines = (*finish, *self._notes())
            out.commit()
        files: dict[str, Json] = {name: (self.root / name).stat().st_size for name in plan.files}
        self._write_title({**title, "files": files, "notes": [*lines]})
        return self._result(resumed, notes=lines, workers=workers, nothing_to_do=False)

    def _is_whole(self, names: Sequence[str], sizes: Mapping[str, Json]) -> bool:
        """Whether files have their names, and their sizes as far as they are known."""
        try:
            found = {name: (self.root / name).stat().st_size for name in names}
        except OSError:
            return False
        return all(sizes.get(name, size) == size for name, size in found.items())

    def _notes(self) -> Iterator[str]:
        """What is not in the files, and should not be missed in silence."""
        about = self.format.about
        for split, store in self.stores.items():
            yield from rows_note(store, self.options, split, overlap=about.row_overlap)
        if not about.masks and any(store.has_mask for store in self.stores.values()):
            yield f"loss masks are left out: {about.name} has no place for them; all tokens count"

    def _run_parts(self, left: Sequence[ExportTask]) -> int:
        total = sum(part.tokens for part in self._plan.parts)
        progress = TaskProgress(
            total=total,
            done=total - sum(part.tokens for part in left),
            on_progress=self.on_progress,
        )
        return run_tasks(
            self._make,
            left,
            workers=self.workers,
            on_report=lambda part, tokens: progress.report(part.files[0], tokens),
            on_done=lambda part, _: progress.finish(part.files[0], part.tokens),
        )

    def _make(self, part: ExportTask, report: Report) -> None:
        """Make the files of a part, on any thread."""
        store, link = self.stores[part.split], _link(self.options.link)
        on_bytes = partial(self._on_bytes, part, report, [0, 0])
        with PartFiles(self.root, part.files, self.checksums, link, on_bytes) as out:
            self.format.write(store, part, self.options, out)
            out.commit()

    def _on_bytes(self, part: ExportTask, report: Report, sums: list[int], count: int) -> None:
        """Turn bytes that are written into reports of tokens, as far as bytes tell it."""
        sums[0] += count
        if sums[0] - sums[1] >= REPORT_BYTES:
            sums[1] = sums[0]
            width = WIDE_ID
            if self.format.about.linkable:
                width = self.stores[part.split].dtype.itemsize
            report(min(part.tokens, sums[0] // width))

    def _title(self) -> dict[str, Json]:
        """What is exported, and how: everything that decides the bytes."""
        options = self.options
        return {
            "format": self.format.about.name,
            "version": 2,
            "content": {split: store.content for split, store in self.stores.items()},
            "dtype": next(iter(self.stores.values())).dtype.name,
            "options": {
                "splits": [*self.stores],
                "seq_len": options.seq_len,
                "packing": options.packing,
                "file_tokens": options.file_tokens,
                "settings": dict(options.settings),
            },
        }

    def _write_title(self, title: Mapping[str, Json]) -> None:
        layout = StoreLayout(self.root / BOOKS)
        layout.tmp.mkdir(parents=True, exist_ok=True)
        sync_folder(self.root)
        replace_file(layout, layout.root / TITLE, seal(title))

    def _refuse_another(self, title: Mapping[str, Json]) -> Mapping[str, Json]:
        """What is known of this export from before; UsageError where the folder has another."""
        known = _read_title(self.root)
        changes = [name for name in title if known.get(name) != title[name]]
        if not changes:
            return known
        if any(self._files()):
            raise UsageError(
                f"{str(self.root)!r} holds another export: its {', '.join(changes)} differ",
                hint="choose another --out, or delete that folder first",
            )
        return {}  # nothing came of it

    def _files(self) -> Iterator[str]:
        """The files in the folder but for the books."""
        for path in self.root.rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_file() and not name.startswith(f"{BOOKS}/"):
                yield name

    def _check_folder(self) -> None:
        """A folder with other things in it is no place for an export."""
        root = self.root
        if not root.exists():
            return
        if not root.is_dir():
            raise UsageError(
                f"{str(root)!r} is a file; an export is a folder", hint="choose another --out"
            )
        others = {*self._files()}
        if (root / BOOKS).is_dir():
            others -= {*self._plan.files}
        if others:
            raise UsageError(
                f"the folder {str(root)!r} holds other things ({min(others)!r}, ...); an export"
                " would mix with them",
                hint="choose a new or empty folder with --out",
            )

    def _result(
        self, resumed: int, *, notes: tuple[str, ...], workers: int, nothing_to_do: bool
    ) -> ExportResult:
        stores, facts = self.stores, [(self.root / name).stat() for name in self._plan.files]
        links = self.options.link is not FileLink.NEVER
        return ExportResult(
            out=str(self.root),
            format=self.format.about.name,
            nothing_to_do=nothing_to_do,
            splits={split: store.num_tokens for split, store in stores.items()},
            documents=sum(store.num_documents for store in stores.values()),
            tokens=sum(store.num_tokens for store in stores.values()),
            files=len(facts),
            bytes=sum(each.st_size for each in facts),
            linked_bytes=sum(each.st_size for each in facts if links and each.st_nlink > 1),
            parts=len(self._plan.parts),
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
