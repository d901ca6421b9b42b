"""The lines of `trm summary` about a finished run of a language model. Imports neither JAX nor PyTorch."""

import json
import math
from typing import Any

from train_jax.errors import UserError
from train_jax.run.folder import RunFolder


def summary(finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
    lines = [f"{finished['summary']}, {weights} weights", f"perplexity {perplexity(finished['loss']):.2f} of a token"]
    if folder.evaluation("core").is_file():
        try:
            lines.append(f"CORE {json.loads(folder.evaluation('core').read_text())['core']:.4f}")
        except (ValueError, KeyError, TypeError) as error:
            path = folder.evaluation("core")
            raise UserError(f"{path} cannot be read ({error!r}); write it again with `trm core`") from error
    return "\n".join(lines)


def perplexity(loss: float) -> float:
    """Returns the exponential of a mean loss in nats; infinity where it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
