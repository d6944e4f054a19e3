"""Rows through a shaper, and the same through transformers."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.supervised.families import FAMILIES

from tokenmill.builder.encode import fit_rows
from tokenmill.engines.load import describe, find_tokenizer, load_engine
from tokenmill.options import RowShape
from tokenmill.records import Reject, TextBatch
from tokenmill.supervised.chat import with_template
from tokenmill.supervised.shaper import Shaper

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine


@dataclass
class Shaping:
    """What rows became."""

    ids: list[list[int]]
    masks: list[list[int]]
    texts: list[str]
    rejects: list[Reject]


_ENGINES: dict[tuple[str, ...], CheckedEngine] = {}
"""By what they are made of: most tests use the same few tokenizers, and loading checks each."""


class Press:
    """A shaper with its engine."""

    def __init__(
        self,
        tokenizer: Path | str,
        *,
        chat_template: Path | None = None,
        eos: int | None = None,
        **options: Any,
    ) -> None:
        files = find_tokenizer(tokenizer)
        if options.get("format", "chat") == "chat":
            files = with_template(files, None if chat_template is None else str(chat_template))
        found = describe(files)
        template = files.chat_template.read_text() if files.chat_template else ""
        key = (found.fingerprint, repr(files), template)
        if key not in _ENGINES:
            _ENGINES[key] = load_engine(found)
        self.engine = _ENGINES[key]
        shape = RowShape(**{"format": "chat"} | options)
        self.shaper = Shaper(shape, self.engine, eos=eos)
        self.shape, self.eos = shape, eos

    def __call__(self, *rows: object) -> Shaping:
        batch = TextBatch.from_texts(
            row if isinstance(row, bytes) else json.dumps(row) for row in rows
        )
        shaped = self.shaper.shape(batch, np.arange(len(batch), dtype=np.int64))
        whole = self.shaper.assemble(shaped, self.shaper.encode(shaped, self.engine.encode))
        fitted = fit_rows(self.shape, whole, (None, self.eos))
        tokens = fitted.tokens
        rejects = [Reject(int(shaped.rows[place]), *why) for place, why in fitted.reasons.items()]
        mask = np.ones(len(tokens.ids), np.uint8) if tokens.mask is None else tokens.mask
        bounds = tokens.offsets.tolist()
        return Shaping(
            ids=[tokens[i].tolist() for i in range(len(tokens))],
            masks=[mask[a:b].tolist() for a, b in itertools.pairwise(bounds)],
            texts=[shaped.texts.text_at(place) for place in fitted.kept.tolist()],
            rejects=sorted([*shaped.rejects, *rejects], key=lambda reject: reject.row),
        )

    def said(self, shaping: Shaping, row: int = 0) -> str:
        """What counts of a row, as text."""
        counted = np.array(shaping.ids[row])[np.array(shaping.masks[row]) == 1]
        return self.engine.decode(counted)


def transformers_tokenizer(folder: Path, name: str) -> Any:
    """The family's tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
    )


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A row in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}
