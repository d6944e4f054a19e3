"""A tokenizer folder for each family of chat templates, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.supervised.families import FAMILIES, write_family

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def family_dir(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Callable[[str], Path]:
    """Folder of a family's tokenizer, by the family's name."""
    root = tmp_path_factory.mktemp("families")
    texts = [text[:15_000] for text in training_texts]

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else write_family(FAMILIES[name], path, texts)

    return folder
