"""HTML: tags, text made safe for them, and the look that all pages have.

    diagnosis/page.py, viewer/server.py, notebook.py -> here

A class whose values a notebook draws is `Shown`; nothing is drawn, or imported, before it asks.

Whoever chose a text chose no markup: it is escaped, and what would act on its reader is visible.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

from tokenmill.visible import visible_lines

LOOK = Path(__file__).with_name("look.css")


class Markup(str):
    """A string that is markup already; all others are text."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. `class_` is class, `_` in a name is `-`; text in it is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(map(safe, children))}</{name}>")


def safe(content: str) -> Markup:
    """Markup as it is, text escaped."""
    return content if isinstance(content, Markup) else Markup(html.escape(visible_lines(content)))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible_lines(str(value))


def digest(text: str) -> str:
    """A script or style as the policy of its page names it."""
    found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{found}'"


class Shown:
    """A value that a notebook draws; what it draws is in `tokenmill.notebook`, imported for it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """HTML for a notebook, which asks for this by its name."""
        from tokenmill.notebook import html_of

        return html_of(self)


class Told(Shown):
    """A result: `print` gives its facts as lines."""

    __slots__ = ()

    def __str__(self) -> str:
        from tokenmill.notebook import text_of

        return text_of(self)
