"""A figure: what it shows, the plot, what the colours mean, and its numbers as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.diagnosis.report.markup import join, table, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.diagnosis.report.markup import Content, Markup

MOST_ROWS = 200
"""Of the table below a plot."""


def figure(
    title: str,
    plot: Markup,
    *,
    says: str = "",
    legend: Sequence[str] = (),
    headings: Sequence[str] = (),
    rows: Sequence[Sequence[Content]] = (),
) -> Markup:
    """A plot with everything that belongs to it."""
    parts: list[Markup] = [tag("h3", title)]
    if says:
        parts.append(tag("p", says, class_="says"))
    parts.append(plot)
    if len(legend) > 1:
        parts.append(
            tag(
                "ul",
                *(
                    tag("li", tag("i", class_=f"swatch c{number % 7 + 1}"), name)
                    for number, name in enumerate(legend)
                ),
                class_="legend",
            )
        )
    if rows:
        parts.append(_numbers(title, headings, rows))
    return tag("figure", join(parts))


def _numbers(title: str, headings: Sequence[str], rows: Sequence[Sequence[Content]]) -> Markup:
    every = -(-len(rows) // MOST_ROWS)
    shown = list(rows)[::every]
    less = f" (one in {every})" if every > 1 else ""
    return tag(
        "details",
        tag("summary", f"Numbers{less}", aria_label=f"Numbers of: {title}"),
        table(headings, shown),
    )
