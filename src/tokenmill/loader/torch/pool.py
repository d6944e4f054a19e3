"""All tokens of some streams on one device, with their masks, and how rows are gathered there.

    stream 0 | stream 1 | ... | padding

A row is pieces of the pool laid back to back, padding included. Per step only the pieces travel;
the place of every token in the pool is worked out on the device, without waiting for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.store.stream import TokenStream

CHUNK_TOKENS = 1 << 24
"""Read and copied in one go: 32 or 64 MiB."""


class TokenPool:
    """Tokens of streams, in the narrowest type that holds them all."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        *,
        pad_id: int,
        pad_tokens: int,
        device: torch.device,
    ) -> None:
        counts = [stream.num_tokens for stream in streams]
        ends = np.cumsum([0, *counts])
        self.bases: NDArray[np.int64] = ends[:-1]
        """Where each stream begins."""
        self.padding = int(ends[-1])
        """Where the padding begins."""
        self._is_uint16 = all(stream.dtype.itemsize == 2 for stream in streams)
        # Many operators do not know uint16; int16 holds the same bits.
        dtype = torch.int16 if self._is_uint16 else torch.int32
        num_tokens = self.padding + pad_tokens
        self.has_mask = any(stream.has_mask for stream in streams)
        require_memory(num_tokens * (dtype.itemsize + self.has_mask), device)
        self._tokens = torch.empty(num_tokens, dtype=dtype, device=device)
        # What has no mask counts; padding never does.
        self._mask: torch.Tensor | None = None
        if self.has_mask:
            self._mask = torch.ones(num_tokens, dtype=torch.bool, device=device)
            self._mask[self.padding :] = False
        for base, stream in zip(self.bases.tolist(), streams, strict=True):
            self._fill(base, stream)
        pad = np.full(1, pad_id, np.uint16 if self._is_uint16 else np.int32)
        self._tokens[self.padding :] = int(self._bits(pad)[0])

    def _fill(self, base: int, stream: TokenStream) -> None:
        for first in range(0, stream.num_tokens, CHUNK_TOKENS):
            size = min(CHUNK_TOKENS, stream.num_tokens - first)
            spans = stream.locate(np.array([first]), np.array([size]))
            place = slice(base + first, base + first + size)
            chunk = stream.read_spans(spans, pad=0)
            self._tokens[place].copy_(torch.from_numpy(self._bits(chunk)))
            if self._mask is not None and stream.has_mask:
                self._mask[place].copy_(torch.from_numpy(stream.read_mask(spans)))

    def _bits(self, tokens: NDArray[np.generic]) -> NDArray[np.generic]:
        return tokens.view(np.int16) if self._is_uint16 else tokens.astype(np.int32, copy=False)

    def find(self, ends: torch.Tensor, shifts: torch.Tensor, *, num_places: int) -> torch.Tensor:
        """Where in the pool the token at each place of the rows is.

        Place p lies in the first piece whose end is above p, and is token `p + shift` of the pool.
        Searching needs no size from the device, as `repeat_interleave` does in some versions.
        """
        places = torch.arange(num_places, device=ends.device)
        piece = torch.searchsorted(ends, places, right=True, out_int32=True)
        return places.add_(shifts.index_select(0, piece))

    def gather(self, found: torch.Tensor) -> torch.Tensor:
        """The tokens at places of the pool."""
        tokens = self._tokens.index_select(0, found)
        return tokens.view(torch.uint16) if self._is_uint16 else tokens

    def gather_mask(self, found: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at places of the pool count."""
        assert self._mask is not None
        return self._mask.index_select(0, found)


def require_memory(num_bytes: int, device: torch.device) -> None:
    """UsageError where a device does not have so much memory left."""
    free = free_memory(device)
    if num_bytes > free:
        raise UsageError(
            f"resident=True needs {num_bytes / 1e9:.2f} GB on {str(device)!r} for the tokens, and"
            f" {free / 1e9:.2f} GB are free",
            hint="leave resident out: the feeder then reads the tokens as they are needed",
        )


def free_memory(device: torch.device) -> int:
    """Bytes that an allocation could get."""
    if device.type != "cuda":
        import psutil

        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has taken from the device and does not use now counts as free.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
