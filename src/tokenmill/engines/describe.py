"""What can be said about a tokenizer from its files alone, without loading an engine.

eos and bos are what the tokenizer's own metadata name; nothing is guessed from how a token looks.
The fingerprint is taken from parsed content, so a reformatted tokenizer.json is the same
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import tokenmill.engines
from tokenmill.engines.base import SpecialTokens, TokenizerInfo, TokenizerKind
from tokenmill.engines.locate import TokenizerFiles, find_tokenizer
from tokenmill.engines.sentencepiece import SentencePieceModel, read_sentencepiece_model
from tokenmill.engines.tiktoken import RankFile, read_rank_file
from tokenmill.errors import TokenizerError, TokenmillError
from tokenmill.records import lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike
    from pathlib import Path

    from tokenmill.engines.base import Coverage, FastEngine


BYTES_EOS = "<|endoftext|>"
BYTES_EOS_ID = 256
_MOST_IDS = 1 << 24
_LONGEST_ADDED = 4096
_MOST_GROWTH = 64


@dataclass(frozen=True)
class TokenizerContent:
    """The file that is a tokenizer, parsed when that is first asked for."""

    kind: TokenizerKind
    path: Path
    sidecar: Path | None = None
    """The definition beside a rank file."""

    @lazy
    def parsed(self) -> Any:
        """A tokenizer.json as a dict, else a SentencePieceModel or a RankFile."""
        if self.kind is TokenizerKind.HUGGINGFACE:
            return read_tokenizer_json(self.path)
        if self.kind is TokenizerKind.SENTENCEPIECE:
            return read_sentencepiece_model(self.path)
        return read_rank_file(self.path, sidecar=self.sidecar)


def fast_engines() -> dict[str, FastEngine]:
    """Name -> module of each fast engine, in the order in which they are tried."""
    modules = tokenmill.engines.FAST_ENGINES
    return {
        module.rpartition(".")[2]: cast("FastEngine", import_module(module)) for module in modules
    }


def coverages_of(tokenizer: TokenizerContent, policy: SpecialTokens) -> tuple[Coverage, ...]:
    """What each fast engine says of the tokenizer."""
    with well_formed(tokenizer):
        return tuple(engine.covers(tokenizer, policy) for engine in fast_engines().values())


def describe(
    files: TokenizerFiles | str | PathLike[str],
    *,
    policy: SpecialTokens | None = SpecialTokens.TEXT,
) -> TokenizerInfo:
    """Describe a tokenizer; the coverages in it are those of the policy for special tokens.

    Without a policy nothing is found out about engines, which takes longest: for who encodes
    nothing.
    """
    if not isinstance(files, TokenizerFiles):
        files = find_tokenizer(files)
    if files.main is None:
        return _describe_bytes(files)
    sidecar = files.metadata[0] if files.metadata else None
    tokenizer = TokenizerContent(files.kind, files.main, sidecar)
    with well_formed(tokenizer):
        info = _DESCRIBE[files.kind](files, tokenizer.parsed)
    if policy is None:
        return info
    return replace(info, coverages=coverages_of(tokenizer, policy), policy=policy)


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Parse a tokenizer.json and make sure that it is one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"file {str(path)!r} is not valid JSON: {error}",
            hint="copy it again from where it came from",
        ) from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError(
            f"file {str(path)!r} is JSON but no tokenizer.json: it has no model with a vocabulary",
            hint="give the tokenizer.json that the `tokenizers` package writes "
            "(a tekken or vocab.json file is another format)",
        )
    parsed: dict[str, Any] = content
    return parsed


@contextmanager
def well_formed(tokenizer: TokenizerContent) -> Iterator[None]:
    """Say of a tokenizer.json that a member is not what it must be, wherever that is noticed."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, TokenmillError) or tokenizer.kind is not TokenizerKind.HUGGINGFACE:
            raise
        raise TokenizerError(
            f"file {str(tokenizer.path)!r} is no tokenizer.json that can be used: a member is "
            f"missing or of the wrong type ({type(error).__name__}: {str(error)[:200]})",
            hint="copy it again from where it came from",
        ) from error


def _refuse_harmful(content: dict[str, Any], ids: Mapping[str, int], path: Path) -> None:
    """Raise for what would take all memory, whatever text it is given."""
    wrong = [token for token, index in ids.items() if type(index) is not int or index < 0]
    if wrong:
        raise TokenizerError(
            f"the token {wrong[0]!r} has the id {ids[wrong[0]]!r} in {str(path)!r}, which is no "
            "whole number from 0 on",
            hint="copy the file again from where it came from",
        )
    refuse_large_ids(ids, path)
    for token in content.get("added_tokens") or []:
        if len(token["content"]) > _LONGEST_ADDED:
            raise TokenizerError(
                f"the added token {token['content'][:40]!r}... of {str(path)!r} has "
                f"{len(token['content']):,} characters, and finding it in text would take more "
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


def refuse_large_ids(ids: Mapping[Any, int], path: Path) -> None:
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
    for step in _steps(normalizer):
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


def _steps(normalizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if normalizer and normalizer["type"] == "Sequence":
        for step in normalizer.get("normalizers") or []:
            yield from _steps(step)
    elif normalizer:
        yield normalizer


def _describe_bytes(files: TokenizerFiles) -> TokenizerInfo:
    return TokenizerInfo(
        kind=TokenizerKind.BYTES,
        files=files.files,
        fingerprint=_sha256({"kind": "bytes", "eos": BYTES_EOS_ID}),
        vocab_size=BYTES_EOS_ID + 1,
        special_tokens={BYTES_EOS: BYTES_EOS_ID},
        eos_token=BYTES_EOS,
        bos_token=None,
    )


def _describe_json(files: TokenizerFiles, content: dict[str, Any]) -> TokenizerInfo:
    if content["model"].get("dropout"):
        raise TokenizerError(
            f"the tokenizer {str(files.main)!r} drops merges at random (model.dropout), "
            "so the same text would get other ids each time",
            hint='set "dropout" to null in its "model"',
        )
    vocab = vocabulary(content)
    added = content.get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    other = {token["content"]: token["id"] for token in added if not token.get("special")}
    ids = vocab | other | special
    assert files.main is not None
    _refuse_harmful(content, ids, files.main)
    named = {name: _named_token(files.metadata, name, ids) for name in ("eos", "bos")}
    other |= {token: ids[token] for token in named.values() if token and token not in special}
    tokenizer = {
        key: value for key, value in content.items() if key not in ("padding", "truncation")
    }
    return TokenizerInfo(
        kind=files.kind,
        files=files.files,
        fingerprint=_sha256({"tokenizer": tokenizer, **named}),
        vocab_size=1 + max(ids.values(), default=-1),
        special_tokens=special,
        other_tokens=other,
        eos_token=named["eos"],
        bos_token=named["bos"],
        added_tokens=tuple(added),
        has_normalizer=bool(content.get("normalizer")),
        spaces_beginnings=_spaces_beginnings(content.get("pre_tokenizer")),
    )


def _spaces_beginnings(step: dict[str, Any] | None) -> bool:
    if step is None:
        return False
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return True
    return any(map(_spaces_beginnings, step.get("pretokenizers") or []))


def _describe_sentencepiece(files: TokenizerFiles, model: SentencePieceModel) -> TokenizerInfo:
    assert files.main is not None
    control = model.control_pieces
    return TokenizerInfo(
        kind=files.kind,
        files=files.files,
        fingerprint=hashlib.sha256(files.main.read_bytes()).hexdigest(),
        vocab_size=len(model.pieces),
        special_tokens=control,
        # As the sentencepiece package has it: the named piece, if it is a control symbol.
        eos_token=model.eos_piece if model.eos_piece in control else None,
        bos_token=model.bos_piece if model.bos_piece in control else None,
    )


def _describe_ranks(files: TokenizerFiles, ranks: RankFile) -> TokenizerInfo:
    definition = ranks.definition
    for token in (definition.eos_token, definition.bos_token):
        if token is not None and token not in definition.special_tokens:
            raise TokenizerError(
                f"the definition of {str(ranks.path)!r} names {token!r}, no special token of it",
                hint=f'add it to "special_tokens" in {ranks.path.name}.json, with its id',
            )
    refuse_large_ids(ranks.ranks, ranks.path)
    refuse_large_ids(definition.special_tokens, ranks.path)
    ids = [*ranks.ranks.values(), *definition.special_tokens.values()]
    return TokenizerInfo(
        kind=files.kind,
        files=files.files,
        fingerprint=_sha256({"ranks": ranks.sha256, **definition.canonical()}),
        vocab_size=1 + max(ids, default=-1),
        special_tokens=dict(definition.special_tokens),
        eos_token=definition.eos_token,
        bos_token=definition.bos_token,
    )


_DESCRIBE: dict[TokenizerKind, Callable[[TokenizerFiles, Any], TokenizerInfo]] = {
    TokenizerKind.HUGGINGFACE: _describe_json,
    TokenizerKind.SENTENCEPIECE: _describe_sentencepiece,
    TokenizerKind.TIKTOKEN: _describe_ranks,
}


def vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Token -> id of a tokenizer.json's model, without added tokens."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {entry[0]: index for index, entry in enumerate(vocab)}


def _named_token(metadata: tuple[Path, ...], name: str, ids: Mapping[str, int]) -> str | None:
    """The eos or bos that the files beside a tokenizer.json name, in order of their authority."""
    by_id: dict[int, str] | None = None
    for path in metadata:
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise TokenizerError(
                f"file {str(path)!r} is not valid JSON: {error}", hint="repair it or take it away"
            ) from error
        token = content.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        number = content.get(f"{name}_token_id")
        if token is None and isinstance(number, int):
            by_id = by_id or {index: text for text, index in ids.items()}
            token = by_id.get(number)
        if isinstance(token, str) and token in ids:
            return token
    return None


def _sha256(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


# -------------------------------------------------------------------------------------------------
# The added tokens of a tokenizer.json, found in its text without parsing what is around them.
#
# A worker needs nothing else of the file itself: parsing and writing 11 MB of JSON would double
# the time it takes to start.

_KEY = re.compile(r'"added_tokens"\s*:\s*')


@dataclass(frozen=True, slots=True)
class AddedTokensText:
    """A tokenizer.json as text, and where its list of added tokens stands in it."""

    text: str
    tokens: list[dict[str, Any]]
    start: int
    end: int

    def with_tokens(self, tokens: list[dict[str, Any]]) -> str:
        """The same file with another list."""
        return self.text[: self.start] + json.dumps(tokens) + self.text[self.end :]


def find_added_tokens(text: str) -> AddedTokensText:
    """Find the list of added tokens; the file must be valid JSON."""
    places = [match.end() for match in _KEY.finditer(text)]
    if len(places) == 1:
        tokens, end = json.JSONDecoder().raw_decode(text, places[0])
        if isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens):
            return AddedTokensText(text, tokens, places[0], end)
    # No such key, or a vocabulary that holds the word itself: only parsing tells.
    content = json.loads(text)
    tokens = content.pop("added_tokens", None) or []
    rest = json.dumps(content, ensure_ascii=False)
    opening = '{"added_tokens": '
    written = json.dumps(tokens)
    return AddedTokensText(
        opening + written + ", " + rest[1:], tokens, len(opening), len(opening) + len(written)
    )
