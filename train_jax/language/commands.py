"""The commands `trm evaluate`, `export`, `report`, `summary` and `status` for runs of language models, and samples.

Importing this module imports neither JAX nor PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from train_jax.report import commands
from train_jax.report.commands import Commands, Console, Metric
from train_jax.run.folder import RunFolder, write_text
from train_jax.storage.json_files import NUMBER, TEXT, find_object, list_of, object_of, optional, record_of

AGREEING_LOSS = 1e-4
"""Largest difference of the mean losses in nats. Rounding differs by about 1e-6, wrong weights by more than 0.01."""


@dataclasses.dataclass(frozen=True)
class ExportCheck(commands.ExportCheck):
    """Comparison of the losses of PyTorch, with the exported weights, with those of JAX, on held-out text."""

    tokens: int
    """Number of targets, the first ones of the test split."""
    torch_loss: float
    """Mean loss in nats."""
    jax_loss: float
    max_difference: float
    """Largest |JAX - PyTorch| of the loss of a token."""

    @property
    def agrees(self) -> bool:
        return abs(self.torch_loss - self.jax_loss) <= AGREEING_LOSS

    @property
    def details(self) -> str:
        return f"; the loss of a token differs by at most {self.max_difference:.1e}"

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: loss {self.torch_loss:.6f} on the first "
            f"{self.tokens:,} held-out tokens, {self.jax_loss:.6f} in JAX (float32)"
        )


class LanguageCommands(Commands):
    """The commands after training, for runs of language models."""

    metric = Metric("bits_per_byte", "bits/byte", "{:.4f}")
    figures: ClassVar = {"loss": NUMBER, "bits_per_byte": optional(NUMBER)}
    checks_exports = True
    check_class = ExportCheck
    options = "train_jax.language.evaluate:LanguageEvaluateOptions"

    def model(self, run: Any) -> Any:
        from train_jax.language.generation import TextModel

        return TextModel(run)

    def summary(self, finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
        perplexity = perplexity_of(finished["loss"])
        lines = [
            f"{super().summary(finished, folder, weights)}, {weights} weights",
            f"perplexity {perplexity:.2f} of a token",
        ]
        core = read_core(folder)
        if core is not None:
            lines.append(f"CORE {core['core']:.4f}")
        return "\n".join(lines)

    def check_export(self, run: Any, weights: Path, console: Console) -> ExportCheck:
        from train_jax.language.export_check import check_export

        return check_export(run, weights, console)

    def write_folder(self, run: Any, folder: Path) -> Iterable[Path]:
        from train_jax.language.huggingface import write_folder

        return write_folder(run, folder)

    def page(self, files: Any) -> str:
        from train_jax.language.page import page

        return page(files)

    def tables(self, files: Any) -> dict[str, tuple[Path, str]]:
        from train_jax.language.phase_scores import markdown_path, phase_table

        phases = phase_table(files)
        return {} if phases is None else {"phases": (markdown_path(files), phases.markdown())}

    def decode_program(self, training: Any, rows: int, capacity: int) -> tuple[Any, Any]:
        from train_jax.language.engine import decode_program

        return decode_program(training, rows, capacity)


def perplexity_of(loss: float) -> float:
    """Returns the exponential of a mean loss in nats; infinity where it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


# ---- samples


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt, which may be empty, and what the model wrote after it."""

    name: str
    """Name, such as `test document 12` or `without a prompt`."""
    prompt: str
    text: str

    @property
    def shown(self) -> str:
        """Text for the console; `|` is between the prompt and the text of the model."""
        return f"\n--- {self.name}\n{printable(self.prompt)}|{printable(self.text)}"


def write_samples(path: Path, step: int, samples: Sequence[Sample]) -> None:
    content = {"step": step, "samples": [dataclasses.asdict(sample) for sample in samples]}
    write_text(path, json.dumps(content, indent=1))


def read_samples(folder: RunFolder) -> list[Sample]:
    """Reads the samples of a run; returns none if there is no file. Raises `UserError` for a damaged one."""
    names = [field.name for field in dataclasses.fields(Sample)]
    fields = {"samples": list_of(record_of(dict.fromkeys(names, TEXT)))}
    remedy = "remove it and run `trm evaluate` to write it again"
    content = find_object(folder.samples, fields, remedy=remedy) or {"samples": []}
    return [Sample(**{name: each[name] for name in names}) for each in content["samples"]]


def read_core(folder: RunFolder) -> dict[str, Any] | None:
    """Reads the results of `trm core`; None if there are none. Raises `UserError` for a damaged file."""
    task = record_of(dict.fromkeys(("items", "accuracy", "centered"), NUMBER))
    fields = {"core": NUMBER, "tasks": object_of(task)}
    return find_object(folder.evaluation("core"), fields, remedy="write it again with `trm core`")


def printable(text: str) -> str:
    """Replaces control characters, which a model may write, by U+FFFD, except for line ends and tabs."""
    return "".join(x if x.isprintable() or x in "\n\t " else "\ufffd" for x in text)
