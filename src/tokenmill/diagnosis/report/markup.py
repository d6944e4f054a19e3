"""Tags, and text made safe for them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tokenmill.visible import visible_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Markup(str):
    """A string that is markup already; all others are text."""

    __slots__ = ()


Content = str | Markup


def tag(name: str, *children: Content, **attributes: object) -> Markup:
    """An element. `class_` is class, `_` in a name is `-`; text in it is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(map(safe, children))
    return Markup(f"<{name}{words}>{inner}</{name}>")


def safe(content: Content) -> Markup:
    """Markup as it is, text escaped."""
    return content if isinstance(content, Markup) else Markup(html.escape(visible_lines(content)))


def join(parts: Iterable[Content]) -> Markup:
    """One behind the other."""
    return Markup("".join(map(safe, parts)))


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Content]], **attributes: object
) -> Markup:
    """A table; columns behind the first are numbers, and stand on the right."""
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in headings)))
    body = tag(
        "tbody",
        *(
            tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
            for row in rows
        ),
    )
    return tag("div", tag("table", head, body), class_="scroll", **attributes)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible_lines(str(value))
