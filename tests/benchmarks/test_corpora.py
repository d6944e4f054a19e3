"""The benchmark's text: the same documents in every format, from any machine's standard library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import corpora

if TYPE_CHECKING:
    from pathlib import Path


def test_a_corpus_has_the_same_documents_in_every_format(tmp_path: Path) -> None:
    corpus = corpora.prepare("python", num_bytes=400_000, num_files=2, work=tmp_path)

    plain = [path.read_bytes() for path in corpus.files("jsonl")]
    unpacked = [pa.input_stream(path, "zstd").read() for path in corpus.files("jsonl.zst")]
    texts = [json.loads(line)["text"] for part in plain for line in part.splitlines()]
    columns = [pq.read_table(path)["text"].to_pylist() for path in corpus.files("parquet")]
    assert len(plain) == 2
    assert unpacked == plain
    assert [text for column in columns for text in column] == texts
    assert corpus.documents == len(texts)
    assert corpus.text_bytes == sum(len(text.encode()) for text in texts)


def test_a_corpus_is_repeated_to_the_size_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "corpora").mkdir()
    lines = [json.dumps({"id": str(i), "text": f"text {i}"}) + "\n" for i in range(3)]
    (tmp_path / "corpora" / "python.jsonl").write_text("".join(lines))
    corpus = corpora.prepare("python", num_bytes=1000, num_files=2, work=tmp_path)

    written = [line for path in corpus.files("jsonl") for line in path.read_text().splitlines(True)]
    assert written == [lines[i % 3] for i in range(len(written))]
    assert 1000 <= corpus.input_bytes["jsonl"] < 1000 + 2 * len(lines[0])
