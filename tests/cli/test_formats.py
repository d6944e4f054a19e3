"""`export`, `import` and `convert`, as a person types them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenmill

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cli


def test_there_and_back_again(cli: Cli, tmp_path: Path, corpus: Path, bpe: Path) -> None:
    cli("build", corpus, "-t", bpe, "-o", "store", "--val", "0.1", "-q")
    exported = cli("export", "store", "--to", "megatron", "--out", "pairs", "--link", "-q")
    assert "--per-split-data-args-path" in exported.out
    assert exported.err == ""
    again = cli("export", "store", "--to", "megatron", "--out", "pairs", "--link")
    assert again.out.startswith("nothing to do")
    imported = cli("import", "pairs", "-t", bpe, "-o", "back", "--json").json
    assert imported["format"] == "megatron"
    assert imported["eos"] == "appended"
    cli("verify", "back", "-q")
    for split in ("train", "val"):
        before = tokenmill.Store(tmp_path / "store", split=split)
        after = tokenmill.Store(tmp_path / "back", split=split)
        assert [after.decode(k) for k in range(len(after))] == [
            before.decode(k) for k in range(len(before))
        ]
    converted = cli("convert", "pairs", "--to", "olmo", "--out", "olmo", "--split", "val", "--json")
    assert list(converted.json["splits"]) == ["val"]
    assert converted.json["documents"] == len(tokenmill.Store(tmp_path / "store", split="val"))


def test_settings_are_given_by_name(cli: Cli, corpus: Path) -> None:
    cli("build", corpus, "-t", "bytes", "-o", "store", "-q")
    options = ["--set", "name=books", "--file-tokens", "3000", "--json"]
    files = cli("export", "store", "--to", "llmc", "--out", "llmc", *options).json["files"]
    names = sorted(path.name for path in (cli.folder / "llmc").glob("*.bin"))
    assert len(names) == files > 1
    assert names[0] == "books_train_000000.bin"
    wrong = cli("export", "store", "--to", "llmc", "--out", "x", "--set", "name", code=2)
    assert "name=value" in wrong.err
    merged = cli("export", "store", "--to", "megatron", "--out", "one", "--merge", "--json").json
    assert merged["files"] == 3


def test_errors_say_what_to_do(cli: Cli, corpus: Path) -> None:
    cli("build", corpus, "-t", "bytes", "-o", "store", "-q")
    unknown = cli("export", "store", "--to", "nope", "--out", "x", code=2)
    assert unknown.err.startswith("error: ")
    assert "megatron" in unknown.err
    (cli.folder / "ids.bin").write_bytes(b"\1\0\2\0\3")
    asked = cli("import", "ids.bin", "-t", "bytes", "-o", "back", code=1)
    assert "multiple of the 2" in asked.err
    assert "hint: " in asked.err
    assert not (cli.folder / "back").exists()
