from __future__ import annotations

import pytest

from tokenmill.cli.main import app
from tokenmill.cli.options import unescape
from tokenmill.errors import UsageError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (None, None),
        ("\\n\\n", "\n\n"),
        ("\n\n", "\n\n"),
        ("<|doc|>\\t", "<|doc|>\t"),
        ("a\\\\n", "a\\n"),
        ("", ""),
    ],
)
def test_a_separator_may_be_typed_with_escapes(typed: str | None, meant: str | None) -> None:
    assert unescape(typed) == meant


@pytest.mark.parametrize("typed", ["\\x", "abc\\"])
def test_an_unknown_escape_is_refused_with_those_that_work(typed: str) -> None:
    with pytest.raises(UsageError, match="unknown escape") as caught:
        unescape(typed)
    assert "\\n" in str(caught.value.hint)


def test_an_end_token_and_none_exclude_each_other() -> None:
    typed = ["build", "a.txt", "-t", "bytes", "-o", "store", "--eos", "</s>", "--no-eos"]
    with pytest.raises(UsageError, match="eos='</s>' and eos=False exclude each other"):
        app(typed, standalone_mode=False)
