"""One row as a Python value, or the reason why it is of no use."""

from __future__ import annotations

import json
from typing import Any

from tokenmill.records import RejectReason

DETAIL_CHARACTERS = 160
MOST_NESTED = 100
_DECODER = json.JSONDecoder()


class RowError(Exception):
    """A row that cannot be used; caught where rows are counted."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = one_line(detail)


def one_line(text: str) -> str:
    """The text as a detail of a reject: no line breaks, not too long, nothing that is not text."""
    line = " ".join(text.split())
    line = line.encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= DETAIL_CHARACTERS else line[: DETAIL_CHARACTERS - 3] + "..."


def parse_row(line: bytes) -> dict[str, Any]:
    """The object that a line holds."""
    try:
        row = parse_value(line.decode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as error:
        raise RowError(
            RejectReason.INVALID_JSON, f"{error.msg} at character {error.pos} of the line"
        ) from error
    except ValueError as error:  # a number of too many digits
        raise RowError(RejectReason.INVALID_JSON, str(error)) from error
    if not isinstance(row, dict):
        raise RowError(RejectReason.NOT_AN_OBJECT, f"the line holds {kind_of(row)}")
    return row


def parse_value(text: str) -> Any:
    """What JSON says, if it is not nested too deep: how deep Python could go is chance."""
    try:
        value = _DECODER.decode(text)
        brackets = text.count("[") + text.count("{")
        if brackets <= MOST_NESTED or nesting(value) <= MOST_NESTED:
            return value
    except RecursionError:
        pass
    raise RowError(
        RejectReason.INVALID_JSON, f"arrays and objects are nested more than {MOST_NESTED} deep"
    )


def nesting(value: object) -> int:
    """How deep lists and objects lie within each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | tuple | dict)]:
        depth += 1
        level = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
    return depth


def lookup(row: dict[str, Any], field: str) -> Any:
    """A field's value; a key literally named "a.b" goes before b inside a."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            there = ", ".join(map(str, row)) or "none"
            raise RowError(RejectReason.MISSING_FIELD, f"no field {field!r}; there are: {there}")
        value = value[name]
    return value


def text_of(row: dict[str, Any], field: str) -> str:
    """A field as text: a string, or a number as JSON writes it."""
    value = lookup(row, field)
    if isinstance(value, str):
        return value
    if value is None:
        raise RowError(RejectReason.NULL_TEXT, f"field {field!r} is null")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    raise RowError(RejectReason.NOT_A_STRING, f"field {field!r} is {kind_of(value)}")


def encoded(text: str) -> bytes:
    """UTF-8 of a text, which may not hold half a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RowError(
            RejectReason.LONE_SURROGATE, f"\\u{code:04x} at character {error.start} of the text"
        ) from error


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
