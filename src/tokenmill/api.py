"""`Store` as users open it: the reader of `store/`, joined with the engine that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.store import reader

if TYPE_CHECKING:
    import os

    from tokenmill.engines.base import Engine


class Store(reader.Store):
    """The documents of one split of a store, or of all (`split=None`), with their text.

    The path may be a URL (`s3://`, `gs://`, `hf://`, `https://`). What is read is then kept in
    memory, and with `cache` in that folder too, up to `cache_bytes` (10 GB unless given). A store
    on a local disk needs neither.

    >>> store = tokenmill.Store("store")
    >>> store[0], store.decode(0), store.source(0)
    >>> tokenmill.Store("s3://bucket/store", cache="/local/cache", cache_bytes=200 * 10**9)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = "train",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        super().__init__(
            path, split=split, decoder=load_reference, cache=cache, cache_bytes=cache_bytes
        )


def load_reference(store: reader.Store) -> Engine:
    """The reference engine of the tokenizer that is kept in a store."""
    from tokenmill.engines.load import REFERENCES, load_engine

    identity = store.manifest.identity
    # The byte tokenizer has no files to be found.
    kind = identity.tokenizer.kind
    return load_engine(
        kind if kind == TokenizerKind.BYTES else str(store.tokenizer_dir),
        choice=REFERENCES[TokenizerKind(kind)],
        special_tokens=SpecialTokens(identity.special_tokens),
    ).reference
