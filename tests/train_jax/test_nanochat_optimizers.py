"""The optimizers of nanochat, November 2025 and July 2026: beside plain PyTorch, and beside the published classes.

`NANOCHAT_DIR=/path/to/nanochat` compares with a checkout at 4a87a0d or at 92d63d4.
"""

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support.markers import slow_unless

from tests.references import nanochat_optimizers as reference
from tests.references.torch_optimizers import muon_in_float32
from train_jax.core.optim.chain import dense_optimizer
from train_jax.core.optim.config import OptimConfig
from train_jax.core.optim.schedule import learning_rate
from train_jax.errors import UserError
from train_jax.language.presets import REFERENCE_TOKENS, arch_2025, arch_2026, optimizer_2025, optimizer_2026

STEPS = 60


def published_config(optim, *, warmup_steps, momentum_warmup_steps):
    """The groups of a preset that the reference has, with shorter warm-ups and Newton-Schulz in float32."""
    muon, *others = optim.groups
    groups = [group for group in others if any(re.fullmatch(group.pattern, name) for name in reference.SHAPES)]
    groups = (dataclasses.replace(muon, momentum_warmup_steps=momentum_warmup_steps), *groups)
    return dataclasses.replace(optim, warmup_steps=warmup_steps, newton_schulz_dtype="float32", groups=groups)


CONFIGS = {  # presets whose rates are not scaled
    2025: published_config(optimizer_2025(arch_2025(12)), warmup_steps=0, momentum_warmup_steps=30),
    2026: published_config(optimizer_2026(arch_2026(12), REFERENCE_TOKENS), warmup_steps=10, momentum_warmup_steps=15),
}
versions = pytest.mark.parametrize("version", slow_unless((2026).__eq__, [2025, 2026]))


def arrays(seed, scale):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in reference.SHAPES.items()}


START = arrays(0, 0.3)
# Norms a factor of 100 apart: some are clipped.
GRADIENTS = [arrays(1 + step, 0.1 ** (step % 3)) for step in range(STEPS)]


def trajectory(config, start=START, gradients=GRADIENTS):
    optimizer = dense_optimizer(config, len(gradients))
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, gradient)
        yield params
    assert step._cache_size() == 1


@versions
def test_steps_equal_plain_pytorch(version):
    theirs = reference.trajectory(version, START, GRADIENTS)
    for number, (params, expected) in enumerate(zip(trajectory(CONFIGS[version]), theirs, strict=True), 1):
        for name in reference.SHAPES:
            np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=1e-5, err_msg=f"{name}, {number}")
    for name in reference.SHAPES:
        change = np.abs(params[name] - START[name]).max()
        assert change > 0.05, f"{name} hardly changed: nothing was compared"


# ---- schedules


def test_warmdown_is_the_published_schedule_at_every_step():
    for warmup, share, floor in [(0, 0.2, 0.0), (10, 0.65, 0.05), (40, 1.0, 0.1)]:
        config = OptimConfig(warmup_steps=warmup, decay="warmdown", decay_share=share, lr_min_ratio=floor)
        rate = learning_rate(2.0, config, 97)
        expected = [2.0 * reference.warmdown(step, warmup, share, floor, 97) for step in range(97)]
        np.testing.assert_allclose([rate(count) for count in range(97)], expected, rtol=1e-5)
    assert expected[-1] == pytest.approx(2.0 * (0.1 + 0.9 / 97)), "the floor would follow"


@pytest.mark.slow
@pytest.mark.parametrize("version", [2025, 2026])
def test_bfloat16_is_as_near_to_float32_as_in_pytorch(version):
    def distance(rounded, exact):
        return math.sqrt(sum(np.square(rounded[name] - exact[name]).sum() for name in reference.MATRICES))

    gradients = GRADIENTS[:4]
    config = CONFIGS[version]
    exact, ours = (
        list(trajectory(dataclasses.replace(config, newton_schulz_dtype=dtype), gradients=gradients))
        for dtype in ("float32", "bfloat16")
    )
    theirs = list(reference.trajectory(version, START, gradients, dtype=torch.bfloat16))
    for number in range(4):
        assert 0 < distance(ours[number], exact[number]) < 1.5 * distance(theirs[number], exact[number]), number
    assert all(array.dtype == np.float32 for array in ours[-1].values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"momentum_start": 0.5}, "momentum_start is 0.5 and optim.momentum_warmup_steps is 0; give both, or neither"),
        ({"optimizer": "a.b:c", "momentum_end": 0.5}, "do not change the momentum of a.b:c; omit them"),
        ({"newton_schulz_dtype": "float16"}, "optim.newton_schulz_dtype is 'float16'"),
    ],
)
def test_fields_that_contradict_each_other_are_an_error(fields, message):
    with pytest.raises(UserError, match=message):
        OptimConfig(**fields)


# ---- beside the published classes


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile does not work in a process that has imported torchax."""
    monkeypatch.setattr(torch, "compile", lambda *args, **_: args[0] if args else lambda function: function)


def square_wide_and_tall(seed, width):
    rng = np.random.default_rng(seed)
    shapes = {"h.c_q.weight": (1, 1), "h.c_fc.weight": (4, 1), "h.c_proj.weight": (1, 4)}
    shapes = {name: (rows * width, columns * width) for name, (rows, columns) in shapes.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@torch.no_grad()
def published_trajectory(optimizer, params, gradients, before_step):
    for step, gradient in enumerate(gradients):
        for name, p in params.items():
            p.grad = torch.tensor(gradient[name])
        before_step(step)
        with muon_in_float32():
            optimizer.step()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


@pytest.mark.parametrize(("version", "width", "decay"), [(2025, 96, 0.0), (2026, 96, 0.0), (2026, 8, 0.28)])
def test_steps_equal_the_published_class(version, width, decay, monkeypatch, nanochat, uncompiled):
    """Decay is compared on small matrices only, because rounding decides whether an update of 0 decays."""
    path = "nanochat/muon.py" if version == 2025 else "nanochat/optim.py"
    if not (Path(nanochat) / path).is_file():
        pytest.skip(f"set NANOCHAT_DIR to a checkout of nanochat with {path}")
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    start, *gradients = (square_wide_and_tall(seed, width) for seed in range(1 + STEPS))
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    group = dataclasses.replace(CONFIGS[version].groups[0], pattern="h.*", weight_decay=decay)
    if version == 2025:
        from nanochat.muon import Muon

        optimizer = Muon(list(params.values()), lr=group.lr)
    else:
        from nanochat.optim import MuonAdamW

        fields = {"kind": "muon", "lr": group.lr, "momentum": 0.97, "ns_steps": 5, "beta2": 0.9, "weight_decay": decay}
        optimizer = MuonAdamW([{"params": [p], **fields} for p in params.values()])

    def before_step(step):
        for each in optimizer.param_groups:
            if version == 2025:
                each["lr"] = group.lr * reference.warmdown(step, 0, 0.2, 0.0, STEPS)
                each["momentum"] = reference.momentum(step, 0.85, 30, 0.95, 0.95, 0.2, STEPS)
            else:
                each["lr"] = group.lr * reference.warmdown(step, 10, 0.65, 0.05, STEPS)
                each["momentum"] = reference.momentum(step, 0.85, 15, 0.97, 0.9, 0.65, STEPS)
                each["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / STEPS))

    config = dataclasses.replace(CONFIGS[version], clip_norm=0.0, groups=(group,))
    theirs = published_trajectory(optimizer, params, gradients, before_step)
    for number, (ours, expected) in enumerate(zip(trajectory(config, start, gradients), theirs, strict=True), 1):
        for name in start:
            np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=1e-5, err_msg=f"{name}, {number}")
