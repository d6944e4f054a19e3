"""The bytes engine: each byte is its own id, 256 ends a document. No package, no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import BYTES_EOS, BYTES_EOS_ID
from tokenmill.errors import UsageError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch


class BytesEngine:
    """Encodes UTF-8 bytes as themselves."""

    name = "bytes"
    version = "1"

    def __init__(self, *, special_tokens: SpecialTokens) -> None:
        if special_tokens is SpecialTokens.PARSE:
            raise UsageError(
                "the policy 'parse' has no meaning for bytes: their end of text has no string",
                hint="use --special-tokens text",
            )

    def encode(self, texts: TextBatch) -> TokenBatch:
        first = texts.offsets[0]
        ids = texts.data[first : texts.offsets[-1]].astype(np.uint32)
        return TokenBatch(ids, texts.offsets - first)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        data = b"".join(self.token_bytes(token_id) for token_id in np.asarray(ids).tolist())
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return BYTES_EOS.encode() if token_id == BYTES_EOS_ID else bytes([token_id])

    def recycle(self) -> bool:
        return False
