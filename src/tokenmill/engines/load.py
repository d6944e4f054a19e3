"""From the name of a tokenizer to an engine: its files, what they say, and what runs it.

    find_tokenizer(name) -> TokenizerFiles    which files; only their first bytes are read
    describe(files) -> TokenizerInfo          vocabulary size, special tokens, eos, fingerprint
    load_engine(info) -> CheckedEngine        a fast engine that is held to the reference

A name is the word `bytes`, `tiktoken:NAME`, a folder, a file, or else a hub id. A file's kind comes
from its content, never from its name: the `tokenizer.model` of Llama 3 is a tiktoken rank file,
that of Llama 2 a SentencePiece model. eos and bos are what the tokenizer's own metadata name;
nothing is guessed from how a token looks. The fingerprint is taken from parsed content, so a
reformatted tokenizer.json is the same tokenizer. `load_tokenizer` is the checked fast engine in one
line, for people who must tokenize inside their own loop.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import stat
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module, metadata
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec
import numpy as np

import tokenmill.engines
from tokenmill import words
from tokenmill._version import __version__
from tokenmill.engines import AUTO, REFERENCES, engine_names, references
from tokenmill.engines.base import (
    Coverage,
    SpecialTokens,
    TokenizerInfo,
    TokenizerKind,
    Unknown,
    failure_of,
    nested_steps,
)
from tokenmill.engines.parity import CheckedEngine, Mismatch, Sample, SpecialText, probe_texts
from tokenmill.engines.references import COPY_AGAIN, SIDECAR_SUFFIX, read_json, vocabulary
from tokenmill.engines.unknown import unknown_of_json, unknown_of_model
from tokenmill.errors import TokenizerError, TokenmillError, UsageError, abridged, importing
from tokenmill.files import cache_folder, is_remote, shown
from tokenmill.records import TextBatch, TokenBatch, cut_ranges, lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import ProcessPoolExecutor
    from os import PathLike

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine, FastEngine


METADATA_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
CHAT_TEMPLATE = "chat_template.jinja"
TIKTOKEN_PREFIX = "tiktoken:"

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_LONG_ESCAPE = re.compile(r"\\U([0-9a-f]{8})")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIXES = (".json", ".model", ".tiktoken")
_HUB_FILES = ["tokenizer.json", *METADATA_NAMES, CHAT_TEMPLATE, "*.model", "*.tiktoken"]
_HUB_FILES += ["vocab.json", "merges.txt"]
_MOST_IDS, _LONGEST_ADDED, _MOST_GROWTH = 1 << 24, 4096, 64


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer."""

    kind: TokenizerKind
    # tokenizer.json, the SentencePiece model or the rank file; None for bytes.
    main: Path | None
    # What is beside it and matters: special-token names, or a rank file's definition.
    metadata: tuple[Path, ...] = ()
    # A chat template that is a file of its own, where one is asked for.
    chat_template: Path | None = None

    @property
    def path(self) -> Path:
        """The file that is the tokenizer, which all but bytes have."""
        assert self.main is not None
        return self.main

    @property
    def files(self) -> dict[str, Path]:
        """File name inside a store's `tokenizer/` folder -> where it is now."""
        files = {path.name: path for path in self.metadata}
        if self.main is not None:
            # A tokenizer.json under another name would not be found again in the store's folder.
            is_json = self.kind is TokenizerKind.HUGGINGFACE
            files = {"tokenizer.json" if is_json else self.main.name: self.main} | files
        return files if self.chat_template is None else files | {CHAT_TEMPLATE: self.chat_template}

    @lazy
    def data(self) -> bytes:
        """The bytes of the file that is the tokenizer, read once."""
        return self.path.read_bytes()

    @lazy
    def digest(self) -> str:
        """Of these bytes."""
        return _digest(self.data)

    @lazy
    def parsed(self) -> Any:
        """A tokenizer.json as a dict, else a SentencePieceModel or a RankFile; read once."""
        if self.kind is TokenizerKind.HUGGINGFACE:
            return references.read_tokenizer_json(self.path, self.data)
        if self.kind is TokenizerKind.SENTENCEPIECE:
            return references.read_sentencepiece_model(self.path)
        sidecar = self.metadata[0] if self.metadata else None
        return references.read_rank_file(self.path, sidecar=sidecar)


def find_tokenizer(source: str | PathLike[str]) -> TokenizerFiles:
    """Find the files of a tokenizer; only their first bytes are read."""
    name = str(source)
    if name == TokenizerKind.BYTES:
        return TokenizerFiles(kind=TokenizerKind.BYTES, main=None)
    if name.startswith(TIKTOKEN_PREFIX):
        return _from_file(references.export_encoding(name.removeprefix(TIKTOKEN_PREFIX)))
    if is_remote(name):
        raise TokenizerError(
            f"the tokenizer {shown(name)!r} is an address; it is read from a local disk",
            hint="copy its files to a local folder, and give that: --tokenizer FOLDER",
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.exists():
        return _from_file(path)
    if _HUB_ID.fullmatch(name) and not name.endswith(_FILE_SUFFIXES):
        return _from_folder(_download(name))
    raise TokenizerError(
        f"no tokenizer at {name!r}: there is no such file or folder, and it is not a hub id",
        hint="give a folder with a tokenizer.json, such a file, a SentencePiece .model, a tiktoken "
        "rank file, a hub id such as openai-community/gpt2, or the word: bytes",
    )


def _from_folder(folder: Path) -> TokenizerFiles:
    if (folder / "tokenizer.json").is_file():
        return _from_file(folder / "tokenizer.json")
    others = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix != ".json")
    found = [path for path in others if _kind_of(path) is not None]
    if len(found) == 1:
        return _from_file(found[0])
    if found:
        names = ", ".join(path.name for path in found)
        raise TokenizerError(
            f"folder {str(folder)!r} holds several tokenizers ({names}) and no tokenizer.json, so "
            "which one is meant would be a guess",
            hint=f"name the file: --tokenizer {shlex.quote(str(found[0]))}",
        )
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        raise TokenizerError(
            f"folder {str(folder)!r} holds only vocab.json and merges.txt: they do not say how "
            "text is split and normalized, so its ids could not be trusted",
            hint='convert it once with: python -c "import sys; from transformers import '
            'AutoTokenizer as A; A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])" '
            f"{shlex.quote(str(folder))}",
        )
    raise TokenizerError(
        f"folder {str(folder)!r} holds no tokenizer.json, SentencePiece model or rank file",
        hint="give the folder that does, or one of those files",
    )


def _from_file(path: Path) -> TokenizerFiles:
    kind = _kind_of(path)
    if kind is None:
        raise TokenizerError(
            f"file {str(path)!r} is not a tokenizer: its first bytes are those of neither JSON, a "
            "SentencePiece model nor a tiktoken rank file",
            hint="give a tokenizer.json, a SentencePiece .model or a tiktoken rank file",
        )
    beside = {
        TokenizerKind.HUGGINGFACE: METADATA_NAMES,
        TokenizerKind.TIKTOKEN: (path.name + SIDECAR_SUFFIX,),
    }
    files = [path.with_name(name) for name in beside.get(kind, ())]
    metadata = tuple(file for file in files if file.is_file())
    return TokenizerFiles(kind=kind, main=path, metadata=metadata)


def _kind_of(path: Path) -> TokenizerKind | None:
    with path.open("rb") as file:
        head = file.read(4096)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        return TokenizerKind.HUGGINGFACE
    if _RANK_LINE.match(head):
        return TokenizerKind.TIKTOKEN
    # A SentencePiece model opens with its first piece: field 1, length-delimited, itself a message
    # that opens with the piece's text (field 1 again).
    is_pieces = head[:1] == b"\x0a" and head[2:3] == b"\x0a"
    return TokenizerKind.SENTENCEPIECE if is_pieces else None


def _download(repo_id: str) -> Path:
    """Folder in the hub's own cache that holds the tokenizer files of a repository, no weights."""
    purpose = f"loading the tokenizer {repo_id!r} from the hub"
    with importing("huggingface_hub", extra="hf", purpose=purpose):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except (HFValidationError, OSError) as error:  # the hub's other errors are OSErrors
        reason = str(error).strip().splitlines()
        raise TokenizerError(
            f"tokenizer {repo_id!r} is no local path and could not be fetched from the hub "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'})",
            hint="check the name and the network, log in with `hf auth login` if the repository is "
            "gated, or give a local folder: --tokenizer path/to/folder",
        ) from error


def describe(
    files: TokenizerFiles | str | PathLike[str],
    *,
    policy: SpecialTokens | None = SpecialTokens.TEXT,
    when_harmless: Callable[[bool], object] = lambda _: None,
) -> TokenizerInfo:
    """Describe a tokenizer; the coverages in it are those of the policy for special tokens.

    Without a policy nothing is found out about engines, which takes longest: for who encodes
    nothing. `when_harmless` is called when it is known that engines may load it, and told whether
    everything else is known too.
    """
    if not isinstance(files, TokenizerFiles):
        files = find_tokenizer(files)
    digests = _digests(files)
    key = _key_of(files, digests, policy)
    if key is not None and (known := _recall(key, files, policy)) is not None:
        when_harmless(True)
        return known
    coverages: tuple[Coverage, ...] = ()
    if files.kind is TokenizerKind.BYTES:
        eos, eos_id = references.END_OF_TEXT, references.BYTES_EOS_ID
        facts: dict[str, Any] = {
            "fingerprint": _sha256({"kind": "bytes", "eos": eos_id}),
            "vocab_size": eos_id + 1,
            "special_tokens": {eos: eos_id},
            "eos_token": eos,
            "bos_token": None,
        }
    else:
        looks_harmless = _looks_harmless(files)
        if looks_harmless:
            when_harmless(False)
        with _uncollected():
            with well_formed(files):
                if files.kind is TokenizerKind.HUGGINGFACE:
                    _refuse_harmful(files.parsed, files.path)
                if not looks_harmless:
                    when_harmless(False)
                facts = _DESCRIBE[files.kind](files, files.parsed)
            if policy is not None:
                coverages = coverages_of(files, policy)
    # What was found out is kept unless a file was written to meanwhile. All that is said of a
    # tokenizer.json is said of the bytes that were read of it.
    is_read_once = files.kind is TokenizerKind.HUGGINGFACE
    if key is not None and digests != _digests(files if is_read_once else replace(files)):
        key = None
    info = TokenizerInfo(
        kind=files.kind, files=files.files, coverages=coverages, policy=policy, key=key, **facts
    )
    if key is not None:
        _keep(key, info)
    return info


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from going through all of a large vocabulary again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # What is alive counts as old: else the next look at what is new is one at all of it.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


# What was found out about a tokenizer is kept for the next time: to describe and prove one of
# 150,000 tokens takes longer than to load it.
#
# An entry is named after all that it follows from: the bytes of the files, the policy, the packages
# and the code of the engines. It is believed if it is whole, and in a folder that nobody else can
# write to; whatever is wrong with it, the tokenizer is described again. Entries are replaced whole,
# by a rename, so that builds may write and read the same one at once.

_MOST_KEPT = 32
_ENTRY_BYTES = 64 << 20


def _digests(files: TokenizerFiles) -> list[str | tuple[str, str]] | None:
    """Of the bytes of a tokenizer's files; None where nothing is to be kept."""
    if files.main is None or os.environ.get("TOKENMILL_CACHE") == "":
        return None
    beside = [(path.name, _digest(path.read_bytes())) for path in files.metadata]
    return [files.digest, *beside]


def _key_of(
    files: TokenizerFiles,
    digests: list[str | tuple[str, str]] | None,
    policy: SpecialTokens | None,
) -> str | None:
    """Name of the entry for a tokenizer."""
    if digests is None:
        return None
    main, *beside = digests
    content = [files.kind, policy, main, beside]
    return f"{_digest(json.dumps(content).encode())[:32]}-{_environment()}"


def _environment() -> str:
    """Stands for all but the tokenizer that decides what is found out about it."""
    versions = {}
    for name in engine_names():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    files = [path for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
    code = [_digest(path.read_bytes()) for path in files]
    machine = [platform.machine(), sys.version, __version__, os.environ.get("TOKENMILL_KERNEL")]
    found = [*machine, tokenmill.engines.FAST_ENGINES, versions, code]
    return _digest(json.dumps(found).encode())[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _own_folder() -> Path:
    """The folder of the entries; PermissionError where others could write to it."""
    folder = cache_folder() / f"tokenizers-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder.stat())
    return folder


def _refuse_foreign(facts: os.stat_result) -> None:
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others could have written it")


def _recall(key: str, files: TokenizerFiles, policy: SpecialTokens | None) -> TokenizerInfo | None:
    """What was kept of the tokenizer; None where nothing was, or where it is not to be believed."""
    try:
        path = _own_folder() / key
        # Neither a link nor a pipe that would be waited for.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, "rb") as file:
            facts = os.fstat(number)
            _refuse_foreign(facts)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _ENTRY_BYTES:
                return None
            checksum, _, body = file.read().partition(b"\n")
        if checksum.decode() != _digest(key.encode() + body):
            return None
        info = _restored(body, key=key, files=files.files, policy=policy)
        os.utime(path)  # the ones that were not used for longest go first
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return info


def _keep(key: str, info: TokenizerInfo) -> None:
    """Keep what was found out; where that is not possible it is found out again next time."""
    left_out = ("key", "files", "policy")
    facts = {name: value for name, value in asdict(info).items() if name not in left_out}
    with contextlib.suppress(OSError, TypeError, ValueError):
        body = json.dumps(facts).encode()
        if _restored(body, key=key, files=info.files, policy=info.policy) != info:
            return  # something in it that this form cannot hold
        folder = _own_folder()
        staged = folder / f"{key}-{secrets.token_hex(4)}"
        number = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(number, "wb") as file:
                file.write(_digest(key.encode() + body).encode() + b"\n" + body)
            staged.replace(folder / key)
        finally:
            staged.unlink(missing_ok=True)
        entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_MOST_KEPT]:
            path.unlink(missing_ok=True)


def _restored(
    body: bytes, *, key: str, files: Mapping[str, Path], policy: SpecialTokens | None
) -> TokenizerInfo:
    facts = json.loads(body)
    coverages = tuple(Coverage(**_with_tuples(each)) for each in facts.pop("coverages"))
    kind, added = TokenizerKind(facts.pop("kind")), tuple(facts.pop("added_tokens"))
    unknown = facts.pop("unknown")
    return TokenizerInfo(
        **facts,
        kind=kind,
        files=files,
        coverages=coverages,
        policy=policy,
        added_tokens=added,
        unknown=None if unknown is None else Unknown(**_with_tuples(unknown)),
        key=key,
    )


def _with_tuples(value: Any) -> Any:
    """A value that was JSON, its lists as tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _way(threads: int) -> str:
    """How an engine runs, by which it is proved apart."""
    return "one thread" if threads == 1 else "several threads"


def _is_proved(info: TokenizerInfo, coverage: Coverage, way: str) -> bool:
    """Whether the probes agreed before, with the packages of this very machine."""
    known = info.key is not None and way in coverage.proved
    return known and str(info.key).endswith(_environment())


def _keep_proof(info: TokenizerInfo, coverage: Coverage, way: str) -> None:
    if info.key is None or coverage not in info.coverages:
        return
    # Workers on other machines may have other packages.
    if info.key.endswith(_environment()):
        proved = replace(coverage, proved=(*coverage.proved, way))
        known = tuple(proved if each is coverage else each for each in info.coverages)
        _keep(info.key, replace(info, coverages=known))


def fast_engines() -> dict[str, FastEngine]:
    """Name -> module of each fast engine, in the order in which they are tried."""
    names = tokenmill.engines.FAST_ENGINES
    return {name.rpartition(".")[2]: cast("FastEngine", import_module(name)) for name in names}


def coverages_of(tokenizer: TokenizerFiles, policy: SpecialTokens) -> tuple[Coverage, ...]:
    """What each fast engine says of the tokenizer."""
    with well_formed(tokenizer):
        return tuple(engine.covers(tokenizer, policy) for engine in fast_engines().values())


@contextmanager
def well_formed(tokenizer: TokenizerFiles) -> Iterator[None]:
    """Say of a tokenizer.json that a member is not what it must be, wherever that is noticed."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, TokenmillError) or tokenizer.kind is not TokenizerKind.HUGGINGFACE:
            raise
        raise TokenizerError(
            f"file {str(tokenizer.path)!r} is no tokenizer.json that can be used: a member is "
            f"missing or of the wrong type ({type(error).__name__}: {str(error)[:200]})",
            hint=COPY_AGAIN,
        ) from error


def _describe_json(files: TokenizerFiles, content: dict[str, Any]) -> dict[str, Any]:
    model = content["model"]
    if model.get("dropout"):
        raise TokenizerError(
            f"the tokenizer {str(files.main)!r} drops merges at random (model.dropout), "
            "so the same text would get other ids each time",
            hint='set "dropout" to null in its "model"',
        )
    added = content.get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    other = {token["content"]: token["id"] for token in added if not token.get("special")}
    ids = vocabulary(content) | other | special
    named = {name: _named_token(files.metadata, name, ids) for name in ("eos", "bos")}
    other |= {token: ids[token] for token in named.values() if token and token not in special}
    tokenizer = {key: content[key] for key in content if key not in ("padding", "truncation")}
    canonical = {"tokenizer": tokenizer, **named}
    return {
        "fingerprint": _sha256(canonical, vocab=model["vocab"]),
        "vocab_size": 1 + max(ids.values(), default=-1),
        "special_tokens": special,
        "other_tokens": other,
        "eos_token": named["eos"],
        "bos_token": named["bos"],
        "added_tokens": tuple(added),
        "has_normalizer": bool(content.get("normalizer")),
        "spaces_beginnings": any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
            for step in nested_steps(content.get("pre_tokenizer"))
        ),
        "unknown": unknown_of_json(content, vocabulary(content)),
    }


def _describe_sentencepiece(
    files: TokenizerFiles, model: references.SentencePieceModel
) -> dict[str, Any]:
    control = model.control_pieces
    return {
        "fingerprint": hashlib.sha256(files.path.read_bytes()).hexdigest(),
        "vocab_size": len(model.pieces),
        "special_tokens": control,
        # As the sentencepiece package has it: the named piece, if it is a control symbol.
        "eos_token": model.eos_piece if model.eos_piece in control else None,
        "bos_token": model.bos_piece if model.bos_piece in control else None,
        "unknown": unknown_of_model(model),
    }


def _describe_ranks(files: TokenizerFiles, ranks: references.RankFile) -> dict[str, Any]:
    definition = ranks.definition
    tokens = {"eos_token": definition.eos_token, "bos_token": definition.bos_token}
    for token in tokens.values():
        if token is not None and token not in definition.special_tokens:
            raise TokenizerError(
                f"the definition of {str(files.main)!r} names {token!r}, no special token of it",
                hint=f'add it to "special_tokens" in {files.path.name}.json, with its id',
            )
    ids: dict[Any, int] = {**ranks.ranks, **definition.special_tokens}
    _refuse_large_ids(ids, files.path)
    return {
        "fingerprint": _sha256({"ranks": ranks.sha256, **asdict(definition)}),
        "vocab_size": 1 + max(ids.values(), default=-1),
        "special_tokens": dict(definition.special_tokens),
        **tokens,
    }


_DESCRIBE: dict[TokenizerKind, Callable[[TokenizerFiles, Any], dict[str, Any]]] = {
    TokenizerKind.HUGGINGFACE: _describe_json,
    TokenizerKind.SENTENCEPIECE: _describe_sentencepiece,
    TokenizerKind.TIKTOKEN: _describe_ranks,
}


def _refuse_harmful(content: dict[str, Any], path: Path) -> None:
    """Raise for what would take all memory, whatever text it is given."""
    added = content.get("added_tokens") or []
    ids = vocabulary(content) | {token["content"]: token["id"] for token in added}
    if {*map(type, ids.values())} - {int} or min(ids.values(), default=0) < 0:
        token = next(each for each, i in ids.items() if type(i) is not int or i < 0)
        raise TokenizerError(
            f"the token {token!r} has the id {ids[token]!r} in {str(path)!r}, which is no whole "
            "number from 0 on",
            hint="copy the file again from where it came from",
        )
    _refuse_large_ids(ids, path)
    for text in (token["content"] for token in added):
        if len(text) > _LONGEST_ADDED:
            raise TokenizerError(
                f"the added token {text[:40]!r}... of {str(path)!r} has "
                f"{len(text):,} characters, and finding it in text would take more "
                "memory than the text itself",
                hint=f"give it at most {_LONGEST_ADDED:,} characters",
            )
    growth = _growth(content.get("normalizer"))
    if growth > _MOST_GROWTH:
        raise TokenizerError(
            f"the normalizer of {str(path)!r} can make a text {growth:,.0f} times as long, "
            "which no memory budget allows for",
            hint=f"replace with shorter texts: at most {_MOST_GROWTH} times as long is taken",
        )


def _looks_harmless(files: TokenizerFiles) -> bool:
    """Whether a look at a tokenizer.json shows what `_refuse_harmful` would find by parsing it.

    Parsing takes half as long as loading an engine does. Where this is in doubt it says no.
    """
    if files.kind is not TokenizerKind.HUGGINGFACE:
        return False
    from tokenmill.engines.gigatoken import find_member

    data = files.data
    # No id of eight digits, which all from _MOST_IDS on have, and no key that escapes disguise.
    if re.search(rb":\s*\d{8}", data) or re.search(rb"\\u00(5[fF]|[67])", data):
        return False
    try:
        steps, added = find_member(data, "normalizer"), find_member(data, "added_tokens")
        if steps is None or added is None:
            return False
        longest = max((len(token["content"]) for token in added[0]), default=0)
        return longest <= _LONGEST_ADDED and _growth(steps[0]) <= _MOST_GROWTH
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _refuse_large_ids(ids: Mapping[Any, int], path: Path) -> None:
    """Raise where the largest id is out of all proportion: engines keep a table up to it."""
    largest = max(ids.values(), default=0)
    if largest >= _MOST_IDS:
        raise TokenizerError(
            f"the largest id of {str(path)!r} is {largest:,}, with {len(ids):,} tokens; engines "
            "keep a table with a place for every id up to the largest",
            hint=f"give its tokens ids below {_MOST_IDS:,}",
        )


def _growth(normalizer: dict[str, Any] | None) -> float:
    """How many times as long a normalizer can make a text by replacing, at most."""
    growth = 1.0
    made: list[tuple[set[str] | None, float]] = []
    for step in nested_steps(normalizer):
        if step["type"] == "Sequence":
            continue
        if step["type"] == "Prepend":
            growth = max(growth, len(step["prepend"]))
        if step["type"] != "Replace":
            # What it makes of characters is not known here: they may be any now.
            made = [(None, factor) for _, factor in made]
            continue
        found, text = step["pattern"].get("String"), step["content"]
        factor = max(1.0, len(text) / max(1, len(found or "")))
        # A pattern that finds nothing at every place adds to each character.
        factor += not found and _finds_nothing(step["pattern"].get("Regex", ""))
        fed = [
            before
            for characters, before in made
            if not found or characters is None or characters & set(found)
        ]
        factor *= max(fed, default=1.0)
        made.append((set(text), factor))
        growth = max(growth, factor)
    return growth


def _finds_nothing(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is not None
    except re.error:
        return False


def _named_token(metadata: tuple[Path, ...], name: str, ids: dict[str, int]) -> str | None:
    """The eos or bos that the files beside a tokenizer.json name, in order of their authority."""
    for path in metadata:
        content = read_json(path, hint="repair it or take it away")
        token = content.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        number = content.get(f"{name}_token_id")
        if token is None and isinstance(number, int):
            token = next((text for text, index in reversed(ids.items()) if index == number), None)
        if isinstance(token, str) and token in ids:
            return token
    return None


def _sha256(content: dict[str, Any], *, vocab: Any = None) -> str:
    """Of the canonical JSON; a vocabulary of ids that is part of the content is written faster."""
    mark = secrets.token_hex(16)
    if isinstance(vocab, dict):
        tokenizer = content["tokenizer"]
        marked = tokenizer | {"model": tokenizer["model"] | {"vocab": mark}}
        content = content | {"tokenizer": marked}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    if isinstance(vocab, dict):
        canonical = canonical.replace(f'"{mark}"', _written(vocab), 1)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _written(ids: dict[str, int]) -> str:
    """Token -> id as `json` writes it sorted and in ASCII, in a third of the time."""
    try:
        text = msgspec.json.encode(ids, order="sorted").decode()
    except UnicodeEncodeError:  # half of a character
        return json.dumps(ids, sort_keys=True, separators=(",", ":"))
    # Backslashes of its own are out of the way while what is not ASCII gets others.
    text = text.replace(r"\\", "\0").replace("\x7f", r"\u007f")
    text = text.encode("ascii", "backslashreplace").decode()
    text = text.replace(r"\x", r"\u00")
    if r"\U" in text:
        text = _LONG_ESCAPE.sub(lambda found: json.dumps(chr(int(found[1], 16)))[1:-1], text)
    return text.replace("\0", r"\\")


# Which token ends a document, and which opens it: as asked for, or as the metadata name it. Where
# neither says, that is an error with the candidates in it: a wrong eos trains a model that never
# stops.

_SHOWN = 12


def resolve_token(info: TokenizerInfo, name: str, requested: str | None = None) -> tuple[str, int]:
    """Token and id that end (`eos`) or open (`bos`) a document.

    `requested` wins over the tokenizer's metadata.
    """
    tokens = {**info.other_tokens, **info.special_tokens}
    token = getattr(info, f"{name}_token") if requested is None else requested
    if token is not None and token in tokens:
        return token, tokens[token]
    candidates = list({**info.special_tokens, **info.other_tokens})
    what = f"this tokenizer does not name its {name} token, and a wrong guess ruins a training"
    if requested is not None:
        missing = "is not among this tokenizer's special or added tokens"
        what = f"the {name} token {requested!r} {missing}"
    listed = ", ".join(candidates[:_SHOWN]) or "none"
    more = f" and {len(candidates) - _SHOWN} more" if len(candidates) > _SHOWN else ""
    hint = f"use --eos {shlex.quote(candidates[0])} or --no-eos" if candidates else "use --no-eos"
    if name == "bos":
        hint = 'leave --bos out, or name it in tokenizer_config.json: {"bos_token": "..."}'
    raise TokenizerError(f"{what}; candidates: {listed}{more}", hint=hint)


def load_engine(
    tokenizer: TokenizerInfo | str | PathLike[str],
    *,
    choice: str = AUTO,
    special_tokens: SpecialTokens = SpecialTokens.TEXT,
    threads: int = 1,
) -> CheckedEngine:
    """Load the engine for a tokenizer, or for the folder or name of one.

    `auto` takes the first fast engine whose rules cover the tokenizer and that agrees with the
    probes, else the reference. A named engine is taken or refused with the reason.
    """
    if not isinstance(tokenizer, TokenizerInfo):
        tokenizer = describe(tokenizer, policy=special_tokens)
    info = tokenizer
    choices = (AUTO, *engine_names())
    if choice not in choices:
        raise UsageError(f"there is no engine {choice!r}", hint=f"use one of: {', '.join(choices)}")
    own = REFERENCES[info.kind]
    if choice in REFERENCES.values() and choice != own:
        raise UsageError(
            f"the engine {choice!r} cannot run this tokenizer, which is of the kind "
            f"{info.kind.value!r}",
            hint=f"use --engine {own} or --engine auto",
        )
    files = files_of(info)
    known = info.policy is special_tokens
    coverages: tuple[Coverage, ...] = ()
    if choice != own and info.kind is not TokenizerKind.BYTES:
        coverages = info.coverages if known else coverages_of(files, special_tokens)
    reference = _load_reference(info, files, special_tokens, threads)
    refusals: dict[str, str] = {}
    if choice == own:
        refusals[own] = f"--engine {choice} was asked for"
    elif info.kind is TokenizerKind.BYTES:
        refusals[own] = "the bytes engine needs no faster one"
    else:
        for coverage in coverages:
            if choice not in (AUTO, coverage.engine):
                continue
            try:
                if coverage.refusal:
                    raise TokenizerError(coverage.refusal)
                engine = _with_fast(
                    coverage, files, reference, info=info, policy=special_tokens, threads=threads
                )
                mismatches = _mismatches(engine, coverage, threads)
                if not mismatches:
                    return engine
                raise TokenizerError(
                    f"it disagrees with {reference.name} {reference.version} on "
                    f"{len(mismatches)} probes, first on {mismatches[0].text[:40]!r}"
                )
            except TokenizerError as error:
                refusals[coverage.engine] = error.message
    refusal = "; ".join(
        reason if len(refusals) == 1 else f"{name}: {reason}" for name, reason in refusals.items()
    )
    if choice not in (AUTO, own):
        raise TokenizerError(
            f"{choice} may not be used for this tokenizer: {refusal}; its ids could be wrong",
            hint="use --engine auto",
        )
    # To the bytes engine the string of its end of text means nothing.
    special = SpecialText(() if info.kind is TokenizerKind.BYTES else tuple(info.special_tokens))
    return CheckedEngine(reference, info=info, special_text=special, refusal=refusal)


def _with_fast(
    coverage: Coverage,
    files: TokenizerFiles,
    reference: Engine,
    *,
    info: TokenizerInfo,
    policy: SpecialTokens,
    threads: int,
) -> CheckedEngine:
    """A fast engine that is covered; whether it agrees with the reference is to be seen."""
    module, special = fast_engines()[coverage.engine], tuple(info.special_tokens)
    return CheckedEngine(
        reference,
        info=info,
        special_text=SpecialText(special),
        contested=module.contested(files, coverage, reference),
        fast=module.build(files, coverage, reference=reference, policy=policy, threads=threads),
        probes=probe_texts([*special, *info.other_tokens], derived=coverage.probes),
    )


def _mismatches(
    engine: CheckedEngine,
    coverage: Coverage,
    threads: int,
    by_fast: TokenBatch | None = None,
) -> Sequence[Mismatch]:
    """Probes on which the engines disagree; not tried again where they agreed before."""
    way = _way(threads)
    if _is_proved(engine.info, coverage, way):
        return ()
    mismatches = engine.check_probes(by_fast).mismatches
    if not mismatches:
        _keep_proof(engine.info, coverage, way)
    return mismatches


def files_of(info: TokenizerInfo) -> TokenizerFiles:
    """The files of a tokenizer that was described."""
    path = next(iter(info.files.values()), None)
    sidecar = info.files.get(path.name + SIDECAR_SUFFIX) if path else None
    return TokenizerFiles(kind=info.kind, main=path, metadata=(sidecar,) if sidecar else ())


def known_policy(kind: str, special_tokens: str) -> tuple[TokenizerKind, SpecialTokens]:
    """What a store says of its tokenizer; TokenizerError where this version does not know it."""
    try:
        return TokenizerKind(kind), SpecialTokens(special_tokens)
    except ValueError as error:
        raise TokenizerError(
            f"the store says of its tokenizer what is not known here: {error}",
            hint="open it with the version of tokenmill that wrote it",
        ) from error


def load_reference(
    kind: str, folder: PathLike[str], *, special_tokens: str, threads: int = 1
) -> Engine:
    """The reference engine alone, of the tokenizer that is kept in a store's folder."""
    known, policy = known_policy(kind, special_tokens)
    # The byte tokenizer has no files to be found.
    where = kind if known is TokenizerKind.BYTES else folder
    choice = REFERENCES[known]
    return load_engine(where, choice=choice, special_tokens=policy, threads=threads).reference


def _load_reference(
    info: TokenizerInfo, files: TokenizerFiles, policy: SpecialTokens, threads: int
) -> Engine:
    if info.kind is TokenizerKind.BYTES:
        return references.BytesEngine(special_tokens=policy)
    if info.kind is TokenizerKind.SENTENCEPIECE:
        return references.SentencePieceEngine(files.path, special_tokens=policy, threads=threads)
    if info.kind is TokenizerKind.TIKTOKEN:
        return references.TiktokenEngine(files.parsed, special_tokens=policy, threads=threads)
    reference = references.HuggingFaceEngine(files.path, special_tokens=policy, threads=threads)
    _check_added(reference, info, files)
    return reference


def _check_added(
    reference: references.HuggingFaceEngine, info: TokenizerInfo, files: TokenizerFiles
) -> None:
    """The file's id of a special token, and so of eos, must be the reference's."""
    for token in info.added_tokens:
        found = reference.added_token_id(token["content"])
        if found is not None and found != token["id"]:
            path = str(files.path)
            raise TokenizerError(
                f"the added token {token['content']!r} has the id {token['id']} in {path!r}, but "
                f"{reference.name} {reference.version} gives it {found}",
                hint='write the file anew with: python -c "import sys, tokenizers as t; '
                f't.Tokenizer.from_file(sys.argv[1]).save(sys.argv[1])" {shlex.quote(path)}',
            )


# Policy -> the reference that is being loaded for who will ask.
_ahead: dict[SpecialTokens, references.HuggingFaceApart] = {}


def load_ahead(
    path: Path,
    *,
    special_tokens: SpecialTokens,
    fork: Callable[[], int | None],
    at_once: bool = True,
) -> None:
    """Load both engines of a tokenizer.json, for `load_unproved`; the file is harmless.

    For a process that workers are forked from: the reference gets a process of its own, `at_once`
    or when the other engine is loaded. What turns out not to be asked for was loaded in vain.
    """
    from tokenmill.engines import gigatoken

    begin = partial(references.HuggingFaceApart, path, special_tokens=special_tokens, fork=fork)
    reference = begin() if at_once else None
    try:
        gigatoken.load_ahead(path, special_tokens)
    except BaseException:
        if reference is not None:
            reference.close()
        raise
    _ahead[special_tokens] = reference or begin()


def load_unproved(
    info: TokenizerInfo, *, choice: str, special_tokens: SpecialTokens
) -> tuple[CheckedEngine, Callable[[], bool]] | None:
    """What `load_engine` would give if the engines loaded ahead agree, and whether they do.

    That is waited for when it is asked for, in this process or in a fork. Where they do not, or
    where this gives None, `load_engine` finds another.
    """
    reference = _ahead.pop(special_tokens, None)
    coverage = next((each for each in info.coverages if not each.refusal), None)
    if reference is None or coverage is None or info.policy is not special_tokens:
        return None
    if coverage.engine != "gigatoken" or choice not in (AUTO, coverage.engine):
        return None
    files = files_of(info)
    reference.move(files.path)
    engine = _with_fast(coverage, files, reference, info=info, policy=special_tokens, threads=1)

    def agree() -> bool:
        by_fast = None
        if engine.fast is not None and not _is_proved(info, coverage, _way(1)):
            # While the reference is still being loaded.
            by_fast = engine.fast.encode(TextBatch.from_texts(engine.probes))
        if not reference.is_ready():
            return False
        _check_added(reference, info, files)
        return not _mismatches(engine, coverage, 1, by_fast)

    return engine, agree


class Encoded(TokenBatch, Sequence["NDArray[np.uint32]"]):
    """Ids of documents back to back; document i is `encoded[i]`."""

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint32]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.uint32]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint32] | list[NDArray[np.uint32]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return super().__getitem__(index + len(self) if index < 0 else index)


def _joined(found: list[NDArray[np.uint32]]) -> Encoded:
    """The same as `from_lists`, in a third of the time where they are few and all arrays."""
    ids = np.concatenate(found) if found else np.empty(0, np.uint32)
    return Encoded(ids, np.array([0, *accumulate(map(len, found))], np.int64))


class Tokenizer:
    """Text to ids and back, by the fastest engine that agrees with the reference.

    Unlike the build's workers this uses every core by default. As in a build, a small part of the
    text is encoded again by the reference; on a disagreement the call is redone and the fast engine
    is given up, with a warning.
    """

    def __init__(self, checked: CheckedEngine, *, pool: ProcessPoolExecutor | None = None) -> None:
        self._checked = checked
        self._pool = pool
        self._sample = Sample()
        self._last = 0, 0.0
        self._use(checked)

    def _use(self, engine: CheckedEngine | Engine) -> None:
        self._engine = engine
        own: Any = self._checked.engine if engine is self._checked else engine
        # A few texts are encoded one by one: a call for a batch takes longer than they do.
        plain: Any = self._checked.reference
        self._few_bytes: int = getattr(own, "few_bytes", getattr(plain, "few_bytes", -2) // 2)
        # What the reference itself encodes needs no check.
        self._is_checked = own is not self._checked.reference and hasattr(own, "encode_one")
        self._encode_one: Any = getattr(own if self._is_checked else plain, "encode_one", None)
        self._encode_texts: Any = getattr(own, "encode_texts", None)
        # A list of ids by the reference itself, for texts with fewer characters than that.
        self._plain: Any = getattr(own, "plain", None)
        self._plain_characters: int = own.plain_characters if self._plain else 0
        coverages = {each.engine: each for each in self._checked.info.coverages}
        self._ascii_is_safe = own.name in coverages and not coverages[own.name].contested

    @property
    def engine(self) -> str:
        """Name of the engine in use."""
        return self._engine.name

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._checked.info.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a document; None where the tokenizer does not name one."""
        info = self._checked.info
        return {**info.other_tokens, **info.special_tokens}.get(info.eos_token or "")

    @property
    def timing(self) -> str:
        """What the last call took: 'tokenized 8 samples in 3.2 ms (0.400 ms per sample)'."""
        number, seconds = self._last
        whole, each = (words.milliseconds(1000 * s) for s in (seconds, seconds / max(number, 1)))
        return f"tokenized {words.count(number, 'sample')} in {whole} ms ({each} ms per sample)"

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text."""
        started = time.perf_counter()
        texts = texts if isinstance(texts, list) else list(texts)
        found = self._encode(texts)
        encoded = _joined(found) if isinstance(found, list) else Encoded(found.ids, found.offsets)
        self._last = len(texts), time.perf_counter() - started
        return encoded

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text."""
        started = time.perf_counter()
        ids = None
        try:
            if len(text) < self._plain_characters:
                ids = np.array(self._plain(text), np.uint32)
        except BaseException as error:
            failure_of(error)
        if ids is None:
            ids = self._encode([text])[0]
        self._last = 1, time.perf_counter() - started
        return ids

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, special tokens shown as their content."""
        return self._checked.decode(ids)

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]] | TokenBatch:
        few: list[NDArray[np.uint32]] | TokenBatch | None = None
        try:
            is_few = sum(map(len, texts)) <= self._few_bytes
            if is_few and max(map(len, texts), default=0) < self._plain_characters:
                lists = list(map(self._plain, texts))
                ids = np.array(list(chain.from_iterable(lists)), np.uint32)
                return TokenBatch(ids, np.array([0, *accumulate(map(len, lists))], np.int64))
            if is_few and self._may_be_alone(texts):
                if self._encode_texts is not None and len(texts) > 1:
                    few = self._encode_texts(texts)
                else:
                    few = list(map(self._encode_one, texts))
                if not self._is_checked or self._sample.passes(texts):
                    return few
        except BaseException as error:
            failure_of(error)  # as a batch it fails again, with the place of the text
        batch = TextBatch.from_texts(texts)
        if few is None and self._pool is not None and batch.num_bytes >= _POOL_BYTES:
            return self._encode_in_pool(self._pool, batch)
        return self.encode_checked(batch, _joined(few) if isinstance(few, list) else few)

    def _may_be_alone(self, texts: Sequence[str]) -> bool:
        """Whether none of a few texts is one that only the reference may encode."""
        contested = self._checked.contested if self._is_checked else None
        if contested is None or (self._ascii_is_safe and all(map(str.isascii, texts))):
            return True
        return not len(contested(TextBatch.from_texts(texts)))

    def encode_checked(self, batch: TextBatch, tokens: TokenBatch | None = None) -> TokenBatch:
        """Ids of each document; `tokens` are those that were found for them already."""
        if tokens is None:
            tokens = self._engine.encode(batch)
        if self._engine is self._checked:
            result = self._checked.check_sample(batch, tokens, self._sample)
            if result.mismatches:
                self._give_up(f"disagree on {result.mismatches[0].text[:60]!r}")
                tokens = self._engine.encode(batch)
        return tokens

    def _give_up(self, why: str) -> None:
        reference = self._checked.reference
        warnings.warn(
            f"{self._checked.name} and {reference.name} {why}; {reference.name} is used from here "
            "on, which is slower and right",
            RuntimeWarning,
            stacklevel=5,
        )
        self._use(reference)

    def _encode_in_pool(self, pool: ProcessPoolExecutor, batch: TextBatch) -> TokenBatch:
        """Ids by the processes, each of which has this tokenizer with checks of its own."""
        ranges = cut_ranges(batch.offsets, _POOL_BYTES // 4)
        parts = [
            TextBatch(batch.data, batch.offsets[a : b + 1]).take(range(b - a)) for a, b in ranges
        ]
        found = list(pool.map(_encode_in_worker, parts))
        whole = [one for one in found if one is not None]
        if len(whole) < len(found):
            return self.encode_checked(batch)  # for the error, with the place of the text
        if self._engine is self._checked and any(name != self.engine for name, _ in whole):
            self._give_up("disagree in another process")
        return TokenBatch.joined([tokens for _, tokens in whole])


# Batches of so much text are shared out among the processes of a pool, a quarter of it at a time:
# sending it takes a millisecond, encoding it a hundred where a process is worth having.
_POOL_BYTES = 1 << 20
_in_worker: Tokenizer | None = None


def _start_worker(path: str, special_tokens: str, engine: str) -> None:
    global _in_worker
    _in_worker = load_tokenizer(path, special_tokens=special_tokens, engine=engine, threads=1)


def _encode_in_worker(batch: TextBatch) -> tuple[str, TokenBatch] | None:
    assert _in_worker is not None
    try:
        tokens = _in_worker.encode_checked(batch)
    except TokenizerError:
        return None
    return _in_worker.engine, tokens


@abridged
def load_tokenizer(
    path: str | PathLike[str],
    *,
    special_tokens: SpecialTokens | str = SpecialTokens.TEXT,
    engine: str = AUTO,
    threads: int | None = None,
    workers: int = 0,
) -> Tokenizer:
    """Load a tokenizer with the checked fast engine; `threads` defaults to every core.

    With `workers`, so many processes are started that have it too and share batches of more than
    1 MB: for engines that threads make no faster. A script that asks for them has its own code
    under `if __name__ == "__main__":`, since they import it.
    """
    checked = load_engine(
        path,
        choice=engine,
        special_tokens=SpecialTokens(special_tokens),
        threads=threads or os.cpu_count() or 1,
    )
    pool = None
    if workers > 0:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        # Spawned, not forked: a tokenizer that has started threads must not be forked.
        pool = ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(str(path), str(special_tokens), engine),
        )
        # Processes start as there is work for them.
        list(pool.map(_encode_in_worker, [TextBatch.from_texts([])] * workers))
    return Tokenizer(checked, pool=pool)
