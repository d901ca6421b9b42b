"""The FLOPs of the traced train step are those counted by hand: the bridge adds none."""

import dataclasses
from typing import Any

import jax
import pytest
from support.markers import slow_unless

from models_torch.flops import language_flops_per_token
from models_torch.gpt import GPTConfig
from models_torch.trm import TRMConfig
from train_jax.pod.compile import train_step_arguments
from train_jax.pod.flops import products
from train_jax.pod.hlo import Program
from train_jax.pod.yardsticks import yardsticks
from train_jax.run.config import ComputeConfig
from train_jax.run.performance import model_flops
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.start import assemble
from train_jax.tasks.language.task import UnbuiltText
from train_jax.tasks.puzzles.task import UnbuiltPuzzles

BATCH, CELLS, PUZZLE_POSITIONS, HIDDEN = 4, 81, 16, 32
"""The baseline's shapes, but its width of 512."""
POSITIONS = CELLS + PUZZLE_POSITIONS


def product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def swiglu(rows: int, features: int, multiple: int) -> int:
    width = -(-round(4 * features * 2 / 3) // multiple) * multiple
    return product(rows, features, 2 * width) + product(rows, width, features)


def attention(rows: int) -> int:
    projections = product(rows, HIDDEN, 3 * HIDDEN) + product(rows, HIDDEN, HIDDEN)
    return projections + 2 * product(rows, HIDDEN, POSITIONS)  # scores and values


@pytest.mark.parametrize("mixer", slow_unless(bool, [False, True]), ids=["attention", "mixer"])
def test_flops_of_the_train_step(mixer):
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": 2, "mlp_multiple_of": 16, "puzzle_emb_ndim": HIDDEN}
    arch = TRMConfig(mlp_t=mixer, pos_encodings="none" if mixer else "rope", **sizes)
    config = dataclasses.replace(preset("sudoku-extreme"), arch=arch, global_batch_size=BATCH)
    training = assemble(config, UnbuiltPuzzles(config), Devices(available=jax.devices()[:1]))
    jaxpr = jax.make_jaxpr(training.parallel_step())(*train_step_arguments(training))

    rows = BATCH * POSITIONS
    mixing = swiglu(BATCH * HIDDEN, POSITIONS, 16) if mixer else attention(rows)
    network = 2 * (mixing + swiglu(rows, HIDDEN, 16))  # blocks
    updates = 6 + 1  # updates of z_L and of z_H in an H-cycle
    heads = product(rows, HIDDEN, training.task.sizes["vocab_size"]) + product(BATCH, HIDDEN, 2)
    # Two H-cycles without gradients, one with them; a backward has two products for each of the forward.
    expected = (2 + 3) * updates * network + 3 * heads
    assert products(jaxpr).total == pytest.approx(expected, rel=1e-3)
    counted = products(jaxpr)
    assert (counted.of_model, counted.recomputed, counted.outside) == (counted.total, 0, 0)
    assert model_flops(training.config, training.task, training.devices.count) == pytest.approx(
        counted.of_model, rel=1e-3
    )
    sums = yardsticks(Program(""), products=counted.by_name)
    updates_of_all = (2 + 3) * updates
    perceptron = swiglu(rows, HIDDEN, 16) - product(rows, 96, HIDDEN)  # without its last product, a module of its own
    mlp = sums.splits["module"]["model.inner.L_level.layers.1.mlp"].product_flops
    assert mlp == pytest.approx(updates_of_all * perceptron)
    assert sums.splits["pass"]["backward"].product_flops == pytest.approx(2 * (updates * network + heads), rel=1e-3)


@pytest.mark.parametrize("name", slow_unless("chat-tiny".__eq__, ["chat-tiny", "chat-tiny-2026"]))
def test_flops_of_a_language_model(name):
    """The FLOPs are those of the published formula; recomputation and the optimizer are counted separately."""
    config = preset(name)
    assert isinstance(config.arch, GPTConfig)
    sizes: dict[str, Any] = {"seq_len": 16, "vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 1, "n_kv_head": 1}
    arch = dataclasses.replace(config.arch, **sizes)
    config = dataclasses.replace(config, arch=arch, global_batch_size=2, compute=ComputeConfig(remat="blocks"))
    training = assemble(config, UnbuiltText(config), Devices(available=jax.devices()[:1]))
    counted = products(jax.make_jaxpr(training.parallel_step())(*train_step_arguments(training)))
    analytic = 2 * 16 * language_flops_per_token(arch)
    assert model_flops(training.config, training.task, training.devices.count) == analytic
    # In 2026, the first token of a row has no predecessor, so its gate of 24 channels is not computed.
    missing = 0 if name == "chat-tiny" else 2 * 6 * 24
    assert counted.of_model == analytic - missing
    if name == "chat-tiny-2026":
        return
    blocks = 2 * 12 * 48 * 48
    attention = 4 * 48 * 16
    # A block is computed again up to its last product, whose result is not needed.
    last = 2 * 48 * 4 * 48
    expected = 2 * 16 * (2 * blocks + 2 * attention - 2 * last)
    assert counted.recomputed == expected
    by_pass = yardsticks(Program(""), products=counted.by_name).splits["pass"]
    assert by_pass["update"].product_flops == counted.outside
    assert by_pass["backward"].product_flops == counted.recomputed + 2 * by_pass["forward"].product_flops
    # Newton-Schulz iterates five times with three products; more rows than columns are transposed.
    square, wide = 4 * (3 * 2 * 48**3), 2 * (2 * 2 * 48 * 48 * 192 + 2 * 48**3)
    assert counted.outside == 2 * 5 * (square + wide)
