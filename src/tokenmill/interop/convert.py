"""The verb `convert`: from one project's format to another's, in bounded memory.

Raw token files are read where they lie and written at once. Others become a store first, inside the
out folder, which is removed when the export is complete; a run that was interrupted finds it again.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.interop.base import (
    READ_HINT,
    WRITE_HINT,
    ImportOptions,
    complete_settings,
    detect_format,
    get_format,
    local_path,
    reading,
)
from tokenmill.interop.export import (
    INDEX,
    ExportFolder,
    ExportRequest,
    ExportResult,
    export_splits,
    open_splits,
)
from tokenmill.interop.imports import make_import, name_tokenizer, source_version, unknown_tokenizer
from tokenmill.interop.in_place import open_in_place
from tokenmill.interop.raw import RawFormat
from tokenmill.records import lazy
from tokenmill.store.durable import replace_file, seal, unseal
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tokenmill.files import PathInput
    from tokenmill.interop.base import Format
    from tokenmill.interop.imports import NamedTokenizer
    from tokenmill.store.durable import Json

    OnProgress = Callable[[int, int], None]

WIDE = (1 << 31) - 1
NARROW = 65_499
"""Vocabularies to assume for ids that nobody named a tokenizer for: of 4 bytes and of 2."""


def convert(
    path: PathInput,
    *,
    to: str,
    out: PathInput,
    format: str | None = None,  # noqa: A002 (its name everywhere)
    tokenizer: PathInput | None = None,
    dtype: str | None = None,
    split_at_eos: bool = False,
    eos: str | None = None,
    split: str | Sequence[str] | None = None,
    seq_len: int | None = None,
    packing: str = "concat",
    file_tokens: int | None = None,
    link: str | bool = False,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    **settings: str | int | bool,
) -> ExportResult:
    """Write token files of one format in another; the same call again resumes.

    A tokenizer is needed only where its ids are: `split_at_eos`, or a format that puts one into
    every document. Without it ids of formats that do not say their type are taken as 4 bytes wide
    unless `dtype="uint16"`.
    """
    source = local_path(path, hint=READ_HINT)
    conversion = Conversion(
        source=source,
        format=detect_format(source) if format is None else get_format(format),
        tokenizer=None if tokenizer is None else str(tokenizer),
        options=ImportOptions(dtype=dtype, split_at_eos=split_at_eos),
        eos=eos,
        folder=ExportFolder(local_path(out, hint=WRITE_HINT).absolute()),
        workers=workers,
        on_progress=on_progress,
    )
    asked = ExportRequest(
        to=to,
        seq_len=seq_len,
        packing=packing,
        file_tokens=file_tokens,
        link=link,
        settings=settings,
    )
    return conversion.run(asked, split)


@dataclass(kw_only=True)
class Conversion:
    """One call of `convert`."""

    source: Path
    format: Format
    tokenizer: str | None
    options: ImportOptions
    eos: str | None
    folder: ExportFolder
    workers: int | None
    on_progress: OnProgress | None

    def run(self, asked: ExportRequest, split: str | Sequence[str] | None) -> ExportResult:
        """Carry out the conversion."""
        # Cut at end-of-text, documents go on from file to file, which maps of files do not.
        if isinstance(self.format, RawFormat) and not self.options.split_at_eos:
            return self._export(asked, self._stores_in_place(split))
        title = self._title(asked, split)
        known = self._find_result(title)
        if known is not None:
            return known
        self._import()
        result = self._export(asked, open_splits(self._store, split))
        finished = seal({**title, "result": dataclasses.asdict(result)})
        replace_file(self.folder.books, self._note, finished)
        shutil.rmtree(self._store, ignore_errors=True)
        return result

    @property
    def _store(self) -> Path:
        """The store in between; the links of an export keep its files when it goes."""
        return self.folder.books.root / "store"

    @property
    def _note(self) -> Path:
        return self.folder.books.root / "convert.json"

    def _export(self, asked: ExportRequest, stores: Mapping[str, Store]) -> ExportResult:
        return export_splits(
            stores,
            asked,
            out=self.folder.root,
            workers=self.workers,
            on_progress=self.on_progress,
        )

    def _stores_in_place(self, split: str | Sequence[str] | None) -> dict[str, Store]:
        files = open_in_place(
            self.source,
            format_name=self.format.about.name,
            tokenizer=self.tokenizer,
            dtype=self.options.dtype,
            split_at_eos=self.options.split_at_eos,
            eos=self.eos,
        )
        wanted = [split] if isinstance(split, str) else split
        names = list(files.manifest.splits) if wanted is None else wanted
        return {name: Store.of_files(files, split=name) for name in names}

    @lazy
    def _named(self) -> NamedTokenizer:
        """The tokenizer, or what must be assumed about it."""
        if self.tokenizer is not None:
            return name_tokenizer(self.tokenizer, eos=self.eos)
        return unknown_tokenizer(NARROW if self.options.dtype == "uint16" else WIDE)

    def _import(self) -> None:
        make_import(
            self.source,
            named=self._named,
            out=self._store,
            format_name=self.format.about.name,
            options=self.options,
            settings={},
            workers=self.workers,
            on_progress=self.on_progress,
        ).run()

    def _title(self, asked: ExportRequest, split: str | Sequence[str] | None) -> dict[str, Json]:
        """What a finished conversion was made from: the same again has nothing to do."""
        with reading(self.source):
            foreign = self.format.open(self.source, self._complete(self.options))
        try:
            versions: dict[str, Json] = {
                name: [*source_version(foreign, name)] for name in foreign.files
            }
        finally:
            foreign.close()
        request = dataclasses.asdict(asked)
        del request["link"]
        return {
            "source": str(self.source.absolute()),
            "versions": versions,
            "tokenizer": self.tokenizer,
            "eos": self.eos,
            "dtype": self.options.dtype,
            "split_at_eos": self.options.split_at_eos,
            "split": [split] if isinstance(split, str) else None if split is None else [*split],
            "request": request,
        }

    def _complete(self, options: ImportOptions) -> ImportOptions:
        eos = self._named.eos
        return dataclasses.replace(
            options,
            eos_id=None if eos is None else eos[1],
            settings=complete_settings(self.format, {}),
        )

    def _find_result(self, title: dict[str, Json]) -> ExportResult | None:
        try:
            known = unseal(self._note.read_bytes(), path=self._note)
        except (OSError, StoreError):
            return None
        result = known.pop("result", None)
        if known != title or not isinstance(result, dict) or not self._is_whole(result):
            return None
        notes = result["notes"]
        lines = tuple(str(line) for line in notes) if isinstance(notes, list) else ()
        return ExportResult(**{**result, "notes": lines, "nothing_to_do": True})  # type: ignore[arg-type]

    def _is_whole(self, result: dict[str, Json]) -> bool:
        return result.get("out") == str(self.folder.root) and self.folder.receipt(INDEX).exists()
