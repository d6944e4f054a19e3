from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from .conftest import Cli, write_corpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, bpe: Path) -> Path:
    cli = Cli(tmp_path_factory.mktemp("verify"))
    cli("build", write_corpus(cli.folder).name, "-t", bpe, "-o", "store", "--quiet")
    return cli.folder


@pytest.fixture
def cli(built: Path, tmp_path: Path) -> Cli:
    """The command in a folder with a corpus and its store, to be damaged at will."""
    return Cli(shutil.copytree(built, tmp_path, dirs_exist_ok=True))


def test_a_good_store_is_whole_and_right(cli: Cli) -> None:
    outcome = cli("verify", "store", "--sample", "20")
    assert re.search(r"verdict +whole and right", outcome.out)
    assert re.search(
        r"documents +20 documents encoded again by tokenizers [\d.]+, 0 differ", outcome.out
    )
    found = cli("verify", "store", "--json", "--sample", "0").json
    assert found["ok"] is True
    assert found["documents_reencoded"] == 0
    assert found["files"] > 3


def test_a_changed_bit_is_found_and_is_exit_code_1(cli: Cli) -> None:
    (shard,) = (cli.folder / "store/shards").glob("*.bin")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    outcome = cli("verify", "store", code=1)
    assert "NOT whole: 1 problem" in outcome.out
    assert f"shards/{shard.name}: " in outcome.out
    found = cli("verify", "store", "--json", code=1).json
    assert found["ok"] is False
    assert found["findings"][0]["file"] == f"shards/{shard.name}"


def test_a_source_that_is_gone_is_a_note_not_a_fault(cli: Cli) -> None:
    (cli.folder / "corpus.jsonl").unlink()
    outcome = cli("verify", "store")
    assert "note: corpus.jsonl: " in outcome.out
    assert "100 could not be" in outcome.out
