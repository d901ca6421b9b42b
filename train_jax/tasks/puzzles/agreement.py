"""The result of an export check, in a separate module so that reading it imports neither torch nor JAX."""

import dataclasses

AGREEING_SHARE = 0.999
"""Least share of puzzles with equal answers. The logits of two frameworks differ by rounding, which can change the
argmax of nearly equal logits."""


@dataclasses.dataclass(frozen=True)
class ExportCheck:
    """Comparison of PyTorch's answers, with the exported weights, with JAX's answers."""

    puzzles: int
    agree: int
    """Number of puzzles whose tokens are all equal after the last ACT step."""
    torch_exact_accuracy: float
    """Share of the puzzles that PyTorch solves."""
    max_logit_difference: float
    """Largest |JAX - PyTorch| of the halting logits after the last ACT step."""

    @property
    def agrees(self) -> bool:
        return self.agree >= AGREEING_SHARE * self.puzzles

    @property
    def details(self) -> str:
        return f"; halting logits differ by at most {self.max_logit_difference:.1e}"

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: the same answer on {self.agree} of {self.puzzles} "
            f"puzzles ({self.agree / self.puzzles:.2%}, float32), exact accuracy in PyTorch "
            f"{self.torch_exact_accuracy:.4f}"
        )
