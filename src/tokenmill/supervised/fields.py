"""Small templates: `{title}\\n\\n{body}` makes one text of several fields.

A name in braces is a field (dots reach into nested objects), a double brace is a brace, and all
else stands for itself. There is nothing more to it on purpose: no conversions, no formats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.errors import UsageError

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
