"""Where the tokens of a row come from: stores, documents, rows of the files they were built of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.loader.batch import NO_ROW
from tokenmill.loader.layouts.base import PADDING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.loader.batch import Draw
    from tokenmill.loader.layouts.base import Layout
    from tokenmill.store.reader import SourceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """A stretch of a document that stands in a row."""

    document: int
    """Number in the store's split."""
    first_token: int
    """Where the stretch begins in the document."""
    tokens: int
    at: int
    """Where it begins in the row."""
    source: SourceRow
    """The row of the input file that the document was made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrigin:
    """What made one row of a batch."""

    source: str
    """Name in the mixture; '' for a single store."""
    store: str
    epoch: int
    row: int
    """Number in the layout."""
    parts: tuple[DocumentPart, ...]


def trace(draw: Draw, *, layouts: Sequence[Layout], names: Sequence[str]) -> list[RowOrigin]:
    """The origins of all rows of a draw; rows of padding have none and are left out."""
    cells = zip(
        draw.sources.ravel().tolist(),
        draw.rows.ravel(),
        draw.epochs.ravel().tolist(),
        strict=True,
    )
    return [
        RowOrigin(
            source=names[source],
            store=str(layouts[source].stream.store.path),
            epoch=epoch,
            row=int(row),
            parts=tuple(_parts(layouts[source], row)),
        )
        for source, row, epoch in cells
        if row != NO_ROW
    ]


def _parts(layout: Layout, row: np.int64) -> Iterator[DocumentPart]:
    pieces = layout.segments(_one(row))
    stream, at = layout.stream, 0
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        if start != PADDING:
            number = stream.document_at(start)
            yield DocumentPart(
                document=number,
                first_token=start - stream.document_span(number)[0],
                tokens=length,
                at=at,
                source=stream.store.source(number),
            )
        at += length


def _one(row: np.int64) -> NDArray[np.int64]:
    return row.reshape(1)
