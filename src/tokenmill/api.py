"""`Store` as users open it: the reader of `store/`, joined with the engine that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.store import reader

if TYPE_CHECKING:
    import os

    from tokenmill.engines.base import Engine
    from tokenmill.store.layout import StoreLayout


class Store(reader.Store):
    """The documents of one split of a store, or of all (`split=None`), with their text.

    >>> store = tokenmill.Store("store")
    >>> store[0], store.decode(0), store.source(0)
    """

    def __init__(self, path: str | os.PathLike[str], *, split: str | None = "train") -> None:
        super().__init__(path, split=split, decoder=load_reference)


def load_reference(store: reader.Store) -> Engine:
    """The reference engine of the tokenizer that is kept in a store."""
    from tokenmill.engines.load import REFERENCES, load_engine

    identity = store.manifest.identity
    return load_engine(
        stored_tokenizer(store.layout, identity.tokenizer.kind),
        choice=REFERENCES[TokenizerKind(identity.tokenizer.kind)],
        special_tokens=SpecialTokens(identity.special_tokens),
    ).reference


def stored_tokenizer(layout: StoreLayout, kind: str) -> str:
    """What to load a store's own tokenizer by: the byte tokenizer has no files to be found."""
    return kind if kind == TokenizerKind.BYTES else str(layout.tokenizer)
