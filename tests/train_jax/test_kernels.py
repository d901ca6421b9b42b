"""`--compute.mlp fused`: the Pallas kernels in interpret mode beside the plain path, and what is left to it."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.block_kernels import cycles, exported, text_and_gradients, values_and_gradients
from support.markers import slow_or_campaign
from support.scripts import run_script

from train_jax.core.kernels.mix_positions import examples_of, fused_mix_positions, mix_positions
from train_jax.core.kernels.normed_mlp import fused_normed_mlp, normed_mlp

EPSILON = 1e-5
INTERPRETED = functools.partial(fused_normed_mlp, interpret=True)
HIDDEN = 128
WIDTH = 256


def arrays(batch, positions, dtype=jnp.bfloat16, hidden=HIDDEN, width=WIDTH):
    rng = np.random.default_rng(0)
    scales = {(batch, positions, hidden): 1, (2 * width, hidden): hidden**-0.5, (hidden, width): width**-0.5}
    x, *weights = (jnp.asarray(rng.normal(size=shape) * scale, jnp.float32) for shape, scale in scales.items())
    return x.astype(dtype), *weights


CASES = [
    (2, 16, -1),
    *slow_or_campaign([(3, 97, 1), (1, 500, -1)], [(3, 97, -1), (7, 97, 1)]),  # examples in parts, added rows
]
"""Batch size, positions, and the axis of the norm."""


def assert_more_exact(fused, plain, given):
    """Asserts that `fused` in bfloat16 is closer to `plain` in float32 than `plain` is, values and gradients."""
    exact, rounded = (values_and_gradients(plain, dtype, given) for dtype in (jnp.float32, jnp.bfloat16))
    fused_values = values_and_gradients(fused, jnp.bfloat16, given)
    for ours, theirs, right in zip(fused_values, rounded, exact, strict=True):
        assert np.linalg.norm(ours - right) < np.linalg.norm(theirs - right) < 0.01 * np.linalg.norm(right)


@pytest.mark.parametrize("case", CASES)
def test_channels_are_more_exact_than_the_plain_path(case):
    batch, positions, dim = case

    fused, plain = (functools.partial(each, epsilon=EPSILON, dim=dim) for each in (INTERPRETED, normed_mlp))
    assert_more_exact(fused, plain, arrays(batch, positions))


POSITIONS = [(1, 16, 256, 128), *slow_or_campaign([(2, 97, 128, 128)], [(3, 150, 128, 256)])]
"""Batch size, positions, hidden size and width."""


def of_positions(batch, positions, hidden, width, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (batch, positions, hidden), (2 * width, positions), (positions, width)
    x, *weights = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return x.astype(dtype), weights[0] * positions**-0.5, weights[1] * width**-0.5


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_are_more_exact_than_the_plain_path(case):
    given = of_positions(*case)
    assert_more_exact(functools.partial(fused_mix_positions, interpret=True), mix_positions, given)


@pytest.mark.parametrize("case", [(2, 16, 64, 128), (2, 16, 128, 64), (1, 900, 512, 2560)])
def test_positions_of_other_sizes_are_the_plain_path(case):
    for given in (of_positions(*case), of_positions(2, 16, 128, 128, jnp.float32)):
        assert examples_of(given[0], given[2].shape[1]) == 0
        ours, plain = (each(*given).astype(np.float32) for each in (fused_mix_positions, mix_positions))
        np.testing.assert_array_equal(ours, plain)


OTHERS = {
    "float32": (arrays(2, 16, jnp.float32), -1),
    "width": (arrays(2, 16, width=128), -1),
    "weights too large": (arrays(1, 8, hidden=1024, width=3072), -1),
    "norm over more positions than a block has": (arrays(1, 500), 1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_everything_else_is_the_plain_path(case):
    given, dim = OTHERS[case]
    ours, plain = (each(*given, EPSILON, dim).astype(np.float32) for each in (fused_normed_mlp, normed_mlp))
    np.testing.assert_array_equal(ours, plain)


SMALL = {"batch_size": 4, "seq_len": 13, "expansion": 3.0, "mlp_multiple_of": 256, "pos_encodings": "none",
         "mlp_t": True}  # fmt: skip


def test_the_blocks_of_a_model_call_the_kernels():
    module, x = cycles(**SMALL)
    plain = exported(module, "gpu", mlp="fused")
    assert not plain.options.functions, "there are none for a GPU"
    text, ours = text_and_gradients(exported(module, "tpu", mlp="fused"), x, jnp.bfloat16)
    _, theirs = text_and_gradients(plain, x, jnp.bfloat16)
    _, exact = text_and_gradients(plain, x, jnp.float32)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert np.linalg.norm(mine - right) <= 1.1 * np.linalg.norm(their - right) < 0.1 * np.linalg.norm(right)
    # There is one block of each pass.
    names = ["normed_mlp", "mix_positions"]
    expected = sorted([*names * 2, *(f"{name}_gradient" for name in names)])
    assert sorted(re.findall(r"name=((?:normed_mlp|mix_positions)\w*)\n", text)) == expected


SIZES = slow_or_campaign(
    [["--positions", "192x97x512x512"]],
    [
        ["--positions", "12x40x256x256"],
        ["192x97x512x1536", "64x916x512x1536"],
        ["7x97x512x1536", "192x97x384x1024", "8x97x640x1792"],
    ],
)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_fit_the_memory_of_a_tpu(sizes):
    """The kernels are compiled in a process of their own, since libtpu changes the environment."""
    run_script("compile_kernels", *sizes)
