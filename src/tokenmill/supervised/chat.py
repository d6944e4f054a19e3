"""A conversation as text, with the special tokens that its template wrote and what counts of it.

What counts is what the assistant said, its end token included. A template that marks it with
generation blocks is taken at its word. For the others the conversation is rendered up to each
answer with the header of an answer behind it, and again up to the end of that answer: what lies
between is the answer. That holds only if both texts are beginnings of the whole, which is checked.
"""

from __future__ import annotations

import bisect
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.engines.base import TokenizerKind
from tokenmill.errors import TokenizerError
from tokenmill.records import RejectReason
from tokenmill.supervised.pieces import STRETCH, SWALLOWED, PieceCut, RowText
from tokenmill.supervised.provenance import Provenance
from tokenmill.supervised.rows import Conversation, RowError, read_conversation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.supervised.pieces import Range
    from tokenmill.supervised.templates import ChatTemplate, ChatTemplates, MessagePlaces


ALL, ASSISTANT, LAST = "all", "assistant", "last"


class ChatMaker:
    """Makes texts of conversations."""

    def __init__(
        self,
        templates: ChatTemplates,
        specials: ChatSpecials,
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


# -------------------------------------------------------------------------------------------------
# The special tokens of a tokenizer as a chat needs them: where they stand, and what they swallow.
#
# `tokenizers` looks for added tokens from the left and takes the longest one at each place, before
# anything else is done with a text; some of them take the white space beside them too. The text
# between two of them is then normalized, split and encoded by itself. That is why a text can be
# cut at its special tokens without a seam.

# Unicode's White_Space, which is not quite Python's \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LEFT = re.compile(f"[{_SPACE}]*\\Z")
_RIGHT = re.compile(f"[{_SPACE}]*")


@dataclass(frozen=True, slots=True)
class SpecialToken:
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
        others = {} if others is None else others
        self._pattern = re.compile(f"({_any_of(sorted({*tokens, *others})) or '(?!)'})")
        self._split = self._pattern.split
        self._strips = any(token.lstrip or token.rstrip for token in self.tokens.values())
        self._special_ids = {token.id for token in self.tokens.values()}
        plain = self.tokens | dict(others)
        self._ids = {name: token.id for name, token in plain.items()}
        self._is_plain = not any(token.lstrip or token.rstrip for token in plain.values())

    def cut(self, text: str, checked: str) -> PieceCut:
        """The text in pieces; `checked` is as long and has only the tokens that are meant."""
        if not self._is_plain:
            return self._cut_one_by_one(text, checked)
        # Added tokens that are not special are themselves wherever they stand.
        strings = self._split(checked)
        kinds = [STRETCH] * len(strings)
        ids = self._ids
        kinds[1::2] = [ids[name] for name in strings[1::2]]
        if text is not checked:
            strings = _slices(text, strings)
        return PieceCut(strings, kinds)

    def places(self, cut: PieceCut) -> list[tuple[int, int]]:
        """Where the special tokens of a text stand, and no other added ones."""
        found, start, special = [], 0, self._special_ids
        for string, kind in zip(cut.strings, cut.kinds, strict=True):
            end = start + len(string)
            if kind in special:
                found.append((start, end))
            start = end
        return found

    def _cut_one_by_one(self, text: str, checked: str) -> PieceCut:
        bounds: list[int] = [0]
        kinds: list[int] = []
        for one in self.find(checked):
            bounds += (one.start, one.own_start, one.own_end, one.end)
            kinds += (STRETCH, SWALLOWED, one.id, SWALLOWED)
        bounds.append(len(text))
        strings = [text[a:b] for a, b in itertools.pairwise(bounds)]
        return PieceCut(strings, [*kinds, STRETCH])

    def find(self, text: str) -> list[Found]:
        """The special tokens of the text, from left to right."""
        found: list[Found] = []
        tokens = self.tokens
        for match in self._pattern.finditer(text):
            token = tokens.get(match[0])
            if token is None:
                continue
            start, end = match.span()
            if self._strips:
                start, end = self._widened(text, start, end, token, found)
                if start >= end:
                    continue
            found.append(Found(start, end, token.id, *match.span()))
        return found

    def _widened(
        self, text: str, start: int, end: int, token: SpecialToken, found: list[Found]
    ) -> tuple[int, int]:
        floor = found[-1].end if found else 0
        if token.lstrip:
            space = _LEFT.search(text, floor, start)
            start = space.start() if space else start
        if token.rstrip:
            space = _RIGHT.match(text, end)
            end = space.end() if space else end
        return max(start, floor), end


def _slices(text: str, like: list[str]) -> list[str]:
    """The text in pieces as long as others."""
    slices, start = [], 0
    for other in like:
        slices.append(text[start : start + len(other)])
        start += len(other)
    return slices


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
    added = info.added_tokens
    for token in added:
        if token.get("special"):
            _check(token, has_normalizer=info.has_normalizer)
    special: dict[str, SpecialToken] = {}
    others: dict[str, SpecialToken] = {}
    for token in added:
        strips = bool(token.get("lstrip")), bool(token.get("rstrip"))
        if token.get("special"):
            special[token["content"]] = SpecialToken(int(token["id"]), *strips)
        elif not token.get("normalized"):
            # One that is only found as a word by itself is left to the engine, as one that strips.
            strips = (True, True) if token.get("single_word") else strips
            others[token["content"]] = SpecialToken(int(token["id"]), *strips)
    for known in (special, others):
        known.pop("", None)
    return ChatSpecials(special, others)


def _check(token: Mapping[str, Any], *, has_normalizer: bool) -> None:
    refused = None
    if token.get("single_word"):
        refused = "is matched as a single word only"
    elif token.get("normalized") and has_normalizer:
        refused = "is looked for in normalized text"
    if refused:
        raise TokenizerError(
            f"the special token {token['content']!r} of this tokenizer {refused}; a chat is cut at "
            "its special tokens before it is normalized",
            hint='set "normalized" and "single_word" to false for it in tokenizer.json',
        )
