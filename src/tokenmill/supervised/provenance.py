"""Which special tokens of a rendered chat the template wrote, and which only look like it.

A message may hold the string of a special token, or a part of one that the next piece of text would
complete. Neither may become the token. So a chat in which that is possible is rendered twice: as it
is, and with a double in the place of every character of its messages that a special token could be
made of. A double is a private character of equal length that means nothing to anyone. If the two
texts are equal but for the doubles, the template did the same both times, and whatever special
tokens the second text still has are made of the template's own characters. If they are not equal,
nobody can tell, and the row is rejected.

Which characters get doubles: of every special token one that the template supplies in no other way
than by the token itself, so that it must come from a message if any part of the token does; as rare
a one as there is. Where the template has pieces with all of them, the first and the last character
of the token; and where it has both ends as pieces, as `<|` and `|>` around a name, every character.
Strings that a template looks for in messages, such as `</think>`, stay as they are, since it would
not find them otherwise; none of them can share a character with a special token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tokenmill.records import RejectReason
from tokenmill.supervised.rows import Conversation, RowError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tokenmill.supervised.sandbox import ChatTemplate

_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+\Z")
# Words that templates compare with; alone they are part of no message.
KNOWN_WORDS = frozenset(
    (
        *("text", "function", "tool", "object", "string", "integer", "number", "boolean"),
        *("array", "null", "image", "video", "audio"),
    )
)
# Below these the names are the dataset's own, not the template's.
_FREE_KEYS = frozenset(("arguments", "properties"))
_Doubles = list[tuple[str, str]]


class Provenance:
    """Tells a template's special tokens from what its messages say."""

    def __init__(self, template: ChatTemplate, specials: Collection[str]) -> None:
        self._template = template
        constants = {*template.constants, *_strings(list(template.variables.values()))}
        risky = {one: _risky_characters(one, constants) for one in specials}
        # Whether letters matter, and so the names that a dataset gives to things.
        self.composes = any(characters == set(one) for one, characters in risky.items())
        self._risky = {each for characters in risky.values() for each in characters}
        self._risky = {each for each in self._risky if not each.isspace()}
        self._sought = _sought_strings(template.literals, specials, self._risky)
        letters = re.escape("".join(sorted(self._risky)))
        self._usual = [
            (character, chr(_FIRST_PRIVATE + number))
            for number, character in enumerate(sorted(self._risky))
        ]
        self._search = re.compile(f"[{letters}]" if letters else "(?!)").search

    def without_doubt(self, conversation: Conversation, text: str) -> str:
        """A text of equal length whose special tokens are all the template's: the text itself,
        if no message has a character for them, or else the text with doubles."""
        if not self._risky or not self._is_suspicious(conversation):
            return text
        table = self._doubles(conversation, text)
        disguised = Conversation(
            [self._disguise(each, table, kept="role") for each in conversation.messages],
            None if conversation.tools is None else self._disguise(conversation.tools, table),
            self._disguise(conversation.variables, table),
        )
        try:
            second = self._template.render(disguised)
        except RowError:
            second = None
        if second is None or _replaced(second, [(b, a) for a, b in table]) != text:
            raise RowError(
                RejectReason.SPECIAL_TOKEN,
                "the template makes another text of its messages when their special characters are "
                "replaced, so its own special tokens cannot be told from theirs",
            )
        return second

    def _is_suspicious(self, conversation: Conversation) -> bool:
        search = self._search
        nested: list[Any] = [] if conversation.tools is None else [conversation.tools]
        if conversation.variables:
            nested.append(conversation.variables)
        for message in conversation.messages:
            for key, value in message.items():
                if key == "role":
                    continue
                if type(value) is not str:
                    nested.append(value)
                elif search(value) is not None:
                    return True
                if key != "content" and not _IDENTIFIER.match(key):
                    nested.append(key)
        return any(search(text) is not None for text in _strings(nested))

    def _doubles(self, conversation: Conversation, text: str) -> _Doubles:
        """A private character for each risky one, none of which the row has already."""
        values = (conversation.messages, conversation.tools, conversation.variables)
        strings = [text, *_strings(values)]
        if all(one.isascii() or max(one) < chr(_FIRST_PRIVATE) for one in strings):
            return self._usual
        used = set().union(*strings)
        free = (
            chr(point) for point in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(point) not in used
        )
        try:
            return [(character, next(free)) for character in sorted(self._risky)]
        except StopIteration:
            raise RowError(
                RejectReason.SPECIAL_TOKEN, "the row uses up the private characters of Unicode"
            ) from None

    def _disguise(
        self, value: Any, table: _Doubles, *, free: bool = False, kept: str | None = None
    ) -> Any:
        """The value with doubles; `kept` is the name of a member that stays as it is."""
        if isinstance(value, str):
            return value if value in KNOWN_WORDS else self._double(value, table)
        if isinstance(value, list):
            return [self._disguise(entry, table) for entry in value]
        if not isinstance(value, dict):
            return value
        names = free and self.composes
        return {
            (key if _IDENTIFIER.match(key) and not names else self._double(key, table)): (
                entry if key == kept else self._disguise(entry, table, free=key in _FREE_KEYS)
            )
            for key, entry in value.items()
        }

    def _double(self, text: str, table: _Doubles) -> str:
        if self._sought is None:
            return _replaced(text, table)
        # Every second part is a string that the template looks for.
        parts = self._sought.split(text)
        return "".join(
            part if number % 2 else _replaced(part, table) for number, part in enumerate(parts)
        )


def _replaced(text: str, pairs: _Doubles) -> str:
    # A search for one character is so fast that a table for all of them would be slower.
    for old, new in pairs:
        if old in text:
            text = text.replace(old, new)
    return text


def _strings(value: Any) -> Iterator[str]:
    """Every string of a row, the names of nested values too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if not _IDENTIFIER.match(key):
                yield key
            yield from _strings(entry)


def _sought_strings(
    literals: Collection[str], specials: Collection[str], risky: Collection[str]
) -> re.Pattern[str] | None:
    """Strings with risky characters that a template may look for, and that no token can share
    a character with."""
    sought = {
        text
        for text in literals
        if any(character in text for character in risky)
        and not any(_can_overlap(text, special) for special in specials)
    }
    longest_first = sorted(sought, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if sought else None


def _can_overlap(text: str, special: str) -> bool:
    if text in special or special in text:
        return True
    return text.endswith(_heads(special)) or text.startswith(_tails(special))


def _heads(special: str) -> tuple[str, ...]:
    return tuple(special[:i] for i in range(1, len(special)))


def _tails(special: str) -> tuple[str, ...]:
    return tuple(special[i:] for i in range(1, len(special)))


def _risky_characters(special: str, constants: Collection[str]) -> set[str]:
    """Characters without which no message can have a part in the special token."""
    pieces, heads, tails = set(), _heads(special), _tails(special)
    has_head = has_tail = False
    for text in constants:
        if text and text != special and text in special:
            pieces.add(text)
        if text.endswith(heads):
            has_head = True
            pieces |= {head for head in heads if text.endswith(head)}
        if text.startswith(tails):
            has_tail = True
            pieces |= {tail for tail in tails if text.startswith(tail)}
    # Letters and numbers can also come from roles and from numbers, which are no messages.
    candidates = [
        character
        for character in special
        if not (character.isalnum() or character.isspace() or character in "+-.")
        and not any(character in piece for piece in pieces)
    ]
    if candidates:
        return {min(candidates, key=_commonness)}
    return set(special) if has_head and has_tail else {special[0], special[-1]}


def _commonness(character: str) -> int:
    """How much of a character is to be expected in messages: code has all of ASCII."""
    order = "|[]<>{}()/_"
    return -1 if not character.isascii() else order.find(character) % 1000
