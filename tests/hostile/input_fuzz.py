"""A process that reads damaged input files of every format: `python -m tests.hostile.input_fuzz`.

The reader runs apart from the tests, under Python's checking allocator, so that a crash or memory
beyond a file is seen for what it is. Each case follows from the seed and its number alone.
"""

from __future__ import annotations

import bz2
import faulthandler
import gc
import gzip
import io
import json
import lzma
import random
import resource
import struct
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import MemoryBudgetError, SourceError
from tokenmill.sources.base import SourceOptions, open_source, plan_units
from tokenmill.sources.discovery import source_file

TEXTS = ["first document", "zweites, größer", "", 'quote " and\ttab', "x" * 90, "last\nof them"]
MESSAGES = [[{"role": "user", "content": text}, {"role": "assistant"}] for text in TEXTS]
PARQUET: tuple[dict[str, Any], ...] = (
    {"compression": "none"},
    {"compression": "zstd"},
    {"use_dictionary": False},
)
_ADDRESSES = 16 << 30  # Arrow keeps addresses that it once had, not memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Seed:
    """A file in order, and how it is read."""

    name: str
    data: bytes
    options: SourceOptions
    is_verbatim: bool = False
    """The texts stand in the file as they are, so that any other text is not of the file."""


def seeds() -> list[Seed]:
    """Files of every format that is read."""
    plain = SourceOptions(unit_bytes=100, batch_bytes=64, max_document_bytes=1 << 20)
    rows = SourceOptions(fields=("messages",), max_document_bytes=1 << 20)
    lines = "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in TEXTS).encode()
    talks = "".join(json.dumps({"messages": each}) + "\n" for each in MESSAGES).encode()
    table = "id,text\n" + "".join('7,"{}"\n'.format(text.replace('"', '""')) for text in TEXTS)
    parts = SourceOptions(separator="\n", unit_bytes=20, batch_bytes=16)
    found = [
        Seed(name="a.jsonl", data=lines, options=plain),
        Seed(name="a.jsonl", data=talks, options=rows),
        Seed(name="a.jsonl.gz", data=gzip.compress(lines), options=plain),
        Seed(name="a.jsonl.bz2", data=bz2.compress(lines), options=plain),
        Seed(name="a.jsonl.xz", data=lzma.compress(lines), options=plain),
        Seed(name="a.jsonl.zst", data=bytes(pa.compress(lines, "zstd")), options=plain),
        Seed(name="a.csv", data=table.encode(), options=plain),
        Seed(name="a.txt", data="\n".join(TEXTS).encode(), options=parts, is_verbatim=True),
    ]
    kinds = (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
    )
    nested = SourceOptions(text_field="data.text", batch_bytes=64)
    inner = pa.array([{"text": text, "n": 1} for text in TEXTS])
    columns: list[tuple[Any, str, SourceOptions]] = [
        *((pa.array(TEXTS, kind), "text", plain) for kind in kinds),
        (inner, "data", nested),
    ]
    found += [
        Seed(
            name="a.arrow",
            data=_ipc(column, name, codec=codec, stream=stream),
            options=options,
            is_verbatim=codec is None,
        )
        for column, name, options in columns
        for codec in (None, "zstd", "lz4")
        for stream in (False, True)
    ]
    found += [
        Seed(
            name="a.parquet",
            data=_parquet(column, name, write_page_checksum=sums, **settings),
            options=options,
        )
        for column, name, options in columns
        if column.type != pa.string_view()
        for settings in PARQUET
        for sums in (False, True)
    ]
    chats = pa.array(MESSAGES)
    found.append(Seed(name="a.arrow", data=_ipc(chats, "messages"), options=rows))
    found.append(Seed(name="a.parquet", data=_parquet(chats, "messages"), options=rows))
    return found


def _ipc(column: Any, name: str, *, codec: str | None = None, stream: bool = False) -> bytes:
    table = pa.table({"id": list(range(len(column))), name: column})
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue()


def _parquet(column: Any, name: str, **settings: Any) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"id": list(range(len(column))), name: column})
    pq.write_table(table, sink, row_group_size=4, **settings)
    return sink.getvalue()


def damage(data: bytes, dice: random.Random) -> bytes:
    """The data with bytes changed, numbers replaced, or a piece cut out, doubled or cut off."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        place = dice.randrange(len(found)) if found else 0
        match dice.randrange(7):
            case 0 | 1:
                found[place : place + 1] = bytes([dice.randrange(256)])
            case 2:
                found[place : place + 1] = bytes(
                    [(found[place] if found else 0) ^ 1 << dice.randrange(8)]
                )
            case 3:
                kind = dice.choice("bhiq")
                size = struct.calcsize(kind)
                place -= place % size
                most = 1 << (8 * size - 1)
                value = dice.choice((0, 1, -1, -most, most - 1, 120, dice.randrange(-most, most)))
                found[place : place + size] = struct.pack(f"<{kind}", value)
            case 4:
                del found[place:]
            case 5:
                del found[place : place + dice.randrange(1, 64)]
            case 6:
                found[place:place] = found[place : place + dice.randrange(1, 64)]
    return bytes(found)


def attempt(seed: Seed, data: bytes, folder: Path) -> str:
    """Read a file to its end; what came of it, or AssertionError for a text that it never held."""
    path = folder / seed.name
    path.write_bytes(data)
    try:
        file = source_file(str(path))
        rows = 0
        with closing(open_source(file, seed.options)) as source:
            for unit in plan_units(file, seed.options):
                if not source.exists(unit):
                    break
                for batch in source.read(unit):
                    rows += batch.num_rows
                    assert batch.num_rows == len(batch.texts) + len(batch.rejects)
                    for text in map(batch.texts.bytes_at, range(len(batch.texts))):
                        text.decode()
                        if seed.is_verbatim and text not in data:
                            raise AssertionError(f"{text!r} is not in the file")
                assert source.digest(unit) == source.end().digest
    except (SourceError, MemoryBudgetError) as error:
        return "refused" if error.hint else "refused without a hint"
    except MemoryError:  # which a build tells as an error of its memory budget
        return "refused"
    return "read"


def main() -> None:
    """Try cases `first` up to `last` of a seed; the first that goes wrong ends the process."""
    seed, first, last = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    files = seeds()
    counts = {"read": 0, "refused": 0}
    for number in range(first, last):
        dice = random.Random(f"{seed}/{number}")
        which = number % len(files)
        data = damage(files[which].data, dice)
        (folder / "case").write_text(f"seed {seed}, case {number}: file {which}")
        counts[attempt(files[which], data, folder)] += 1
    gc.collect()
    assert not [
        each for each in Path("/proc/self/fd").iterdir() if folder in each.resolve().parents
    ]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
