"""Other projects' files lie on a local disk: an address is refused, not taken for a folder."""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill import paths
from tokenmill.errors import UsageError
from tokenmill.remote import shown

WRITE_HINT = "write to a local folder, then copy that to the bucket"
STORE_HINT = "import into a local folder, then copy that to the bucket: stores are read there"
READ_HINT = "copy the files to a local disk first; a store, unlike them, is read where it lies"


def local_path(path: str | os.PathLike[str], *, hint: str) -> Path:
    """The path, if it is one; UsageError for a URL, which would make a folder called `s3:`."""
    text = os.fspath(path)
    if paths.is_remote(text):
        raise UsageError(
            f"{shown(text)!r} is an address; files of other projects are read and written on a "
            "local disk",
            hint=hint,
        )
    return Path(paths.normalise(text) if "://" in text else text)
