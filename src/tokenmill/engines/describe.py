"""What can be said about a tokenizer from its files alone, without loading an engine.

eos and bos are what the tokenizer's own metadata name; nothing is guessed from how a token looks.
The fingerprint is taken from parsed content, so a reformatted tokenizer.json is the same
tokenizer; `quick_fingerprint` hashes raw bytes, for the common question "has anything changed at
all?".
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from tokenmill.engines.base import SpecialTokens, TokenizerInfo, TokenizerKind
from tokenmill.engines.coverage import Coverage, cover_json, cover_ranks, cover_sentencepiece
from tokenmill.engines.locate import TokenizerFiles, find_tokenizer
from tokenmill.engines.rank_files import RankFile, read_rank_file
from tokenmill.engines.sentencepiece_model import SentencePieceModel, read_sentencepiece_model
from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from pathlib import Path

BYTES_EOS = "<|endoftext|>"
BYTES_EOS_ID = 256
_UNASKED = Coverage(engine=None, refusal="nothing is encoded, so nobody asked")


def describe(
    files: TokenizerFiles | str | PathLike[str],
    *,
    policy: SpecialTokens | None = SpecialTokens.TEXT,
) -> TokenizerInfo:
    """Describe a tokenizer; the coverage in it is that of the policy for special tokens.

    Without a policy nothing is found out about engines, which takes longest: for who encodes
    nothing.
    """
    if not isinstance(files, TokenizerFiles):
        files = find_tokenizer(files)
    if files.main is None:
        return _describe_bytes(files)
    if files.kind is TokenizerKind.HUGGINGFACE:
        return _describe_json(files, read_tokenizer_json(files.main), policy)
    if files.kind is TokenizerKind.SENTENCEPIECE:
        return _describe_sentencepiece(files, read_sentencepiece_model(files.main), policy)
    return _describe_ranks(files, read_rank_file(files.main, sidecar=sidecar_of(files)), policy)


def sidecar_of(files: TokenizerFiles) -> Path | None:
    """The definition that lies beside a rank file."""
    return files.metadata[0] if files.metadata else None


def quick_fingerprint(files: TokenizerFiles) -> str:
    """sha256 over names and raw bytes of the files: equal means that nothing was touched."""
    digest = hashlib.sha256(files.kind.encode())
    for name, path in sorted(files.files.items()):
        data = path.read_bytes()
        digest.update(f"\n{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Parse a tokenizer.json and make sure that it is one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
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


def _describe_bytes(files: TokenizerFiles) -> TokenizerInfo:
    return TokenizerInfo(
        kind=TokenizerKind.BYTES,
        files=files.files,
        fingerprint=_sha256({"kind": "bytes", "eos": BYTES_EOS_ID}),
        vocab_size=BYTES_EOS_ID + 1,
        special_tokens={BYTES_EOS: BYTES_EOS_ID},
        eos_token=BYTES_EOS,
        bos_token=None,
        fast_engine=None,
        fast_engine_refusal="the bytes engine needs no faster one",
    )


def _describe_json(
    files: TokenizerFiles, content: dict[str, Any], policy: SpecialTokens | None
) -> TokenizerInfo:
    if content["model"].get("dropout"):
        raise TokenizerError(
            f"the tokenizer {str(files.main)!r} drops merges at random (model.dropout), "
            "so the same text would get other ids each time",
            hint='set "dropout" to null in its "model"',
        )
    vocab = vocabulary(content)
    added = content.get("added_tokens") or []
    special = {token["content"]: int(token["id"]) for token in added if token.get("special")}
    other = {token["content"]: int(token["id"]) for token in added if not token.get("special")}
    ids = vocab | other | special
    named = {name: _named_token(files.metadata, name, ids) for name in ("eos", "bos")}
    other |= {token: ids[token] for token in named.values() if token and token not in special}
    tokenizer = {
        key: value for key, value in content.items() if key not in ("padding", "truncation")
    }
    coverage = _UNASKED if policy is None else cover_json(content, policy)
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
        **_coverage_fields(coverage, policy),
    )


def _spaces_beginnings(step: dict[str, Any] | None) -> bool:
    if step is None:
        return False
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return True
    return any(map(_spaces_beginnings, step.get("pretokenizers") or []))


def _describe_sentencepiece(
    files: TokenizerFiles, model: SentencePieceModel, policy: SpecialTokens | None
) -> TokenizerInfo:
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
        **_coverage_fields(_UNASKED if policy is None else cover_sentencepiece(model), policy),
    )


def _describe_ranks(
    files: TokenizerFiles, ranks: RankFile, policy: SpecialTokens | None
) -> TokenizerInfo:
    definition = ranks.definition
    for token in (definition.eos_token, definition.bos_token):
        if token is not None and token not in definition.special_tokens:
            raise TokenizerError(
                f"the definition of {str(ranks.path)!r} names {token!r}, no special token of it",
                hint=f'add it to "special_tokens" in {ranks.path.name}.json, with its id',
            )
    ids = [*ranks.ranks.values(), *definition.special_tokens.values()]
    return TokenizerInfo(
        kind=files.kind,
        files=files.files,
        fingerprint=_sha256({"ranks": ranks.sha256, **definition.canonical()}),
        vocab_size=1 + max(ids, default=-1),
        special_tokens=dict(definition.special_tokens),
        eos_token=definition.eos_token,
        bos_token=definition.bos_token,
        **_coverage_fields(_UNASKED if policy is None else cover_ranks(ranks, policy), policy),
    )


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


def _coverage_fields(coverage: Coverage, policy: SpecialTokens | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "fast_engine": coverage.engine,
        "fast_engine_refusal": coverage.refusal,
        "coverage": coverage,
    }
    return fields if policy is None else {**fields, "policy": policy}


def _sha256(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
