"""One JSON line, decided by Python's json module: its text, or the exact reason why it has none.

The block parser in `jsonl` asks here only about lines that Arrow refused or found no text in.
What Arrow refuses but Python takes is accepted with Python's meaning: the last of duplicate keys
wins, numbers out of range and lone surrogates in other fields do not matter.
"""

from __future__ import annotations

import json
from typing import Any

from tokenmill.records import RejectReason
from tokenmill.sources.columns import utf8_error

WHITESPACE = b" \t\r"
NESTED_TOO_DEEPLY = "nested too deeply"
_DETAIL_CHARACTERS = 60

# Numbers are never text; as strings they would be, and int() refuses those of many digits.
_DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)


def decide(line: bytes, field: str) -> bytes | tuple[RejectReason, str]:
    """UTF-8 of the text of a line that is not blank, or why there is none."""
    if why := utf8_error(line):
        return RejectReason.INVALID_UTF8, why.replace("of the text", "of the line")
    try:
        row = _DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        return RejectReason.INVALID_JSON, f"{error.msg} at character {error.pos} of the line"
    except RecursionError:
        return RejectReason.INVALID_JSON, NESTED_TOO_DEEPLY
    if not isinstance(row, dict):
        return RejectReason.NOT_AN_OBJECT, f"the line holds {_name(row)}"
    return _text(row, field)


def _text(row: dict[str, Any], field: str) -> bytes | tuple[RejectReason, str]:
    try:
        value = _lookup(row, field)
    except KeyError:
        return RejectReason.MISSING_FIELD, f"no field {field!r}; there are: {_shown(row)}"
    if value is None:
        return RejectReason.NULL_TEXT, f"field {field!r} is null"
    if not isinstance(value, str):
        return RejectReason.NOT_A_STRING, f"field {field!r} is {_name(value)}"
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        return RejectReason.LONE_SURROGATE, f"\\u{code:04x} at character {error.start} of the text"


def _lookup(row: dict[str, Any], field: str) -> Any:
    """A key literally named "a.b" goes before b inside a, unless it is null."""
    names = field.split(".")
    if len(names) == 1 or row.get(field) is not None or (field in row and names[0] not in row):
        return row[field]
    value: Any = row
    for name in names:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(field)
        value = value[name]
    return value


def _shown(row: dict[str, Any]) -> str:
    return ascii(", ".join(row))[1:-1][:_DETAIL_CHARACTERS] or "none"


def _name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
