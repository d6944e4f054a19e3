"""Fetches a tokenizer from the Hugging Face hub: its tokenizer files alone, never weights.

huggingface_hub keeps what it fetched in its own cache, so a second run needs no network.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.engines.locate import CHAT_TEMPLATE, METADATA_NAMES
from tokenmill.errors import MissingExtraError, TokenizerError

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
