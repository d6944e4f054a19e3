"""Which documents of a store hold a text, and where: the verb `grep`.

    store -> blocks of documents -> ids that any match must have -> bytes around them -> matches

A text does not begin and end where tokens do, and may be tokenized in many ways, so it is looked
for in the bytes that ids stand for. Few are made: from the vocabulary alone follows a set of ids of
which every match has one, whatever its tokens are. Blocks are scanned for those, at a nanosecond or
two a token, and only what is around them becomes bytes. Where a tokenizer's ids do not stand for
bytes one by one (WordPiece, say), its own package decodes every document: exact too, and slow.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tokenmill.engines import references
from tokenmill.engines.base import CHAR_TO_BYTE, TokenizerKind, nested_steps
from tokenmill.engines.load import find_tokenizer
from tokenmill.errors import UsageError
from tokenmill.markup import Told
from tokenmill.options import GrepOptions, with_options
from tokenmill.records import TextBatch, lazy
from tokenmill.runners.local import usable_cores
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tokenmill.store.format import Ints, TokenArray
    from tokenmill.store.reader import MappedShard, SourceRow

# Tokens of the documents that a thread looks at before it hands over what it found, and of the part
# of them that it looks at in one go: few enough for a core's cache.
BLOCK_TOKENS = 1 << 22
CHUNK_TOKENS = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A place that holds the text."""

    document: int
    """Its number in its split, as in `Store(path, split=...)[document]`."""
    split: str
    token: int
    """The first token of the document of which any of it is."""
    tokens: int
    """How many tokens it reaches over."""
    before: str
    after: str
    source: SourceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class GrepResult(Told):
    """What `tokenmill grep` found."""

    store: str
    text: str
    split: str | None
    """None means all of them."""
    matches: tuple[Match, ...]
    """The first ones; all of them are counted."""
    num_matches: int
    num_documents: int
    """That have at least one."""
    documents: int
    """That were looked at."""
    tokens: int
    seconds: float
    decoded_by: str | None
    """The package that decoded every document; None where only what is around matches was."""
    written: str | None
    """What the tokenizer makes of the text, where nothing was found and that is another text."""


@with_options(GrepOptions)
def grep(asked: GrepOptions) -> GrepResult:
    """Find an exact text in the documents of a store.

    >>> found = tokenmill.grep("store", "an exact text")
    >>> [(match.document, match.token, match.source.path) for match in found.matches]

    Matches within a document do not overlap, and none reaches from one document into the next. What
    a build put around a document, its first and last token, is no part of the text.
    """
    started = perf_counter()
    store = asked.store if isinstance(asked.store, Store) else Store(asked.store, split=asked.split)
    search = Search(store, asked.text)
    matches: list[Match] = []
    num_matches = num_documents = done = 0
    for hits in search.hits():
        num_matches += len(hits.documents)
        num_documents += len(set(hits.documents.tolist()))
        left = asked.limit - len(matches)
        matches += (search.match(hits, k, asked.context) for k in range(len(hits.documents))[:left])
        done += hits.scanned
        if asked.on_progress is not None:
            asked.on_progress(done, store.num_tokens)
    ids = () if num_matches else search.ids_of_text()
    written = store.reference.decode(ids) if len(ids) else asked.text
    return GrepResult(
        store=str(store.path if store.is_remote or isinstance(asked.store, Store) else asked.store),
        text=asked.text,
        split=store.split,
        matches=tuple(matches),
        num_matches=num_matches,
        num_documents=num_documents,
        documents=store.num_documents,
        tokens=store.num_tokens,
        seconds=perf_counter() - started,
        decoded_by=None if search.pieces else f"{store.reference.name} {store.reference.version}",
        written=None if written == asked.text else written,
    )


class Hits(NamedTuple):
    """What was found in a block of documents, in order; a column for each fact."""

    shard: int
    scanned: int  # tokens of the block
    documents: Ints  # number in the shard
    tokens: Ints  # first token in the document
    counts: Ints  # tokens
    skips: Ints  # bytes (characters, where a package decodes) of the first token before the text


class Search:
    """A text to be found in a store; `hits` finds it."""

    def __init__(self, store: Store, text: str) -> None:
        try:
            self._text = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text {text!r} is no text: {error.reason}",
                hint="give it as UTF-8",
            ) from error
        if not text:
            raise UsageError(
                "the text to look for is empty, and every place of every document holds it",
                hint="say what to look for: tokenmill grep STORE 'an exact text'",
            )
        self.store, self.text = store, text
        self.pieces = find_pieces(store)
        self._firsts = _first_numbers(store)

    def hits(self, *, workers: int | None = None) -> Iterator[Hits]:
        """Everything that is found, block by block, in the order of documents."""
        scan = self._scan if self.pieces else self._scan_decoded
        workers = (workers or len(usable_cores())) if self.pieces else 1
        if self.pieces:
            _ = self._wanted  # made here, once
        yield from _in_order(scan, _blocks(self.store), workers=workers)

    def match(self, hits: Hits, place: int, context: int) -> Match:
        """One of the hits, with so many characters before and after it."""
        store, shard = self.store, self.store.shards[hits.shard]
        local, first = int(hits.documents[place]), int(hits.tokens[place])
        count, skip = int(hits.counts[place]), int(hits.skips[place])
        ids = store.map_shard(hits.shard).document(local)
        start, end = _within_frame(store, ids)
        # A token has a byte at least, and a character four at most.
        begin, stop = max(start, first - 4 * context), min(end, first + count + 4 * context)
        decode: Callable[[TokenArray], bytes | str] = (
            self.pieces.join if self.pieces else store.reference.decode
        )
        at, around = len(decode(ids[begin:first])) + skip, decode(ids[begin:stop])
        if begin == start < stop and self.pieces and self.pieces.heads is not None:
            cut = int(self.pieces.heads[ids[start]])
            at, around = at - cut * (first > start), around[cut:]
        size = len(self._text if isinstance(around, bytes) else self.text)
        before, after = around[:at], around[at + size :]
        if isinstance(before, bytes) and isinstance(after, bytes):
            before, after = before.decode(errors="replace"), after.decode(errors="replace")
        assert isinstance(before, str)
        assert isinstance(after, str)
        return Match(
            document=self._firsts[hits.shard] + local,
            split=shard.split,
            token=first,
            tokens=count,
            before=before[max(0, len(before) - context) :],
            after=after[:context],
            source=store.source(shard.first_document + local),
        )

    def ids_of_text(self) -> Ints:
        """What the tokenizer makes of the text."""
        return self.store.reference.encode(TextBatch.from_texts([self._text])).ids.astype(np.int64)

    @lazy
    def _wanted(self) -> NDArray[np.integer]:
        """Ids of which every match has at least one."""
        assert self.pieces is not None
        counts = np.zeros(len(self.pieces.sizes), np.int64)
        for shard in self.store.shards[:: max(1, len(self.store.shards) // SAMPLED_SHARDS)]:
            if shard.tokens:
                tokens = self.store.map_shard(self.store.shards.index(shard)).tokens
                counts += np.bincount(tokens[:SAMPLED_TOKENS], minlength=len(counts))
        return wanted_ids(self._text, self.pieces, counts).astype(self.store.dtype)

    # Ids that stand for bytes, one by one.

    def _scan(self, block: DocumentRange) -> Hits:
        assert self.pieces is not None
        mapped = self.store.map_shard(block.shard)
        begins, lengths = block.spans(mapped)
        reach, text = len(self._text), self._text
        first, end = int(begins[0]), int(begins[-1] + lengths[-1])
        found: list[tuple[Ints, Ints, Ints, Ints]] = []
        free = 0, 0  # a token, and a byte of it, before which there is no match any more
        for position in range(first, end, CHUNK_TOKENS):
            stop = min(position + CHUNK_TOKENS, end)
            begin = max(first, position - 1)  # a token more, which may be one that begins documents
            ids = mapped.tokens[begin : min(stop + reach, end)]
            places = self._places(ids, reach)
            if not len(places):
                continue
            at = places + begin
            document = begins.searchsorted(at, side="right") - 1
            sizes, starts = self._framed(ids[places], at, begins[document], lengths[document])
            # Between documents, and where tokens were left out, a byte that is in no text.
            breaks = np.ones(len(at), np.bool_)
            breaks[1:] = (np.diff(at) != 1) | (np.diff(document) != 0)
            sizes += breaks
            starts -= breaks
            ends = np.cumsum(sizes)
            heads = ends - sizes
            where = np.repeat(starts - heads, sizes)
            where += np.arange(len(where))
            data = self.pieces.data.take(where, mode="wrap")
            data[heads[breaks]] = NO_BYTE
            heads += breaks
            token = int(at.searchsorted(max(free[0], position)))
            place = int(heads[token]) if token < len(at) else len(data)
            place += free[1] if token < len(at) and at[token] == free[0] else 0
            matches = np.array(_find(data.tobytes(), text, place), np.int64)
            begun = ends.searchsorted(matches, side="right")
            inside = at[begun] < stop
            matches, begun = matches[inside], begun[inside]
            if len(matches):
                last = ends.searchsorted(matches + len(text) - 1, side="right")
                free = int(at[last[-1]]), int(matches[-1]) + len(text) - int(heads[last[-1]])
                mine = document[begun]
                found.append(
                    (mine, at[begun] - begins[mine], last - begun + 1, matches - heads[begun])
                )
        columns = map(np.concatenate, zip(*found, strict=True)) if found else [_NONE] * 4
        documents, *others = columns
        return Hits(block.shard, end - first, documents + block.first, *others)

    def _places(self, ids: TokenArray, reach: int) -> Ints:
        """Tokens that a match may have, ascending: those around wanted ones."""
        wanted = self._wanted
        if len(wanted) <= FEW_IDS:
            mask = np.zeros(len(ids), np.bool_)
            for token in wanted:
                mask |= ids == token
        else:
            mask = self._is_wanted.take(ids, mode="clip")
        hit = np.flatnonzero(mask)
        if not len(hit) or 4 * reach * len(hit) > len(ids):
            return np.arange(len(ids) if len(hit) else 0)
        starts = np.maximum(hit - reach, 0)
        ends = np.minimum(hit + reach + 1, len(ids))
        apart = np.flatnonzero(starts[1:] > ends[:-1])
        starts, ends = starts[np.append(0, apart + 1)], ends[np.append(apart, len(ends) - 1)]
        sizes = ends - starts
        places = np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
        places += np.arange(len(places))
        return places

    @lazy
    def _is_wanted(self) -> NDArray[np.bool_]:
        assert self.pieces is not None
        is_wanted = np.zeros(len(self.pieces.sizes), np.bool_)
        is_wanted[self._wanted] = True
        return is_wanted

    def _framed(self, ids: TokenArray, at: Ints, begins: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Bytes of tokens, and where they are in the pieces; none of what frames a document."""
        assert self.pieces is not None
        sizes, starts = self.pieces.sizes[ids], self.pieces.starts[ids]
        is_first, is_last = at == begins, at == begins + lengths - 1
        frames = at >= begins + lengths  # of no document
        if self.store.bos_id is not None:
            is_bos = is_first & (ids == self.store.bos_id)
            frames |= is_bos
            is_first ^= is_bos
            is_first[1:] |= is_bos[:-1] & (np.diff(at) == 1)
        if self.store.eos_id is not None:
            frames |= is_last & (ids == self.store.eos_id)
        if self.pieces.heads is not None:
            cut = np.where(is_first, self.pieces.heads[ids], 0)
            sizes -= cut
            starts += cut
        sizes[frames] = 0
        return sizes, starts

    # Ids of which only the tokenizer's package knows what they stand for together.

    def _scan_decoded(self, block: DocumentRange) -> Hits:
        decode, store = self.store.reference.decode, self.store
        mapped = store.map_shard(block.shard)
        found = []
        for number in range(block.first, block.last):
            ids = mapped.document(number)
            start, end = _within_frame(store, ids)
            ids = ids[start:end]
            for at in _find(decode(ids), self.text, 0):
                first = _last_token(ids, at, decode)
                last = _last_token(ids, at + len(self.text) - 1, decode)
                skip = at - len(decode(ids[:first]))
                found.append((number, start + first, last - first + 1, skip))
        columns = np.array(found, np.int64).reshape(-1, 4).T
        _, lengths = block.spans(mapped)
        return Hits(block.shard, int(lengths.sum()), *columns)


T = TypeVar("T", bytes, str)
NO_BYTE = 0xFF  # is in no text
FEW_IDS = 12  # up to here comparing with each is faster than a table
SAMPLED_SHARDS = 4
SAMPLED_TOKENS = 1 << 16
_NONE = np.zeros(0, np.int64)


def _find(data: T, text: T, place: int) -> list[int]:
    """Where a text is, from a place on; matches do not overlap."""
    found: list[int] = []
    while (place := data.find(text, place)) >= 0:
        found.append(place)
        place += len(text)
    return found


def _last_token(ids: TokenArray, character: int, decode: Callable[[TokenArray], str]) -> int:
    """The token of which a character is: the last one before which it is not there yet."""
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(decode(ids[:middle])) <= character else (low, middle)
    return low


def _within_frame(store: Store, ids: TokenArray) -> tuple[int, int]:
    """The tokens of a document that are its text; as `Store.decode` has it."""
    start = int(store.bos_id is not None and len(ids) > 0 and ids[0] == store.bos_id)
    has_end = store.eos_id is not None and len(ids) > start and ids[-1] == store.eos_id
    return start, len(ids) - int(has_end)


def _first_numbers(store: Store) -> list[int]:
    """Of each shard, the number of its first document in its split."""
    seen: dict[str, int] = {}
    found = []
    for shard in store.shards:
        found.append(seen.get(shard.split, 0))
        seen[shard.split] = found[-1] + shard.documents
    return found


class DocumentRange(NamedTuple):
    """Documents of a shard, one after the other."""

    shard: int
    first: int
    last: int  # the one after

    def spans(self, mapped: MappedShard) -> tuple[Ints, Ints]:
        """Where they begin in the tokens of the shard, and how many tokens they have."""
        index, here = mapped.index, slice(self.first, self.last)
        begins = index.offsets[here].astype(np.int64) // index.dtype.itemsize
        return begins, index.lengths[here].astype(np.int64)


def _blocks(store: Store) -> Iterator[DocumentRange]:
    """All documents, about `BLOCK_TOKENS` at a time."""
    for number, shard in enumerate(store.shards):
        first = 0
        ends = np.cumsum(store.map_shard(number).index.lengths, dtype=np.int64)
        while first < shard.documents:
            before = int(ends[first - 1]) if first else 0
            last = int(ends.searchsorted(before + BLOCK_TOKENS, side="right"))
            last = max(last, first + 1)
            yield DocumentRange(number, first, last)
            first = last


def _in_order(
    scan: Callable[[DocumentRange], Hits], blocks: Iterator[DocumentRange], *, workers: int
) -> Iterator[Hits]:
    """What is found in each block, in their order; few are under way at a time."""
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenmill grep") as pool:
        waiting: deque[Future[Hits]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(scan, block))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


# -------------------------------------------------------------------------------------------------
# What ids stand for.

HOLE = bytes([NO_BYTE])  # an id that stands for nothing
COMPARED_SHARDS = 8
COMPARED_TOKENS = 4096


class Pieces:
    """The bytes of every id, where a text is those of its ids one after the other."""

    def __init__(self, pieces: list[bytes], *, heads: Ints | None = None) -> None:
        self.pieces = pieces
        self.sizes = np.array([*map(len, pieces)], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.data = np.frombuffer(b"".join(pieces), np.uint8)
        self.heads = heads  # bytes that an id lacks where a document begins with it

    def join(self, ids: TokenArray) -> bytes:
        return b"".join(map(self.pieces.__getitem__, ids.tolist()))

    def text(self, ids: TokenArray) -> str:
        """What a document says."""
        cut = 0 if self.heads is None or not len(ids) else int(self.heads[ids[0]])
        return self.join(ids)[cut:].decode(errors="replace")


def find_pieces(store: Store) -> Pieces | None:
    """What the ids of a store stand for; None where only its tokenizer's package can say.

    What follows from the tokenizer's settings is compared with what the package says of some
    documents.
    """
    found = _pieces_of(store)
    if found is None or min(found.sizes) == 0:
        return None
    shards = [shard for shard in store.shards if shard.documents]
    for shard in shards[:: max(1, len(shards) // COMPARED_SHARDS)]:
        ids = store[shard.first_document]
        start, end = _within_frame(store, ids)
        ids = ids[start : min(end, start + COMPARED_TOKENS)]
        if found.text(ids) != store.reference.decode(ids):
            return None
    return found


def _pieces_of(store: Store) -> Pieces | None:
    kind = store.manifest.identity.tokenizer.kind
    if kind == TokenizerKind.BYTES:
        return Pieces([*(bytes([byte]) for byte in range(256)), references.END_OF_TEXT.encode()])
    content, pieces = find_tokenizer(store.tokenizer_dir).parsed, [HOLE] * store.vocab_size
    if isinstance(content, references.RankFile):
        for piece, rank in content.ranks.items():
            pieces[rank] = piece
        for name, rank in content.definition.special_tokens.items():
            pieces[rank] = name.encode()
        return Pieces(pieces)
    if isinstance(content, references.SentencePieceModel):
        return _pieces_of_model(content, pieces, store)
    return _pieces_of_json(content, pieces)


def _pieces_of_model(
    model: references.SentencePieceModel, pieces: list[bytes], store: Store
) -> Pieces | None:
    if model.whitespace_is_suffix:
        return None
    kinds = references.PieceType
    for number, (piece, kind) in enumerate(model.pieces):
        if kind is kinds.UNKNOWN:
            pieces[number] = store.reference.decode([number]).encode()
        elif kind is kinds.CONTROL:
            pieces[number] = piece.encode()
        elif kind is kinds.BYTE:
            pieces[number] = references.spaced_piece_bytes(piece)
        else:
            pieces[number] = piece.replace(SPACE, " ").encode()
    cuts = model.adds_dummy_prefix or model.removes_extra_whitespace
    return Pieces(pieces, heads=_leading_spaces(pieces, most=1) if cuts else None)


SPACE = "\u2581"
# The steps of a decoder after which a text is its pieces one after the other.
_SPACED = ({"Replace"}, {"Replace", "Fuse"}, {"Replace", "ByteFallback", "Fuse"})
_BYTE_OF = {ord(char): chr(byte) for char, byte in CHAR_TO_BYTE.items()}
# Other characters of Latin-1 are not in the table, and must not be taken for bytes.
_BYTE_OF = dict.fromkeys(range(256), "\uffff") | _BYTE_OF


def _pieces_of_json(content: dict[str, Any], pieces: list[bytes]) -> Pieces | None:
    decoder: dict[str, Any] | None = content.get("decoder")
    steps = [step for step in nested_steps(decoder) if step["type"] != "Sequence"]
    kinds, heads = {str(step["type"]) for step in steps}, 0
    if kinds == {"ByteLevel"}:
        to_bytes = _from_table
    elif kinds == {"Metaspace"} and steps[0].get("replacement", SPACE) == SPACE:
        to_bytes, heads = _from_spaced, 1 << 30
        if steps[0].get("prepend_scheme", "always") == "never" or not steps[0].get(
            "add_prefix_space", True
        ):
            heads = 0
    elif kinds - {"Strip"} in _SPACED and _is_plain(steps):
        to_bytes = references.spaced_piece_bytes if "ByteFallback" in kinds else _from_spaced
        heads = sum(int(step["start"]) for step in steps if step["type"] == "Strip")
    else:
        return None
    for piece, number in references.vocabulary(content).items():
        pieces[number] = to_bytes(piece)
    for token in content.get("added_tokens") or []:
        pieces[token["id"]] = to_bytes(token["content"])
    return Pieces(pieces, heads=_leading_spaces(pieces, most=heads) if heads else None)


def _is_plain(steps: list[dict[str, Any]]) -> bool:
    """Whether steps put spaces where they were, and take some away from the beginning alone."""
    for step in steps:
        if step["type"] == "Replace" and (step.get("pattern"), step.get("content")) != (
            {"String": SPACE},
            " ",
        ):
            return False
        if step["type"] == "Strip" and (step.get("content"), step.get("stop")) != (" ", 0):
            return False
    return True


def _from_table(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _from_spaced(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()


def _leading_spaces(pieces: list[bytes], *, most: int) -> Ints:
    return np.array([min(most, len(piece) - len(piece.lstrip(b" "))) for piece in pieces], np.int64)


# -------------------------------------------------------------------------------------------------
# Ids of which every match has one.
#
# Some token has the byte of the text at any one place, and its bytes agree with the text as far as
# both reach. So all ids that may have that byte are such a set, for each place in the text another
# one; what is looked for is the set that is rarest in the store.

PLACES = 24  # in the text that are tried
_HIT_COST = 400.0  # looking at what is around a hit, per byte of the text, as so many tokens' scans
_TABLE_COST = 16  # a table, as so many comparisons


def wanted_ids(text: bytes, pieces: Pieces, counts: Ints) -> Ints:
    """Such ids, few and rare; `counts` says how often ids were seen in a sample."""
    longest = int(pieces.sizes.max())
    ids: dict[bytes, list[int]] = {}
    for number, piece in enumerate(pieces.pieces):
        ids.setdefault(piece, []).append(number)
    # Pieces that begin before the text, and those that end after it, by how far they agree.
    ends = tuple(text[:size] for size in range(1, min(len(text), longest) + 1))
    begins = tuple(text[-size:] for size in range(1, min(len(text), longest) + 1))
    before = [
        (max(len(end) for end in ends if piece.endswith(end)), piece)
        for piece in ids
        if piece.endswith(ends)
    ]
    after = [
        (len(text) - max(len(begin) for begin in begins if piece.startswith(begin)), piece)
        for piece in ids
        if piece.startswith(begins)
    ]
    around = {piece for piece in ids if text in piece}
    best: tuple[float, Ints] | None = None
    for place in sorted({*np.linspace(0, len(text) - 1, PLACES).astype(int).tolist()}):
        found = set(around)
        found.update(piece for size, piece in before if size > place)
        found.update(piece for begin, piece in after if begin <= place)
        for begin in range(max(0, place - longest + 1), place + 1):
            for end in range(place + 1, min(len(text), begin + longest) + 1):
                if text[begin:end] in ids:
                    found.add(text[begin:end])
        numbers = np.array(sorted(n for piece in found for n in ids[piece]), np.int64)
        seen = int(counts[numbers].sum()) / max(1, int(counts.sum()))
        cost = min(len(numbers), _TABLE_COST) + seen * _HIT_COST * len(text)
        if best is None or cost < best[0]:
            best = cost, numbers
    assert best is not None
    return best[1]
