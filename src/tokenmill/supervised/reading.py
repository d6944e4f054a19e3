"""What a shape of rows asks of the sources: which fields, and files that have fields at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import SourceError
from tokenmill.supervised.shaper import field_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.config import RowShape
    from tokenmill.sources.base import SourceFile


def needed_fields(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields to read, and whether all of them must be there; none for one text per row."""
    if shape is None or not shape.has_fields:
        return (), True
    if shape.format == "chat":
        return shape.chat_fields, False
    return field_template(shape).fields, True


def refuse_plain_text(files: Sequence[SourceFile], shape: RowShape | None) -> None:
    """Raise for text files, which have no fields."""
    if shape is None or not shape.has_fields:
        return
    for file in files:
        if file.format in ("text", "text-group"):
            path = file.members[0].path if file.members else file.path
            raise SourceError(
                f"{path!r} is a text file, and rows of the format {shape.format!r} have fields",
                hint="name JSON Lines, Parquet, Arrow or CSV files, such as: data/*.jsonl",
            )
