from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreError
from tokenmill.store.format import (
    BLOCK_DOCUMENTS,
    check_index,
    index_blocks,
    index_bytes,
    read_index,
    token_dtype,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.format import TokenDtype

UINT16 = token_dtype(257)
INT32 = token_dtype(150_000)


def megatron_index(lengths: list[int], *, code: int, itemsize: int) -> bytes:
    """The oracle: the file written number by number, as Megatron-LM's reader takes it apart."""
    count = len(lengths)
    data = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, count + 1)
    data += b"".join(struct.pack("<i", length) for length in lengths)
    data += b"".join(struct.pack("<q", sum(lengths[:k]) * itemsize) for k in range(count))
    return data + b"".join(struct.pack("<q", k) for k in range(count + 1))


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "uint16"), (65_499, "uint16"), (65_500, "int32"), (2**31 - 1, "int32")],
)
def test_ids_are_uint16_below_65500_and_int32_from_there(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31])
def test_a_vocabulary_that_no_id_type_holds_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="31 bits"):
        token_dtype(vocab_size)


@given(
    parts=st.lists(st.lists(st.integers(0, 5000), max_size=8), max_size=4),
    wide=st.booleans(),
)
def test_the_index_equals_one_written_number_by_number(parts: list[list[int]], wide: bool) -> None:
    dtype, code, itemsize = (INT32, 4, 4) if wide else (UINT16, 8, 2)
    written = b"".join(index_blocks([np.array(p, np.int32) for p in parts], dtype=dtype))
    lengths = [length for part in parts for length in part]
    assert written == megatron_index(lengths, code=code, itemsize=itemsize)
    assert len(written) == index_bytes(len(lengths)) == 42 + 20 * len(lengths)


@pytest.mark.parametrize("dtype", [UINT16, INT32])
def test_an_index_larger_than_a_block_reads_back_through_unaligned_views(
    tmp_path: Path, dtype: TokenDtype
) -> None:
    lengths = np.random.default_rng(0).integers(0, 2**31 - 1, BLOCK_DOCUMENTS + 3, np.int32)
    (tmp_path / "a.idx").write_bytes(b"".join(index_blocks([lengths], dtype=dtype)))
    index = read_index(tmp_path / "a.idx")
    check_index(index, path=tmp_path / "a.idx")
    assert index.dtype == dtype
    assert not index.offsets.flags.aligned
    assert not index.offsets.flags.writeable
    np.testing.assert_array_equal(index.lengths, lengths)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    np.testing.assert_array_equal(index.offsets[1:], ends[:-1])
    assert index.bin_bytes == ends[-1] > 2**40  # far past what 32-bit arithmetic would hold


def test_an_index_of_no_documents_reads_back(tmp_path: Path) -> None:
    none = [np.empty(0, np.int32)]
    (tmp_path / "a.idx").write_bytes(b"".join(index_blocks(none, dtype=UINT16)))
    index = read_index(tmp_path / "a.idx")
    check_index(index, path=tmp_path / "a.idx")
    assert (len(index.lengths), index.bin_bytes, index.documents.tolist()) == (0, 0, [0])


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, b"X", "does not begin"),
        (9, b"\x02", "does not begin"),
        (17, b"\x06", "dtype code 6"),
        (18, b"\x04", "4 sequences"),
        (26, b"\x05", "5 document entries"),
        (34 + 12 * 3, b"\x01", "does not run from 0 to 3"),
        (34 + 12 * 3 + 8 * 3, b"\x02", "does not run from 0 to 3"),
    ],
)
def test_a_wrong_header_or_size_is_refused_by_name(
    tmp_path: Path, offset: int, value: bytes, complaint: str
) -> None:
    data = bytearray(megatron_index([3, 1, 2], code=8, itemsize=2))
    data[offset : offset + 1] = value
    (tmp_path / "bad.idx").write_bytes(data)
    with pytest.raises(StoreError, match=complaint) as caught:
        read_index(tmp_path / "bad.idx")
    assert "bad.idx" in caught.value.message


@pytest.mark.parametrize("size", [0, 1, 33, 34, 101, 103])
def test_a_truncated_or_extended_index_is_refused(tmp_path: Path, size: int) -> None:
    data = megatron_index([3, 1, 2], code=8, itemsize=2) + b"\x00"
    (tmp_path / "bad.idx").write_bytes(data[:size])
    with pytest.raises(StoreError, match=r"bad\.idx"):
        read_index(tmp_path / "bad.idx")


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (34 + 3, b"\x80", "negative length"),
        (34, b"\x04", "offsets"),
        (34 + 4 * 3 + 8, b"\x05", "offsets"),
        (34 + 12 * 3 + 8, b"\x02", "not one sequence"),
    ],
)
def test_arrays_that_contradict_each_other_are_found(
    tmp_path: Path, offset: int, value: bytes, complaint: str
) -> None:
    data = bytearray(megatron_index([3, 1, 2], code=8, itemsize=2))
    data[offset : offset + 1] = value
    path = tmp_path / "bad.idx"
    path.write_bytes(data)
    with pytest.raises(StoreError, match=complaint):
        check_index(read_index(path), path=path)
