"""Text to ids, exactly: finding a tokenizer, describing it, and the engines that run it.

    find_tokenizer(name) -> TokenizerFiles    which files; nothing heavy is loaded
    describe(files) -> TokenizerInfo          vocabulary size, special tokens, eos, fingerprint
    load_engine(info) -> CheckedEngine        a fast engine that is held to a reference engine

A fast engine never decides what the right ids are: the reference engine does (see `parity`).
To add one, write a module with the functions of `base.FastEngine` and name it here. The last part
of the module's name is the engine's name, and that of the package whose version is shown, if it
needs one.
"""

from typing import Any

from tokenmill.compiled import find_compiled

# Modules, in the order in which `auto` tries them; imported when a tokenizer is described.
FAST_ENGINES = ("tokenmill.engines.gigatoken", "tokenmill.engines.words")
# Kind of a tokenizer -> the engine that defines its ids.
REFERENCES = {
    "huggingface": "tokenizers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
    "bytes": "bytes",
}
AUTO = "auto"
# Kind of a tokenizer -> packages that its engines will most probably be loaded from.
PACKAGES = {
    "huggingface": ("tokenizers", "gigatoken"),
    "tiktoken": ("tiktoken", "gigatoken"),
    "sentencepiece": ("sentencepiece",),
}
# Engines that need no package.
OWN_ENGINES = ("words", "bytes")


def engine_names() -> tuple[str, ...]:
    """Every engine by name, the fast ones first."""
    return (*(module.rpartition(".")[2] for module in FAST_ENGINES), *REFERENCES.values())


def find_kernel() -> Any:
    """The part in C of the engine `words`; None where it is not there."""
    return find_compiled("tokenmill.engines.kernel", 3)
