"""Presets with other values for some fields, at any level of the configuration; options of a small run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from train_jax.run.config import RunConfig

SMALL_RUN = [
    "--wandb", "disabled", "--eval-every-steps", "0", "--eval-batch-size", "8", "--log-every-steps", "1",
    "--checkpoint-every-steps", "2", "--global-batch-size", "8", "--model", "support.outside_models:CellNet",
    "--arch.options", '{"hidden": 4}', "--no-verify",
]  # fmt: skip
"""Options of `trm train tiny` for a plain module, whose steps take milliseconds."""
PARTS = ("arch", "compute", "optim", "task_config")


def with_fields(config: RunConfig, fields: Mapping[str, Any]) -> RunConfig:
    """Returns the same run with other values of its fields and of nested fields, whose names are unique."""
    rest = dict(fields)
    changes = {}
    for part in PARTS:
        values = getattr(config, part)
        own = {name: rest.pop(name) for name in list(rest) if hasattr(values, name)}
        changes[part] = dataclasses.replace(values, **own)
    return dataclasses.replace(config, **changes, **rest)
