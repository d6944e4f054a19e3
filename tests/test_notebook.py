"""What a notebook shows of values and of work, in a real kernel and a real browser."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.browser import browser, tab
from tests.once import once

import tokenmill
from tokenmill import notebook, options
from tokenmill.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.markup import Shown

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \u202eabc\x1b[31m"
WORDS = [HOSTILE, "\u05e9\u05dc\u05d5\u05dd", "", *(f"text {n} " * (n % 40) for n in range(100))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, whose name and texts are hostile, and its annotation."""

    def make(root: Path) -> Path:
        lines = [{"text": text, "lang": "en" if n % 2 else None} for n, text in enumerate(WORDS)]
        (root / "<b>.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokenmill.build(root, tokenizer="bytes", out=root / "<i>st", val=0.1, serial=True)
        tokenmill.annotate(root / "<i>st", columns="lang")
        return root

    return once(tmp_path_factory, "notebook", make)


@pytest.fixture
def store(folder: Path) -> Iterator[tokenmill.Store]:
    with tokenmill.Store(folder / "<i>st") as opened:
        yield opened


def shown(folder: Path) -> dict[str, Shown]:
    """A value of each kind that is drawn, by the name of its class."""
    store = tokenmill.Store(folder / "<i>st")
    mixture = tokenmill.Mixture(
        {"<u>a": (store, 0.7), "b": (store, 0.3)},
        stages=[tokenmill.Stage(tokens=1000), tokenmill.Stage(seq_len=64)],
    )
    loader = tokenmill.Loader(mixture, seq_len=32, batch_size=4, packing="pad")
    built = tokenmill.build(
        folder / "<b>.jsonl", tokenizer="bytes", out=folder / "other", serial=True
    )
    planned = tokenmill.plan(folder / "<b>.jsonl", tokenizer="bytes", serial=True)
    values: list[Shown] = [
        store,
        store.head(3),
        mixture,
        loader,
        loader.batch(0),
        built,
        planned,
        tokenmill.layout(store, seq_len=64, batch_size=8),
        tokenmill.verify(folder / "<i>st"),
        tokenmill.export(folder / "<i>st", to="nanogpt", out=folder / "exported", split="val"),
        tokenmill.select(folder / "<i>st", where="tokens > 9", out=folder / "long.view"),
        tokenmill.dedup(folder / "<i>st", out=folder / "unique.view"),
        tokenmill.inspect(folder / "<i>st", doc=0),
        tokenmill.inspect(folder / "<i>st", by="lang"),
        tokenmill.inspect(folder / "<i>st"),
        tokenmill.grep(folder / "<i>st", "<script>"),
        tokenmill.annotate(folder / "other", columns="kind=lang"),
        tokenmill.import_(
            folder / "exported", tokenizer="bytes", out=folder / "in", split_at_eos=True
        ),
    ]
    for value in values:  # of a kind that is there more than once too
        assert len(value._repr_html_()) < 20_000
    return {type(value).__name__: value for value in values}


class Tags(HTMLParser):
    """The tags and attributes of HTML, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_kind_of_value_is_drawn_without_markup_of_others(folder: Path) -> None:
    values = shown(folder)
    assert {*values} | {"Diagnosis", "TrainResult"} == {*notebook.CARDS}
    for name, value in values.items():
        html = value._repr_html_()
        found = Tags(html)
        assert not found.open, name
        known = {"div", "style", "p", "strong", "dl", "dt", "dd", "br", "span", "table", "thead"}
        assert found.tags <= known | {"tbody", "tr", "th", "td"}, name
        attributes = {"class", "style", "title", "role", "aria-label", "scope"}
        assert found.attributes <= attributes, name
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html), name
        assert "<i>st" not in html
        assert len(html) < 20_000, name
        for text in (repr(value), str(value)):
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), name
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in values["Head"]._repr_html_()


def test_a_line_and_print_say_the_same_as_the_command_line(folder: Path) -> None:
    report = tokenmill.layout(folder / "<i>st", seq_len=64)
    assert repr(report).startswith("LayoutReport(")
    assert len(repr(report).splitlines()) == 1
    rows = {account.packing: account.rows for account in report.accounts}
    for packing, number in rows.items():
        assert re.search(rf"^{packing} +{number} ", str(report), re.MULTILINE)
    built = tokenmill.build(
        folder / "<b>.jsonl", tokenizer="bytes", out=folder / "again", serial=True
    )
    assert repr(built).startswith(f"BuildResult({str(folder / 'again')!r}): 99 documents, ")
    assert "documents   99 of 103 rows (4 empty)\n" in str(built)


def test_a_batch_is_drawn_to_scale_in_a_browser(folder: Path, tmp_path: Path) -> None:
    store = tokenmill.Store(folder / "<i>st")
    batches = [
        tokenmill.Loader(store, seq_len=64, batch_size=8, packing=packing).batch(1)
        for packing in ("concat", "pad")
    ]
    page = tmp_path / "page.html"
    outside = "<table id=other><tr><td>untouched</td></tr></table>"
    page.write_text(
        "<!doctype html><meta charset=utf-8><body data-jp-theme-light='false'>"
        + "".join(batch._repr_html_() for batch in batches)
        + store.head(2)._repr_html_()
        + outside
    )
    measure = """[...document.querySelectorAll('.row')].map(row => [...row.children].map(part => [
        part.className, part.getBoundingClientRect().left - row.getBoundingClientRect().left,
        part.getBoundingClientRect().width, row.getBoundingClientRect().width]))"""
    look = "[...document.querySelectorAll('%s')].map(e => getComputedStyle(e)['%s'])"
    with browser() as address, tab(address) as opened:
        opened.resize(width=900)
        opened.open(page.as_uri())
        rows = opened.evaluate(measure)
        dark = opened.evaluate(look % (".tokenmill", "color"))
        opened.evaluate("document.body.setAttribute('data-jp-theme-light', 'true')")
        light = opened.evaluate(look % (".tokenmill", "color"))
        other = opened.evaluate(look % ("#other, #other td, body", "borderCollapse"))
        margin = opened.evaluate(look % ("body", "marginLeft"))
        assert opened.evaluate("document.scripts.length + document.images.length") == 0
        assert opened.seen.problems == []
        assert [each for each in opened.seen.requests if each != page.as_uri()] == []
    drawn = iter(rows)
    for batch in batches:
        ids = batch.doc_ids
        for place in range(len(ids)):
            parts, at = next(drawn), 0.0
            whole = parts[0][-1]
            for kind, left, width, _ in parts:
                assert left == pytest.approx(at, abs=0.2)
                assert kind in ("part", "padding")
                at += width
            assert at == pytest.approx(whole, abs=0.2)
            # 64 of the 65 places are inputs.
            padding = sum(width for kind, _, width, _ in parts if kind == "padding") / whole
            assert padding == pytest.approx((ids[place] < 0).mean(), abs=1.5 / 65)
    assert any(kind == "padding" for parts in rows for kind, *_ in parts)
    assert (len(set(dark)), len(set(light))) == (1, 1)
    assert dark != light
    assert set(other) == {"separate"}
    assert margin == ["8px"]


def test_what_is_drawn_is_read_from_nowhere_and_moves_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "<i>st", tmp_path / "st")
    store = tokenmill.Store(tmp_path / "st")
    loader = tokenmill.Loader(store, seq_len=32, batch_size=4)
    batch = next(iter(loader))
    untouched = tokenmill.Store(tmp_path / "st")
    values = (untouched, store, loader, loader.mixture, batch)
    before = [pickle.dumps(each) for each in values]
    threads, state = threading.active_count(), loader.state_dict()
    for name in ("shards", "tokenizer", "rejects"):
        shutil.rmtree(tmp_path / "st" / name, ignore_errors=True)
    for each in values:
        assert each._repr_html_()
        assert repr(each)
    assert [pickle.dumps(each) for each in values] == before
    assert (threading.active_count(), loader.step) == (threads, 1)
    assert loader.state_dict() == state
    again = pickle.loads(before[-1])
    assert again._repr_html_() == batch._repr_html_()


def test_a_slice_of_a_store_is_the_documents_of_it(store: tokenmill.Store) -> None:
    for wanted in (slice(0, 3), slice(-2, None), slice(5, 1, -2), slice(7, 7), slice(90, 10**9)):
        found = store[wanted]
        assert len(found) == len(range(len(store))[wanted])
        for number, ids in zip(range(len(store))[wanted], found, strict=True):
            np.testing.assert_array_equal(ids, store[number])
    with pytest.raises(TypeError):
        store["0"]  # type: ignore[call-overload]


def test_the_head_of_a_store_is_its_first_documents(store: tokenmill.Store) -> None:
    head = store.head(3)
    assert [row["document"] for row in head] == [0, 1, 2]
    for row in head:
        number = row["document"]
        origin = store.source(number)
        assert row["text"] == store.decode(number)
        assert row["tokens"] == len(store[number])
        assert (row["source"], row["row"], row["split"]) == (origin.path, origin.row, "train")
        assert row["lang"] == ("en" if origin.row % 2 else None)
    assert "text" not in store.head(1, text=False)[0]
    assert len(store.head(10**9)) == len(store)
    assert store.head(0) == []


def test_a_store_is_a_frame_of_pandas(folder: Path, store: tokenmill.Store) -> None:
    pandas = pytest.importorskip("pandas")
    frame = store.to_pandas()
    assert list(frame.columns) == ["text", "tokens", "source", "row", "split", "lang"]
    assert frame.index.name == "document"
    assert list(frame.index) == list(range(len(store)))
    assert frame["tokens"].sum() == store.num_tokens
    assert list(frame["text"]) == [store.decode(number) for number in range(len(store))]
    assert frame["lang"].isna().sum() == (frame["row"] % 2 == 0).sum()
    assert set(frame.loc[frame["row"] % 2 == 1, "lang"]) == {"en"}
    some = store.to_pandas([7, 2, 7], text=False)
    assert (list(some.index), list(some.columns)) == ([7, 2, 7], list(frame.columns)[1:])
    pandas.testing.assert_series_equal(some["row"], frame["row"][[7, 2, 7]])
    assert list(store.to_pandas(slice(2, 4)).index) == [2, 3]
    view = store.select("tokens > 30").to_pandas()
    assert list(view["text"]) == list(frame[frame["tokens"] > 30]["text"])
    whole = tokenmill.Store(folder / "<i>st", split=None).to_pandas()
    assert set(whole["split"]) == {"train", "val"}
    with pytest.raises(IndexError):
        store.to_pandas([len(store)])


def test_without_pandas_the_error_names_what_brings_it(folder: Path) -> None:
    program = (
        "import sys; sys.modules['pandas'] = None; import tokenmill;"
        f"tokenmill.Store({str(folder / '<i>st')!r}).to_pandas()"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert issubclass(MissingExtraError, ImportError)
    said = "to_pandas needs the package 'pandas', which is not installed; install it with: pip"
    assert f"{said} install 'tokenmill[pandas]'" in run.stderr.splitlines()[-1]


def test_every_verb_that_tells_how_far_it_is_has_a_view() -> None:
    verbs = {
        name
        for name in tokenmill.__all__
        if inspect.isfunction(verb := getattr(tokenmill, name))
        and {*options.LISTENERS} & {*inspect.signature(verb).parameters}
    }
    assert verbs - {"export_store", "import_store"} == {*notebook.VIEWS}


def test_a_program_shows_progress_on_a_terminal_and_nowhere_else(
    folder: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, tokenmill; tokenmill.build(sys.argv[1], tokenizer='bytes', serial=True,"
        " out=sys.argv[2], **eval(sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, str(folder / "<b>.jsonl")]
    for given, is_shown in (("{}", True), ("{'on_progress': lambda *_: None}", False)):
        near, far = pty.openpty()
        out = str(tmp_path / f"shown-{is_shown}")
        subprocess.run([*command, out, given], stdout=far, stderr=far, check=True)
        os.close(far)
        seen = b""
        try:
            while data := os.read(near, 4096):
                seen += data
        except OSError:  # all was read
            pass
        os.close(near)
        assert (b"planning" in seen) == is_shown
    piped = subprocess.run([*command, str(tmp_path / "p"), "{}"], capture_output=True, check=True)
    assert (piped.stdout, piped.stderr) == (b"", b"")


TUTORIAL = Path(__file__).parents[1] / "examples/tutorial.ipynb"


def run_cells(page: Any, folder: Path, *, allow_errors: bool = False) -> list[Any]:
    """Run a notebook in a kernel of its own; the outputs of its cells of code."""
    client = pytest.importorskip("nbclient").NotebookClient
    where = {"metadata": {"path": str(folder)}}
    client(page, timeout=120, allow_errors=allow_errors, resources=where).execute()
    return [cell["outputs"] for cell in page["cells"] if cell["cell_type"] == "code"]


def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    page = nbformat.read(TUTORIAL, as_version=4)
    nbformat.validate(page)
    for cell in page["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    outputs = [each for some in run_cells(page, tmp_path) for each in some]
    drawn = [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]
    titles = [
        "Plan of a build",
        "Store &#x27;",
        "the first 3",
        "Rows of 256 tokens",
        "Batch of step",
    ]
    for title in (*titles, "Training", "View", "Export", "Verification"):
        assert any(title in each for each in drawn), title
    assert "choose another out=" in str(outputs[-1])
    assert [each.name for each in tmp_path.iterdir()] == ["tutorial"]
    assert tokenmill.Store(tmp_path / "tutorial/store").num_documents > 500


CELLS = {
    "quiet": "import tokenmill",
    "shown": "store = tokenmill.Store('st'); store",
    "short": "tokenmill.layout('st', seq_len=64)",
    "long": (
        "from tokenmill import notebook\n"
        "notebook.SHORT_SECONDS = 0.0\n"
        "built = tokenmill.build('data.jsonl', tokenizer='bytes', out='new', workers=1)"
    ),
    "verified": "found = tokenmill.verify('new')",
    "stopped": "tokenmill.build('data.jsonl', tokenizer='bytes', out='x', text_field='no')",
    "wrong": "tokenmill.build('nothing', tokenizer='bytes', out='y')",
    "other": "tokenmill.build('data.jsonl', tokenizer='bytes', out='new', val=0.5)",
    "method": "store.select('none == 1')",
    "inside": "def mine():\n    return tokenmill.Store('nothing')\nmine()",
}


def test_a_kernel_shows_values_progress_and_short_errors(folder: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    shutil.copytree(folder / "<i>st", tmp_path / "st")
    shutil.copy(folder / "<b>.jsonl", tmp_path / "data.jsonl")
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS.values()])
    outputs = dict(zip(CELLS, run_cells(page, tmp_path, allow_errors=True), strict=True))
    assert outputs["quiet"] == []
    (value,) = outputs["shown"]
    assert value["data"]["text/html"].startswith('<div class="tokenmill">')
    assert value["data"]["text/plain"].startswith("Store(")
    (value,) = outputs["short"]  # no bar for what takes no time
    assert value["output_type"] == "execute_result"
    (drawn,) = outputs["long"]
    assert re.search(r"build: done after [\d.]+ s", drawn["data"]["text/html"])
    (drawn,) = outputs["verified"]
    assert "verify: done after" in drawn["data"]["text/html"]
    drawn, error = outputs["stopped"]
    assert "build: stopped after" in drawn["data"]["text/html"]
    for name, words in (
        ("wrong", "input 'nothing' matches no file"),
        ("other", "hint: choose another out=, or replace the old units with rebuild=True"),
        ("inside", "mine()"),
        ("method", "has no column 'none'"),
        ("stopped", "correct text_field="),
    ):
        (error,) = [each for each in outputs[name] if each["output_type"] == "error"]
        plain = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(error["traceback"]))
        assert words in plain
        assert len(plain.splitlines()) < 25, plain
        assert "tokenmill/" not in plain
        assert "direct cause" not in plain
