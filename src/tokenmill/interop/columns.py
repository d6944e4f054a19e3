"""Columns of other people's rows, on their way into a store: which are ids, masks, padding.

A row becomes a document. `attention_mask` takes padding out of it; `loss_mask` (or `mask`), or
`labels` that are the ids with -100 here and there, say what counts for the loss.
"""

from __future__ import annotations

import itertools
import json
import mmap
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    Block,
    Setting,
    check_expansion,
    check_held,
    damaged,
    file_size,
)
from tokenmill.loader.batch import IGNORED
from tokenmill.store.layout import SPLIT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.interop.base import ImportOptions

ID_NAMES = ("input_ids", "ids", "tokens", "input")
"""Columns that hold ids, in the order in which they are looked for."""
MASK_NAMES = ("loss_mask", "mask")
COLUMN_SETTING = Setting(
    default="", help=f"import: the column of ids; else the first of {', '.join(ID_NAMES)}"
)
LABELS_SETTING = Setting(
    default=True, help="import: whether labels of -100 say what does not count for the loss"
)
INDEX_BYTES = 64 << 20
"""Of an index of JSON, which becomes some 20 times as much in memory."""
UNPACKED_BYTES = (1 << 32) - 1
"""Of a packed file of MDS or LitData: offsets in them are of 32 bits."""
ROWS_NOTE = "each row became a document; if rows were cut from a stream: --split-at-eos"
CUT_NOTE = "rows were joined and cut behind the end-of-text id; what lies in two files is cut there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a file that are read, by what they are for."""

    ids: str
    padding: str | None = None
    mask: str | None = None
    labels: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.ids, self.padding, self.mask, self.labels)
        return tuple(name for name in found if name is not None)

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.labels is not None


def choose_columns(
    names: Sequence[str], options: ImportOptions, *, path: Path | str, prefer: str | None = None
) -> Columns:
    """Which columns to read; SourceError lists them where none is known to hold ids."""
    wanted = str(options.settings.get("column") or "") or prefer
    candidates = [wanted] if wanted else [name for name in ID_NAMES if name in names]
    if not candidates or candidates[0] not in names:
        raise SourceError(
            f"{str(path)!r} has no column {wanted!r}"
            if wanted
            else f"{str(path)!r} has no column that is known to hold ids",
            hint=f"name it with: --set column=NAME; there are: {', '.join(names) or 'none'}",
        )
    mask = next((name for name in MASK_NAMES if name in names), None)
    use_labels = mask is None and bool(options.settings.get("labels", True))
    return Columns(
        ids=candidates[0],
        padding="attention_mask" if "attention_mask" in names else None,
        mask=mask,
        labels="labels" if use_labels and "labels" in names else None,
    )


def make_block(
    found: Mapping[str, NDArray[Any]],
    columns: Columns,
    lengths: NDArray[np.int64],
    options: ImportOptions,
    *,
    path: Path | str,
) -> Block:
    """The documents of some rows, whose columns are flat arrays of the same length."""
    ids = found[columns.ids]
    if ids.dtype.kind not in "iu":
        raise damaged(
            path,
            f"holds {ids.dtype} in its column {columns.ids!r}, not whole numbers",
            hint="name the column of ids with: --set column=NAME",
        )
    for name in columns.names:
        if len(found[name]) != len(ids):
            raise damaged(
                path, f"has rows whose {name!r} and {columns.ids!r} are not of one length"
            )
    mask = _mask(found, columns, ids, path=path)
    if columns.padding is not None:
        block = _without_padding(ids, lengths, mask, found[columns.padding] != 0)
        check_padding(lengths - block.lengths, options, path=path)
        return block
    return Block(ids, lengths, mask)


def check_padding(lacking: NDArray[np.int64], options: ImportOptions, *, path: Path | str) -> None:
    """Refuse to join rows that are filled up, but for a last one: no stream was cut there."""
    if options.split_at_eos and lacking[:-1].any():
        raise UsageError(
            f"{str(path)!r} holds rows that are filled up with padding, so they were packed, not"
            " cut from a stream; joined they would be another text",
            hint="leave --split-at-eos out: each row becomes a document",
        )


def _mask(
    found: Mapping[str, NDArray[Any]], columns: Columns, ids: NDArray[Any], *, path: Path | str
) -> NDArray[np.uint8] | None:
    if columns.mask is not None:
        return _bytes(found[columns.mask] != 0)
    if columns.labels is None:
        return None
    labels = found[columns.labels]
    counts = np.not_equal(labels, IGNORED)
    if (np.not_equal(labels, ids) & counts).any():
        raise damaged(
            path,
            f"has labels that are neither its {columns.ids!r} nor {IGNORED}, so they do not say"
            " which ids count",
            hint="import without them: --set labels=no",
        )
    return _bytes(counts)


def _bytes(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return flags.view(np.uint8)


def _without_padding(
    ids: NDArray[Any],
    lengths: NDArray[np.int64],
    mask: NDArray[np.uint8] | None,
    real: NDArray[np.bool_],
) -> Block:
    if real.all():
        return Block(ids, lengths, mask)
    sums = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(real, out=sums[1:])
    ends = np.cumsum(lengths)
    kept = sums[ends] - sums[ends - lengths]
    return Block(ids[real], kept, None if mask is None else mask[real])


def cut_at_eos(
    blocks: Iterable[Block], options: ImportOptions, *, path: Path | str
) -> Iterator[Block]:
    """The documents of rows that were cut from a stream: rows joined, cut behind each eos."""
    if not options.split_at_eos:
        yield from blocks
        return
    if options.eos_id is None:
        raise UsageError(
            "documents are to end at the end-of-text id, and the tokenizer does not name one",
            hint="name it with --eos TOKEN",
        )
    held: list[Block] = []
    for block in blocks:
        ends = np.flatnonzero(block.ids == options.eos_id) + 1
        if not len(ends):
            held.append(block)
            check_held(path, sum(each.ids.nbytes for each in held), "rows without an end-of-text")
            continue
        last = int(ends[-1])
        joined = _join([*held, _part(block, 0, last)])
        before = len(joined.ids) - last
        yield joined._replace(lengths=np.diff(ends + before, prepend=0))
        held = [_part(block, last, len(block.ids))]
    rest = _join(held)
    if len(rest.ids):
        yield rest._replace(lengths=np.array([len(rest.ids)], np.int64))


def _part(block: Block, first: int, last: int) -> Block:
    mask = None if block.mask is None else block.mask[first:last]
    return Block(block.ids[first:last], np.array([last - first], np.int64), mask)


def _join(blocks: Sequence[Block]) -> Block:
    if not blocks:
        return Block(np.zeros(0, np.uint16), np.zeros(0, np.int64))
    masks = [block.mask for block in blocks if block.mask is not None]
    return Block(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.lengths for block in blocks]),
        np.concatenate(masks) if masks else None,
    )


def note_of(options: ImportOptions) -> str:
    """What an import of rows tells of borders."""
    return CUT_NOTE if options.split_at_eos else ROWS_NOTE


def gather(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Stretches of a file back to back: one strided copy where all are alike, else a join."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    if int(starts.min()) < 0 or int(ends.max()) > len(data) or (ends < starts).any():
        raise IndexError("stretches that do not lie in the file")
    if len(starts) == 1:
        return data[int(starts[0]) : int(ends[0])]
    length = int(ends[0] - starts[0])
    step = int(starts[1] - starts[0])
    alike = bool((ends - starts == length).all()) and bool((np.diff(starts) == step).all())
    if alike and 0 < length <= step:
        rows = np.lib.stride_tricks.as_strided(
            data[int(starts[0]) :], (len(starts), length), (step, 1), writeable=False
        )
        return np.ascontiguousarray(rows).reshape(-1)
    view = data.data
    pieces = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return np.frombuffer(bytearray().join(pieces), np.uint8)


def split_folders(path: Path, marker: str) -> list[tuple[str, Path]]:
    """Folders that hold a file of this name: the path itself, or one for each split below it.

    The first of each pair is what the names of its files begin with: "" or "train/".
    """
    if path.name == marker and path.is_file():
        path = path.parent
    if (path / marker).is_file():
        return [("", path)]
    if not path.is_dir():
        return []
    folders = sorted(folder for folder in path.iterdir() if (folder / marker).is_file())
    return [(f"{folder.name}/", folder) for folder in folders]


def read_json(path: Path) -> Any:
    """The value in a small file of JSON; None where it is none."""
    if file_size(path) > INDEX_BYTES:
        raise damaged(
            path,
            f"is larger than {INDEX_BYTES:,} bytes, which no index should be",
            hint="write the files again into several folders, each with its own index",
        )
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def whole_number(value: object, *, path: Path, most: int | None = None) -> int:
    """A count or a size of an index; SourceError where it is none, or larger than it can be."""
    if type(value) is not int or value < 0 or (most is not None and value > most):
        limit = "" if most is None else f" up to {most:,}"
        raise damaged(path, f"says {repr(value)[:40]} where a count or size{limit} must stand")
    return value


def unpack(path: Path, codec: str, *, size: int) -> NDArray[np.uint8]:
    """The bytes of a packed file, piece by piece by way of the disk: they may be 4 GB."""
    check_expansion(path, size, packed=file_size(path))
    left, buffer = size, memoryview(bytearray(min(BLOCK_BYTES, size + 1)))
    with tempfile.TemporaryFile() as file:
        try:
            with pa.CompressedInputStream(pa.memory_map(str(path)), codec) as stream:
                while left >= 0 and (count := stream.readinto(buffer)):
                    left -= count
                    file.write(buffer[:count])
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, f"cannot be unpacked: {error}") from error
        if left or not size:
            raise damaged(path, f"does not unpack to the {size:,} bytes of its index")
        file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)


def split_of(name: str, options: ImportOptions) -> str:
    """The split that a folder's or file's name says, else `train`."""
    if options.split is not None:
        return options.split
    word = Path(name).name.partition(".")[0].partition("-")[0].lower()
    known = {"train", "val", "valid", "validation", "dev", "test"}
    return word if word in known and SPLIT_NAME.fullmatch(word) else "train"


def ranges(count: int, *, total_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of `count` records that are about `part_bytes` each; one for none at all."""
    parts = max(1, min(count, -(-total_bytes // part_bytes)))
    borders = [count * i // parts for i in range(parts + 1)]
    yield from itertools.pairwise(borders)


def first_bytes(path: Path, count: int = 16) -> bytes:
    """The beginning of a file; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def files_below(path: Path, suffixes: Iterable[str]) -> list[tuple[str, Path]]:
    """The file itself, or all files below a folder with these suffixes: name and path, sorted."""
    wanted = tuple(suffixes)
    if path.is_file():
        return [(path.name, path)] if path.name.endswith(wanted) else []
    found = sorted(
        each for each in path.rglob("*") if each.name.endswith(wanted) and each.is_file()
    )
    return [(each.relative_to(path).as_posix(), each) for each in found]
