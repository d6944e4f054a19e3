from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreError
from tokenmill.store.layout import Json, seal, seal_line, unseal

PATH = Path("some/file.json")
MEMBERS: dict[str, Json] = {
    "format_version": 1,
    "items": [{"a": 1}, {"a": None}],
    "rows": [[1, "x"], [2, "y"]],
    "text": '\u2603 \ud800 "checksum":',
    "share": 0.25,
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name != "checksum"), json_values, max_size=5))
def test_what_was_sealed_comes_back(members: dict[str, Json]) -> None:
    for sealed in (seal(members), seal_line(members)):
        assert unseal(sealed, path=PATH) == members
        assert sealed.isascii()
        assert sealed.endswith(b"\n")
    assert seal_line(members).count(b"\n") == 1


def test_the_checksum_covers_the_bytes_before_it_and_any_json_parser_reads_the_file() -> None:
    sealed = seal(MEMBERS)
    body, _, tail = sealed.rpartition(b'"checksum":')
    assert tail == f'"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
    parsed = json.loads(sealed)
    assert list(parsed) == [*MEMBERS, "checksum"]


@pytest.mark.parametrize("sealed", [seal(MEMBERS), seal_line(MEMBERS), seal({})])
def test_every_flipped_bit_breaks_the_seal(sealed: bytes) -> None:
    for position in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[position] ^= 1 << bit
            with pytest.raises(StoreError, match=r"some/file\.json"):
                unseal(bytes(changed), path=PATH)


def test_every_cut_added_blank_and_added_byte_breaks_the_seal() -> None:
    sealed = seal(MEMBERS)
    changed = [sealed[:size] for size in range(len(sealed))]
    changed += [sealed + b"\n", sealed + b" ", sealed.replace(b":", b": ", 1), b" " + sealed]
    for data in changed:
        with pytest.raises(StoreError):
            unseal(data, path=PATH)


def test_a_number_that_is_not_json_cannot_be_sealed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"share": float("nan")})


@pytest.mark.parametrize("body", [b"[", b'{"a":1]', b"{" * 100_000])
def test_a_valid_checksum_over_something_else_than_an_object_is_refused(body: bytes) -> None:
    data = body + f'"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
    with pytest.raises(StoreError, match="JSON"):
        unseal(data, path=PATH)
