"""What of a text a tokenizer does not know: it becomes `<unk>`, or it is dropped without a word.

    TokenizerInfo.unknown -> UnknownText(...).find(texts, tokens) -> Lost, document by document

An `<unk>` stands for a character, for a row of them, or for a word, so that the number of ids says
little of how much text is gone. What each stands for follows from the characters (or words) alone
in nearly every text: that they give as many ids as there are proves it, and where they do not, the
reference encodes the text again and says where each id comes from. Only documents that have such an
id are looked at; tokenizers that know every byte have none, and cost nothing.
"""

from __future__ import annotations

import itertools
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.engines import base
from tokenmill.engines.base import (
    UTF8_BYTES,
    TokenizerKind,
    UnencodableError,
    Unknown,
    nested_steps,
)
from tokenmill.records import TextBatch, TokenBatch, cut_ranges

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine, TokenizerInfo
    from tokenmill.engines.references import SentencePieceModel


# -------------------------------------------------------------------------------------------------
# What a tokenizer's file says of it.


def unknown_of_json(content: Mapping[str, Any], vocab: Mapping[str, int]) -> Unknown | None:
    """What a tokenizer.json makes of what it does not know; None where it knows everything.

    None also where it fails on such text: that is a rejected row.
    """
    model = content["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in UTF8_BYTES):
        return None
    if kind == "Unigram":
        number = model.get("unk_id")
        if not isinstance(number, int):
            return None
        token = next((text for text, index in vocab.items() if index == number), None)
        return None if token is None else Unknown(token=token, id=number, is_fused=True)
    token = model.get("unk_token")
    number = vocab.get(token) if isinstance(token, str) else None
    if kind != "BPE":
        return None if number is None else Unknown(token=token, id=number, by_word=True)
    missing: tuple[int, ...] = ()
    steps = nested_steps(content.get("normalizer"), content.get("pre_tokenizer"))
    if any(step.get("type") == "ByteLevel" for step in steps):
        missing = tuple(byte for byte in UTF8_BYTES if base.BYTE_TO_CHAR[byte] not in vocab)
        if not missing:
            return None
    if token is not None and number is None:
        return None  # the package fails
    fused = bool(model.get("fuse_unk"))
    return Unknown(token=token, id=number, is_fused=fused, missing_bytes=missing)


def unknown_of_model(model: SentencePieceModel) -> Unknown | None:
    """The same of a SentencePiece model."""
    kinds = type(model.pieces[0][1])
    found = [at for at, (_, kind) in enumerate(model.pieces) if kind is kinds.UNKNOWN]
    if not found or model.byte_fallback:
        return None
    by_word = model.model_type is type(model.model_type).WORD
    return Unknown(token=model.pieces[found[0]][0], id=found[0], is_fused=True, by_word=by_word)


# -------------------------------------------------------------------------------------------------
# How much of texts that is.


class Lost(NamedTuple):
    """How much of each document its tokenizer does not know."""

    characters: NDArray[np.int64]
    num_bytes: NDArray[np.int64]

    def take(self, indices: NDArray[np.int64]) -> Lost:
        return Lost(self.characters[indices], self.num_bytes[indices])


class _Found(NamedTuple):
    """What a text, or a part of one, has of the unknown."""

    ids: int
    characters: int
    num_bytes: int
    examples: tuple[str, ...]


class _Seen(NamedTuple):
    """Characters that are unknown, and the documents that they are in."""

    documents: NDArray[np.int64]
    points: NDArray[np.uint32]
    times: NDArray[np.int64]


# What is known of a character: nothing yet; the tokenizer has it; it has not; its normalization
# leaves nothing of it.
_NEW, _KNOWN, _LOST, _GONE = range(4)
_NUM_POINTS = 0x110000
_AT_ONCE = 1 << 20  # bytes of text that are looked at together
_AT_A_TIME = 1 << 15  # characters that the reference looks at together
_MOST_WORDS = 1 << 18  # that are remembered
_MOST_EXAMPLES = 1 << 12  # different words that are counted as examples: the first
_EXAMPLE_CHARACTERS = 24
# A character that no vocabulary has: the last one for private use.
_NOBODYS = chr(0x10FFFD)


class UnknownText:
    """Finds what of documents a tokenizer does not know."""

    def __init__(self, unknown: Unknown, reference: Engine, *, normalizes: bool) -> None:
        self.unknown = unknown
        self._reference: Any = reference
        self._normalizes = normalizes
        self._words: dict[str, _Found | None] = {}
        self._verdicts = np.zeros(0 if unknown.by_word else _NUM_POINTS, np.uint8)
        self._looked_at: list[np.uint8] | None = None

    @classmethod
    def of(cls, info: TokenizerInfo, reference: Engine) -> UnknownText | None:
        """None for a tokenizer that knows every text."""
        if info.unknown is None:
            return None
        normalizes = info.has_normalizer or info.kind is TokenizerKind.SENTENCEPIECE
        return cls(info.unknown, reference, normalizes=normalizes)

    def find(
        self,
        texts: TextBatch,
        tokens: TokenBatch,
        examples: Counter[str],
        *,
        among: NDArray[np.int64] | None = None,
    ) -> Lost | None:
        """What of each document is unknown; None where nothing is.

        `tokens` are all ids of the texts. `examples` counts what is unknown: characters, or words.
        With `among`, only these documents are looked at, and in the answer.
        """
        counts = np.zeros(len(texts), np.int64)
        if self.unknown.id is not None:
            places = np.flatnonzero(tokens.ids == self.unknown.id)
            if not len(places):
                return None
            of = np.searchsorted(tokens.offsets, places, side="right") - 1
            counts = np.bincount(of, minlength=len(texts))
        among = np.arange(len(texts)) if among is None else among
        chosen = among if self.unknown.id is None else among[counts[among] > 0]
        lost = Lost(np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64))
        if self.unknown.by_word:
            for at in chosen.tolist():
                found = self._in_words(texts.text_at(at), int(counts[at]))
                lost.characters[at], lost.num_bytes[at] = found.characters, found.num_bytes
                _count_examples(examples, found.examples)
        else:
            self._by_character(texts, chosen, counts, lost, examples)
        lost = lost.take(among)
        return lost if lost.num_bytes.any() else None

    # Word by word.

    def _in_words(self, text: str, num_ids: int) -> _Found:
        """What is unknown in the words of a text, if each is by itself what it is in the text."""
        words = text.split()
        if max(map(len, words), default=0) <= _AT_A_TIME:
            self._learn(words)
            found = [self._words[word] for word in words]
            if all(found):
                total = _added(filter(None, found))
                if total.ids == num_ids:
                    return total
        return self._by_reference(text)

    def _learn(self, words: list[str]) -> None:
        """Find out what is unknown in words: in most of those that are new, nothing."""
        new = [word for word in dict.fromkeys(words) if word not in self._words]
        if len(self._words) + len(new) > _MOST_WORDS:
            self._words.clear()
            new = list(dict.fromkeys(words))
        while new:
            try:
                tokens = self._reference.encode(TextBatch.from_texts(new))
                break
            except UnencodableError as error:
                failed = {new[place] for place in error.documents}
                self._words.update(dict.fromkeys(failed))
                new = [word for word in new if word not in failed]
        else:
            return
        places = np.flatnonzero(tokens.ids == self.unknown.id)
        lost = {*(np.searchsorted(tokens.offsets, places, side="right") - 1).tolist()}
        for number, word in enumerate(new):
            self._words[word] = self._located(word) if number in lost else _Found(0, 0, 0, ())

    # By the reference.

    def _by_reference(self, text: str) -> _Found:
        """What is unknown in a text, by what its reference says of each id."""
        found = []
        for part in _parts(text):
            try:
                found.append(self._located(part))
            except UnencodableError:  # of a part alone: nobody knows
                continue
        return _added(found)

    def _located(self, text: str) -> _Found:
        ids = self._reference.encode(TextBatch.from_texts([text])).ids
        places = np.flatnonzero(ids == self.unknown.id).tolist()
        if not places:
            return _Found(0, 0, 0, ())
        spans, token = self._reference.offsets(text), self.unknown.token
        is_lost, parts = np.zeros(len(text), bool), []
        for first, last in (spans[place] for place in places if place < len(spans)):
            part = text[first:last]
            if part == token:  # it is there by name
                continue
            if self.unknown.by_word:
                first += len(part) - len(part.lstrip())
                parts.append(part.strip())
            else:
                parts += part
            is_lost[first:last] = True
        lost = "".join(itertools.compress(text, is_lost.tolist()))
        return _Found(len(places), len(lost), len(lost.encode()), tuple(filter(None, parts)))

    # Character by character.

    def _by_character(
        self,
        texts: TextBatch,
        chosen: NDArray[np.int64],
        counts: NDArray[np.int64],
        lost: Lost,
        examples: Counter[str],
    ) -> None:
        unknown = self.unknown
        token = (unknown.token or "").encode()
        for first, last in cut_ranges(np.append(0, np.cumsum(texts.lengths[chosen])), _AT_ONCE):
            documents = chosen[first:last]
            taken = texts.take(documents)
            characters, num_bytes, runs, seen = self._look(taken)
            expected = runs if unknown.is_fused else characters
            wrong, joined = np.zeros((2, len(documents)), bool)
            if unknown.id is not None:
                wrong = expected != counts[documents]
                for each in seen if self._normalizes else ():
                    joined[each.documents[self._may_join(each.points)]] = True
                wrong |= joined
            for at in np.flatnonzero(wrong).tolist():
                # The token may be there by its name.
                named = 0 if joined[at] else taken.bytes_at(at).count(token)
                if named and expected[at] + named == counts[documents[at]]:
                    wrong[at] = False
                    continue
                found = self._by_reference(taken.text_at(at))
                characters[at], num_bytes[at] = found.characters, found.num_bytes
                _count_examples(examples, found.examples)
            for each in seen:
                is_right = ~wrong[each.documents]
                points, places = np.unique(each.points[is_right], return_inverse=True)
                times = np.bincount(places, each.times[is_right]).astype(np.int64)
                for point, number in zip(points.tolist(), times.tolist(), strict=True):
                    examples[chr(point)] += number
            lost.characters[documents], lost.num_bytes[documents] = characters, num_bytes

    def _look(
        self, texts: TextBatch
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[_Seen]]:
        """Of each document: characters that nobody knows, their bytes, and rows of them.

        And which they are.
        """
        number, data = len(texts), texts.data
        totals = np.zeros((3, number), np.int64)
        seen: list[_Seen] = []
        looked_at = self._ascii_looked_at()
        before: tuple[int, int] = (-1, -1)  # end and document of a row that may go on
        for begin, end in _windows(data):
            window = data[begin:end]
            is_looked_at = window >= 0x80
            for byte in looked_at:
                is_looked_at |= window == byte
            places = begin + np.flatnonzero(is_looked_at)
            if not len(places):
                continue
            some = data[places]
            leads = (some & 0xC0) != 0x80
            starts = places[leads]
            points = np.frombuffer(some.tobytes().decode().encode("utf-32-le"), np.uint32)
            verdicts = self._judge(points)
            of_interest = np.flatnonzero(verdicts >= _LOST)
            if not len(of_interest):
                continue
            starts, points = starts[of_interest], points[of_interest]
            is_lost = verdicts[of_interest] == _LOST
            widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
            documents = np.searchsorted(texts.offsets, starts, side="right") - 1
            # What is side by side, or has nothing but what is gone in between.
            breaks = np.ones(len(starts), bool)
            breaks[1:] = starts[1:] != starts[:-1] + widths[:-1]
            breaks[1:] |= documents[1:] != documents[:-1]
            rows = np.cumsum(breaks)[is_lost]
            if not len(rows):
                continue
            documents, points, ends = documents[is_lost], points[is_lost], starts + widths
            is_first = np.append(True, rows[1:] != rows[:-1])
            if (int(starts[0]), int(documents[0])) == before and is_lost[0]:
                is_first[0] = False
            goes_on = bool(is_lost[-1])
            before = (int(ends[-1]), int(documents[-1])) if goes_on else (-1, -1)
            totals[0] += np.bincount(documents, minlength=number)
            lengths = widths[is_lost]
            totals[1] += np.bincount(documents, lengths, minlength=number).astype(np.int64)
            totals[2] += np.bincount(documents[is_first], minlength=number)
            times = np.ones(len(points), np.int64)
            if number == 1:  # it may be far longer than others together
                points, times = np.unique(points, return_counts=True)
                documents = np.zeros(len(points), np.int64)
            seen.append(_Seen(documents, points, times))
        return totals[0], totals[1], totals[2], seen

    def _ascii_looked_at(self) -> list[np.uint8]:
        """ASCII that is unknown: it is judged once, all else as it comes."""
        if self._looked_at is None:
            verdicts = self._judge(np.arange(0x80, dtype=np.uint32))
            self._looked_at = [*np.flatnonzero(verdicts == _LOST).astype(np.uint8)]
        return self._looked_at

    def _judge(self, points: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """What is known of each character; the reference is asked once for each."""
        verdicts = self._verdicts[points]
        new = np.unique(points[verdicts == _NEW])
        if len(new):
            characters = [chr(point) for point in new.tolist()]
            self._verdicts[new] = list(map(self._verdict, characters))
            verdicts = self._verdicts[points]
        return verdicts

    def _may_join(self, points: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of them may be one with the character in front, which is unknown then too."""
        different = np.unique(points)
        marks = [point for point in different.tolist() if unicodedata.combining(chr(point))]
        return np.isin(points, marks)

    def _verdict(self, character: str) -> int:
        if self.unknown.missing_bytes:
            if set(character.encode()) & set(self.unknown.missing_bytes):
                return _LOST
            return _KNOWN
        ids = self._ids(character)
        if self.unknown.id is not None:
            if self.unknown.id in ids:
                return _LOST
            # Between two that are lost it tells whether it parts them.
            both = self._ids(f"{_NOBODYS}{character}{_NOBODYS}").count(self.unknown.id)
            return _GONE if both == 1 else _KNOWN
        may_go = self._normalizes and unicodedata.category(character)[0] in "CM"
        is_dropped = not character.isspace() and not may_go and ids == self._ids(_NOBODYS)
        return _LOST if is_dropped else _KNOWN

    def _ids(self, text: str) -> list[int]:
        try:
            found: list[int] = self._reference.encode(TextBatch.from_texts([text])).ids.tolist()
        except UnencodableError:
            return []
        return found


def _added(found: Iterator[_Found] | list[_Found]) -> _Found:
    ids = characters = num_bytes = 0
    examples: list[str] = []
    for each in found:
        ids += each.ids
        characters += each.characters
        num_bytes += each.num_bytes
        examples += each.examples
    return _Found(ids, characters, num_bytes, tuple(examples))


def _count_examples(examples: Counter[str], found: tuple[str, ...]) -> None:
    for each in found:
        example = each[:_EXAMPLE_CHARACTERS]
        if example in examples or len(examples) < _MOST_EXAMPLES or len(example) == 1:
            examples[example] += 1


def _parts(text: str) -> Iterator[str]:
    """A text in parts that the reference can take, cut after whitespace where there is any."""
    first = 0
    while first < len(text):
        last = min(len(text), first + _AT_A_TIME)
        if last < len(text):
            cut = max(text.rfind(" ", first, last), text.rfind("\n", first, last))
            last = cut + 1 if cut > first else last
        yield text[first:last]
        first = last


def _windows(data: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Ranges of bytes, cut between characters."""
    begin = 0
    while begin < len(data):
        end = min(len(data), begin + _AT_ONCE)
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        yield begin, end
        begin = end
