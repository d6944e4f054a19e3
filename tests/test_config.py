from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.builder.stores import make_texts, tree, write_jsonl
from tests.command import tokenmill_here

import tokenmill
from tokenmill.config import config_of, read_config
from tokenmill.engines.references import train_bpe
from tokenmill.errors import UsageError
from tokenmill.options import BuildOptions, flags_of

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(inputs: Any, out: str, **options: Any) -> None:
    tokenmill.build(inputs, out=out, serial=True, **{"tokenizer": "bytes", **options})


def run(*args: str | Path, code: int = 0) -> tuple[str, str]:
    done = tokenmill_here(*args, folder=Path(), code=code)
    return done.stdout, done.stderr


def write(text: str) -> str:
    Path("build.toml").write_text(text)
    return "build.toml"


def corpus() -> None:
    """Files whose names and folders tell splits, many small ones, and one that is not read."""
    for folder, seed in (("data/train", 1), ("data/val", 2)):
        Path(folder).mkdir(parents=True)
        write_jsonl(Path(folder) / "big.jsonl", make_texts(200, seed=seed))
        for number in range(70):
            texts = make_texts(3, seed=100 * seed + number)
            write_jsonl(Path(folder) / f"small-{number:03d}.jsonl", [*texts, None])
    Path("data/README.md").write_text("# About the data")


STRANGE = 'a "{text}"\n\\ \x7f\u202e\U0001f600'
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"inputs": "data"},
    "tokens": {
        "inputs": ["data/train", "data/val/big.jsonl"],
        "unit_bytes": 20_000,
        "limit": 300,
        "where": "id < 150",
        "exclude": ["small-00*"],
        "split_by_name": False,
        "val": 0.2,
        "eos": False,
        "bos": "<|endoftext|>",
        "special_tokens": "reject",
    },
    "code": {"inputs": "data/val", "tokenizer": "bpe", "engine": "tokenizers", "template": STRANGE},
    "chat": {"inputs": "chat.jsonl", "tokenizer": "bpe", "format": "chat", "train_on": "all"},
}


@pytest.mark.parametrize(
    ("name", "has_log"), [*((name, True) for name in OPTIONS), ("plain", False), ("chat", False)]
)
def test_a_build_of_what_inspect_writes_of_a_store_makes_the_same_store(
    name: str, has_log: bool
) -> None:
    corpus()
    options = {"max_rejects": 0.5, **OPTIONS[name]}
    if options.get("tokenizer") == "bpe":
        train_bpe(make_texts(200), vocab_size=400, folder=Path("bpe"))
    if name == "chat":
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
        Path("chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 9)
        Path("chat.jinja").write_text(CHAT)
        options["chat_template"] = "chat.jinja"
    build(options.pop("inputs"), "one", **options)
    if not has_log:
        Path("one/runs.jsonl").unlink()
    text, _ = run("inspect", "one", "--config")
    write(text)

    built = tokenmill.build(serial=True, **(read_config("build.toml") | {"out": "two"} | LENIENT))

    assert built.units_built > 0
    assert ("Its log does not say" in text) == (not has_log)
    assert tree(Path("one")) == tree(Path("two"))
    assert tokenmill.build(serial=True, **(read_config("build.toml") | LENIENT)).nothing_to_do


# What a log that is lost does not say.
LENIENT = {"max_rejects": 0.5}


def test_flags_go_before_the_file_and_the_rest_is_as_it_says() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(40), field="body")
    write_jsonl(Path("b.jsonl"), make_texts(9, seed=1), field="body")
    write(
        """
        inputs = ["a.jsonl"]
        tokenizer = "bytes"
        out = "store"
        text_field = "body"
        val = 0.5
        eos = false
        split_by_name = false
        separator = '\\n'
        memory = "2GB"
        workers = 1
        """
    )
    assert json.loads(run("plan", "-c", "build.toml", "--json")[0])["files"] == 1
    run("build", "-c", "build.toml", "-q")
    first = tokenmill.Store("store", split=None).manifest
    assert [each.path for each in first.sources] == ["a.jsonl"]
    assert (first.identity.eos, first.identity.config["separator"]) == (None, "\\n")
    assert "val" in first.splits

    run("build", "b.jsonl", "-c", "build.toml", "-o", "other", "--val", "0", "--eos", EOS, "-q")
    second = tokenmill.Store("other", split=None).manifest
    assert [each.path for each in second.sources] == ["b.jsonl"]
    assert second.identity.eos is not None
    assert {*second.splits} == {"train"}


EOS = "<|endoftext|>"


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ('tokeniser = "bytes"', "'tokeniser', which is no option of a build", "mean tokenizer?"),
        ("max-rejects = 0.1", "'max-rejects'", "did you mean max_rejects?"),
        ("[build]\nval = 0.1", "'build', which is no option", "without the header [build]"),
        ("zzz = 0.1", "'zzz', which is no option", "it may have: inputs, "),
        ("serial = true", "'serial', which is no option", ""),
        ('val = "a lot"', "val = 'a lot' is not a number", "write it as: val = 0.01"),
        ("workers = true", "workers = True is not a whole number", "workers = 4"),
        ("prune = 1", "prune = 1 is not true or false", "prune = true"),
        ("inputs = [1]", "inputs = [1] is not a text or a list of texts", 'inputs = "..."'),
        ("limit = 1.5", "limit = 1.5 is not a whole number", "limit = 4"),
        ("out = nothing", "'build.toml' is no TOML: ", 'tokenizer = "tokenizer.json"'),
        ("out = 's3://me:secret@bucket/x'", "password", ""),
    ],
)
def test_a_file_with_what_no_build_takes_is_refused_with_what_was_meant(
    text: str, problem: str, hint: str
) -> None:
    write(text)
    out, err = run("build", "-c", "build.toml", code=2)
    assert not out
    assert problem in err
    assert hint in err
    assert "secret" not in err


def test_what_a_file_lacks_must_be_given() -> None:
    write('tokenizer = "bytes"')
    assert "missing option '--out'" in run("build", "x", "-c", "build.toml", code=2)[1]
    assert "missing argument 'INPUT'" in run("build", "-c", "build.toml", "-o", "s", code=2)[1]
    assert "'absent.toml': there is no such file" in run("build", "-c", "absent.toml", code=2)[1]


def test_a_file_may_have_every_option_of_a_build_in_its_own_type() -> None:
    values = {"bool": "true", "int": "3", "float": "0.5", "str": '"x"'}
    for each in dataclasses.fields(BuildOptions):
        if each.name not in flags_of(BuildOptions):
            continue
        kind = str(each.type).split(" ")[0].replace("PathInput", "str")
        write(f"{each.name} = {values[kind]}")
        assert read_config("build.toml") == {each.name: tomllib.loads(f"x = {values[kind]}")["x"]}


def test_a_view_and_an_import_have_no_options_of_a_build() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(20))
    build("a.jsonl", "store")
    tokenmill.select("store", out="few.view", where="tokens < 200")
    with pytest.raises(UsageError, match="is a view") as caught:
        config_of("few.view")
    assert str(Path("store").absolute()) in str(caught.value.hint)
    tokenmill.export("store", to="megatron", out="mega")
    tokenmill.import_("mega", tokenizer="bytes", out="imported", format="megatron")
    with pytest.raises(UsageError, match="was imported, not built"):
        config_of("imported")


def test_the_log_says_how_files_were_named_and_nothing_of_rows_of_a_program() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(5))
    build("a.jsonl", "store")
    assert b'"inputs":["a.jsonl"]' in Path("store/runs.jsonl").read_bytes()
    build([{"text": "of a program"}], "rows")
    assert b'"inputs"' not in Path("rows/runs.jsonl").read_bytes()
