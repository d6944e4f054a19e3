"""One row as a Python value, or the reason why it is of no use; and which fields are read of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import SourceError
from tokenmill.options import check_template_kwargs
from tokenmill.records import RejectReason, field_of, kind_of
from tokenmill.sources.base import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.options import RowShape
    from tokenmill.sources.base import SourceFile
    from tokenmill.supervised.chat import PieceCut

DETAIL_CHARACTERS = 160
MOST_NESTED = 100
_DECODER = json.JSONDecoder()


class RowError(Exception):
    """A row that cannot be used; caught where rows are counted."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        # No line breaks, not too long, nothing that is not text.
        line = " ".join(detail.split()).encode("utf-8", "backslashreplace").decode()
        is_short = len(line) <= DETAIL_CHARACTERS
        self.detail = line if is_short else line[: DETAIL_CHARACTERS - 3] + "..."


def parse_row(line: bytes) -> dict[str, Any]:
    """The object that a line holds."""
    try:
        row = parse_value(line.decode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos} of the line"
        raise RowError(RejectReason.INVALID_JSON, what) from error
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
    what = f"arrays and objects are nested more than {MOST_NESTED} deep"
    raise RowError(RejectReason.INVALID_JSON, what)


def nesting(value: object) -> int:
    """How deep lists and objects are within each other."""
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
        what = f"no field {field!r}; there are: {', '.join(map(str, row)) or 'none'}"
        raise RowError(RejectReason.MISSING_FIELD, what) from None


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
        what = f"\\u{ord(text[error.start]):04x} at character {error.start} of the text"
        raise RowError(RejectReason.LONE_SURROGATE, what) from error


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
TOOL_ROLES = frozenset(("tool", "function", "ipython", "observation"))
SHAREGPT_ROLES = {role: role for role in ("system", "user", ASSISTANT, "tool")}
SHAREGPT_ROLES |= {"human": "user", "function_response": "tool", "observation": "tool"}
SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT)
SHAREGPT_ROLES["function_call"] = ASSISTANT


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is handed to a chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    # More that the row has for its template.
    variables: dict[str, Any] = field(default_factory=dict)

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
        raise _bad(f"field {field!r} is an empty array")
    messages = [_message(entry, place) for place, entry in enumerate(entries)]
    system, tools, variables = row.get(SYSTEM), row.get(TOOLS), row.get(VARIABLES)
    has_system = messages[0]["role"] == "system" or not isinstance(system, str) or not system
    if field == CONVERSATIONS and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    tools = None if tools in (None, "") else _list(tools, TOOLS)
    if variables in (None, ""):
        return Conversation(messages, tools)
    try:
        variables = check_template_kwargs(_parsed(variables, VARIABLES))
    except ValueError as error:
        raise _bad(f"field {VARIABLES!r} cannot be used: {error}") from error
    return Conversation(messages, tools, variables)


def read_completion(
    row: dict[str, Any], prompt_field: str, completion_field: str
) -> tuple[Conversation, int]:
    """The conversation of a prompt and its completion, and how many messages are the prompt."""
    parts = [
        [_message(entry, place) for place, entry in enumerate(_list(lookup(row, field), field))]
        for field in (prompt_field, completion_field)
    ]
    prompt, completion = parts
    if not prompt:
        raise _bad(f"field {prompt_field!r} is an empty array")
    if prompt[-1]["role"] == ASSISTANT:
        raise _bad(f"field {prompt_field!r} ends with what the assistant says")
    if not completion:
        raise RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")
    if completion[0]["role"] != ASSISTANT:
        what = f"field {completion_field!r} does not begin with what the assistant says"
        raise RowError(RejectReason.NO_ASSISTANT_TURN, what)
    whole = {MESSAGES: [*prompt, *completion]}
    whole |= {name: row[name] for name in (TOOLS, VARIABLES) if name in row}
    return read_conversation(whole, MESSAGES), len(prompt)


def _bad(detail: str) -> RowError:
    return RowError(RejectReason.BAD_CONVERSATION, detail)


def _parsed(value: Any, field: str) -> Any:
    """A value, or the text of one: tables without nested columns hold it as JSON."""
    try:
        return parse_value(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _bad(f"field {field!r} is a string that is no JSON") from error


def _list(value: Any, field: str) -> list[Any]:
    value = _parsed(value, field)
    if not isinstance(value, list):
        raise _bad(f"field {field!r} is {kind_of(value)}, not an array")
    return value


def _message(entry: Any, place: int) -> dict[str, Any]:
    # Nearly all have a role, a text and nothing else, and need no more.
    if type(entry) is dict and len(entry) == 2 and type(entry.get("content")) is str:
        role = entry.get("role")
        if type(role) is str and role in ROLES:
            return entry
    if not isinstance(entry, dict):
        raise _bad(f"message {place} is {kind_of(entry)}")
    if "role" not in entry and "from" in entry:
        speaker = entry["from"]
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        rest = {key: entry[key] for key in entry if key not in ("from", "value", "weight")}
        message = {"role": role or speaker, "content": entry.get("value"), **rest}
    else:
        message = dict(entry)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(RejectReason.UNKNOWN_ROLE, f"message {place} has the role {role!r}")
    if content is None and role != ASSISTANT:
        raise _bad(f"message {place} ({role}) has no content")
    if not isinstance(content, str | list | None):
        raise _bad(f"the content of message {place} is {kind_of(content)}")
    # The reasoning under both names that templates read, as transformers hands it over.
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


Range = tuple[int, int]


class RowText(NamedTuple):
    """What a chat became: its text, in pieces, and what of it is in the loss mask."""

    text: str
    ranges: Sequence[Range]  # characters that count for the loss, ascending
    cut: PieceCut


# What a driver asks about rows before any are read: nothing heavy is loaded for it.


def needed_fields(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields to read, and whether all of them must be there; none for one text per row."""
    if shape is None or not shape.has_fields:
        return (), True
    if shape.is_chat or shape.has_pairs:
        return shape.chat_fields, False
    from tokenmill.supervised.shaper import field_template

    named = [text for is_field, text in field_template(shape) if is_field]
    return tuple(dict.fromkeys(named)), True


def holds_messages(line: bytes, shape: RowShape) -> bool:
    """Whether what is learned of a row is lists of messages."""
    names = (shape.prompt_field, shape.completion_field)
    if shape.has_pairs:
        names = (shape.chosen_field, shape.rejected_field)
    try:
        row = parse_row(line)
        found = [lookup(row, name) for name in names]
    except RowError:
        return False
    return all(isinstance(each, list) for each in found)


def refuse_plain_text(files: Sequence[SourceFile], shape: RowShape | None) -> None:
    """Raise for text files, which have no fields."""
    if shape is None or not shape.has_fields:
        return
    titles = [form.title for form in FORMATS.values() if form.has_fields]
    for file in (one for each in files for one in each.members or (each,)):
        if not file.traits.has_fields:
            raise SourceError(
                f"{file.path!r} is a {file.traits.title} file, and rows of the format "
                f"{shape.format!r} have fields",
                hint=f"name {', '.join(titles[:-1])} or {titles[-1]} files, such as: data/*.jsonl",
            )
