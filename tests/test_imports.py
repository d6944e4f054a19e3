"""What is loaded when: `import tokenmill` and `tokenmill --help` must answer at once.

Which module may import which package at all is held by the contracts in pyproject.toml
(`lint-imports`). They cannot see *when* an import happens; these tests can, in fresh processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "aiohttp",
    "awkward",
    "datasets",
    "fsspec",
    "gigatoken",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "ray",
    "rich",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "torch",
}

SHOW_MODULES = "import json, sys; print(); print(json.dumps(sorted(sys.modules)))"


def modules_after(code: str) -> set[str]:
    """Names of all modules that a fresh interpreter has loaded after running the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOW_MODULES}"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(modules)


def run_of(*arguments: str) -> str:
    return f"""
import sys
from tokenmill.cli.main import run
sys.argv = {["tokenmill", *arguments]!r}
try:
    run()
except SystemExit as end:
    assert not end.code, end.code
"""


def test_the_probe_sees_a_heavy_package() -> None:
    assert HEAVY & modules_after("import numpy") == {"numpy"}


def test_importing_tokenmill_loads_nothing_heavy() -> None:
    loaded = modules_after("import tokenmill")

    assert "tokenmill" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("command", [(), ("build",), ("diagnose",), ("train",), ("verify",)])
def test_help_loads_nothing_heavy(command: tuple[str, ...]) -> None:
    loaded = modules_after(run_of(*command, "--help"))

    assert "tokenmill.cli.main" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("command", ["inspect", "build"])
def test_a_command_given_texts_alone_needs_no_pydantic(command: str, tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "v4"
    arguments = [str(golden), "--split", "train"]
    if command == "build":
        (tmp_path / "a.txt").write_text("text")
        arguments = [str(tmp_path / "a.txt"), "-t", "bytes", "-o", str(tmp_path / "store")]
    loaded = modules_after(run_of(command, *arguments))

    assert "numpy" in loaded
    assert "pydantic" not in loaded


@pytest.mark.parametrize(
    "name", ["Loader", "Mixture", "StallMeter", "build", "load_tokenizer", "train"]
)
def test_public_names_do_not_need_optional_packages(name: str) -> None:
    loaded = modules_after(f"from tokenmill import {name}")

    optional = {"aiohttp", "huggingface_hub", "ray", "sentencepiece", "tiktoken", "torch"}
    assert not optional & loaded


def test_torch_is_loaded_by_its_facade_alone() -> None:
    assert "torch" in modules_after("import tokenmill.torch")


def test_a_missing_torch_is_named_with_the_extra_that_brings_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; import tokenmill.torch"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("tokenmill.errors.MissingExtraError: feeding tensors needs the package")
    assert "pip install 'tokenmill[torch]'" in error


def test_a_missing_ray_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    code = """
import sys; sys.modules['ray'] = None
import tokenmill
tokenmill.build('a.txt', tokenizer='bytes', out='never', runner='ray')
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("tokenmill.errors.MissingExtraError: building on a Ray cluster needs")
    assert "pip install 'tokenmill[ray]'" in error
