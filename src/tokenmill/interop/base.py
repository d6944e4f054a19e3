"""What a foreign format must have to be exported and imported: the contract of this package.

Export. A format plans *parts*, from the store's content and the options alone, never from the
number of workers. Threads carry parts out in any order, each into files of its own whose names the
plan has fixed. A file is written elsewhere, synced and renamed; the same command again skips parts
whose files are there. `finish` runs once, after all parts, and writes what describes them (an
index, a manifest).

    plan(export)               -> the parts, with the names of their files
    write(export, part, out)   -> on a thread: make the part's files
    finish(export, out)        -> the index files; lines to tell the user

Import. `detect` looks at names and first bytes, never at more. `open` reads what the files say
about themselves and cuts them into *parts* of bounded size, which workers read as blocks of whole
documents. Everything a file says is checked against its size before it is used: a truncated,
damaged or wrong file is a SourceError that names it, whatever a reader of it stumbles over
(`reading`). Nothing that could execute (a pickle) is ever loaded.

    detect(path)               -> None, or how sure it is and why
    open(path, options)        -> Foreign: its parts, and what it knows about boundaries
    Foreign.blocks(part)       -> DocumentBlock (ids, lengths, mask) after block, in bounded memory

A format is a class without state; what it is told comes in as arguments. Options that one format
alone has are its `settings`: `--set name=value` on the command line, keyword arguments in Python.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import stat
import struct
import zlib
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import SourceError, TokenmillError, UsageError
from tokenmill.files import is_remote, normalise, shown
from tokenmill.options import NEEDED, PACKINGS, SPEED, WRITTEN, BuildOptions, option, same
from tokenmill.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.files import PathInput
    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store


# About what a block of an import holds, and what an export reads in one go.
BLOCK_BYTES = 8 << 20
# Foreign files larger than this are imported in several parts, each a shard of the store.
IMPORT_PART_BYTES = 256 << 20
# The most that an import unpacks or joins in memory in one piece.
HELD_BYTES = 512 << 20
# Files that claim to unpack to more than so many times their size are refused.
MOST_EXPANSION = 1000
# What names of files and folders say -> the split, as a trainer looks for it.
SPLITS = {"train": "train", "test": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
# What readers raise over files that are not what they say.
_UNREADABLE: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, EOFError, LookupError)
_UNREADABLE += (MemoryError, OSError, RuntimeError, SyntaxError, SystemError, TypeError, ValueError)
_UNREADABLE += (struct.error, zlib.error, AssertionError)  # the last is torch's

# All formats: name -> module and class. A new format is a file and a line here.
HOMES = {
    "megatron": "tokenmill.interop.indexed:Megatron",
    "datatrove": "tokenmill.interop.indexed:Datatrove",
    "olmo": "tokenmill.interop.indexed:Olmo",
    "nanogpt": "tokenmill.interop.nanogpt:NanoGpt",
    "llmc": "tokenmill.interop.nanogpt:LlmC",
    "mds": "tokenmill.interop.chunks:Mds",
    "litdata": "tokenmill.interop.chunks:LitData",
    "arrow": "tokenmill.interop.tables:Arrow",
    "parquet": "tokenmill.interop.tables:Parquet",
    "pt": "tokenmill.interop.tensors:Pt",
    "npz": "tokenmill.interop.tensors:Npz",
}
NAMES = tuple(HOMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An option that one format alone has; its type is that of the default."""

    default: str | int | bool
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """A format in words, for the help and the table in the documentation."""

    name: str
    title: str  # what it is called, in a few words: "Megatron-LM .bin and .idx"
    read_by: str
    kept: str
    lost: str  # what an export loses, and an import therefore cannot have
    linkable: bool = False  # its token files are a store's own bytes, so that `--link` works
    rows: bool = False  # it can hold rows of `--seq-len`, not documents alone
    rows_only: bool = False  # it can hold nothing but rows: `--seq-len` must be given
    row_overlap: int = 0  # tokens that a row has beyond `--seq-len`, which begin the next row
    tells_overlap: bool = False  # its files say which these are, so that an import leaves them out
    masks: bool = True  # it has a place for loss masks
    file_tokens: bool = True  # `--file-tokens` cuts its files
    settings: Mapping[str, Setting] = field(default_factory=dict)


# Whether token files become hard links to the store's own: as `link` says, True is always.
LINKS = ("never", "always", "if-possible")


# -------------------------------------------------------------------------------------------------
# What `export`, `import` and `convert` may be told; the command line makes its flags of it.

READ = "How files are read"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What a format is told of an export; everything here but `link` decides the bytes."""

    PANELS = (NEEDED, READ, WRITTEN, SPEED)

    to: str = option(
        MISSING,
        NEEDED,
        "FORMAT",
        choices=NAMES,
        help=f"{', '.join(NAMES)}. What each keeps and loses: docs/formats.md.",
    )
    seq_len: int | None = option(None, WRITTEN, "TOKENS", shown="whole documents")
    """Write rows of so many tokens: mds, litdata, arrow, parquet; pt and npz need it."""
    packing: str = option(
        next(iter(PACKINGS)),
        WRITTEN,
        "NAME",
        help=f"How documents share rows: {listed([*PACKINGS], 'or')}, as layout shows them.",
    )
    file_tokens: int | None = option(None, WRITTEN, "N", shown="the format's own")
    """Tokens of one file, about, where the format leaves that open."""
    # True, False, or one of `LINKS`, which it is once it was checked.
    link: str | bool = option(False, WRITTEN, kind=bool)
    """Hard links to the store's own files instead of copies: megatron, datatrove, olmo, and nanogpt
    for one shard. A store's files are never written to again, so links stay as they are."""
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Of the format; it sees all of them, defaults filled in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest(ExportOptions):
    """Everything that `export` is told."""

    store: PathInput | Store = field(kw_only=False)
    out: PathInput = option(MISSING, NEEDED, "FOLDER", short="-o")
    """Where the files are written: a new or empty folder."""
    split: str | Sequence[str] | None = option(
        None, WRITTEN, "NAME", kind=list[str] | None, shown="all"
    )
    """The split to write. May be given repeatedly."""
    workers: int | None = option(None, SPEED, "N", shown="physical cores")
    """Parts that are worked on at a time, each on a thread. Never changes a byte."""
    on_progress: Callable[[int, int], None] | None = None
    """Told how much is done, of how much; by any thread, one at a time."""


class ExportTask(NamedTuple):
    """A piece of an export that one thread carries out: a file, or files that belong together."""

    split: str
    tokens: int  # about how much work it is, for progress
    files: tuple[str, ...]  # relative to the out folder with / between
    first: int  # what of the split: shards, records, tokens, as the format counts
    last: int
    sizes: Mapping[str, int] = MappingProxyType({})  # of files, where the plan knows them


class Sure(IntEnum):
    """How much a look at names and first bytes says."""

    POSSIBLE = 1  # nothing speaks against it: raw ids look like anything
    LIKELY = 2  # names and sizes fit, and no magic number says more
    CERTAIN = 3  # a magic number or a manifest says so


class Detection(NamedTuple):
    sure: Sure
    why: str  # "begins with MMIDIDX"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What a format is told about files that do not say it themselves."""

    PANELS = ExportOptions.PANELS

    dtype: str | None = option(None, READ, "TYPE", shown="as the files say, else uint16")
    """Type of the ids in files that do not say it: uint16, uint32, int32, ..."""
    split_at_eos: bool = option(False, READ)
    """Cut documents at the end-of-text id, where the format has no boundaries (nanogpt, llmc).
    Otherwise a file is one document."""
    split: str | None = option(
        None, READ, "NAME", shown="val or test where a file's name says so, else train"
    )
    """The split that all documents go to."""
    eos_id: int | None = None
    """The end-of-text id of the tokenizer, where there is one."""
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest(ImportOptions):
    """Everything that `import_` is told."""

    path: PathInput = field(kw_only=False)
    tokenizer: PathInput = same(BuildOptions, "tokenizer")
    out: PathInput = option(MISSING, NEEDED, "FOLDER", short="-o")
    """Where the store is written."""
    format: str | None = option(
        None,
        READ,
        "FORMAT",
        flag="--from",
        choices=NAMES,
        shown="as the files say",
        help=f"{', '.join(NAMES)}. Needed where the bytes do not say it.",
    )
    eos: str | None = option(None, READ, "TOKEN", shown="the tokenizer's own")
    """The end-of-text token of these files."""
    workers: int | None = same(ExportRequest, "workers")
    on_progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertRequest(ExportOptions):
    """Everything that `convert` is told."""

    path: PathInput = field(kw_only=False)
    out: PathInput = same(ExportRequest, "out")
    format: str | None = same(ImportRequest, "format")
    tokenizer: PathInput | None = option(None, READ, "PATH|ID", short="-t", shown="unknown")
    """The tokenizer that made the ids; needed where its end-of-text is."""
    dtype: str | None = same(ImportOptions, "dtype")
    split_at_eos: bool = same(ImportOptions, "split_at_eos")
    eos: str | None = same(ImportRequest, "eos")
    split: str | Sequence[str] | None = same(ExportRequest, "split")
    workers: int | None = same(ExportRequest, "workers")
    on_progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignPart:
    """A range of a foreign file that becomes a unit, and so a shard, of a store."""

    path: str  # relative to what is imported, with / between: the identity of its units
    file: Path
    beside: tuple[Path, ...] = ()  # other files that it is read from: indexes, masks
    index: int = 0  # number of the part in its file, without gaps
    start: int = 0
    end: int | None = None  # bytes, documents, rows, as the format counts; None is to its end
    split: str = "train"
    bytes: int = 0  # about how much work it is, for progress


class DocumentBlock(NamedTuple):
    """Whole documents of a foreign file."""

    ids: NDArray[Any]  # of all documents, back to back; any integer type
    lengths: NDArray[np.int64]  # tokens of each document; 0 is allowed
    mask: NDArray[np.uint8] | None = None  # the loss mask of each token, where the format has one


if TYPE_CHECKING:
    Blocks = Iterator[DocumentBlock]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Foreign files that were opened: cut into parts, and read part by part, by several threads."""

    parts: tuple[ForeignPart, ...]  # in the order of the documents, those of one file together
    blocks: Callable[[ForeignPart], Blocks]  # the documents of a part
    has_boundaries: bool = True  # the format says where documents end
    has_mask: bool = False
    tokenizer: str | None = None  # fingerprint of the one that made the ids, where files say it
    note: str | None = None  # what a person should know: no boundaries, ...


class Format(ABC):
    """A foreign format; see the module for what its functions must do."""

    about: About

    @abstractmethod
    def plan(self, export: Export) -> list[ExportTask]:
        """The parts of an export; UsageError where the store cannot be had in this format."""

    @abstractmethod
    def write(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        """Make the files of a part; called on a thread."""

    def index_files(self, export: Export) -> list[str]:
        """The names of the files that `finish` makes."""
        return []

    @abstractmethod
    def finish(self, export: Export, out: PartFiles) -> list[str]:
        """Write the index files, when all parts are done; returns lines for the user."""

    @abstractmethod
    def detect(self, path: Path) -> Detection | None:
        """Whether a file, folder or prefix may be of this format; never reads more than headers."""

    @abstractmethod
    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Open files for import; SourceError where they are not what they should be."""


def damaged(path: Path | str, problem: str, *, hint: str | None = None) -> SourceError:
    """The error for a foreign file that is not what it should be."""
    return SourceError(
        f"{str(path)!r} {problem}",
        hint=hint or "get the file again from where it came, or write it again",
    )


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn whatever a reader of a foreign file stumbles over into an error that names the file."""
    import zipfile

    unreadable: tuple[type[Exception], ...] = (*_UNREADABLE, zipfile.BadZipFile)
    try:
        yield
    except TokenmillError:
        raise
    except unreadable as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise damaged(path, f"cannot be read: {reason}") from error


def file_size(path: Path, *, size: int | None = None) -> int:
    """The size of a file that must be there, and of this size where it is known."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise damaged(path, "is not a file", hint="put the file there, not a folder or a pipe")
    if size is not None and found.st_size != size:
        raise damaged(path, f"has {found.st_size:,} bytes, and its index says {size:,}")
    return found.st_size


def first_bytes(path: Path, count: int = 16) -> bytes:
    """The beginning of a file."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror or error}") from error


def find_files(path: Path, *suffixes: str) -> list[tuple[str, Path]]:
    """The files with a suffix that a path is: itself, or all below a folder that are not hidden.

    Sorted, each with its name relative to the folder.
    """
    if not path.is_dir():
        return [(path.name, path)] if path.name.endswith(suffixes) and path.is_file() else []
    found = ((each.relative_to(path), each) for each in sorted(path.rglob("*")))
    return [
        (name.as_posix(), each)
        for name, each in found
        if each.name.endswith(suffixes)
        and each.is_file()
        and not any(part.startswith(".") for part in name.parts)
    ]


def split_of(name: str, options: ImportOptions) -> str:
    """The split of a file or folder: as asked for, else the first word of its name that is one."""
    if options.split is not None:
        return options.split
    words = re.findall("[a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def check_expansion(path: Path, unpacked: int, *, packed: int) -> None:
    """Refuse to unpack what claims to become far larger than tokens do."""
    if not 0 <= unpacked <= max(IMPORT_PART_BYTES, MOST_EXPANSION * packed):
        raise damaged(
            path,
            f"claims that {packed:,} bytes unpack to {unpacked:,}, over {MOST_EXPANSION:,} times as"
            " many: it is damaged, or made to fill the memory",
            hint="unpack it yourself if you trust it, and import that",
        )


def check_held(path: Path | str, size: int, what: str) -> None:
    """Refuse what would have to be in memory in one piece, and is too large for that."""
    if size > HELD_BYTES:
        raise damaged(
            path,
            f"has {what} of {size:,} bytes, which would have to be in memory as a whole; an import"
            f" holds {HELD_BYTES:,} at most",
            hint="write it again in smaller pieces, or without compression",
        )


def get_format(name: str) -> Format:
    """The format of a name; UsageError lists them all."""
    if name not in HOMES:
        raise UsageError(
            f"there is no format {name!r}", hint=f"use one of: {', '.join(map(repr, NAMES))}"
        )
    module, _, cls = HOMES[name].partition(":")
    found: Format = getattr(importlib.import_module(module), cls)()
    return found


def detect_format(path: Path, named: str | None = None) -> Format:
    """The format that was named, or the one that files can be in; UsageError lists candidates."""
    if named is not None:
        return get_format(named)
    found = candidates(path)
    if not found:
        if not path.exists():
            raise SourceError(f"there is nothing at {str(path)!r}", hint="check the path")
        raise UsageError(
            f"{str(path)!r} does not look like any format that tokenmill reads",
            hint=f"check the path, or name the format with --from: {', '.join(NAMES)}",
        )
    best = max(detection.sure for detection in found.values())
    names = [name for name, detection in found.items() if detection.sure == best]
    if len(names) == 1 and (best > 1 or len(found) == 1):
        return get_format(names[0])
    listed = "; ".join(f"{name} ({found[name].why})" for name in names)
    raise UsageError(
        f"{str(path)!r} may be of several formats: {listed}",
        hint=f"say which with --from {names[0]}",
    )


def candidates(path: Path) -> dict[str, Detection]:
    """Every format that the files may be in, and why."""
    found = {}
    for name in NAMES:
        try:
            with reading(path):
                detection = get_format(name).detect(path)
        except ImportError:
            # A format whose packages are not there can still be named, and says so then.
            continue
        if detection is not None:
            found[name] = detection
    return found


def complete_settings(
    format_: Format, given: Mapping[str, str | int | bool]
) -> dict[str, str | int | bool]:
    """The settings of a format, checked, defaults filled in."""
    known = format_.about.settings
    for name in given:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise UsageError(
                f"the format {format_.about.name!r} has no setting {name!r}",
                hint=f"it has: {listed}",
            )
    return {name: _setting(name, known[name], given.get(name)) for name in known}


def _setting(name: str, setting: Setting, value: str | int | bool | None) -> str | int | bool:
    if value is None:
        return setting.default
    kind = type(setting.default)
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        found = words[str(value).lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        raise UsageError(
            f"{name}={value!r} is not {'yes or no' if kind is bool else 'a whole number'}",
            hint=f"{name}: {setting.help}",
        ) from None
    if setting.choices and found not in setting.choices:
        raise UsageError(
            f"{name}={value!r} is not known", hint=f"use one of: {', '.join(setting.choices)}"
        )
    return found


# -------------------------------------------------------------------------------------------------
# Other projects' files are on a local disk: an address is refused, not taken for a folder.

WRITE_HINT = "write to a local folder, then copy that to the bucket"
STORE_HINT = "import into a local folder, then copy that to the bucket: stores are read there"
READ_HINT = "copy the files to a local disk first; a store, unlike them, is read where it is"


def local_path(path: str | os.PathLike[str], *, hint: str) -> Path:
    """The path, if it is one; UsageError for a URL, which would make a folder called `s3:`."""
    text = os.fspath(path)
    if ":/" not in text:
        return Path(text)
    if is_remote(text):
        raise UsageError(
            f"{shown(text)!r} is an address; files of other projects are read and written on a "
            "local disk",
            hint=hint,
        )
    return Path(normalise(text) if "://" in text else text)
