"""The train steps of `campaigns.bridge_corpus`: one of every preset, small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.example_puzzles import ExamplePuzzles
from campaigns.bridge_corpus_numbers import flat, numbers
from train_jax.language.presets import is_by_depth
from train_jax.language.task import UnbuiltText
from train_jax.pods.compile import train_step_arguments
from train_jax.run.config import RunConfig
from train_jax.run.presets import preset, preset_names
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step of a preset: the program, and the state after one step. There is no PyTorch side."""

    config: RunConfig
    task: Any
    """Class of the task, which makes its own batches."""

    def run(self) -> tuple[str, dict[str, np.ndarray]]:
        """Returns the text of the lowered step, and the numbers of the state and the metrics after it."""
        devices = Devices(1)
        training = start(self.config, self.task(self.config), devices)
        step = training.parallel_step()
        batch = training.batches.at(0)
        state = training.initial_state()
        carry = devices.shard(training.initial_carry(state, batch))
        text = jax.jit(lambda *args: step(*args)).lower(*train_step_arguments(training)).as_text()
        state, _, metrics = step(training.placement.place(state), carry, batch, devices.random_key(0))
        named = {f"state {path}": a for path, a in flat(state)} | {f"metric {path}": a for path, a in flat(metrics)}
        return text, {name: numbers(leaf) for name, leaf in named.items()}


class ExampleText(UnbuiltText):
    """Random tokens."""

    def batch(self, step: int, shard: tuple[int, int], state: Any = None) -> dict[str, np.ndarray]:
        shape = self.config.global_batch_size // shard[1], self.config.arch.seq_len + 1
        tokens = np.random.default_rng([step, shard[0]]).integers(self.config.arch.vocab_size, size=shape)
        return {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def steps() -> dict[str, Callable[[], Step]]:
    """Returns a train step of every preset, with a batch of 4 and a small module; everything else is the preset's."""

    def case(config: Any) -> Step:
        language = config.task == "language"
        sizes = {"seq_len": 16, "vocab_size": 64} | (
            {"n_embd": 48, "n_layer": 2, "n_head": 1, "n_kv_head": 1}
            if language
            else {"hidden_size": 32, "num_heads": 2, "mlp_multiple_of": 16, "num_puzzle_identifiers": 5}
        )
        if not language and config.arch.puzzle_emb_ndim:
            sizes["puzzle_emb_ndim"] = 32
        arch = dataclasses.replace(config.arch, **sizes)
        tiny = dataclasses.replace(config, arch=arch, global_batch_size=4, data_dir="", run_dir="", steps=100)
        return Step(tiny, ExampleText if language else ExamplePuzzles)

    names = [name for name in preset_names() if not is_by_depth(name)] + ["d20", "d26", "d32", "d24-2026"]
    return {f"step/{name}": lambda name=name: case(preset(name)) for name in names}
