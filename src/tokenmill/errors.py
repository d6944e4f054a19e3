"""Every error that a caller of tokenmill may want to act on.

    TokenmillError
      UsageError           the request itself is wrong: exit code 2 on the command line
        StateError         a loader's saved state is damaged or of another run
      SourceError          an input file cannot be found, read or understood
      TokenizerError       a tokenizer cannot be found, loaded or trusted
      StoreError           a store is missing, damaged or of another kind
        StoreLockedError   another build holds the store
      BuildError           a build could not finish; what it committed stays valid
        TooManyRejectsError  more rows were rejected than the threshold allows
        UnknownTextError   more of the text is unknown to the tokenizer than the threshold allows
        MemoryBudgetError  the memory budget is too small for this build
      TrainingError        a training run cannot go on; its checkpoints stay valid
        DeviceMemoryError  the device has too little memory for it (also a MemoryError)
      MissingExtraError    an optional package is needed (also an ImportError)

A message has three parts: what is wrong with which value, why it matters, what to do. The last part
is kept apart as `hint`, so that the command line can print it on a line of its own. Each is one
line: names that others chose are in it, and must not act on a terminal or look like a line of ours.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tokenmill.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterator


class TokenmillError(Exception):
    """Base of all errors that tokenmill raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = visible(message)
        self.hint = None if hint is None else visible(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; the default would call the subclass with one argument.
        return _rebuild, (type(self), self.message, self.hint, self.__dict__)


def _rebuild(
    cls: type[TokenmillError], message: str, hint: str | None, attributes: dict[str, object]
) -> TokenmillError:
    error = cls.__new__(cls)
    TokenmillError.__init__(error, message, hint=hint)
    error.__dict__.update(attributes)
    return error


class UsageError(TokenmillError, ValueError):
    """The request itself cannot be carried out as it was made."""


class SourceError(TokenmillError):
    """An input file cannot be found, read or understood."""


class TokenizerError(TokenmillError):
    """A tokenizer cannot be found, loaded or trusted."""


class StoreError(TokenmillError):
    """A store is missing, damaged or of another kind than expected."""


class StoreLockedError(StoreError):
    """Another build holds the store."""


class StateError(UsageError):
    """A loader's saved state is damaged, or of another run."""


class BuildError(TokenmillError):
    """A build could not finish; what it committed stays valid."""


class TooManyRejectsError(BuildError):
    """More rows of one unit were rejected than the threshold allows."""


class UnknownTextError(BuildError):
    """More of the text is unknown to the tokenizer than the threshold allows."""


class MemoryBudgetError(BuildError):
    """The memory budget is too small for this build."""

    short_bytes: int | None = None
    """How many more a worker must be able to hold at once, where that is known."""


class TrainingError(TokenmillError):
    """A training run cannot go on; its checkpoints stay valid."""


class DeviceMemoryError(TrainingError, MemoryError):
    """The device has too little memory for a training run."""


class MissingExtraError(TokenmillError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed",
            hint=f"install it with: pip install 'tokenmill[{extra}]'",
        )


@contextlib.contextmanager
def importing(package: str, *, extra: str, purpose: str) -> Iterator[None]:
    """Where an optional package is imported: MissingExtraError if it is not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra=extra, purpose=purpose) from error
