"""What other processes do with a remote store in the tests: where they can import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenmill


def read_some(store: tokenmill.Store) -> list[int]:
    """Numbers that depend on tokens and indexes, read in every way."""
    assert store.remote is not None
    wanted = [(store.shards[0].name, 0, 4096)]
    store.remote.read_ahead(wanted, kind="bin")
    (data,) = store.remote.read(wanted, kind="bin")
    return [len(store), int(store.lengths().sum()), sum(data), len(store[5])]
