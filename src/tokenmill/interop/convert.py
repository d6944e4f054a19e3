"""The verb `convert`: from one project's format to another's, in bounded memory.

Raw token files are read in place and written at once. Others become a store first, inside the out
folder, which is removed when the export is complete; a run that was interrupted finds it again.
"""

from __future__ import annotations

import functools
import shutil

from tokenmill.errors import StoreError
from tokenmill.interop.base import (
    READ_HINT,
    WRITE_HINT,
    ConvertRequest,
    ImportOptions,
    detect_format,
    get_format,
    local_path,
)
from tokenmill.interop.export import BOOKS, ExportResult, export_splits, open_splits
from tokenmill.interop.imports import name_tokenizer, run_import, unknown_tokenizer
from tokenmill.interop.in_place import open_in_place
from tokenmill.interop.raw import RawFormat
from tokenmill.options import with_settings
from tokenmill.store.layout import StoreLayout, StoreLock
from tokenmill.store.reader import Store

# Vocabularies to assume for ids that nobody named a tokenizer for: of 4 bytes and of 2.
WIDE = (1 << 31) - 1
NARROW = 65_499


@with_settings(ConvertRequest)
def convert(asked: ConvertRequest) -> ExportResult:
    """Write token files of one format in another; the same call again resumes.

    A tokenizer is needed only where its ids are: `split_at_eos`, or a format that puts one into
    every document. Without it ids of formats that do not say their type are taken as 4 bytes wide
    unless `dtype="uint16"`.
    """
    source = local_path(asked.path, hint=READ_HINT)
    format_ = detect_format(source) if asked.format is None else get_format(asked.format)
    # Cut at end-of-text, documents go on from file to file, which maps of files do not.
    if isinstance(format_, RawFormat) and not asked.split_at_eos:
        files = open_in_place(
            source,
            format_name=format_.about.name,
            tokenizer=asked.tokenizer,
            dtype=asked.dtype,
            eos=asked.eos,
        )
        wanted = [asked.split] if isinstance(asked.split, str) else asked.split
        names = list(files.manifest.splits) if wanted is None else wanted
        return export_splits({name: Store.of_files(files, split=name) for name in names}, asked)
    if asked.tokenizer is not None:
        named = name_tokenizer(asked.tokenizer, eos=asked.eos)
    else:
        named = unknown_tokenizer(NARROW if asked.dtype == "uint16" else WIDE)
    between = local_path(asked.out, hint=WRITE_HINT).absolute() / BOOKS / "convert" / "store"
    run = functools.partial(
        run_import,
        source,
        named=named,
        out=between,
        format_name=format_.about.name,
        options=ImportOptions(dtype=asked.dtype, split_at_eos=asked.split_at_eos),
        workers=asked.workers,
        on_progress=asked.on_progress,
    )
    with StoreLock(StoreLayout(between.parent)):
        try:
            run()
        except StoreError:
            if not between.exists():
                raise
            # What another conversion left there.
            shutil.rmtree(between)
            run()
        result = export_splits(open_splits(between, asked.split), asked)
        # The links of an export keep its files.
        shutil.rmtree(between, ignore_errors=True)
    return result
