from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.engines.load import load_engine
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

GROW = """
import random, sys
import psutil
from tokenmill.engines.load import load_engine
from tokenmill.records import TextBatch

engine = load_engine(sys.argv[1])
rss = lambda: psutil.Process().memory_info().rss >> 20
sample = TextBatch.from_texts(["the same text, before and after"])
before_ids = engine.encode(sample).ids.tolist()
start = rss()
dice = random.Random(1)
for _ in range(12):
    words = [f" {dice.getrandbits(64):x}" for _ in range(200_000)]
    engine.encode(TextBatch.from_texts(["".join(words)]))
    del words
grown = rss()
assert engine.recycle() is True
after = rss()
assert engine.encode(sample).ids.tolist() == before_ids
print(start, grown, after)
"""


def test_recycling_gives_the_memory_of_the_caches_back(bpe_tokenizer_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROW, str(bpe_tokenizer_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    start, grown, after = map(int, done.stdout.split())
    assert grown - start > 100, "the caches were to grow"
    assert after - start < 0.3 * (grown - start)


def test_a_view_is_encoded_as_its_own_documents(bpe_tokenizer_dir: Path) -> None:
    engine = load_engine(bpe_tokenizer_dir)
    assert engine.fast is not None
    texts = ["first", "", "second one", "third \u00e9", ""]
    batch = TextBatch.from_texts(texts)
    whole = engine.fast.encode(batch)
    for start in range(5):
        for stop in range(start, 6):
            view = TextBatch(batch.data, batch.offsets[start : stop + 1])
            part = engine.fast.encode(view)
            assert part.offsets[0] == 0
            assert part.ids.dtype == np.uint32
            assert len(part) == min(stop, 5) - start
            for index in range(len(part)):
                assert part[index].tolist() == whole[start + index].tolist()


def test_threads_change_nothing(bpe_tokenizer_dir: Path, training_texts: list[str]) -> None:
    batch = TextBatch.from_texts(training_texts)
    one = load_engine(bpe_tokenizer_dir, threads=1).encode(batch)
    two = load_engine(bpe_tokenizer_dir, threads=2).encode(batch)
    assert one.ids.tolist() == two.ids.tolist()
    assert one.offsets.tolist() == two.offsets.tolist()


def test_tokens_can_be_shown_and_text_comes_back(
    bpe_tokenizer_dir: Path, sentencepiece_bpe_model: Path
) -> None:
    text = "Some text, caf\u00e9 \u4f60 \U0001f600"
    for path in (bpe_tokenizer_dir, sentencepiece_bpe_model):
        engine = load_engine(path)
        ids = engine.encode(TextBatch.from_texts([text])).ids
        assert engine.decode(ids) == text
        shown = b"".join(engine.token_bytes(int(token_id)) for token_id in ids)
        assert shown.decode().replace("\u2581", " ").strip() == text
