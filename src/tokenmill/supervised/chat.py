"""A conversation as text, with the special tokens that its template wrote and what counts of it.

What counts is what the assistant said, its end token included. A template that marks it with
generation blocks is taken at its word. For the others the conversation is rendered up to each
answer with the header of an answer behind it, and again up to the end of that answer: what lies
between is the answer. That holds only if both texts are beginnings of the whole, which is checked.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

from tokenmill.records import RejectReason
from tokenmill.supervised.conversation import Conversation, read_conversation
from tokenmill.supervised.pieces import RowText
from tokenmill.supervised.provenance import Provenance
from tokenmill.supervised.rows import RowError

if TYPE_CHECKING:
    from tokenmill.supervised.jinja import ChatTemplate, MessagePlaces
    from tokenmill.supervised.pieces import Range
    from tokenmill.supervised.specials import SpecialTokens
    from tokenmill.supervised.template_files import ChatTemplates

ALL, ASSISTANT, LAST = "all", "assistant", "last"


class ChatMaker:
    """Makes texts of conversations."""

    def __init__(
        self,
        templates: ChatTemplates,
        specials: SpecialTokens,
        *,
        train_on: str,
        messages_field: str | None,
    ) -> None:
        self._templates = templates
        self._specials = specials
        self._train_on = train_on
        self._field = messages_field
        self._provenance = {
            name: Provenance(template, specials.tokens)
            for name, template in templates.by_name.items()
        }

    def __call__(self, row: dict[str, Any]) -> RowText:
        """The text of a row's conversation."""
        conversation = read_conversation(row, self._field)
        turns = conversation.assistant_turns
        if not turns:
            raise RowError(RejectReason.NO_ASSISTANT_TURN, "no message has the role assistant")
        name = self._templates.name_for(conversation)
        template = self._templates.by_name[name]
        tracked = template.has_generation and self._train_on != ALL
        if tracked:
            rendering = template.render_tracked(conversation)
            text, generated = rendering.text, rendering.generated
        else:
            text, generated = template.render(conversation), []
        checked = self._provenance[name].without_doubt(conversation, text)
        cut = self._specials.cut(text, checked)
        if self._train_on == ALL:
            ranges = [(0, len(text))]
        elif tracked:
            ranges = self._generated(template, conversation, generated)
        else:
            places = self._specials.places(cut)
            ranges = self._answers(template, conversation, text, places)
        return RowText(text, ranges, cut)

    def _generated(
        self, template: ChatTemplate, conversation: Conversation, generated: list[Range]
    ) -> list[Range]:
        if self._train_on != LAST or len(generated) < 2:
            return generated
        turns = conversation.assistant_turns
        if len(generated) == len(turns):
            return generated[-1:]
        before = _head(conversation, turns[-1])
        return generated[len(template.render_tracked(before).generated) :]

    def _answers(
        self, template: ChatTemplate, conversation: Conversation, text: str, specials: list[Range]
    ) -> list[Range]:
        """Ranges of the answers, by rendering what comes before and up to each of them."""
        turns = conversation.assistant_turns
        turns = turns[-1:] if self._train_on == LAST else turns
        # For one answer it would save nothing.
        borders = template.borders(conversation, text) if len(turns) > 1 else None
        ranges = []
        for turn in turns:
            head = conversation, turn
            start = self._place(template, head, text, prompt=True, borders=borders)
            if not template.has_prompt and text.startswith(template.answer_header, start):
                start += len(template.answer_header)
            if turn + 1 == len(conversation.messages):
                end = len(text)
            else:
                head = conversation, turn + 1
                end = self._place(template, head, text, prompt=False, borders=borders)
            if start < end:
                ranges.append((start, _without_tail(text, start, end, specials)))
        return ranges

    def _place(
        self,
        template: ChatTemplate,
        head: tuple[Conversation, int],
        text: str,
        *,
        prompt: bool,
        borders: MessagePlaces | None,
    ) -> int:
        """Where the first messages of the conversation end in the text of the whole."""
        conversation, count = head
        turn = count if prompt else count - 1
        known = borders.places[count] if borders is not None and count else None
        if borders is not None and known is not None:
            tail = borders.tails[prompt]
            if text.startswith(tail, known):
                return known + len(tail)
        else:
            beginning = template.render(_head(conversation, count), prompt=prompt)
            if text.startswith(beginning):
                return len(beginning)
        if self._train_on == LAST:
            what = (
                "what comes before the last answer is written in another way once it is there, so "
                "it cannot be found; use a template with generation blocks"
            )
        else:
            what = (
                f"the template writes message {turn} in another way once more is said, as if it "
                "dropped reasoning: its answer is not found; use --train-on last"
            )
        raise RowError(RejectReason.NOT_A_PREFIX, what)


def _head(conversation: Conversation, turns: int) -> Conversation:
    return Conversation(conversation.messages[:turns], conversation.tools, conversation.variables)


def _without_tail(text: str, start: int, end: int, specials: list[Range]) -> int:
    """The end of an answer, without the white space that follows its end token."""
    last = bisect.bisect_right(specials, end, key=lambda place: place[1]) - 1
    if last < 0 or specials[last][0] < start:
        return end
    own_end = specials[last][1]
    return end if text[own_end:end].strip() else own_end
