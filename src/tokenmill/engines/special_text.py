"""Finds documents that hold the string of a special token: what the policy `reject` rejects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch


class SpecialText:
    """A matcher for any of some strings."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
        self._pattern = "|".join(_escape(token) for token in longest_first)

    def find(self, texts: TextBatch) -> NDArray[np.bool_]:
        """For each document, whether it holds one of the strings."""
        if not self._pattern or not len(texts):
            return np.zeros(len(texts), bool)
        import pyarrow
        import pyarrow.compute

        # No copy: arrow reads our buffers as a column of its own.
        column = pyarrow.LargeStringArray.from_buffers(
            len(texts),
            pyarrow.py_buffer(np.ascontiguousarray(texts.offsets)),
            pyarrow.py_buffer(texts.data),
        )
        found = pyarrow.compute.match_substring_regex(column, self._pattern)
        return np.asarray(found.to_numpy(zero_copy_only=False), bool)


def _escape(token: str) -> str:
    # re.escape also escapes characters that RE2, arrow's engine, wants left alone.
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", token)
