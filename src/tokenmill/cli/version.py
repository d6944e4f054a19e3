"""`tokenmill version`: the versions that decide what a build does."""

from __future__ import annotations

from tokenmill._version import __version__

PACKAGES = ("numpy", "pyarrow", "gigatoken", "tokenizers", "sentencepiece", "tiktoken")


def version() -> None:
    """Print the versions of tokenmill, Python and the engines.

    \b
    Example:
      tokenmill version
    """
    import platform

    print(f"tokenmill {__version__}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        print(f"{package} {_installed(package)}")


def _installed(package: str) -> str:
    # Not at the top: it takes a third of the start-up time of the command.
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return version_of(package)
    except PackageNotFoundError:
        return "(not installed)"
