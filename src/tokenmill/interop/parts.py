"""The files of an export's parts: written under other names, synced, renamed, receipted.

    out/.tokenmill-export/export.json       what is being exported here, and how
                          <part>.json       the receipt of a part that is complete
                          tmp/<part>-.../   files that have no name yet
                          shared/<file>     files that many parts fill

After a crash at any moment: a file that has its final name is whole, and a receipt's files are
there. A shared file gets its name after the last part; until then receipts speak of its stretches.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from tokenmill.errors import BuildError, StoreError, UsageError
from tokenmill.interop.base import Link, Part, PartDone
from tokenmill.store.durable import replace_file, sync_folder, write_error
from tokenmill.store.hashed import HashedFile
from tokenmill.store.layout import StoreLayout
from tokenmill.store.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from tokenmill.interop.base import SharedFile
    from tokenmill.store.sealed import Json

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


class OutFile(HashedFile):
    """A file of a part, or a stretch of a shared one, by its name in the export."""

    def __init__(
        self, path: Path, *, name: str, on_bytes: OnBytes, offset: int | None = None
    ) -> None:
        super().__init__(path, offset=offset)
        self.name = name
        self.offset = offset
        self._on_bytes = on_bytes

    def write(self, block: bytes | bytearray | memoryview) -> None:
        """Write all of a block, of any contiguous kind."""
        before = self.bytes
        super().write(block)
        self._on_bytes(self.bytes - before)


@dataclass(slots=True)
class PartFiles:
    """The files of one part while they are made; as a context manager: no commit, no trace."""

    folder: ExportFolder
    part: Part
    link_mode: Link = Link.NEVER
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
        if self.link_mode is not Link.NEVER and self._try_link(name, source, checksum):
            return True
        copy_into(self.create(name), source, checksum=checksum)
        return False

    def _try_link(self, name: str, source: Path, checksum: str | None) -> bool:
        try:
            os.link(source, self._staged(name))
        except OSError as error:
            if self.link_mode is Link.IF_POSSIBLE:
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
            name: {"bytes": file.bytes, "checksum": file.checksum} for name, file in made.items()
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
    folder: ExportFolder, part: Part, *, export: str, shared: Mapping[str, SharedFile]
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
