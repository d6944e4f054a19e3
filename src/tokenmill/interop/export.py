"""The verb `export_store`: a store out, in another project's format. The same call again resumes.

    open the splits -> plan parts -> what is left to do -> workers -> index files

Everything before the workers start only reads. Each part commits by itself; the index, written
last, makes the export complete.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import StoreError, UsageError
from tokenmill.interop.base import ExportOptions, ExportPlan, Link, Part, PartDone
from tokenmill.interop.export_worker import ExportWorker
from tokenmill.interop.parts import (
    BOOKS,
    ExportFolder,
    PartFiles,
    find_done,
    make_shared,
)
from tokenmill.interop.place import WRITE_HINT, local_path
from tokenmill.interop.pool import Progress, run_tasks
from tokenmill.interop.records import rows_note
from tokenmill.interop.registry import get_format
from tokenmill.interop.settings import complete_settings
from tokenmill.loader.layouts.packings import Packing
from tokenmill.store.durable import replace_file
from tokenmill.store.lock import StoreLock
from tokenmill.store.manifest import read_manifest
from tokenmill.store.reader import Store
from tokenmill.store.sealed import checksum_of, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenmill.interop.base import Format
    from tokenmill.interop.pool import OnProgress
    from tokenmill.store.sealed import Json

    PathInput = str | os.PathLike[str]

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
        packing=str(Packing.of(asked.packing)),
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
        index = Part(
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

    def _run_parts(self, plan: ExportPlan, left: Sequence[Part], export: str) -> int:
        total = sum(part.tokens for part in plan.parts)
        progress = Progress(
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
        return self.options.link is not Link.NEVER

    def _require_done(self, part: Part, export: str, shared: Mapping[str, Any]) -> PartDone:
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
    if options.seq_len is None and options.packing != Packing.CONCAT:
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
    if options.link is not Link.NEVER and not about.linkable:
        raise UsageError(
            f"files of {about.name} are not the store's own bytes, so they cannot be links",
            hint="leave --link out",
        )


def _check_plan(plan: ExportPlan) -> None:
    names = [part.name for part in plan.parts]
    files = [name for part in plan.parts for name in part.files] + [*plan.index_files]
    if len({*names, INDEX}) != len(names) + 1 or len({*files}) != len(files):
        raise ValueError("two parts or two files of an export have the same name")


def _link(value: str | bool) -> Link:
    if isinstance(value, bool):
        return Link.ALWAYS if value else Link.NEVER
    try:
        return Link(value)
    except ValueError:
        raise UsageError(
            f"link={value!r} is not known",
            hint=f"use True, False or one of: {', '.join(map(repr, map(str, Link)))}",
        ) from None
