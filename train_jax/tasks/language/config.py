"""The configuration fields of language runs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from models_torch.ranges import check_ranges
from train_jax.errors import UserError
from train_jax.task import TaskConfig

Packing = Literal["stream", "shuffled", "bestfit"]


@dataclasses.dataclass(frozen=True)
class LanguageConfig(TaskConfig):
    """Batches of a language run."""

    packing: Packing = "stream"
    """Which tokens a row has: stream takes every token of the data in turn; shuffled takes the same rows in a random
    order, so that the rows of a long document do not share a batch; bestfit begins every row with a document,
    and fills it with whole documents and the start of one, whose other tokens are not used."""

    def __post_init__(self):
        try:
            check_ranges(self)
        except ValueError as error:
            raise UserError(str(error)) from None
