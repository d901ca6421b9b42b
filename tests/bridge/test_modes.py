"""`train=` where a module has a `train` of its own."""

import pytest
import torch
from torch import nn

import bridge

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class FrozenStatistics(nn.Module):
    """The usual way to keep a backbone's batch norm as it is while the rest trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # No biases before a batch norm: their gradient is zero, and all that is left of it is rounding.
        self.norm, self.linear, self.other = (
            nn.BatchNorm1d(4, affine=False),
            nn.Linear(4, 4, bias=False),
            nn.BatchNorm1d(4),
        )

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.other(self.linear(self.norm(x)))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("build", [FrozenStatistics, lambda: nn.Sequential(FrozenStatistics(), nn.Tanh())])
def test_an_overridden_train_is_called(build, train):
    module = build()
    report = bridge.verify(module, X, train=train, steps=2)
    assert report.ok, f"\n{report}"
    assert all(m.training for m in module.modules())


class Merging(nn.Module):
    """LoRA as first published: evaluation merges the update into the weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.w.data += (self.a @ self.b) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return x @ self.w + (0 if self.merged else x @ self.a @ self.b)


def test_a_train_that_writes_weights_is_refused():
    """The attribute that says so would die with the call, while the merged weight comes back."""
    fn = bridge.export(Merging())
    fn(fn.params, fn.buffers, X.numpy(), train=True)
    with pytest.raises(bridge.BridgeError, match=r"train\(False\) writes w.*call module.train\(False\) before export"):
        fn(fn.params, fn.buffers, X.numpy(), train=False)
