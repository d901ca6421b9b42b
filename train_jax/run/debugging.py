"""`--debug-nans` and `--deterministic`: settings of JAX for the time of one run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

from train_jax.errors import UserError
from train_jax.run.config import RunConfig

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@contextlib.contextmanager
def debugging(config: RunConfig) -> Iterator[None]:
    """Applies the run's debugging settings inside the `with`. Raises `UserError` for settings that come too late."""
    if config.deterministic and jax.default_backend() == "gpu" and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(
            f"deterministic: XLA reads its flags before the first computation; start with XLA_FLAGS={_DETERMINISTIC}"
        )
    if not config.debug_nans:
        yield
        return
    with jax.debug_nans(True):
        yield
