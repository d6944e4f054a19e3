"""Which files are the tokenizer that a user named. Only a file's first bytes are read here.

A name is the word `bytes`, `tiktoken:NAME`, a folder, a file, or else a hub id. A file's kind
comes from its content, never from its name: the `tokenizer.model` of Llama 3 is a tiktoken rank
file, that of Llama 2 a SentencePiece model.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.engines.base import TokenizerKind
from tokenmill.errors import MissingExtraError, TokenizerError
from tokenmill.files import is_remote, shown

if TYPE_CHECKING:
    from os import PathLike

    from tokenmill.engines.base import TokenizerInfo


METADATA_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
SIDECAR_SUFFIX = ".json"
CHAT_TEMPLATE = "chat_template.jinja"
TIKTOKEN_PREFIX = "tiktoken:"

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIXES = (".json", ".model", ".tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A tokenizer as it was found."""

    kind: TokenizerKind
    source: str
    """The name it was found by."""
    main: Path | None
    """tokenizer.json, the SentencePiece model or the rank file; None for bytes."""
    metadata: tuple[Path, ...] = ()
    """What lies beside it and matters: special-token names, or a rank file's definition."""
    chat_template: Path | None = None
    """A chat template that is a file of its own, where one is asked for."""

    @property
    def files(self) -> dict[str, Path]:
        """File name inside a store's `tokenizer/` folder -> where it lies now."""
        if self.main is None:
            return {} if self.chat_template is None else {CHAT_TEMPLATE: self.chat_template}
        # A tokenizer.json under another name would not be found again in the store's folder.
        name = "tokenizer.json" if self.kind is TokenizerKind.HUGGINGFACE else self.main.name
        template = {} if self.chat_template is None else {CHAT_TEMPLATE: self.chat_template}
        return {name: self.main} | {path.name: path for path in self.metadata} | template


def find_tokenizer(source: str | PathLike[str]) -> TokenizerFiles:
    """Find the files of a tokenizer: `bytes`, `tiktoken:NAME`, a folder, a file, or a hub id."""
    name = str(source)
    if name == TokenizerKind.BYTES:
        return TokenizerFiles(kind=TokenizerKind.BYTES, source=name, main=None)
    if name.startswith(TIKTOKEN_PREFIX):
        from tokenmill.engines.tiktoken import export_encoding

        return _from_file(export_encoding(name.removeprefix(TIKTOKEN_PREFIX)), name)
    if is_remote(name):
        raise TokenizerError(
            f"the tokenizer {shown(name)!r} is an address; it is read from a local disk",
            hint="copy its files to a local folder, and give that: --tokenizer FOLDER",
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_folder(path, name)
    if path.exists():
        return _from_file(path, name)
    if _HUB_ID.fullmatch(name) and not name.endswith(_FILE_SUFFIXES):
        return _from_folder(download_tokenizer(name), name)
    raise TokenizerError(
        f"no tokenizer at {name!r}: there is no such file or folder, and it is not a hub id",
        hint="give a folder with a tokenizer.json, such a file, a SentencePiece .model, a tiktoken "
        "rank file, a hub id such as openai-community/gpt2, or the word: bytes",
    )


def _from_folder(folder: Path, source: str) -> TokenizerFiles:
    if (folder / "tokenizer.json").is_file():
        return _from_file(folder / "tokenizer.json", source)
    others = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix != ".json")
    found = [path for path in others if _kind_of(path) is not None]
    if len(found) == 1:
        return _from_file(found[0], source)
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


def _from_file(path: Path, source: str) -> TokenizerFiles:
    kind = _kind_of(path)
    if kind is None:
        raise TokenizerError(
            f"file {str(path)!r} is not a tokenizer: its first bytes are those of neither JSON, a "
            "SentencePiece model nor a tiktoken rank file",
            hint="give a tokenizer.json, a SentencePiece .model or a tiktoken rank file",
        )
    if kind is TokenizerKind.HUGGINGFACE:
        beside = [path.with_name(name) for name in METADATA_NAMES]
    elif kind is TokenizerKind.TIKTOKEN:
        beside = [path.with_name(path.name + SIDECAR_SUFFIX)]
    else:
        beside = []
    metadata = tuple(file for file in beside if file.is_file())
    return TokenizerFiles(kind=kind, source=source, main=path, metadata=metadata)


def _kind_of(path: Path) -> TokenizerKind | None:
    with path.open("rb") as file:
        head = file.read(4096)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        return TokenizerKind.HUGGINGFACE
    if _RANK_LINE.match(head):
        return TokenizerKind.TIKTOKEN
    # A SentencePiece model opens with its first piece: field 1, length-delimited, itself a message
    # that opens with the piece's text (field 1 again).
    if head[:1] == b"\x0a" and head[2:3] == b"\x0a":
        return TokenizerKind.SENTENCEPIECE
    return None


# -------------------------------------------------------------------------------------------------
# Fetches a tokenizer from the Hugging Face hub: its tokenizer files alone, never weights.
#
# huggingface_hub keeps what it fetched in its own cache, so a second run needs no network.

_PATTERNS = [
    "tokenizer.json",
    *METADATA_NAMES,
    CHAT_TEMPLATE,
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "merges.txt",
]


def download_tokenizer(repo_id: str) -> Path:
    """Folder in the hub's cache that holds the tokenizer files of `repo_id`."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise MissingExtraError(
            "huggingface_hub", extra="hf", purpose=f"loading the tokenizer {repo_id!r} from the hub"
        ) from error
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise TokenizerError(
            f"tokenizer {repo_id!r} is no local path and could not be fetched from the hub "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'})",
            hint="check the name and the network, log in with `hf auth login` if the repository is "
            "gated, or give a local folder: --tokenizer path/to/folder",
        ) from error


# -------------------------------------------------------------------------------------------------
# Which token ends a document, and which opens it: as asked for, or as the metadata name it.
#
# Where neither says, that is an error with the candidates in it: a wrong eos trains a model that
# never stops.

_SHOWN = 12


def resolve_eos(info: TokenizerInfo, requested: str | None = None) -> tuple[str, int]:
    """Token and id that end a document; `requested` wins over the tokenizer's metadata."""
    return _resolve(info, requested, named=info.eos_token, name="eos")


def resolve_bos(info: TokenizerInfo, requested: str | None = None) -> tuple[str, int]:
    """Token and id that open a document; `requested` wins over the tokenizer's metadata."""
    return _resolve(info, requested, named=info.bos_token, name="bos")


def _resolve(
    info: TokenizerInfo, requested: str | None, *, named: str | None, name: str
) -> tuple[str, int]:
    tokens = {**info.other_tokens, **info.special_tokens}
    token = named if requested is None else requested
    if token is not None and token in tokens:
        return token, tokens[token]
    candidates = [
        *info.special_tokens,
        *(t for t in info.other_tokens if t not in info.special_tokens),
    ]
    if requested is not None:
        what = (
            f"the {name} token {requested!r} is not among this tokenizer's special or added tokens"
        )
    else:
        what = f"this tokenizer does not name its {name} token, and a wrong guess ruins a training"
    shown = ", ".join(candidates[:_SHOWN]) or "none"
    more = f" and {len(candidates) - _SHOWN} more" if len(candidates) > _SHOWN else ""
    raise TokenizerError(f"{what}; candidates: {shown}{more}", hint=_hint(name, candidates))


def _hint(name: str, candidates: list[str]) -> str:
    if name == "bos":
        return 'leave --bos out, or name it in tokenizer_config.json: {"bos_token": "..."}'
    if not candidates:
        return "use --no-eos"
    return f"use --eos {shlex.quote(candidates[0])} or --no-eos"
