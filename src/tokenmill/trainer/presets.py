"""The models by name, as plain numbers: `diagnose` needs their cost without loading torch.

A block has 12 * width^2 parameters in matrices (attention 4, feed-forward 8); the embedding is also
the output layer. The cost of a token is counted as is usual for a share of a GPU's peak: six
operations for each parameter (forward 2, backward 4), and 12 * layers * width * seq_len for
attention, as if it were not causal.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UsageError

VOCAB_MULTIPLE = 128
"""The vocabulary is filled up to a multiple of this: matrices of odd sizes are slow."""


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding of a vocabulary."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model, and what it is trained with unless one says otherwise."""

    num_layers: int
    width: int
    num_heads: int
    max_seq_len: int
    """Longest row it may be trained on."""
    rope_base: float = 10_000.0
    """Slowest rotation of the position encoding: larger for longer rows."""
    batch_tokens: int = 524_288
    """Of a step, over all ranks."""
    learning_rate: float = 6e-4

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.width // self.num_heads % 8:
            raise UsageError(
                f"width {self.width} in {self.num_heads} heads: a head must have a multiple of 8",
                hint="use heads of 64 or 128, like width=768, num_heads=12",
            )

    def num_parameters(self, vocab_size: int) -> int:
        """Parameters, the embedding counted once."""
        norms = (2 * self.num_layers + 1) * self.width
        return self._num_in_matrices(vocab_size) + norms

    def flops_per_token(self, seq_len: int, vocab_size: int) -> int:
        """Floating-point operations that training on one token takes."""
        attention = 12 * self.num_layers * self.width * seq_len
        return 6 * self._num_in_matrices(vocab_size) + attention

    def _num_in_matrices(self, vocab_size: int) -> int:
        return 12 * self.num_layers * self.width**2 + padded_vocab(vocab_size) * self.width


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        num_layers=2,
        width=64,
        num_heads=2,
        max_seq_len=1024,
        batch_tokens=2048,
        learning_rate=3e-3,
    ),
    "mini": ModelConfig(
        num_layers=8,
        width=160,
        num_heads=5,
        max_seq_len=2048,
        batch_tokens=65_536,
        learning_rate=2e-3,
    ),
    "small": ModelConfig(num_layers=12, width=768, num_heads=12, max_seq_len=4096),
    "medium": ModelConfig(
        num_layers=20,
        width=1792,
        num_heads=14,
        max_seq_len=16_384,
        rope_base=500_000.0,
        learning_rate=3e-4,
    ),
    "large": ModelConfig(
        num_layers=34,
        width=2048,
        num_heads=16,
        max_seq_len=32_768,
        rope_base=500_000.0,
        batch_tokens=1_048_576,
        learning_rate=2e-4,
    ),
}
"""With GPT-2's vocabulary of 50,257: 3.3, 10.5, 124, 861 and 1,814 million parameters."""


def preset(name: str) -> ModelConfig:
    """The model of this name."""
    if name not in PRESETS:
        raise UsageError(f"there is no model {name!r}", hint=f"use one of: {', '.join(PRESETS)}")
    return PRESETS[name]
