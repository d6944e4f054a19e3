"""Text to ids, exactly: finding a tokenizer, describing it, and the engines that run it.

    find_tokenizer(name) -> TokenizerFiles    which files; nothing heavy is loaded
    describe(files) -> TokenizerInfo          vocabulary size, special tokens, eos, fingerprint
    load_engine(info) -> CheckedEngine        a fast engine that is held to a reference engine

A fast engine never decides what the right ids are: the reference engine does (see `parity`).
"""
