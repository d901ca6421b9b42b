"""The lines of `trm summary` about a finished run of any task."""

from typing import Any

from train_jax.run.folder import RunFolder


def summary(finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
    """Returns the summary of the final evaluation."""
    return str(finished.get("summary", "finished"))
