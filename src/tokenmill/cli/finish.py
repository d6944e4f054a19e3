"""`tokenmill finish`: the parts of a build become a store."""

from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable

STANDING = "complete; its inputs were not looked at again, which a build without --part does"


def finish(
    store: opt.StorePath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            rich_help_panel=opt.NEEDED,
            help="The inputs of the parts; needed only where they are URLs that hold a key.",
        ),
    ] = None,
    prune: opt.Prune = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Make a store of the parts that `build --part` built: check them, write the manifest.

    Every unit must be there; those that are not are named with the part that has them. The result
    is what one build on one machine gives, byte for byte.

    \b
    Example:
      tokenmill finish my-store
    """
    import tokenmill
    from tokenmill.cli import render
    from tokenmill.cli.progress import watch

    with (
        stoppable("the parts stay as they are", command=same_command()),
        watch(quiet=quiet) as tell,
    ):
        result = tokenmill.finish(store, inputs or (), prune=prune, on_progress=tell)
    render.build_result(result, as_json=as_json, standing=STANDING)
