"""Rows of a store made anew: what its shape makes of their JSON, by the reference engine alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.config import RowShape
from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.engines.describe import describe
from tokenmill.engines.load import REFERENCES, load_engine
from tokenmill.engines.locate import CHAT_TEMPLATE, find_tokenizer
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.store.reader import Store


def reshaping(store: Store) -> Callable[[TextBatch], TokenBatch] | None:
    """Rows as the source gives them to documents; None where a row is one text."""
    identity = store.manifest.identity
    shape = RowShape.of_identity(identity.config)
    if shape is None:
        return None
    from tokenmill.supervised.shaper import Shaper
    from tokenmill.supervised.template_files import with_template

    kind = TokenizerKind(identity.tokenizer.kind)
    files = find_tokenizer(kind if kind is TokenizerKind.BYTES else str(store.tokenizer_dir))
    kept = store.tokenizer_dir / CHAT_TEMPLATE
    if kept.is_file():
        files = with_template(files, str(kept))
    policy = SpecialTokens(identity.special_tokens)
    engine = load_engine(
        describe(files, policy=policy), choice=REFERENCES[kind], special_tokens=policy
    )
    framing = (identity.bos, identity.eos) if shape.has_mask else (None, None)
    bos, eos = (None if token is None else token.id for token in framing)
    shaper = Shaper(shape, engine, bos=bos, eos=eos)

    def encode(texts: TextBatch) -> TokenBatch:
        rows = np.arange(len(texts), dtype=np.int64)
        shaped = shaper.shape(texts, rows)
        documents = shaper.assemble(shaped, shaper.encode(shaped, engine.encode))
        return _with_gaps(documents.tokens, documents.rows, count=len(texts))

    return encode


def _with_gaps(tokens: TokenBatch, rows: np.ndarray, *, count: int) -> TokenBatch:
    """The documents in the places of their rows; a row without one has no tokens."""
    lengths = np.zeros(count, np.int64)
    lengths[rows] = tokens.lengths
    return TokenBatch(tokens.ids, np.concatenate(([0], np.cumsum(lengths))), tokens.mask)
