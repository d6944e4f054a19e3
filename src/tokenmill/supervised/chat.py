"""A conversation as text, with the special tokens that its template wrote and what counts of it.

What counts is what the assistant said, its end token included. A template that marks it with
generation blocks is taken at its word. For the others the conversation is rendered up to each
answer, with the header of an answer after it, and again up to the end of that answer: what is
between is the answer. That holds only if both texts are beginnings of the whole, which is checked.
"""

from __future__ import annotations

import bisect
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.engines.base import TokenizerKind
from tokenmill.errors import TokenizerError
from tokenmill.records import RejectReason
from tokenmill.supervised.pieces import STRETCH, SWALLOWED, PieceCut, RowText
from tokenmill.supervised.provenance import Provenance
from tokenmill.supervised.rows import Conversation, RowError, read_conversation
from tokenmill.supervised.templates import DEFAULT, WITH_TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.supervised.pieces import Range
    from tokenmill.supervised.sandbox import ChatTemplate


ALL, LAST = "all", "last"


class ChatMaker:
    """Makes texts of conversations."""

    def __init__(
        self,
        templates: Mapping[str, ChatTemplate],
        specials: ChatSpecials,
        *,
        train_on: str,
        messages_field: str | None,
    ) -> None:
        self._specials = specials
        self._train_on = train_on
        self._field = messages_field
        self._templates = {
            name: (template, Provenance(template, specials.tokens))
            for name, template in templates.items()
        }

    def __call__(self, row: dict[str, Any]) -> RowText:
        """The text of a row's conversation."""
        conversation = read_conversation(row, self._field)
        turns = conversation.assistant_turns
        if not turns:
            raise RowError(RejectReason.NO_ASSISTANT_TURN, "no message has the role assistant")
        has_tools = conversation.tools is not None and WITH_TOOLS in self._templates
        template, provenance = self._templates[WITH_TOOLS if has_tools else DEFAULT]
        generated = None
        if template.has_generation and self._train_on != ALL:
            text, generated = template.render_tracked(conversation)
        else:
            text = template.render(conversation)
        cut = self._specials.cut(text, provenance.without_doubt(conversation, text))
        if self._train_on == ALL:
            ranges = [(0, len(text))]
        elif generated is None:
            ranges = self._answers(template, conversation, text, self._specials.places(cut))
        elif self._train_on == LAST and len(generated) == len(turns):
            ranges = generated[-1:]
        elif self._train_on == LAST and len(generated) > 1:
            before = template.render_tracked(_head(conversation, turns[-1]))[1]
            ranges = generated[len(before) :]
        else:
            ranges = generated
        return RowText(text, ranges, cut)

    def _answers(
        self, template: ChatTemplate, conversation: Conversation, text: str, specials: list[Range]
    ) -> list[Range]:
        """Ranges of the answers, by rendering what comes before and up to each of them."""
        turns = conversation.assistant_turns
        turns = turns[-1:] if self._train_on == LAST else turns
        # For one answer it would save nothing.
        borders = template.borders(conversation, text) if len(turns) > 1 else None

        def place(count: int, *, prompt: bool) -> int:
            """Where so many messages end in the text of the whole."""
            known = borders.places[count] if borders is not None and count else None
            if borders is not None and known is not None:
                tail = borders.tails[prompt]
                if text.startswith(tail, known):
                    return known + len(tail)
            else:
                beginning = template.render(_head(conversation, count), prompt=prompt)
                if text.startswith(beginning):
                    return len(beginning)
            what = (
                f"the template writes message {count if prompt else count - 1} in another way once "
                "more is said, as if it dropped reasoning: its answer is not found; use --train-on "
                "last"
            )
            if self._train_on == LAST:
                what = (
                    "what comes before the last answer is written in another way once it is there, "
                    "so it cannot be found; use a template with generation blocks"
                )
            raise RowError(RejectReason.NOT_A_PREFIX, what)

        ranges = []
        for turn in turns:
            start = place(turn, prompt=True)
            if not template.has_prompt and text.startswith(template.answer_header, start):
                start += len(template.answer_header)
            is_last = turn + 1 == len(conversation.messages)
            end = len(text) if is_last else place(turn + 1, prompt=False)
            if start < end:
                # Without the white space that follows its end token.
                last = bisect.bisect_right(specials, end, key=lambda one: one[1]) - 1
                if last >= 0 and specials[last][0] >= start:
                    own_end = specials[last][1]
                    end = end if text[own_end:end].strip() else own_end
                ranges.append((start, end))
        return ranges


def _head(conversation: Conversation, count: int) -> Conversation:
    return Conversation(conversation.messages[:count], conversation.tools, conversation.variables)


# The special tokens of a tokenizer as a chat needs them: where they are, and what they swallow.
#
# `tokenizers` looks for added tokens from the left and takes the longest one at each place, before
# anything else is done with a text; some of them take the white space beside them too. The text
# between two of them is then normalized, split and encoded by itself. That is why a text can be
# cut at its special tokens without a seam.

# Unicode's White_Space, which is not quite Python's \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LEFT = re.compile(f"[{_SPACE}]*\\Z")
_RIGHT = re.compile(f"[{_SPACE}]*")


class SpecialToken(NamedTuple):
    """A special token's id, and whether it takes the white space beside it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Found(NamedTuple):
    """A special token in a text: its own string, and all that it takes with it."""

    start: int
    end: int
    id: int
    own_start: int
    own_end: int


class ChatSpecials:
    """Finds special tokens in a text as the tokenizer itself would."""

    def __init__(
        self, tokens: Mapping[str, SpecialToken], others: Mapping[str, SpecialToken] | None = None
    ) -> None:
        """`others` are added tokens that are not special, and may be in the way of one that is."""
        self.tokens = dict(tokens)
        added = self.tokens | dict(others or {})
        self._pattern = re.compile(f"({_any_of(sorted(added)) or '(?!)'})")
        self._special_ids = {token.id for token in self.tokens.values()}
        self._ids = {name: token.id for name, token in added.items()}
        self._is_plain = not any(token.lstrip or token.rstrip for token in added.values())

    def cut(self, text: str, checked: str) -> PieceCut:
        """The text in pieces; `checked` is as long and has only the tokens that are meant."""
        if self._is_plain:
            # Added tokens that are not special are themselves wherever they are.
            strings = self._pattern.split(checked)
            kinds = [STRETCH] * len(strings)
            kinds[1::2] = [self._ids[name] for name in strings[1::2]]
            if text is checked:
                return PieceCut(strings, kinds)
            bounds = [0, *itertools.accumulate(map(len, strings))]
        else:
            bounds, kinds = [0], []
            for one in self.find(checked):
                bounds += (one.start, one.own_start, one.own_end, one.end)
                kinds += (STRETCH, SWALLOWED, one.id, SWALLOWED)
            bounds.append(len(text))
            kinds.append(STRETCH)
        return PieceCut([text[a:b] for a, b in itertools.pairwise(bounds)], kinds)

    def places(self, cut: PieceCut) -> list[Range]:
        """Where the special tokens of a text are, and no other added ones."""
        found, start, special = [], 0, self._special_ids
        for string, kind in zip(cut.strings, cut.kinds, strict=True):
            end = start + len(string)
            if kind in special:
                found.append((start, end))
            start = end
        return found

    def find(self, text: str) -> list[Found]:
        """The special tokens of the text, from left to right."""
        found: list[Found] = []
        for match in self._pattern.finditer(text):
            token = self.tokens.get(match[0])
            if token is None:
                continue
            start, end = match.span()
            floor = found[-1].end if found else 0
            if token.lstrip and (space := _LEFT.search(text, floor, start)):
                start = space.start()
            if token.rstrip and (space := _RIGHT.match(text, end)):
                end = space.end()
            start = max(start, floor)
            if start < end:
                found.append(Found(start, end, token.id, *match.span()))
        return found


def _any_of(names: list[str]) -> str:
    """A pattern for any of the names, the longest that fits first: shared beginnings once.

    The names are sorted. One by one they would all be tried at every `<` of a text.
    """
    branches = []
    for first, group in itertools.groupby(filter(None, names), key=lambda name: name[0]):
        rest = [name[1:] for name in group]
        inner = _any_of(rest)
        if inner:
            # A name that ends here is taken only where none that goes on does.
            inner = f"(?:{inner})?" if "" in rest else f"(?:{inner})"
        branches.append(re.escape(first) + inner)
    return "|".join(branches)


def special_tokens_of(info: TokenizerInfo) -> ChatSpecials:
    """The special tokens of a tokenizer; refused where a text cannot be cut at them."""
    if info.kind is not TokenizerKind.HUGGINGFACE:
        return ChatSpecials({name: SpecialToken(id_) for name, id_ in info.special_tokens.items()})
    special: dict[str, SpecialToken] = {}
    others: dict[str, SpecialToken] = {}
    for token in info.added_tokens:
        content, is_word = token["content"], bool(token.get("single_word"))
        refused = "is matched as a single word only" if is_word else None
        if not is_word and token.get("normalized") and info.has_normalizer:
            refused = "is looked for in normalized text"
        if token.get("special") and refused:
            raise TokenizerError(
                f"the special token {content!r} of this tokenizer {refused}; a chat is cut at its "
                "special tokens before it is normalized",
                hint='set "normalized" and "single_word" to false for it in tokenizer.json',
            )
        # One that is only found as a word by itself is left to the engine, as one that strips.
        strips = [is_word or bool(token.get(side)) for side in ("lstrip", "rstrip")]
        if content and (token.get("special") or not token.get("normalized")):
            known = special if token.get("special") else others
            known[content] = SpecialToken(int(token["id"]), *strips)
    return ChatSpecials(special, others)
