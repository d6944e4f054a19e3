"""`python -m tokenmill` is the `tokenmill` command."""

from tokenmill.cli.main import run

if __name__ == "__main__":
    run()
