"""What a person is shown of a store with masks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.store.samples import GOLDEN_MASKED

from .conftest import Cli, in_terminal

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command in a folder that has a store already; odd ids count in it."""
    folder: Path = tmp_path_factory.mktemp("masks")
    GOLDEN_MASKED.write(folder / "store")
    return Cli(folder)


def test_an_overview_tells_how_much_counts_and_where_nothing_does(cli: Cli) -> None:
    shown = re.sub(r"\s+", " ", cli("inspect", "store").out)
    assert "mask 29 of 73 tokens count for the loss (39.7%); 1 document has no token" in shown
    of_val = re.sub(r"\s+", " ", cli("inspect", "store", "--split", "val").out)
    assert "mask 8 of 23 tokens of val count for the loss (34.8%) splits" in of_val
    found = cli("inspect", "store", "--split", "train", "--json").json
    assert found["mask"] == {"tokens": 50, "counted": 21, "silent": 1}


def test_a_document_shows_what_counts_between_marks(cli: Cli) -> None:
    shown = cli("inspect", "store", "--split", "val", "--doc", "0").out
    assert "\n3 of 9 count for the loss (33.3%): those in [[ ]]\n" in shown
    assert "\nh|[[e]]|l|d| |[[o|u]]|t|<|endoftext|>\n" in shown
    tokens = cli("inspect", "store", "--split", "val", "--doc", "0", "--json").json["document"]
    assert [token["counts"] for token in tokens["tokens"]] == [
        token["id"] % 2 == 1 for token in tokens["tokens"]
    ]
    last = cli("inspect", "store", "--split", "train", "--doc", "0").out
    assert "t| |[[w|a|s]]| |[[a]]| |b" in last


def test_a_terminal_shows_in_grey_what_does_not_count(cli: Cli) -> None:
    shown = in_terminal(cli, "inspect", "store", "--split", "val", "--doc", "0", columns=80)
    assert "the grey ones do not" in shown
    assert "[[" not in shown
    style = {text: codes for codes, text in re.findall(r"\x1b\[([0-9;]+)m(.)\x1b\[0m", shown)}
    assert style["h"] == style["l"] != style["d"]  # grey, alternating
    assert style["e"] != style["d"]
    assert style["e"] not in (style["h"], style["d"])


def test_a_layout_counts_as_targets_what_counts(cli: Cli) -> None:
    shown = cli("layout", "store", "--seq-len", "8").out
    assert "4 documents, 50 tokens, of which 21 count for the loss" in shown
    found = cli("layout", "store", "--seq-len", "8", "--json").json
    assert found["counted"] == 21
    # "It was a bright cold day." begins with an odd id, which is nobody's label.
    assert [account["targets"] for account in found["accounts"]][:2] == [21 - 1, 21 - 1]


def test_verify_names_a_damaged_mask(cli: Cli) -> None:
    assert cli("verify", "store").code == 0
    path = min((cli.folder / "store" / "shards").glob("*.mask"))
    data = path.read_bytes()
    path.write_bytes(b"\2" + data[1:])
    shown = cli("verify", "store", code=1)
    assert path.name in shown.out + shown.err
    path.write_bytes(data)
