"""Runs a program as it is, and says at its end where the time of its steps went.

    python -m tokenmill.stalls [--steps 10-30] [--json FILE] train.py ...
    python -m tokenmill.stalls [--steps 10-30] [--json FILE] -m package.module ...

The program sees what it sees without this: its arguments, its folder first in `sys.path`, itself
as `__main__`. Its output goes where it goes; the account goes to the error output. Its exit code,
its exceptions and Ctrl-C are the program's too.
"""

from __future__ import annotations

import argparse
import builtins
import io
import json
import os
import re
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.stalls.watch import FIRST_STEP, LAST_STEP, StepWatch, follow

if TYPE_CHECKING:
    from collections.abc import Sequence


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first < last:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps such as 10-30")
    return first, last


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tokenmill.stalls",
        description="Run a training script as it is, and say where the time of its steps goes.",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(FIRST_STEP, LAST_STEP),
        metavar="FIRST-LAST",
        help=f"the steps that are looked at (default {FIRST_STEP}-{LAST_STEP})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the account, for programs")
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module")
    parser.add_argument("script", help="the script, or the module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    options = parser.parse_args(arguments)
    if not options.is_module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script!r}")
    return options


def _run(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """As `python script ...` and `python -m module ...` do."""
    sys.argv[:] = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = str(Path(script).absolute())
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    program = types.ModuleType("__main__")
    names = {"__file__": path, "__builtins__": builtins, "__cached__": None}
    vars(program).update(names, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = program
    exec(code, vars(program))


def _leave_out_own(error: BaseException) -> None:
    """Let the traceback begin where the program does."""
    own = (str(Path(__file__).parent), "<frozen runpy>")
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(own):
        shown = shown.tb_next
    hook = sys.excepthook

    def show(
        kind: type[BaseException], value: BaseException, trace: types.TracebackType | None
    ) -> None:
        if value is error:
            value, trace = value.with_traceback(shown), shown
        hook(kind, value, trace)

    sys.excepthook = show


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    own, process = sys.modules["__main__"], os.getpid()
    watch = StepWatch(first=options.steps[0], last=options.steps[1])
    try:
        with follow(watch):
            _run(options.script, options.arguments, is_module=options.is_module)
    except BaseException as error:
        _leave_out_own(error)
        raise
    finally:
        # A process that the program forked ends here too; of several ranks the first one tells.
        if os.getpid() == process and os.environ.get("RANK", "0") == "0":
            _tell(watch, options.json)
        del own


def _tell(watch: StepWatch, path: Path | None) -> None:
    try:
        account = watch.finish()
        print(f"\n{account.describe()}", file=sys.stderr, flush=True)
        if path is not None:
            path.write_text(json.dumps(account.as_json(), indent=1) + "\n")
    except Exception as error:
        # The program has done its work, and its own end is what counts.
        print(f"tokenmill.stalls: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
