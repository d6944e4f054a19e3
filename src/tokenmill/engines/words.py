"""Word by word: the fast engine for tokenizers whose settings let a text be cut at whitespace.

    bytes -> words (numpy marks the cuts) -> places in a cache (arrow finds them) -> ids (gathered)

Words that are not in the cache are cut once more, where the settings allow that, and their parts
are looked up in the same way: what is between punctuation comes again far more often than words.
Only new parts are given to the reference, each as a text of its own. That is exact where no piece,
merge, added token or rule of normalization reaches over a cut: `covers` proves it by the
tokenizer's settings, and whatever it does not name is refused. A few words cannot be encoded apart
even so; their documents are given to the reference whole. Texts with hardly any whitespace, whose
words never come again, are given to the reference too.
"""

from __future__ import annotations

import base64
import re
import secrets
import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill._version import __version__
from tokenmill.engines import base, find_kernel
from tokenmill.engines.base import (
    Coverage,
    Engine,
    SpecialTokens,
    UnencodableError,
    nested_steps,
    taken_from,
)
from tokenmill.engines.parity import in_contexts, replace_documents
from tokenmill.engines.references import (
    ModelType,
    PieceType,
    RankFile,
    SentencePieceEngine,
    SentencePieceModel,
)
from tokenmill.engines.unigram import Learner, json_learner, kernel_model, refuse_model
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch, TokenBatch, cut_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.load import TokenizerFiles

ENGINE = "words"
_SPACE = "\u2581"
_WHITESPACE = b" \t\n\r"
_BEGIN = b"\xfe"  # the beginning of a word, which is in no text
_VISIBLE = np.arange(0x21, 0x7F)  # in ASCII


# The rules under which a text may be cut. Whatever they do not name is refused.


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """Where a text may be cut: in front of whitespace that follows something else."""

    spaces: bytes  # the bytes that are whitespace
    # How many of the spaces in front of a word are left out when it is encoded alone: the reference
    # puts one there itself, or treats any number alike (None).
    left_out: int | None
    # Words that cannot be encoded apart from their document.
    delicate: re.Pattern[str]
    # Between which two bytes words are cut into parts, [before, after], if they are ASCII.
    seams: NDArray[np.bool_]
    # What normalization makes of visible characters of ASCII; 0 of others and where that depends.
    images: NDArray[np.uint8]
    # Whether a mark at the beginning of a word belongs to the space before it.
    has_marks: bool = False

    def stripped(self, word: bytes) -> bytes:
        """A word as a text of its own."""
        if self.left_out is None:
            return word.lstrip(self.spaces)
        return word[self.left_out :] if word[:1] in self.spaces else word

    def find_delicate(self, words: Sequence[bytes]) -> NDArray[np.bool_]:
        """For each word, whether documents with it are the reference's."""
        texts = [word.lstrip(self.spaces) for word in words]
        found = np.zeros(len(words), bool)
        for place, text in enumerate(texts):
            if not text.isascii():
                found[place], texts[place] = self._is_delicate(text.decode()), b""
        # One search for all words of ASCII: nothing is found over the mark between two.
        joined = _BEGIN.join(texts).decode("latin-1")
        matches = [match.start() for match in self.delicate.finditer(joined)]
        if matches:
            starts = np.cumsum([0, *map(len, texts)][:-1]) + np.arange(len(texts))
            found[np.searchsorted(starts, matches, side="right") - 1] = True
        return found

    def _is_delicate(self, text: str) -> bool:
        first = text[:1] if self.has_marks and not text.isascii() else ""
        # What Python does not know yet may be a mark too.
        if first and (unicodedata.category(first)[0] in "CM" or first in _JOINING):
            return True
        return self.delicate.search(text) is not None


_COVERED = (ModelType.BPE, ModelType.UNIGRAM)


def cut_sentencepiece(model: SentencePieceModel) -> Cutting:
    """How texts may be cut for a SentencePiece model; TokenizerError where they may not be.

    The package makes one string of a text, with U+2581 for spaces, and finds pieces in it. A piece
    with U+2581 in front alone cannot reach over a cut; a rule of normalization cannot where its key
    is all whitespace or has none. Unknown characters in a row become one token: U+2581, which is at
    the beginning of every word, must be known to end such a row.
    """
    kinds = {kind for _, kind in model.pieces}
    own = {text for text, kind in model.pieces if kind is PieceType.USER_DEFINED}
    table = Charsmap(model.charsmap)
    spaces = bytes(
        byte
        for byte in _WHITESPACE
        if chr(byte) == " " or (table.target(bytes([byte])) == b" " and chr(byte) not in own)
    )
    reaching = re.compile(f"[^{_SPACE}]{_SPACE}")
    trims = model.removes_extra_whitespace
    checks = [
        (model.model_type not in _COVERED, f"it is a {model.model_type.name.lower()} model"),
        (not model.escapes_whitespace, "it does not escape whitespace"),
        (model.whitespace_is_suffix, "it treats whitespace as a suffix"),
        (PieceType.UNUSED in kinds, "it has unused pieces"),
        ((_SPACE, PieceType.NORMAL) not in model.pieces, "it has no piece for a space"),
        (any(reaching.search(text) for text, _ in model.pieces), "a piece holds a space inside"),
        (any(len(text.split()) != 1 for text in own if len(text) > 1), "a symbol holds whitespace"),
        (any(_SPACE in text for text in own), "a symbol holds whitespace"),
        (table.joins(spaces), "it normalizes whitespace together with other characters"),
        (_SPACE.encode() in table.targets, "it makes U+2581 of other characters"),
        (trims and not model.adds_dummy_prefix, "it removes whitespace and puts none in front"),
    ]
    if model.model_type is ModelType.UNIGRAM and (reason := refuse_model(model)):
        checks.append((True, reason))
    for refused, reason in checks:
        if refused:
            raise TokenizerError(f"{reason}, so that its words cannot be encoded apart")
    found = (PieceType.NORMAL, PieceType.USER_DEFINED)
    images = _images([{"type": "Precompiled"}], [table])
    return Cutting(
        spaces=spaces,
        left_out=None if trims else int(model.adds_dummy_prefix),
        delicate=re.compile(_SPACE),
        seams=_seams(_joined([text for text, kind in model.pieces if kind in found]), images),
        images=images,
    )


def _joined(pieces: Collection[str]) -> NDArray[np.bool_]:
    """The bytes that are side by side in a piece, or have none: unknown ones may become one."""
    unknown = np.ones(256, bool)
    unknown[[ord(piece) for piece in pieces if len(piece) == 1 and piece.isascii()]] = False
    joined = _side_by_side(pieces)
    joined |= unknown | unknown[:, None]
    return joined


def _side_by_side(texts: Iterable[str]) -> NDArray[np.bool_]:
    data = np.frombuffer("\n".join(texts).encode(), np.uint8)
    found = np.zeros((256, 256), bool)
    found[data[:-1], data[1:]] = True
    return found


def _images(normalizers: Sequence[dict[str, Any]], tables: Sequence[Charsmap]) -> NDArray[np.uint8]:
    """What visible characters become, as `Cutting` has it."""
    images = np.zeros(256, np.uint8)
    images[_VISIBLE] = _VISIBLE
    remaining = iter(tables)
    for step in normalizers:
        if step["type"] == "Precompiled":
            images = next(remaining).images()[images]
        if step["type"] == "Lowercase" or step.get("lowercase", step["type"] == "BertNormalizer"):
            images = np.where((images >= ord("A")) & (images <= ord("Z")), images + 32, images)
        for replaced in (step.get("pattern") or {}).get("String", "").encode():
            images[images == replaced] = 0
    images[~np.isin(images, _VISIBLE)] = 0
    return images


def _seams(joined: NDArray[np.bool_], images: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Seams between visible characters that normalization makes into others that are not joined."""
    is_visible = images > 0
    return ~joined[images[:, None], images] & is_visible & is_visible[:, None]


class Charsmap:
    """A table of normalization, as SentencePiece keeps it: a double array, then the targets."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little") if data else 0
        self._units = np.frombuffer(data[4 : 4 + size - size % 4], "<u4").astype(np.int64)
        self.targets = data[4 + size :]
        # The child of a place by a byte is at `bases[place] ^ byte`, if its label is that byte; the
        # value of a key that ends at a place is at `bases[place]`.
        offsets = (self._units >> 10) << ((self._units & 0x200) >> 6)
        self._bases = np.arange(len(self._units)) ^ offsets

    def target(self, key: bytes) -> bytes | None:
        """What a key is replaced with; None where the table does not have it."""
        place = self._walk(key)
        if place is None or not int(self._units[place]) >> 8 & 1:
            return None
        value = int(self._units[self._bases[place]]) & 0x7FFFFFFF
        return self.targets[value : self.targets.index(b"\0", value)]

    def joins(self, spaces: bytes) -> bool:
        """Whether some key holds one of the spaces together with another byte."""
        for space in spaces:
            place = self._walk(bytes([space]))
            if place is not None and any(
                self._child(place, other) is not None for other in set(range(1, 256)) - set(spaces)
            ):
                return True
        # Of all places, as if each were one that a key passes: at worst it refuses too much.
        units = self._units
        for space in spaces:
            children = self._bases ^ space
            passes = (children < len(units)) & (units < 1 << 31)
            passes[:1] = False  # the beginning
            found = np.flatnonzero(passes)
            found = found[(units[children[found]] & 0x800000FF) == space]
            if set((units[found] & 0xFF).tolist()) - set(spaces):
                return True
        return False

    def images(self) -> NDArray[np.uint8]:
        """What each visible character of ASCII becomes; 0 where that depends on its neighbours."""
        images = np.zeros(256, np.uint8)
        labels = np.append(self._units & 0x800000FF, 0)
        # Of all places, as above.
        passed = np.flatnonzero(np.isin(labels[:-1], _VISIBLE))
        children = np.minimum(self._bases[passed][:, None] ^ _VISIBLE, len(self._units))
        if (labels[children] == _VISIBLE).any():
            return images
        for byte in _VISIBLE.tolist():
            target = self.target(bytes([byte]))
            if target is None or len(target) == 1:
                images[byte] = byte if target is None else target[0]
        return images

    def vanishing_keys(self) -> list[str]:
        """The keys whose targets are empty or hold a space, whitespace itself left out."""
        units, bases, found = self._units, self._bases, []
        has_key = (units >> 8 & 1 == 1) & (units < 1 << 31) & (bases < len(units))
        places = np.flatnonzero(has_key)
        targets = np.frombuffer(self.targets, np.uint8)
        values = np.minimum(units[bases[places]] & 0x7FFFFFFF, len(targets))
        # A target ends at the next zero; how many spaces there are before each place.
        zeros = np.append(np.flatnonzero(targets == 0), len(targets))
        spaces = np.append(0, np.cumsum(targets == ord(" ")))
        ends = zeros[np.searchsorted(zeros, values)]
        vanishes = (ends == values) | (spaces[ends] > spaces[values])
        for place in places[vanishes].tolist():
            key = b""
            while place:
                label = int(units[place]) & 0xFF
                key = bytes([label]) + key
                above = np.flatnonzero(bases == place ^ label)
                place = int(above[0]) if len(above) else 0
            if key.strip(_WHITESPACE):
                found.append(key.decode())
        return found

    def _walk(self, key: bytes) -> int | None:
        place = 0
        for byte in key:
            child = self._child(place, byte)
            if child is None:
                return None
            place = child
        return place

    def _child(self, place: int, byte: int) -> int | None:
        if not len(self._units):
            return None
        child = int(self._bases[place]) ^ byte
        inside = child < len(self._units)
        return child if inside and int(self._units[child]) & 0x800000FF == byte else None


# A tokenizer.json: `tokenizers` finds added tokens, normalizes what is between them, splits that,
# and encodes the parts one by one, so a text may be cut where it is split anyway. What is left to
# prove is that no step before that looks over the cut.

_SPLITTING_WORDS = {"WhitespaceSplit", "BertPreTokenizer", "Whitespace"}
_SPLITTING_PARTS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", *_SPLITTING_WORDS}
_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}
# A space does not compose with anything, and ends what marks can be reordered in.
_NORMALIZING_CHARACTERS = {
    *("BertNormalizer", "Lowercase", "Nmt", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"),
}
_COLLAPSING = (" {2,}", r"\s+")
# Characters beside the marks that Unicode joins with the one before them.
_JOINING = "\uff9e\uff9f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
# Characters that it joins with the one after them, be it a space.
_PREPENDED = (
    "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46\U00011f02"
)


def cut_json(content: dict[str, Any]) -> Cutting:
    """How texts may be cut for a tokenizer.json; TokenizerError where they may not be.

    Where whitespace is left out by the first split, words are encoded without it. A Metaspace that
    splits puts U+2581 in front of a text that has no space there, so words keep theirs.
    """
    normalizers, splits = (
        [step for step in nested_steps(content.get(name)) if step["type"] != "Sequence"]
        for name in ("normalizer", "pre_tokenizer")
    )
    added = content.get("added_tokens") or []
    tables = [
        Charsmap(base64.b64decode(step["precompiled_charsmap"]))
        for step in normalizers
        if step["type"] == "Precompiled"
    ]
    leaves_out = bool(splits) and splits[0]["type"] in _SPLITTING_WORDS
    reasons = [
        _refuse_model(content["model"]),
        _refuse_splits(splits, leaves_out=leaves_out),
        _refuse_normalizers(normalizers, leaves_out=leaves_out),
        *(_refuse_added(token, normalizes=bool(normalizers)) for token in added),
        *(
            "it normalizes whitespace with what is beside it"
            for t in tables
            if t.joins(_WHITESPACE)
        ),
    ]
    if refusal := next(filter(None, reasons), None):
        raise TokenizerError(f"{refusal}, so that its words cannot be encoded apart")
    spaces = b" " + bytes(
        byte
        for byte in _WHITESPACE[1:]
        if leaves_out or any(table.target(bytes([byte])) == b" " for table in tables)
    )
    delicate = [re.escape(token["content"]) for token in added]
    # A part is encoded after another character, with which it must not become an added token.
    joined = _joined_json(content["model"], splits)
    joined |= _side_by_side(token["content"] for token in added)
    if tables:
        delicate.append(f"[{_PREPENDED}]")
        delicate += [re.escape(key) for table in tables for key in table.vanishing_keys()]
    if any(step["type"] == "Strip" for step in normalizers):
        delicate.append(r"\s")
    delicate.append(_SPACE)
    images = _images(normalizers, tables)
    return Cutting(
        spaces=spaces,
        left_out=None if leaves_out else 0,
        delicate=re.compile("|".join(delicate)),
        seams=_seams(joined, images),
        images=images,
        has_marks=bool(tables) or any("Regex" in (s.get("pattern") or {}) for s in normalizers),
    )


def _joined_json(model: dict[str, Any], splits: list[dict[str, Any]]) -> NDArray[np.bool_]:
    """The bytes between which a word is not split, and may have a token."""
    kinds = [step["type"] for step in splits]
    is_word = np.zeros(256, bool)
    is_word[[byte for byte in _VISIBLE.tolist() if chr(byte).isalnum()]] = True
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    joined = np.ones((256, 256), bool)
    if kinds[0] == "BertPreTokenizer":
        joined &= is_word & is_word[:, None]
    elif kinds[0] == "Whitespace":
        is_word[ord("_")] = True
        joined &= is_word == is_word[:, None]
    # Not for Unigram, which adds up the scores of a whole word, and rounds.
    elif "merges" in model and not any(affixes) and {*kinds} <= {"Metaspace", "WhitespaceSplit"}:
        joined = _joined(model["vocab"])
    return joined


def _refuse_model(model: dict[str, Any]) -> str | None:
    kind = model.get("type", "BPE" if "merges" in model else "not named")
    if kind not in _MODELS:
        return f"its model is {kind}"
    return "its model drops merges at random" if model.get("dropout") else None


def _refuse_splits(splits: list[dict[str, Any]], *, leaves_out: bool) -> str | None:
    if not splits:
        return "it has no pre-tokenizer"
    for number, step in enumerate(splits):
        kind = step["type"]
        if kind not in _SPLITTING_PARTS:
            return f"it splits by {kind}"
        if kind == "Metaspace" and (
            step.get("replacement") != _SPACE
            or not step.get("split", True)
            or (leaves_out and step.get("prepend_scheme", "always") == "first")
        ):
            return "its Metaspace does not treat all words alike"
        if number == 0 and not leaves_out and (kind != "Metaspace" or len(splits) > 1):
            return f"it splits by {kind} first"
    return None


def _refuse_normalizers(steps: list[dict[str, Any]], *, leaves_out: bool) -> str | None:
    collapses = any(step.get("pattern", {}).get("Regex") in _COLLAPSING for step in steps)
    for step in steps:
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind in _NORMALIZING_CHARACTERS:
            # They can make whitespace, which would be collapsed with that of the next word.
            if collapses and not leaves_out and kind in ("BertNormalizer", "Nmt", "NFKC", "NFKD"):
                return f"it collapses spaces that {kind} makes"
        elif kind == "Replace" and "Regex" in pattern:
            if pattern["Regex"] not in _COLLAPSING or step["content"] != " ":
                return "it replaces by a pattern"
            if not leaves_out and pattern["Regex"] != _COLLAPSING[0]:
                return "it replaces whitespace"
        elif kind == "Replace":
            if len(f"-{pattern.get('String', ' ')}-".split()) != 1 or not pattern["String"]:
                return "it replaces whitespace"
            if collapses and not leaves_out and len(f"-{step['content']}-".split()) != 1:
                return "it replaces with whitespace"
        elif kind == "Strip":
            if not (leaves_out or collapses):
                return "it strips a text of spaces that it keeps elsewhere"
        elif kind != "Precompiled":
            return f"it normalizes by {kind}"
    return None


def _refuse_added(token: dict[str, Any], *, normalizes: bool) -> str | None:
    text = token["content"]
    if not text or len(f"-{text}-".split()) != 1 or _SPACE in text:
        return f"its added token {text!r} holds whitespace"
    if token.get("normalized") and normalizes:
        return f"its added token {text!r} is matched in normalized text"
    return None


def cutting_of(tokenizer: TokenizerFiles) -> Cutting:
    """How texts may be cut for a tokenizer; TokenizerError where they may not be."""
    content = tokenizer.parsed
    if isinstance(content, SentencePieceModel):
        return cut_sentencepiece(content)
    if isinstance(content, RankFile):
        raise TokenizerError("its split pattern joins words with whitespace")
    return cut_json(content)


# The functions of a `FastEngine`.


def covers(tokenizer: TokenizerFiles, policy: SpecialTokens) -> Coverage:  # noqa: ARG001
    """Coverage by the rules above."""
    try:
        cutting_of(tokenizer)
    except TokenizerError as error:
        return Coverage(engine=ENGINE, refusal=error.message)
    return Coverage(engine=ENGINE, probes=in_contexts(_PROBES))


_PROBES = (
    "a b",
    "a  b",
    " a",
    "a ",
    "\u00a0a \u00a0 b\u00a0",
    "a\nb",
    "a \n\t b",
    "\u2581a b\u2581",
    "a.b, (c)!",
)


def contested(
    tokenizer: TokenizerFiles,  # noqa: ARG001
    coverage: Coverage,  # noqa: ARG001
    reference: Engine,  # noqa: ARG001
) -> Callable[[TextBatch], NDArray[np.int64]] | None:
    """None: which documents the reference must encode is seen word by word."""
    return None


def build(
    tokenizer: TokenizerFiles,
    coverage: Coverage,  # noqa: ARG001
    *,
    reference: Engine,
    policy: SpecialTokens,  # noqa: ARG001
    threads: int,  # noqa: ARG001
) -> WordEngine:
    """The engine for what `covers` accepts."""
    cutting, content, kernel = cutting_of(tokenizer), tokenizer.parsed, find_kernel()
    learner, model = None, None
    given: dict[str, Any] = {"images": cutting.images, "spaces": cutting.spaces}
    if isinstance(content, dict):
        learner = json_learner(content, **given)
    elif isinstance(content, SentencePieceModel) and content.model_type is ModelType.UNIGRAM:
        if kernel is None:
            raise TokenizerError(
                "its sums of scores are added up by a part in C, which is not compiled here",
                hint="install a C compiler, and tokenmill again",
            )
        if tuple(map(int, re.findall(r"\d+", reference.version)[:3])) < (0, 2, 2):
            raise TokenizerError(
                f"sentencepiece {reference.version} adds scores in another way than 0.2.2",
                hint="pip install --upgrade sentencepiece",
            )
        model = kernel_model(content, **given)
    if kernel is not None:
        kernel = kernel.Words(
            *(cutting.spaces, -1 if cutting.left_out is None else cutting.left_out, MOST_WORDS),
            *(0 if model else LONG_WORDS, secrets.randbits(64), model),
        )
    return WordEngine(reference, cutting, learner, kernel)


# The engine.
#
# A batch is looked up in two steps. The words that came most often so far are an arrow array, whose
# places arrow itself finds; the rest, a tenth, is made distinct first and looked up in a dict.

# Of text at a time: little memory, whose pages are not new ones each time, and few words that are
# looked up twice.
SLICE_BYTES = 2 << 20
MOST_WORDS = 1 << 19  # in the cache: some 150 bytes each
MOST_PARTS = 1 << 18
_TABLE_WIDTHS = 16, 32  # words of so many bytes are found without Arrow
_PADDING = np.zeros(_TABLE_WIDTHS[-1], np.uint8)
_FEWEST_BITS = 12  # of the number of places in a table
FEW_CHARACTERS = 64  # of a text that the reference encodes in less time
# Documents with longer words on average, in bytes, are given to the reference: they are in a script
# without spaces, or data.
LONG_WORDS = 24


class WordEngine:
    """Encodes by looking words up; the reference encodes those that are new."""

    name = ENGINE
    version = __version__

    def __init__(
        self,
        reference: Engine,
        cutting: Cutting,
        learner: Learner | None = None,
        kernel: Any = None,
    ) -> None:
        """`learner` encodes new words without the reference; `kernel` has words in place of us."""
        self._reference = reference
        self._kernel = kernel
        self.few_bytes = 1 << 14 if kernel is None else 1 << 16
        self._cutting = cutting
        self._learner = learner
        # The words of one text, as `_cut` finds them.
        spaces = re.escape(cutting.spaces)
        self._find_words = re.compile(b"[%b]*[^%b]+|[%b]+" % (spaces, spaces, spaces)).findall
        self._is_space = np.zeros(256, bool)
        self._is_space[list(cutting.spaces)] = True
        self._encode_few: Any = getattr(reference, "encode_one", None)
        # The kernel encodes even the shortest text in less time.
        self.plain: Any = getattr(reference, "plain", None) if kernel is None else None
        self.decode = reference.decode
        self.token_bytes = reference.token_bytes
        # A part is encoded after a character that it may be cut from; how many ids that one has.
        self._before = cutting.seams.argmax(axis=0)
        needed = np.unique(self._before[cutting.seams.any(axis=0)])
        self._ids_before = np.zeros(257, np.int64)
        if len(needed):
            tokens = reference.encode(TextBatch.from_texts([chr(byte) for byte in needed]))
            self._ids_before[needed] = tokens.lengths
        self._forget()

    @property
    def plain_characters(self) -> int:
        """Texts with fewer are the reference's own."""
        return FEW_CHARACTERS

    def recycle(self) -> bool:
        """Forget all words, and give their memory back."""
        self._forget()
        base.trim_heap()
        return True

    def _forget(self) -> None:
        if self._kernel is not None:
            self._kernel.forget()
        self._words = Cache(self._encode_words, MOST_WORDS)
        self._parts = Cache(self._encode_parts, MOST_PARTS)

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        """Ids of a short text, in less than what the arrays of a batch cost."""
        if self._kernel is not None:
            found, _, is_held, _ = self._asked(self._kernel.encode_texts, [text])
            if is_held is None:
                return np.frombuffer(found, np.uint32)
            return self.encode(TextBatch.from_texts([text]))[0]
        if len(text) < FEW_CHARACTERS and self._encode_few is not None:
            ids: NDArray[np.uint32] = self._encode_few(text)
            return ids
        data = text.encode()
        found = self._find_words(data)
        places = self._words.places_of(found)
        is_whole = self._cutting.left_out and (data[:1].isspace() or data[-1:].isspace())
        if places is None or is_whole or len(data) > LONG_WORDS * len(found):
            return self.encode(TextBatch.from_texts([text]))[0]
        if self._words.delicate[places].any():
            return self._by_reference(TextBatch.from_texts([text]), np.zeros(1, np.int64))[0]
        return self._words.ids_of(places)[0]

    def encode(self, texts: TextBatch) -> TokenBatch:
        parts = []
        for first, last in cut_ranges(texts.offsets, SLICE_BYTES):
            marks = None if texts.marks is None else texts.marks[first:last]
            some = TextBatch(texts.data, texts.offsets[first : last + 1], marks)
            with taken_from(range(first, last)):
                parts.append(self._encode(some))
        return parts[0] if len(parts) == 1 else TokenBatch.joined(parts)

    def encode_texts(self, texts: list[str]) -> TokenBatch:
        """Ids of a few texts."""
        ids, ends, is_held, _ = self._asked(self._kernel.encode_texts, texts)
        if is_held is not None:
            return self.encode(TextBatch.from_texts(texts))
        return TokenBatch(np.frombuffer(ids, np.uint32), np.frombuffer(ends, np.int64))

    def _before_marks(
        self, texts: TextBatch, tokens: TokenBatch, counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """How many ids of each text are before its mark, if a space is right before that.

        That space is the one in front of a word; where it has an id of its own, that is before the
        mark too. `counts` are of all ids, before the word.
        """
        assert texts.marks is not None
        assert isinstance(self._reference, SentencePieceEngine)
        at = np.minimum(texts.offsets[:-1] + texts.marks, len(texts.data) - 1)
        # Beside the space must be visible ASCII: of others, some are spaces too, or nothing.
        is_plain, data = self._cutting.images > 0, texts.data
        is_known = is_plain[data[at - 2]] & (data[at - 1] == ord(" ")) & is_plain[data[at]]
        found = np.where(is_known & (texts.marks >= 2), counts, -1)
        known = np.flatnonzero(found >= 0)
        found[known] += tokens.ids[found[known]] == self._reference.space_id
        found[known] -= tokens.offsets[:-1][known]
        return found

    def _asked(self, encode: Callable[..., Any], *given: Any) -> Any:
        """What the kernel says, which is told all words that are new to it."""
        while isinstance(answer := encode(*given), list):
            ids, *others = self._encode_words(answer)
            self._kernel.learn(np.ascontiguousarray(ids), *map(np.ascontiguousarray, others))
        return answer

    def _encode_compiled(self, texts: TextBatch) -> TokenBatch:
        given: tuple[Any, ...] = (texts.data, texts.offsets)
        if texts.marks is not None and isinstance(self._reference, SentencePieceEngine):
            given += (texts.offsets[:-1] + texts.marks - 1,)
        ids, ends, is_held, counts = self._asked(self._kernel.encode, *given)
        found = TokenBatch(np.frombuffer(ids, np.uint32), np.frombuffer(ends, np.int64))
        before = None
        if counts is not None:
            before = self._before_marks(texts, found, np.frombuffer(counts, np.int64))
        if is_held is not None:
            held = np.flatnonzero(np.frombuffer(is_held, np.uint8))
            found = replace_documents(found, held, self._by_reference(texts, held))
        return found if before is None else replace(found, ids_before=before)

    def _encode(self, texts: TextBatch) -> TokenBatch:
        if self._kernel is not None:
            return self._encode_compiled(texts)
        offsets = texts.offsets - texts.offsets[0]
        data = texts.data[texts.offsets[0] : texts.offsets[-1]]
        cuts = self._cut(data, offsets)
        firsts = np.searchsorted(cuts, offsets)
        sizes = offsets[1:] - offsets[:-1]
        held = sizes > LONG_WORDS * (firsts[1:] - firsts[:-1])
        if self._cutting.left_out:
            some = np.flatnonzero(sizes)
            # No space may be left out of a word that begins a document.
            held[some] |= self._is_space[data[offsets[some]]]
            # One that ends it alone would be nothing, so it stays with the word before.
            ends = some[self._is_space[data[offsets[some + 1] - 1]]]
            cuts = np.delete(cuts, firsts[ends + 1] - 1)
            firsts = np.searchsorted(cuts, offsets)
        if 4 * sizes[held].sum() > 3 * len(data):
            return self._reference.encode(texts)  # what little is left would not pay
        if held.any():
            return self._without(texts, np.flatnonzero(held))
        places = self._words.look_up(data, cuts)
        ids, ends = self._words.ids_of(places)
        found = TokenBatch(ids, np.append(0, ends)[firsts])
        delicate = np.flatnonzero(self._words.delicate.take(places))
        held = np.unique(np.searchsorted(firsts, delicate, side="right") - 1)
        if not len(held):
            return found
        return replace_documents(found, held, self._by_reference(texts, held))

    def _without(self, texts: TextBatch, held: NDArray[np.int64]) -> TokenBatch:
        """All documents, those `held` by the reference."""
        others = np.setdiff1d(np.arange(len(texts)), held)
        found: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)] * len(texts)
        made = [(held, self._by_reference(texts, held))]
        if len(others):
            with taken_from(others):
                made.append((others, self._encode(texts.take(others))))
        for numbers, tokens in made:
            for number, ids in zip(numbers.tolist(), tokens, strict=True):
                found[number] = ids
        return TokenBatch.from_lists(found)

    def _by_reference(self, texts: TextBatch, held: NDArray[np.int64]) -> TokenBatch:
        with taken_from(held):
            return self._reference.encode(texts.take(held))

    def _cut(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where words begin: documents, and whitespace that follows something else."""
        # Comparisons take a fraction of what a table would.
        first, *others = self._cutting.spaces
        is_space = data == first
        for other in others:
            is_space |= data == other
        begins = np.empty(len(data) + 1, bool)
        np.greater(is_space[1:], is_space[:-1], out=begins[1:-1])
        begins[offsets] = True
        begins[-1] = False
        return np.flatnonzero(begins)

    def _encode_words(self, words: list[bytes]) -> Learned:
        """Encode new words."""
        if self._learner is None:
            return self._encode_by_parts(words)
        held = self._cutting.find_delicate(words)
        tokens, left = self._learner.learn(words)
        ids, starts, lengths = tokens.ids, tokens.offsets[:-1], tokens.lengths
        if len(left):
            other = self._encode_by_parts([words[place] for place in left.tolist()])
            starts[left], lengths[left] = len(ids) + other[1], other[2]
            ids, held[left] = np.append(ids, other[0]), other[3]
        return ids, starts, lengths, held

    def _encode_by_parts(self, words: list[bytes]) -> Learned:
        """Encode words by their parts."""
        texts = [self._cutting.stripped(word) for word in words]
        data = np.frombuffer(_BEGIN.join([b"", *texts]), np.uint8)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
        starts = np.cumsum(sizes) - sizes
        is_ascii = np.add.reduceat(data >= 0x80, starts, dtype=np.int64) == 1  # the mark alone
        in_ascii = np.repeat(is_ascii, sizes)
        held = self._cutting.find_delicate(words)
        begins = np.zeros(len(data), bool)
        begins[1:] = self._cutting.seams[data[:-1], data[1:]]
        begins &= in_ascii
        begins[starts] = True
        cuts = np.flatnonzero(begins)
        firsts = np.append(np.searchsorted(cuts, starts), len(cuts))
        places = self._parts.look_up(data, cuts)
        ids, ends = self._parts.ids_of(places)
        offsets = np.append(0, ends)[firsts]
        held |= np.logical_or.reduceat(self._parts.delicate[places], firsts[:-1])
        return ids, offsets[:-1], offsets[1:] - offsets[:-1], held

    def _encode_parts(self, parts: list[bytes]) -> Learned:
        """Have the reference encode parts of words, each as a text of its own."""
        before = [-1 if part[:1] == _BEGIN else int(self._before[part[0]]) for part in parts]
        texts = [
            part[1:] if byte < 0 else bytes((byte,)) + part
            for part, byte in zip(parts, before, strict=True)
        ]
        held = np.zeros(len(parts), bool)
        while True:
            try:
                tokens = self._reference.encode(TextBatch.from_texts(texts))
                break
            except UnencodableError as error:
                # The reference is to say so of the documents that hold such words.
                for place in error.documents:
                    texts[place], held[place], before[place] = b"", True, -1
        skipped = self._ids_before[before]
        starts, lengths = tokens.offsets[:-1] + skipped, tokens.lengths - skipped
        return tokens.ids, starts, lengths, held


# The ids of some words or parts, where those of each begin, how many they are, and which are
# delicate: only the reference may encode documents that hold them.
Learned = tuple["NDArray[np.uint32]", "NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.bool_]"]
_CHUNK_WORDS = 1 << 14  # looked up at a time: what they need fits into a cache of the processor


def _extended(array: NDArray[Any], size: int, values: NDArray[Any]) -> NDArray[Any]:
    """The first `size` members and then the values, in an array that may be longer."""
    end = size + len(values)
    if end > len(array):
        # Twice as long: or few new words would cost a copy of all of them.
        array = np.append(array[:size], np.zeros(max(end, 2 * size) - size, array.dtype))
    array[size:end] = values
    return array


class Table:
    """Numbers of words of at most `width` bytes, found by a few steps of numpy.

    A word is a row of 64-bit integers, filled up with bytes that are in no text. There is one place
    where it can be; a word whose place another one has is not here.
    """

    def __init__(self, width: int) -> None:
        # By the size of a word: what its row has beside it. That of a longer one is no text.
        fill = np.full((width + 2, width), 0xFF, np.uint8)
        for size in range(width + 1):
            fill[size, :size] = 0
        self._width, self._row = width, np.dtype(f"V{width}")
        self._fill = fill.reshape(-1).view(self._row)
        self._factors = np.random.default_rng(0).integers(0, 1 << 64, width // 8, np.uint64) | 1
        # What a comparison of two rows is, seen as one number, if they are equal.
        self._equal = np.ones(width // 8, np.uint8).view(f"u{width // 8}")
        self._resize(_FEWEST_BITS)

    def _resize(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._rows = np.zeros(1 << bits, self._row)
        self._numbers = np.full(1 << bits, -1, np.int32)
        self._count = 0

    def find(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The numbers of words, -1 for those not here. `data` goes on for `width` bytes."""
        numbers = np.empty(len(starts), np.int64)
        for first in range(0, len(starts), _CHUNK_WORDS):
            some = slice(first, first + _CHUNK_WORDS)
            rows = self._rows_of(data, starts[some], sizes[some])
            places = self._places(rows)
            same = self._rows.take(places, mode="clip").view(np.uint64) == rows.view(np.uint64)
            is_here = same.view(self._equal.dtype) == self._equal
            # A number of which all bits are set is -1.
            numbers[some] = self._numbers.take(places, mode="clip") | (is_here.view(np.int8) - 1)
        return numbers

    def add(
        self,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> None:
        """Take up words, all of them different, that are not here yet."""
        short = np.flatnonzero(sizes <= self._width)
        rows, numbers = self._rows_of(data, starts[short], sizes[short]), numbers[short]
        if 2 * (self._count + len(rows)) > len(self._rows):
            held = self._numbers >= 0
            rows = np.append(self._rows[held], rows)
            numbers = np.append(self._numbers[held], numbers)
            self._resize((4 * len(rows)).bit_length())
        places = self._places(rows)
        free = self._numbers[places] < 0
        rows, places, numbers = rows[free], places[free], numbers[free]
        self._numbers[places] = numbers
        # Of several with the same place one has it now.
        chosen = self._numbers[places] == numbers
        self._rows[places[chosen]] = rows[chosen]
        self._count += int(np.count_nonzero(chosen))

    def _rows_of(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.void]:
        everywhere = np.ndarray(len(data) - self._width + 1, self._row, data, 0, (1,))
        rows: NDArray[np.void] = everywhere[starts]
        rows.view(np.uint64)[:] |= self._fill.take(sizes, mode="clip").view(np.uint64)
        return rows

    def _places(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        columns, step = rows.view(np.uint64), len(self._factors)
        places = columns[::step] * self._factors[0]
        for column in range(1, step):
            places += columns[column::step] * self._factors[column]
        found: NDArray[np.int64] = (places >> self._shift).view(np.int64)
        return found


class Cache:
    """Ids of words, or of their parts; `learn` encodes those that are new."""

    def __init__(self, learn: Callable[[list[bytes]], Learned], most: int) -> None:
        self._learn = learn
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._known: dict[bytes, int] = {}
        self._tables = tuple(map(Table, _TABLE_WIDTHS))
        # Of each word: its ids, where they begin and how many they are, whether it is delicate.
        # There is room for more.
        self._ids = np.empty(0, np.uint32)
        self._num_ids = 0
        self._starts = np.empty(0, np.int64)
        self.lengths = np.empty(0, np.int64)
        self.delicate = np.empty(0, np.bool_)

    def places_of(self, words: list[bytes]) -> NDArray[np.int64] | None:
        """The place of each word in the cache; None where one is new."""
        places = list(map(self._known.get, words))
        return None if None in places else np.array(places, np.int64)

    def ids_of(self, places: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The ids of words back to back, and where those of each end."""
        parts = [np.empty(0, np.uint32)]
        ends = np.empty(len(places), np.int64)
        done = 0
        for first in range(0, len(places), _CHUNK_WORDS):
            some = slice(first, first + _CHUNK_WORDS)
            lengths = self.lengths.take(places[some])
            bounds = np.cumsum(lengths)
            # Where each id is in the cache: as far from the first one of its word as it is here.
            sources = np.repeat(self._starts.take(places[some]) - bounds + lengths, lengths)
            sources += np.arange(len(sources))
            parts.append(self._ids.take(sources))
            np.add(bounds, done, out=ends[some])
            done += len(sources)
        return np.concatenate(parts), ends

    def look_up(self, data: NDArray[np.uint8], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of each word in the cache; those that are new get one."""
        import pyarrow

        padded = np.append(data, _PADDING)
        sizes = np.diff(cuts, append=len(data))
        first, *others = self._tables
        places = first.find(padded, cuts, sizes)
        rest = np.flatnonzero(places < 0)
        for table in others:
            places[rest] = table.find(padded, cuts[rest], sizes[rest])
            rest = rest[places[rest] < 0]
        if not len(rest):
            return places
        offsets = np.append(cuts, len(data)).astype(np.int32)
        words = pyarrow.BinaryArray.from_buffers(
            pyarrow.binary(), len(cuts), [None, *map(pyarrow.py_buffer, (offsets, padded))]
        )
        distinct = words.take(pyarrow.array(rest)).dictionary_encode()
        wanted = distinct.dictionary.to_pylist()
        known = np.fromiter(map(self._known.get, wanted, [-1] * len(wanted)), np.int64, len(wanted))
        new = np.flatnonzero(known < 0)
        if len(new):
            if self._known and len(self._known) + len(new) > self._most:
                self.forget()
                return self.look_up(data, cuts)
            known[new] = self._add([wanted[number] for number in new.tolist()])
        places[rest] = known[distinct.indices.to_numpy()]
        self._add_to_tables(wanted, known)
        return places

    def _add(self, words: list[bytes]) -> NDArray[np.int64]:
        """Learn words; their places."""
        ids, starts, lengths, delicate = self._learn(words)
        first = len(self._known)
        places = range(first, first + len(words))
        self._known.update(zip(words, places, strict=True))
        self._starts = _extended(self._starts, first, self._num_ids + starts)
        self._ids = _extended(self._ids, self._num_ids, ids)
        self._num_ids += len(ids)
        self.lengths = _extended(self.lengths, first, lengths)
        self.delicate = _extended(self.delicate, first, delicate)
        return np.array(places)

    def _add_to_tables(self, words: list[bytes], places: NDArray[np.int64]) -> None:
        data = np.append(np.frombuffer(b"".join(words), np.uint8), _PADDING)
        sizes = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(sizes) - sizes
        for table in self._tables:
            table.add(data, starts, sizes, places)
            left = table.find(data, starts, sizes) < 0
            starts, sizes, places = starts[left], sizes[left], places[left]
