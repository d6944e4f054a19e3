"""Batches of rows in, batches of ids and masks out: the one thing the build needs to know.

shaped = shaper.shape(texts, rows)            rows as JSON -> stretches of text, rejects
tokens = shaper.encode(shaped, encode)        by the engine, all stretches in one call
documents = shaper.assemble(shaped, tokens)   ids and masks, row by row
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.huggingface import HuggingFaceEngine
from tokenmill.errors import SourceError, UsageError
from tokenmill.records import Reject, RejectReason, TextBatch, TokenBatch
from tokenmill.sources.base import FORMATS, SourceFile
from tokenmill.supervised.chat import ChatMaker, special_tokens_of
from tokenmill.supervised.pieces import RowPieces, RowText, TextBoundaries
from tokenmill.supervised.rows import RowError, parse_row, text_of
from tokenmill.supervised.templates import load_templates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine, TokenizerInfo
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import RowShape


# Small templates: `{title}\n\n{body}` makes one text of several fields. A name in braces is a field
# (dots reach into nested objects), a double brace is a brace, and all else means itself. There is
# nothing more to it on purpose: no conversions, no formats.
#
# Prompt and completion are one text and are encoded as one, so that there is no seam between them
# that the tokenizer would not make. A token that has characters of both belongs to the prompt: the
# model is given it, and is not asked for it. Spaces are the exception: most tokenizers make the
# space before a word a part of its token, and after "Answer: " no first word would ever be learned.

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
FieldTemplate = tuple[tuple[bool, str], ...]  # (True, field) or (False, text)


def parse_template(template: str) -> FieldTemplate:
    """Take a template apart; UsageError where a brace has no partner or names nothing."""
    pieces: list[tuple[bool, str]] = []
    why = None
    for match in _PART.finditer(template):
        text = match[0]
        if match[1] is not None:
            pieces.append((True, match[1].strip()))
        elif text in ("{", "}"):
            why = why or f"{text!r} at character {match.start()} has no partner"
        else:
            pieces.append((False, text[0] if text in ("{{", "}}") else text))
    if (True, "") in pieces:
        why = why or "a pair of braces names no field"
    if not any(is_field for is_field, _ in pieces):
        why = why or "it names no field, so every row would become the same text"
    if why:
        raise UsageError(
            f"the template {template!r} cannot be used: {why}",
            hint="write fields in braces, such as '{title}\\n\\n{body}'; "
            "a brace itself is {{ or }}",
        )
    return tuple(pieces)


def field_template(shape: RowShape) -> FieldTemplate:
    """The template of a shape; without one, the prompt and then the completion."""
    if shape.template is None:
        return (True, shape.prompt_field), (True, shape.completion_field)
    template = parse_template(shape.template)
    completion = (True, shape.completion_field)
    if shape.format == "prompt-completion" and completion not in template:
        named = [text for is_field, text in template if is_field]
        raise UsageError(
            f"the template {shape.template!r} does not name the field "
            f"{shape.completion_field!r}, with which the completion begins",
            hint=f"name it with --completion-field, such as: --completion-field {named[-1]}",
        )
    return template


def field_maker(
    shape: RowShape, *, bos: int | None, eos: int | None
) -> Callable[[dict[str, Any]], RowText]:
    """Makes the text of a row: a template filled with its fields, of which a completion counts."""
    template = field_template(shape)
    # Everything from the completion on is what the model is to say.
    has_completion = shape.format == "prompt-completion"
    first = template.index((True, shape.completion_field)) if has_completion else 0

    def make(row: dict[str, Any]) -> RowText:
        parts = [text_of(row, text) if is_field else text for is_field, text in template]
        text = "".join(parts)
        if not text or not has_completion:
            return RowText(text)
        boundary = sum(map(len, parts[:first]))
        if boundary == len(text):
            # The end token alone could be learned; an answer that is missing is far more likely.
            raise RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")
        return RowText(text, [(boundary, len(text))], before=bos, after=eos)

    return make


def load_inner(info: TokenizerInfo) -> Engine | None:
    """An engine for text that does not open its row, where that makes a difference.

    Some tokenizers put a space in front of a text, but only where it is the beginning of everything
    (`Metaspace` with the scheme `first`). A chat is cut at its special tokens, so all texts but the
    first must be encoded by the same tokenizer without that space.
    """
    if not info.spaces_beginnings:
        return None
    path = info.files["tokenizer.json"]
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    steps = [content["pre_tokenizer"]]
    while steps:
        step = steps.pop()
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
        steps += step.get("pretokenizers") or []
    return HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT, content=json.dumps(content))


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows of a batch, ready to be encoded."""

    pieces: RowPieces
    stretches: TextBatch  # of all pieces, those that are to be encoded
    rows: NDArray[np.int64]
    texts: list[str]  # what each row became, from which its split follows
    rejects: tuple[Reject, ...]


class Shaper:
    """Makes documents of rows, by one maker."""

    def __init__(
        self,
        shape: RowShape,
        engine: CheckedEngine,
        *,
        bos: int | None = None,
        eos: int | None = None,
        reject_special: bool = False,
    ) -> None:
        """`bos` and `eos` frame a prompt and its completion; a chat has what its template says."""
        self._shape = shape
        specials = sorted(engine.info.special_tokens, key=len, reverse=True)
        self._refused = (
            re.compile("|".join(map(re.escape, specials)) or "(?!)") if reject_special else None
        )
        self._inner: Engine | None = None
        self._make: Callable[[dict[str, Any]], RowText]
        if shape.format != "chat":
            self._make = field_maker(shape, bos=bos, eos=eos)
        else:
            self._make = ChatMaker(
                load_templates(engine.info, date=shape.chat_date, kwargs=shape.template_kwargs),
                special_tokens_of(engine.info),
                train_on=shape.train_on,
                messages_field=shape.messages_field,
            )
            self._inner = load_inner(engine.info)
        # Texts without a mask have no boundaries to find.
        self._borders = TextBoundaries(engine, engine.reference) if shape.has_mask else None
        self._inner_borders = self._borders
        if self._inner is not None:
            self._inner_borders = TextBoundaries(self._inner, self._inner)

    @property
    def naming_options(self) -> str:
        """The options by which a user says which fields a row has."""
        if self._shape.template is not None:
            return "the names in --template"
        named = {"chat": "--messages-field"}
        return named.get(self._shape.format, "--prompt-field and --completion-field")

    def shape(self, texts: TextBatch, rows: NDArray[np.int64]) -> Shaped:
        """Read and render the rows; those that cannot be used come back as rejects."""
        pieces = RowPieces(touching_counts=self._shape.format == "chat")
        kept: list[int] = []
        made: list[str] = []
        rejects: list[Reject] = []
        data = texts.data[texts.offsets[0] : texts.offsets[-1]].tobytes()
        bounds = (texts.offsets - texts.offsets[0]).tolist()
        for row, (start, end) in zip(rows.tolist(), itertools.pairwise(bounds), strict=True):
            try:
                text = self._make(parse_row(data[start:end]))
                if self._refused is not None and self._refused.search(text.text):
                    raise RowError(
                        RejectReason.SPECIAL_TOKEN,
                        "the text contains the string of a special token",
                    )
                pieces.add(text)
            except RowError as error:
                rejects.append(Reject(row, error.reason, error.detail))
            else:
                kept.append(row)
                made.append(text.text)
        rows = np.array(kept, np.int64)
        return Shaped(pieces, pieces.stretches(), rows, made, tuple(rejects))

    def encode(self, shaped: Shaped, encode: Callable[[TextBatch], TokenBatch]) -> TokenBatch:
        """Ids of all stretches of the rows."""
        stretches = shaped.stretches
        if not len(stretches):
            return TokenBatch.from_lists([])
        if self._inner is None or (opens := shaped.pieces.opening()).all():
            return encode(stretches)
        parts = iter(encode(stretches.take(np.flatnonzero(opens))))
        inner = iter(self._inner.encode(stretches.take(np.flatnonzero(~opens))))
        return TokenBatch.from_lists([next(parts if opens_row else inner) for opens_row in opens])

    def assemble(self, shaped: Shaped, tokens: TokenBatch) -> TokenBatch:
        """The rows, whole, with masks of what counts; plain texts have none."""
        joined, mask = shaped.pieces.put_together(tokens, self._borders, self._inner_borders)
        return TokenBatch(joined.ids, joined.offsets, mask if self._shape.has_mask else None)


def needed_fields(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields to read, and whether all of them must be there; none for one text per row."""
    if shape is None or not shape.has_fields:
        return (), True
    if shape.format == "chat":
        return shape.chat_fields, False
    named = [text for is_field, text in field_template(shape) if is_field]
    return tuple(dict.fromkeys(named)), True


def refuse_plain_text(files: Sequence[SourceFile], shape: RowShape | None) -> None:
    """Raise for text files, which have no fields."""
    if shape is None or not shape.has_fields:
        return
    titles = [form.title for form in FORMATS.values() if form.has_fields]
    for file in files:
        if not file.traits.has_fields:
            path = file.members[0].path if file.members else file.path
            raise SourceError(
                f"{path!r} is a {file.traits.title} file, and rows of the format "
                f"{shape.format!r} have fields",
                hint=f"name {', '.join(titles[:-1])} or {titles[-1]} files, such as: data/*.jsonl",
            )
