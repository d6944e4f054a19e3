"""The reference in a process of its own, which is loaded while the fast engine is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tokenmill.builder import WORKER_ENVIRONMENT
from tokenmill.runners.local import ForkServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not ForkServer.is_possible, reason="processes are not forked here")

BEGIN = """
import json, os, sys
import psutil
from pathlib import Path
from tokenmill.engines import load, references
from tokenmill.engines.base import SpecialTokens, UnencodableError
from tokenmill.records import TextBatch
from tokenmill.runners.local import answer_apart, fork

path = Path(sys.argv[1])
texts = TextBatch.from_texts(["", "Hello, world", "\\u00e9t\\u00e9 \\u4e2d\\u6587 " * 3000, "x"])
TEXT = SpecialTokens.TEXT
local = references.HuggingFaceEngine(path, special_tokens=TEXT)
found = {}


def same(engine, texts=texts):
    one, other = engine.encode(texts), local.encode(texts)
    return [each.tolist() for each in one] == [each.tolist() for each in other]


def is_loaded(engine):
    return "_tokenizer" in vars(engine)
"""


def run_script(path: Path, script: str) -> dict[str, Any]:
    """What the script puts into `found`; it runs without threads, as what forks workers does."""
    code = BEGIN + textwrap.dedent(script) + "\nprint(json.dumps(found))"
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_another_process_answers_until_it_is_gone(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        apart = references.HuggingFaceApart(path, special_tokens=TEXT, fork=fork)
        found["ready"] = apart.is_ready()
        found["same"] = same(apart)
        token = json.loads(path.read_text())["added_tokens"][0]
        found["added"] = apart.added_token_id(token["content"]) == token["id"]
        found["loaded here"] = is_loaded(apart)
        found["others"] = len(psutil.Process().children(recursive=True))
        for child in psutil.Process().children(recursive=True):
            child.kill()
        found["same without it"] = same(apart)
        found["loaded here then"] = is_loaded(apart)
        """,
    )
    assert found == {
        "ready": True,
        "same": True,
        "added": True,
        "loaded here": False,
        "others": 2,  # the one that loaded it, and its fork that answers this process
        "same without it": True,
        "loaded here then": True,
    }


def test_much_text_is_encoded_here(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        apart = references.HuggingFaceApart(path, special_tokens=TEXT, fork=fork)
        found["ready"] = apart.is_ready()
        found["same"] = same(apart, TextBatch.from_texts(["much text " * 120_000]))
        found["loaded here"] = is_loaded(apart)
        """,
    )
    assert found == {"ready": True, "same": True, "loaded here": True}


def test_forks_ask_at_the_same_time(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        apart = references.HuggingFaceApart(path, special_tokens=TEXT, fork=fork)
        found["ready"] = apart.is_ready()
        apart.encode(texts)
        forks = []
        for number in range(3):
            if (pid := fork()) == 0:
                own = TextBatch.from_texts([f"text {number} of many"] * 200)
                os._exit(0 if all(same(apart, own) for _ in range(20)) else 1)
            forks.append(pid)
        found["codes"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
        """,
    )
    assert found == {"ready": True, "codes": [0, 0, 0]}


def test_texts_that_fail_are_named_by_their_places(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        def failing(self, texts):
            if any("bad" in text for text in texts):
                raise ValueError("cannot")
            return [[len(text)] for text in texts]

        references.HuggingFaceEngine._encode_texts = failing
        apart = references.HuggingFaceApart(path, special_tokens=TEXT, fork=fork)
        found["ready"] = apart.is_ready()
        try:
            apart.encode(TextBatch.from_texts(["x" * 40_000, "bad", "y" * 40_000, "very bad", "z"]))
        except UnencodableError as error:
            found["places"] = sorted(error.documents)
        """,
    )
    assert found == {"ready": True, "places": [1, 3]}


def test_a_file_that_was_changed_meanwhile_is_loaded_again(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bpe_tokenizer_dir, tmp_path / "tokenizer")
    found = run_script(
        folder / "tokenizer.json",
        """
        load.load_ahead(path, special_tokens=TEXT, fork=fork)
        content = json.loads(path.read_text())
        token = content["added_tokens"][0] | {"content": "<new>", "id": 2000}
        content["added_tokens"].append(token)
        info = load.describe(path)
        path.write_text(json.dumps(content))
        engine, agree = load.load_unproved(info, choice="auto", special_tokens=TEXT)
        found["agree"] = agree()
        info = load.describe(path)
        found["ahead once"] = load.load_unproved(info, choice="auto", special_tokens=TEXT) is None
        load.load_ahead(path, special_tokens=TEXT, fork=fork)
        engine, agree = load.load_unproved(info, choice="auto", special_tokens=TEXT)
        answer = answer_apart(agree)
        found["agree then"] = [answer(), answer()]
        found["fast"] = engine.name
        found["size"] = engine.info.vocab_size
        """,
    )
    assert found == {
        "agree": False,
        "ahead once": True,
        "agree then": [True, True],
        "fast": "gigatoken",
        "size": 2001,
    }


@pytest.mark.parametrize("at_once", [True, False])
def test_the_reference_is_loaded_at_once_or_after_the_other(
    at_once: bool, bpe_tokenizer_dir: Path
) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        f"""
        from tokenmill.engines import gigatoken

        begun = []

        def counted():
            begun.append(not gigatoken._ahead)
            return fork()

        load.load_ahead(path, special_tokens=TEXT, fork=counted, at_once={at_once})
        info = load.describe(path)
        engine, agree = load.load_unproved(info, choice="auto", special_tokens=TEXT)
        found["before the other"] = begun
        found["agree"] = answer_apart(agree)()
        found["loaded here"] = is_loaded(engine.reference)
        """,
    )
    assert found == {"before the other": [at_once], "agree": True, "loaded here": False}


def test_nothing_is_proved_by_what_fails(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        found["killed"] = answer_apart(lambda: os.kill(os.getpid(), 9))()
        found["failed"] = answer_apart(lambda: 1 / 0)()
        found["no"] = answer_apart(lambda: False)()
        """,
    )
    assert found == {"killed": False, "failed": False, "no": False}


def test_a_process_with_threads_loads_it_itself(bpe_tokenizer_dir: Path) -> None:
    found = run_script(
        bpe_tokenizer_dir / "tokenizer.json",
        """
        import threading
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        load.load_ahead(path, special_tokens=TEXT, fork=fork)
        engine, agree = load.load_unproved(load.describe(path), choice="auto", special_tokens=TEXT)
        found["agree"] = agree()
        end.set()
        found["others"] = len(psutil.Process().children())
        """,
    )
    assert found == {"agree": False, "others": 0}
