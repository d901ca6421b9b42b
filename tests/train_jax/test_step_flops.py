"""The FLOPs of the traced train step are those of the TRM paper's recursion, counted by hand: the bridge adds none."""

import dataclasses

import jax
import pytest
from support.markers import slow_unless

from models_torch.trm import TRMConfig
from train_jax.pod.compile import train_step_arguments
from train_jax.pod.counted import product_flops
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.start import assemble
from train_jax.tasks.puzzles.unbuilt import UnbuiltPuzzles

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
    sizes = {"hidden_size": HIDDEN, "num_heads": 2, "mlp_multiple_of": 16, "puzzle_emb_ndim": HIDDEN}
    arch = TRMConfig(mlp_t=mixer, pos_encodings="none" if mixer else "rope", **sizes)
    config = dataclasses.replace(preset("sudoku-extreme"), arch=arch, global_batch_size=BATCH)
    training = assemble(config, UnbuiltPuzzles(config), Devices(available=jax.devices()[:1]))
    jaxpr = jax.make_jaxpr(training.parallel_step())(*train_step_arguments(training)).jaxpr

    rows = BATCH * POSITIONS
    mixing = swiglu(BATCH * HIDDEN, POSITIONS, 16) if mixer else attention(rows)
    network = 2 * (mixing + swiglu(rows, HIDDEN, 16))  # blocks
    updates = 6 + 1  # of z_L and of z_H in an H-cycle
    heads = product(rows, HIDDEN, training.task.sizes["vocab_size"]) + product(BATCH, HIDDEN, 2)
    # Two H-cycles without gradients, one with them; a backward has two products for each of the forward.
    expected = (2 + 3) * updates * network + 3 * heads
    assert product_flops(jaxpr) == pytest.approx(expected, rel=1e-3)
