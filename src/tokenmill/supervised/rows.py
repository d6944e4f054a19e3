"""One row as a Python value, or the reason why it is of no use."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.options import check_template_kwargs
from tokenmill.records import RejectReason, field_of, kind_of

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
    """A field's value."""
    try:
        return field_of(row, field)
    except KeyError:
        there = ", ".join(map(str, row)) or "none"
        raise RowError(
            RejectReason.MISSING_FIELD, f"no field {field!r}; there are: {there}"
        ) from None


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


# -------------------------------------------------------------------------------------------------
# A row's conversation in one form, whatever the dataset calls things.
#
# OpenAI's form is a list `messages` of objects with `role` and `content`; ShareGPT's is a list
# `conversations` with `from` and `value`. Roles are a closed set: a template may write a role next
# to the strings of special tokens, so a role that nobody knows is a reason to reject the row.

MESSAGES, CONVERSATIONS, TOOLS, SYSTEM = "messages", "conversations", "tools", "system"
VARIABLES = "chat_template_kwargs"
ASSISTANT = "assistant"
ROLES = frozenset(
    ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "observation")
)
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "function_response": "tool",
    "observation": "tool",
} | {role: role for role in ("system", "user", ASSISTANT, "tool")}
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is handed to a chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any] = field(default_factory=dict)
    """More that the row has for its template."""

    @property
    def assistant_turns(self) -> list[int]:
        """Places of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT]


def read_conversation(row: dict[str, Any], field: str | None) -> Conversation:
    """The conversation of a row, in `field` or where datasets usually have it."""
    if field is None:
        field = MESSAGES if MESSAGES in row or CONVERSATIONS not in row else CONVERSATIONS
    entries = _list(lookup(row, field), field)
    if not entries:
        raise RowError(RejectReason.BAD_CONVERSATION, f"field {field!r} is an empty array")
    messages = [_message(entry, place) for place, entry in enumerate(entries)]
    system = row.get(SYSTEM)
    has_system = messages[0]["role"] == "system" or not isinstance(system, str) or not system
    if field == CONVERSATIONS and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    tools = row.get(TOOLS)
    variables = row.get(VARIABLES)
    return Conversation(
        messages,
        None if tools in (None, "") else _list(tools, TOOLS),
        {} if variables in (None, "") else _variables(variables),
    )


def _variables(value: Any) -> dict[str, Any]:
    try:
        return check_template_kwargs(_parsed(value, VARIABLES))
    except ValueError as error:
        raise RowError(
            RejectReason.BAD_CONVERSATION, f"field {VARIABLES!r} cannot be used: {error}"
        ) from error


def _parsed(value: Any, field: str) -> Any:
    """A value, or the text of one: tables without nested columns hold it as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_value(value)
    except ValueError as error:
        raise RowError(
            RejectReason.BAD_CONVERSATION, f"field {field!r} is a string that is no JSON"
        ) from error


def _list(value: Any, field: str) -> list[Any]:
    value = _parsed(value, field)
    if not isinstance(value, list):
        raise RowError(
            RejectReason.BAD_CONVERSATION, f"field {field!r} is {kind_of(value)}, not an array"
        )
    return value


def _message(entry: Any, place: int) -> dict[str, Any]:
    if _is_usual(entry):
        return entry  # type: ignore[no-any-return]
    if not isinstance(entry, dict):
        raise RowError(RejectReason.BAD_CONVERSATION, f"message {place} is {kind_of(entry)}")
    if "role" not in entry and "from" in entry:
        speaker = entry["from"]
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        rest = {key: entry[key] for key in entry if key not in ("from", "value", "weight")}
        message = {"role": role or speaker, "content": entry.get("value"), **rest}
    else:
        message = dict(entry)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(RejectReason.UNKNOWN_ROLE, f"message {place} has the role {role!r}")
    content = message.get("content")
    if content is None and role != ASSISTANT:
        raise RowError(RejectReason.BAD_CONVERSATION, f"message {place} ({role}) has no content")
    if not isinstance(content, str | list | None):
        raise RowError(
            RejectReason.BAD_CONVERSATION, f"the content of message {place} is {kind_of(content)}"
        )
    return _with_reasoning(message)


def _is_usual(entry: Any) -> bool:
    """Whether it has a role, a text and nothing else: nearly all are so, and need no more."""
    if type(entry) is not dict or len(entry) != 2:
        return False
    role, content = entry.get("role"), entry.get("content")
    return type(role) is str and role in ROLES and type(content) is str


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The reasoning under both names that templates read, as transformers hands it over."""
    for name in _REASONING:
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


# -------------------------------------------------------------------------------------------------
# Small templates: `{title}\n\n{body}` makes one text of several fields.
#
# A name in braces is a field (dots reach into nested objects), a double brace is a brace, and all
# else stands for itself. There is nothing more to it on purpose: no conversions, no formats.

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


@dataclass(frozen=True, slots=True)
class FieldTemplate:
    """A template in pieces: (True, field) or (False, text)."""

    pieces: tuple[tuple[bool, str], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that it names, each once, in order."""
        return tuple(dict.fromkeys(text for is_field, text in self.pieces if is_field))


def parse_template(template: str) -> FieldTemplate:
    """Take a template apart; UsageError where a brace stands alone or names nothing."""
    pieces: list[tuple[bool, str]] = []
    for match in _PART.finditer(template):
        text = match[0]
        if match[1] is not None:
            if not match[1].strip():
                raise _bad(template, "a pair of braces names no field")
            pieces.append((True, match[1].strip()))
        elif text in ("{", "}"):
            raise _bad(template, f"{text!r} at character {match.start()} has no partner")
        else:
            pieces.append((False, text[0] if text in ("{{", "}}") else text))
    parsed = FieldTemplate(tuple(pieces))
    if not parsed.fields:
        raise _bad(template, "it names no field, so every row would become the same text")
    return parsed


def _bad(template: str, why: str) -> UsageError:
    return UsageError(
        f"the template {template!r} cannot be used: {why}",
        hint="write fields in braces, such as '{title}\\n\\n{body}'; a brace itself is {{ or }}",
    )
