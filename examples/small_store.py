"""A small store of made-up text for the other examples; its tokens are bytes.

python examples/small_store.py STORE
"""

import json
import sys
import tempfile
from pathlib import Path

import tokenmill


def build(out: str | Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w") as file:
            for number in range(300):
                text = f"Document {number} counts: " + " ".join(map(str, range(number % 60)))
                file.write(json.dumps({"text": text}) + "\n")
        tokenmill.build(corpus, tokenizer="bytes", out=out)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build(sys.argv[1])
