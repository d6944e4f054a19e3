"""All formats by name; each module is imported when its format is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.interop.base import Format

HOMES = {
    "megatron": "tokenmill.interop.megatron:Megatron",
    "datatrove": "tokenmill.interop.datatrove:Datatrove",
    "olmo": "tokenmill.interop.olmo:Olmo",
    "nanogpt": "tokenmill.interop.nanogpt:NanoGpt",
    "llmc": "tokenmill.interop.llmc:LlmC",
    "mds": "tokenmill.interop.mds:Mds",
    "litdata": "tokenmill.interop.litdata:LitData",
    "arrow": "tokenmill.interop.arrow:Arrow",
    "parquet": "tokenmill.interop.parquet:Parquet",
    "pt": "tokenmill.interop.pt:Pt",
    "npz": "tokenmill.interop.npz:Npz",
}
"""Name -> module and class."""
NAMES = tuple(HOMES)


def get_format(name: str) -> Format:
    """The format of a name; UsageError lists them all."""
    if name not in HOMES:
        raise UsageError(
            f"there is no format {name!r}", hint=f"use one of: {', '.join(map(repr, NAMES))}"
        )
    module, _, cls = HOMES[name].partition(":")
    found: Format = getattr(importlib.import_module(module), cls)()
    return found
