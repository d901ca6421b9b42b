"""The options of `trm evaluate` for runs of language models."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.help_pages import HelpPage
from train_jax.tasks.evaluate import EvaluateOptions


@dataclasses.dataclass(frozen=True)
class LanguageEvaluateOptions(EvaluateOptions):
    """Bits per byte, samples and CORE."""

    samples: bool = True
    """Also continue the beginnings of some held-out documents."""
    core: str | None = None
    """Also compute the CORE score with this evaluation bundle, as `trm core` does: a folder, or gs://bucket/folder."""
    core_items: Annotated[int, Range(0, 10**9)] = 0
    """Items of each task of CORE, the first ones of the random order; 0 uses all."""

    LANGUAGE_PAGE: ClassVar[dict[str, HelpPage]] = {
        "language": HelpPage("samples and CORE of a language model", ("samples", "core", "core_items"))
    }

    def refuse_conflicts(self) -> None:
        super().refuse_conflicts()
        if self.core_items and self.core is None:
            raise UserError(f"--core-items {self.core_items} is for --core BUNDLE; omit it, or give the bundle")
