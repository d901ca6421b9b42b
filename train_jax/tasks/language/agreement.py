"""The result of an export check of a language model; reading it imports neither torch nor JAX."""

import dataclasses

AGREEING_LOSS = 1e-4
"""Largest difference of the mean losses in nats. Rounding differs by about 1e-6, wrong weights by more than 0.01."""


@dataclasses.dataclass(frozen=True)
class ExportCheck:
    """Comparison of the losses of PyTorch, with the exported weights, with those of JAX, on held-out text."""

    tokens: int
    """Number of targets, the first ones of the test split."""
    torch_loss: float
    """Mean loss in nats."""
    jax_loss: float
    max_difference: float
    """Largest |JAX - PyTorch| of the loss of a token."""

    @property
    def agrees(self) -> bool:
        return abs(self.torch_loss - self.jax_loss) <= AGREEING_LOSS

    @property
    def details(self) -> str:
        return f"; the loss of a token differs by at most {self.max_difference:.1e}"

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: loss {self.torch_loss:.6f} on the first "
            f"{self.tokens:,} held-out tokens, {self.jax_loss:.6f} in JAX (float32)"
        )
