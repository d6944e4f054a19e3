"""Reads other projects' token files as a store, where they are: nothing is copied or written.

A store is opened from `StoreFiles`; here these are raw token files that something else wrote. The
manifest is made up from what the files say about themselves, and the loader does not know the
difference. What a build would know and nobody says here is missing: receipts, rejects, sources.

A loader's state names the content it was taken from. For a store that is a checksum of every byte;
reading a terabyte for it would defeat the purpose, so here it comes from the names and sizes of all
files and of blocks of 4 KB of each: the first, the last, and some evenly spaced between.

The verb `convert`, from one project's format to another's in bounded memory, is here for that: raw
token files are read in place and written at once. Others become a store first, inside the out
folder, which is removed when the export is complete; a run that was interrupted finds it again.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill._version import __version__
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.interop import base, imports
from tokenmill.interop.export import BOOKS, ExportResult, export_splits, open_splits
from tokenmill.interop.raw import RawFormat, RawShard
from tokenmill.options import with_settings
from tokenmill.store import facts
from tokenmill.store.format import MAX_DOCUMENT_TOKENS, Index
from tokenmill.store.layout import StoreLayout, StoreLock, shard_name, unit_name, unit_prefix
from tokenmill.store.reader import Store, StoreFiles, TrackFile

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.facts import Receipt
    from tokenmill.store.format import TokenArray, TokenDtype
    from tokenmill.store.snapshots import Snapshot
    from tokenmill.store.stream import Track

# What the import of a conversion is told as it was asked for.
TAKEN_ON = ("dtype", "split_at_eos", "workers", "on_progress")
SAMPLE_BYTES = 4096
# Blocks of all files together, about; at least two of each.
SAMPLES = 4096
SAMPLES_OF_A_FILE = 16
# Documents of a shard, and shards, whose first and last token are looked at for end-of-text.
LOOKED_AT = 64
# Vocabularies to assume for ids that nobody named a tokenizer for: of 4 bytes and of 2.
WIDE = (1 << 31) - 1
NARROW = 65_499
_STORED: dict[str, TokenDtype] = {
    "uint16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    # The same bytes: no vocabulary reaches the bit in which the two differ.
    "uint32": np.dtype("<i4"),
}


class ForeignIdentity(facts.StoreIdentity, frozen=True, kw_only=True):
    """An identity whose type of ids is that of the files, whatever the vocabulary."""

    stored: TokenDtype

    @property
    def dtype(self) -> TokenDtype:
        return self.stored


@dataclass(frozen=True, slots=True)
class ForeignFiles(StoreFiles):
    """Raw token files of another project, as the files of a store."""

    path: str  # what was opened, as text: nothing is ever written beside it
    format: RawFormat
    options: base.ImportOptions
    shards: Mapping[str, RawShard]  # name of the shard in the store -> the file
    manifest: facts.Manifest
    tokenizer_source: str | None

    @property
    def layout(self) -> StoreLayout:
        raise StoreError(
            f"{self.path!r} is not a store: its files are read as they are",
            hint="make a store of it with: tokenmill import",
        )

    @property
    def plan_folder(self) -> None:
        return None

    def read_manifest(self) -> facts.Manifest:
        return self.manifest

    def snapshots(self) -> list[Snapshot]:
        return []

    def index(self, shard: str) -> Index:
        with base.reading(self.shards[shard].path):
            return make_index(self.format, self.shards[shard], self.options)

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        return self.shards[shard].map_tokens().view(dtype)

    def mask(self, shard: str) -> NDArray[np.uint8]:
        mask = self.shards[shard].map_mask()
        assert mask is not None, "asked for only where all shards have one"
        return mask

    def track_file(self, shard: str, track: Track, *, size: int) -> TrackFile:
        raw = self.shards[shard]
        if track == "mask":
            assert raw.mask is not None
            return TrackFile(raw.mask, 0, raw.tokens)
        return TrackFile(raw.path, raw.offset, raw.size)

    def track_offset(self, shard: str, track: Track) -> int:
        return 0 if track == "mask" else self.shards[shard].offset

    def receipt(self, unit: str) -> Receipt:
        raise StoreError(
            f"{self.path!r} does not say where its documents come from: there is no receipt of"
            f" {unit!r}",
            hint="only a store that tokenmill built from text knows that",
        )

    def rejects(self, unit: str) -> Iterator[bytes]:
        return iter(())

    def tokenizer(self) -> Path:
        if self.tokenizer_source is None:
            raise UsageError(
                f"{self.path!r} was opened without a tokenizer",
                hint='name it: tokenmill.Store.open_foreign(path, tokenizer="...")',
            )
        return Path(self.tokenizer_source)


def open_in_place(
    path: str | os.PathLike[str],
    *,
    format_name: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    split_at_eos: bool = False,
    eos: str | None = None,
) -> ForeignFiles:
    """The files of a path or prefix; SourceError where they are damaged."""
    root = base.local_path(path, hint=base.READ_HINT)
    format_ = base.detect_format(root, format_name)
    if not isinstance(format_, RawFormat):
        raise UsageError(
            f"files of {format_.about.name} cannot be read in place: their ids are not raw",
            hint=f"import them: tokenmill import {shlex.quote(str(root))} --from "
            f"{format_.about.name}",
        )
    named = None if tokenizer is None else imports.name_tokenizer(tokenizer, eos=eos)
    options = base.ImportOptions(
        dtype=dtype,
        split_at_eos=split_at_eos,
        eos_id=None if named is None or named.eos is None else named.eos[1],
        settings=base.complete_settings(format_, {}),
    )
    with base.reading(root):
        shards = format_.shards(root, options)
        stored = _stored_dtype(shards, root)
        lacking = [shard for shard in shards if shard.mask is None]
        if lacking and len(lacking) < len(shards):
            raise UsageError(
                f"{str(lacking[0].path)!r} has no loss mask, and other files have one",
                hint="import the files: where there is no mask, everything counts",
            )
        named = named or imports.unknown_tokenizer(1 << 16 if stored.itemsize == 2 else WIDE)
        manifest, by_name = _describe(format_, shards, options, named, stored)
    source = None if tokenizer is None else str(tokenizer)
    return ForeignFiles(str(path), format_, options, by_name, manifest, source)


def make_index(format_: RawFormat, shard: RawShard, options: base.ImportOptions) -> Index:
    """What an `.idx` would say about a raw token file."""
    dtype, ends = _STORED[shard.dtype], format_.ends(shard, options)
    lengths = np.diff(ends, prepend=0)
    if lengths.max(initial=0) > MAX_DOCUMENT_TOKENS:
        raise base.damaged(
            shard.path,
            f"has a document of {lengths.max():,} tokens, and the most is {MAX_DOCUMENT_TOKENS:,}",
            hint="cut it into several, or name the end-of-text id and use split_at_eos=True",
        )
    return Index(
        dtype=dtype,
        lengths=lengths.astype(np.int32),
        offsets=(ends - lengths) * dtype.itemsize,
        documents=np.arange(len(ends) + 1, dtype=np.int64),
    )


def _stored_dtype(shards: Sequence[RawShard], path: Path) -> TokenDtype:
    kinds = sorted({shard.dtype for shard in shards})
    found = {_STORED.get(kind) for kind in kinds}
    if len(found) == 1 and (dtype := found.pop()) is not None:
        return dtype
    raise UsageError(
        f"ids of the type {' and '.join(kinds)} in {str(path)!r} cannot be read in place: a loader"
        " reads uint16, int32 or uint32, and one of them at a time",
        hint="import the files: tokenmill import",
    )


def _describe(
    format_: RawFormat,
    shards: Sequence[RawShard],
    options: base.ImportOptions,
    named: imports.NamedTokenizer,
    stored: TokenDtype,
) -> tuple[facts.Manifest, dict[str, RawShard]]:
    """A manifest as a build would have written it, and the shards by the names in it."""
    blocks = min(SAMPLES_OF_A_FILE, max(2, SAMPLES // max(1, len(shards))))
    sources, units, by_name = [], [], {}
    for number, shard in enumerate(shards):
        name, rows = shard.name, format_.count_documents(shard, options)
        _check_samples(shard, blocks, vocab_size=named.facts.vocab_size)
        index, mask = (
            "" if file is None else _checksum(file, file.name, blocks)
            for file in (shard.index, shard.mask)
        )
        ids = _checksum(shard.path, name, blocks)
        entry = facts.ShardEntry(shard.split, rows, shard.tokens, bin=ids, idx=index)
        if mask:
            entry = entry._replace(mask=mask, counted=facts.UNCOUNTED, silent=facts.UNCOUNTED)
        # It has no lines, no receipt and no rejects.
        unit = facts.UnitEntry(unit_name(name, index=0), number, rows, 0, 0, "", None, (entry,))
        source = facts.SourceEntry(
            path=name, prefix=unit_prefix(name), size=shard.size, version="", units=1, rows=rows
        )
        by_name[shard_name(unit.name, split=shard.split)] = shard
        units.append(unit)
        sources.append(source)
    identity: facts.StoreIdentity = ForeignIdentity(
        created_by=f"tokenmill {__version__}, in place",
        tokenizer=named.facts,
        eos=None,
        bos=None,
        special_tokens="text",
        config={"in_place": format_.about.name},
        fingerprint="",
        mask=any(shard.mask is not None for shard in shards),
        stored=stored,
    )
    if named.eos is not None:
        # As it is in some documents of some shards.
        tallies = []
        step = max(1, len(shards) // LOOKED_AT)
        for shard in [shard for shard in shards if shard.tokens][::step]:
            found = make_index(format_, shard, options)
            some = slice(None, None, max(1, len(found.lengths) // LOOKED_AT))
            begins, lengths = found.offsets[some] // found.dtype.itemsize, found.lengths[some]
            tallies.append(imports.tally_eos(shard.map_tokens(), begins, lengths, options.eos_id))
        identity = imports.with_eos(identity, imports.add_tallies(tallies), named.eos)
    documents = sum(unit.rows for unit in units)
    tokens = sum(shard.tokens for shard in shards)
    manifest = facts.Manifest(
        identity=identity,
        totals=facts.Counts.of(rows=documents, documents=documents, tokens=tokens),
        splits=facts.split_totals(shard for unit in units for shard in unit.shards),
        engines=(),
        sources=tuple(sources),
        units=tuple(units),
    )
    return manifest, by_name


def _starts(size: int, blocks: int) -> list[int]:
    """Where the blocks of a file begin that are looked at."""
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * k // (blocks - 1) for k in range(blocks)})


def _checksum(path: Path, name: str, blocks: int) -> str:
    """Of a file's name, size and some of its blocks."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(f"{name} {size}\n".encode("utf-8", "surrogatepass"))
    with path.open("rb", buffering=0) as file:
        for start in _starts(size, blocks):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _check_samples(shard: RawShard, blocks: int, *, vocab_size: int) -> None:
    """See whether ids can be ids, and a loss mask one, in some blocks."""
    tokens, mask = shard.map_tokens(), shard.map_mask()
    for start in _starts(tokens.nbytes, blocks) if shard.tokens else ():
        some = tokens[start // tokens.itemsize :][: SAMPLE_BYTES // tokens.itemsize]
        low, high = int(some.min()), int(some.max())
        if low < 0 or high >= vocab_size:
            raise SourceError(
                f"{str(shard.path)!r} holds ids from {low:,} to {high:,}, and the vocabulary has"
                f" {vocab_size:,}: they are of another tokenizer, or of another type than"
                f" {shard.dtype}",
                hint="name the tokenizer that made them, or their type with dtype=",
            )
    if mask is None:
        return
    highest = max(int(mask[at:][:SAMPLE_BYTES].max(initial=0)) for at in _starts(len(mask), blocks))
    if highest > 1:
        raise SourceError(
            f"{str(shard.mask)!r} holds {highest}, and a mask holds 0 and 1 for each token",
            hint="see which file it is; take it away to read the tokens without a mask",
        )


@with_settings(base.ConvertRequest)
def convert(asked: base.ConvertRequest) -> ExportResult:
    """Write token files of one format in another; the same call again resumes.

    A tokenizer is needed only where its ids are: `split_at_eos`, or a format that puts one into
    every document. Without it ids of formats that do not say their type are taken as 4 bytes wide
    unless `dtype="uint16"`.
    """
    source = base.local_path(asked.path, hint=base.READ_HINT)
    format_ = base.detect_format(source, asked.format)
    # Cut at end-of-text, documents go on from file to file, which maps of files do not.
    if isinstance(format_, RawFormat) and not asked.split_at_eos:
        how: dict[str, Any] = {name: getattr(asked, name) for name in ("tokenizer", "dtype", "eos")}
        files = open_in_place(source, format_name=format_.about.name, **how)
        names = [asked.split] if isinstance(asked.split, str) else asked.split
        names = list(files.manifest.splits) if names is None else names
        return export_splits({name: Store.of_files(files, split=name) for name in names}, asked)
    named = imports.unknown_tokenizer(NARROW if asked.dtype == "uint16" else WIDE)
    if asked.tokenizer is not None:
        named = imports.name_tokenizer(asked.tokenizer, eos=asked.eos)
    out = base.local_path(asked.out, hint=base.WRITE_HINT).absolute()
    between = out / BOOKS / "convert" / "store"
    wanted = base.ImportRequest(
        path=source,
        tokenizer=asked.tokenizer or imports.UNKNOWN,
        out=between,
        format=format_.about.name,
        **{name: getattr(asked, name) for name in TAKEN_ON},
    )
    with StoreLock(StoreLayout(between.parent)):
        try:
            imports.run_import(wanted, named)
        except StoreError:
            if not between.exists():
                raise
            # What another conversion left there.
            shutil.rmtree(between)
            imports.run_import(wanted, named)
        result = export_splits(open_splits(between, asked.split), asked)
        # The links of an export keep its files.
        shutil.rmtree(between, ignore_errors=True)
    return result
