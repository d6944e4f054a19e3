"""Stores made by hand for the tests: ids are the bytes of the text, and 256 ends a document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.records import Reject, RejectReason
from tokenmill.store.facts import (
    BoundaryToken,
    Bounds,
    Counts,
    EngineFacts,
    FileFacts,
    SourceFacts,
    StoreIdentity,
    TokenizerFacts,
    UnitFacts,
    UnknownFacts,
    assemble_manifest,
    facts_of,
    write_manifest,
)
from tokenmill.store.layout import StoreLayout
from tokenmill.store.write import LISTED_REJECTS, UnitWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.store.facts import Receipt
    from tokenmill.store.format import TokenArray

EOS = 256
FILTERED = ("filtered", "undecided")
CONFIG = "config-of-the-tests"
BYTES_ENGINE = EngineFacts(
    name="bytes",
    version="1",
    reference="bytes",
    reference_version="1",
    checked_documents=0,
    mismatches=0,
    redone=False,
    routed_documents=0,
)


@dataclass(frozen=True, kw_only=True)
class SampleUnit:
    """Rows of a unit: split and text; ("reject", text) is rejected, an empty text is left out.

    So are ("filtered", text) and ("undecided", text), by a condition.
    """

    path: str
    index: int = 0
    rows: Sequence[tuple[str, str]] = ()
    blank_lines: int = 0
    members: tuple[str, ...] = ()
    member_rows: tuple[int, ...] = ()
    is_last: bool = True
    size: int = 1000


@dataclass(frozen=True, kw_only=True)
class SampleStore:
    units: Sequence[SampleUnit]
    vocab_size: int = 257
    has_mask: bool = False
    piece_tokens: int | None = None
    """Longer rows become several documents."""
    listed_rejects: int = LISTED_REJECTS
    unknown: str | None = None
    """A character that its tokenizer does not know: the byte 0 stands for it."""
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)

    def identity(self) -> StoreIdentity:
        files = {name: facts_of(data) for name, data in self.tokenizer_files.items()}
        return identity(vocab_size=self.vocab_size, files=files, mask=self.has_mask)

    def write(self, root: Path) -> StoreLayout:
        """Write units, tokenizer and manifest as a build would."""
        layout = StoreLayout(root)
        receipts = [
            write_unit(
                layout,
                unit,
                vocab_size=self.vocab_size,
                has_mask=self.has_mask,
                piece_tokens=self.piece_tokens,
                listed_rejects=self.listed_rejects,
                unknown=self.unknown,
            )
            for unit in self.units
        ]
        if self.tokenizer_files:
            layout.tokenizer.mkdir()
        for name, data in self.tokenizer_files.items():
            (layout.tokenizer / name).write_bytes(data)
        names = [receipt.unit.name for receipt in receipts]
        write_manifest(layout, assemble_manifest(layout, self.identity(), units=names))
        return layout


def identity(
    *, vocab_size: int = 257, files: dict[str, FileFacts] | None = None, mask: bool = False
) -> StoreIdentity:
    return StoreIdentity(
        created_by="tokenmill 0.1.0",
        tokenizer=TokenizerFacts(
            kind="bytes", fingerprint="f" * 64, vocab_size=vocab_size, files=files or {}
        ),
        eos=BoundaryToken(token="<eos>", id=EOS, position="end"),
        bos=None,
        special_tokens="text",
        config={"text_field": "text", "val": 0.25},
        fingerprint=CONFIG,
        mask=mask,
    )


def ids_of(text: str) -> NDArray[np.uint32]:
    return np.array([*text.encode(), EOS], np.uint32)


def mask_of(ids: NDArray[np.uint32] | TokenArray) -> NDArray[np.uint8]:
    """The masks of the tests: odd ids count."""
    return (ids % 2).astype(np.uint8)


def unit_facts(unit: SampleUnit) -> UnitFacts:
    start, end = unit.index * unit.size, None if unit.is_last else (unit.index + 1) * unit.size
    return UnitFacts.of(unit.path, index=unit.index, start=start, end=end, members=unit.members)


def new_writer(
    layout: StoreLayout,
    unit: SampleUnit,
    *,
    vocab_size: int = 257,
    listed_rejects: int = LISTED_REJECTS,
) -> UnitWriter:
    return UnitWriter(
        layout,
        unit_facts(unit),
        vocab_size=vocab_size,
        listed_rejects=listed_rejects,
    )


def write_unit(
    layout: StoreLayout,
    unit: SampleUnit,
    *,
    vocab_size: int = 257,
    has_mask: bool = False,
    piece_tokens: int | None = None,
    listed_rejects: int = LISTED_REJECTS,
    unknown: str | None = None,
) -> Receipt:
    """Write a unit row by row and commit it."""
    with new_writer(layout, unit, vocab_size=vocab_size, listed_rejects=listed_rejects) as writer:
        return fill_and_commit(
            writer, unit, has_mask=has_mask, piece_tokens=piece_tokens, unknown=unknown
        )


def fill_and_commit(
    writer: UnitWriter,
    unit: SampleUnit,
    *,
    has_mask: bool = False,
    piece_tokens: int | None = None,
    unknown: str | None = None,
) -> Receipt:
    texts = [text for split, text in unit.rows if split not in ("reject", *FILTERED) and text]
    for row, (split, text) in enumerate(unit.rows):
        if split == "reject":
            detail = f"cannot use {text!r}"
            reason = RejectReason.INVALID_JSON
            writer.rejects([Reject(row=row, reason=reason, detail=detail, offset=7 * row)])
        elif text and split not in FILTERED:
            ids = ids_of(text if unknown is None else text.replace(unknown, "\0"))
            mask = mask_of(ids) if has_mask else None
            lengths = np.array(lengths_of(len(ids), piece_tokens))
            rows = np.full(len(lengths), row)
            writer.append(split, ids, lengths=lengths, rows=rows, mask=mask)
    facts = commit_facts(unit, texts=texts, piece_tokens=piece_tokens, unknown=unknown)
    return writer.commit(**facts)  # type: ignore[arg-type]


def lengths_of(tokens: int, piece_tokens: int | None) -> list[int]:
    """Lengths of the documents of a row."""
    step = piece_tokens or tokens
    return [min(step, tokens - first) for first in range(0, tokens, step)]


def commit_facts(
    unit: SampleUnit,
    *,
    texts: Sequence[str],
    piece_tokens: int | None = None,
    unknown: str | None = None,
) -> dict[str, object]:
    # What is unknown is one id, and not the bytes of the character.
    held = texts if unknown is None else [text.replace(unknown, "\0") for text in texts]
    lost = 0 if unknown is None else sum(text.count(unknown) for text in texts)
    lost_bytes = sum(len(a.encode()) - len(b.encode()) for a, b in zip(texts, held, strict=True))
    found = {} if unknown is None or not lost else {unknown: lost}
    pieces = [len(lengths_of(len(text.encode()) + 1, piece_tokens)) for text in held]
    rejected = sum(split == "reject" for split, _ in unit.rows)
    filtered = sum(split in FILTERED for split, _ in unit.rows)
    sizes = [len(text.encode()) for text in texts]
    return {
        "source": SourceFacts(
            size=unit.size,
            version="v1",
            digest="d" * 32,
            is_last=unit.is_last,
            num_lines=len(unit.rows) + unit.blank_lines,
            member_rows=unit.member_rows,
        ),
        "config": CONFIG,
        "counts": Counts.of(
            rows=len(unit.rows),
            documents=sum(pieces),
            empty=len(unit.rows) - len(texts) - rejected - filtered,
            rejected=rejected,
            filtered=filtered,
            undecided=sum(split == "undecided" for split, _ in unit.rows),
            input_bytes=20 * len(unit.rows),
            text_bytes=sum(sizes),
            tokens=sum(len(text.encode()) + 1 for text in held),
            split_rows=sum(count > 1 for count in pieces),
            pieces=sum(count for count in pieces if count > 1),
            unknown_ids=lost,
            lost_characters=lost,
            lost_bytes=lost_bytes + lost,
        ),
        "unknown": UnknownFacts.of("<unk>", 0, found) if found else None,
        "bounds": Bounds(largest_row_bytes=max(sizes, default=0), smallest_too_large_bytes=None),
        "engine": BYTES_ENGINE,
    }


def tree(root: Path) -> dict[str, bytes]:
    """Every file under a folder, for comparing stores byte for byte."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


GOLDEN = SampleStore(
    units=[
        SampleUnit(
            path="corpus/first part.jsonl",
            index=0,
            is_last=False,
            blank_lines=1,
            rows=[
                ("train", "It was a bright cold day."),
                ("reject", "{"),
                ("train", "na\u00efve caf\u00e9 \u2603"),
                ("val", "held out"),
                ("train", ""),
                ("train", "\U0001f600"),
            ],
        ),
        SampleUnit(
            path="corpus/first part.jsonl",
            index=1,
            rows=[("val", "only held out"), ("reject", "nul\x00"), ("reject", "\ud800")],
        ),
        SampleUnit(path="corpus/empty.jsonl", size=0),
        SampleUnit(path="s3://bucket/data.jsonl.zst", rows=[("train", "x")]),
    ]
)
"""The store in tests/golden/v1: two splits, rejects, a unit without rows, one without train."""
GOLDEN_MASKED = replace(GOLDEN, has_mask=True)
"""The store in tests/golden/v2: the same with masks; of the document "x" nothing counts."""
GOLDEN_PIECES = replace(GOLDEN_MASKED, piece_tokens=10)
"""The store in tests/golden/v3: the same with rows of over 10 tokens in pieces."""
GOLDEN_UNLISTED = replace(GOLDEN_PIECES, listed_rejects=1)
"""The store in tests/golden/v4: the same with one rejected row of a unit listed, one counted."""
GOLDEN_GROUPS = replace(
    GOLDEN_UNLISTED,
    units=[
        *GOLDEN.units[:2],
        SampleUnit(
            path="group//after/corpus/first part.jsonl",
            members=("corpus/empty.jsonl", "s3://bucket/data.jsonl.zst", "s3://bucket/no.parquet"),
            member_rows=(0, 1, 0),
            rows=[("train", "x")],
        ),
    ],
)
"""The store in tests/golden/v5: the same with the other files in one group, and one more."""
GOLDEN_UNKNOWN = replace(GOLDEN_GROUPS, unknown="\u2603")
"""The store in tests/golden/v6: the same where the tokenizer does not know the snowman."""
GOLDEN_FILTERED = replace(
    GOLDEN,
    units=[
        *GOLDEN.units[:3],
        SampleUnit(
            path="s3://bucket/data.jsonl.zst",
            rows=[("filtered", "de"), ("train", "x"), ("undecided", "?"), ("filtered", "fr")],
        ),
    ],
)
"""The store in tests/golden/v7: that of v1 with three rows that a condition left out."""
