"""A row's conversation in one form, whatever the dataset calls things.

OpenAI's form is a list `messages` of objects with `role` and `content`; ShareGPT's is a list
`conversations` with `from` and `value`. Roles are a closed set: a template may write a role next to
the strings of special tokens, so a role that nobody knows is a reason to reject the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.config import check_template_kwargs
from tokenmill.records import RejectReason
from tokenmill.supervised.rows import RowError, kind_of, lookup, parse_value

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
