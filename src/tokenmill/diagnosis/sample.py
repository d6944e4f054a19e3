"""A bounded part of the user's own text, read as a build reads it, kept for the ways to share.

Some documents of some files, spread over the input. They are written to a working folder twice: as
flat arrays, which a way maps at once, and as JSON Lines, which the build reads.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.diagnosis.values import SampleFacts
from tokenmill.errors import SourceError, UsageError
from tokenmill.records import TextBatch
from tokenmill.remote import shown
from tokenmill.sources import discover, format_of
from tokenmill.sources.base import SourceOptions
from tokenmill.sources.units import text_size

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenmill.records import RowBatch
    from tokenmill.sources.base import SourceFile

SAMPLED_FILES = 8
BATCH_BYTES = 1 << 20
_DATA, _OFFSETS, LINES = "sample.bin", "offsets.npy", "sample.jsonl"


def take_sample(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    folder: Path,
    most_bytes: int,
    text_field: str = "text",
    separator: str | None = None,
) -> SampleFacts:
    """Read the sample and keep it in the folder."""
    if most_bytes < 1:
        raise UsageError("a sample of no bytes measures nothing", hint="use --sample-mb 32")
    options = SourceOptions(text_field=text_field, separator=separator, batch_bytes=BATCH_BYTES)
    files = discover(inputs, options).files
    step = max(1, len(files) // SAMPLED_FILES)
    chosen = files[::step][:SAMPLED_FILES]
    documents: list[bytes] = []
    rejected = 0
    for file in chosen:
        found, refused = _read(file, options, most_bytes=max(1, most_bytes // len(chosen)))
        documents += found
        rejected += refused
    if not documents:
        why = f"{rejected:,} rows cannot be used, and no other" if rejected else "no row"
        raise SourceError(
            f"there is no text to measure in {_names(inputs)}: {why} has text in it",
            hint=f"check the file; the text is looked for under --text-field {text_field}",
        )
    _keep(documents, folder)
    return SampleFacts(
        files=sum(len(file.members) or 1 for file in files),
        input_bytes=sum(file.size for file in files),
        documents=len(documents),
        text_bytes=sum(map(len, documents)),
        rejected=rejected,
        largest_document_bytes=max(map(len, documents)),
        estimated_text_bytes=sum(text_size(file) for file in files),
    )


def load_sample(folder: Path) -> list[str]:
    """The documents of a sample that was kept."""
    offsets = np.load(folder / _OFFSETS)
    return TextBatch(np.fromfile(folder / _DATA, np.uint8), offsets).texts()


def _read(file: SourceFile, options: SourceOptions, *, most_bytes: int) -> tuple[list[bytes], int]:
    """Documents from the beginning of a file, and rows that could not be used."""
    documents: list[bytes] = []
    rejected = taken = 0
    for batch in _batches(file, options):
        rejected += len(batch.rejects)
        for index in range(len(batch.texts)):
            document = batch.texts.bytes_at(index)
            if document:
                documents.append(document)
                taken += len(document)
            if taken >= most_bytes:
                return documents, rejected
    return documents, rejected


def _batches(file: SourceFile, options: SourceOptions) -> Iterator[RowBatch]:
    form = format_of(file)
    with closing(form.open(file, options)) as source:
        for unit in form.plan(file, options):
            if not source.exists(unit):
                return
            yield from source.read(unit)


def _keep(documents: Sequence[bytes], folder: Path) -> None:
    batch = TextBatch.from_texts(documents)
    batch.data.tofile(folder / _DATA)
    np.save(folder / _OFFSETS, batch.offsets)
    with (folder / LINES).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(
            json.dumps({"text": document.decode()}, ensure_ascii=False) + "\n"
            for document in documents
        )


def _names(inputs: Sequence[str | os.PathLike[str]]) -> str:
    names = [repr(shown(str(each))) for each in inputs[:3]]
    return ", ".join(names) + (" ..." if len(inputs) > len(names) else "")
