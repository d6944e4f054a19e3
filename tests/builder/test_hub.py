"""Datasets of the hub, and corpora by their short names, from a hub on the loopback address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.builder.stores import byte_ids, documents, make_texts, write_jsonl
from tests.command import tokenmill as tokenmill_command
from tests.sources.hub import Hub, serve_hub
from tests.sources.reading import compress

import tokenmill
from tokenmill.errors import SourceError
from tokenmill.sources.discovery import CORPORA, corpus_files

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

TOKEN = "hf_the_secret_token"
TEXTS = make_texts(60)
FILES = {
    "fineweb-edu": "HuggingFaceFW/fineweb-edu/data/CC-MAIN-2024-10/train-00000-of-00001.parquet",
    "slimpajama": "cerebras/SlimPajama-627B/train/chunk1/example_train_0.jsonl.zst",
    "wikitext-103": "Salesforce/wikitext/wikitext-103-raw-v1/train-00000-of-00002.parquet",
    "openwebtext": "Skylion007/openwebtext/plain_text/train-00000-of-00080.parquet",
    "c4": "allenai/c4/en/c4-train.00000-of-01024.json.gz",
}
"""A file of each corpus, as the real repository names it."""
SECOND = "allenai/c4/en/c4-train.00001-of-01024.json.gz"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    lines = folder / "lines"
    data = write_jsonl(lines, TEXTS).read_bytes()
    for name in FILES.values():
        path = folder / name
        path.parent.mkdir(parents=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path)
        elif name.endswith(".zst"):
            path.write_bytes(compress(data, "zst"))
        else:
            path.write_bytes(compress(data, "gz"))
            (folder / SECOND).write_bytes(
                compress(write_jsonl(lines, TEXTS[::-1]).read_bytes(), "gz")
            )
        (folder / Path(*Path(name).parts[:2]) / "README.md").write_text("# a dataset\n")
    return folder


@pytest.fixture
def hub(repositories: Path) -> Iterator[Hub]:
    with serve_hub(repositories) as hub:
        yield hub


def run(
    hub: Hub, folder: Path, *arguments: str, token: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A build in a process of its own: huggingface_hub reads the hub's address only once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**clean, "HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf-home")}
    if token is not None:
        environment["HF_TOKEN"] = token
    options = ("-t", "bytes", "-o", "store", "--memory", "1GB", "--workers", "1")
    return tokenmill_command(
        "build", *arguments, *options, folder=folder, code=None, environment=environment
    )


def test_short_names_are_built_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, *FILES, "-q")
    assert done.returncode == 0, done.stderr
    with tokenmill.Store(tmp_path / "store") as store:
        names = {store.source(k).path.removeprefix("hf://datasets/") for k in range(len(store))}
    assert names == {*FILES.values(), SECOND}
    found = sorted(documents(tmp_path / "store"))
    assert found == sorted(byte_ids(TEXTS * (len(FILES) + 1)))
    assert not any("README" in line for line in hub.log if "resolve" in line)


def test_a_path_on_the_hub_is_an_input_and_the_same_command_again_does_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    url = "hf://datasets/allenai/c4/en"
    done = run(hub, tmp_path, url, "-q")
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "store") == byte_ids(TEXTS + TEXTS[::-1])
    hub.log.clear()
    assert "nothing to do" in run(hub, tmp_path, url, "-q").stdout
    read = [line for line in hub.log if "resolve" in line]
    assert len(read) == 1, "a look at one file: does .json mean lines here?"


def test_a_private_repository_needs_the_token_which_is_kept_nowhere(
    hub: Hub, tmp_path: Path
) -> None:
    hub.token, hub.private = TOKEN, {"allenai/c4"}
    refused = run(hub, tmp_path, "c4", "--debug")
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
    assert not (tmp_path / "store" / "tokenmill.json").exists()
    wrong = run(hub, tmp_path, "c4", "--debug", token="hf_wrong_token")
    assert wrong.returncode == 1
    assert "hf_wrong_token" not in wrong.stderr
    done = run(hub, tmp_path, "c4", "--debug", token=TOKEN)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "store").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in done.stdout + done.stderr


def test_a_gated_repository_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.token, hub.gated = TOKEN, {"Skylion007/openwebtext"}
    refused = run(hub, tmp_path, "openwebtext")
    assert refused.returncode == 1
    assert "403 Forbidden" in refused.stderr
    assert "accept its terms" in refused.stderr


@pytest.mark.parametrize(
    "url", ["hf://datasets/no/such/*.parquet", "hf://datasets/allenai/c4/en/none.json.gz"]
)
def test_what_is_not_there_is_named(url: str, hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, url)
    assert done.returncode == 1
    assert url in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_downloads_that_fail_are_made_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults = ["cut", "503", "cut"]
    done = run(hub, tmp_path, "fineweb-edu", "--limit", "50", "-q")
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "store") == byte_ids(TEXTS[:50])
    assert not hub.faults


def test_a_file_of_the_same_name_wins_and_this_is_said(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "c4").mkdir()
    write_jsonl(tmp_path / "c4" / "mine.jsonl", TEXTS[:3])
    done = run(hub, tmp_path, "c4")
    assert done.returncode == 0, done.stderr
    assert "'c4' is read from this folder" in done.stderr
    assert documents(tmp_path / "store") == byte_ids(TEXTS[:3])
    assert not hub.log


def test_the_names_can_be_listed() -> None:
    done = tokenmill_command("build", "--list-corpora", folder=Path.cwd())
    for name, corpus in CORPORA.items():
        assert f"{name}\n  {corpus.files}\n" in done.stdout


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("finewebedu", "fineweb-edu"),
        ("FineWeb_Edu", "fineweb-edu"),
        ("wikitext103", "wikitext-103"),
        ("SlimPajama-627B", "slimpajama"),
        ("cerebras/SlimPajama-627B", "slimpajama"),
    ],
)
def test_a_corpus_is_found_by_the_names_people_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert corpus_files(given) == CORPORA[name].files
    Path(given).mkdir(parents=True)
    assert corpus_files(given) == given, "what is in this folder wins"


def test_a_corpus_with_nearly_that_name_is_offered() -> None:
    with pytest.raises(SourceError, match="'open-webtexts' matches no file") as caught:
        corpus_files("open-webtexts")
    assert f"if the corpus 'openwebtext' is meant: '{CORPORA['openwebtext'].files}'" in str(
        caught.value.hint
    )
