"""The commands `trm export`, `summary` and others for runs of scripts.

Importing this module imports neither JAX nor PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from train_jax.report import commands
from train_jax.report.commands import Commands, Console

AGREEING_LOSS = 1e-4
"""Largest relative difference of the mean losses."""


@dataclasses.dataclass(frozen=True)
class ExportCheck(commands.ExportCheck):
    """Comparison of the loss of PyTorch, with the exported weights, with that of JAX, in evaluation mode."""

    examples: int
    """Number of examples, the first ones of the test data, or of the training data if there are none."""
    torch_loss: float
    jax_loss: float

    @property
    def agrees(self) -> bool:
        return abs(self.torch_loss - self.jax_loss) <= AGREEING_LOSS * max(abs(self.torch_loss), 1e-6)

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: loss {self.torch_loss:.6g} on {self.examples:,} "
            f"examples, {self.jax_loss:.6g} in JAX (float32)"
        )


class ScriptCommands(Commands):
    """The commands after training, for runs of scripts."""

    step_check = "train_jax.script.stages.check:cli"
    checks_exports = True
    check_class = ExportCheck

    def page(self, files: Any) -> str:
        from train_jax.script.page import page

        return page(files)

    def check_export(self, run: Any, weights: Path, console: Console) -> ExportCheck:
        from train_jax.script.export_check import check_export

        return check_export(run, weights)

    def write_folder(self, run: Any, folder: Path) -> Iterable[Path]:
        from train_jax.script.results import write_pretrained

        return write_pretrained(run, folder)

    def write_program(self, run: Any, output: Path, sizes: Sequence[int]) -> str:
        from train_jax.script.results import write_program

        return write_program(run, output, sizes)
