"""Writes the tokens of one unit: to temporary files, hashed on the way, committed as a whole.

    writer.append(split, ids, ...) ... writer.rejects(...) ... writer.commit(...) -> Receipt

Nothing is visible in `shards/` before `commit`. Ids are narrowed into one small block that stays in
the cache while it is checked, hashed and written; numpy, xxhash and the write all let other threads
run meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import secrets
import shutil
import sys
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.errors import BuildError, StoreError
from tokenmill.store.facts import (
    FileFacts,
    MaskFacts,
    Receipt,
    RejectsFacts,
    ShardFacts,
    ShardFiles,
    facts_of,
    find_receipt,
    read_receipt,
)
from tokenmill.store.format import (
    MAX_DOCUMENT_TOKENS,
    RowRuns,
    counted_by_document,
    index_blocks,
    token_dtype,
)
from tokenmill.store.layout import (
    RECEIPT_FILE,
    REJECTS_FILE,
    SHARD_FILE,
    SPLIT_NAME,
    TRAIN,
    replace_file,
    shard_name,
    sync_folder,
    write_error,
    write_synced,
)

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.records import Reject
    from tokenmill.store.facts import (
        Bounds,
        Claim,
        Counts,
        EngineFacts,
        SourceFacts,
        UnitFacts,
        UnknownFacts,
    )
    from tokenmill.store.format import Ints
    from tokenmill.store.layout import StoreLayout

    Numbers = NDArray[np.integer]
    Mask = NDArray[np.uint8 | np.bool]

# -------------------------------------------------------------------------------------------------
# How a finished unit becomes part of a store, and how what a crash left is removed.
#
# The order is what makes it safe. At every moment, and after a crash at any moment:
#
#   | a manifest is there   =>  every receipt it names is there
#   | a receipt is there    =>  every file it names is there, with the bytes it names
#
# So whoever claims goes first when something is taken away (manifest, then receipt, then files),
# and last when something is put in place (files, then receipt). Each step is on the disk before
# the next begins.
#
# Two workers may commit the same unit, at the same time even: a part that was started twice, a
# copy of a slow task. Equal units have equal bytes, so the one that comes second finds its own
# receipt and leaves everything as it is; if both are at it at once, they put the same bytes over
# each other.


def publish(layout: StoreLayout, receipt: Receipt, *, staging: Path) -> None:
    """Move a unit's synced files from `staging` into the store; its receipt goes last."""
    unit = receipt.unit.name
    staged_receipt = staging / f"{unit}.json"
    write_synced(staged_receipt, receipt.to_bytes())
    layout.create()
    if _is_there(layout, receipt):
        shutil.rmtree(staging)
        return
    claimed = [layout.shards / name for name in receipt.files]
    if receipt.rejects is not None:
        claimed.append(layout.rejects_file(unit))
    _retire(layout, unit, replaced={path.name for path in claimed})
    is_placed = False
    try:
        for path in claimed:
            layout.upstream.take(staging / path.name, path)
        if receipt.rejects is not None:
            sync_folder(layout.rejects)
        sync_folder(layout.shards)
        staged_receipt.replace(layout.receipt(unit))
        is_placed = True
        sync_folder(layout.shards)
        layout.upstream.put(layout.receipt(unit))
    except (OSError, BuildError):
        # Take back what was moved, but for what another worker committed. A broken disk may refuse
        # that too; `sweep` ends it.
        if is_placed or not _is_there(layout, receipt):
            with contextlib.suppress(OSError):
                for path in (layout.receipt(unit), *claimed):
                    path.unlink(missing_ok=True)
        raise
    staging.rmdir()


def _is_there(layout: StoreLayout, receipt: Receipt) -> bool:
    """Whether this very unit is part of the store already, with all its files."""
    unit = receipt.unit.name
    try:
        if layout.receipt(unit).read_bytes() != receipt.to_bytes():
            return False
    except OSError:
        return False
    return find_receipt(layout, unit) is not None


def _retire(layout: StoreLayout, unit: str, *, replaced: Collection[str]) -> None:
    """Remove an earlier version of the unit; files that the new one has too are replaced later."""
    if not layout.receipt(unit).exists():
        return
    remove_manifest(layout)
    dropped = [path for path in _files_of(layout, unit) if path.name not in replaced]
    layout.receipt(unit).unlink(missing_ok=True)
    sync_folder(layout.shards)
    layout.upstream.remove([layout.receipt(unit)])
    for path in dropped:
        path.unlink(missing_ok=True)
    layout.upstream.remove(dropped)


def _files_of(layout: StoreLayout, unit: str) -> list[Path]:
    try:
        names: Iterable[str] = read_receipt(layout, unit).files
    except StoreError:  # damaged: the folder itself must say which files are the unit's
        found = (SHARD_FILE.fullmatch(path.name) for path in layout.shards.iterdir())
        names = [match[0] for match in found if match and match["unit"] == unit]
    return [*(layout.shards / name for name in names), layout.rejects_file(unit)]


def remove_manifest(layout: StoreLayout) -> None:
    """Take the manifest away, before anything that it claims is changed."""
    if layout.manifest.exists():
        layout.manifest.unlink(missing_ok=True)
        sync_folder(layout.root)
        layout.upstream.remove([layout.manifest])


def keep_tokenizer(
    layout: StoreLayout, files: Mapping[str, Path], wanted: Mapping[str, FileFacts]
) -> None:
    """Copy the tokenizer's files into the store, so that it needs nothing else to be read."""
    layout.tokenizer.mkdir(parents=True, exist_ok=True)
    for stray in {path.name for path in layout.tokenizer.iterdir()} - set(wanted):
        path = layout.tokenizer / stray
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        layout.upstream.remove([path])
    for name, source in files.items():
        target = layout.tokenizer / name
        if target.exists() and facts_of(target.read_bytes()) == wanted[name]:
            continue
        data = source.read_bytes()
        if facts_of(data) != wanted[name]:
            raise StoreError(
                f"the tokenizer file {str(source)!r} changed while it was read",
                hint="run the same command again",
            )
        replace_file(layout, target, data)


def sweep(layout: StoreLayout, claims: Mapping[str, Claim]) -> list[Path]:
    """Remove temporary files, and units and files that none of `claims` names; returns them.

    The caller holds the store's lock. Files whose names are not of a store's making are left alone.
    """

    def unclaimed(
        folder: Path, pattern: re.Pattern[str], is_claimed: Callable[[re.Match[str], Claim], bool]
    ) -> list[Path]:
        if not folder.is_dir():
            return []
        with os.scandir(folder) as entries:
            found = [match for entry in entries if (match := pattern.fullmatch(entry.name))]
        return sorted(
            folder / match[0]
            for match in found
            if (claim := claims.get(match["unit"])) is None or not is_claimed(match, claim)
        )

    def is_shard(match: re.Match[str], claim: Claim) -> bool:
        is_kind = claim.mask or match["kind"] != "mask"
        return is_kind and (match["split"] or TRAIN) in claim.splits

    def remove(paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            sync_folder(folder)
        layout.upstream.remove(paths)

    try:
        shutil.rmtree(layout.tmp, ignore_errors=True)
        retired = unclaimed(layout.shards, RECEIPT_FILE, lambda *_: True)
        orphans: list[Path] = []
        if retired:
            remove_manifest(layout)
            if layout.upstream.url is not None:  # a look into the folder would not show them
                files = [path for receipt in retired for path in _files_of(layout, receipt.stem)]
                orphans += [p for p in files if layout.size(p.parent.name, p.name) is not None]
            remove(retired)
        orphans += unclaimed(layout.shards, SHARD_FILE, is_shard)
        orphans += unclaimed(layout.rejects, REJECTS_FILE, lambda _, claim: claim.rejects)
        remove(orphans)
    except OSError as error:
        raise write_error(error, path=layout.shards) from error
    return retired + orphans


# -------------------------------------------------------------------------------------------------
# A file that is hashed while it is written, and goes to the disk meanwhile.
#
# Without the second, a file is in memory until its end, and `finish` waits while the disk takes
# all of it at once. Linux can be told to begin earlier; where it cannot, a file takes longer and
# is the same.

# Larger writes cost Linux more time per byte, since it allocates large pages for them.
WRITE_BYTES = 1 << 19
AHEAD_BYTES = 8 << 20  # what is in memory before the disk is told to begin
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE: it begins and does not wait


class HashedFile(io.FileIO):
    """A new file, unbuffered."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self.bytes = 0  # written so far
        self._begun = 0
        self._hash = xxhash.xxh3_128()

    def write(self, block: Any) -> int:
        """Write all of a block, of any contiguous kind."""
        left = memoryview(block).cast("B")
        count = len(left)
        while left:
            piece = left[:WRITE_BYTES]
            # A write may be cut short, most often when the disk is nearly full.
            piece = piece[: super().write(piece)]
            self._hash.update(piece)
            left = left[len(piece) :]
        self.bytes += count
        if self.bytes - self._begun >= AHEAD_BYTES:
            begin, function = self._begun, _sync_file_range()
            self._begun = self.bytes
            if function is not None:
                function(self.fileno(), begin, self.bytes - begin, _BEGIN_WRITING)
        return count

    @property
    def checksum(self) -> str:
        """xxh3-128 of what was written so far."""
        return self._hash.hexdigest()

    def finish(self) -> FileFacts:
        """Wait until all of it is on the disk."""
        os.fsync(self.fileno())
        self.close()
        return FileFacts(bytes=self.bytes, checksum=self.checksum)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


class _Collected(io.BufferedWriter):
    """A hashed file that is written in blocks of some size."""

    def __init__(self, path: Path) -> None:
        self.file = HashedFile(path)
        super().__init__(self.file, WRITE_BYTES // 2)

    def finish(self) -> FileFacts:
        self.flush()
        return self.file.finish()

    def abort(self) -> None:
        """Close it without writing what was collected."""
        self.file.close()


# 512 KB of uint16: enough for xxhash to let other threads run, and it stays in the cache.
BLOCK_TOKENS = 1 << 18
# Rejected rows of a unit that are listed; of those after them, each reason is counted.
LISTED_REJECTS = 10_000


class UnitWriter:
    """Collects the documents and rejects of a unit; as a context manager: no commit, no trace."""

    def __init__(
        self,
        layout: StoreLayout,
        unit: UnitFacts,
        *,
        vocab_size: int,
        listed_rejects: int = LISTED_REJECTS,
    ) -> None:
        self._layout = layout
        self._unit = unit
        self._vocab_size = vocab_size
        self._listed_rejects = listed_rejects
        self._staging = layout.tmp / f"{unit.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._shards: dict[str, ShardWriter] = {}
        self._rejects: _Rejects | None = None
        with self._guarded():
            self._staging.mkdir(parents=True)

    def append(
        self, split: str, ids: Numbers, *, lengths: Numbers, rows: Ints, mask: Mask | None = None
    ) -> None:
        """Add whole documents to a split: their ids back to back, lengths, and rows in the unit.

        A row may be there several times, once for each of its pieces; all of them come at once.
        `mask` says for every token whether it counts for the loss (1) or not (0). Documents of one
        store have masks all of them, or none.
        """
        if len(lengths) != len(rows) or int(lengths.sum()) != len(ids):
            raise ValueError(
                f"{len(lengths)} lengths over {int(lengths.sum())} tokens do not describe"
                f" {len(ids)} tokens of {len(rows)} rows"
            )
        if len(lengths) == 0:
            return
        with self._guarded():
            shard = self._shards.get(split)
            if shard is None:
                if not SPLIT_NAME.fullmatch(split):
                    raise ValueError(f"split {split!r} is not lower-case letters, digits and _")
                shard = ShardWriter(self._staging, self._unit.name, split, self._vocab_size)
                self._shards[split] = shard
            shard.append(ids, lengths=lengths, rows=rows, mask=mask)

    def rejects(self, rejects: Iterable[Reject]) -> None:
        """Write down rows that could not be used."""
        with self._guarded():
            for reject in rejects:
                if self._rejects is None:
                    path = self._staging / f"{self._unit.name}.jsonl"
                    self._rejects = _Rejects(path, most=self._listed_rejects)
                self._rejects.add(reject, path=self._unit.path)

    def commit(
        self,
        *,
        source: SourceFacts,
        config: str,
        counts: Counts,
        bounds: Bounds,
        engine: EngineFacts,
        unknown: UnknownFacts | None = None,
    ) -> Receipt:
        """Make the unit part of the store, all of it or nothing; the writer is used up.

        `unknown` is needed where the counts speak of it.
        """
        with self._guarded():
            unlisted = 0 if self._rejects is None else self._rejects.more.total()
            named = {} if unknown is None else {"unknown": unknown}
            receipt = Receipt(
                unit=self._unit,
                source=source,
                config=config,
                counts=counts.but(unlisted=unlisted),
                bounds=bounds,
                engine=engine,
                shards=tuple(self._shards[split].finish() for split in sorted(self._shards)),
                rejects=None if self._rejects is None else self._rejects.facts(),
                **named,
            )
            publish(self._layout, receipt, staging=self._staging)
        return receipt

    def abort(self) -> None:
        """Remove every trace of a unit that is not committed; harmless after a commit."""
        for shard in self._shards.values():
            shard.abort()
        if self._rejects is not None:
            self._rejects.abort()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failed write leaves no files, and says where and with how much space left."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise write_error(error, path=self._layout.receipt(self._unit.name)) from error
        except BaseException:
            self.abort()
            raise


class ShardWriter:
    """The documents of a unit that belong to one split, as they come in."""

    def __init__(self, folder: Path, unit: str, split: str, vocab_size: int) -> None:
        self._name = shard_name(unit, split=split)
        self._split = split
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._folder = folder
        self._bin = _Collected(folder / f"{self._name}.bin")
        self._mask: _Collected | None = None
        self._counted = self._silent = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._rows = RowRuns()
        self._tokens = 0
        self._max_id = 0

    def append(self, ids: Numbers, *, lengths: Numbers, rows: Ints, mask: Mask | None) -> None:
        if lengths.min() < 0 or lengths.max() > MAX_DOCUMENT_TOKENS:
            raise ValueError(f"a document of {lengths.max()} tokens does not fit the index")
        if self._lengths and (mask is None) != (self._mask is None):
            raise ValueError("some documents of one shard have a mask, others have none")
        if mask is not None:
            self._mask = self._mask or _Collected(self._folder / f"{self._name}.mask")
            values = _checked_mask(mask, num_tokens=len(ids))
            counts = counted_by_document(values, lengths)
            self._counted += int(counts.sum())
            self._silent += int(np.count_nonzero(counts == 0))
            self._mask.write(values.data)
        self._rows.add(rows)
        self._lengths.append(lengths.astype(np.int32))
        self._tokens += len(ids)
        for first in range(0, len(ids), BLOCK_TOKENS):
            block = ids[first : first + BLOCK_TOKENS]
            # Seen as unsigned, a negative id is larger than any vocabulary: one pass finds both.
            largest = int(block.view(f"u{block.itemsize}").max())
            if largest >= self._vocab_size:
                raise ValueError(
                    f"ids from {block.min()} to {block.max()} leave the {self._vocab_size} known"
                    " ones"
                )
            self._max_id = max(self._max_id, largest)
            self._bin.write(np.ascontiguousarray(block, self._dtype).data)

    def finish(self) -> ShardFacts:
        masks: dict[str, MaskFacts] = {}
        if self._mask is not None:
            file = self._mask.finish()
            masks["mask"] = MaskFacts(
                bytes=file.bytes,
                checksum=file.checksum,
                counted=self._counted,
                silent=self._silent,
            )
        with HashedFile(self._folder / f"{self._name}.idx") as index:
            for block in index_blocks(self._lengths, dtype=self._dtype):
                index.write(block)
            return ShardFacts(
                name=self._name,
                split=self._split,
                documents=sum(map(len, self._lengths)),
                tokens=self._tokens,
                max_id=self._max_id,
                rows=self._rows.lengths(),
                pieces=self._rows.pieces(),
                files=ShardFiles(bin=self._bin.finish(), idx=index.finish(), **masks),
            )

    def abort(self) -> None:
        self._bin.abort()
        if self._mask is not None:
            self._mask.abort()


def _checked_mask(mask: Mask, *, num_tokens: int) -> NDArray[np.uint8]:
    """The mask as bytes of 0 and 1; ValueError where it is none, or not of so many tokens."""
    if mask.dtype not in (np.uint8, np.bool_) or len(mask) != num_tokens:
        raise ValueError(f"{len(mask)} entries of {mask.dtype} are no mask of {num_tokens} tokens")
    values = np.ascontiguousarray(mask).view(np.uint8)
    if values.max(initial=0) > 1:
        raise ValueError(f"a mask holds 0 and 1, this one {values.max()}")
    return values


class _Rejects(_Collected):
    """The file of rejected rows, one JSON object to a line, and what comes after the last one."""

    def __init__(self, path: Path, *, most: int) -> None:
        super().__init__(path)
        self._rows = 0
        self._most = most
        self.more: Counter[str] = Counter()
        self._last: tuple[object, ...] = ()
        self._parts = ("", "")

    def add(self, reject: Reject, *, path: str) -> None:
        self._rows += 1
        if self._rows > self._most:
            self.more[reject.reason] += 1
            return
        if self._last != (now := (reject.path, reject.reason, reject.detail)):
            # Most rejects of a unit differ in their place alone.
            self._last = now
            about = {"reason": str(reject.reason), "detail": reject.detail}
            file = json.dumps(path if reject.path is None else reject.path)
            self._parts = file, json.dumps(about, separators=(",", ":"))[1:]
        offset = "null" if reject.offset is None else reject.offset
        file, about_it = self._parts
        row = reject.row if reject.row_in_file is None else reject.row_in_file
        line = f'{{"file":{file},"row":{row},"offset":{offset},{about_it}\n'
        self.write(line.encode("ascii"))

    def facts(self) -> RejectsFacts:
        """Finish the file."""
        if self.more:
            line = json.dumps({"more": self.more}, sort_keys=True, separators=(",", ":"))
            self.write(f"{line}\n".encode("ascii"))
        file = self.finish()
        return RejectsFacts(rows=self._rows, bytes=file.bytes, checksum=file.checksum)
