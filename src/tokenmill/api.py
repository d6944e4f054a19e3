"""`Store` as users open it: the reader of `store/`, joined with the engine that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.store import reader
from tokenmill.store.layout import TRAIN

if TYPE_CHECKING:
    import os
    from typing import Self

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

    @classmethod
    def open_foreign(
        cls,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002 (its name everywhere)
        tokenizer: str | os.PathLike[str] | None = None,
        split: str | None = "train",
        dtype: str | None = None,
        split_at_eos: bool = False,
        eos: str | None = None,
    ) -> Self:
        """Read other projects' token files where they lie, without importing them.

        For megatron, datatrove, olmo, nanogpt and llmc; a path is a file, a prefix or a folder.
        `tokenizer` is needed for text, and for `split_at_eos`. `dtype` is for files that do not
        say it. Splits go by names: val or test where a file's name says so, else train.

        >>> tokenmill.Store.open_foreign("data/wiki_text_document")
        >>> tokenmill.Loader(tokenmill.Store.open_foreign("fineweb10B/"), seq_len=1024, ...)
        """
        from tokenmill.interop.in_place import open_in_place

        files = open_in_place(
            path,
            format_name=format,
            tokenizer=tokenizer,
            dtype=dtype,
            split_at_eos=split_at_eos,
            eos=eos,
        )
        splits = [*files.manifest.splits]
        if split == TRAIN and len(splits) == 1:
            split = splits[0]  # one file is the split it is named after
        return cls.of_files(files, split=split, decoder=load_reference)


def load_reference(store: reader.Store) -> Engine:
    """The reference engine of the tokenizer that is kept in a store."""
    from tokenmill.engines import REFERENCES
    from tokenmill.engines.load import load_engine

    identity = store.manifest.identity
    # The byte tokenizer has no files to be found.
    kind = identity.tokenizer.kind
    return load_engine(
        kind if kind == TokenizerKind.BYTES else str(store.tokenizer_dir),
        choice=REFERENCES[TokenizerKind(kind)],
        special_tokens=SpecialTokens(identity.special_tokens),
    ).reference
