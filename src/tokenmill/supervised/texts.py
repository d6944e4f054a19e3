"""Texts of several fields, and prompts with completions.

Prompt and completion are one text and are encoded as one, so that there is no seam between them
that the tokenizer would not make. A token that has characters of both belongs to the prompt: the
model is given it, and is not asked for it. Spaces are the exception: most tokenizers make the space
before a word a part of its token, and behind "Answer: " no first word would ever be learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.records import RejectReason
from tokenmill.supervised.pieces import RowText
from tokenmill.supervised.rows import RowError, text_of

if TYPE_CHECKING:
    from tokenmill.supervised.fields import FieldTemplate


class TextMaker:
    """Fills a template with the fields of a row."""

    def __init__(self, template: FieldTemplate) -> None:
        self._template = template

    def __call__(self, row: dict[str, Any]) -> RowText:
        """The text of a row."""
        return RowText("".join(_filled(self._template, row)))


class PromptMaker:
    """Fills a template with a prompt and its completion."""

    def __init__(
        self, template: FieldTemplate, *, completion_field: str, bos: int | None, eos: int | None
    ) -> None:
        self._template = template
        # Everything from the completion on is what the model is to say.
        self._prompt_pieces = template.pieces.index((True, completion_field))
        self._bos, self._eos = bos, eos

    def __call__(self, row: dict[str, Any]) -> RowText:
        """The text of a row; its completion counts."""
        parts = _filled(self._template, row)
        text = "".join(parts)
        if not text:
            return RowText(text)
        border = sum(map(len, parts[: self._prompt_pieces]))
        if border == len(text):
            # The end token alone could be learned; an answer that is missing is far more likely.
            raise RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")
        return RowText(text, [(border, len(text))], before=self._bos, after=self._eos)


def _filled(template: FieldTemplate, row: dict[str, Any]) -> list[str]:
    return [text_of(row, text) if is_field else text for is_field, text in template.pieces]
