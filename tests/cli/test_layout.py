from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tokenmill.store.reader import Store

from .conftest import Cli, write_corpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command in a folder that has a store already."""
    cli = Cli(tmp_path_factory.mktemp("layout"))
    corpus = write_corpus(cli.folder)
    cli("build", corpus.name, "-t", "bytes", "-o", "store", "--val", "0.1", "--quiet")
    return cli


def test_each_packing_has_a_line_of_numbers_and_a_sentence(cli: Cli) -> None:
    store = Store(cli.folder / "store")
    shown = cli("layout", "store", "--seq-len", "64", "--batch-size", "16").out
    tokens = f"{store.num_tokens:,}"
    for fact in (
        rf"^store +store, split train: {len(store)} documents, {tokens} tokens\n\n",
        r"\npacking +rows +tokens used +padded +split documents +dropped +targets\n",
        rf"\nconcat +\d+ +{tokens} +\d\.\d% +\d+ +0 +[\d,]+\n",
        rf"\nbest-fit +\d+ +{tokens} +\d+\.\d% +0 +0 +[\d,]+\n",
        rf"\npad +{len(store)} +{tokens} +\d+\.\d% +0 +0 +[\d,]+\n",
        r"\nconcat +every token is used; split at the end of a row, to go on in the next",
        r"\nbest-fit +every token is used; split, as longer than a row of 65 tokens: 0 documents",
        r"\npad +padding: \d+\.\d% of all places in rows; cut off after 65 tokens: 0 documents",
        r"\nbest +best-fit: it keeps \d+ documents \(\d+\.\d%\) whole that concat splits, for \d",
        r"\nepoch +concat: \d+ steps of 16 rows, the last one of \d+ rows?\n",
    ):
        assert re.search(fact, shown), f"{fact}\n{shown}"


def test_ranks_are_told_how_long_the_slowest_takes(cli: Cli) -> None:
    shown = cli("layout", "store", "--seq-len", "64", "--ranks", "2").out
    for fact in (
        r"\nranks +concat: the slowest of 2 ranks takes 1\.\d{3} of the mean, 1\.\d{3} with ",
        r"\n +4 rows of each in an update, attention within documents; mean of 32 updates",
    ):
        assert re.search(fact, shown), f"{fact}\n{shown}"
    asked = ("layout", "store", "--seq-len", "64", "--batch-size", "6", "--ranks", "2", "--json")
    for load in cli(*asked).json["loads"]:
        assert load["rows"] == 3
        assert 1 <= load["least"] <= load["balanced"] <= load["as_drawn"] <= load["as_drawn_most"]


def test_json_has_every_number_of_every_packing(cli: Cli) -> None:
    found = cli(
        "layout", "store", "--seq-len", "16", "--split", "val", "--batch-size", "7", "--json"
    ).json
    assert [account["packing"] for account in found["accounts"]] == ["concat", "best-fit", "pad"]
    for account in found["accounts"]:
        assert account["tokens"] == account["used"] + account["dropped"] == found["tokens"]
        assert account["rows"] * 17 == account["used"] + account["repeated"] + account["padding"]
        assert found["steps"][account["packing"]] == -(-account["rows"] // 7)
    assert (found["split"], found["seq_len"], found["batch_size"]) == ("val", 16, 7)
    assert found["accounts"][2]["dropped"] > 0


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_what_arrays_will_take_is_what_they_take(cli: Cli, packing: str) -> None:
    asked = ("store", "--split", "val", "--seq-len", "16", "--packing", packing)
    found = cli("layout", *asked, "--json").json
    cli("export", *asked, "--to", "npz", "--out", packing, "--quiet")
    [file] = (cli.folder / packing).glob("*.npz")
    with np.load(file) as arrays:
        size = sum(arrays[name].nbytes for name in ("input", "target", "mask"))
    assert found["array_bytes"] == {packing: size}
    shown = cli("layout", *asked).out
    assert f"{packing}: {found['accounts'][0]['rows']:,} x 16 x 9 bytes" in shown


def test_a_store_with_a_plan_is_still_whole_and_complete(cli: Cli) -> None:
    cli("layout", "store", "--seq-len", "32")
    plans = {path.name for path in (cli.folder / "store" / "layouts").iterdir()}
    assert any(name.startswith("best-fit-32-") for name in plans)
    assert "note" not in cli("verify", "store", "--sample", "0").out
    again = cli("build", "corpus.jsonl", "-t", "bytes", "-o", "store", "--val", "0.1", "--quiet")
    assert "nothing to do" in again.out
    assert {path.name for path in (cli.folder / "store" / "layouts").iterdir()} == plans


def test_packings_that_need_no_plan_make_none(cli: Cli, tmp_path: Path) -> None:
    here = Cli(tmp_path)
    here("build", cli.folder / "corpus.jsonl", "-t", "bytes", "-o", "store", "--quiet")
    shown = here(
        "layout", "store", "--seq-len", "32", "--packing", "pad", "--packing", "concat"
    ).out
    assert "best-fit" not in shown
    assert not (tmp_path / "store" / "layouts").exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "--seq-len"),
        (("--seq-len", "0"), 2, "seq_len 0"),
        (("--seq-len", "8", "--batch-size", "0"), 2, "batch_size 0"),
        (("--seq-len", "8", "--packing", "best"), 2, "best-fit"),
        (("--seq-len", "8", "--split", "test"), 1, "'val'"),
        (("--seq-len", "3000000", "--packing", "best-fit"), 2, "concat"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(
    cli: Cli, args: tuple[str, ...], code: int, words: str
) -> None:
    assert words in cli("layout", "store", *args, code=code).err
