"""What the user's cache keeps of tokenizers: believed where it is whole and one's own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.engines.test_fast_engines import Plug

import tokenmill
import tokenmill.engines
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FALSE_SIZE = 77


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"tokenizers-{os.getuid()}"


def only_entry(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def facts_in(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[2])
    return content


def seal(path: Path, body: bytes) -> None:
    checksum = hashlib.sha256(path.name.encode() + body).hexdigest()
    path.write_bytes(checksum.encode() + b"\n" + body)


def change(path: Path, **changes: object) -> None:
    """An entry that says something else, and is whole."""
    seal(path, json.dumps(facts_in(path) | changes).encode())


def test_a_tokenizer_is_described_as_before(
    cache: Path, bpe_tokenizer_dir: Path, unigram_tokenizer_dir: Path, sentencepiece_bpe_model: Path
) -> None:
    for tokenizer in (bpe_tokenizer_dir, unigram_tokenizer_dir, sentencepiece_bpe_model):
        for policy in (SpecialTokens.TEXT, SpecialTokens.PARSE, None):
            first = describe(tokenizer, policy=policy)
            assert describe(tokenizer, policy=policy) == first
    assert len(list(cache.iterdir())) == 9
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}


def test_a_whole_entry_is_believed(cache: Path, bpe_tokenizer_dir: Path) -> None:
    describe(bpe_tokenizer_dir)
    change(only_entry(cache), vocab_size=FALSE_SIZE)
    assert describe(bpe_tokenizer_dir).vocab_size == FALSE_SIZE
    assert describe(bpe_tokenizer_dir, policy=SpecialTokens.PARSE).vocab_size == 2000


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\n{}")


def other_shape(path: Path) -> None:
    change(path, unheard_of=1)


def no_object(path: Path) -> None:
    seal(path, b"[]")


def of_another(path: Path) -> None:
    """The entry of another tokenizer under the name of this one."""
    body = path.read_bytes()
    checksum = hashlib.sha256(b"0" * len(path.name) + body.partition(b"\n")[2]).hexdigest()
    path.write_bytes(checksum.encode() + b"\n" + body.partition(b"\n")[2])


def as_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def in_open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def of_other_user(path: Path) -> None:
    os.chown(path, 12345, 12345)


def in_folder_of_other_user(path: Path) -> None:
    os.chown(path.parent, 12345, 12345)


DAMAGES = [truncate, empty, flip, no_text, other_shape, no_object, of_another, as_link, as_pipe]
DAMAGES += [as_folder, open_to_others, in_open_folder, of_other_user, in_folder_of_other_user]


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_other_entry_is_believed(
    damage: Callable[[Path], None], cache: Path, bpe_tokenizer_dir: Path
) -> None:
    if damage in (of_other_user, in_folder_of_other_user) and os.getuid() != 0:
        pytest.skip("only root gives files away")
    describe(bpe_tokenizer_dir)
    change(only_entry(cache), vocab_size=FALSE_SIZE)
    damage(only_entry(cache))
    assert describe(bpe_tokenizer_dir).vocab_size == 2000


def test_a_damaged_entry_is_replaced(cache: Path, bpe_tokenizer_dir: Path) -> None:
    describe(bpe_tokenizer_dir)
    whole = only_entry(cache).read_bytes()
    truncate(only_entry(cache))
    describe(bpe_tokenizer_dir)
    assert only_entry(cache).read_bytes() == whole


def test_other_files_and_other_packages_have_other_entries(
    cache: Path, bpe_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    for file in bpe_tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    describe(folder)
    change(only_entry(cache), vocab_size=FALSE_SIZE)
    # Equal files are the same tokenizer, wherever they are.
    assert describe(bpe_tokenizer_dir).vocab_size == FALSE_SIZE
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    assert (describe(folder).vocab_size, describe(folder).eos_token) == (2000, "<|pad|>")
    other = tmp_path / "packages" / "gigatoken-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: gigatoken\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(other.parent))
    assert describe(bpe_tokenizer_dir).vocab_size == 2000


def test_a_file_that_is_replaced_meanwhile_is_described_as_it_was_read(
    cache: Path, tmp_path: Path
) -> None:
    # One of which a look shows that it is harmless, so that it is parsed after that was told.
    folder = train_bpe(["a few words", "and others"], vocab_size=270, folder=tmp_path / "own")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"content": "<new>", "id": 2000})
    text = json.dumps(content)
    expected = describe(folder, policy=None).vocab_size
    found = describe(folder, when_harmless=lambda _: path.write_text(text))
    assert (found.vocab_size, describe(folder).vocab_size) == (expected, 2001)
    assert len(list(cache.iterdir())) == 3


def test_nothing_is_kept_while_the_files_beside_it_change(
    cache: Path, bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(bpe_tokenizer_dir, tmp_path / "own") / "tokenizer_config.json"
    content = json.dumps(json.loads(path.read_text()) | {"eos_token": None})
    info = describe(path.parent, when_harmless=lambda _: path.write_text(content))
    assert load_engine(info).fast is not None
    assert not list(cache.iterdir())


def test_nothing_is_kept_where_the_cache_is_empty(
    bpe_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_CACHE", "")
    assert describe(bpe_tokenizer_dir).key is None
    monkeypatch.setenv("TOKENMILL_CACHE", "/proc/no/such/folder")
    assert describe(bpe_tokenizer_dir).vocab_size == 2000
    assert list(tmp_path.iterdir()) == []


def test_old_entries_go(cache: Path, bpe_tokenizer_dir: Path) -> None:
    describe(bpe_tokenizer_dir)
    used = only_entry(cache)
    old = time.time() - 1000
    for number in range(40):
        (cache / f"{number}").write_bytes(b"")
        os.utime(cache / f"{number}", (old + number, old + number))
    os.utime(used, (0, 0))
    describe(bpe_tokenizer_dir)  # used again, so not the oldest
    describe(bpe_tokenizer_dir, policy=SpecialTokens.PARSE)
    left = {path.name for path in cache.iterdir()}
    assert len(left) == 32
    assert used.name in left
    assert "39" in left


def test_an_engine_is_proved_once(cache: Path, bpe_tokenizer_dir: Path) -> None:
    assert load_engine(bpe_tokenizer_dir).name == "gigatoken"
    assert facts_in(only_entry(cache))["coverages"][0]["proved"] == ["one thread"]
    load_engine(bpe_tokenizer_dir, threads=2)
    ways = ["one thread", "several threads"]
    assert facts_in(only_entry(cache))["coverages"][0]["proved"] == ways


def test_a_proof_holds_for_the_packages_that_it_was_made_with(
    cache: Path, wordpiece_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plugs.second", Plug(lies=lambda _text: True))
    monkeypatch.setattr(tokenmill.engines, "FAST_ENGINES", ("plugs.second",))
    info = describe(wordpiece_tokenizer_dir)
    assert "disagrees" in str(load_engine(info).refusal)
    (coverage,) = info.coverages
    proved = replace(info, coverages=(replace(coverage, proved=("one thread",)),))
    assert load_engine(proved).name == "second"
    assert "disagrees" in str(load_engine(proved, threads=2).refusal)
    elsewhere = replace(proved, key=str(info.key)[:-4] + "none")
    assert "disagrees" in str(load_engine(elsewhere).refusal)
    assert "disagrees" in str(load_engine(replace(proved, key=None)).refusal)


def test_processes_may_write_and_read_at_once(cache: Path, bpe_tokenizer_dir: Path) -> None:
    code = (
        "import sys; from tokenmill.engines.load import load_engine\n"
        "for _ in range(20): print(load_engine(sys.argv[1]).name)"
    )
    run = [sys.executable, "-c", code, str(bpe_tokenizer_dir)]
    processes = [subprocess.Popen(run, stdout=subprocess.PIPE) for _ in range(3)]
    assert [each.communicate()[0].split() for each in processes] == [[b"gigatoken"] * 20] * 3
    assert facts_in(only_entry(cache))["coverages"][0]["proved"] == ["one thread"]


def test_a_store_is_the_same_with_and_without_the_cache(
    tmp_path: Path, bpe_tokenizer_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"text": f"row {number} of {chr(0x4E00 + number)} caf\u00e9"} for number in range(500)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = os.environ["TOKENMILL_CACHE"]
    stores = []
    for name, place in (("off", ""), ("first", given), ("second", given)):
        monkeypatch.setenv("TOKENMILL_CACHE", place)
        out = tmp_path / name
        tokenmill.build(source, tokenizer=bpe_tokenizer_dir, out=out, workers=2)
        assert tokenmill.verify(out, sample=500).ok
        files = [path for path in sorted((out / "shards").rglob("*")) if path.is_file()]
        stores.append({str(path.relative_to(out)): path.read_bytes() for path in files})
    assert facts_in(only_entry(cache))["coverages"][0]["proved"] == ["one thread"]
    assert stores[0]
    assert stores[0] == stores[1] == stores[2]
