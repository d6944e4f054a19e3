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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from tokenmill.errors import StoreError, UsageError
from tokenmill.interop import base
from tokenmill.markup import Told
from tokenmill.options import PACKINGS, with_settings
from tokenmill.runners.local import physical_cores
from tokenmill.store import layout
from tokenmill.store.reader import Store
from tokenmill.store.write import HashedFile
from tokenmill.words import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.errors import BuildError
    from tokenmill.files import PathInput

BOOKS = ".tokenmill-export"
TITLE = "export.json"
COPY_BYTES = 4 << 20
REPORT_BYTES = 4 << 20
# What a file system has against a link; all else is a failed write.
UNLINKABLE = {
    errno.EXDEV: "they are on two file systems",
    errno.EMLINK: "the file has too many links already",
    **{each: os.strerror(each) for each in (errno.EPERM, errno.ENOTSUP, errno.EACCES)},
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Bytes of an id where a format does not hold the store's own bytes, about.
WIDE_ID = 4
# Told how much is done, of how much; by any thread, one at a time.
OnProgress = Callable[[int, int], None]
# Told by a task, now and then, how much of it is done.
Report = Callable[[int], None]
T = TypeVar("T")
R = TypeVar("R")


# -------------------------------------------------------------------------------------------------
# The files of a part: written under tmp/, synced, renamed.


class OutFile(HashedFile):
    """A file of an export, as every library that writes takes one."""

    def __init__(self, path: Path, *, on_bytes: Report) -> None:
        super().__init__(path)
        self.path = path
        self.failed: OSError | None = None  # of which a library that writes says nothing
        self._on_bytes = on_bytes

    def write(self, block: Any) -> int:
        """Write all of a block, of any contiguous kind."""
        try:
            count = super().write(block) if memoryview(block).nbytes else 0
        except OSError as error:
            self.failed = error
            raise
        self._on_bytes(count)
        return count

    def append_file(self, source: Path, *, checksum: str | None) -> None:
        """Copy a file after what was written, and see that it has the checksum."""
        before, seen = self.bytes, xxhash.xxh3_128()
        with source.open("rb", buffering=0) as reader:
            buffer = memoryview(bytearray(COPY_BYTES))
            while count := reader.readinto(buffer):
                self.write(buffer[:count])
                if before:
                    seen.update(buffer[:count])
        found = seen.hexdigest() if before else self.checksum
        if checksum is not None and found != checksum:
            raise StoreError(
                f"{str(source)!r} was changed: its checksum is {found}, not the {checksum} that the"
                " store says; nothing of it was exported",
                hint="see what is damaged with: tokenmill verify STORE",
            )


@dataclass(slots=True)
class PartFiles:
    """The files of one part while they are made; as a context manager: no commit, no trace."""

    export: Export
    names: Sequence[str]
    on_bytes: Report = lambda _: None  # told of all that is written
    _open: dict[str, OutFile] = field(default_factory=dict)
    _made: dict[str, Path] = field(default_factory=dict)

    def create(self, name: str) -> OutFile:
        """A new file of the part, to be written from its beginning to its end."""
        path = self._stage(name)
        try:
            self._open[name] = OutFile(path, on_bytes=self.on_bytes)
        except OSError as error:
            raise self.export.write_failed(error, name) from error
        return self._open[name]

    def write(self, name: str, data: bytes) -> None:
        """A new file with these bytes."""
        self.create(name).write(data)

    def link_or_copy(self, name: str, source: Path, *, checksum: str | None = None) -> None:
        """A file with the bytes of a store's file, a hard link to it where that was asked for.

        A copy is compared with `checksum`, which a link takes on trust: nothing is read for it.
        """
        link = self.export.options.link
        if link != "never":
            path = self._stage(name)
            try:
                os.link(source, path)
                return
            except OSError as error:
                if link != "if-possible":
                    root, why = self.export.root, UNLINKABLE.get(error.errno or 0)
                    if why is None:
                        raise self.export.write_failed(error, name) from error
                    raise UsageError(
                        f"{str(source)!r} cannot be linked into {str(root)!r}: {why}",
                        hint="choose an --out on the file system of the store, or copy where links"
                        " do not work: --link-or-copy",
                    ) from error
        self.create(name).append_file(source, checksum=checksum)

    def _stage(self, name: str) -> Path:
        """Where a file is until it gets its name."""
        if name not in self.names:
            raise ValueError(f"the file {name!r} was not planned")
        self._made[name] = self.export.books.tmp / name.replace("/", "\\")
        return self._made[name]

    def commit(self) -> None:
        """Give the files their names."""
        if missing := set(self.names) - set(self._made):
            raise ValueError(f"the files {sorted(missing)} were planned and not made")
        targets = {name: self.export.root / name for name in self.names}
        try:
            for file in self._open.values():
                file.close()
                with file.path.open("rb") as again:  # a library may have closed it
                    os.fsync(again.fileno())
            for name, target in targets.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                self._made[name].replace(target)
            for parent in sorted({target.parent for target in targets.values()}):
                layout.sync_folder(parent)
        except OSError as error:
            raise self.export.write_failed(error) from error
        self.export.checksums.update({name: file.checksum for name, file in self._open.items()})

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for file in self._open.values():
            file.close()
        for path in self._made.values():
            path.unlink(missing_ok=True)
        for name, file in self._open.items():
            if file.failed is not None and isinstance(error, Exception):
                raise self.export.write_failed(file.failed, name) from error


def title_of(path: Path) -> Mapping[str, layout.Json]:
    """What an export says that a path is in, or a part of; nothing where none says it."""
    found = map(_read_title, (path, *path.absolute().parents[:2]))
    return next(filter(None, found), {})


def _read_title(root: Path) -> dict[str, layout.Json]:
    path = root / BOOKS / TITLE
    try:
        return layout.unseal(path.read_bytes(), path=path)
    except (OSError, StoreError):
        return {}


# -------------------------------------------------------------------------------------------------
# Runs the parts of an export or import on threads: numpy, Arrow and the disk do the work.
#
# They all let other threads run, so that threads fill the cores as processes would, and none has
# to start. A thread cannot be stopped from outside: after an error, and when the program is
# interrupted, the others end where they next report.


class _Stopped(BaseException):
    """Ends a task whose result nobody waits for."""


def run_tasks(
    work: Callable[[T, Report], R],
    tasks: Sequence[T],
    *,
    size: Callable[[T], int],
    total: int,
    workers: int | None,
    on_progress: OnProgress | None,
) -> tuple[list[R], int]:
    """Carry out all tasks; returns what came of each, and how many were worked on at a time.

    What the sizes of all tasks lack of `total` was done before. The first error is raised when
    nothing runs any more.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers={workers!r} is not a whole number of 1 or more")
    if not tasks:
        return [], 0
    count = 1 if len(tasks) == 1 else min(workers or physical_cores(), len(tasks))
    stop, lock = threading.Event(), threading.Lock()
    told = [0] * len(tasks)
    done = total - sum(map(size, tasks))

    def run_one(number: int) -> R:
        def report(amount: int) -> None:
            nonlocal done
            if stop.is_set():
                raise _Stopped
            with lock:
                done, told[number] = done + amount - told[number], amount
                if on_progress is not None:
                    on_progress(min(total, done), total)

        result = work(tasks[number], report)
        report(size(tasks[number]))
        return result

    with ThreadPoolExecutor(count, thread_name_prefix="part") as pool:
        try:
            futures = [pool.submit(run_one, number) for number in range(len(tasks))]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures], count


# -------------------------------------------------------------------------------------------------
# The export itself.


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult(Told):
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
    seconds: float = 0.0


@with_settings(base.ExportRequest)
def export(asked: base.ExportRequest) -> ExportResult:
    """Write a store in another project's format; the same call again resumes.

    `split` names one split or several, None is all. `seq_len` gives rows of that many tokens where
    the format can hold rows, packed as `packing` says; documents otherwise. `link=True` makes hard
    links where the token file is the store's own bytes, `link="if-possible"` copies where the file
    system cannot link. Further options are settings of the format.
    """
    return export_splits(open_splits(asked.store, asked.split), asked)


export_store = export


def export_splits(
    stores: Mapping[str, Store], asked: base.ExportRequest | base.ConvertRequest
) -> ExportResult:
    """Export the stores of some splits together."""
    if not any(store.num_documents for store in stores.values()):
        raise UsageError(
            f"{' and '.join(stores) or 'the store'} has no documents: there is nothing to export",
            hint="see what the store has with: tokenmill inspect STORE",
        )
    format_, link = base.get_format(asked.to), asked.link
    options = dataclasses.replace(
        asked,
        link=base.LINKS[link] if isinstance(link, bool) else link,
        settings=base.complete_settings(format_, asked.settings),
    )
    check_options(format_, options)
    root = base.local_path(asked.out, hint=base.WRITE_HINT).absolute()
    return Export(stores, format_, options, root).run()


@dataclass
class Export:
    """One call of `export`: what a format is told of it, and the steps."""

    stores: Mapping[str, Store]
    format: base.Format
    options: base.ExportRequest | base.ConvertRequest
    root: Path
    parts: list[base.ExportTask] = field(default_factory=list)
    index_files: list[str] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)  # of files that this run has written

    def __post_init__(self) -> None:
        self.books = layout.StoreLayout(self.root / BOOKS)

    def name(self, split: str, file: str) -> str:
        """The name of a split's file: one split is at the top, several in folders of their own."""
        return file if len(self.stores) == 1 else f"{split}/{file}"

    def folders(self) -> list[str]:
        """The folder of each split."""
        return [str((self.root / self.name(split, "_")).parent) for split in self.stores]

    def checksum(self, name: str) -> str:
        """xxh3-128 of a file that is complete; one that was there before is read for it."""
        if name not in self.checksums:
            seen = xxhash.xxh3_128()
            with (self.root / name).open("rb", buffering=0) as file:
                while block := file.read(COPY_BYTES):
                    seen.update(block)
            self.checksums[name] = seen.hexdigest()
        return self.checksums[name]

    def run(self) -> ExportResult:
        """Carry out the export."""
        try:
            return self._run()
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise self.write_failed(error) from error  # its folders and books

    def _run(self) -> ExportResult:
        started = time.monotonic()
        self.parts, self.index_files = self.format.plan(self), self.format.index_files(self)
        self.files = [name for part in self.parts for name in part.files] + self.index_files
        if len({*self.files}) != len(self.files):
            raise ValueError("two files of an export have the same name")
        self._check_folder()
        with layout.StoreLock(self.books):
            title = self._title()
            known = self._refuse_another(title)
            shutil.rmtree(self.books.tmp, ignore_errors=True)
            try:
                result = self._work(title, known)
            finally:
                shutil.rmtree(self.books.tmp, ignore_errors=True)
        return dataclasses.replace(result, seconds=time.monotonic() - started)

    def _work(
        self, title: dict[str, layout.Json], known: Mapping[str, layout.Json]
    ) -> ExportResult:
        notes, found = known.get("notes"), known.get("files")
        sizes = found if isinstance(found, dict) else {}
        left = [
            part for part in self.parts if not self._is_whole(part.files, {**sizes, **part.sizes})
        ]
        resumed = len(self.parts) - len(left)
        if not left and self._is_whole(self.index_files, sizes) and isinstance(notes, list):
            return self._result(resumed, [*map(str, notes)], workers=0, nothing_to_do=True)
        # Until it is complete again, an export has no index.
        for name in self.index_files:
            (self.root / name).unlink(missing_ok=True)
        self._write_title({**title, "files": sizes})
        _, workers = run_tasks(
            self._make,
            left,
            size=lambda part: part.tokens,
            total=sum(part.tokens for part in self.parts),
            workers=self.options.workers,
            on_progress=self.options.on_progress,
        )
        for part in self.parts:
            if not self._is_whole(part.files, part.sizes):
                raise StoreError(
                    f"files of the part {part.files[0]!r} vanished from {str(self.root)!r} while it"
                    " was being written",
                    hint="run the same command again, and let nothing else write into the folder",
                )
        with PartFiles(self, self.index_files) as out:
            lines, about = self.format.finish(self, out), self.format.about
            if not about.masks and any(store.has_mask for store in self.stores.values()):
                lines.append(
                    f"loss masks are left out: {about.name} has no place for them; all tokens count"
                )
            out.commit()
        files: dict[str, layout.Json] = {
            name: (self.root / name).stat().st_size for name in self.files
        }
        self._write_title({**title, "files": files, "notes": [*lines]})
        return self._result(resumed, lines, workers=workers, nothing_to_do=False)

    def write_failed(self, error: OSError, name: str = "") -> BuildError:
        """The error for a file that could not be written, and for how much is left to write."""
        left = sum(part.tokens for part in self.parts if not self._is_whole(part.files, part.sizes))
        size = format_size(left * self._width)
        return layout.write_error(
            error,
            path=self.root / name,
            needed=f", and about {size} is left to write" if left else "",
            kept="files that are finished are kept",
            again="run the same command again: it goes on with the files that are missing",
        )

    @property
    def _width(self) -> int:
        """Bytes that a token takes, about."""
        store = next(iter(self.stores.values()))
        return store.dtype.itemsize if self.format.about.linkable else WIDE_ID

    def _is_whole(self, names: Sequence[str], sizes: Mapping[str, layout.Json]) -> bool:
        """Whether files have their names, and their sizes as far as they are known."""
        try:
            found = {name: (self.root / name).stat().st_size for name in names}
        except OSError:
            return False
        return all(sizes.get(name, size) == size for name, size in found.items())

    def _make(self, part: base.ExportTask, report: Report) -> None:
        """Make the files of a part, on any thread."""
        written = told = 0
        width = self._width

        def on_bytes(count: int) -> None:
            # Bytes tell of tokens, about.
            nonlocal written, told
            written += count
            if written - told >= REPORT_BYTES:
                told = written
                report(min(part.tokens, written // width))

        with PartFiles(self, part.files, on_bytes) as out:
            self.format.write(self, part, out)
            out.commit()

    def _title(self) -> dict[str, layout.Json]:
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

    def _write_title(self, title: Mapping[str, layout.Json]) -> None:
        self.books.tmp.mkdir(parents=True, exist_ok=True)
        layout.sync_folder(self.root)
        layout.replace_file(self.books, self.books.root / TITLE, layout.seal(title))

    def _refuse_another(self, title: Mapping[str, layout.Json]) -> Mapping[str, layout.Json]:
        """What is known of this export from before; UsageError where the folder has another."""
        known = _read_title(self.root)
        changes = [name for name in title if known.get(name) != title[name]]
        if not changes:
            return known
        if any(self._others()):
            raise UsageError(
                f"{str(self.root)!r} holds another export: its {', '.join(changes)} differ",
                hint="choose another --out, or delete that folder first",
            )
        return {}  # nothing came of it

    def _others(self) -> Iterator[str]:
        """The files in the folder but for the books."""
        for path in self.root.rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_file() and not name.startswith(f"{BOOKS}/"):
                yield name

    def _check_folder(self) -> None:
        """A folder with other things in it is no place for an export."""
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(
                f"{str(self.root)!r} is a file; an export is a folder", hint="choose another --out"
            )
        others = {*self._others()} - {*(self.files if self.books.root.is_dir() else ())}
        if others:
            raise UsageError(
                f"the folder {str(self.root)!r} holds other things ({min(others)!r}, ...); an"
                " export would mix with them",
                hint="choose a new or empty folder with --out",
            )

    def _result(
        self, resumed: int, notes: Sequence[str], *, workers: int, nothing_to_do: bool
    ) -> ExportResult:
        stores, facts = self.stores, [(self.root / name).stat() for name in self.files]
        links = self.options.link != "never"
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
            parts=len(self.parts),
            parts_resumed=resumed,
            notes=tuple(notes),
            workers=workers,
        )


def open_splits(store: PathInput | Store, split: str | Sequence[str] | None) -> dict[str, Store]:
    """A store for each split that is asked for, None: for all it has."""
    wanted = [split] if isinstance(split, str) else split
    if isinstance(store, Store):
        store.refuse_pairs("an export")
        if wanted is not None and [*wanted] != [store.split]:
            raise UsageError(
                f"the store was opened with split={store.split!r}, and split={split!r} is asked",
                hint="give the path of the store, or leave split out",
            )
        return {store.split or "train": store}
    whole = Store(store, split=None)
    whole.refuse_pairs("an export")
    if wanted is None:
        wanted = [*whole.manifest.splits] or ["train"]
    return {name: whole.of_split(name) for name in wanted}


def check_options(format_: base.Format, options: base.ExportOptions) -> None:
    """Refuse what the format cannot do, before anything is opened for it."""
    about, seq_len, packing, link = format_.about, options.seq_len, options.packing, options.link
    problem, hint = None, None
    if packing not in PACKINGS:
        problem = f"there is no packing {packing!r}"
        hint = f"use one of: {', '.join(map(repr, PACKINGS))}"
    elif link not in base.LINKS:
        problem = f"link={link!r} is not known"
        hint = f"use True, False or one of: {', '.join(map(repr, base.LINKS))}"
    elif seq_len is not None and not about.rows and not about.rows_only:
        problem = f"{about.name} holds documents, not rows; seq_len={seq_len} says nothing there"
        hint = "leave --seq-len out: its reader cuts rows itself"
    elif seq_len is None and about.rows_only:
        problem, hint = f"{about.name} holds rows of one length", "give it with --seq-len 2048"
    elif seq_len is None and packing != next(iter(PACKINGS)):
        problem = f"packing={packing!r} is about rows, and whole documents are written"
        hint = "say how long rows are with --seq-len, or leave --packing out"
    elif options.file_tokens is not None and not about.file_tokens:
        file_tokens = f"file_tokens={options.file_tokens}"
        problem = f"{file_tokens}: the files of {about.name} are not cut by tokens"
        hint = "leave --file-tokens out"
    elif link != "never" and not about.linkable:
        problem = f"files of {about.name} are not the store's own bytes, so they cannot be links"
        hint = "leave --link out"
    if problem is not None:
        raise UsageError(problem, hint=hint)
    for name, value in (("seq_len", seq_len), ("file_tokens", options.file_tokens)):
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"{name}={value!r} is not a whole number of 1 or more")
