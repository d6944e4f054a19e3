from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tokenmill.store.layout import seal, unseal

from .conftest import Cli, in_terminal, write_corpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, bpe: Path) -> Cli:
    """The command in a folder that has a store already."""
    cli = Cli(tmp_path_factory.mktemp("inspect"))
    corpus = write_corpus(cli.folder)
    corpus.write_text(corpus.read_text() + '{"text": null}\n')
    cli("build", corpus.name, "-t", bpe, "-o", "store", "--val", "0.1", "--quiet")
    return cli


def test_an_overview_answers_what_is_in_the_store(cli: Cli) -> None:
    shown = cli("inspect", "store").out
    for fact in (
        r"store +store, written by tokenmill",
        r"documents +200 of 201 rows \(1 rejected\)",
        r"rejects +1 null-text; every row: store/rejects",
        r"sources +corpus\.jsonl \([\d.]+ kB, 201 rows\)",
        r"tokenizer +huggingface, \d+ ids, sha256 [0-9a-f]{12}",
        r"boundaries +<\|endoftext\|> \(0\) at the end of every document",
        r"checked against tokenizers [\d.]+, 0 differed",
        r"tokens per document\nshortest \d+, mean [\d.]+, longest \d+\npercentiles: 1% \d+",
        r"\n8 +to 15 +\u2588+ +\d+ +[\d.]+%",
        r"most frequent tokens, of all [\d,]+ \(\d+ of \d+ ids occur\)",
        r"' hello' +200 ",
        r"next +tokenmill inspect store --doc 0",
    ):
        assert re.search(fact, shown), f"{fact}\n{shown}"


def test_a_document_is_shown_with_the_boundaries_of_its_tokens(cli: Cli) -> None:
    shown = cli("inspect", "store", "--split", "train", "--doc", "0").out
    header, body = shown.split("\n\n")[0], shown.split("\n\n")[1]
    assert re.match(
        r"document 0 of train: \d+ tokens\nfrom corpus\.jsonl, row \d+, line \d+", header
    )
    pieces = body.replace("<|endoftext|>", "END").split("|")
    assert pieces[-1] == "END"
    ids = shown.split("ids\n")[1].split()
    assert len(ids) == len(pieces)


def test_json_has_every_document_token_and_the_same_totals(cli: Cli) -> None:
    found = cli("inspect", "store", "--doc", "5", "--json").json
    document = found["document"]
    assert document["number"] == 5
    assert document["path"] == "corpus.jsonl"
    assert "".join(token["text"] for token in document["tokens"]) == document["text"]
    assert sum(one["documents"] for one in found["lengths"]["histogram"]) == 200
    assert found["bytes_per_token"] == found["totals"]["text_bytes"] / found["totals"]["tokens"]
    assert found["rejects"] == {"null-text": 1}


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--doc", "200"), 2, "from 0 to 199"),
        (("--doc", "-1"), 2, "from 0 to 199"),
        (("--split", "test"), 1, "'val'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    cli: Cli, args: tuple[str, ...], code: int, words: str
) -> None:
    outcome = cli("inspect", "store", *args, code=code)
    assert words in outcome.err.splitlines()[1]


def test_words_of_a_manifest_that_are_not_known_are_shown_as_they_are(
    cli: Cli, tmp_path: Path
) -> None:
    shutil.copytree(cli.folder / "store", tmp_path / "foreign")
    manifest = tmp_path / "foreign" / "tokenmill.json"
    members = unseal(manifest.read_bytes(), path=manifest)
    config = {"format": "chat", "train_on": "nobody", "max_length": "many", "too_long": "fold"}
    members["config"] = {**members["config"], **config}  # type: ignore[dict-item]
    manifest.write_bytes(seal(members))
    shown = " ".join(cli("inspect", tmp_path / "foreign").out.split())
    assert "chats; train_on 'nobody', which is not known here" in shown
    assert "at most 'many' tokens, too_long 'fold', which is not known here" in shown
    manifest.write_bytes(seal(members | {"special_tokens": "keep"}))
    for command in ("inspect", "verify"):
        said = cli(command, tmp_path / "foreign", code=1)
        assert "not known here: 'keep' is not a valid SpecialTokens" in said.err


def test_a_folder_that_is_no_store_is_refused(cli: Cli) -> None:
    assert cli("inspect", "nowhere", code=1).err.startswith("error: ")


def test_small_files_are_told_by_their_groups_and_a_document_by_its_own_file(
    cli: Cli, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"this is {name}")
    here = Cli(tmp_path)
    here("build", ".", "-t", "bytes", "-o", "../texts")
    assert "sources     1 group of small files (27 B, 3 rows)" in here("inspect", "../texts").out
    assert "from b.txt, row 0" in here("inspect", "../texts", "--doc", "1").out


def test_a_terminal_shows_boundaries_in_colour_unless_none_is_wanted(cli: Cli) -> None:
    background = re.compile(r"\x1b\[[0-9;]*48;5;\d+m")
    args = ("inspect", "store", "--doc", "3")
    assert background.search(in_terminal(cli, *args, columns=80))
    plain = in_terminal(cli, *args, columns=80, NO_COLOR="1")
    assert not background.search(plain)
    assert re.search(r"document\| \d\| says", plain)


def test_an_imported_store_says_where_it_is_from_and_no_more(tmp_path: Path) -> None:
    here = Cli(tmp_path)
    corpus = write_corpus(tmp_path)
    here("build", corpus.name, "-t", "bytes", "-o", "store", "-q")
    here("export", "store", "--to", "megatron", "--out", "pairs", "-q")
    here("import", "pairs", "-t", "bytes", "-o", "back", "-q")
    shown = here("inspect", "back").out
    assert re.search(r"engine +imported from megatron by tokenmill [\d.]+, 1 unit\n", shown)
    assert re.search(r"specials +what became of special-token strings .* is not known\n", shown)
    assert "bytes of text per token" not in shown


def test_what_was_left_out_and_what_names_told_are_shown(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cli = Cli(tmp_path_factory.mktemp("chosen"))
    for split in ("train", "dev"):
        rows = ('{"text": "a", "n": 1}', '{"text": "b", "n": 2}', '{"text": "c"}')
        (cli.folder / f"{split}.jsonl").write_text("\n".join(rows))
    (cli.folder / "README.md").write_text("# x")
    built = cli("build", ".", "-t", "bytes", "-o", "store", "--where", "n<2", "--quiet").out
    assert "2 of 6 rows (4 left out by --where, 2 of them for lack of a value)" in built
    assert "not read    README.md: text beside data files; to have it read, name it" in built
    assert "end token   <|endoftext|> (256) after every document" in built
    shown = cli("inspect", "store").out
    for fact in (
        r"where +n < 2\n",
        r"splits +train: 1 document, 2 tokens, 1 shard\n +val: 1 document, .*\n +by the names of",
    ):
        assert re.search(fact, shown), fact
    only = ["dev.jsonl", "-t", "bytes", "-o", "other", "--split-by-name", "--quiet"]
    assert "val: 3 documents" in cli("build", *only).out
    both = cli("build", *only, "--no-split-by-name", code=2).err
    assert "--split-by-name and --no-split-by-name exclude each other" in both
