"""`runs.jsonl`: a log of the builds that made a store, one sealed line each.

Dates, hosts, seconds and peak memory go here and nowhere else, because they differ from run to run;
the log is no part of the store's identity, and a store without it is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.durable import replace_file
from tokenmill.store.sealed import seal_line, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.sealed import Json


def append_run(layout: StoreLayout, facts: Mapping[str, Json]) -> None:
    """Add a line."""
    append_runs(layout, [facts])


def append_runs(layout: StoreLayout, runs: Sequence[Mapping[str, Json]]) -> None:
    """Add lines; the file is replaced as a whole, so that a crash cannot leave half a line."""
    replace_file(layout, layout.runs, _read(layout) + b"".join(map(seal_line, runs)))
    layout.remove_empty_tmp()


def read_runs(layout: StoreLayout) -> list[dict[str, Json]]:
    """All runs, oldest first; StoreError where a line was changed."""
    lines = _read(layout).splitlines(keepends=True)
    return [unseal(line, path=layout.runs) for line in lines]


def _read(layout: StoreLayout) -> bytes:
    try:
        return layout.runs.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(
            f"{str(layout.runs)!r} cannot be read: {error.strerror or error}"
        ) from error
