"""Short names for well-known corpora: where each lies on the Hugging Face hub.

    tokenmill build fineweb-edu --limit 1000000 ...

A name stands for the files of the corpus's training split, as `hf://` paths. A file or folder of
that name in the working folder wins: what a command reads must not change when a name is added
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable


DEFAULT_FIELD = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCorpus:
    """Files on the hub, and what they hold."""

    files: str
    text_field: str
    holds: str


CORPORA = {
    "fineweb-edu": KnownCorpus(
        files="hf://datasets/HuggingFaceFW/fineweb-edu/data/*/*.parquet",
        text_field="text",
        holds="web pages of educational value; smaller samples are under sample/10BT, 100BT, 350BT",
    ),
    "slimpajama": KnownCorpus(
        files="hf://datasets/cerebras/SlimPajama-627B/train/*/*.jsonl.zst",
        text_field="text",
        holds="web, code, books, papers and more, deduplicated; 59,166 files with the other splits",
    ),
    "wikitext-103": KnownCorpus(
        files="hf://datasets/Salesforce/wikitext/wikitext-103-raw-v1/train-*.parquet",
        text_field="text",
        holds="Wikipedia articles, cut into lines: a row is one line, and many are empty",
    ),
    "openwebtext": KnownCorpus(
        files="hf://datasets/Skylion007/openwebtext/plain_text/train-*.parquet",
        text_field="text",
        holds="web pages that were linked to on Reddit",
    ),
    "c4": KnownCorpus(
        files="hf://datasets/allenai/c4/en/c4-train.*.json.gz",
        text_field="text",
        holds="cleaned English pages of Common Crawl; other variants lie beside en/",
    ),
}


def resolve(name: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The files that an input stands for if it is the name of a corpus; else the input."""
    corpus = CORPORA.get(name) if isinstance(name, str) else None
    return name if corpus is None or Path(str(name)).exists() else corpus.files


def text_field(inputs: Iterable[str | os.PathLike[str]], *, asked: str) -> str:
    """The field that holds the text: a corpus's own where every input is one and none was named."""
    fields = {CORPORA[str(name)].text_field if resolve(name) != name else asked for name in inputs}
    return fields.pop() if asked == DEFAULT_FIELD and len(fields) == 1 else asked


def shadowed(inputs: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Inputs that are the name of a corpus and are taken for a file or folder that is here."""
    return [name for name in map(str, inputs) if name in CORPORA and resolve(name) == name]
