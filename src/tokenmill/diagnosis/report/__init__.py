"""The report: one HTML file with everything in it, for a browser that is offline.

    page.py       the page: what it says first, the order of its parts, the look
    parts.py      the parts of a diagnosis as figures and tables
    runs.py       figures of what was brought along: a stall report, a training, a build
    figures.py    a figure: title, plot, legend, and its numbers as a table
    plots.py      bars, lines and columns as SVG
    scales.py     from values to places, and round numbers for axes
    markup.py     tags and escaping: every text of the user goes through it

There is no script in it, and a policy in its head forbids the browser to load anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.diagnosis.report.page import render

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.diagnosis.values import Diagnosis


def write_report(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page."""
    path.write_text(render(diagnosis), encoding="utf-8")
