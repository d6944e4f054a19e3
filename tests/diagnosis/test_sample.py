from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.diagnosis.ways import LINES, take_sample
from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"document {number} \u00e9\U0001f600\n" * 20 for number in range(50)]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


def write(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / name
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return path


def load_sample(folder: Path) -> list[str]:
    lines = (folder / LINES).read_text().split("\n")
    return [json.loads(line)["text"] for line in lines if line]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt"])
def test_the_documents_of_any_input_are_kept_as_they_are(
    tmp_path: Path, kept: Path, name: str
) -> None:
    separator = None
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": TEXTS}), tmp_path / name)
    elif name.endswith("txt"):
        separator = "====\n"
        (tmp_path / name).write_text(separator.join(TEXTS))
    else:
        write(tmp_path, name, TEXTS)
    options = SourceOptions(separator=separator)
    facts = take_sample([tmp_path / name], folder=kept, most_bytes=10**6, options=options)
    assert load_sample(kept) == TEXTS
    assert (facts.documents, facts.rejected, facts.files) == (50, 0, 1)
    assert facts.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert facts.largest_document_bytes == max(len(text.encode()) for text in TEXTS)
    assert facts.input_bytes == (tmp_path / name).stat().st_size


def test_the_sample_is_bounded_and_spread_over_the_files(tmp_path: Path, kept: Path) -> None:
    for number in range(20):
        write(tmp_path, f"part-{number:02}.jsonl", [f"{number}:{'x' * 100}"] * 50)
    facts = take_sample([str(tmp_path / "part-*.jsonl")], folder=kept, most_bytes=8000)
    texts = load_sample(kept)
    assert 8000 <= facts.text_bytes <= 8000 + 8 * 110
    assert {text.split(":")[0] for text in texts} == {str(number) for number in range(0, 16, 2)}
    assert facts.files == 20


def test_empty_and_unusable_rows_are_left_out_and_counted(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path, "a.jsonl", ["", "one", "", "two"])
    path.write_text(path.read_text() + '{"no": "text"}\nbroken\n')
    facts = take_sample([path], folder=kept, most_bytes=10**6)
    assert load_sample(kept) == ["one", "two"]
    assert (facts.documents, facts.rejected) == (2, 2)


def test_no_text_at_all_is_an_error_that_names_the_input(tmp_path: Path, kept: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "text is elsewhere"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl': 1 rows cannot be used") as refused:
        take_sample([path], folder=kept, most_bytes=10**6)
    assert "--text-field text" in str(refused.value.hint)
