"""`trm evaluate` for runs of language models: bits per byte and samples."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax

from train_jax.command_line import HelpPage
from train_jax.language.commands import perplexity_of, write_samples
from train_jax.language.text_set import TextSet, open_beside
from train_jax.report.commands import Console
from train_jax.report.evaluate import EvaluateOptions, lines_of, refuse_other_options, with_chosen_weights
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process

if TYPE_CHECKING:
    from train_jax.language.task import LanguageTask


@dataclasses.dataclass(frozen=True)
class LanguageEvaluateOptions(EvaluateOptions):
    """Options for language models: bits per byte and samples."""

    samples: bool = True
    """Also continue the beginnings of some held-out documents."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {"language": HelpPage("samples of a language model", ("samples",))}

    def evaluate(self, run: Restored, devices: Devices, console: Console) -> None:
        """Evaluates and prints. Raises `UserError` for options or data that do not fit the run."""
        from train_jax.language.generation import sample_texts
        from train_jax.language.task import language_task

        task = language_task(run)
        refuse_other_options(self, LanguageEvaluateOptions, run)
        run = with_chosen_weights(self, run)
        data = _text(self, task)
        with console.progress("evaluating") as advance:
            evaluator = task.evaluator(
                run.objective, devices, data=data, split=self.split, rows=self.batch_size, progress=advance
            )
            evaluation = evaluator(run.state, limit=self.limit)
        if is_main_process():
            if self.belongs_to_run:
                evaluation.save(run.folder, self.split)
            metrics = evaluation.metrics | {"perplexity": perplexity_of(evaluation.metrics["loss"])}
            console.say(lines_of(self, run, metrics))
            for name, value in evaluation.compressed.items():
                console.say(f"  {name:<16} {value:.4f} bits per byte")
        if self.samples and jax.process_count() == 1:
            with console.progress("samples"):
                samples = sample_texts(run, data, devices)
            if self.belongs_to_run:
                write_samples(run.folder.samples, run.step, samples)
            for each in samples:
                console.say(each.shown)


def _text(options: LanguageEvaluateOptions, task: LanguageTask) -> TextSet:
    """Returns the text to evaluate on. Raises `UserError` if it was encoded with another tokenizer."""
    if options.data_dir is None:
        return task.data
    return open_beside(options.data_dir, task.data)
