"""`--deterministic`: checks that XLA was started with the flags that it needs."""

from __future__ import annotations

import os

import jax

from train_jax.errors import UserError
from train_jax.run.config import RunConfig

_FLAG = "--xla_gpu_deterministic_ops=true"


def check_deterministic(config: RunConfig) -> None:
    """Raises `UserError` if `config.deterministic` needs a flag that XLA was started without."""
    if config.deterministic and jax.default_backend() == "gpu" and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(f"deterministic needs a flag that XLA reads at the start; run again with XLA_FLAGS={_FLAG}")
