"""Tokenize inside your own loop, with the checked fast engine, where text cannot be prepared.

python examples/tokenize_in_your_loop.py TOKENIZER FILE...
"""

import sys
from pathlib import Path

import tokenmill


def main(tokenizer_path: str, *files: str) -> None:
    tokenizer = tokenmill.load_tokenizer(tokenizer_path)
    batch = tokenizer.encode_batch([Path(file).read_text() for file in files])
    for file, ids in zip(files, batch, strict=True):
        print(f"{file}: {len(ids):,} tokens, begins with {tokenizer.decode(ids[:5])!r}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
