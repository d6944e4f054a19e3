"""Batches of rows in, batches of ids and masks out: the one thing the build needs to know.

shaped = shaper.shape(texts, rows)            rows as JSON -> stretches of text, rejects
tokens = shaper.encode(shaped, encode)        by the engine, all stretches in one call
documents = shaper.assemble(shaped, tokens)   ids and masks, row by row
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.records import Reject, RejectReason, TextBatch, TokenBatch
from tokenmill.supervised.borders import Borders
from tokenmill.supervised.chat import ChatMaker
from tokenmill.supervised.fields import FieldTemplate, parse_template
from tokenmill.supervised.inner import load_inner
from tokenmill.supervised.pieces import Pieces
from tokenmill.supervised.rows import RowError, parse_row
from tokenmill.supervised.specials import special_tokens_of
from tokenmill.supervised.template_files import load_templates
from tokenmill.supervised.texts import PromptMaker, TextMaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tokenmill.config import RowShape
    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.supervised.pieces import RowText

    Encode = Callable[[TextBatch], TokenBatch]


class _NoBorders(Borders):
    """For texts without a mask, of which nobody asks what counts."""

    def __init__(self) -> None:
        pass


_NO_BORDERS = _NoBorders()


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows of a batch, ready to be encoded."""

    pieces: Pieces
    stretches: TextBatch
    """Of all pieces, those that are to be encoded."""
    rows: NDArray[np.int64]
    texts: list[str]
    """The text that each row became: what its split follows from."""
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
        if shape.format == "chat":
            self._make = ChatMaker(
                load_templates(
                    engine.info, date=shape.chat_date, kwargs=shape.chat_template_kwargs
                ),
                special_tokens_of(engine.info),
                train_on=shape.train_on,
                messages_field=shape.messages_field,
            )
            self._inner = load_inner(engine.info)
        elif shape.format == "prompt-completion":
            self._make = PromptMaker(
                field_template(shape), completion_field=shape.completion_field, bos=bos, eos=eos
            )
        else:
            self._make = TextMaker(field_template(shape))
        self._borders = Borders(engine, engine.reference) if shape.has_mask else _NO_BORDERS
        self._inner_borders = self._borders
        if self._inner is not None:
            self._inner_borders = Borders(self._inner, self._inner)

    @property
    def naming_options(self) -> str:
        """The options by which a user says which fields a row has."""
        if self._shape.template is not None:
            return "the names in --template"
        named = {"chat": "--messages-field"}
        return named.get(self._shape.format, "--prompt-field and --completion-field")

    def shape(self, texts: TextBatch, rows: NDArray[np.int64]) -> Shaped:
        """Read and render the rows; those that cannot be used come back as rejects."""
        pieces = Pieces(touching_counts=self._shape.format == "chat")
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

    def encode(self, shaped: Shaped, encode: Encode) -> TokenBatch:
        """Ids of all stretches of the rows."""
        stretches = shaped.stretches
        if not len(stretches):
            return TokenBatch.from_lists([])
        if self._inner is None or (opens := shaped.pieces.opening()).all():
            return encode(stretches)
        parts = iter_documents(encode(stretches.take(np.flatnonzero(opens))))
        inner = iter_documents(self._inner.encode(stretches.take(np.flatnonzero(~opens))))
        return TokenBatch.from_lists([next(parts if opens_row else inner) for opens_row in opens])

    def assemble(self, shaped: Shaped, tokens: TokenBatch) -> TokenBatch:
        """The rows, whole, with masks of what counts; plain texts have none."""
        joined, mask = shaped.pieces.put_together(tokens, self._borders, self._inner_borders)
        return TokenBatch(joined.ids, joined.offsets, mask if self._shape.has_mask else None)


def field_template(shape: RowShape) -> FieldTemplate:
    """The template of a shape; without one, the prompt and behind it the completion."""
    if shape.template is not None:
        template = parse_template(shape.template)
        if shape.format == "prompt-completion" and shape.completion_field not in template.fields:
            raise UsageError(
                f"the template {shape.template!r} does not name the field "
                f"{shape.completion_field!r}, with which the completion begins",
                hint="name it with --completion-field, such as: --completion-field "
                f"{template.fields[-1]}",
            )
        return template
    return FieldTemplate(((True, shape.prompt_field), (True, shape.completion_field)))


def iter_documents(tokens: TokenBatch) -> Any:
    """The documents of a batch, one after the other."""
    return (tokens[index] for index in range(len(tokens)))
