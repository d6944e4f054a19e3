"""The report as a browser sees it. Needs Chromium: see browser.py."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.browser import browser, look

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import Case

MEASURE = """
(() => {
  const box = element => {
    const at = element.getBoundingClientRect();
    return {left: at.left, right: at.right, top: at.top, bottom: at.bottom,
            width: at.width, height: at.height};
  };
  return {
    plots: [...document.querySelectorAll("svg")].map(svg => ({
      box: box(svg),
      label: svg.getAttribute("aria-label"),
      texts: [...svg.querySelectorAll("text")].map(text => ({...box(text),
        words: text.textContent, size: parseFloat(getComputedStyle(text).fontSize)})),
      shapes: svg.querySelectorAll("rect, path, circle").length,
    })),
    page: document.documentElement.scrollWidth,
    window: document.documentElement.clientWidth,
    ink: getComputedStyle(document.body).color,
    paper: getComputedStyle(document.body).backgroundColor,
    tables: [...document.querySelectorAll("details")].map(details => {
      details.open = true;
      return box(details.querySelector("table, pre")).height;
    }),
  };
})()
"""


def brightness(colour: str) -> float:
    """From 0, black, to 255, of 'rgb(r, g, b)'."""
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_plots_are_there_and_in_their_place(
    case: Case, address: str, width: int, dark: bool
) -> None:
    seen = look(address, case.report, width=width, dark=dark, expression=MEASURE)
    found: dict[str, Any] = seen.value
    assert seen.problems == []
    assert seen.requests == [case.report.as_uri()]
    assert found["page"] <= found["window"], "the page is wider than the window"
    assert len(found["plots"]) == 5
    for plot in found["plots"]:
        assert plot["box"]["width"] > min(width, 500) * 0.6, plot["label"]
        assert plot["box"]["height"] > 100
        assert plot["shapes"] > 2, plot["label"]
        for text in plot["texts"]:
            assert text["left"] >= plot["box"]["left"] - 1, text
            assert text["right"] <= plot["box"]["right"] + 1, text
            assert text["bottom"] <= plot["box"]["bottom"] + 1, text
    assert all(height > 20 for height in found["tables"])
    assert brightness(found["paper"]) > 200 or dark
    assert brightness(found["paper"]) < 60 or not dark
    assert abs(brightness(found["paper"]) - brightness(found["ink"])) > 120


def test_rows_of_figures_have_no_holes(case: Case, address: str) -> None:
    rows = """
    [...document.querySelectorAll(".figures")].map(grid => [grid.getBoundingClientRect(),
      ...[...grid.querySelectorAll(":scope > figure")].map(each => each.getBoundingClientRect())]
      .map(({left, right, top}) => [left, right, top]))
    """
    seen = look(address, case.report, width=1400, expression=rows)
    grids = 0
    for (left, right, _), *figures in seen.value:
        ends = {top: max(end for _, end, at in figures if at == top) for _, _, top in figures}
        begins = {top: min(begin for begin, _, at in figures if at == top) for top in ends}
        assert all(abs(end - right) < 2 for end in ends.values())
        assert all(abs(begin - left) < 2 for begin in begins.values())
        grids += len(figures) > 1
    assert grids


def test_names_at_a_bar_do_not_run_into_its_number(case: Case, address: str) -> None:
    seen = look(address, case.report, width=400, expression=MEASURE)
    texts = seen.value["plots"][0]["texts"]
    names = {way.title: way for way in case.found.ways}
    rows = [text for text in texts if text["words"] in names]
    assert len(rows) == len(names)
    for row in rows:
        beside = [t for t in texts if abs(t["top"] - row["top"]) < 2 and t["left"] > row["left"]]
        assert beside
        assert all(other["left"] > row["right"] for other in beside)


def test_a_script_in_a_name_is_shown_and_not_run(tmp_path: Path, address: str) -> None:
    import tokenmill

    run = tmp_path / "<script>document.title='run'</script>"
    run.mkdir(parents=True)
    lines = [{"step": step, "loss": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = tmp_path / "report.html"
    tokenmill.diagnose(run=run, report=report)
    seen = look(address, report, width=800, expression="document.title")
    assert seen.value == "What the run says"
    assert seen.problems == []


def test_the_browser_tells_what_is_wrong_with_a_page(tmp_path: Path, address: str) -> None:
    page = tmp_path / "wrong.html"
    page.write_text("<img src='absent.png'><script>console.error('no'); null.x</script>")
    seen = look(address, page, width=800)
    assert any("absent.png" in url for url in seen.requests)
    assert len(seen.problems) >= 3
