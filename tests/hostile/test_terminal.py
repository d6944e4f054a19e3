"""Names that others chose: no command lets them act on a terminal or look like a line of ours."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command import in_terminal as terminal_output
from tests.command import tokenmill as tokenmill_command
from tests.hostile.attack import LONG, attack, tried

import tokenmill
from tokenmill.engines.references import train_bpe
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.store.facts import read_manifest, write_manifest
from tokenmill.store.layout import StoreLayout
from tokenmill.visible import LONGEST_LINE, visible, visible_lines

if TYPE_CHECKING:
    from pathlib import Path

NASTY = (
    "\x1b[5;41mOWNED\x1b]0;title\x07\x1b]8;;x\x1b\\\x9b2J\x7f\u202e\u2066\u2028\r[bold][link=x]"
    "<img src=x>\nerror: faked\nhint: faked"
)
"""Colours, title, link, 8-bit controls, direction, ends of lines, rich's markup, our own words."""
NAME = NASTY + "\udc9b"
"""The same as a file's name, with a byte that is no UTF-8."""
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def run(folder: Path, *args: str, code: int) -> tuple[bytes, bytes]:
    """The real command; what it wrote to stdout and stderr."""
    done = tokenmill_command(*args, folder=folder, code=code)
    return done.stdout.encode(), done.stderr.encode()


def assert_harmless(*outputs: bytes) -> str:
    """No character that acts, and no line that only looks like ours."""
    text = b"".join(outputs).decode()  # strictly: bytes that are no UTF-8 act too
    assert not ACTING.search(text), text
    assert not re.search(r"^(error|hint): faked", text, re.MULTILINE), text
    assert "this is a fault of tokenmill" not in text, text
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where everything that can have a name has a nasty one."""
    folder = tmp_path_factory.mktemp("names")
    data = folder / NAME
    data.mkdir()
    lines = [json.dumps({"text": f"{number} {NASTY}", NASTY: number}) for number in range(30)]
    (data / f"{NAME}.jsonl").write_text("\n".join([*lines, '{"text": 1}']) + "\n")
    (data / f"{NAME}.bin").write_bytes(b"\0\1")
    (data / f"{NAME}.json").write_text("[]")
    pq.write_table(pa.table({NASTY: ["a"], "b": ["c"]}), folder / "columns.parquet")
    tokenizer = train_bpe(["some words"], vocab_size=300, folder=folder / "bpe").rename(
        folder / TOKENIZER
    )
    spec = json.loads((tokenizer / "tokenizer.json").read_text())
    added = {**spec["added_tokens"][0], "id": len(spec["model"]["vocab"]), "content": NASTY}
    spec["added_tokens"].append(added)
    (tokenizer / "tokenizer.json").write_text(json.dumps(spec))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": NASTY}))
    shared = folder / "no-eos"
    shared.mkdir()
    (shared / "tokenizer.json").write_text(json.dumps(spec))
    template = "{{ raise_exception(messages[0]['content']) }}"
    (folder / f"{NAME}.jinja").write_text(template)
    chat = {"messages": [{"role": "user", "content": NASTY}, {"role": NASTY, "content": "x"}]}
    (folder / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    assert_harmless(
        *run(folder, "build", NAME, "-t", TOKENIZER, "-o", STORE, *BUILD, code=0),
    )
    manifest = read_manifest(folder / STORE)
    identity = manifest.identity.but(created_by=NASTY)
    changed = dataclasses.replace(manifest, identity=identity)
    write_manifest(StoreLayout(folder / STORE), changed)
    return folder


TOKENIZER, STORE = f"bpe {NASTY}", f"store {NASTY}"
BUILD = ("--max-rejects", "0.5", "--workers", "1", "--val", "0.3", "--special-tokens", "parse")
TRAIN = ("--model", "tiny", "--seq-len", "16", "--steps", "1", "--batch-tokens", "32")
CHAT = ("--format", "chat", "--chat-template", f"{NAME}.jinja")
DIAGNOSE = ("--seconds", "0.1", "--model", "tiny", "--report", f"{NASTY}.html")
CASES: list[tuple[tuple[str, ...], int]] = [
    (("build", "chat.jsonl", "-t", TOKENIZER, "-o", "x", *CHAT), 1),
    (("inspect", STORE), 0),
    (("verify", STORE), 0),
    (("export", STORE, "--to", "megatron", "--out", f"export {NASTY}"), 0),
    (("import", "columns.parquet", "-t", TOKENIZER, "--out", f"import {NASTY}"), 1),
    (("train", NAME, "-o", f"run {NASTY}", *TRAIN), 1),
    (("diagnose", "--run", NAME), 2),
]
"""Where the short form stops; the long one tries every command."""
MORE_CASES: list[tuple[tuple[str, ...], int]] = [
    (("finish", NAME), 1),
    (("plan", NAME, "-t", TOKENIZER), 0),
    (("layout", STORE, "--seq-len", "16"), 0),
    (("convert", "columns.parquet", "--to", "mds", "--out", f"mds {NASTY}"), 1),
    (("demo", "-o", f"columns.parquet/{NASTY}"), 1),
    (("build", NAME, "-t", TOKENIZER, "-o", f"part {NASTY}", "--part", "1/2", *BUILD), 0),
    (("build", NAME, "-t", TOKENIZER, "-o", "x", "--text-field", "no", "--debug"), 1),
    (("build", NAME, "-t", NAME, "-o", "x"), 1),
    (("build", f"{NAME}/{NAME}.json", "-t", "bytes", "-o", "x"), 1),
    (("build", "columns.parquet", "-t", "bytes", "-o", "x"), 1),
    (("build", NAME, "-t", "no-eos", "-o", "x"), 1),
    (("build", NAME, "-t", "bytes", "-o", NASTY, "--chat-date", NASTY), 2),
    (("build", NAME, f"--{NASTY}"), 2),
    (("inspect", STORE, "--split", NASTY), 1),
    (("inspect", NAME), 1),
    (("train", STORE, "-o", "x", "--packing", NASTY), 2),
    (("train", STORE, "-o", f"run {NASTY}", *TRAIN), 0),
    (("train", STORE, "-o", f"run {NASTY}", *TRAIN, "--model", NASTY), 2),
    (("diagnose", NAME, "-t", TOKENIZER, "--text-field", NASTY), 1),
    (("diagnose", NAME, "-t", TOKENIZER, *DIAGNOSE), 0),
]


@pytest.mark.parametrize(("args", "code"), CASES + MORE_CASES * LONG)
def test_no_command_passes_on_what_acts(folder: Path, args: tuple[str, ...], code: int) -> None:
    assert_harmless(*run(folder, *args, code=code))
    for page in folder.glob("*.html"):
        assert not ACTING.search(page.read_text())
        assert "<img" not in page.read_text()
    tried("a command on names with escapes")


def test_json_gives_every_name_as_it_is(folder: Path) -> None:
    out, err = run(folder, "inspect", STORE, "--doc", "0", "--json", code=0)
    assert_harmless(out, err)
    found = json.loads(out)
    assert (found["store"], found["created_by"]) == (STORE, NASTY)
    assert [source["path"] for source in found["sources"]] == [f"{NAME}/{NAME}.jsonl"]
    assert found["eos"]["token"] == NASTY
    assert NASTY in found["document"]["text"]


def test_a_document_keeps_its_lines_and_shows_what_would_act(folder: Path) -> None:
    out, _ = run(folder, "inspect", STORE, "--doc", "0", code=0)
    text = out.decode()
    assert not ACTING.search(text)
    assert "\\x1b[5;41mOWNED\\x1b]0;title\\x07" in text
    assert "\\r[bold][link=x]<img src=x>\nerror: faked\nhint: faked" in text, (
        "its lines are its own"
    )


def test_a_terminal_that_knows_ascii_alone_is_no_reason_to_fail(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "inspect", STORE],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert assert_harmless(done.stdout, done.stderr).isascii()


def in_terminal(folder: Path, *command: str) -> str:
    """All that a terminal was sent, without the escapes that colour and redraw, which are ours."""
    sent = terminal_output(*command, folder=folder)
    assert "\x1b[5;41m" not in sent
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", sent).replace("\r", "")


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", STORE, "--doc", "0"),
        ("build", NAME, "-t", TOKENIZER, "-o", f"again {NASTY}", *BUILD),
        ("verify", STORE),
    ],
    ids=lambda args: args[0],
)
def test_a_terminal_sees_no_escapes_but_ours(folder: Path, args: tuple[str, ...]) -> None:
    said = in_terminal(folder, "-m", "tokenmill", *args)
    assert not ACTING.search(said), said
    assert "OWNED" in said or args[0] == "verify"
    tried("a command on names with escapes, in a terminal")


def test_a_warning_beside_a_bar_and_a_traceback_after_it_do_not_act(folder: Path) -> None:
    program = (
        "import sys, warnings; from tokenmill.cli import output; output.guard_streams()\n"
        "console = output.make_console(stderr=True)\n"
        "with output.live_display(console) as live:\n"
        "    live.update('a bar', refresh=True); warnings.warn(sys.argv[1])\n"
        "print(sys.argv[1]); console.print(sys.argv[1])\n"
        "try: raise ValueError(sys.argv[1])\n"
        "except ValueError: sys.excepthook(*sys.exc_info())\n"
    )
    said = in_terminal(folder, "-c", program, NASTY)
    assert not ACTING.search(said), said
    assert said.count("\\x1b[5;41mOWNED") == 4, said


ANY_TEXT = st.text(st.characters(codec=None) | st.sampled_from(sorted(NASTY)))


@attack(short=100, long=5000)
@given(text=ANY_TEXT)
def test_any_text_is_made_visible_and_no_other_is_changed(text: str) -> None:
    line = visible(text)
    assert not ACTING.search(line)
    assert not {"\n", "\t"} & set(line)
    assert visible(line) == line
    assert visible_lines(text).count("\n") == text.count("\n")
    if not ACTING.search(text):
        assert visible_lines(text) == text
    visible_lines(text).encode()
    tried("a string made visible")


def test_text_of_all_languages_is_left_as_it_is() -> None:
    text = "na\u00efve \u4e2d\u6587 \u05e2 \u0939\u093f \U0001f469\u200d\U0001f52c e\u0301 [x] \\n"
    assert visible(text) == text


def test_a_very_long_name_is_cut_in_the_middle() -> None:
    error = UsageError(f"no column 'a' in {'b' * 10**6!r}; there are others", hint="c" * 10**6)
    assert error.hint is not None
    for text, end in ((error.message, "there are others"), (error.hint, "ccc")):
        assert len(text) <= LONGEST_LINE
        assert re.search(r"[bc] \[9\d\d,\d{3} characters left out\] [bc]", text)
        assert text.endswith(end)
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint) == (error.message, error.hint)


def test_a_hint_cannot_be_made_into_another_command(tmp_path: Path) -> None:
    name = "'; touch owned; '"
    array = tmp_path / f"{name}.json"
    array.write_text("[]")
    folder = train_bpe(["some words"], vocab_size=300, folder=tmp_path / name)
    (folder / "tokenizer_config.json").unlink()
    spec = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(spec.replace("<|endoftext|>", name))
    old = tmp_path / f"old {name}"
    old.mkdir()
    for part in ("vocab.json", "merges.txt"):
        (old / part).touch()
    for inputs, tokenizer, word in (
        (array, "bytes", str(array)),
        (tmp_path, folder, name),
        (tmp_path, old, str(old)),
    ):
        with pytest.raises(TokenmillError) as caught:
            tokenmill.build([inputs], tokenizer=tokenizer, out=tmp_path / "out")
        assert word in shlex.split(caught.value.hint or ""), caught.value.hint
