"""Build a store from Python, then look at what is in it.

python examples/build_a_store.py INPUT TOKENIZER STORE
"""

import sys

import tokenmill


def main(text: str, tokenizer: str, out: str) -> None:
    result = tokenmill.build(text, tokenizer=tokenizer, out=out, val=0.05, memory="1GB")
    print(f"{result.totals.documents:,} documents, {result.totals.tokens:,} tokens in {out}")

    store = tokenmill.Store(out, split="train")
    origin = store.source(0)
    print(f"document 0 is row {origin.row} of {origin.path} and begins: {store.decode(0)[:60]!r}")

    report = tokenmill.verify(out, sample=10)
    print("verified" if report.ok else f"damaged: {report.findings}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
