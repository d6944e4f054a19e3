"""Small real tokenizers, trained once per test session, for every test folder.

They are trained on sources of the standard library plus a few lines in other scripts, so nothing is
downloaded and nothing is in the repository.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from tests import fast
from tests.once import once

if TYPE_CHECKING:
    from collections.abc import Iterator

EOS = "<|endoftext|>"
OTHER_SCRIPTS = (
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\uc548\ub155\ud558\uc138\uc694 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03b1 na\u00efve caf\u00e9 \u00fcber",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600 \U0001f468\u200d\U0001f469",
)

# A shell that starts the tests in the background has them ignore Ctrl-C, and the programs that
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Models of tests are too small to be shared among threads, which wait for each other by computing.
os.environ["OMP_NUM_THREADS"] = "1"

# What a test finds out about a tokenizer is not known to the next one.
os.environ["TOKENMILL_CACHE"] = ""

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tests, before `-m` selects, and begin with the files that have none.

    Processes take files in this order: those that wait for others must not be the last ones.
    """
    slow = dict[Path, list[bool]]()
    for item in items:
        is_fast = fast.is_fast(item)
        slow.setdefault(item.path, []).append(not is_fast)
        if is_fast:
            item.add_marker("fast")
    items.sort(key=lambda item: -sum(slow[item.path]) / len(slow[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with fast.watched(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with fast.watched(item):
        yield


_ON_TERM = signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="module", params=["compiled", "by arrow"])
def ways_to_read_fields(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fields of JSON are read by the part in C, and then without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "by arrow":
            patch.setenv("TOKENMILL_KERNEL", "0")
        yield


@pytest.fixture(autouse=True)
def _keep_the_handler_of_sigterm() -> Iterator[None]:
    """Ray leaves one of its own, which keeps processes that are forked later from ending."""
    yield
    if signal.getsignal(signal.SIGTERM) is not _ON_TERM:
        signal.signal(signal.SIGTERM, _ON_TERM)


@pytest.fixture(scope="session")
def training_texts() -> list[str]:
    """A few hundred kilobytes of text."""
    modules = (ast, json, textwrap)
    files = [Path(str(module.__file__)) for module in modules]
    library = Path(str(textwrap.__file__)).parent
    files += [library / name for name in ("argparse.py", "pathlib.py", "random.py", "typing.py")]
    texts = [file.read_text() for file in files if file.is_file()]
    return texts + list(OTHER_SCRIPTS) * 20


@pytest.fixture(scope="session")
def bpe_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> Path:
    """A byte-level BPE with GPT-2's split: the fast engine covers it."""
    return once(tmp_path_factory, "bpe", lambda folder: _train_bpe(folder, training_texts))


def _train_bpe(folder: Path, texts: list[str]) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=[EOS, "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


@pytest.fixture(scope="session")
def unigram_tokenizer_dir(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Path:
    """A Unigram tokenizer.json: only its reference engine can run it."""
    return once(tmp_path_factory, "unigram", lambda folder: _train_unigram(folder, training_texts))


def _train_unigram(folder: Path, texts: list[str]) -> Path:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1000,
        special_tokens=["<s>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    lines = [line for text in texts for line in text.splitlines()]
    # All of them would take longer than most tests.
    tokenizer.train_from_iterator(lines[::4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    )
    return folder


@pytest.fixture(scope="session")
def wordpiece_tokenizer_dir(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Path:
    """A WordPiece tokenizer.json, with a template that would add tokens if it were let."""
    return once(
        tmp_path_factory, "wordpiece", lambda folder: _train_wordpiece(folder, training_texts)
    )


def _train_wordpiece(folder: Path, texts: list[str]) -> Path:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=2000, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[SEP]"}))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_bpe_model(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Path:
    """A SentencePiece BPE model with byte fallback, as Llama 2's is: the fast engine covers it."""
    return once(
        tmp_path_factory, "spm-bpe", lambda folder: _train_spm(folder, training_texts, "bpe")
    )


@pytest.fixture(scope="session")
def sentencepiece_unigram_model(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Path:
    """A SentencePiece Unigram model with its usual normalization."""
    return once(
        tmp_path_factory, "spm-uni", lambda folder: _train_spm(folder, training_texts, "unigram")
    )


def _train_spm(folder: Path, texts: list[str], model_type: str) -> Path:
    import sentencepiece

    plain = model_type == "bpe"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.splitlines() if line),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1200,
        model_type=model_type,
        byte_fallback=plain,
        normalization_rule_name="identity" if plain else "nmt_nfkc",
        remove_extra_whitespaces=not plain,
        minloglevel=2,
    )
    return folder / "tokenizer.model"
