"""Writes the tokens of one unit: to temporary files, hashed on the way, committed as a whole.

    writer.append(split, ids, ...) ... writer.reject(...) ... writer.commit(...) -> Receipt

Nothing is visible in `shards/` before `commit`. Ids are narrowed into one small block that stays in
the cache while it is checked, hashed and written; numpy, xxhash and the write all let other threads
run meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.store.commit import publish
from tokenmill.store.durable import write_error
from tokenmill.store.facts import MaskFacts, RejectsFacts, ShardFacts
from tokenmill.store.format import (
    MAX_DOCUMENT_TOKENS,
    counted_by_document,
    index_blocks,
    token_dtype,
)
from tokenmill.store.hashed import HashedFile
from tokenmill.store.layout import SPLIT_NAME, shard_name
from tokenmill.store.receipt import Receipt
from tokenmill.store.rows import RowRuns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.records import Reject
    from tokenmill.store.facts import Bounds, Counts, EngineFacts, SourceFacts, UnitFacts
    from tokenmill.store.format import TokenDtype
    from tokenmill.store.layout import StoreLayout

BLOCK_TOKENS = 1 << 18
"""512 KB of uint16: enough for xxhash to let other threads run, and it stays in the cache."""
REJECT_BLOCK_BYTES = 1 << 20
LISTED_REJECTS = 10_000
"""Rejected rows of a unit that are listed; of those behind them, each reason is counted."""


class UnitWriter:
    """Collects the documents and rejects of a unit; as a context manager: no commit, no trace."""

    def __init__(
        self,
        layout: StoreLayout,
        unit: UnitFacts,
        *,
        dtype: TokenDtype,
        vocab_size: int,
        listed_rejects: int = LISTED_REJECTS,
    ) -> None:
        if dtype != token_dtype(vocab_size):
            raise ValueError(f"ids of a vocabulary of {vocab_size} are not stored as {dtype}")
        self._layout = layout
        self._unit = unit
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._listed_rejects = listed_rejects
        self._staging = layout.tmp / f"{unit.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._shards: dict[str, _Shard] = {}
        self._rejects: _Rejects | None = None
        with self._guarded():
            self._staging.mkdir(parents=True)

    def append(
        self,
        split: str,
        ids: NDArray[np.unsignedinteger | np.signedinteger],
        *,
        lengths: NDArray[np.integer],
        rows: NDArray[np.int64],
        mask: NDArray[np.uint8 | np.bool] | None = None,
    ) -> None:
        """Add whole documents to a split: their ids back to back, lengths, and rows in the unit.

        A row may stand there several times, once for each of its pieces; all of them come at once.
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
        if mask is not None:
            mask = _checked_mask(mask, num_tokens=len(ids))
        with self._guarded():
            shard = self._shards.get(split) or self._start(split, has_mask=mask is not None)
            shard.append(ids, lengths=lengths, rows=rows, mask=mask, vocab_size=self._vocab_size)

    def reject(self, reject: Reject) -> None:
        """Write down one row that could not be used."""
        self.rejects([reject])

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
    ) -> Receipt:
        """Make the unit part of the store, all of it or nothing; the writer is used up."""
        with self._guarded():
            unlisted = 0 if self._rejects is None else self._rejects.more.total()
            receipt = Receipt(
                unit=self._unit,
                source=source,
                config=config,
                counts=replace(counts, unlisted=unlisted),
                bounds=bounds,
                engine=engine,
                shards=tuple(self._shards[split].finish() for split in sorted(self._shards)),
                rejects=None if self._rejects is None else self._rejects.finish(),
            )
            publish(self._layout, receipt, staging=self._staging)
        return receipt

    def abort(self) -> None:
        """Remove every trace of a unit that is not committed; harmless after a commit."""
        for shard in self._shards.values():
            shard.close()
        if self._rejects is not None:
            self._rejects.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _start(self, split: str, *, has_mask: bool) -> _Shard:
        if not SPLIT_NAME.fullmatch(split):
            raise ValueError(f"split {split!r} is not lower-case letters, digits and _")
        name = shard_name(self._unit.name, split=split)
        self._shards[split] = _Shard(
            self._staging, name=name, split=split, dtype=self._dtype, has_mask=has_mask
        )
        return self._shards[split]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failed write leaves no files behind, and says where and with how much space left."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise write_error(error, path=self._layout.receipt(self._unit.name)) from error
        except BaseException:
            self.abort()
            raise


class _Shard:
    """The documents of a unit that belong to one split, as they come in."""

    def __init__(
        self, folder: Path, *, name: str, split: str, dtype: TokenDtype, has_mask: bool
    ) -> None:
        self._folder = folder
        self._name = name
        self._split = split
        self._dtype = dtype
        self._bin = HashedFile(folder / f"{name}.bin")
        self._mask = _Mask(folder / f"{name}.mask") if has_mask else None
        self._block = np.empty(BLOCK_TOKENS, dtype)
        self._filled = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._rows = RowRuns()
        self._tokens = 0
        self._max_id = 0

    def append(
        self,
        ids: NDArray[np.unsignedinteger | np.signedinteger],
        *,
        lengths: NDArray[np.integer],
        rows: NDArray[np.int64],
        mask: NDArray[np.uint8] | None,
        vocab_size: int,
    ) -> None:
        if lengths.min() < 0 or lengths.max() > MAX_DOCUMENT_TOKENS:
            raise ValueError(f"a document of {lengths.max()} tokens does not fit the index")
        if (mask is None) != (self._mask is None):
            raise ValueError("some documents of one shard have a mask, others have none")
        if mask is not None and self._mask is not None:
            self._mask.append(mask, lengths=lengths)
        self._rows.add(rows)
        self._lengths.append(lengths.astype(np.int32))
        self._tokens += len(ids)
        if ids.dtype == self._dtype and len(ids) >= BLOCK_TOKENS and ids.flags.c_contiguous:
            self._check(ids, vocab_size=vocab_size)
            self._flush()
            self._bin.write(ids.data.cast("B"))
            return
        start = 0
        while start < len(ids):
            part = ids[start : start + BLOCK_TOKENS - self._filled]
            self._take(part, vocab_size=vocab_size)
            start += len(part)

    def _take(
        self, ids: NDArray[np.unsignedinteger | np.signedinteger], *, vocab_size: int
    ) -> None:
        self._check(ids, vocab_size=vocab_size)
        end = self._filled + len(ids)
        np.copyto(self._block[self._filled : end], ids, casting="unsafe")
        self._filled = end
        if end == BLOCK_TOKENS:
            self._flush()

    def _check(
        self, ids: NDArray[np.unsignedinteger | np.signedinteger], *, vocab_size: int
    ) -> None:
        # Seen as unsigned, a negative id is larger than any vocabulary: one pass finds both.
        largest = int(ids.view(f"u{ids.itemsize}").max())
        if largest >= vocab_size:
            raise ValueError(
                f"ids from {ids.min()} to {ids.max()} leave the {vocab_size} known ones"
            )
        self._max_id = max(self._max_id, largest)

    def _flush(self) -> None:
        if self._filled:
            self._bin.write(self._block[: self._filled].data.cast("B"))
            self._filled = 0

    def finish(self) -> ShardFacts:
        self._flush()
        index = HashedFile(self._folder / f"{self._name}.idx")
        try:
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
                bin=self._bin.finish(),
                idx=index.finish(),
                mask=None if self._mask is None else self._mask.finish(),
            )
        finally:
            index.close()

    def close(self) -> None:
        self._bin.close()
        if self._mask is not None:
            self._mask.close()


class _Mask:
    """The file that says which tokens of a shard count, one byte each."""

    def __init__(self, path: Path) -> None:
        self._file = HashedFile(path)
        self._pending = bytearray()
        self._counted = 0
        self._silent = 0

    def append(self, mask: NDArray[np.uint8], *, lengths: NDArray[np.integer]) -> None:
        counts = counted_by_document(mask, lengths)
        self._counted += int(counts.sum())
        self._silent += int(np.count_nonzero(counts == 0))
        self._pending += mask.data
        if len(self._pending) >= BLOCK_TOKENS:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._pending)
        self._pending = bytearray()

    def finish(self) -> MaskFacts:
        self._flush()
        facts = self._file.finish()
        return MaskFacts(
            bytes=facts.bytes, checksum=facts.checksum, counted=self._counted, silent=self._silent
        )

    def close(self) -> None:
        self._file.close()


def _checked_mask(mask: NDArray[np.uint8 | np.bool], *, num_tokens: int) -> NDArray[np.uint8]:
    """The mask as bytes of 0 and 1; ValueError where it is none, or not of so many tokens."""
    if mask.dtype not in (np.uint8, np.bool_) or len(mask) != num_tokens:
        raise ValueError(f"{len(mask)} entries of {mask.dtype} are no mask of {num_tokens} tokens")
    values = np.ascontiguousarray(mask).view(np.uint8)
    if values.max(initial=0) > 1:
        raise ValueError(f"a mask holds 0 and 1, this one {values.max()}")
    return values


class _Rejects:
    """The file of rejected rows, one JSON object to a line, and what is behind the last one."""

    def __init__(self, path: Path, *, most: int) -> None:
        self._file = HashedFile(path)
        self._pending = bytearray()
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
        line = f'{{"file":{file},"row":{reject.row},"offset":{offset},{about_it}\n'
        self._pending += line.encode("ascii")
        if len(self._pending) >= REJECT_BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(bytes(self._pending))
        self._pending.clear()

    def finish(self) -> RejectsFacts:
        if self.more:
            line = json.dumps({"more": self.more}, sort_keys=True, separators=(",", ":"))
            self._pending += f"{line}\n".encode("ascii")
        self._flush()
        facts = self._file.finish()
        return RejectsFacts(rows=self._rows, bytes=facts.bytes, checksum=facts.checksum)

    def close(self) -> None:
        self._file.close()
