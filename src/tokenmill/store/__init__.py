"""The store: tokens on disk, and the only code that knows their bytes.

    UnitWriter -> Receipt -> Manifest -> Store -> TokenStream
    (write.py)    (facts.py)             (reader.py) (stream.py)

`docs/store-format.md` specifies every byte. Nothing here imports pyarrow or an engine, so that a
store opens in the time it takes to import numpy and parse one JSON file.
"""
