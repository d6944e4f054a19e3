"""Preferences: a prompt with an answer that was chosen and one that was rejected.

A row is one text of two sides until it is written, `prompt chosen prompt rejected`, and then two
documents, one after the other: its pieces. Where the second side begins is not kept anywhere, since
the mask tells it: it is where what counts is followed by what does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.records import RejectReason, TokenBatch, kind_of
from tokenmill.supervised.rows import (
    ASSISTANT,
    TOOLS,
    VARIABLES,
    RowError,
    lookup,
    read_conversation,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tokenmill.options import RowShape
    from tokenmill.supervised.rows import Conversation


class Sides(NamedTuple):
    """A row as texts: what is said before, and with each answer after it."""

    prompt: str
    chosen: str
    rejected: str


class ChatSides(NamedTuple):
    """A row as conversations, and how many messages of them are the prompt."""

    chosen: Conversation
    rejected: Conversation
    prompt: int


def _given_prompt(row: Mapping[str, Any], shape: RowShape, kind: type) -> Any:
    """The prompt of a row; None where it is only what both sides begin with."""
    try:
        prompt = lookup(dict(row), shape.prompt_field)
    except RowError:
        return None
    return prompt if isinstance(prompt, kind) else None


def read_sides(row: dict[str, Any], shape: RowShape) -> Sides:
    """Texts; what both sides begin with is their prompt where no other is given."""
    chosen, rejected = (text_of(row, name) for name in (shape.chosen_field, shape.rejected_field))
    prompt = _given_prompt(row, shape, str)
    if prompt is None:
        size = _shared(chosen, rejected)
        # The space before a word is part of its token.
        size -= int(size > 0 and chosen[size - 1] == " ")
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    if not prompt:
        raise _bad("there is no prompt, and the two sides have no beginning in common")
    _check(chosen, rejected)
    return Sides(prompt, prompt + chosen, prompt + rejected)


def read_chat_sides(row: dict[str, Any], shape: RowShape) -> ChatSides:
    """Conversations, in the same way."""
    sides = []
    for name in (shape.chosen_field, shape.rejected_field):
        if not isinstance(messages := lookup(row, name), list):
            raise _bad(f"field {name!r} is {kind_of(messages)}, not an array")
        sides.append(messages)
    chosen, rejected = sides
    prompt = _given_prompt(row, shape, list)
    if prompt is None:
        size = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    if not prompt:
        raise _bad("there is no prompt, and the two sides have no message in common")
    _check(chosen, rejected)
    more = {name: row[name] for name in (TOOLS, VARIABLES) if name in row}
    made = [
        read_conversation({"messages": [*prompt, *side], **more}, "messages")
        for side in (chosen, rejected)
    ]
    for conversation in made:
        messages = conversation.messages
        if messages[len(prompt) - 1]["role"] == ASSISTANT:
            raise _bad("the prompt ends with what the assistant says")
        if messages[len(prompt)]["role"] != ASSISTANT:
            what = "a side does not begin with what the assistant says"
            raise RowError(RejectReason.NO_ASSISTANT_TURN, what)
    return ChatSides(made[0], made[1], len(prompt))


def _shared(one: Any, other: Any) -> int:
    """With how much both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check(chosen: Any, rejected: Any) -> None:
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not side:
            raise RowError(RejectReason.NOTHING_TO_TRAIN, f"the {name} side is empty")
    if chosen == rejected:
        raise RowError(RejectReason.NOTHING_TO_TRAIN, "both sides are the same")


def _bad(detail: str) -> RowError:
    return RowError(RejectReason.BAD_CONVERSATION, detail)


def join_sides(tokens: TokenBatch) -> TokenBatch:
    """Rows of both sides, with what counts, of prompts and the sides with them, three to a row.

    A side begins where the tokens of the prompt alone and with it first differ, of both sides the
    earlier place: that is mostly right after the prompt, and before it where tokens merge. Where
    that leaves a side or the prompt without a token, nothing of the row counts.
    """
    ids, masks, lengths = list[Any](), list[Any](), [0]
    for place in range(0, len(tokens), 3):
        prompt, *sides = (tokens[place + number] for number in range(3))
        first = min(_alike(prompt, side) for side in sides)
        is_whole = 0 < first < min(map(len, sides))
        for side in sides:
            mask = np.zeros(len(side), np.uint8)
            mask[first:] = is_whole
            ids.append(side)
            masks.append(mask)
        lengths.append(sum(map(len, sides)))
    none = np.empty(0, np.uint32), np.empty(0, np.uint8)
    offsets = np.cumsum(np.array(lengths, np.int64))
    return TokenBatch(np.concatenate([none[0], *ids]), offsets, np.concatenate([none[1], *masks]))


def _alike(one: NDArray[Any], other: NDArray[Any]) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def side_lengths(mask: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of both sides of each row, in turns: a side ends where nothing counts after it."""
    ends = np.cumsum(lengths)
    turns = 1 + np.flatnonzero((mask[:-1] == 1) & (mask[1:] == 0))
    turns = np.setdiff1d(turns, ends)
    assert len(turns) == len(lengths), "a row of a pair has not two sides"
    bounds = np.sort(np.concatenate([[0], turns, ends]))
    found: NDArray[np.int64] = np.diff(bounds)
    return found


def fit_sides(
    shape: RowShape, tokens: TokenBatch
) -> tuple[TokenBatch, NDArray[np.int64], dict[int, tuple[RejectReason, str]]]:
    """Rows whose sides are within the limit or cut off at it, their places; why others are not."""
    limit, reasons = shape.max_length, dict[int, tuple[RejectReason, str]]()
    ids, masks, lengths, kept = list[Any](), list[Any](), [0], list[int]()
    for place in range(len(tokens)):
        first, last = tokens.offsets[place : place + 2].tolist()
        assert tokens.mask is not None
        mask, row = tokens.mask[first:last], tokens.ids[first:last]
        turns = 1 + np.flatnonzero((mask[:-1] == 1) & (mask[1:] == 0))
        if not len(turns):
            what = "a side has no token of its own after the prompt"
            reasons[place] = RejectReason.NOTHING_TO_TRAIN, what
            continue
        sides = [(row[:at], mask[:at]) for at in turns.tolist()]
        sides += [(row[at:], mask[at:]) for at in turns.tolist()]
        longest = max(len(side) for side, _ in sides)
        if limit is not None and longest > limit:
            if shape.too_long == "reject":
                what = f"a side of {longest:,} tokens; the limit is {limit:,}"
                reasons[place] = RejectReason.TOO_LONG, what
                continue
            sides = [(side[:limit], counts[:limit]) for side, counts in sides]
            if not all(counts.any() for _, counts in sides):
                what = f"no token of a side would be trained on within {limit:,} tokens"
                reasons[place] = RejectReason.NOTHING_TO_TRAIN, what
                continue
        ids += [side for side, _ in sides]
        masks += [counts for _, counts in sides]
        lengths.append(sum(len(side) for side, _ in sides))
        kept.append(place)
    none = np.empty(0, np.uint32), np.empty(0, np.uint8)
    offsets = np.cumsum(np.array(lengths, np.int64))
    made = TokenBatch(np.concatenate([none[0], *ids]), offsets, np.concatenate([none[1], *masks]))
    return made, np.array(kept, np.int64), reasons
