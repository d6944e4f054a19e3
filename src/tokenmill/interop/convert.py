"""The verb `convert`: from one project's format to another's, in bounded memory.

Raw token files are read in place and written at once. Others become a store first, inside the out
folder, which is removed when the export is complete; a run that was interrupted finds it again.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.interop.base import (
    READ_HINT,
    WRITE_HINT,
    ExportOptions,
    ImportOptions,
    detect_format,
    get_format,
    local_path,
)
from tokenmill.interop.export import BOOKS, ExportResult, export_splits, open_splits
from tokenmill.interop.imports import make_import, name_tokenizer, unknown_tokenizer
from tokenmill.interop.in_place import open_in_place
from tokenmill.interop.raw import RawFormat
from tokenmill.store.layout import StoreLayout
from tokenmill.store.lock import StoreLock
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenmill.files import PathInput

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
    format_ = detect_format(source) if format is None else get_format(format)
    options = ExportOptions(
        to=to,
        seq_len=seq_len,
        packing=packing,
        file_tokens=file_tokens,
        link=link,
        settings=settings,
    )
    root = local_path(out, hint=WRITE_HINT).absolute()
    export = partial(
        export_splits, options=options, out=root, workers=workers, on_progress=on_progress
    )
    # Cut at end-of-text, documents go on from file to file, which maps of files do not.
    if isinstance(format_, RawFormat) and not split_at_eos:
        files = open_in_place(
            source, format_name=format_.about.name, tokenizer=tokenizer, dtype=dtype, eos=eos
        )
        wanted = [split] if isinstance(split, str) else split
        names = list(files.manifest.splits) if wanted is None else wanted
        return export({name: Store.of_files(files, split=name) for name in names})
    if tokenizer is not None:
        named = name_tokenizer(tokenizer, eos=eos)
    else:
        named = unknown_tokenizer(NARROW if dtype == "uint16" else WIDE)
    between = root / BOOKS / "convert" / "store"
    run = make_import(
        source,
        named=named,
        out=between,
        format_name=format_.about.name,
        options=ImportOptions(dtype=dtype, split_at_eos=split_at_eos),
        settings={},
        workers=workers,
        on_progress=on_progress,
    )
    with StoreLock(StoreLayout(between.parent)):
        try:
            run.run()
        except StoreError:
            if not between.exists():
                raise
            # What another conversion left there.
            shutil.rmtree(between)
            run.run()
        result = export(open_splits(between, split))
        # The links of an export keep its files.
        shutil.rmtree(between, ignore_errors=True)
    return result
