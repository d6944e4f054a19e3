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

Both are written once, in the words of the command line (`--out`); `str()` of an error, which is
what Python shows, has those of Python (`out=`), which follow from the declarations of the options.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tokenmill.visible import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Given = ParamSpec("Given")
Result = TypeVar("Result")

DEBUG = "TOKENMILL_DEBUG"
"""Set in the environment: errors are shown with everything inside that led to them."""


class TokenmillError(Exception):
    """Base of all errors that tokenmill raises on purpose.

    `message` and `hint` are as the command line says them, `str()` is as Python does.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = visible(message)
        self.hint = None if hint is None else visible(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return "; ".join(self.in_python())

    def in_python(self) -> list[str]:
        """The message, and the hint if there is one, in the words of Python."""
        said = [self.message, *([] if self.hint is None else [self.hint])]
        if not any("--" in each or "tokenmill " in each for each in said):
            return said
        from tokenmill.options import in_python

        return [*map(in_python, said)]

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the caller's lines and what is wrong, nothing of ours.

        IPython asks for this by its name.
        """
        shell: Any = sys.modules["IPython"].get_ipython().InteractiveTB
        frames, each = [], self.__traceback__
        while each is not None:
            home = each.tb_frame.f_globals.get("__name__", "").partition(".")[0]
            if home == "tokenmill":
                break
            frames += [] if home == "IPython" else [each]
            each = each.tb_next
        trace = None
        for own in reversed(frames):
            trace = TracebackType(trace, own.tb_frame, own.tb_lasti, own.tb_lineno)
        shown, hint = self, []
        if os.environ.get(DEBUG):
            trace = self.__traceback__
        else:
            message, *hint = self.in_python()
            shown = _rebuild(type(self), message, None, {})
        lines: list[str] = shell.structured_traceback(type(self), shown, trace)
        return [*lines, *(f"hint: {each}" for each in hint)]

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


class _Abridged:
    """Errors of ours leave it without what is inside: frames, causes and workers' notes."""

    def __call__(self, function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **given: Given.kwargs) -> Result:
            with self:
                return function(*args, **given)

        return call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TokenmillError) and not os.environ.get(DEBUG):
            error.__cause__ = error.__traceback__ = None
            error.__dict__.pop("__notes__", None)


abridged = _Abridged()
"""Around what a user calls, as a decorator or `with abridged:`; see DEBUG."""
