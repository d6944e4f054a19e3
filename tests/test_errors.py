"""What errors say in Python, and how much of it a traceback shows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.command import tokenmill_here

import tokenmill
from tokenmill.errors import DEBUG, SourceError, StoreError, TokenmillError, UsageError
from tokenmill.options import in_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCES = Path(tokenmill.__file__).parent
SCREEN = 24  # lines of a terminal

for _verb in tokenmill.__all__:
    getattr(tokenmill, _verb)  # the options of all are known then


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("choose another --out", "choose another out="),
        ("use a longer --seq-len, or none", "use a longer seq_len=, or none"),
        ("export rows: --seq-len 2048", "export rows: seq_len=2048"),
        ("the smallest is --memory 8GB", "the smallest is memory='8GB'"),
        ("leave --eos and --bos out", "leave eos= and bos= out"),
        ("leave --link out", "leave link= out"),
        ("go on with it: --resume; or not", "go on with it: resume=True; or not"),
        ("use --eos '<|end|>' or --no-eos", "use eos='<|end|>' or eos=False"),
        ("such as --separator '\\n\\n', or", "such as separator='\\\\n\\\\n', or"),
        ("name it with: --set column=NAME", "name it with: column=NAME"),
        ("say it: --from nanogpt --dtype uint16", "say it: format='nanogpt' dtype='uint16'"),
        ("copy: --link-or-copy", "copy: link='if-possible'"),
        ("see it with: tokenmill verify my-store", "see it with: tokenmill.verify('my-store')"),
        ("tokenmill verify '/a b/c'", "tokenmill.verify('/a b/c')"),
        (
            "built with: tokenmill build ... -o out --part 1/64",
            "built with: tokenmill.build(..., out='out', part='1/64')",
        ),
        ("a file of: tokenmill select", "a file of: tokenmill.select"),
        ("tokenmill finish STORE INPUT...", "tokenmill.finish(STORE, INPUT)"),
        ("`tokenmill inspect VIEW` names that", "`tokenmill.inspect(VIEW)` names that"),
        ("tokenmill select cuts by a number", "tokenmill.select('cuts')"),
        ("so does tokenmill select, and more", "so does tokenmill.select, and more"),
        ("first: tokenmill import x --from pt", "first: tokenmill.import_('x', format='pt')"),
    ],
)
def test_a_flag_is_a_keyword_in_python(said: str, expected: str) -> None:
    if "cuts" in said:  # a command is spoken of, in the middle of a sentence
        said, expected = f"then {said}", "then tokenmill.select cuts by a number"
    assert in_python(said) == expected


def test_strings_of_others_and_flags_of_other_programs_stay() -> None:
    for said in (
        "input '--out tokenmill verify x' matches no file",
        "upload it: hf upload REPOSITORY FOLDER --repo-type dataset",
        "read it with a newer tokenmill: pip install --upgrade tokenmill",
        "see: tokenmill inspect my-store --config",  # which is the command line's alone
        "the reader's file isn't there: it's gone",
    ):
        assert in_python(said) == said


def _hints() -> Iterator[tuple[str, str]]:
    """Every hint of the source, with 7 for what is filled in."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            hints: list[ast.expr] = []
            match node:
                case ast.keyword(arg="hint", value=hint):
                    hints = [hint]
                case ast.Assign(targets=[ast.Name(id="hint")], value=hint):
                    hints = [hint]
            for hint in hints:
                if isinstance(hint, ast.Constant | ast.JoinedStr):
                    parts = hint.values if isinstance(hint, ast.JoinedStr) else [hint]
                    said = (each.value if isinstance(each, ast.Constant) else 7 for each in parts)
                    yield f"{path.relative_to(SOURCES)}:{hint.lineno}", "".join(map(str, said))


def test_every_hint_of_the_source_is_one_of_python_too() -> None:
    others = re.compile(
        r"--(repo-type|head|upgrade|debug|user_defined_symbols|json|config|nproc-per-node|7)\b"
    )
    hints = [each for each in _hints() if not each[0].startswith("cli")]
    assert len(hints) > 300
    calls = 0
    for place, hint in hints:
        said = in_python(hint)
        assert "--" not in others.sub("", said), (place, said)
        commands = re.findall(r"tokenmill (?:build|verify|inspect|finish|annotate) .*", said)
        assert all(re.search("--config|-c ", each) for each in commands), place
        for call in re.findall(r"tokenmill\.\w+\([^()]*\)", said):
            ast.parse(call, mode="eval")
            calls += 1
        for words in re.findall(r"\b\w+='[^']*'", said):
            ast.parse(f"f({words})", mode="eval")
    assert calls > 15


def test_the_command_line_and_python_say_the_same_in_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    build = ("build", "a.jsonl", "-t", "bytes", "-o", "store")
    tokenmill_here(*build, folder=tmp_path)
    said = tokenmill_here(*build, "--val", "0.5", folder=tmp_path, code=1).stderr
    assert "hint: choose another --out, or replace the old units with --rebuild" in said
    with pytest.raises(StoreError) as caught:
        tokenmill.build(
            tmp_path / "a.jsonl", tokenizer="bytes", out=tmp_path / "store", val=0.5, serial=True
        )
    assert str(caught.value).endswith(
        "choose another out=, or replace the old units with rebuild=True"
    )


def refused(folder: Path) -> dict[str, Callable[[], object]]:
    """Calls that are refused, each with a cause inside or after a long way."""
    (folder / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    tokenmill.build(folder / "a.jsonl", tokenizer="bytes", out=folder / "store", serial=True)
    (folder / "cut").mkdir()
    (folder / "cut/tokenmill.json").write_text('{"format_version": 1')
    more: dict[str, Any] = {"tokenizer": "bytes", "out": folder / "new", "serial": True}
    return {
        "no input": lambda: tokenmill.build(folder / "none", **more),
        "no tokenizer": lambda: tokenmill.build(
            folder / "a.jsonl", **more | {"tokenizer": folder / "a.jsonl"}
        ),
        "no field": lambda: tokenmill.build(folder / "a.jsonl", text_field="no", **more),
        "no field, in a worker": lambda: tokenmill.build(
            folder / "a.jsonl", text_field="no", **more | {"serial": False, "workers": 1}
        ),
        "no store": lambda: tokenmill.Store(folder / "none"),
        "no store to verify": lambda: tokenmill.verify(folder / "none"),
        "a damaged store": lambda: tokenmill.Store(folder / "cut"),
        "no store to load": lambda: tokenmill.Loader(folder / "none", seq_len=2, batch_size=1),
        "no store to mix": lambda: tokenmill.Mixture({"a": (folder / "none", 1)}),
        "no row": lambda: tokenmill.export(folder / "store", to="npz", out=folder / "x"),
    }


def test_a_traceback_has_the_callers_lines_and_what_is_wrong(tmp_path: Path) -> None:
    for name, call in refused(tmp_path).items():
        with pytest.raises(TokenmillError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value))
        assert shown.count("Traceback") == 1, (name, shown)
        assert "src/tokenmill" not in shown.replace("errors.py", "").replace("options.py", "")
        assert len(shown.splitlines()) < SCREEN, (name, shown)


def test_a_variable_of_the_environment_shows_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(StoreError) as caught:
        tokenmill.Store(tmp_path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(TokenmillError) as caught_in_worker:
        refused(tmp_path)["no field, in a worker"]()
    assert "in worker 0" in caught_in_worker.value.__notes__[0]


def test_the_command_line_shows_everything_with_debug(tmp_path: Path) -> None:
    shown = tokenmill_here("verify", "none", "--debug", folder=tmp_path, code=1).stderr
    assert "direct cause of" in shown
    assert "error: " not in shown
    assert DEBUG not in os.environ


def test_an_uncaught_error_of_a_program_is_three_lines(tmp_path: Path) -> None:
    program = "import tokenmill\ntokenmill.Store('none')\n"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<string>", line 2, in <module>',
        f"tokenmill.errors.StoreError: there is no store at '{tmp_path}/none'; check the path",
    ]


def test_what_a_verb_is_not_given_is_said_of_the_verb() -> None:
    with pytest.raises(TypeError, match="build: missing a required argument: 'tokenizer'"):
        tokenmill.build("a.jsonl", out="x")
    with pytest.raises(UsageError, match="did you mean tokenizer"):
        tokenmill.build("a.jsonl", tokenzer="bytes", out="x")  # type: ignore[call-arg]


def test_the_hint_of_an_error_is_kept_in_the_words_of_the_command_line() -> None:
    error = SourceError("no file 'x'", hint="give another --out")
    assert (error.message, error.hint) == ("no file 'x'", "give another --out")
    assert str(error) == "no file 'x'; give another out="
