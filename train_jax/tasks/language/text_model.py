"""A trained language model from Python: it continues texts."""

from __future__ import annotations

from collections.abc import Sequence

from models_torch.kv_cache import positions_of
from train_jax.errors import UserError
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.generation import Generator
from train_jax.tasks.language.prompts import Prompts, encode_prompts
from train_jax.tasks.language.sampling import Sampling
from train_jax.tasks.language.task import language_task
from train_jax.tasks.language.tokenizer import Tokenizer


class TextModel:
    """The model of a run with its averaged weights, and the tokenizer of its data; see `train_jax.load_run`."""

    def __init__(self, run: Restored, data_dir: str | None = None, devices: Devices | None = None):
        """`data_dir` has the tokenizer, by default the data of the run. Raises `UserError` for another tokenizer."""
        self._run, self._devices = run, devices or Devices(1)
        data_dir = data_dir or run.config.data_dir
        self.tokenizer = Tokenizer.load(data_dir)
        vocab_size = language_task(run).sizes["vocab_size"]
        if self.tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"the tokenizer of {data_dir} has {self.tokenizer.vocab_size:,} tokens, the model {vocab_size:,}; give "
                "the --data-dir of the training"
            )

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return self._run.step

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[list[str]]:
        """Returns the texts that follow each prompt, `num_samples` of them. Raises `UserError` for too long a text."""
        encoded = encode_prompts(self.tokenizer, list(prompts), num_samples)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        completed = self.generator(encoded, max_tokens, sampling, seed=seed).complete(encoded.rows)
        texts = [self.tokenizer.decode(tokens) for tokens in completed]
        return [texts[first : first + num_samples] for first in range(0, len(texts), num_samples)]

    def generator(
        self, prompts: Prompts, max_tokens: int, sampling: Sampling, *, seed: int = 0, batch_size: int = 32
    ) -> Generator:
        """Returns a generator for these prompts. Raises `UserError` for prompts that the model has no positions for."""
        run, module = self._run, self._run.objective.fn.module
        try:
            positions = positions_of(module)
        except ValueError as error:
            raise UserError(f"--model {run.config.model}: {error}") from None
        sizes = prompts.sizes(
            max_tokens=max_tokens, batch_size=batch_size, devices=self._devices.count, positions=positions
        )
        return Generator(
            module,
            run.objective.params | run.state.eval_params,
            run.objective.buffers | run.state.buffers,
            self._devices,
            sizes,
            sampling=sampling,
            seed=seed,
            stop=self.tokenizer.bos,
        )
