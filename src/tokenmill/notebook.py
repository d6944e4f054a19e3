"""What a notebook shows: stores, batches and results as HTML, and how far a work has come.

    a value that is `markup.Shown` -> its card: a title, facts, tables, a drawing -> HTML, or lines
    a verb that was given no `on_progress` -> what the command line draws, in the cell

The facts are those of the command line (`cli.show`), and the look is that of every page
(look.css), here for a part of a page that others made: its rules are nested in one class, and the
theme is the notebook's. There is no script. A card costs what the manifest or the result says
already: nothing is read for it, and no loader moves.
"""

from __future__ import annotations

import contextlib
import re
import time
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.cli import output, show
from tokenmill.markup import LOOK, Markup, tag
from tokenmill.options import in_notebook, in_python
from tokenmill.store.facts import bytes_per_token
from tokenmill.visible import visible
from tokenmill.words import count, duration, format_size, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tokenmill.annotating import AnnotateResult
    from tokenmill.builder.progress import BuildResult
    from tokenmill.builder.run import BuildPlan
    from tokenmill.builder.verify import VerifyReport
    from tokenmill.diagnosis.values import Diagnosis
    from tokenmill.inspection import Inspection
    from tokenmill.interop.export import ExportResult
    from tokenmill.interop.imports import ImportResult
    from tokenmill.loader.batch import Batch
    from tokenmill.loader.loader import Loader
    from tokenmill.loader.mixture import Mixture
    from tokenmill.loader.packing import LayoutReport
    from tokenmill.markup import Shown
    from tokenmill.search import GrepResult
    from tokenmill.selection import DedupResult, ViewResult
    from tokenmill.store.documents import Head
    from tokenmill.store.reader import Store
    from tokenmill.trainer.options import TrainResult

    Row = tuple[str, str]

MOST_ROWS = 32  # of a batch
MOST_PARTS = 256  # of a row of a batch: more could not be told apart
MOST_SOURCES, MOST_TOPS = 5, 10
MOST_DOCUMENT = 4000  # characters of one that is shown by itself
MOST_TEXT, MOST_CELL = 240, 60  # characters of a cell, as HTML and in a line
HUES = 7


class Cells(NamedTuple):
    """Cells below headings; the first `names` columns are words, the others numbers."""

    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    names: int = 1

    def kind(self, column: int) -> str | None:
        """The class of a column's cells: texts may take several lines."""
        is_text = column == 0 if self.names == 1 else self.headings[column] == "text"
        return "name" if is_text else "left" if column < self.names else None


class Card(NamedTuple):
    """What is shown of a value."""

    title: str
    rows: Iterable[Row]
    tables: Sequence[Cells] = ()
    drawing: Markup = Markup("")
    notes: Sequence[str] = ()


def html_of(value: Shown) -> str:
    """A value for a notebook."""
    card = _card_of(value)
    facts = [
        part
        for name, text in _told(card.rows)
        for part in (tag("dt", name), tag("dd", *_lines(text)))
    ]
    parts = [
        tag("p", tag("strong", visible(card.title))),
        card.drawing,
        *map(_table, card.tables),
        *([tag("dl", *facts, class_="facts")] if facts else []),
        *(tag("p", in_python(note), class_="note") for note in card.notes),
    ]
    style = Markup(f"<style>{_style()}</style>")
    return tag("div", style, *parts, class_="tokenmill")


def text_of(value: Shown) -> str:
    """The same as lines."""
    card = _card_of(value)
    lines = [visible(card.title)]
    for name, text in _told(card.rows):
        for number, line in enumerate(text.split("\n")):
            lines.append(f"{'' if number else name:<{show.LABEL_COLUMNS}}{visible(line)}")
    for table in card.tables:
        cells = [[_cut(visible(cell), MOST_CELL) for cell in line] for line in table.cells]
        columns = show.in_columns([table.headings, *cells], names=table.names)
        lines += ["", *(line.rstrip() for line in columns)]
    return "\n".join((*lines, *(visible(in_python(note)) for note in card.notes)))


def _told(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that say something, in the words of Python."""
    return ((name, in_python(text)) for name, text in rows if text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _lines(text: str) -> list[str]:
    """Text with its ends of lines."""
    found: list[str] = []
    for line in text.split("\n"):
        found += [Markup("<br>"), line] if found else [line]
    return found


def _table(table: Cells) -> Markup:
    kinds = [*map(table.kind, range(len(table.headings)))]
    head = (
        tag("th", name, scope="col", class_=kind)
        for name, kind in zip(table.headings, kinds, strict=True)
    )
    body = (
        tag("tr", *(tag("td", c, class_=k) for c, k in zip(cells, kinds, strict=True)))
        for cells in table.cells
    )
    whole = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", whole, class_="scroll")


# The themes of JupyterLab and Notebook, VS Code, Colab; elsewhere that of the browser.
_DARK = '[data-jp-theme-light="false"] &, .vscode-dark &, .vscode-high-contrast &, [theme="dark"] &'
_LIGHT = '[data-jp-theme-light="true"] &, .vscode-light &, [theme="light"] &'
_OWN = f"""
{_LIGHT} {{ color-scheme: light; }}
{_DARK} {{ color-scheme: dark; }}
& {{ background: none; max-width: 1100px; font-size: 14px; padding: 2px 0 6px; }}
> * + * {{ margin-top: 8px; }}
table {{ width: auto; margin: 0; background: none; }}
tr, tr:nth-child(odd), tr:hover {{ background: none; }}
th, td {{ padding: 3px 18px 3px 0; color: var(--ink); max-width: 640px; }}
th.name, td.name {{ min-width: 0; }}
.left {{ text-align: left; }}
.name {{ unicode-bidi: plaintext; }}
> dl.facts {{ margin-top: 8px; }}
dl.facts dt {{ font-weight: 400; white-space: nowrap; }}
"""


@cache
def _style() -> Markup:
    """The look of pages for what is in `.tokenmill`, of a page that is not ours."""
    look = re.sub(r"/\*.*?\*/", "", LOOK.read_text(), flags=re.DOTALL)
    # What is said of the whole page is said of the part.
    look = re.sub(r"(:root|\bbody)(?=[\s\[])", "&", look)
    # Three times, to go before what the notebook has for tables and lists in its cells.
    part, rules = ".tokenmill" * 3, re.sub(r"\s+", " ", look + _OWN)
    return Markup(f"{part} {{{rules}}}")


# -------------------------------------------------------------------------------------------------
# How far a work has come.

SHORT_SECONDS = 0.3  # a work that is done by then shows nothing
REDRAW_SECONDS = 0.25
WIDTH = 96  # columns

# What the command line shows of each verb, by its name.
VIEWS: dict[str, Callable[[], Any]] = {
    "build": output.BuildView,
    "plan": output.BuildView,
    "finish": output.BuildView,
    "train": output.TrainView,
    "verify": lambda: output.AmountView("verifying"),
    "export": lambda: output.AmountView("exporting", "token"),
    "import_": lambda: output.AmountView("importing"),
    "convert": lambda: output.AmountView("converting", "token"),
    "layout": lambda: output.AmountView("planning", "document"),
    "grep": lambda: output.AmountView("searched", "token"),
    "diagnose": lambda: output.LineView(lambda at, of, what: f"[{at}/{of}] {what}", each=True),
}


@contextlib.contextmanager
def watch(verb: str) -> Iterator[Callable[..., None]]:
    """What a verb calls with each report: draws it in the cell, or live on the terminal."""
    view = VIEWS[verb]()
    if not in_notebook():
        with output.watch(view) as tell:
            yield tell
        return
    cell = _Cell(verb, view)
    try:
        yield cell
    except BaseException:
        cell.end("stopped")
        raise
    cell.end("done")


class _Cell:
    """A drawing below a cell. What is told before something is to be drawn costs nothing."""

    def __init__(self, verb: str, view: Any) -> None:
        self._verb, self._view = verb.rstrip("_"), view
        self._messages: list[str] = []
        self._began = time.monotonic()
        self._next = self._began + SHORT_SECONDS
        self._handle: Any = None

    def __call__(self, *report: Any) -> None:
        if (message := getattr(report[0], "message", None)) is not None:
            self._messages.append(message)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_SECONDS
            self._show(output.as_html(self._view.draw(*report, width=WIDTH), width=WIDTH))

    def _show(self, drawing: str) -> None:
        from IPython.display import display

        said = "".join(tag("div", message) for message in self._messages)
        drawn = {"text/html": said + drawing, "text/plain": ""}
        if self._handle is None:
            self._handle = display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)

    def end(self, how: str) -> None:
        if self._handle is not None or self._messages:
            took = duration(time.monotonic() - self._began)
            words = f"{self._verb}: {how} after {took}"
            self._show(tag("div", words, style="opacity:.7;font-size:13px"))


# -------------------------------------------------------------------------------------------------
# The cards.


def _store(store: Store) -> Card:
    manifest = store.manifest
    identity, totals = manifest.identity, manifest.totals
    of = "of all splits" if store.split is None else f"of the split {store.split!r}"
    ratio = None if store.view is not None else bytes_per_token(totals, identity.config)
    held = "" if ratio is None else f", {ratio:.2f} bytes of text per token"
    ends = [
        f"{each.token} ({each.id}) at the {each.position}"
        for each in (identity.bos, identity.eos)
        if each is not None
    ]
    sources = [
        f"{each.path} ({format_size(each.size)}, {count(each.rows, 'row')})"
        for each in manifest.sources[:MOST_SOURCES]
    ]
    if more := len(manifest.sources) - len(sources):
        sources.append(f"... and {count(more, 'more file')}")
    kind, ids = identity.tokenizer.kind, count(store.vocab_size, "id")
    rows = [
        ("documents", f"{count(store.num_documents)} {of}"),
        ("tokens", f"{count(store.num_tokens)} as {store.dtype.name}{held}"),
        ("splits", show.splits_text(manifest.splits)),
        ("mask", "says of every token whether it counts for the loss" if store.has_mask else ""),
        ("tokenizer", f"{kind}, {ids}, sha256 {identity.tokenizer.fingerprint[:12]}..."),
        ("boundaries", ", ".join(ends) or "no token between documents"),
        ("view", "" if store.view is None else f"of {store.base.path}"),
        ("sources", "\n".join(sources)),
    ]
    return Card(f"Store {str(store.path)!r}", rows)


def _loader(loader: Loader) -> Card:
    steps = loader.num_steps
    ranks = f", rank {loader.rank} of {loader.world_size}" if loader.world_size > 1 else ""
    end = "of a run without an end" if steps is None else f"of {count(steps)}"
    rows = [
        ("step", f"{count(loader.step)} {end}"),
        ("rows", f"{count(loader.seq_len, 'token')} each, packed {loader.packing.name}"),
        ("batch", f"{count(loader.batch_size, 'row')}{ranks}"),
        ("order", f"shuffle={loader.shuffle!r}, seed={loader.seed}"),
        ("labels", f"{loader.labels!r}, boundaries={loader.boundaries!r}"),
    ]
    mixed = _mixture(loader.mixture)
    return Card("Loader", [*rows, *mixed.rows], mixed.tables)


def _mixture(mixture: Mixture) -> Card:
    expected, ends = mixture.expected_epochs(), any(s.tokens is not None for s in mixture.stages)
    cells = []
    for place, (name, store, cap) in enumerate(
        zip(mixture.names, mixture.stores, mixture.max_epochs, strict=True)
    ):
        weights = list(dict.fromkeys(str(stage.weights[place]) for stage in mixture.stages))
        cells.append(
            (
                name or str(store.path),
                count(store.num_documents),
                count(store.num_tokens),
                ", then ".join(weights),
                "" if cap is None else f"{float(cap):g}",
                f"{expected[place]:.2f}" if ends else "",
            )
        )
    headings = ("source", "documents", "tokens", "weight", "most epochs", "epochs in stages")
    used = [n for n, column in enumerate(zip(*cells, strict=True)) if any(column)]
    table = Cells([headings[n] for n in used], [[line[n] for n in used] for line in cells])
    rows = [
        (
            f"stage {number}",
            ("endless" if stage.tokens is None else count(stage.tokens, "token"))
            + ("" if stage.seq_len is None else f", rows of {count(stage.seq_len)}"),
        )
        for number, stage in enumerate(mixture.stages)
        if len(mixture.stages) > 1
    ]
    return Card(f"Mixture of {count(len(mixture.names), 'source')}", rows, [table])


def _batch(batch: Batch) -> Card:
    """Its rows as bars of documents, to scale; nothing of it is computed that it would keep."""
    starts, lengths, is_padding = batch._window.documents(batch._place)
    width, rows = batch._window.row_tokens, batch.rows.tolist()
    places = starts // width
    ends = places.searchsorted(range(len(rows) + 1)).tolist()
    epochs, sources = batch.epochs.tolist(), batch.sources.tolist()
    bars = []
    for place, row in enumerate(rows[:MOST_ROWS]):
        here = slice(ends[place], ends[place + 1])
        parts = zip(
            (starts[here] - place * width).tolist(),
            lengths[here].tolist(),
            is_padding[here].tolist(),
            strict=True,
        )
        name = "padding" if row < 0 else f"row {count(row)}"
        name += f", source {sources[place]}" if len(set(sources)) > 1 and row >= 0 else ""
        name += f", epoch {epochs[place]}" if row >= 0 and epochs[place] else ""
        bars.append(_bar(name, list(parts), width))
    notes = ["Length is to scale; hatched places are padding."]
    if len(rows) > MOST_ROWS:
        notes.insert(0, f"and {count(len(rows) - MOST_ROWS, 'more row')}")
    padded, whole = int(lengths[is_padding].sum()), len(rows) * width
    facts = [
        ("documents", f"{count(int((~is_padding).sum()))}, whole or in part"),
        ("padding", f"{count(padded, 'place')} of {count(whole)} ({share(padded, whole)})"),
        ("fields", "input_ids, labels, loss_mask, position_ids, doc_ids, cu_seqlens"),
    ]
    title = f"Batch of step {count(batch.step)}: {count(len(rows), 'row')}"
    return Card(f"{title} of {count(batch.seq_len, 'token')}", facts, (), tag("div", *bars), notes)


def _bar(name: str, parts: Sequence[tuple[int, int, bool]], width: int) -> Markup:
    """A row: its documents, and what no document fills."""
    drawn = []
    for number, (start, length, is_padding) in enumerate(islice(parts, MOST_PARTS)):
        style = f"left:{100 * start / width:.3f}%;width:{100 * length / width:.3f}%"
        if is_padding:
            words = f"padding: {count(length, 'place')}"
            drawn.append(tag("span", class_="padding", style=style, title=words))
            continue
        words = f"{count(length, 'token')} of a document"
        style += f";--hue:var(--c{number % HUES + 1})"
        shown = count(length) if length > width / 12 else ""
        drawn.append(tag("span", shown, class_="part", style=style, title=words))
    if left := parts[MOST_PARTS:]:
        start = left[0][0]
        style = f"left:{100 * start / width:.3f}%;right:0;--hue:var(--soft)"
        drawn.append(tag("span", f"{count(len(left))} more", class_="part", style=style))
    lengths = ", ".join(f"{length}{' padding' if empty else ''}" for _, length, empty in parts[:20])
    row = tag("div", *drawn, class_="row", role="img", aria_label=f"{name}: {lengths}")
    return tag("div", tag("span", name, class_="soft small"), row, class_="packed")


def _build(result: BuildResult) -> Card:
    done = "up to date" if result.nothing_to_do else "built"
    return Card(f"Store {result.store!r}, {done}", show.build_rows(result), notes=result.warnings)


def _plan(planned: BuildPlan) -> Card:
    cells = show.plan_cells(planned)
    tables = [Cells(show.PLAN_HEADINGS, cells)] if cells else []
    return Card("Plan of a build; nothing is written", show.plan_rows(planned), tables)


def _layout(report: LayoutReport) -> Card:
    sentences = [(account.packing, account.sentence) for account in report.accounts]
    rows = [show.layout_store(report), *sentences, *show.layout_rows(report)]
    table = Cells(show.LAYOUT_HEADINGS, show.layout_cells(report))
    bars = [
        _bar(
            account.packing,
            [
                (0, account.places - account.padding, False),
                (account.places - account.padding, account.padding, True),
            ],
            max(account.places, 1),
        )
        for account in report.accounts
    ]
    title = f"Rows of {count(report.seq_len, 'token')}"
    return Card(title, rows, [table], tag("div", *bars))


def _diagnosis(found: Diagnosis) -> Card:
    rows = [("machine", found.machine.describe()), ("tokenizer", found.tokenizer or "")]
    if found.sample is not None:
        text = count(found.sample.documents, "document")
        rows.insert(0, ("text", f"{text}, {format_size(found.sample.text_bytes)}"))
    for need in found.demands:
        rate = f"{need.tokens_per_second:,.0f} tokens/s for a GPU ({need.origin})"
        rows.append(("needed", f"{need.name}: {rate}"))
    cells = list(show.ways_cells(found))
    if found.recommendation is not None:
        rows.append(("use", "\n".join(found.recommendation.reasons)))
    tables = [Cells([*show.WAYS_HEADINGS, ""], cells)] if cells else []
    return Card("Diagnosis", rows, tables, notes=found.advice)


def _verify(report: VerifyReport) -> Card:
    found = [f"{each.file}: {each.problem}" for each in (*report.findings, *report.notes)]
    return Card("Verification", show.verify_rows(report), notes=found)


def _export(result: ExportResult) -> Card:
    return Card("Export", show.export_rows(result))


def _train(result: TrainResult) -> Card:
    return Card("Training", show.train_rows(result))


def _view(result: ViewResult) -> Card:
    return Card("View", show.view_rows(result))


def _import(result: ImportResult) -> Card:
    return Card("Import", show.import_rows(result))


def _annotate(result: AnnotateResult) -> Card:
    return Card(f"Cells of {result.store!r}", show.annotate_rows(result))


def _dedup(result: DedupResult) -> Card:
    return Card("Views", [row for view in result.views for row in show.view_rows(view)])


def _inspection(found: Inspection) -> Card:
    of = show.of_split(found)
    if (document := found.document) is not None:
        place = f"row {count(document.row)} of {document.path}"
        rows = [
            ("tokens", count(len(document.tokens))),
            ("from", place),
            ("text", _cut(document.text, MOST_DOCUMENT)),
        ]
        return Card(f"Document {count(document.number)}{of}", rows)
    if found.groups is not None:
        cells = [
            (each.name, count(each.documents), count(each.tokens), f"{each.share:.2%}")
            for each in found.groups[: show.SHOWN_GROUPS]
        ]
        left = len(found.groups) - len(cells)
        notes = [f"and {count(left, 'more group')}"] if left else []
        table = Cells(["group", "documents", "tokens", "share"], cells)
        return Card(f"Groups of {found.store!r}", (), [table], notes=notes)
    rows = [*show.store_rows(found)]
    if found.lengths is not None:
        rows.append(("lengths", show.length_line(found.lengths)))
    tops = [
        (repr(top.text), str(top.id), f"{top.share:.1%}") for top in found.top_tokens[:MOST_TOPS]
    ]
    tables = [Cells([f"frequent tokens{of}", "id", "share"], tops)] if tops else []
    return Card(f"Store {found.store!r}", rows, tables)


def _grep(found: GrepResult) -> Card:
    cells = [
        (
            f"{each.before}[{found.text}]{each.after}",
            f"{each.source.path}:{each.source.row}",
            count(each.document),
        )
        for each in found.matches
    ]
    tables = [Cells(["text", "source", "document"], cells, 2)] if cells else []
    return Card(f"Where {found.text!r} is", show.grep_rows(found), tables)


def _head(head: Head) -> Card:
    cells = [
        ["" if row[name] is None else _cut(str(row[name]), MOST_TEXT) for name in head.names]
        for row in head
    ]
    return Card(head.title, (), [Cells(head.names, cells, len(head.names))])


CARDS: dict[str, Callable[[Any], Card]] = {
    "AnnotateResult": _annotate,
    "Batch": _batch,
    "BuildPlan": _plan,
    "BuildResult": _build,
    "DedupResult": _dedup,
    "Diagnosis": _diagnosis,
    "ExportResult": _export,
    "GrepResult": _grep,
    "Head": _head,
    "ImportResult": _import,
    "Inspection": _inspection,
    "LayoutReport": _layout,
    "Loader": _loader,
    "Mixture": _mixture,
    "Store": _store,
    "TrainResult": _train,
    "VerifyReport": _verify,
    "ViewResult": _view,
}


def _card_of(value: Shown) -> Card:
    """By the name of its class, or of one that it is derived from."""
    names = [each.__name__ for each in type(value).__mro__]
    return next(CARDS[name] for name in names if name in CARDS)(value)
