"""The `tokenmill` command, also as `python -m tokenmill`.

What a build forks its workers from has the most to import, so it begins before this process does.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def main() -> NoReturn:
    """Run the command and exit with its code."""
    with workers_ahead(sys.argv[1:]):
        from tokenmill.cli.main import main as run

        run()


def workers_ahead(arguments: list[str]) -> AbstractContextManager[None]:
    """Start what workers are forked from, if this is most probably a build on this machine.

    What is then not needed is ended.
    """
    without = {"-h", "--help", "--dry-run", "--runner", "--list-corpora"}
    if arguments[:1] != ["build"] or without & {each.partition("=")[0] for each in arguments}:
        return nullcontext()
    from tokenmill.builder import WORKER_ENVIRONMENT, WORKER_MODULES
    from tokenmill.runners.local import server_ahead

    return server_ahead(WORKER_MODULES, WORKER_ENVIRONMENT)


if __name__ == "__main__":
    main()
