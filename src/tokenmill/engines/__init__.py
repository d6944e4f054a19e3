"""Text to ids, exactly: finding a tokenizer, describing it, and the engines that run it.

    find_tokenizer(name) -> TokenizerFiles    which files; nothing heavy is loaded
    describe(files) -> TokenizerInfo          vocabulary size, special tokens, eos, fingerprint
    load_engine(info) -> CheckedEngine        a fast engine that is held to a reference engine

A fast engine never decides what the right ids are: the reference engine does (see `parity`).
To add one, write a module with the functions of `base.FastEngine` and name it here. The last part
of the module's name is the engine's name, and that of the package whose version is shown, if it
needs one.
"""

import os
from importlib import import_module
from typing import Any

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


# The engine `words` has a part in C, which does what numpy and Arrow do there, several times as
# fast. It has this number, which `kernel.c` says too.
_INTERFACE = 2


def find_kernel() -> Any:
    """That part; None where it could not be compiled, or where TOKENMILL_KERNEL=0 turns it off."""
    if os.environ.get("TOKENMILL_KERNEL") == "0":
        return None
    try:
        found: Any = import_module("tokenmill.engines.kernel")
    except ImportError:
        return None
    return found if found.INTERFACE == _INTERFACE else None
