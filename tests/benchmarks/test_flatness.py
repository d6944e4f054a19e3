"""The input of the memory benchmark: new words in every copy, still valid JSON Lines."""

from __future__ import annotations

import itertools
import json

from benchmarks import flatness, measure

DOCUMENTS = [
    {"id": str(i), "text": f"Some words\nand a caf\u00e9, \u65e5\u672c \\n {i}"} for i in range(8)
]


def test_every_copy_alters_a_quarter_of_the_documents_in_a_way_of_its_own() -> None:
    lines = list(itertools.islice(flatness.varied_lines(DOCUMENTS), 4 * len(DOCUMENTS)))
    texts = [json.loads(line)["text"] for line in lines]
    originals = [document["text"] for document in DOCUMENTS] * 4
    altered = [text for text, original in zip(texts, originals, strict=True) if text != original]

    assert len(altered) == len(texts) // flatness.ALTERED_EVERY
    assert len({text.split()[0] for text in altered}) == 4
    assert {len(text) for text in altered} <= {len(text) for text in originals}
    assert all("\u00e9, \u65e5\u672c \\" in text for text in altered)


def test_thinning_keeps_the_peak() -> None:
    watched = measure.Watched(
        seconds=[float(i) for i in range(1001)], memory_bytes=[1] * 700 + [9] + [1] * 300
    )
    seconds, memory = flatness.thinned(watched)

    assert len(seconds) == len(memory) <= flatness.KEPT_SAMPLES
    assert max(memory) == 9
