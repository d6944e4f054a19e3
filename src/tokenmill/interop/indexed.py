"""Formats of raw ids with an index beside them: Megatron-LM, datatrove, OLMo.

Megatron-LM's `.bin` + `.idx` are what a store's shards already are: exported shard by shard they
are copies or links; `merge` makes one pair of all shards of a split. Read: any dtype code but
floats, documents of several sequences (they are joined) or of none (empty); indexes with modes are
of multimodal data, which is refused. A `.mask` beside them is ours: its own datasets pass it over.

    .ds            datatrove's ids, 2 or 4 bytes each
    .ds.index      where each document ends, in tokens, 8 bytes each
    .ds.metadata   tokenizer|bytes of an id, tokens, tokens for people: three lines
    .ds.loss       a byte for each token, 1 = counts

OLMo's `.npy`, as dolma writes them, are no NumPy files: they have no header, and their type is
known from a configuration alone. A row of the `.csv.gz` is start, end and then whatever its writer
adds (dolma: id, source, line). A label mask is a file of one byte per token, which OLMo-core takes
as a list of its own.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop import base, raw
from tokenmill.store.format import HEADER, MAGIC, index_blocks, map_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store

# As Megatron-LM numbers them; 6 and 7 are floats.
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
ARGS_LIST, ARGS_PER_SPLIT = "data-args.txt", "data-args.json"
CHECKED_SEQUENCES = 1 << 20
# What Megatron-LM calls the splits.
_SPLITS = {"train": "train", "val": "valid", "test": "test"}


class Megatron(raw.RawFormat):
    suffix = ".idx"
    about = base.About(
        name="megatron",
        title="Megatron-LM .bin and .idx",
        read_by="Megatron-LM, Megatron-core, NeMo, GPT-NeoX",
        kept="documents, empty ones too, loss masks",
        lost="nothing; its own datasets find documents by the end-of-text and read no masks",
        file_tokens=False,
        linkable=True,
        settings={
            "merge": base.Setting(
                default=False, help="one .bin and .idx for each split instead of one per shard"
            )
        },
    )

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        return _pair(store, f"{split}_{number:05d}")

    def plan(self, export: Export) -> list[base.ExportTask]:
        if not export.options.settings["merge"]:
            return super().plan(export)
        if export.options.link != "never":
            raise UsageError(
                "a merged file has the ids of all shards, so it cannot be a link to one",
                hint="leave --link or merge out",
            )
        return [
            raw.token_task(store, split, _pair(store, split), 0, len(store.shards))
            for split, store in export.stores.items()
        ]

    def index_files(self, export: Export) -> list[str]:
        return [_args_file(export)]

    def write_beside(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        store = export.stores[part.split]
        numbers = range(part.first, part.last)
        lengths = [np.asarray(store.map_shard(number).index.lengths) for number in numbers]
        file = out.create(part.files[1])
        for block in index_blocks(lengths, dtype=store.dtype):
            file.write(block)
        raw.put_mask(export, part, out)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        name = _args_file(export)
        blends: dict[str, list[str] | None] = dict.fromkeys(_SPLITS.values())
        for split in export.stores:
            parts = [part for part in export.parts if part.split == split]
            parts = [part for part in parts if part.tokens] or parts[:1]
            blend = []
            for part in parts:
                # Weights in tokens: every version of Megatron-LM takes them. It takes a single
                # word for a path without one.
                weight = [str(part.tokens)] if len(parts) > 1 else []
                blend += [*weight, str(export.root / part.files[0].removesuffix(".bin"))]
            blends[_SPLITS.get(split, split)] = blend or None
        if name == ARGS_LIST:
            out.write(name, f"{' '.join(blend)}\n".encode())
            given = f"--data-args-path {shlex.quote(str(export.root / name))}"
            return [f"give Megatron-LM: {given}", *_unseen(export)]
        # It asks for all three, null where there is none.
        out.write(name, f"{json.dumps(blends, indent=1)}\n".encode())
        notes = [
            f"give Megatron-LM: --per-split-data-args-path {shlex.quote(str(export.root / name))}"
        ]
        if unread := sorted(blends.keys() - set(_SPLITS.values())):
            notes.append(
                f"Megatron-LM reads train, valid and test of {name}, and nothing of"
                f" {', '.join(unread)}: export what it shall train on with --split"
            )
        return notes + _unseen(export)

    def token_files(self, path: Path) -> list[tuple[str, Path]]:
        """By their indexes: a path may be a folder, one of the two files, or their prefix."""
        if path.is_dir():
            found = base.find_files(path, ".idx")
        else:
            plain = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
            found = base.find_files(plain.with_name(f"{plain.name}.idx"), ".idx")
        return [
            (f"{name.removesuffix('.idx')}.bin", each.with_suffix(".bin")) for name, each in found
        ]

    def detect(self, path: Path) -> base.Detection | None:
        for _, file in self.token_files(path)[:1]:
            index = file.with_suffix(".idx")
            if base.first_bytes(index).startswith(MAGIC):
                return base.Detection(base.Sure.CERTAIN, f"{index.name} begins with MMIDIDX")
        return None

    def shard(self, name: str, path: Path, options: base.ImportOptions) -> raw.RawShard:
        index = path.with_suffix(".idx")
        header = read_header(index)
        if header.modes:
            raise base.damaged(
                index,
                "has a mode for every sequence: it is multimodal, which is more than ids",
                hint="only text can be read",
            )
        mask = path.with_suffix(".mask")
        mask_file = mask if mask.is_file() else None
        return raw.raw_shard(name, path, options, dtype=header.dtype, index=index, mask=mask_file)

    def count_documents(self, shard: raw.RawShard, options: base.ImportOptions) -> int:
        assert shard.index is not None
        return read_header(shard.index).documents

    def ends(self, shard: raw.RawShard, options: base.ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        return read_ends(shard.index, tokens=shard.tokens)


def _pair(store: Store, name: str) -> tuple[str, ...]:
    """The pair, and the mask where there is one."""
    ends = ("bin", "idx", "mask") if store.has_mask else ("bin", "idx")
    return tuple(f"{name}_text_document.{end}" for end in ends)


def _unseen(export: Export) -> list[str]:
    """What Megatron-LM's own GPTDataset passes over in these files, which finds documents by
    their ends."""
    stores, unseen = export.stores.values(), []
    if any(store.has_mask for store in stores):
        unseen.append("which tokens count for the loss")
    for store in stores:
        identity, totals = store.manifest.identity, store.manifest.totals
        if (
            identity.eos_id is None
            or totals.pieces
            or identity.config.get("too_long") == "truncate"
        ):
            unseen.append("where documents end without an end token")
            break
    if not unseen:
        return []
    what = " nor ".join(unseen)
    return [f"Megatron-LM's datasets do not see {what}: that of examples/feed_megatron.py does"]


def _args_file(export: Export) -> str:
    """The name of the file of paths: a list that is cut at white space, or one for each split."""
    one_list = len(export.stores) == 1 and not re.search(r"\s", str(export.root))
    return ARGS_LIST if one_list else ARGS_PER_SPLIT


class IndexHeader(NamedTuple):
    """The first 34 bytes of an `.idx`, checked against its size."""

    dtype: str
    sequences: int
    documents: int
    modes: bool


def read_header(path: Path) -> IndexHeader:
    """Read and check a header; SourceError names the file."""
    size, head = base.file_size(path), base.first_bytes(path, HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        hint = None
        if head[:8] == b"TNTIDX\x00\x00":
            hint = "it is of the older fairseq kind: write it again with a current Megatron-LM"
        raise base.damaged(path, "does not begin as an index of Megatron-LM does", hint=hint)
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1:
        raise base.damaged(path, f"has the index version {version}, and 1 is known")
    if code not in CODES:
        raise base.damaged(path, f"has the dtype code {code}, which is not one of whole numbers")
    plain = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or size not in {plain, plain + sequences}:
        raise base.damaged(
            path,
            f"has {size:,} bytes, and its header speaks of {sequences:,} sequences and {entries:,}"
            f" document entries, which take {plain:,}: it was cut off or damaged",
        )
    return IndexHeader(CODES[code], sequences, entries - 1, size != plain)


def read_ends(path: Path, *, tokens: int) -> NDArray[np.int64]:
    """Where documents end, from an `.idx` that is checked entry by entry."""
    header, data = read_header(path), map_file(path)
    count, first = header.sequences, HEADER.size
    lengths = np.frombuffer(data, "<i4", count, first)
    offsets = np.frombuffer(data, "<i8", count, first + 4 * count)
    entries = np.frombuffer(data, "<i8", header.documents + 1, first + 12 * count)
    width = np.dtype(header.dtype).itemsize
    ends = np.zeros(count + 1, np.int64)
    for low in range(0, count, CHECKED_SEQUENCES):
        here = slice(low, low + CHECKED_SEQUENCES)
        block = lengths[here].astype(np.int64)
        if block.min() < 0:
            raise base.damaged(path, f"has a negative length after sequence {low:,}")
        found = ends[low + 1 : low + 1 + len(block)]
        found[:] = np.cumsum(block) + ends[low]
        if not np.array_equal(offsets[here], (found - block) * width):
            raise base.damaged(
                path,
                f"has offsets after sequence {low:,} that its lengths do not give: sequences are"
                " not back to back",
                hint="write it again with Megatron-LM's tools/merge_datasets.py",
            )
    raw.check_ends(ends[1:], tokens=tokens, path=path)
    if entries[0] != 0 or entries[-1] != count or np.any(entries[1:] < entries[:-1]):
        raise base.damaged(path, f"has a document array that does not rise from 0 to {count:,}")
    documents: NDArray[np.int64] = ends[entries[1:]]
    return documents


INDEX_DOCUMENTS = 1 << 18
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Datatrove(raw.RawFormat):
    suffix = ".ds"
    about = base.About(
        name="datatrove",
        title="datatrove .ds",
        read_by="datatrove, Nanotron",
        kept="documents, empty ones too, loss masks",
        lost="nothing",
        file_tokens=False,
        linkable=True,
    )

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        name = f"{split}/{number:05d}_unshuffled.ds"
        loss = (f"{name}.loss",) if store.has_mask else ()
        return name, f"{name}.index", f"{name}.metadata", *loss

    def write_beside(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        name, store = part.files[0], export.stores[part.split]
        file = out.create(f"{name}.index")
        for _, ends in raw.document_ends(store, part.first, INDEX_DOCUMENTS):
            file.write(ends.astype("<u8").data)
        # The tokenizer as far as one line can name it.
        kind = store.manifest.identity.tokenizer
        named = f"{kind.kind}-{kind.fingerprint[:12]}|{store.dtype.itemsize}"
        lines = [named, str(part.tokens), for_people(part.tokens)]
        out.write(f"{name}.metadata", "\n".join(lines).encode())
        raw.put_mask(export, part, out)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        size = next(iter(export.stores.values())).dtype.itemsize
        return [
            f'read with: DatatroveFolderDataset("{export.root / split}", seq_len=...,'
            f" token_size={size})"
            for split in export.stores
        ]

    def detect(self, path: Path) -> base.Detection | None:
        for _, file in self.token_files(path)[:1]:
            if file.with_name(f"{file.name}.index").is_file():
                return base.Detection(base.Sure.CERTAIN, f"{file.name} has an .index beside it")
            return base.Detection(base.Sure.LIKELY, f"{file.name} is named as datatrove does")
        return None

    def shard(self, name: str, path: Path, options: base.ImportOptions) -> raw.RawShard:
        index, loss = (path.with_name(path.name + kind) for kind in (".index", ".loss"))
        if not index.is_file():
            raise base.damaged(
                path,
                "has no .index beside it, so nothing says where its documents end",
                hint="get its .index too, or read it as raw ids: --from nanogpt --dtype uint16",
            )
        mask = loss if loss.is_file() else None
        return raw.raw_shard(name, path, options, dtype=_named_dtype(path), index=index, mask=mask)

    def count_documents(self, shard: raw.RawShard, options: base.ImportOptions) -> int:
        assert shard.index is not None
        size = base.file_size(shard.index)
        if size % 8:
            raise base.damaged(shard.index, f"has {size:,} bytes, which is not a multiple of 8")
        return size // 8

    def ends(self, shard: raw.RawShard, options: base.ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        count = self.count_documents(shard, options)
        ends = np.frombuffer(map_file(shard.index), "<i8", count)
        raw.check_ends(ends, tokens=shard.tokens, path=shard.index)
        return ends


def for_people(tokens: int) -> str:
    """'1.23 MT': three digits and a unit, as datatrove writes it."""
    value, place = float(tokens), 0
    while abs(value) >= 1000 and place < len(_PREFIXES) - 1:
        value, place = value / 1000, place + 1
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {_PREFIXES[place]}T"


def _named_dtype(path: Path) -> str | None:
    """The type of ids that a `.metadata` names; None where there is none."""
    file = path.with_name(f"{path.name}.metadata")
    if not file.is_file():
        return None
    try:
        first = base.first_bytes(file, 1 << 16).decode().splitlines()[0]
        return {"2": "uint16", "4": "uint32"}[first.rpartition("|")[2].strip()]
    except (OSError, ValueError, KeyError, IndexError):
        raise base.damaged(
            file,
            "does not name the bytes of an id, 2 or 4, at the end of its first line",
            hint="correct it, or remove it and give --dtype",
        ) from None


NUMPY_MAGIC = b"\x93NUMPY"
MASK_SUFFIX = ".label_mask.npy"
CSV_LINES = 1 << 16
LINE_BYTES = 1 << 20
# What may be empty, besides as many as there are tokens: more would fill the memory alone.
EMPTY_DOCUMENTS = 1_000_000


class Olmo(raw.RawFormat):
    suffix = ".npy"
    about = base.About(
        name="olmo",
        title="OLMo raw .npy and .csv.gz",
        read_by="OLMo, OLMo-core, dolma",
        kept="documents, empty ones too, loss masks",
        lost="nothing; OLMo-core scans for end-of-text unless told to read the .csv.gz",
        file_tokens=False,
        linkable=True,
        settings={
            "level": base.Setting(default=1, help="how hard the .csv.gz is compressed, 1 to 9")
        },
    )

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        stem = f"{split}/part-{number:05d}"
        return f"{stem}.npy", f"{stem}.csv.gz", *((stem + MASK_SUFFIX,) if store.has_mask else ())

    def write_beside(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        file = out.create(part.files[1])
        # No name and no time in it: the same bytes every time.
        packer = zlib.compressobj(int(export.options.settings["level"]), wbits=31)
        for begins, ends in raw.document_ends(export.stores[part.split], part.first, CSV_LINES):
            pairs = zip(begins.tolist(), ends.tolist(), strict=True)
            file.write(packer.compress("".join([f"{a},{b}\n" for a, b in pairs]).encode()))
        file.write(packer.flush())
        raw.put_mask(export, part, out)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        width = next(iter(export.stores.values())).dtype.itemsize
        name = {2: "uint16", 4: "uint32 (the same bytes as the store's int32)"}[width]
        return [f"ids are {name}: say so in OLMo's configuration, the files do not"]

    def token_files(self, path: Path) -> list[tuple[str, Path]]:
        found = super().token_files(path)
        return [(name, file) for name, file in found if not name.endswith(MASK_SUFFIX)]

    def detect(self, path: Path) -> base.Detection | None:
        for _, file in self.token_files(path)[:1]:
            if base.first_bytes(file).startswith(NUMPY_MAGIC):
                return None
            if file.with_suffix(".csv.gz").is_file():
                return base.Detection(base.Sure.CERTAIN, f"{file.name} has a .csv.gz beside it")
            return base.Detection(base.Sure.LIKELY, f"{file.name} has no NumPy header")
        return None

    def shard(self, name: str, path: Path, options: base.ImportOptions) -> raw.RawShard:
        if base.first_bytes(path).startswith(NUMPY_MAGIC):
            raise base.damaged(
                path,
                "is a NumPy file, with a header; OLMo's have none",
                hint="read it with: --from npz",
            )
        csv, mask = path.with_suffix(".csv.gz"), path.with_name(path.stem + MASK_SUFFIX)
        if not csv.is_file():
            raise base.damaged(
                path,
                f"has no {csv.name} beside it, so nothing says where its documents end",
                hint="get that file too, or read raw ids with: --from nanogpt --split-at-eos",
            )
        return raw.raw_shard(name, path, options, index=csv, mask=mask if mask.is_file() else None)

    def ends(self, shard: raw.RawShard, options: base.ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        found = _read_csv(shard.index, shard.tokens)
        ends: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *found])
        raw.check_ends(ends, tokens=shard.tokens, path=shard.index)
        return ends


def _lines(path: Path) -> Iterator[list[bytes]]:
    """The lines of a `.csv.gz`, some at a time, however it is packed."""
    read, packed, rest = 0, base.file_size(path), b""
    with gzip.open(path) as file:
        while piece := file.read(1 << 20):
            read += len(piece)
            base.check_expansion(path, read, packed=packed)
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES:
                raise base.damaged(path, f"has a line of more than {LINE_BYTES:,} bytes")
            yield lines
    yield [rest]


def _read_csv(path: Path, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Ends of documents, some at a time; SourceError where starts do not follow from them."""
    last, count = 0, 0
    try:
        for batch in _lines(path):
            pairs = [line.split(b",", 2)[:2] for line in batch if line.strip()]
            numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            count += len(batch)
            if count > 2 * tokens + EMPTY_DOCUMENTS:
                raise base.damaged(path, f"has over {count:,} lines for {tokens:,} tokens")
            starts, ends = numbers[:, 0], numbers[:, 1]
            if not np.array_equal(starts, np.append(last, ends)[: len(starts)]):
                raise base.damaged(
                    path, "has documents that do not follow each other without a gap"
                )
            last = int(ends[-1]) if len(ends) else last
            yield ends
    except (OSError, EOFError, OverflowError, ValueError, zlib.error) as error:
        raise base.damaged(path, f"is not a whole .csv.gz of starts and ends: {error}") from error
