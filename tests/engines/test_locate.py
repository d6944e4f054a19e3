from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_models
import mistral_common
import pytest

from tokenmill.engines.base import TokenizerKind
from tokenmill.engines.load import find_tokenizer
from tokenmill.errors import TokenizerError

LLAMA3 = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"
MISTRAL = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"


def test_the_word_bytes_is_a_tokenizer_without_files() -> None:
    files = find_tokenizer("bytes")
    assert (files.kind, files.main, files.files) == (TokenizerKind.BYTES, None, {})


def test_a_folder_and_its_tokenizer_json_are_the_same_tokenizer(bpe_tokenizer_dir: Path) -> None:
    folder = find_tokenizer(bpe_tokenizer_dir)
    file = find_tokenizer(bpe_tokenizer_dir / "tokenizer.json")
    assert folder.kind is TokenizerKind.HUGGINGFACE
    assert folder.files == file.files
    assert set(folder.files) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_tokenizer_json_of_another_name_is_stored_under_the_usual_one(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "mine.json"
    renamed.write_bytes((bpe_tokenizer_dir / "tokenizer.json").read_bytes())
    assert find_tokenizer(renamed).files == {"tokenizer.json": renamed}


def test_the_kind_of_a_model_file_comes_from_its_content_not_its_name() -> None:
    assert find_tokenizer(LLAMA3).kind is TokenizerKind.TIKTOKEN
    assert find_tokenizer(MISTRAL).kind is TokenizerKind.SENTENCEPIECE


def test_a_folder_with_one_model_file_is_that_tokenizer(sentencepiece_bpe_model: Path) -> None:
    files = find_tokenizer(sentencepiece_bpe_model.parent)
    assert (files.kind, files.main) == (TokenizerKind.SENTENCEPIECE, sentencepiece_bpe_model)


def test_a_rank_file_brings_the_definition_beside_it(tmp_path: Path) -> None:
    ranks = tmp_path / "mine.tiktoken"
    ranks.write_bytes(b"YQ== 0\nYg== 1\n")
    (tmp_path / "mine.tiktoken.json").write_text("{}")
    assert set(find_tokenizer(ranks).files) == {"mine.tiktoken", "mine.tiktoken.json"}


def test_two_tokenizers_in_a_folder_are_not_chosen_between(tmp_path: Path) -> None:
    for name in ("one.model", "two.model"):
        (tmp_path / name).write_bytes(MISTRAL.read_bytes())
    with pytest.raises(TokenizerError, match=r"several tokenizers \(one.model, two.model\)"):
        find_tokenizer(tmp_path)


def test_a_folder_of_vocab_and_merges_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match=r"only vocab\.json and merges\.txt") as error:
        find_tokenizer(tmp_path)
    assert "save_pretrained" in (error.value.hint or "")


@pytest.mark.parametrize("name", ["no/such/dir/tokenizer.json", "missing.model", "./nothing here"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(TokenizerError, match="no such file or folder"):
        find_tokenizer(name)


def test_files_and_folders_that_hold_no_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        find_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        find_tokenizer(tmp_path / "notes.txt")


def test_a_hub_id_without_network_gives_one_clear_error(tmp_path: Path) -> None:
    code = (
        "from tokenmill.engines.load import find_tokenizer\n"
        "from tokenmill.errors import TokenizerError\n"
        "try:\n    find_tokenizer('someone/never-downloaded')\n"
        "except TokenizerError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "'someone/never-downloaded' is no local path" in done.stdout or (
        "pip install 'tokenmill[hf]'" in done.stdout
    )


def test_a_missing_package_is_one_sentence_with_the_pip_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from tokenmill.engines.load import find_tokenizer\n"
        "from tokenmill.errors import MissingExtraError\n"
        "try:\n    find_tokenizer('someone/model')\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tokenmill[hf]'" in done.stdout
