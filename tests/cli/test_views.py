"""The commands that choose documents, and every command that takes what they have chosen."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.trainer.options import open_splits

from .conftest import Cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A folder with a store in which every text is twice."""
    cli = Cli(tmp_path_factory.mktemp("views"))
    rows = [{"id": f"d{n}", "text": f"text {n % 50} of fifty"} for n in range(100)]
    (cli.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenmill.build(cli.folder / "a.jsonl", tokenizer="bytes", out=cli.folder / "store", val=0.1)
    return cli


def test_a_view_is_made_asked_cut_further_and_named_wherever_a_store_is(cli: Cli) -> None:
    cli("annotate", "store", "--columns", "id")
    (cli.folder / "gone.txt").write_text("d3\nd7\n")
    made = cli("ban", "store", "--ids", "gone.txt", "--key", "id", "-o", "kept.view").out
    assert "98 of 100 (98.0%)" in made
    assert "its id is listed in gone.txt" in made
    unique = cli("dedup", "kept.view", "-o", "unique.view")
    assert "50 of 98 (51.0%)" in unique.out, "the share that stays is told"
    chosen = cli("select", "unique.view", "--where", "row >= 10", "-o", "few.view", "--json").json
    assert chosen["documents"] < chosen["of_documents"] == 50

    seen = cli("inspect", "few.view", "--json").json
    assert sum(each["documents"] for each in seen["splits"].values()) == chosen["documents"]
    assert next(each["reason"] for each in seen["view"]["gone"]) == "its id is listed in gone.txt"
    assert cli("verify", "few.view", "--json").json["ok"]
    layout = cli("layout", "few.view", "--seq-len", "32", "--json").json
    assert layout["documents"] == len(tokenmill.Store(cli.folder / "few.view", split="train"))
    cli("export", "few.view", "--to", "parquet", "--out", "out", "--quiet")
    assert [*(cli.folder / "out").rglob("*.parquet")]
    assert cli("grep", "few.view", "text 11 of", "--json").json["num_documents"] == 1
    assert cli("grep", "few.view", "text 99 of", code=1).err == ""
    mixture = tokenmill.Mixture({"few": (tokenmill.Store(cli.folder / "few.view"), 1)})
    assert tokenmill.Loader(mixture, seq_len=32, batch_size=2).batch(0).input_ids.shape == (2, 32)


def test_lines_that_no_document_has_are_told_where_they_are_passed_over(cli: Cli) -> None:
    listed = ["--ids", "numbers.txt", "--missing", "count"]
    (cli.folder / "numbers.txt").write_text("3\n999\n1000\n")
    told = "2 lines of the list, which no document has"
    assert told in cli("ban", "store", *listed, "-o", "counted.view").out
    assert told in cli("forget", "store", *listed, "--dry-run").out
    assert cli("forget", "store", *listed, "--dry-run", "--json").json["unknown"] == 2
    (cli.folder / "numbers.txt").write_text("999\n1000\n")
    assert told in cli("forget", "store", *listed).out, "nothing to do, and why"


def test_what_is_said_to_do_next_with_columns_works(cli: Cli) -> None:
    (cli.folder / "scores.csv").write_text(
        "id,score,kind\n" + "".join(f"d{n},{n / 7},k{n % 3}\n" for n in range(100))
    )
    for columns, next_step in (("score", "select store --where"), ("score,kind", "inspect store")):
        asked = ["store", "scores.csv", "--key", "id", "--columns", columns]
        told = cli("annotate", *asked).out
        (line,) = [each for each in told.splitlines() if each.startswith("next")]
        assert next_step in line
        cli(*shlex.split(line)[2:])
    hint = cli("inspect", "store", "--by", "score", code=2).err
    assert "columns that name groups: split, source, folder, " in hint
    assert "score" not in hint.partition("columns that name groups")[2]


def test_a_view_without_a_train_split_is_not_told_to_be_built(cli: Cli) -> None:
    cli("select", "store", "--where", "split == 'val'", "-o", "val.view")
    with pytest.raises(StoreError, match="has no split 'train'") as caught:
        open_splits(cli.folder / "val.view")
    assert "tokenmill build" not in str(caught.value.hint)
    with pytest.raises(StoreError) as caught:
        open_splits(cli.folder / "none")
    assert "tokenmill build" in str(caught.value.hint)


def test_a_store_whose_texts_are_all_in_another_is_named_and_nothing_is_written(cli: Cli) -> None:
    (cli.folder / "b.jsonl").write_text('{"text": "text 3 of fifty"}\n')
    cli("build", "b.jsonl", "--tokenizer", "bytes", "--out", "same")
    told = cli("dedup", "store", "same", "-o", "none", code=2).err
    assert "same' would be left: each of its texts is in a store named before" in told
    assert not (cli.folder / "none").exists()
    assert (
        "in all      50 of 101 (49.5%) documents"
        in cli("dedup", "same", "store", "-o", "one", code=0).out
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ban", "store", "--ids", "none.txt", "--key", "id"], "none.txt"),
        (["ban", "store", "--match", "every.txt"], "store' would be left"),
        (["ban", "store", "--match", "every.txt", "--regex"], "would be left"),
        (["ban", "store", "--match", "nothing.txt"], "in no document"),
        (["ban", "store", "--ids", "empty.txt"], "is empty"),
        (
            ["ban", "store", "--ids", "nothing.txt"],
            "line of 'nothing.txt' is the document of no",
        ),
        (["select", "store", "--where", "tokens > 1000"], "no document"),
        (["select", "store"], "nothing says which documents are meant"),
        (["select", "store", "--repeat", "split"], "split"),
        (["select", "none", "--where", "tokens > 1"], "none"),
        (["dedup", "a.jsonl"], "is a file, and no view"),
    ],
)
def test_what_chooses_no_view_is_refused_and_writes_nothing(
    cli: Cli, arguments: list[str], complaint: str
) -> None:
    lists = {"every.txt": "text\n", "nothing.txt": "zzzz\n", "empty.txt": "\n\n"}
    for name, text in lists.items():
        (cli.folder / name).write_text(text)
    done = cli(*arguments, "-o", "bad.view", code=None)
    assert done.code in (1, 2)
    assert complaint in done.err
    assert done.err.startswith("error: ")
    assert "hint: " in done.err
    assert not (cli.folder / "bad.view").exists()


def test_a_view_of_a_damaged_store_is_refused_with_the_file(cli: Cli, tmp_path: Path) -> None:
    tokenmill.build(cli.folder / "a.jsonl", tokenizer="bytes", out=tmp_path / "store")
    store = tokenmill.Store(tmp_path / "store")
    store.without([1], out=tmp_path / "kept.view")
    (shard,) = (tmp_path / "store/shards").glob("*.bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    done = cli("inspect", tmp_path / "kept.view", code=1)
    assert f"{shard.name}' has " in done.err
    assert "the store is incomplete" in done.err
    (tmp_path / "store/tokenmill.json").write_text("{}")
    assert "tokenmill.json" in cli("layout", tmp_path / "kept.view", "--seq-len", "8", code=1).err
