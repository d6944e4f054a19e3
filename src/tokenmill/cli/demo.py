"""`tokenmill demo`: everything once, on what every Python installation has."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable


def demo(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where the demo's store is written."),
    ] = Path("demo-store"),
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """See all of it work, in under a minute and without a download.

    Builds a store from the source files of Python's standard library, verifies it, looks inside,
    reads it as training would, and compares the speed with the usual ways on the same text.

    \b
    Example:
      tokenmill demo
    """
    from tokenmill.cli.story import tell
    from tokenmill.demo import demo_steps

    with stoppable("the demo can be started again at any time", command=same_command()):
        for step in demo_steps(out):
            tell(step)
