"""Files without borders, cut at the end-of-text id: one stream of tokens over all files of a split.

A document may begin in one file and end in the next, so it belongs to the part in which it begins:
a part skips what lies before its first beginning, and reads on beyond its end until the next.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import BLOCK_BYTES, IMPORT_PART_BYTES, Block, Foreign, ForeignPart
from tokenmill.interop.raw import DTYPES, EndBorders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.interop.base import ImportOptions
    from tokenmill.interop.raw import RawShard

SCAN_TOKENS = 1 << 22


class TokenSequence:
    """Files back to back, mapped when they are touched."""

    def __init__(self, shards: Sequence[RawShard]) -> None:
        self.shards = [shard for shard in shards if shard.tokens]
        self.starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        self.tokens = int(self.starts[-1])
        self._mapped: tuple[int, NDArray[np.integer[Any]]] | None = None

    def read(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Tokens `first` to `last`: a view where one file has them all."""
        pieces = []
        number = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < last:
            base, end = int(self.starts[number]), min(last, int(self.starts[number + 1]))
            pieces.append(self._map(number)[first - base : end - base])
            first, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint16)])

    def _map(self, number: int) -> NDArray[np.integer[Any]]:
        kept = self._mapped  # another thread may put another file there
        if kept is None or kept[0] != number:
            kept = self._mapped = number, self.shards[number].map_tokens()
        return kept[1]

    def begins(self, first: int, last: int, *, eos_id: int, lead: int) -> NDArray[np.int64]:
        """Where documents begin in a stretch; `lead` is 0 for an id in front of each, 1 behind."""
        found = [np.zeros(1, np.int64)] if first == 0 < last else []
        first = max(first, 1)
        while first < last:
            end = min(last, first + SCAN_TOKENS)
            window = self.read(first - lead, end - lead)
            found.append(np.flatnonzero(window == eos_id) + first)
            first = end
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def next_begin(self, position: int, *, eos_id: int, lead: int) -> int:
        """The first beginning at or behind a position, or the end."""
        while position < self.tokens:
            end = min(self.tokens, position + SCAN_TOKENS)
            found = self.begins(position, end, eos_id=eos_id, lead=lead)
            if len(found):
                return int(found[0])
            position = end
        return self.tokens


class EosForeign(Foreign):
    """Raw token files, cut at the end-of-text id wherever it stands."""

    has_borders = False

    def __init__(
        self, shards: Sequence[RawShard], options: ImportOptions, *, in_front: bool
    ) -> None:
        if options.eos_id is None:
            raise _no_eos()
        self._eos_id = options.eos_id
        self._lead = 0 if in_front else 1
        ordered = sorted(shards, key=lambda shard: shard.split)
        self._streams = {
            split: TokenSequence([*group])
            for split, group in groupby(ordered, key=lambda shard: shard.split)
        }
        self.files = {shard.name: shard.path for shard in ordered}
        place = "in front of" if in_front else "behind"
        self.note = f"documents were cut at the id {self._eos_id} {place} each"
        self.parts = tuple(
            part for split, stream in self._streams.items() for part in _cut(stream, split)
        )

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The documents that begin in a part."""
        stream = self._streams[part.split]
        base = next(
            int(start)
            for start, shard in zip(stream.starts, stream.shards, strict=False)
            if shard.name == part.path
        )
        assert part.end is not None
        first, last = base + part.start, base + part.end
        rule = {"eos_id": self._eos_id, "lead": self._lead}
        begins = stream.begins(first, last, **rule)
        if not len(begins):
            return
        ends = np.append(begins[1:], stream.next_begin(last, **rule))
        most = BLOCK_BYTES // DTYPES[stream.shards[0].dtype].itemsize
        low = 0
        while low < len(begins):
            start = int(begins[low])
            high = max(low + 1, int(np.searchsorted(begins, start + most)))
            ids = stream.read(start, int(ends[high - 1]))
            yield Block(ids, np.diff(ends[low:high], prepend=start))
            low = high


def _cut(stream: TokenSequence, split: str) -> Iterator[ForeignPart]:
    for shard in stream.shards:
        width = DTYPES[shard.dtype].itemsize
        step = IMPORT_PART_BYTES // width
        for index, start in enumerate(range(0, shard.tokens, step)):
            end = min(shard.tokens, start + step)
            yield ForeignPart(
                path=shard.name,
                index=index,
                start=start,
                end=end,
                split=split,
                bytes=(end - start) * width,
            )


def eos_borders(shard: RawShard, options: ImportOptions, *, in_front: bool) -> EndBorders:
    """Where the documents of one file end; those that go on in the next are cut there."""
    if options.eos_id is None:
        raise _no_eos()
    stream = TokenSequence([shard])
    begins = stream.begins(0, stream.tokens, eos_id=options.eos_id, lead=0 if in_front else 1)
    return EndBorders(np.append(begins[1:], stream.tokens) if len(begins) else begins)


def _no_eos() -> UsageError:
    return UsageError(
        "documents are to end at the end-of-text id, and no tokenizer names one",
        hint="name the tokenizer, and its end-of-text with --eos TOKEN",
    )
