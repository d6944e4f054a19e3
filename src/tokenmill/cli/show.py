"""An inspection as tables: the store, its lengths as a histogram, its tokens, one document."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tokenmill.cli.numbers import compact, count, share
from tokenmill.cli.output import make_console, print_json
from tokenmill.cli.render import facts, left_out, next_steps, splits_text
from tokenmill.config import format_size
from tokenmill.visible import visible, visible_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tokenmill.inspection import DocumentView, Inspection, LengthBin, Lengths, Token

BAR_COLUMNS = 40
SHOWN_SOURCES = 8
GROUP_OF_TEXTS = "text//"
"""How the names of groups of small text files begin: a row of them is a file."""
SHOWN_TOKENS = 2000
"""Of one document; --json gives all of them."""
EVEN, ODD = "black on light_sky_blue1", "black on light_goldenrod1"
PALE_EVEN, PALE_ODD = "grey42 on grey89", "grey42 on grey82"
"""Of tokens that do not count for the loss."""
OPEN, CLOSE = "[[", "]]"
"""Around tokens that count, where there is no colour."""
IMPORT = "import"
"""Says in the configuration of a store that its tokens came from elsewhere, and in which format."""
NEWLINE = "\u21b5"


def inspection_result(inspection: Inspection, *, as_json: bool) -> None:
    """Print the document that was asked for, or else all about the store."""
    if as_json:
        print_json(inspection, bytes_per_token=inspection.bytes_per_token)
    elif inspection.document is not None:
        document(inspection.document)
    else:
        overview(inspection)


def overview(inspection: Inspection) -> None:
    """Print everything but a document."""
    console = make_console()
    facts(store_rows(inspection))
    if inspection.lengths is not None:
        console.print(heading("\ntokens per document", of_split(inspection)))
        console.print(length_line(inspection.lengths))
        console.print(histogram(inspection.lengths.histogram, console=console))
        rest = f"{of_split(inspection)}, {counted(inspection)}"
        console.print(heading("\nmost frequent tokens", rest))
        console.print(top_tokens(inspection))
    console.print()
    store = shlex.quote(inspection.store)
    next_steps(f"tokenmill inspect {store} --doc 0", f"tokenmill verify {store}")


def heading(name: str, rest: str) -> Text:
    """A line that begins in bold."""
    from rich.text import Text

    return Text(name, style="bold").append(rest, "not bold")


def store_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """The facts of a store, in the order of a reader's questions."""
    totals, ratio = inspection.totals, inspection.bytes_per_token
    per_token = "" if ratio is None else f", {ratio:.2f} bytes of text per token"
    reasons = [f"{count(rows)} {reason}" for reason, rows in inspection.rejects.items()]
    where = visible(shlex.quote(f"{inspection.store}/rejects"))
    listed = f"all but {count(totals.unlisted, 'row')}" if totals.unlisted else "every row"
    return [
        ("store", visible(f"{inspection.store}, written by {inspection.created_by}")),
        ("documents", f"{count(totals.documents)}{left_out(totals)}"),
        ("tokens", f"{count(totals.tokens)} as {inspection.dtype}{per_token}"),
        ("rows", shape_text(inspection)),
        ("mask", mask_text(inspection)),
        ("splits", splits_text(inspection.splits)),
        ("rejects", f"{', '.join(reasons)}; {listed}: {where}" if reasons else ""),
        ("sources", sources_text(inspection)),
        ("tokenizer", tokenizer_text(inspection)),
        ("borders", borders_text(inspection)),
        ("specials", specials_text(inspection)),
        ("engine", engines_text(inspection)),
    ]


TRAINED_ON = {
    "assistant": "what the assistant says counts",
    "last": "the assistant's last message counts",
    "all": "everything counts",
}
LONG_ROWS = {
    "split": "longer ones are split",
    "truncate": "longer ones are cut off",
    "reject": "longer ones were rejected",
}


def shape_text(inspection: Inspection) -> str:
    """What rows were made into; an empty string where each is the text of one field."""
    config = inspection.config
    shape, template = config.get("format"), config.get("template")
    parts = []
    if shape == "chat":
        parts.append(f"chats; {TRAINED_ON[str(config['train_on'])]}")
    elif shape == "prompt-completion":
        names = template or f"{{{config['prompt_field']}}}{{{config['completion_field']}}}"
        parts.append(f"{names!r}; {config['completion_field']} counts")
    elif template is not None:
        parts.append(repr(template))
    if (limit := config.get("max_length")) is not None:
        parts.append(
            f"at most {count(int(str(limit)))} tokens, {LONG_ROWS[str(config['too_long'])]}"
        )
    return "; ".join(parts)


def mask_text(inspection: Inspection) -> str:
    """The share of tokens that count; an empty string where there are no masks."""
    mask = inspection.mask
    if mask is None:
        return ""
    counting = f"{count(mask.counted)} of {count(mask.tokens)} tokens{of_split(inspection)} count"
    text = f"{counting} for the loss ({share(mask.counted, mask.tokens)})"
    if not mask.silent:
        return text
    silent = count(mask.silent, "document has", plural="documents have")
    return f"{text}; {silent} no token that counts: nothing is learned there"


SPECIAL_TOKENS = {
    "text": "special-token strings inside documents are ordinary characters",
    "parse": "special-token strings inside documents became special tokens",
    "reject": "documents with special-token strings were rejected",
}


def specials_text(inspection: Inspection) -> str:
    if IMPORT in inspection.config:
        return "what became of special-token strings in the text is not known"
    return SPECIAL_TOKENS[inspection.special_tokens]


def sources_text(inspection: Inspection) -> str:
    groups = [one for one in inspection.sources if one.path.startswith(GROUP_OF_TEXTS)]
    sources = [one for one in inspection.sources if not one.path.startswith(GROUP_OF_TEXTS)]
    lines = [
        f"{visible(source.path)} ({format_size(source.size)}, {count(source.rows, 'row')})"
        for source in sources[:SHOWN_SOURCES]
    ]
    if len(sources) > SHOWN_SOURCES:
        lines.append(f"... and {count(len(sources) - SHOWN_SOURCES, 'more file')}")
    if groups:
        size = format_size(sum(group.size for group in groups))
        lines.append(f"{count(sum(group.rows for group in groups), 'text file')} ({size})")
    return "\n".join(lines)


def tokenizer_text(inspection: Inspection) -> str:
    fingerprint = inspection.tokenizer_fingerprint[:12]
    return (
        f"{inspection.tokenizer_kind}, {count(inspection.vocab_size)} ids, sha256 {fingerprint}..."
    )


def borders_text(inspection: Inspection) -> str:
    what = "row" if inspection.totals.pieces else "document"
    if inspection.config.get("too_long") == "truncate":
        what += " that was not cut off"
    parts = [
        f"{visible(border.token)} ({border.id}) at the {border.position} of every {what}"
        for border in (inspection.bos, inspection.eos)
        if border is not None
    ]
    return ", ".join(parts) or "no token between documents"


def engines_text(inspection: Inspection) -> str:
    lines = []
    for entry in inspection.engines:
        line = f"{entry.name} {entry.version}, {count(entry.units, 'unit')}"
        if IMPORT in inspection.config:
            units = count(entry.units, "unit")
            line = (
                f"imported from {inspection.config[IMPORT]} by tokenmill {entry.version}, {units}"
            )
        elif entry.name != entry.reference:
            line += (
                f"; {count(entry.checked_documents, 'document')} checked against"
                f" {entry.reference} {entry.reference_version}, {count(entry.mismatches)} differed"
            )
        if entry.redone_units:
            line += f", {count(entry.redone_units, 'unit')} done again by {entry.reference}"
        lines.append(line)
    return "\n".join(lines)


def of_split(inspection: Inspection) -> str:
    return "" if inspection.split is None else f" of {visible(inspection.split)}"


def counted(inspection: Inspection) -> str:
    tokens = count(inspection.tokens_counted)
    seen = f"{count(inspection.ids_seen)} of {count(inspection.vocab_size)} ids occur"
    split = inspection.split
    total = inspection.totals.tokens if split is None else inspection.splits[split].tokens
    if inspection.tokens_counted < total:
        return f"in a sample of {tokens} tokens ({seen} in it)"
    return f"of all {tokens} ({seen})"


def length_line(lengths: Lengths) -> str:
    shown = [f"{p}% {count(value)}" for p, value in lengths.percentiles.items()]
    return (
        f"shortest {count(lengths.shortest)}, mean {lengths.mean:,.1f},"
        f" longest {count(lengths.longest)}\npercentiles: {', '.join(shown)}"
    )


def histogram(bins: Sequence[LengthBin], *, console: Console) -> Table:
    """One bar for each power of two."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    total = sum(one.documents for one in bins)
    largest = max(one.documents for one in bins)
    block = "#" if console.options.ascii_only else "\u2588"
    for one in bins:
        bar = block * -(-BAR_COLUMNS * one.documents // largest)
        low, high = count(one.low), count(one.high - 1)
        table.add_row(
            low,
            "" if low == high else f"to {high}",
            bar,
            count(one.documents),
            share(one.documents, total),
        )
    return table


def top_tokens(inspection: Inspection) -> Table:
    """Two columns of tokens, by frequency."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for justify in ("right", "left", "right", "right") * 2:
        table.add_column(justify=justify, no_wrap=True)
    cells = [
        (str(top.id), Text(repr(top.text)), compact(top.count), f"{100 * top.share:.1f}%")
        for top in inspection.top_tokens
    ]
    half = -(-len(cells) // 2)
    for number in range(half):
        right = cells[number + half] if number + half < len(cells) else ()
        table.add_row(*cells[number], *right)
    return table


def document(view: DocumentView) -> None:
    """Print a document with the borders of its tokens, its ids and its origin."""
    console = make_console()
    shown = view.tokens[:SHOWN_TOKENS]
    tokens = count(len(view.tokens), "token")
    console.print(heading(f"document {count(view.number)} of {visible(view.split)}", f": {tokens}"))
    line = "" if view.line is None else f", line {count(view.line)}"
    piece = "" if view.pieces == 1 else f", piece {view.piece + 1} of {view.pieces}"
    place = f"from {visible(view.path)}, row {count(view.row)}{line}{piece}\n"
    console.print(place, soft_wrap=True)
    coloured = console.is_terminal and not console.no_color
    if said := counting_line(view, coloured=coloured):
        console.print(said + "\n", soft_wrap=True)
    console.print(with_borders(shown, coloured=coloured), soft_wrap=True)
    console.print("\nids", style="bold")
    console.print(" ".join(str(token.id) for token in shown), soft_wrap=True)
    if len(shown) < len(view.tokens):
        rest = count(len(view.tokens) - len(shown), "more token")
        console.print(f"... and {rest}; all of them: add --json")


def counting_line(view: DocumentView, *, coloured: bool) -> str:
    """How to tell the tokens that count; an empty string where there are no masks."""
    if not view.tokens or view.tokens[0].counts is None:
        return ""
    counting = sum(token.counts is True for token in view.tokens)
    how = "the grey ones do not" if coloured else f"those in {OPEN} {CLOSE}"
    of_all = f"{count(counting)} of {count(len(view.tokens))}"
    return f"{of_all} count for the loss ({share(counting, len(view.tokens))}): {how}"


def with_borders(tokens: Sequence[Token], *, coloured: bool) -> Text:
    """The text of the tokens, on two alternating backgrounds or with | between them.

    Tokens that do not count for the loss are grey; without colour, those that do stand in [[ ]].
    """
    from rich.text import Text

    text = Text()
    inside = False
    for number, token in enumerate(tokens):
        shown = visible_lines(token.text)
        if coloured:
            shown = shown.replace("\n", f"{NEWLINE}\n")
            even, odd = (PALE_EVEN, PALE_ODD) if token.counts is False else (EVEN, ODD)
            text.append(shown, style=odd if number % 2 else even)
            continue
        opens, closes = token.counts is True and not inside, inside and not token.counts
        inside = token.counts is True
        border = "|" if number else ""
        text.append(f"{CLOSE if closes else ''}{border}{OPEN if opens else ''}{shown}")
    if inside:
        text.append(CLOSE)
    return text
