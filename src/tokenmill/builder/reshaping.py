"""Rows of a store made anew, from what their source gives, by the reference engine alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.api import load_reference
from tokenmill.builder.fitting import Fitting
from tokenmill.config import RowShape
from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.engines.describe import describe
from tokenmill.engines.load import REFERENCES, load_engine
from tokenmill.engines.locate import CHAT_TEMPLATE, find_tokenizer
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.store.reader import Store


class Remaker:
    """Makes rows as the store's build made them, before any of them was cut up."""

    def __init__(self, store: Store) -> None:
        identity = store.manifest.identity
        self.shape = RowShape.of_identity(identity.config) or RowShape()
        reference = load_reference(store)
        self.reference = f"{reference.name} {reference.version}"
        self.token_bytes = reference.token_bytes
        self._encode = _shaping(store, self.shape) if self.shape.has_fields else reference.encode
        self._fitting = Fitting(shape=self.shape, bos_id=identity.bos_id, eos_id=identity.eos_id)

    def remake(self, texts: TextBatch) -> TokenBatch:
        """The rows, framed, with masks where the store has them; without tokens if rejected."""
        fitted = self._fitting.fit(self._encode(texts))
        return _with_gaps(fitted.tokens, fitted.kept, count=len(texts))


def _shaping(store: Store, shape: RowShape) -> Callable[[TextBatch], TokenBatch]:
    from tokenmill.supervised.shaper import Shaper
    from tokenmill.supervised.template_files import with_template

    identity = store.manifest.identity
    kind = TokenizerKind(identity.tokenizer.kind)
    files = find_tokenizer(kind if kind is TokenizerKind.BYTES else str(store.tokenizer_dir))
    kept = store.tokenizer_dir / CHAT_TEMPLATE
    if kept.is_file():
        files = with_template(files, str(kept))
    policy = SpecialTokens(identity.special_tokens)
    engine = load_engine(
        describe(files, policy=policy), choice=REFERENCES[kind], special_tokens=policy
    )
    shaper = Shaper(shape, engine, bos=identity.bos_id, eos=identity.eos_id)

    def encode(texts: TextBatch) -> TokenBatch:
        shaped = shaper.shape(texts, np.arange(len(texts), dtype=np.int64))
        tokens = shaper.assemble(shaped, shaper.encode(shaped, engine.encode))
        return _with_gaps(tokens, shaped.rows, count=len(texts))

    return encode


def _with_gaps(tokens: TokenBatch, rows: np.ndarray, *, count: int) -> TokenBatch:
    """The rows in their places; one that is not there has no tokens."""
    lengths = np.zeros(count, np.int64)
    lengths[rows] = tokens.lengths
    return TokenBatch(tokens.ids, np.concatenate(([0], np.cumsum(lengths))), tokens.mask)
