"""Foreign files as an enemy makes them, and the program that imports them one after another.

    python -m tests.hostile.foreign_files cases FOLDER [WORDS]         all, or those with the words
    python -m tests.hostile.foreign_files damage FOLDER FIRST COUNT [KIND]       damage, by seeds

It prints a line of JSON for each: what came of it, and the most memory that was held so far. It
runs as a program of its own, so that a crash of it is seen, and its memory is its own.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import shutil
import struct
import sys
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from tests.interop.rows import small_store
from tests.interop.stores import import_ids

import tokenmill
from tokenmill.errors import TokenmillError
from tokenmill.interop.export import export_store

if TYPE_CHECKING:
    from collections.abc import Callable

    Case = Callable[[Path], str]
    """Makes files in a folder; returns the name of the format."""

BIG = 10**14
BOMB = 300 << 20
"""Zeros that a bomb unpacks to: more than any file may, however small it is."""
LENGTHS = [[5, 1, 300, 7, 40]]
IN_PLACE = ("megatron", "datatrove", "olmo", "nanogpt", "llmc")


def exported(folder: Path, to: str, **options: Any) -> Path:
    """A small store in a foreign format."""
    store = small_store(folder.with_name(f"{folder.name}-store"), LENGTHS)
    export_store(store.path, to=to, out=folder, **options)
    shutil.rmtree(folder / ".tokenmill-export")
    return folder


def edited(path: Path, change: Callable[[Any], None]) -> None:
    """Change a file of JSON."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _mds(**changes: Any) -> Case:
    """An MDS folder whose index says something else of its shard."""

    def make(folder: Path) -> str:
        exported(folder, "mds")
        edited(folder / "index.json", lambda index: index["shards"][0].update(changes))
        return "mds"

    return make


def _mds_beyond(folder: Path) -> str:
    """Columns of which one has a size below zero, so that the next begins before the sample."""
    ids = np.arange(1000, dtype="<i8").tobytes()
    sizes = [-(1 << 20), len(ids) + (1 << 20)]
    head = struct.pack("<3I", 1, 12, 12 + len(ids))
    (folder / "shard.00000.mds").write_bytes(head + ids)
    _mds_index(folder, 12 + len(ids), names=["a", "tokens"], sizes=sizes, samples=1)
    return "mds"


def _mds_index(
    folder: Path, size: int, *, names: list[str], sizes: list[int], samples: int
) -> None:
    shard = {
        "format": "mds",
        "raw_data": {"basename": "shard.00000.mds", "bytes": size, "hashes": {}},
        "zip_data": None,
        "samples": samples,
        "column_names": names,
        "column_encodings": ["bytes"] * len(names),
        "column_sizes": sizes,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def _mds_packed(claim: int, real: int = 1000) -> Case:
    """A packed shard that claims to be so large, and unpacks to so many zeros."""

    def make(folder: Path) -> str:
        exported(folder, "mds")
        packed = _zeros(folder / "shard.00000.mds.zstd", real, "zstd")
        (folder / "shard.00000.mds").unlink()
        zip_data = {"basename": "shard.00000.mds.zstd", "bytes": packed, "hashes": {}}

        def change(index: Any) -> None:
            index["shards"][0]["zip_data"] = zip_data
            index["shards"][0]["raw_data"]["bytes"] = claim

        edited(folder / "index.json", change)
        return "mds"

    return make


def _zeros(path: Path, count: int, codec: str) -> int:
    """Write so many zeros, packed; returns the bytes that take."""
    with pa.CompressedOutputStream(str(path), codec) as stream:
        for _ in range(count >> 20):
            stream.write(bytes(1 << 20))
        stream.write(bytes(count % (1 << 20)))
    return path.stat().st_size


def _litdata(change: Callable[[Any], None]) -> Case:
    def make(folder: Path) -> str:
        exported(folder, "litdata")
        edited(folder / "index.json", change)
        return "litdata"

    return make


def _litdata_packed(claim: int, real: int) -> Case:
    def make(folder: Path) -> str:
        exported(folder, "litdata")
        _zeros(folder / "chunk-0-0.bin", real, "zstd")

        def change(index: Any) -> None:
            index["config"]["compression"] = "zstd"
            index["chunks"][0]["chunk_bytes"] = claim

        edited(folder / "index.json", change)
        return "litdata"

    return make


def _nested(name: str, format_: str) -> Case:
    """An index of a million lists in each other."""

    def make(folder: Path) -> str:
        exported(folder, format_)
        (folder / name).write_text("[" * 10**6 + "]" * 10**6)
        return format_

    return make


def _list_array(offsets: list[int], values: Any, *, kind: Any = None) -> Any:
    data = pa.py_buffer(np.array(offsets, "<i4"))
    return pa.Array.from_buffers(
        kind or pa.list_(pa.int32()), len(offsets) - 1, [None, data], children=[values]
    )


def _arrow(*offsets: int) -> Case:
    """A stream of lists with these offsets into 1,000 ids."""

    def make(folder: Path) -> str:
        whole = np.linspace(0, 1000, len(offsets)).astype("<i4")
        lists = _list_array(whole.tolist(), pa.array(np.arange(1000, dtype=np.int32)))
        _write_arrow(folder / "a.arrow", [lists], ["input_ids"])
        data = (folder / "a.arrow").read_bytes()
        damage = data.replace(whole.tobytes(), np.array(offsets, "<i4").tobytes())
        assert damage != data
        (folder / "a.arrow").write_bytes(damage)
        return "arrow"

    return make


def _write_arrow(path: Path, arrays: list[Any], names: list[str], **options: Any) -> None:
    fields = [pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    with pa.ipc.new_stream(str(path), batch.schema, **options) as writer:
        writer.write_batch(batch)


def _arrow_twice(folder: Path) -> str:
    lists = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    others = pa.array([[7, 7], [7]], pa.list_(pa.int32()))
    _write_arrow(folder / "a.arrow", [lists, others], ["input_ids", "input_ids"])
    return "arrow"


def _arrow_rows_of_nothing(folder: Path) -> str:
    """A batch of 10^12 rows, each a list of no ids, which takes no bytes at all."""
    kind = pa.list_(pa.int32(), 0)
    lists = pa.Array.from_buffers(kind, 4321, [None], children=[pa.array([], pa.int32())])
    _write_arrow(folder / "a.arrow", [lists], ["input_ids"])
    data = (folder / "a.arrow").read_bytes()
    few, many = struct.pack("<q", 4321), struct.pack("<q", 10**12)
    assert data.count(few) == 2, "the length of the batch and that of its column"
    (folder / "a.arrow").write_bytes(data.replace(few, many))
    return "arrow"


def _arrow_bomb(folder: Path) -> str:
    """A packed list that claims to be 3 GB."""
    values = pa.array(np.zeros(1 << 20, np.int32))
    lists = _list_array([0, 1 << 20], values)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    _write_arrow(folder / "a.arrow", [lists], ["input_ids"], options=options)
    data = bytearray((folder / "a.arrow").read_bytes())
    # The one length that stands in front of the packed ids.
    place = data.index(struct.pack("<q", 4 << 20))
    data[place : place + 8] = struct.pack("<q", 3 << 30)
    (folder / "a.arrow").write_bytes(data)
    return "arrow"


def _parquet_twice(folder: Path) -> str:
    lists = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    table = pa.Table.from_arrays([lists, lists], names=["input_ids", "input_ids"])
    pq.write_table(table, folder / "a.parquet")
    return "parquet"


def _chunks_twice(folder: Path) -> str:
    lists = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    index = pa.array([0, 1], pa.int32())
    names = ["input_ids", "chunk_index", "chunk_index"]
    pq.write_table(pa.Table.from_arrays([lists, index, index], names=names), folder / "a.parquet")
    return "parquet"


def _parquet_bomb(folder: Path) -> str:
    """A row of 70 million zeros, in a few KB."""
    lists = _list_array([0, 70_000_000], pa.array(np.zeros(70_000_000, np.int32)))
    table = pa.Table.from_arrays([lists], names=["input_ids"])
    pq.write_table(table, folder / "a.parquet", compression="zstd", use_dictionary=True)
    return "parquet"


def _parquet_pages(folder: Path) -> str:
    """Pages with one value more than the footer counts."""
    rows = pa.array([[7] * 4321], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), folder / "a.parquet", compression="none")
    data = bytearray((folder / "a.parquet").read_bytes())
    number = bytes([0xC2, 0x43])  # 4321, as Thrift writes it; first in the header of the page
    assert data.count(number) > 1
    place = data.index(number)
    data[place : place + 2] = bytes([0xC4, 0x43])
    (folder / "a.parquet").write_bytes(data)
    return "parquet"


def _npy(shape: str, descr: str = "<i4", body: int = 4000) -> Case:
    """An array whose header has this shape."""

    def make(folder: Path) -> str:
        (folder / "a.npy").write_bytes(_npy_bytes(shape, descr, body))
        return "npz"

    return make


def _npy_bytes(shape: str, descr: str = "<i4", body: int = 4000) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(body)


def _npz_bomb(shape: str, real: int, *, method: int = zipfile.ZIP_DEFLATED) -> Case:
    """A packed array of zeros."""

    def make(folder: Path) -> str:
        with (
            zipfile.ZipFile(folder / "a.npz", "w", method) as archive,
            archive.open("input_ids.npy", "w", force_zip64=True) as member,
        ):
            member.write(_npy_bytes(shape, body=0))
            for _ in range(real >> 20):
                member.write(bytes(1 << 20))
        return "npz"

    return make


def _npz_slip(folder: Path) -> str:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("../../input_ids.npy", _npy_bytes("(1000,)"))
    return "npz"


def _npz_twice(folder: Path) -> str:
    with warnings.catch_warnings(), zipfile.ZipFile(folder / "a.npz", "w") as archive:
        warnings.simplefilter("ignore")
        for _ in range(2):
            archive.writestr("input_ids.npy", _npy_bytes("(1000,)"))
    return "npz"


def _pt(write: Callable[[Any], Any]) -> Case:
    def make(folder: Path) -> str:
        import torch

        torch.save(write(torch), folder / "a.pt")
        return "pt"

    return make


def _pt_old(folder: Path) -> str:
    """The kind before zip archives, whose storages may be left unfilled."""
    import torch

    rows = torch.arange(64).reshape(8, 8)
    torch.save(rows, folder / "a.pt", _use_new_zipfile_serialization=False)
    return "pt"


def _pt_pickle(body: bytes) -> Case:
    """An archive with this pickle."""

    def make(folder: Path) -> str:
        import torch

        torch.save({"input_ids": torch.arange(4096)}, folder / "whole.pt")
        with zipfile.ZipFile(folder / "whole.pt") as whole:
            members = {info.filename: whole.read(info) for info in whole.infolist()}
        (folder / "whole.pt").unlink()
        with zipfile.ZipFile(folder / "a.pt", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, body if name.endswith("data.pkl") else data)
        return "pt"

    return make


def _pt_packed(folder: Path) -> str:
    """An archive that is compressed, whose bytes as they lie are no ids."""
    import torch

    torch.save({"input_ids": torch.arange(4096)}, folder / "whole.pt")
    with (
        zipfile.ZipFile(folder / "whole.pt") as whole,
        zipfile.ZipFile(folder / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for info in whole.infolist():
            archive.writestr(info.filename, whole.read(info))
    (folder / "whole.pt").unlink()
    return "pt"


UNFILLED = b"\x80\x02}X\x09\x00\x00\x00input_idsctorch\nIntTensor\nM\x00\x10\x85Rs."
"""A dict with `torch.IntTensor(4096)`, which is memory as it was left."""
ZEROS = b"\x80\x02}X\x09\x00\x00\x00input_idsc__builtin__\nbytearray\n\x8a\x06" + (
    (1 << 42).to_bytes(6, "little") + b"\x85Rs."
)


def _olmo_csv(text: bytes, size: int, end: bytes = b"") -> Case:
    """Token files whose `.csv.gz` is so many bytes of this text."""

    def make(folder: Path) -> str:
        exported(folder, "olmo")
        path = next(folder.rglob("*.csv.gz"))
        block = text * max(1, (1 << 20) // len(text))
        with gzip.open(path, "wb", compresslevel=9) as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.write(end)
        return "olmo"

    return make


def _fifo(to: str, name: str) -> Case:
    """A pipe in the place of a file: opening it would wait for ever."""

    def make(folder: Path) -> str:
        exported(folder, to)
        path = next(folder.rglob(name))
        size = path.stat().st_size
        path.unlink()
        os.mkfifo(path)
        if to == "mds":
            edited(
                folder / "index.json",
                lambda index: index["shards"][0]["raw_data"].update(bytes=0, hashes={}),
            )
        del size
        return to

    return make


def _outside(to: str, key: str) -> Case:
    """An index that names a file outside its folder."""

    def make(folder: Path) -> str:
        exported(folder, to)
        secret = folder.with_name("secret.bin")
        secret.write_bytes(bytes(4096))

        def change(index: Any) -> None:
            if to == "mds":
                index["shards"][0]["raw_data"].update(basename=f"{key}secret.bin", bytes=4096)
            elif to == "litdata":
                index["chunks"][0].update(filename=f"{key}secret.bin", chunk_bytes=4096)
            else:
                index["_data_files"][0]["filename"] = f"{key}secret.bin"

        name = "state.json" if to == "arrow" else "index.json"
        if key == "/":
            key_path = str(secret.parent) + "/"
            edited(folder / name, lambda index: _absolute(index, to, f"{key_path}secret.bin"))
        else:
            edited(folder / name, change)
        return to

    return make


def _absolute(index: Any, to: str, path: str) -> None:
    if to == "mds":
        index["shards"][0]["raw_data"].update(basename=path, bytes=4096)
    elif to == "litdata":
        index["chunks"][0].update(filename=path, chunk_bytes=4096)
    else:
        index["_data_files"][0]["filename"] = path


class _Attack:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def _pickled_npy(folder: Path) -> str:
    np.save(folder / "a.npy", np.array([_Attack()], object), allow_pickle=True)
    return "npz"


def _pickled_npz(folder: Path) -> str:
    np.savez(folder / "a.npz", input_ids=np.array([_Attack()], object))
    return "npz"


def _nothing(index: Any) -> None:
    index["chunks"] = [None]


def _megatron(place: int, value: bytes) -> Case:
    def make(folder: Path) -> str:
        exported(folder, "megatron")
        path = next(folder.rglob("*.idx"))
        data = bytearray(path.read_bytes())
        data[place : place + len(value)] = value
        path.write_bytes(data)
        return "megatron"

    return make


def _long_document(folder: Path) -> str:
    """One document of 2^32 tokens, in files that take no room on disk."""
    tokens = 1 << 32
    with (folder / "a.ds").open("wb") as file:
        file.truncate(2 * tokens)
    (folder / "a.ds.index").write_bytes(struct.pack("<Q", tokens))
    return "datatrove"


CASES: dict[str, Case] = {
    "mds: a column of negative size": _mds_beyond,
    "mds: negative sizes": _mds(column_sizes=[-8]),
    "mds: sizes of 2^70": _mds(column_sizes=[1 << 70]),
    "mds: sizes that are text": _mds(column_sizes=["8"]),
    "mds: sizes that are infinite": _mds(column_sizes=[float("inf")]),
    "mds: no sizes": _mds(column_sizes=[]),
    "mds: more names than columns": _mds(column_names=["a", "tokens"]),
    "mds: a name twice": _mds(
        column_names=["tokens", "tokens"],
        column_encodings=["ndarray:int32"] * 2,
        column_sizes=[None, None],
    ),
    "mds: names that are numbers": _mds(column_names=[5]),
    "mds: encodings that are numbers": _mds(column_encodings=[5]),
    "mds: 10^14 samples": _mds(samples=BIG),
    "mds: negative samples": _mds(samples=-1),
    "mds: infinite samples": _mds(samples=float("inf")),
    "mds: no hashes": _mds(raw_data={"basename": "shard.00000.mds", "bytes": 9}),
    "mds: an index of nested lists": _nested("index.json", "mds"),
    "mds: packed, 10^14 bytes claimed": _mds_packed(BIG),
    "mds: packed, 10^400 bytes claimed": _mds_packed(10**400),
    "mds: packed, negative bytes claimed": _mds_packed(-1),
    "mds: packed, 300 MB of zeros": _mds_packed(BOMB, BOMB),
    "mds: packed, 300 MB where 1 KB is claimed": _mds_packed(1000, BOMB),
    "litdata: 10^14 bytes claimed": _litdata(lambda i: i["chunks"][0].update(chunk_bytes=BIG)),
    "litdata: infinite tokens": _litdata(lambda i: i["chunks"][0].update(dim=float("inf"))),
    "litdata: tokens that are text": _litdata(lambda i: i["chunks"][0].update(dim="many")),
    "litdata: negative items": _litdata(lambda i: i["chunks"][0].update(chunk_size=-5)),
    "litdata: chunks of nothing": _litdata(_nothing),
    "litdata: formats that are a number": _litdata(lambda i: i["config"].update(data_format=5)),
    "litdata: a config that is a list": _litdata(lambda i: i.update(config=[])),
    "litdata: an index of nested lists": _nested("index.json", "litdata"),
    "litdata: packed, 10^14 bytes claimed": _litdata_packed(BIG, 1000),
    "litdata: packed, 300 MB of zeros": _litdata_packed(BOMB, BOMB),
    "arrow: offsets that fall": _arrow(0, 900, 100, 1000),
    "arrow: offsets that jump beyond the ids": _arrow(0, 2**31 - 1, 1000),
    "arrow: negative offsets": _arrow(-2000, 0, 1000),
    "arrow: last offset beyond the ids": _arrow(0, 10, 5000),
    "arrow: a column twice": _arrow_twice,
    "arrow: 10^12 rows of nothing": _arrow_rows_of_nothing,
    "arrow: packed ids that claim 3 GB": _arrow_bomb,
    "arrow: a state of nested lists": _nested("state.json", "arrow"),
    "parquet: a column twice": _parquet_twice,
    "parquet: chunk_index twice": _chunks_twice,
    "parquet: pages of more than the footer says": _parquet_pages,
    "npy: a shape that overflows": _npy("(4294967296, 4294967296)"),
    "npy: a shape that overflows to what is there": _npy("(9223372036854775809, 2000)"),
    "npy: negative sizes": _npy("(-10, -100)"),
    "npy: 10^12 rows of nothing": _npy("(1000000000000, 0)", body=0),
    "npy: sizes that are True": _npy("(True, 1000)"),
    "npy: a header of brackets": _npy("(" * 3000, body=0),
    "npy: objects": _pickled_npy,
    "npz: objects": _pickled_npz,
    "npz: 10^12 packed ids claimed": _npz_bomb("(1000000000000,)", 1 << 20),
    "npz: 300 MB of packed zeros": _npz_bomb(f"({BOMB >> 2},)", BOMB),
    "npz: zeros packed with lzma": _npz_bomb(f"({1 << 18},)", 1 << 20, method=zipfile.ZIP_LZMA),
    "npz: a member outside": _npz_slip,
    "npz: a member twice": _npz_twice,
    "pt: a stride of 0": _pt(lambda torch: torch.zeros(1, dtype=torch.int32).expand(10**12)),
    "pt: rows with a stride of 0": _pt(
        lambda torch: torch.zeros(1, 8, dtype=torch.int32).expand(10**9, 8)
    ),
    "pt: every value of a row the same by a stride": _pt(
        lambda torch: torch.arange(30, dtype=torch.int64)[:, None].expand(30, 2)
    ),
    "pt: every other value by a stride": _pt(lambda torch: torch.arange(64)[::2]),
    "pt: one tensor 10^5 times": _pt(
        lambda torch: [torch.zeros(1 << 20, dtype=torch.int16)] * 10**5
    ),
    "pt: names that are numbers": _pt(lambda torch: {5: torch.arange(8)}),
    "pt: a sparse tensor": _pt(lambda torch: torch.eye(8, dtype=torch.int64).to_sparse()),
    "pt: the kind before archives": _pt_old,
    "pt: a tensor that was never filled": _pt_pickle(UNFILLED),
    "pt: 4 TB of zeros": _pt_pickle(ZEROS),
    "pt: a call": _pt_pickle(pickle.dumps({"input_ids": _Attack()}, 2)),
    "pt: a compressed archive": _pt_packed,
    "olmo: 32 MB of empty documents": _olmo_csv(b"0,0\n", 1 << 25),
    "olmo: a line of 32 MB": _olmo_csv(b"0", 1 << 25),
    "olmo: ends of 2^70": _olmo_csv(b"\n", 0, b"0,1180591620717411303424\n"),
    "olmo: 32 MB of empty lines": _olmo_csv(b"\n", 1 << 25),
    "megatron: 2^63 sequences": _megatron(18, struct.pack("<Q", 1 << 63)),
    "megatron: no sequences": _megatron(18, bytes(8)),
    "megatron: a negative length": _megatron(34, struct.pack("<i", -5)),
    "megatron: an offset of 2^62": _megatron(54, struct.pack("<q", 1 << 62)),
    "datatrove: a document of 2^32 tokens": _long_document,
    "megatron: a pipe": _fifo("megatron", "*.bin"),
    "megatron: a pipe for an index": _fifo("megatron", "*.idx"),
    "mds: a pipe": _fifo("mds", "*.mds"),
    "olmo: a pipe": _fifo("olmo", "*.csv.gz"),
    "arrow: a pipe": _fifo("arrow", "*.arrow"),
    "mds: a name outside the folder": _outside("mds", "../"),
    "mds: an absolute name": _outside("mds", "/"),
    "litdata: a name outside the folder": _outside("litdata", "../"),
    "litdata: an absolute name": _outside("litdata", "/"),
    "arrow: a name outside the folder": _outside("arrow", "../"),
    "arrow: an absolute name": _outside("arrow", "/"),
    "parquet: a row of 70 million zeros": _parquet_bomb,
}
"""What each is -> who makes it; every one of them must be refused."""


def peak_bytes() -> int:
    """The most memory that this process held so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux a process inherits the peak of the one that started it.
        (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def outcome(work: Callable[[], object]) -> dict[str, Any]:
    """What came of it: nothing, or an error."""
    try:
        work()
    except TokenmillError as error:
        found = {"error": type(error).__name__, "message": error.message}
    except Exception as error:
        found = {"fault": f"{type(error).__name__}: {error}"[:500]}
    else:
        found = {}
    return {**found, "peak_bytes": peak_bytes()}


def run_cases(folder: Path) -> None:
    for number, (name, make) in enumerate(CASES.items()):
        if len(sys.argv) > 3 and sys.argv[3] not in name:
            continue
        source = folder / f"case-{number}"
        source.mkdir()
        print(json.dumps({"case": name}), flush=True)
        format_ = make(source)
        before = peak_bytes()
        out = folder / f"out-{number}"

        def work(source: Path = source, out: Path = out, format_: str = format_) -> object:
            return import_ids(source, out, format_name=format_)

        found = {"case": name, "before_bytes": before, **outcome(work)}
        found["left"] = out.exists()
        print(json.dumps(found), flush=True)
        shutil.rmtree(source)
        shutil.rmtree(out, ignore_errors=True)


BASES: dict[str, Case] = {}
"""Kinds of whole files that are damaged at random."""


def _base(name: str) -> Callable[[Case], Case]:
    def keep(make: Case) -> Case:
        BASES[name] = make
        return make

    return keep


def _whole(to: str) -> Case:
    def make(folder: Path) -> str:
        exported(folder, to)
        return to

    return make


BASES.update({to: _whole(to) for to in (*IN_PLACE, "mds", "litdata", "arrow")})


@_base("mds without hashes")
def _mds_unhashed(folder: Path) -> str:
    exported(folder, "mds")
    edited(folder / "index.json", lambda i: i["shards"][0]["raw_data"].update(hashes={}))
    return "mds"


@_base("mds of fixed sizes")
def _mds_fixed(folder: Path) -> str:
    """Samples with no table of sizes: all that is known of them stands in the index."""
    ids = np.arange(100, dtype="<i8")
    head = struct.pack("<5I", 3, 20, 220, 420, 620)
    (folder / "shard.00000.mds").write_bytes(head + ids[:75].tobytes())
    _mds_index(folder, 620, names=["a", "tokens"], sizes=[40, 160], samples=3)
    return "mds"


@_base("packed mds")
def _mds_zstd(folder: Path) -> str:
    exported(folder, "mds")
    raw = (folder / "shard.00000.mds").read_bytes()
    with pa.CompressedOutputStream(str(folder / "shard.00000.mds.zstd"), "zstd") as stream:
        stream.write(raw)
    (folder / "shard.00000.mds").unlink()
    size = (folder / "shard.00000.mds.zstd").stat().st_size
    packed = {"basename": "shard.00000.mds.zstd", "bytes": size, "hashes": {}}
    edited(folder / "index.json", lambda i: i["shards"][0].update(zip_data=packed))
    return "mds"


@_base("packed litdata")
def _litdata_zstd(folder: Path) -> str:
    exported(folder, "litdata")
    raw = (folder / "chunk-0-0.bin").read_bytes()
    with pa.CompressedOutputStream(str(folder / "chunk-0-0.bin"), "zstd") as stream:
        stream.write(raw)
    edited(folder / "index.json", lambda i: i["config"].update(compression="zstd"))
    return "litdata"


def _table() -> Any:
    dice = np.random.default_rng(1)
    rows = [dice.integers(0, 50_000, n) for n in (5, 1, 300, 7, 40)]
    return pa.table(
        {
            "name": [str(len(row)) for row in rows],
            "input_ids": pa.array(rows, pa.list_(pa.int32())),
            "loss_mask": pa.array([np.ones_like(row) for row in rows], pa.list_(pa.int8())),
        }
    )


@_base("arrow file")
def _arrow_file(folder: Path) -> str:
    pyarrow.feather.write_feather(_table(), folder / "a.arrow", compression="uncompressed")
    return "arrow"


@_base("packed arrow file")
def _arrow_lz4(folder: Path) -> str:
    pyarrow.feather.write_feather(_table(), folder / "a.arrow", compression="lz4", chunksize=2)
    return "arrow"


@_base("arrow of fixed lists")
def _arrow_fixed(folder: Path) -> str:
    values = pa.array(np.arange(800, dtype=np.int32))
    lists = pa.FixedSizeListArray.from_arrays(values, 8)
    _write_arrow(folder / "a.arrow", [lists], ["input_ids"])
    return "arrow"


@_base("arrow of large lists")
def _arrow_large(folder: Path) -> str:
    lists = _table()["input_ids"].combine_chunks().cast(pa.large_list(pa.int32()))
    _write_arrow(folder / "a.arrow", [lists], ["input_ids"])
    return "arrow"


@_base("parquet")
def _parquet_plain(folder: Path) -> str:
    options = {"compression": "none", "use_dictionary": False}
    pq.write_table(_table(), folder / "a.parquet", **options)
    return "parquet"


@_base("packed parquet")
def _parquet_packed(folder: Path) -> str:
    options = {"compression": "zstd", "write_page_checksum": True, "row_group_size": 2}
    pq.write_table(_table(), folder / "a.parquet", **options)
    return "parquet"


@_base("npy")
def _npy_whole(folder: Path) -> str:
    np.save(folder / "a.npy", np.arange(1200, dtype=np.int32).reshape(30, 40))
    return "npz"


@_base("npz")
def _npz_whole(folder: Path) -> str:
    np.savez(folder / "a.npz", input_ids=np.arange(1200, dtype=np.int32).reshape(30, 40))
    return "npz"


@_base("packed npz")
def _npz_packed(folder: Path) -> str:
    np.savez_compressed(folder / "a.npz", input_ids=np.arange(1200).reshape(30, 40))
    return "npz"


@_base("pt")
def _pt_whole(folder: Path) -> str:
    import torch

    rows = torch.arange(1200, dtype=torch.int32).reshape(30, 40)
    torch.save({"input_ids": rows, "loss_mask": torch.ones_like(rows)}, folder / "a.pt")
    return "pt"


NUMBERS = (-1, 0, 1, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**31))
LEAVES: tuple[Any, ...] = (
    *(*NUMBERS, -1.5, 1e300, float("inf"), float("nan"), 10**40, True, None),
    *("", "x", "../x", "shard\0", [], {}, [[]], {"a": {}}),
)


def damage(folder: Path, dice: np.random.Generator) -> None:
    """Change one to three things in the files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(dice.integers(1, 4)):
        path = files[dice.integers(len(files))]
        data = bytearray(path.read_bytes())
        if path.suffix == ".json" and data and dice.random() < 0.7:
            try:
                value = json.loads(data)
            except ValueError:
                continue
            path.write_text(json.dumps(_other_leaf(value, dice)))
        elif data:
            path.write_bytes(_other_bytes(data, dice))


def _other_leaf(value: Any, dice: np.random.Generator) -> Any:
    """The same with another value somewhere in it."""
    if dice.random() < 0.1 or not isinstance(value, dict | list) or not value:
        return LEAVES[dice.integers(len(LEAVES))]
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = keys[dice.integers(len(keys))]
    way = dice.random()
    if way < 0.05:
        del value[key]
    elif way < 0.1 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = _other_leaf(value[key], dice)
    return value


def _other_bytes(data: bytearray, dice: np.random.Generator) -> bytes:
    """The same with flipped bits, another number, an end cut off or something behind it."""
    way = dice.integers(8)
    # Most of what says something stands at either end.
    near = int(dice.integers(min(len(data), 400)))
    place = [near, len(data) - 1 - near, int(dice.integers(len(data)))][dice.integers(3)]
    if way < 3:
        data[place] ^= 1 << int(dice.integers(8))
    elif way < 6:
        width = (1, 2, 4, 8)[dice.integers(4)]
        number = NUMBERS[dice.integers(len(NUMBERS))] % (1 << 8 * width)
        place -= place % width if dice.random() < 0.5 else 0
        data[place : place + width] = number.to_bytes(width, "little")
    elif way == 6:
        del data[place:]
    else:
        data += dice.bytes(int(dice.integers(1, 64)))
    return bytes(data)


def held_bytes(folder: Path) -> list[bytes]:
    """What the files hold, unpacked where they are packed."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found.append(data)
        for unpack in (_unzip, _unzstd, _read_table):
            with contextlib.suppress(Exception):
                found.append(unpack(data))
    return found


def _unzip(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


def _unzstd(data: bytes) -> bytes:
    if not data.startswith(b"\x28\xb5\x2f\xfd"):
        return b""
    with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
        found: bytes = stream.read(1 << 20)
    return found


def _read_table(data: bytes) -> bytes:
    """The ids of a packed table, by pyarrow alone."""
    if data.startswith(b"PAR1"):
        table = pq.read_table(io.BytesIO(data), columns=["input_ids"])
    else:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    chunks = table["input_ids"].chunks
    return b"".join(chunk.flatten().to_numpy().tobytes() for chunk in chunks)


def strangers(store: tokenmill.Store, *folders: Path) -> list[str]:
    """Documents that are nowhere in the files, whatever the type of ids is."""
    held = [data for folder in folders for data in held_bytes(folder)]
    found = []
    for number, document in enumerate(store):
        ids = np.asarray(document)
        ways = [ids.astype(kind).tobytes() for kind in ("<u2", "<i4", "<i8", "u1", ">i4", ">i8")]
        if not any(way in data for way in ways for data in held):
            found.append(f"document {number}: {ids[:20].tolist()}")
    return found


def run_damage(folder: Path, kind: str, first: int, count: int) -> None:
    """Damage whole files of a kind in `count` ways, and import them."""
    base, source, out = folder / "base", folder / "files", folder / "out"
    base.mkdir()
    format_ = BASES[kind](base)
    for seed in range(first, first + count):
        print(json.dumps({"case": f"{kind} {seed}"}), flush=True)
        shutil.copytree(base, source)
        damage(source, np.random.default_rng(seed))
        found = outcome(lambda: import_ids(source, out, format_name=format_))
        if "error" not in found and "fault" not in found:
            # The whole files too: some damage keeps others from unpacking what is still there.
            found["strange"] = strangers(tokenmill.Store(out, split=None), source, base)
        found["left"] = "error" in found and out.exists()
        if format_ in IN_PLACE:
            found["in_place"] = outcome(lambda: _read_in_place(source, format_))
        print(json.dumps({"case": f"{kind} {seed}", **found}), flush=True)
        shutil.rmtree(source)
        shutil.rmtree(out, ignore_errors=True)


def _read_in_place(source: Path, format_: str) -> None:
    store = tokenmill.Store.open_foreign(source, format=format_)
    for document in store:
        int(np.asarray(document).sum())
    if store.has_mask:
        store.map_shard(0)


def main() -> None:
    folder = Path(sys.argv[2])
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (5 << 30, 5 << 30))
    if sys.argv[1] == "cases":
        run_cases(folder)
        assert not (folder / "executed").exists()
        return
    for number, kind in enumerate(BASES if len(sys.argv) < 6 else sys.argv[5:]):
        (folder / str(number)).mkdir()
        run_damage(folder / str(number), kind, int(sys.argv[3]), int(sys.argv[4]))


if __name__ == "__main__":
    main()
