"""Losses with weights."""

import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn

X, TARGET, WEIGHT = randn(4, 3), randn(4, 3, seed=2), randn(4, 3, seed=3).abs()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_weighted_losses(loss, reduction):
    compare(Call(lambda x, t, w: loss(x, t, weight=w, reduction=reduction)), [X, TARGET, WEIGHT])
    compare(Call(lambda x, t: loss(x, t, weight=WEIGHT, reduction=reduction)), [X, TARGET])
    compare(Call(lambda x, t: loss(x, t, reduction=reduction)), [X, TARGET])


LOSSES = {
    "binary cross entropy": lambda x, w: F.binary_cross_entropy(x.sigmoid(), WEIGHT / 9, weight=w),
    "with logits": lambda x, w: F.binary_cross_entropy_with_logits(x, WEIGHT / 9, weight=w, pos_weight=w[:1]),
    "cross entropy": lambda x, w: F.cross_entropy(x, torch.tensor([0, 2, 1, 1]), weight=w[0], label_smoothing=0.1),
    "nll": lambda x, w: F.nll_loss(x, torch.tensor([0, 2, 1, 1]), weight=w[0]),
    "multi margin": lambda x, w: F.multi_margin_loss(x, torch.tensor([0, 2, 1, 1]), weight=w[0]),
    "multilabel soft margin": lambda x, w: F.multilabel_soft_margin_loss(x, WEIGHT.round(), weight=w),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_with_weights(name):
    compare(Call(lambda x, w: LOSSES[name](x, w.detach())), [X, WEIGHT])
