from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest
from tests.builder.stores import make_texts, tree, write_jsonl

import tokenmill
from tokenmill.errors import StoreError, UsageError


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(inputs: object, **options: object) -> None:
    settings: dict[str, object] = {"tokenizer": "bytes", "memory": "1GB", "serial": True}
    tokenmill.build(inputs, out="store", **(settings | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_good_store_is_found_good_and_documents_are_encoded_again(name: str) -> None:
    data = write_jsonl(Path("raw"), [*make_texts(300), b"{bad", ""]).read_bytes()
    Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    build(name, unit_bytes=4000, val=0.1, max_rejects=1.0)
    report = tokenmill.verify("store", sample=50)
    assert report.ok
    assert (report.documents_reencoded, report.mismatches) == (50, 0)
    assert report.documents_unavailable == 0
    assert report.bytes == sum(map(len, tree(Path("store")).values()))


def test_a_sample_larger_than_the_store_takes_every_document() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(20))
    build("a.jsonl")
    assert tokenmill.verify("store", sample=1000).documents_reencoded == 20


def test_as_many_documents_are_drawn_as_were_asked_for_whatever_the_dice_say() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(300))
    build("a.jsonl", unit_bytes=2000, val=0.1)
    for seed in range(30):
        assert tokenmill.verify("store", sample=60, seed=seed).documents_reencoded == 60


def test_a_rare_ending_is_among_the_few_documents_that_are_drawn() -> None:
    texts = [f"document {number} of many" for number in range(150)]
    texts[77] = "abc\n "
    path = write_jsonl(Path("a.jsonl"), texts)
    build(path)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"abc\\n ", b"abd\\n "))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for seed in range(5):
        assert tokenmill.verify("store", sample=10, seed=seed).mismatches == 1


def test_files_of_a_group_are_read_again_by_their_names() -> None:
    Path("code").mkdir()
    for number in range(40):
        Path(f"code/{number}.py").write_text(f"print({number})\n")
    build("code")
    assert tokenmill.verify("store", sample=40).documents_reencoded == 40


def test_ids_that_are_not_the_references_are_found_although_all_checksums_hold() -> None:
    # A store that was built from other text under the same name: its bytes are sound.
    write_jsonl(Path("a.jsonl"), ["abc", "def"])
    build("a.jsonl")
    facts = Path("a.jsonl").stat()
    write_jsonl(Path("a.jsonl"), ["abc", "dXf"])
    os.utime("a.jsonl", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    report = tokenmill.verify("store", sample=2)
    assert not report.ok
    assert (report.documents_reencoded, report.mismatches) == (2, 1)
    assert "document 1" in report.findings[0].problem


def test_a_source_that_is_gone_or_changed_is_said_and_not_counted_as_good() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(10))
    write_jsonl(Path("b.jsonl"), make_texts(10, seed=1))
    build(["a.jsonl", "b.jsonl"])
    Path("a.jsonl").unlink()
    write_jsonl(Path("b.jsonl"), ["changed"])
    report = tokenmill.verify("store", sample=20)
    assert report.ok
    assert (report.documents_reencoded, report.documents_unavailable) == (0, 20)
    assert {note.file for note in report.notes} == {"a.jsonl", "b.jsonl"}


def test_a_flipped_bit_in_any_file_of_a_built_store_is_found() -> None:
    write_jsonl(Path("a.jsonl"), [*make_texts(40), b"bad"])
    build("a.jsonl", unit_bytes=3000, val=0.2, max_rejects=1.0)
    dice = random.Random(0)
    files = [path for path in Path("store").rglob("*") if path.is_file() and path.stat().st_size]
    files = [path for path in files if not path.name.startswith(".lock")]
    assert {path.suffix for path in files} >= {".bin", ".idx", ".json", ".jsonl"}
    for path in files:
        data = path.read_bytes()
        for _ in range(3):
            place, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            assert not _is_sound(), f"{path} byte {place} bit {bit}"
        path.write_bytes(data)
    assert _is_sound()


def _is_sound() -> bool:
    try:
        return tokenmill.verify("store", sample=0).ok
    except StoreError:
        return False


def test_an_empty_input_is_refused_unless_an_empty_store_is_wanted() -> None:
    for data, rows in (
        (b"", "the input, which has no rows"),
        (b"\n\n", "the input, which has no rows"),
        (b'{"text": ""}\n{"text": "a"}\n', "of 2 rows: 1 empty and 1 left out by"),
    ):
        Path("a.jsonl").write_bytes(data)
        with pytest.raises(UsageError, match=rows) as caught:
            build("a.jsonl", where="text != 'a'")
        assert "allow_empty=True" in str(caught.value)
        assert not Path("store/tokenmill.json").exists()


def test_an_empty_input_makes_an_empty_store_that_verifies() -> None:
    Path("a.jsonl").write_bytes(b"")
    build("a.jsonl", allow_empty=True)
    with tokenmill.Store("store") as store:
        assert (len(store), store.num_tokens) == (0, 0)
    assert tokenmill.verify("store").ok
