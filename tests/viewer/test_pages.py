"""Every page in Chromium, with texts and names that mean harm."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.browser import screens, tab
from tests.pages import DOCS, PICTURE, picture

import tokenmill
from tokenmill.store.layout import StoreLayout, StoreLock

from .conftest import HOSTILE, plan_of, write_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.browser import Tab

    from .conftest import Viewer

PAGES = ("overview", "documents", "batches", "runs", "builds")
SIZES = [(400, True), (400, False), (1400, True), (1400, False), (2000, True)]
# Whether letters stand out from what is below them, as WCAG 2 AA wants it; what does not is told.
CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const pixel = colours => {
    canvas.fillStyle = "white"; canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = rgb => rgb.map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].filter(node => node.nodeType === 3 && node.data.trim());
    const style = getComputedStyle(element);
    if (!words.length || !element.checkVisibility()) continue;
    if (element.matches(":disabled, option")) continue;
    const below = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") below.unshift(colour);
    }
    const [one, other] = [light(pixel([...below, style.color])), light(pixel(below))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24;
    if (ratio < (isLarge ? 3 : 4.5)) found.push([words[0].data, ratio, element.className]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def page(viewer: Viewer, chromium: str) -> Iterator[Tab]:
    """The page in a tab. When all tests are done, it must have asked for nothing of elsewhere."""
    with tab(chromium) as opened:
        opened.resize(width=1400)
        opened.open(viewer.address)
        yield opened
        assert opened.seen.problems == []
        home = f"http://127.0.0.1:{viewer.port}/"
        assert all(url.startswith((home, "data:")) for url in opened.seen.requests)


def go(page: Tab, where: str) -> None:
    """Open a part of the page and wait until it is drawn, answers and all."""
    page.evaluate(f"location.hash = '#{where}'")
    page.wait(f"document.body.dataset.shown === '#{where}'")
    page.wait("![...document.querySelectorAll('main .soft')].some(at => at.textContent === '…')")


def text_of(page: Tab, query: str) -> str:
    return str(page.wait(f"document.querySelector({query!r})?.textContent"))


@pytest.mark.parametrize(("width", "dark"), SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_can_be_read(page: Tab, name: str, width: int, dark: bool) -> None:
    page.resize(width=width, dark=dark)
    go(page, name)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRAST) == []
    theme = "dark" if dark else "light"
    (screens() / f"{name}-{width}-{theme}.png").write_bytes(page.screenshot())


def test_tiles_fill_their_rows(page: Tab) -> None:
    go(page, "overview")
    holes = """
    [...document.querySelectorAll(".tiles")].filter(tiles => {
      const end = tiles.getBoundingClientRect().right, rows = {};
      for (const tile of tiles.children) {
        const {top, right} = tile.getBoundingClientRect();
        rows[top] = Math.max(rows[top] ?? 0, right);
      }
      return Object.values(rows).some(right => right < end - 2);
    }).length
    """
    for width in (400, 560, 720, 1400):
        page.resize(width=width)
        assert page.evaluate("document.querySelectorAll('.tile').length") > 4
        assert page.evaluate(holes) == 0, width


def test_charts_have_the_colours_of_the_theme(page: Tab) -> None:
    grid = "getComputedStyle(document.documentElement).getPropertyValue('--line')"
    colours = (
        "[...document.querySelectorAll('.chart canvas')].map(canvas => "
        "[...canvas.getContext('2d').getImageData(70, 0, 1, canvas.height).data].join())"
    )
    page.resize(width=1400)
    go(page, "overview")
    page.wait("document.querySelectorAll('.chart canvas').length === 2")
    assert page.evaluate(grid)
    light = page.evaluate(colours)
    page.press("t")
    dark = page.evaluate(colours)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    page.press("t")
    assert page.evaluate(colours) == light


def test_the_overview_says_what_is_there(page: Tab) -> None:
    page.resize(width=1400)
    go(page, "overview")
    assert "rejected" in text_of(page, ".tiles")
    assert page.wait("document.querySelectorAll('.chart canvas').length === 2")
    # The heading of a column sorts by it, and the other way round when it is pressed again.
    first = "document.querySelector('tbody th').textContent"
    press = "document.querySelectorAll('thead button')[1].click()"
    page.evaluate(press)
    most = page.evaluate(first)
    page.evaluate(press)
    assert page.evaluate(first) != most
    assert '{"broken' in text_of(page, "main")


def test_hostile_texts_are_shown_and_do_nothing(page: Tab) -> None:
    page.resize(width=1400)
    go(page, "documents?source=0")
    first = int(page.evaluate("document.querySelector('[aria-current][data-n]').dataset.n"))
    for place, text in enumerate(HOSTILE):
        go(page, f"documents?source=0&n={first + place}")
        shown = text_of(page, "#text")
        # What would act on who reads it is written as an escape.
        for character in text:
            seen = character if character.isprintable() or character == "\u200d" else "\\"
            assert seen in shown
        assert not set(shown) & set("\x1b\x07\x00\u202e\u2066")
        pieces = text_of(page, "#tokens")
        assert not set(pieces) & set("\x1b\x07\x00\u202e\u2066")
        (screens() / f"hostile-{place}.png").write_bytes(page.screenshot())
    assert page.evaluate("document.title") == "Documents · tokenmill"
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    go(page, f"documents?source=0&n={first + 2}")  # from right to left
    assert page.evaluate("getComputedStyle(document.querySelector('#tokens')).direction") == "rtl"


def test_a_document_of_10_mb_comes_in_parts(page: Tab) -> None:
    go(page, "documents?source=0&least=100000")
    assert page.evaluate("document.querySelectorAll('#tokens .t').length") == 2000
    page.press("n")
    page.wait("document.querySelector('.turn + .turn').textContent.includes('2,000 to 4,000')")
    page.press("p")
    page.wait("document.querySelector('.turn + .turn').textContent.includes('tokens 0 to')")


def test_ids_and_the_row_are_shown_when_asked_for(page: Tab) -> None:
    go(page, "documents?n=0")
    hidden = "getComputedStyle(document.querySelector('#tokens small')).display"
    assert page.evaluate(hidden) == "none"
    page.evaluate("document.querySelector('article input[type=checkbox]').click()")
    assert page.evaluate(hidden) == "block"
    page.evaluate("document.querySelector('article input[type=checkbox]').click()")
    page.evaluate("[...document.querySelectorAll('article button')].at(-1).click()")
    assert text_of(page, "#row") == text_of(page, "#text")


def test_search_and_filters_are_in_the_address(page: Tab) -> None:
    go(page, "documents")
    page.press("/")
    page.wait("document.activeElement.id === 'search'")
    page.evaluate(
        "(s => { s.value = 'src=x onerror'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#search'))"
    )
    page.wait("location.hash.includes('text=src%3Dx+onerror')")
    page.wait("document.querySelectorAll('.list li').length === 1")
    assert "onerror" in text_of(page, "#text")
    page.evaluate("history.back()")
    page.wait("document.querySelectorAll('.list li').length > 20")


def field(label: str) -> str:
    """Where the field with a label is."""
    all_fields = "[...document.querySelectorAll('label.field')]"
    found = f"{all_fields}.find(at => at.textContent.startsWith({label!r}))"
    return f"{found}.querySelector('input, select')"


def write(page: Tab, label: str, value: str) -> None:
    act = f"at => {{ at.value = {value!r}; at.dispatchEvent(new Event('change')); }}"
    page.evaluate(f"({act})({field(label)})")


def test_every_field_of_the_list_chooses_documents(page: Tab, viewer: Viewer) -> None:
    page.resize(width=1400)
    store = tokenmill.Store(viewer.folder / "store", split=None)
    val = store.manifest.splits["val"].documents
    for label, value, what, number in (
        ("Split", "val", "split=val", val),
        ("Source", "0", "source=0", len(HOSTILE) + 2),
        ("Tokens, at least", "100000", "least=100000", 1),
        ("Where", "lang == 'py'", "where=lang", None),
        ("From number", str(len(store) - 3), "first=", 3),
    ):
        go(page, "documents")
        write(page, label, value)
        page.wait(f"decodeURIComponent(location.hash).includes({what!r})")
        if number is None:
            wanted = store.select("lang == 'py'").num_documents
            number = min(wanted, 50)
            assert wanted
        page.wait(f"document.querySelectorAll('.list li').length === {number}")
    go(page, "documents")
    write(page, "Where", "tongue == 'c'")
    assert "tongue" in text_of(page, ".list .problem")
    assert "400" in page.seen.problems.pop()


def test_a_document_says_where_it_is_from_and_shows_its_special_tokens(
    page: Tab, viewer: Viewer
) -> None:
    number = viewer.ask("documents", source=1)["documents"][0]["number"]
    go(page, f"documents?n={number}")
    facts = text_of(page, "article .facts")
    for word in ("from", "row", "split", "tokens", "lang"):
        assert word in facts
    assert page.evaluate("document.querySelectorAll('#tokens .special').length") == 1
    assert "<|endoftext|>" in text_of(page, "#tokens .special")
    # Text and tokens are beside each other, and say the same.
    top = "at => at.getBoundingClientRect().top"
    left, right = page.evaluate(f"[...document.querySelectorAll('.sides > section')].map({top})")
    assert left == right


def test_every_field_of_batches_changes_what_is_drawn(page: Tab) -> None:
    go(page, "batches?seq_len=128")
    page.wait("document.querySelectorAll('.rank').length === 2")
    drawn = "[...document.querySelectorAll('.part')].map(at => at.title).join()"
    for label, value, what in (
        ("Sequence length", "64", "seq_len=64"),
        ("Packing", "best-fit", "packing=best-fit"),
        ("Shuffle", "nearby", "shuffle=nearby"),
        ("Shuffle", "none", "shuffle=none"),
        ("Split", "val", "split=val"),
        ("Split", "train", "split=train"),
        ("Ranks", "3", "ranks=3"),
        ("Rows per rank", "2", "rows=2"),
        ("Seed", "7", "seed=7"),
    ):
        before = page.evaluate(drawn)
        write(page, label, value)
        page.wait(f"location.hash.includes({what!r})")
        if label != "Seed":  # which decides nothing where nothing is shuffled
            page.wait(f"{drawn} !== {before!r}")
    assert page.evaluate("document.querySelectorAll('.rank').length") == 3
    assert page.evaluate("document.querySelectorAll('.packed').length") == 6
    # These end differently, so they cannot be mixed; one can be drawn in the place of the other.
    write(page, "weight of chats", "1")
    assert "end differently" in text_of(page, ".problem")
    assert "400" in page.seen.problems.pop()
    write(page, "weight of store", "0")
    page.wait("location.hash.includes('weights=0%2C1')")
    page.wait("document.querySelector('.packed .soft')?.textContent.includes('chats')")
    write(page, "weight of chats", "0.5")
    page.evaluate("document.querySelector('#balance').click()")
    page.wait("location.hash.includes('balance=true')")
    write_step = "at => { at.value = 2; at.dispatchEvent(new Event('change')); }"
    page.evaluate(f"({write_step})(document.querySelector('.slide input[type=number]'))")
    page.wait("document.querySelector('.rank ~ .note').textContent.startsWith('Step 2')")


def test_the_bar_turns_pages_stores_and_light(page: Tab) -> None:
    go(page, "overview")
    page.evaluate("document.querySelector('#bar nav a[href^=\"#documents\"]').click()")
    page.wait("!!document.querySelector('.list li')")
    act = "at => { at.value = '1'; at.dispatchEvent(new Event('change')); }"
    page.evaluate(f"({act})(document.querySelector('#bar select'))")
    page.wait("location.hash.includes('of=1')")
    page.wait("!!document.querySelector('#tokens .off')")
    page.evaluate("document.querySelector('#theme').click()")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.evaluate("document.querySelector('#theme').click()")
    page.evaluate("document.querySelector('#bar .tools button:last-child').click()")
    assert page.wait("document.querySelector('#help').open")
    page.evaluate("document.querySelector('#help button').click()")
    page.wait("!document.querySelector('#help').open")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_printed_dark_on_white_and_whole(page: Tab, name: str) -> None:
    page.resize(width=1400, dark=True)
    go(page, name)
    page.resize(width=720, dark=True, paper=True)
    try:
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert page.evaluate("getComputedStyle(document.querySelector('#bar')).display") == "none"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CONTRAST) == []
        # Bars and tokens are backgrounds, which browsers leave out unless told; lists are not cut.
        style = "getComputedStyle(document.querySelector('main')).printColorAdjust"
        assert page.evaluate(style) == "exact"
        cut = "[...document.querySelectorAll('.list, .list ol')].some(at => {})"
        assert not page.evaluate(cut.format("at.scrollHeight > at.clientHeight + 1"))
        (screens() / f"{name}-print.png").write_bytes(page.screenshot())
        sheets = page.send("Page.printToPDF")["data"]
        assert len(sheets) > 5_000
    finally:
        page.resize(width=1400)


def test_keys_turn_pages_and_documents(page: Tab) -> None:
    go(page, "overview")
    page.press("2")
    page.wait("!!document.querySelector('[aria-current][data-n=\"0\"]')")
    page.press("j")
    page.wait("!!document.querySelector('[aria-current][data-n=\"1\"]')")
    page.press("k")
    page.wait("!!document.querySelector('[aria-current][data-n=\"0\"]')")
    page.press("t")
    assert page.wait("document.documentElement.dataset.theme") == "dark"
    page.press("t")
    page.press("?")
    assert page.wait("document.querySelector('#help').open")
    page.evaluate("document.querySelector('#help').close()")


def test_the_list_goes_on_as_it_is_scrolled(page: Tab) -> None:
    go(page, "documents")
    before = page.wait("document.querySelectorAll('.list li').length")
    assert before < 200
    ended = "document.querySelector('.list .end').textContent"
    for _ in range(10):
        page.evaluate(
            "(o => { o.scrollTop = o.scrollHeight; })(document.querySelector('.list ol'))"
        )
        if not page.evaluate(f"{ended}.includes('More')"):
            break
        page.evaluate("document.querySelector('.list .end button')?.click()")
    shown = page.evaluate("document.querySelectorAll('.list li').length")
    assert shown >= before


def test_what_counts_for_the_loss_has_a_colour(page: Tab) -> None:
    go(page, "documents?of=1&n=0")
    counted = "document.querySelectorAll('#tokens .t:not(.off)').length"
    everything = "document.querySelectorAll('#tokens .t').length"
    assert 0 < page.wait(counted) < page.evaluate(everything)
    (screens() / "mask.png").write_bytes(page.screenshot())
    page.evaluate("document.querySelectorAll('article input[type=checkbox]')[1].click()")
    assert page.evaluate(counted) == page.evaluate(everything)
    page.evaluate("document.querySelectorAll('article input[type=checkbox]')[1].click()")


def test_batches_are_drawn_and_a_bar_leads_to_its_document(page: Tab) -> None:
    go(page, "batches?seq_len=128")
    page.wait("document.querySelectorAll('.rank').length === 2")
    assert page.evaluate("document.querySelectorAll('.packed').length") == 8
    # Bars are as long as what is in them: a row has 129 places.
    said, width = page.evaluate(
        "(bar => [bar.title, bar.getBoundingClientRect().width"
        " / bar.parentElement.getBoundingClientRect().width])(document.querySelector('.part'))"
    )
    first, last = (int(word.replace(",", "")) for word in said.split("tokens ")[1].split(" to "))
    assert width == pytest.approx((last - first) / 129, abs=0.01)
    before = text_of(page, ".rank")
    page.press("ArrowRight")
    page.wait(f"document.querySelector('.rank').textContent !== {before!r}")
    page.wait("location.hash.includes('step=1')")
    page.evaluate(
        "(s => { s.value = 3; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#step'))"
    )
    page.wait("document.querySelector('.rank ~ .note').textContent.startsWith('Step 3')")
    page.evaluate("document.querySelector('.part').click()")
    page.wait("location.hash.startsWith('#documents')")
    page.wait("!!document.querySelector('article h1')")


def test_packings_are_beside_each_other(page: Tab) -> None:
    go(page, "batches?seq_len=512&packing=pad&rows=2&ranks=3")
    page.wait("document.querySelectorAll('tbody tr').length === 3")
    assert page.wait("document.querySelectorAll('.padding').length") > 0
    assert text_of(page, "tr.chosen th") == "pad"
    go(page, "batches?seq_len=256&packing=best-fit&balance=true&ranks=4")
    page.wait("document.querySelectorAll('.rank').length === 4")
    go(page, "batches?ranks=9999")
    assert "can be shown" in text_of(page, ".problem")
    assert "400" in page.seen.problems.pop()  # the browser tells that it was refused


def test_runs_are_over_each_other_and_grow(page: Tab, viewer: Viewer) -> None:
    go(page, "runs")
    page.wait("document.querySelectorAll('.chart canvas').length >= 3")
    legend = "(document.querySelector('.u-legend')?.textContent ?? 'first')"
    assert "first" in page.evaluate(legend)
    assert "second" in page.evaluate(legend)
    assert "1.500" in text_of(page, "tbody")
    write_metrics(viewer.folder / "first", (3.0, 2.0, 1.5, 1.25))
    page.wait("document.querySelector('tbody').textContent.includes('1.250')")
    page.evaluate("document.querySelector('tbody input').click()")
    page.wait(f"!{legend}.includes('first')")
    # What comes later in a run is drawn too: here what was seen of the sources of a mixture.
    line = {"step": 9, "loss": 1.0, "tokens/<b>web</b>": 5e6, "tokens/code": 2e6}
    with (viewer.folder / "second" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")
    page.wait("document.querySelector('main').textContent.includes('Tokens of each source')")
    page.wait("document.querySelector('main').textContent.includes('<b>web</b>')")


def test_a_build_is_followed_until_it_is_a_store(page: Tab, viewer: Viewer) -> None:
    go(page, "builds")
    stopped = viewer.folder / "stopped"
    receipts = [*(stopped / "shards").glob("*.json")]
    squares = "document.querySelectorAll('.map i{}').length"
    assert page.wait(squares.format("")) == len(receipts) + 2
    assert page.evaluate(squares.format(".waiting")) == 2
    assert f"{len(receipts)} of {len(receipts) + 2}" in text_of(page, ".tiles")
    assert "not-a-string" in text_of(page, "main")
    assert page.wait("document.querySelectorAll('.chart canvas').length") >= 4
    # What was in work when the build ended is lost; with a build it is in work.
    staged = stopped / "tmp" / "new-0123456789abcdef-00000-12-0badf00d"
    staged.mkdir(parents=True)
    page.wait(f"{squares.format('.failed')} === 1")
    plan_of(viewer.folder / "store", stopped, failed="the disk is full")
    page.wait("document.querySelector('main').textContent.includes('the disk is full')")
    with StoreLock(StoreLayout(stopped), memory_bytes=3_000_000_000):
        page.wait(f"{squares.format('.working')} === 1")
        assert "3 GB" in text_of(page, ".tiles")
        page.wait("document.querySelector('main').textContent.includes('Memory, GB')")
    staged.rmdir()
    # What there is can be looked at; when the build is done it is the whole of it.
    page.evaluate("[...document.querySelectorAll('main .turn button')].at(-1).click()")
    page.wait("document.querySelector('h1')?.textContent.includes('so far')")
    go(page, "builds")
    shutil.copy(viewer.folder / "store" / "tokenmill.json", stopped)
    page.wait("document.querySelector('main').textContent.includes('It is done')")
    stores = {store["name"]: store["so_far"] for store in viewer.ask("about")["stores"]}
    assert stores == {"store": False, "chats": False, "stopped": False}


@pytest.mark.slow
def test_the_picture_in_the_readme_is_made_again_as_it_is(tmp_path: Path) -> None:
    made, kept = picture(tmp_path), PICTURE.read_bytes()
    assert f"]({PICTURE.relative_to(DOCS.parent)})" in (DOCS.parent / "README.md").read_text()
    assert made[:24] == kept[:24]  # the header of a PNG, with its size
    assert max(len(made), len(kept)) < 150_000


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_a_page_that_is_a_file_needs_nothing_else(
    shown: Path, tmp_path: Path, chromium: str, width: int, dark: bool
) -> None:
    out = tmp_path / "page.html"
    tokenmill.view([shown / "store", shown / "chats"], export=out)
    with tab(chromium) as file:
        file.resize(width=width, dark=dark)
        file.open(out.as_uri())
        file.wait("document.querySelectorAll('.chart canvas').length === 2")
        assert file.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert file.evaluate(CONTRAST) == []
        (screens() / f"file-{width}.png").write_bytes(file.screenshot())
        go(file, "documents")
        assert file.wait("document.querySelectorAll('.list li').length") > 10
        assert "onerror" in text_of(file, "#text")
        file.press("j")
        file.wait("location.hash.includes('n=')")
        go(file, "documents?of=1")
        file.wait("!!document.querySelector('#tokens .off')")
        assert (file.seen.problems, file.seen.requests) == ([], [out.as_uri()])
