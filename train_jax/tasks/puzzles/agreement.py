"""The figures of an export check, apart from the check itself, so that they are read without torch and JAX."""

import dataclasses

AGREEING_SHARE = 0.999
"""Of the puzzles: the logits of two frameworks differ in the last digit, so that a near tie may fall either way."""


@dataclasses.dataclass(frozen=True)
class ExportCheck:
    """PyTorch's answers, given the exported weights, beside those of the JAX side."""

    puzzles: int
    agree: int
    """Puzzles whose every token is the same after the last ACT step."""
    torch_exact_accuracy: float
    """Share that PyTorch solves."""
    max_logit_difference: float
    """Largest |JAX - PyTorch| of the halting logits after the last ACT step."""

    @property
    def agrees(self) -> bool:
        return self.agree >= AGREEING_SHARE * self.puzzles

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: the same answer on {self.agree} of {self.puzzles} "
            f"puzzles ({self.agree / self.puzzles:.2%}, float32), exact accuracy there {self.torch_exact_accuracy:.4f}"
        )
