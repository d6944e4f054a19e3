"""The text that is measured on: lines of a base file, repeated to a given size, in several files
and formats.

Several files, because a compressed file can only be read from its front, and because datatrove
hands out whole files. Repeated text warms every engine's caches the same way: the ceiling and
tokenmill are given the same documents in the same order, so their ratio stays fair while the run
gets long enough to time.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet

from benchmarks import SHARED, WORK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEGABYTE = 10**6
FORMATS = ("jsonl", "parquet", "jsonl.zst")
ROW_GROUP_ROWS = 2000

_SHARED_NAMES = {"english": "mdn_en", "japanese": "mdn_ja", "chinese": "mdn_zh-cn"}
_STDLIB = "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The same documents in each of several formats."""

    name: str
    folder: Path
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents alone: the same in every format, so rates can be compared."""
    input_bytes: dict[str, int]
    """Format -> size of its files."""

    def files(self, file_format: str) -> list[Path]:
        """The files of one format, in the order of their documents."""
        return sorted(self.folder.glob(f"*.{file_format}"))


def available() -> list[str]:
    """Names of the corpora this machine has; the standard library's sources where it has none."""
    found = [name for name, stem in _SHARED_NAMES.items() if _shared_file(stem).exists()]
    return found or [_STDLIB]


def prepare(
    name: str,
    *,
    num_bytes: int,
    num_files: int,
    formats: Sequence[str] = FORMATS,
    work: Path = WORK,
    source: Path | None = None,
) -> Corpus:
    """Make (once) about `num_bytes` of JSON Lines in so many files, and copies in other formats.

    `source` is a JSON Lines file, .zst, for a machine that has no other text of this name.
    """
    folder = work / "corpora" / f"{name}-{num_bytes}-{num_files}"
    facts = folder / "facts.json"
    if not facts.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        jsonl = list(_write_lines(_base_file(name, work, source), folder, num_bytes, num_files))
        counts = [_convert(path, formats) for path in jsonl]
        sizes = {f: sum(p.stat().st_size for p in folder.glob(f"*.{f}")) for f in formats}
        documents, text_bytes = (sum(column) for column in zip(*counts, strict=True))
        corpus = Corpus(
            name=name,
            folder=folder,
            documents=documents,
            text_bytes=text_bytes,
            input_bytes=sizes,
        )
        facts.write_text(json.dumps(asdict(corpus) | {"folder": None}))
    found = json.loads(facts.read_text())
    return Corpus(**(found | {"folder": folder}))


def base_lines(name: str) -> Iterator[bytes]:
    """The lines of a corpus as it is, once."""
    with _base_file(name, WORK).open("rb") as stream:
        yield from stream


def _write_lines(base: Path, folder: Path, num_bytes: int, num_files: int) -> Iterator[Path]:
    lines = itertools.chain.from_iterable(base.open("rb") for _ in itertools.count())
    for index in range(num_files):
        path = folder / f"part-{index:02}.jsonl"
        left = num_bytes // num_files
        with path.open("wb") as stream:
            while left > 0:
                left -= stream.write(next(lines))
        yield path


def _convert(path: Path, formats: Sequence[str]) -> tuple[int, int]:
    """Write the other formats beside a JSON Lines file; returns its documents and bytes of text."""
    options = pyarrow.json.ReadOptions(block_size=64 * MEGABYTE)
    table = pyarrow.json.read_json(path, read_options=options)
    if "parquet" in formats:
        target = path.with_suffix(".parquet")
        pyarrow.parquet.write_table(table, target, row_group_size=ROW_GROUP_ROWS)
    if "jsonl.zst" in formats:
        with pa.CompressedOutputStream(f"{path}.zst", "zstd") as stream:
            stream.write(path.read_bytes())
    if "jsonl.gz" in formats:
        with path.open("rb") as lines, gzip.open(f"{path}.gz", "wb", compresslevel=6) as stream:
            shutil.copyfileobj(lines, stream, MEGABYTE)
    return table.num_rows, pc.sum(pc.binary_length(table["text"])).as_py()


def _shared_file(stem: str) -> Path:
    return SHARED / "corpus" / f"{stem}.jsonl.zst"


def _base_file(name: str, work: Path, source: Path | None = None) -> Path:
    path = work / "corpora" / f"{name}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as target:
            if name == _STDLIB and source is None:
                target.writelines(_standard_library_lines())
            else:
                with pa.input_stream(source or _shared_file(_SHARED_NAMES[name]), "zstd") as lines:
                    shutil.copyfileobj(lines, target)
        partial.rename(path)
    return path


def _standard_library_lines() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts:
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        yield json.dumps({"id": relative.as_posix(), "text": text}).encode() + b"\n"
