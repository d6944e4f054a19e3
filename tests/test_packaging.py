"""The project's own files agree with each other: versions, pins, public names, commands, pages."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setup import readme

import tokenmill
from tokenmill.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = SETTINGS["project"], SETTINGS["build-system"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = PROJECT["urls"]["Repository"]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def pins(file: str = "constraints.txt") -> dict[str, Version]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_version_is_the_same_everywhere() -> None:
    assert tokenmill.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_public_names_are_sorted_and_can_be_imported() -> None:
    assert tokenmill.__all__ == sorted(tokenmill.__all__)
    assert {"build", "load_tokenizer", "Store", "TokenmillError"} <= set(tokenmill.__all__)
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name).__doc__, name
    assert set(tokenmill.__all__) <= set(dir(tokenmill))


def test_what_type_checkers_see_is_what_can_be_imported() -> None:
    tree = ast.parse(Path(str(tokenmill.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert seen == tokenmill._HOME_OF
    assert {*seen, "TokenmillError", "__version__"} == set(tokenmill.__all__)
    assert {"Batch", "BuildResult", "Progress", "VerifyReport", "inspect"} <= seen.keys()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        tokenmill.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "requirement", [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"], *EXTRAS["torch"]]
)
def test_everything_make_installs_is_pinned_within_its_range(requirement: str) -> None:
    wanted = Requirement(requirement)

    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])


def lowest_extras(variable: str) -> set[str]:
    [extras] = re.findall(rf"^{variable} = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {*extras.split(",")}


def check_lowest(requirements: list[str], lowest: dict[str, Version]) -> set[str]:
    bounds = {
        canonicalize_name(each.name): bound.version
        for each in map(Requirement, requirements)
        for bound in each.specifier
        if bound.operator == ">="
    }
    assert bounds.keys() <= lowest.keys()
    # A bound of two numbers is tried with the first release that begins with them.
    assert all(f"{lowest[name]}.".startswith(f"{bounds[name]}.") for name in bounds)
    return {*bounds}


def test_lowest_versions_are_those_that_are_tried() -> None:
    core, trainers = lowest_extras("LOWEST_EXTRAS"), lowest_extras("LOWEST_TRAINERS_EXTRAS")
    wanted = [*PROJECT["dependencies"], *BUILD["requires"]]
    wanted += [each for extra in core for each in EXTRAS[extra]]
    lowest = pins("tests/lowest.txt")
    assert check_lowest(wanted, lowest) == lowest.keys()
    assert len(lowest) > 15

    wanted = [each for extra in trainers for each in EXTRAS[extra]]
    assert "torch" in check_lowest(wanted, pins("tests/lowest-trainers.txt"))
    assert check_lowest(EXTRAS["trl"], pins("tests/lowest-trl.txt")) == {"trl"}
    # cudnn does nothing without a GPU; the others are for work on this project.
    assert EXTRAS.keys() - core - trainers == {"trl", "cudnn", "bench", "docs", "dev"}


def test_links_of_the_readme_work_away_from_the_repository() -> None:
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    shown = re.findall(r"\]\(([^)]*)\)", readme())
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    assert len(relative) > 20
    for link, whole in zip(links, shown, strict=True):
        address = re.escape(f"{ADDRESS}/") + rf"(blob|raw)/v{re.escape(PROJECT['version'])}/"
        assert re.sub(address, "", whole) == link
        assert whole.startswith(("https://", "#"))
        assert link not in relative or (ROOT / link.partition("#")[0]).exists(), link


def test_the_address_of_the_repository_stands_in_one_place() -> None:
    files = [path for path in ROOT.glob("*") if path.is_file()]
    for folder in ("src", "docs", "tests", "examples", ".github"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    # What an installation leaves beside the package repeats it.
    files = [path for path in files if path.parent.suffix != ".egg-info"]
    assert [path.name for path in files if ADDRESS.encode() in path.read_bytes()] == [
        "pyproject.toml"
    ]


def test_workflows_and_forms_are_yaml_and_call_targets_that_exist() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) > 4
    for path in files:
        assert yaml.safe_load(path.read_text()), path
        assert {*re.findall(r"run: make ([a-z-]+)", path.read_text())} <= {*phony.split()}, path


def test_every_command_has_help_and_stands_in_the_docs() -> None:
    docs = "\n".join(page.read_text() for page in PAGES)

    assert {"build", "inspect", "verify", "demo"} <= set(COMMANDS)
    for name, command in COMMANDS.items():
        assert command.help, name
        assert f"tokenmill {name}" in docs, name
        command.get_help(command.context_class(command, info_name=name))
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_files_that_are_no_modules_are_installed_too() -> None:
    folder = ROOT / "src" / "tokenmill"
    others = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".c", ".so")
    }
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    assert others == set(setuptools["package-data"]["tokenmill"])


def test_make_targets_named_in_the_pages_exist() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:`|^ *)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }

    assert {"demo", "test"} <= named <= set(phony.split())


def test_extras_named_in_hints_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"extra=\"([a-z0-9]+)\"", sources))

    assert named
    assert named <= set(EXTRAS)
