"""One tensor under two names, and buffers over the memory of a parameter."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call
from torch import nn

import bridge

X = torch.ones(2, 3)


class TwoNames(nn.Module):
    def __init__(self, forward):
        super().__init__()
        buffer = torch.ones(3)
        self.register_buffer("fast", buffer)
        self.register_buffer("slow", buffer)
        self._call = forward

    def forward(self, x):
        return self._call(self, x)


def one_assigned(m, x):
    m.fast = m.fast * 0.5 + x[0]
    return m.fast - m.slow


def second_assigned(m, x):
    m.slow = m.slow + x[0]
    return m.fast - m.slow


def both_assigned(m, x):
    m.fast = m.slow = m.fast * 0.5 + x[0]
    return m.fast + x


def written(m, x):
    m.fast.mul_(0.5).add_(x[0])
    return m.fast + m.slow


@pytest.mark.parametrize("forward", [one_assigned, second_assigned])
def test_two_names_that_part_are_refused(forward):
    fn = bridge.export(TwoNames(forward))
    with pytest.raises(bridge.BridgeError, match="fast and slow are one tensor before the call and two after it"):
        fn(fn.params, fn.buffers, jnp.asarray(X.numpy()))


@pytest.mark.parametrize("forward", [both_assigned, written])
def test_two_names_that_stay_one(forward):
    module = TwoNames(forward)
    fn = bridge.export(TwoNames(forward))
    buffers = fn.buffers
    for _ in range(3):
        expected = module(X)
        out, buffers = fn(fn.params, buffers, jnp.asarray(X.numpy()))
        assert torch.allclose(torch.tensor(out.tolist()), expected)


class OverWeight(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        memory = self.linear.weight.data
        if frozen:
            self.alias = nn.Parameter(memory, requires_grad=False)
        else:
            self.register_buffer("alias", memory)

    def forward(self, x):
        return self.linear(x) + self.alias.sum()


@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen parameter"])
def test_what_lies_in_the_memory_of_a_parameter_follows_it(frozen):
    """An optimizer updates the parameter in place, and so what shows its memory."""
    module = OverWeight(frozen)
    fn = bridge.export(module)
    params = {name: value + 1.0 for name, value in fn.params.items()}
    out, buffers = fn(params, fn.buffers, jnp.asarray(X.numpy()))
    with torch.no_grad():
        for parameter in fn.params:
            module.get_parameter(parameter).add_(1.0)
    assert torch.allclose(torch.tensor(out.tolist()), module(X), atol=1e-5)
    assert jnp.array_equal(buffers["alias"], params["linear.weight"])


def test_ctc_loss_of_one_sequence():
    def forward(h):
        return F.ctc_loss(h.log_softmax(-1), torch.tensor([1, 1]), torch.tensor(4), torch.tensor(2), reduction="sum")

    h = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    out, _ = bridge.export(Call(forward))({}, {}, jnp.asarray(h.numpy()))
    assert float(out) == pytest.approx(float(forward(h)), rel=1e-5)


class EvalThenTrain(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x):
        self.bn.eval()
        first = self.bn(x)
        self.bn.train()
        return first.sin().sum() + 0 * self.bn(x).sum()


def test_batch_norm_in_eval_and_then_in_train_mode_has_the_derivative_of_its_result():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * 3
    fn = bridge.export(EvalThenTrain())
    slope = jax.grad(lambda x: fn(fn.params, fn.buffers, x, train=True)[0])(jnp.asarray(x.numpy()))
    step, wide = torch.zeros(6, 3, dtype=torch.float64), x.double()
    step[0, 0] = 1e-6
    with torch.no_grad():
        high, low = (EvalThenTrain().double()(wide + sign * step) for sign in (1, -1))
    assert float(slope[0, 0]) == pytest.approx(float(high - low) / 2e-6, rel=1e-4)


def test_a_module_whose_names_have_changed_since_export_is_refused():
    """PyTorch's own call parts the two names of one tensor."""
    module, tensor = nn.Module(), X[0].clone()
    for name in ("fast", "slow"):
        module.register_buffer(name, tensor)
    module.forward = lambda x: x + module.fast
    fn = bridge.export(module)
    module.fast = module.fast * 0.5
    with pytest.raises(bridge.BridgeError, match="other parameters or buffers than when it was exported: slow; export"):
        fn(fn.params, fn.buffers, jnp.asarray(X.numpy()))
