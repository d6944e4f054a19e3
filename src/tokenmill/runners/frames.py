"""Pickled messages on a pipe: 8 bytes of length, then the pickle.

Both ends are this package in the same environment; nothing else ever writes to these pipes.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


def write_frame(pipe: IO[bytes], value: Any) -> None:
    """Send one value; the caller holds the lock if several threads write."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Any:
    """Receive one value; raises EOFError when the other end is gone, even inside a frame."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)
