"""The checked fast engine in one line, for people who must tokenize inside their own loop.

    tokenizer = tokenmill.load_tokenizer("path/or/hub-id")
    encoded = tokenizer.encode_batch(texts)        # encoded.ids, encoded.offsets, encoded[3]

Unlike the build's workers this uses every core by default. As in a build, a small part of the text
is encoded again by the reference; on a disagreement the call is redone and the fast engine is
given up, with a warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.end_tokens import resolve_eos
from tokenmill.engines.load import AUTO, load_engine
from tokenmill.engines.parity import Sample
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from os import PathLike

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine


@dataclass(frozen=True, slots=True, eq=False)
class Encoded(Sequence["NDArray[np.uint32]"]):
    """Ids of documents back to back; document i is `encoded[i]`."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint32]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.uint32]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint32] | list[NDArray[np.uint32]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.ids[self.offsets[position] : self.offsets[position + 1]]


class Tokenizer:
    """Text to ids and back, by the fastest engine that agrees with the reference."""

    def __init__(self, checked: CheckedEngine) -> None:
        self._checked = checked
        self._engine: CheckedEngine | Engine = checked
        self._sample = Sample()

    @property
    def engine(self) -> str:
        """Name of the engine in use."""
        return self._engine.name

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._checked.info.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a document; None where the tokenizer does not name one."""
        try:
            return resolve_eos(self._checked.info)[1]
        except TokenizerError:
            return None

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text."""
        batch = TextBatch.from_texts(texts)
        tokens = self._engine.encode(batch)
        if self._engine is self._checked:
            result = self._checked.check_sample(batch, tokens, self._sample)
            if result.mismatches:
                self._give_up(result.mismatches[0].text)
                tokens = self._engine.encode(batch)
        return Encoded(tokens.ids, tokens.offsets)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, special tokens shown as their content."""
        return self._checked.decode(ids)

    def _give_up(self, text: str) -> None:
        reference = self._checked.reference
        warnings.warn(
            f"{self._checked.name} and {reference.name} disagree on {text[:60]!r}; "
            f"{reference.name} is used from here on, which is slower and right",
            RuntimeWarning,
            stacklevel=3,
        )
        self._engine = reference


def load_tokenizer(
    path: str | PathLike[str],
    *,
    special_tokens: SpecialTokens | str = SpecialTokens.TEXT,
    engine: str = AUTO,
    threads: int | None = None,
) -> Tokenizer:
    """Load a tokenizer with the checked fast engine; `threads` defaults to every core."""
    checked = load_engine(
        path,
        choice=engine,
        special_tokens=SpecialTokens(special_tokens),
        threads=threads or os.cpu_count() or 1,
    )
    return Tokenizer(checked)
