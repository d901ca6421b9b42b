"""The line of `trm summary` about a finished run of puzzles."""

from typing import Any

from train_jax.run.folder import RunFolder


def summary(finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
    return (
        f"held-out exact accuracy {finished['exact_accuracy']:.4f} with "
        f"{weights} weights on {finished['count']:.0f} puzzles unseen under symmetry "
        f"(token accuracy {finished['accuracy']:.4f})"
    )
