"""Build a store of chats with a mask, and show what of the first one counts.

python examples/build_chats.py CHATS TOKENIZER STORE [TEMPLATE]
"""

import sys

import tokenmill


def main(chats: str, tokenizer: str, out: str, template: str | None = None) -> None:
    result = tokenmill.build(
        chats, tokenizer=tokenizer, out=out, format="chat", chat_template=template
    )
    lengths = result.lengths
    assert lengths is not None
    print(
        f"{result.totals.documents:,} chats, {result.totals.tokens:,} tokens,"
        f" {lengths.counted_tokens:,} of them count; half have {lengths.percentiles[50]:,} or fewer"
    )
    store = tokenmill.Store(out)
    mask = store.mask(0)
    assert mask is not None
    print(f"the first has {len(mask)} tokens, and {int(mask.sum())} of them count")
    loader = tokenmill.Loader(store, seq_len=256, batch_size=2, packing="best-fit")
    batch = next(iter(loader))
    print(f"a batch of {batch.input_ids.shape}: {int((batch.labels != -100).sum())} labels count")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
