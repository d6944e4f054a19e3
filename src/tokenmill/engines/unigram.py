"""Unigram models for the engine `words`: the best pieces of many words at a time.

    words -> parts (no piece reaches over a seam) -> edges of their lattices -> best paths -> ids

One step of numpy moves all places of all parts one byte further in a trie of the pieces, and one
more all parts by one place along their best paths. Beside each path it finds how much the next one
is worse: packages add scores in another order, so that a small gap is theirs to decide. This is for
the models of a tokenizer.json; those of SentencePiece are prepared here for `kernel.c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines import base
from tokenmill.engines.references import PieceType, SentencePieceModel
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow
    from numpy.typing import NDArray

_SPACE = "\u2581"
SPACE = 0xFF  # stands for U+2581 in pieces and words
_STOP = 0xFE  # is after each part
LONGEST_PART = 256  # in bytes
_LARGEST_SCORE = 1e4
_LOWEST_SCORE = 100  # of a SentencePiece model
_SOME, _MANY = 4, 16  # children of a node
_UNKNOWN_PENALTY = 10  # an unknown character is so much worse than the worst piece
_CHUNK_PARTS = 1 << 13  # at a time: what they need fits into a cache of the processor


class Trie:
    """Pieces by their bytes.

    The child of a node by a byte is at `bases[node] + byte`, if `parents` has the node there.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        order = np.array(sorted(range(len(pieces)), key=pieces.__getitem__), np.int64)
        sizes = sizes[order]
        data = np.frombuffer(b"".join([pieces[place] for place in order.tolist()]), np.uint8)
        starts = np.cumsum(sizes) - sizes
        # Level by level: sorted pieces with the same beginning are side by side.
        nodes = np.zeros(len(order), np.int64)
        levels: list[NDArray[np.int64]] = []
        count, depth = 1, 0
        longer = np.flatnonzero(sizes > 0)
        while len(longer):
            keys = nodes[longer] << 8 | data[starts[longer] + depth]
            is_new = np.append(True, keys[1:] != keys[:-1])
            numbers = np.cumsum(is_new) - 1
            values = np.full(int(numbers[-1]) + 1, -1)
            depth += 1
            ends = sizes[longer] == depth
            values[numbers[ends]] = order[longer[ends]]
            nodes[longer] = numbers + count
            levels.append(np.stack([keys[is_new] >> 8, keys[is_new] & 0xFF, values]))
            count += len(values)
            longer = longer[~ends]
        self._place(*np.concatenate(levels, axis=1))

    def _place(
        self, above: NDArray[np.int64], labels: NDArray[np.int64], values: NDArray[np.int64]
    ) -> None:
        """Find places for nodes, given the node above each, which ascend, and the byte to it."""
        count = len(above) + 1
        children = np.bincount(above, minlength=count)
        firsts = np.cumsum(children) - children
        large = np.flatnonzero(children > _MANY)
        free_size = 3 * count + 1024
        size = free_size + 256 * len(large)
        is_taken = np.zeros(size, bool)
        bases = np.zeros(count, np.int64)
        # Nodes with many children have places of their own.
        bases[large] = free_size + 256 * np.arange(len(large))
        dice = np.random.default_rng(0)
        # Those with several try places by chance, and keep them if all are free; the large first.
        for is_next in (
            (children > _SOME) & (children <= _MANY),
            (children > 1) & (children <= _SOME),
        ):
            waiting = np.flatnonzero(is_next)
            while len(waiting):
                tried = dice.integers(0, free_size - 256, len(waiting))
                owners, edges = _ranges(firsts[waiting], children[waiting])
                places = tried[owners] + labels[edges]
                claims = np.empty(free_size, np.int64)
                claims[places] = owners
                fails = np.zeros(len(waiting), bool)
                fails[owners[is_taken[places] | (claims[places] != owners)]] = True
                bases[waiting[~fails]] = tried[~fails]
                is_taken[places[~fails[owners]]] = True
                waiting = waiting[fails]
        lone = np.flatnonzero(children == 1)
        free = np.flatnonzero(~is_taken[256:free_size])[: len(lone)] + 256
        bases[lone] = free - labels[firsts[lone]]
        places = np.append(size, bases[above] + labels)
        self.root = size
        self.bases = np.zeros(size + 1, np.int32)
        self.bases[places] = bases
        self.parents = np.full(size + 256, -1, np.int32)
        self.parents[places[1:]] = places[above]
        # The piece that ends at a node, or -1.
        self.values = np.full(size + 1, -1, np.int32)
        self.values[places[1:]] = values


def _ranges(
    starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers in ranges, one after the other: the range that each is in, and itself."""
    owners = np.repeat(np.arange(len(starts)), lengths)
    numbers = (starts - np.cumsum(lengths) + lengths)[owners] + np.arange(len(owners))
    return owners, numbers


@dataclass(frozen=True, slots=True)
class Paths:
    """The best pieces of texts, back to back."""

    ids: NDArray[np.uint32]  # of unknown characters: the number of pieces, and their code points
    lengths: NDArray[np.int64]  # pieces of each text
    gaps: NDArray[np.float64]  # how much worse the next path of each is


class Lattice:
    """Finds the best path of pieces through texts, by the sum of their scores."""

    def __init__(
        self, pieces: Sequence[bytes], scores: NDArray[np.float64], unknown: float
    ) -> None:
        """`scores` of pieces, and of an unknown character."""
        self.trie = Trie(pieces)
        self.unknown = len(pieces)  # what has the number of no piece
        self.scores = np.append(scores, unknown)

    def paths(self, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> Paths:
        """Paths of texts that begin at `starts`, each with one byte after it that is in no piece.

        Of paths that are as good the first counts.
        """
        firsts, lasts, pieces = self._edges(data)
        ends = np.append(starts[1:], len(data)) - 1
        # Edges that begin as far from the beginning of their texts end at different places.
        origins = np.repeat(starts, ends + 1 - starts).astype(np.int32)
        steps = (firsts - origins[firsts]).astype(np.uint16)
        order = np.argsort(steps, kind="stable")
        firsts, lasts, pieces = firsts[order], lasts[order], pieces[order]
        scores = self.scores[pieces]
        best = np.full(len(data), -np.inf)
        best[starts] = 0
        next_best = np.full(len(data), -np.inf)
        chosen = np.zeros(len(data), np.int32)
        done = 0
        for bound in np.cumsum(np.bincount(steps)).tolist():
            to = lasts[done:bound]
            found = best[firsts[done:bound]] + scores[done:bound]
            before = best[to]
            next_best[to] = np.maximum(next_best[to], np.minimum(found, before))
            better = (found > before).nonzero()[0]
            best[to[better]] = found[better]
            chosen[to[better]] = better + done
            done = bound
        path = self._path(starts, ends, firsts[chosen])
        ids = pieces[chosen[path]].astype(np.uint32)
        unknown = np.flatnonzero(ids == self.unknown)
        if len(unknown):
            ids[unknown] += _code_points(data, firsts[chosen[path[unknown]]])
        bounds = np.append(0, np.searchsorted(path, ends, side="right"))
        lengths = np.diff(bounds)
        gaps = np.full(len(starts), np.inf)
        some = lengths > 0
        if some.any():
            gaps[some] = np.minimum.reduceat(best[path] - next_best[path], bounds[:-1][some])
        return Paths(ids, lengths, gaps)

    def _edges(
        self, data: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Where pieces begin and end, and which they are; unknown characters have one too."""
        bases, parents, values = self.trie.bases, self.trie.parents, self.trie.values
        begins = np.flatnonzero(((data & 0xC0) != 0x80) & (data != _STOP)).astype(np.int32)
        widths = _WIDTHS[data[begins]]
        is_known = np.zeros(len(data), bool)
        at, nodes, depth = begins, np.full(len(begins), self.trie.root, np.int32), 0
        found = []
        while len(at):
            children = bases[nodes] + data[at + depth]
            alive = np.flatnonzero(parents[children] == nodes)
            at, nodes = at[alive], children[alive]
            depth += 1
            pieces = values[nodes]
            ending = np.flatnonzero(pieces >= 0)
            from_ = at[ending]
            found.append((from_, from_ + np.int32(depth), pieces[ending]))
            if depth < len(_BY_WIDTH):
                is_known[from_[_WIDTHS[data[from_]] == depth]] = True
        unknown = np.flatnonzero(~is_known[begins])
        at = begins[unknown]
        found.append((at, at + widths[unknown], np.full(len(at), self.unknown, np.int32)))
        firsts, lasts, numbers = zip(*found, strict=True)
        return np.concatenate(firsts), np.concatenate(lasts), np.concatenate(numbers)

    @staticmethod
    def _path(
        starts: NDArray[np.int64], ends: NDArray[np.int64], sources: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Where the pieces of the paths end, of all texts; `sources` say where they begin."""
        is_passed = np.zeros(len(sources), bool)
        going = np.flatnonzero(ends > starts)
        at, starts = ends[going], starts[going]
        while len(at):
            is_passed[at] = True
            at = sources[at].astype(np.int64)
            going = np.flatnonzero(at > starts)
            at, starts = at[going], starts[going]
        return np.flatnonzero(is_passed)


# How many bytes a character has, by its first one.
_WIDTHS = np.ones(256, np.int32)
_BY_WIDTH = (0, 0, 0xC0, 0xE0, 0xF0)
for _width, _first in enumerate(_BY_WIDTH[2:], start=2):
    _WIDTHS[_first:_STOP] = _width


def _code_points(data: NDArray[np.uint8], places: NDArray[np.int32]) -> NDArray[np.uint32]:
    firsts = data[places]
    widths = _WIDTHS[firsts]
    points = np.where(widths == 1, firsts, firsts & (0x7F >> widths)).astype(np.uint32)
    for step in range(1, len(_BY_WIDTH) - 1):
        longer = np.flatnonzero(widths > step)
        points[longer] = points[longer] << 6 | data[places[longer] + step] & 0x3F
    points[firsts == SPACE] = ord(_SPACE)
    return points


# Words are cut into parts once more: what is between punctuation comes again far more often.


class Segmenter:
    """Finds the pieces of words, whose bytes `images` maps to those of normalized text.

    Words that hold a byte without an image (0) must be given as normalized text.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: NDArray[np.float64],
        unknown: float,
        *,
        images: NDArray[np.uint8],
        squeezes: bool,
        prefixes: bool,
        splits_spaces: bool,
    ) -> None:
        """
        `squeezes`: spaces in front of a word are as one; `prefixes`: a word without any gets one;
        `splits_spaces`: each of them begins anew.
        """
        self.pieces = [spelled(piece) for piece in pieces]
        self.lattice = Lattice(self.pieces, scores, unknown)
        self.images, self._squeezes, self._prefixes = images, squeezes, prefixes
        # Where no piece has two bytes side by side, none reaches over the place between them.
        data = np.frombuffer(bytes([_STOP]).join(self.pieces), np.uint8)
        self._seams = np.ones((256, 256), bool)
        self._seams[data[:-1], data[1:]] = False
        self._seams[:, 0x80:0xC0] = False
        self._seams[:, SPACE] |= splits_spaces

    def spell(self, words: Sequence[bytes]) -> tuple[TextBatch, NDArray[np.int64]]:
        """Words as pieces write them, and which of them have no images and are left empty."""
        joined = np.frombuffer(b"".join(words), np.uint8)
        sizes = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(sizes) - sizes
        data = self.images[joined]
        is_space = data == SPACE
        in_front = is_space[starts]
        kept = ~is_space if self._squeezes else np.ones(len(data), bool)
        kept[starts[in_front]] = True
        left = ~np.logical_and.reduceat(data != 0, starts) | np.logical_and.reduceat(
            is_space, starts
        )
        kept &= ~np.repeat(left, sizes)
        lengths = np.add.reduceat(kept, starts, dtype=np.int64)
        begins = ~in_front & ~left if self._prefixes else np.zeros(len(words), bool)
        offsets = np.append(0, np.cumsum(lengths + begins))
        spelled = np.full(offsets[-1], SPACE, np.uint8)
        spelled[np.arange(lengths.sum()) + np.repeat(np.cumsum(begins), lengths)] = data[kept]
        return TextBatch(spelled, offsets), np.flatnonzero(left)

    def segment(self, words: TextBatch) -> Paths:
        """The best pieces of words; the gaps are the smallest of their parts, for each byte.

        Words with a part that is too long have none, and no gap.
        """
        import pyarrow

        data, offsets = words.data, words.offsets
        begins = np.zeros(len(data) + 1, bool)
        begins[1:-1] = self._seams[data[:-1], data[1:]]
        begins[offsets] = True
        begins[-1] = False
        cuts = np.flatnonzero(begins)
        buffers = [np.append(cuts, len(data)).astype(np.int32), np.ascontiguousarray(data)]
        parts = pyarrow.BinaryArray.from_buffers(
            pyarrow.binary(), len(cuts), [None, *map(pyarrow.py_buffer, buffers)]
        ).dictionary_encode()
        found = self._segment_parts(parts.dictionary)
        places = parts.indices.to_numpy()
        lengths = found.lengths[places]
        starts = (np.cumsum(found.lengths) - found.lengths)[places]
        ids = found.ids[_ranges(starts, lengths)[1]]
        firsts = np.searchsorted(cuts, offsets)
        counts = np.zeros(len(words), np.int64)
        gaps = np.full(len(words), np.inf)
        some = np.flatnonzero(firsts[1:] > firsts[:-1])
        if len(some):
            counts[some] = np.add.reduceat(lengths, firsts[some])
            gaps[some] = np.minimum.reduceat(found.gaps[places], firsts[some])
        return Paths(ids, counts, gaps)

    def _segment_parts(self, parts: pyarrow.Array) -> Paths:
        offsets = np.frombuffer(parts.buffers()[1], np.int32)[: len(parts) + 1].astype(np.int64)
        data = np.frombuffer(parts.buffers()[2] or b"", np.uint8)[: offsets[-1]]
        sizes = np.diff(offsets)
        lengths = np.zeros(len(parts), np.int64)
        gaps = np.full(len(parts), -np.inf)
        ids = [np.empty(0, np.uint32)]
        short = np.flatnonzero(sizes <= LONGEST_PART)
        for first in range(0, len(short), _CHUNK_PARTS):
            some = short[first : first + _CHUNK_PARTS]
            found = self.lattice.paths(*_stopped(data, offsets[some], sizes[some]))
            ids.append(found.ids)
            lengths[some] = found.lengths
            gaps[some] = found.gaps / sizes[some]
        return Paths(np.concatenate(ids), lengths, gaps)


def spelled(text: str) -> bytes:
    """A piece, or normalized text, as it is looked up."""
    return text.encode().replace(_SPACE.encode(), bytes([SPACE]))


def _stopped(
    data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Parts of `data` with a stop after each, and where they begin."""
    owners, sources = _ranges(starts, sizes)
    found = np.full(len(sources) + len(sizes), _STOP, np.uint8)
    found[np.arange(len(sources)) + owners] = data[sources]
    return found, np.cumsum(sizes + 1) - sizes - 1


def merge_unknown(
    ids: NDArray[np.uint32], offsets: NDArray[np.int64], *, first: int, unknown_id: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """`ids` with one id for unknown characters (from `first` up) in a row; `offsets` of texts."""
    places = np.flatnonzero(ids >= first)
    if not len(places):
        return ids, offsets
    ids[places] = unknown_id
    follows = np.append(False, np.diff(places) == 1)
    merged = places[follows & ~np.isin(places, offsets)]
    return np.delete(ids, merged), offsets - np.searchsorted(merged, offsets)


# A tokenizer.json: `tokenizers` adds scores up word by word, in float64.


class Learner:
    """Encodes new words of a tokenizer.json; those that it is not sure of are left."""

    def __init__(self, segmenter: Segmenter, *, unknown_id: int, merges_unknown: bool) -> None:
        self._segmenter = segmenter
        self._unknown_id, self._merges_unknown = unknown_id, merges_unknown
        self._worst = float(np.abs(segmenter.lattice.scores).max())

    def learn(self, words: Sequence[bytes]) -> tuple[TokenBatch, NDArray[np.int64]]:
        """Ids of words, and the places of those that have none here."""
        texts, left = self._segmenter.spell(words)
        found = self._segmenter.segment(texts)
        # What both may round off in a word, each piece anew.
        is_left = found.gaps <= 1e-15 * self._worst * texts.lengths**2
        is_left[left] = True
        first = self._segmenter.lattice.unknown
        # The piece of the unknown token would be merged with others; without merging, bytes may
        # stand for unknown characters.
        strange = found.ids == self._unknown_id
        if not self._merges_unknown:
            strange |= found.ids >= first
        owners = np.repeat(np.arange(len(words)), found.lengths)
        is_left[owners[strange]] = True
        lengths = np.where(is_left, 0, found.lengths)
        ids, offsets = merge_unknown(
            found.ids[~is_left[owners]],
            np.append(0, np.cumsum(lengths)),
            first=first,
            unknown_id=self._unknown_id,
        )
        return TokenBatch(ids, offsets), np.flatnonzero(is_left)


def json_learner(
    content: dict[str, Any], *, images: NDArray[np.uint8], spaces: bytes
) -> Learner | None:
    """For a tokenizer.json that may be cut into words; None where its words are not understood."""
    model = content["model"]
    normalizers, splits = (
        [step for step in base.nested_steps(content.get(name)) if step["type"] != "Sequence"]
        for name in ("normalizer", "pre_tokenizer")
    )
    kinds = [step["type"] for step in splits]
    if model.get("type") != "Unigram" or kinds not in (
        ["Metaspace"],
        ["WhitespaceSplit", "Metaspace"],
    ):
        return None
    pieces = [piece for piece, _ in model["vocab"]]
    scores = np.array([score for _, score in model["vocab"]], np.float64)
    prefixes = splits[-1].get("prepend_scheme", "always") != "never"
    squeezes = [step.get("pattern") == {"Regex": " {2,}"} for step in normalizers]
    refused = (
        model.get("unk_id") is None,
        len({*pieces}) < len(pieces) or _SPACE not in pieces,
        not (np.abs(scores) < _LARGEST_SCORE).all(),
        not prefixes and (len(kinds) > 1 or any(step["type"] == "Strip" for step in normalizers)),
        any(squeezes[:-1]),
    )
    if any(refused):
        return None
    squeezes_spaces = len(kinds) > 1 or any(squeezes)
    images = images.copy()
    images[list(spaces)] = SPACE
    if not squeezes_spaces:
        images[ord("\r")] = 0  # a table takes \r\n for one character
    segmenter = Segmenter(
        pieces,
        scores,
        float(scores.min()) - _UNKNOWN_PENALTY,
        images=images,
        squeezes=squeezes_spaces,
        prefixes=prefixes,
        splits_spaces=True,
    )
    merges = not model.get("byte_fallback")
    return Learner(segmenter, unknown_id=model["unk_id"], merges_unknown=merges)


# A SentencePiece model: the package adds scores up along a whole document, in float32, and a near
# tie in a word is decided by the sum before it. `kernel.c` does the same, and finds the pieces too.


def kernel_model(
    model: SentencePieceModel, *, images: NDArray[np.uint8], spaces: bytes
) -> tuple[Any, ...]:
    """What `kernel.c` must know of a model that may be cut into words."""
    kinds = np.array([kind for _, kind in model.pieces])
    scores = np.array(model.scores, np.float32)
    images = images.copy()
    for place in np.flatnonzero(kinds == PieceType.USER_DEFINED).tolist():
        data = np.frombuffer(model.pieces[place][0].encode(), np.uint8)
        scores[place] = symbol_score(len(data))
        images[data[images[data] != data]] = 0  # symbols are not normalized
    images[list(spaces)] = SPACE
    unknown = scores[kinds == PieceType.NORMAL].min() - np.float32(_UNKNOWN_PENALTY)
    scores = np.append(scores, unknown)
    is_found = np.isin(kinds, (PieceType.NORMAL, PieceType.USER_DEFINED)).tolist()
    pieces = zip(model.pieces, is_found, strict=True)
    trie = Trie([spelled(text) if found else b"" for (text, _), found in pieces])
    nodes = np.full((len(trie.parents), 4), -1, np.int32)
    nodes[:, 0] = 0
    for column, values in enumerate((trie.bases, trie.parents, trie.values)):
        nodes[: len(values), column] = values
    nodes[:, 3] = np.where(nodes[:, 2] < 0, np.float32(0), scores[nodes[:, 2]]).view(np.int32)
    byte_ids = np.zeros(256, np.uint32)
    for place in np.flatnonzero(kinds == PieceType.BYTE).tolist():
        byte_ids[int(model.pieces[place][0][3:5], 16)] = place
    worst, bonus = float(-scores.min()) * 1.001, max(0.0, float(scores.max())) * LONGEST_PART
    return (
        *(nodes, trie.root, bytes(kinds == PieceType.USER_DEFINED), model.charsmap, images),
        *(byte_ids if model.byte_fallback else b"", float(unknown), worst, bonus),
        int(np.flatnonzero(kinds == PieceType.UNKNOWN)[0]),
        *(model.adds_dummy_prefix, model.removes_extra_whitespace),
    )


def symbol_score(size: int) -> float:
    """The score of a user-defined symbol of ASCII."""
    return float(np.float32(0.1 * (size - 1)))


def refuse_model(model: SentencePieceModel) -> str | None:
    """Why the words of a Unigram model may not be encoded here."""
    pieces = list(zip(model.pieces, model.scores, strict=True))
    normal = [score for (_, kind), score in pieces if kind is PieceType.NORMAL]
    symbols = [text for (text, kind), _ in pieces if kind is PieceType.USER_DEFINED]
    if not all(-_LOWEST_SCORE < score <= 0 for score in normal):
        return "its scores are no logarithms of probabilities"
    if not all(text.isascii() and len(text) < LONGEST_PART for text in symbols):
        return "a symbol is not ASCII"
    if len({text for (text, _), _ in pieces}) < len(pieces):
        return "a piece comes twice"
    return None
