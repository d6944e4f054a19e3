from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mistral_common
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.references import SentencePieceEngine
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch


def test_control_symbols_are_text_when_read_and_names_when_shown(
    sentencepiece_unigram_model: Path,
) -> None:
    engine = SentencePieceEngine(sentencepiece_unigram_model, special_tokens=SpecialTokens.TEXT)
    ids = engine.encode(TextBatch.from_texts(["the </s> end"])).ids.tolist()
    assert 2 not in ids
    assert engine.decode([1, *ids, 2]).startswith("<s>")
    assert engine.decode([1, *ids, 2]).endswith("end</s>")
    assert engine.token_bytes(ids[0]).decode().strip() == "the"


def test_a_damaged_model_is_a_clear_error(sentencepiece_bpe_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.model"
    cut.write_bytes(sentencepiece_bpe_model.read_bytes()[:-500])
    with pytest.raises(TokenizerError, match="cannot load"):
        SentencePieceEngine(cut, special_tokens=SpecialTokens.TEXT)


def test_a_missing_package_is_one_sentence_with_the_pip_line(sentencepiece_bpe_model: Path) -> None:
    code = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        "from tokenmill.engines.load import load_engine\n"
        "from tokenmill.errors import MissingExtraError\n"
        f"try:\n    load_engine({str(sentencepiece_bpe_model)!r})\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tokenmill[sentencepiece]'" in done.stdout


@pytest.mark.parametrize(
    "model", ["sentencepiece_bpe_model", "sentencepiece_unigram_model", "byte_fallback"]
)
def test_both_ways_to_ask_for_offsets_agree(model: str, request: pytest.FixtureRequest) -> None:
    folder = Path(mistral_common.__file__).parent / "data"
    is_own = model != "byte_fallback"
    path = request.getfixturevalue(model) if is_own else folder / "tokenizer.model.v1"
    engine = SentencePieceEngine(path, special_tokens=SpecialTokens.TEXT)
    assert engine._has_offsets

    @given(
        st.text(
            st.sampled_from("ab \n\u00d7\u00e9\u0301\ufb01\u3000\u2581\x00")
            | st.characters(codec="utf-8")
        )
    )
    def check(text: str) -> None:
        engine._has_offsets = True
        found = engine.offsets(text)
        engine._has_offsets = False
        assert engine.offsets(text) == found

    check()
