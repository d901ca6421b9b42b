"""Cross-entropy of classes: picked by a mask, so that no array of log-probabilities or of their gradient is needed."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, randn

import bridge

LOGITS, IMAGE = randn(6, 5, seed=0), randn(2, 5, 3, 4, seed=1)
LABELS = torch.tensor([0, 4, -100, 2, 1, 3])
MAP = torch.arange(24).view(2, 3, 4) % 5
MAP[0, 0] = -100
WEIGHTS = randn(5, seed=2).abs()
LOSSES = {
    "mean": lambda x, y: F.cross_entropy(x, y),
    "sum of weighted": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "smoothed": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, label_smoothing=0.1),
    "another label ignored": lambda x, y: F.nll_loss(x.log_softmax(1), y.clamp(min=0), ignore_index=4),
    "impossible classes": lambda x, y: F.cross_entropy(x.masked_fill(x < -0.5, -torch.inf), y, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("x", "labels"), [(LOGITS, LABELS), (IMAGE, MAP)], ids=["rows", "image"])
def test_values_and_gradients(name, x, labels):
    report = bridge.verify(Call(LOSSES[name]), x.clone().requires_grad_(), labels)
    assert report.ok, report


def test_of_nothing():
    """The mean over no label is nan and has a gradient of zero, as in PyTorch."""
    call = bridge.export(Call(LOSSES["mean"]))
    labels = jnp.full((6,), -100)
    value, gradient = jax.value_and_grad(lambda x: call({}, {}, x, labels)[0])(jnp.asarray(LOGITS))
    assert jnp.isnan(value) and not gradient.any()


def test_no_class_is_looked_up_by_its_position():
    call = bridge.export(Call(LOSSES["mean"]))
    gradient = jax.jit(jax.grad(lambda x, y: call({}, {}, x, y)[0]))
    text = gradient.lower(jnp.asarray(LOGITS), jnp.zeros(6, jnp.int32)).as_text()
    assert "gather" not in text and "scatter" not in text
