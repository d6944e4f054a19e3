"""What pyproject.toml cannot say: the README whose links work away from the repository.

A package index shows it on a page of its own, where `docs/guide.md` would lead nowhere.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def readme() -> str:
    """The README, with the address of this version in front of every link to a file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark, kind in (("!", "raw"), ("", "blob")):
        address = f"{project['urls']['Repository']}/{kind}/v{project['version']}/"
        # A link to a heading of the page itself stays as it is.
        found = rf"({mark}\[[^\]]*\]\()(?![a-z]+:|#)"
        text = re.sub(found, rf"\g<1>{address}", text)
    return text


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
