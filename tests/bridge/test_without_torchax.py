"""The bridge with torchax's tables of operations unused: what models use is right, the rest is refused by name."""

import jax.numpy as jnp
import pytest
import torch
from eager import Call, randn, verified
from torch import nn

import bridge
from bridge._compat import torchax
from bridge.dispatch import computation


@pytest.fixture(autouse=True)
def without_torchax(monkeypatch):
    monkeypatch.setenv("BRIDGE_WITHOUT_TORCHAX", "1")
    for known in (torchax.torchax_lowering, torchax.decomposition):
        known.cache_clear()
    yield
    for known in (torchax.torchax_lowering, torchax.decomposition):
        known.cache_clear()


FLOATS = {
    "elementwise": lambda x: (
        x.sin(),
        x.cos(),
        x.tan(),
        x.exp().log1p(),
        x.expm1(),
        x.atan(),
        x.sinh(),
        x.acosh().nan_to_num(),
    ),
    "rounded": lambda x: (
        x.floor(),
        x.ceil(),
        x.trunc(),
        (2 * x).round(),
        x.sign(),
        x.signbit(),
        x.neg(),
        x.reciprocal(),
    ),
    "pairs": lambda x: (x / (x.flip(0) + 9), x * x.roll(1), x - 2, torch.atan2(x, x + 9), torch.fmod(x, 0.7), x**3),
    "comparisons": lambda x: (x > 0, x <= x.flip(0), torch.where(x > 0, x, -x), torch.maximum(x, x.flip(0))),
    "reductions": lambda x: (x.sum(0), x.mean((0, 1)), x.prod(1), x.var(0), x.std(1, correction=0), x.amax(0)),
    "joined": lambda x: (torch.cat([x, 2 * x]), torch.stack([x, x], 1), x.flip(0, 1), x.tril(), x.roll(2, 1)),
    "products": lambda x: (x @ x.mT, torch.bmm(x[None], x.mT[None]), torch.einsum("ij,kj->ik", x, x)),
    "positions": lambda x: (x.argmax(1), x.argmin(), x.sort(1)[0], x.topk(2)[0], torch.arange(4) * 2),
    "scattered": lambda x: (
        torch.zeros(3, 5).scatter(1, torch.tensor([[1, 4], [0, 2], [3, 3]])[:, :1], x[:, :1]),
        x.scatter(0, torch.tensor([[2, 0, 1, 1]]), 0.5),
    ),
    "padded": lambda x: (
        nn.functional.pad(x, (1, 2), value=3.0),
        nn.functional.pad(x, (-1, 0, 0, 1)),
        nn.functional.unfold(x[None, None], 2),
    ),
    "counted": lambda x: (torch.histc(x, 5, -1, 1), torch.histc(x, 3), torch.histc(torch.ones(2), 4)),
    "chosen": lambda x: x.masked_scatter(x > 0, torch.arange(12.0)),
    "triangular": lambda x: (
        torch.linalg.solve_triangular(torch.tril(x.new_ones(3, 3)), x, upper=False),
        torch.linalg.solve_triangular(torch.triu(x.new_ones(2, 4, 4)), x, upper=True, left=False),
        torch.linalg.matrix_exp(x[:, :3]),
    ),
    "spectra": lambda x: (torch.fft.rfft(x).abs(), torch.fft.ifft(torch.fft.fft(x, norm="ortho")).real),
}


@pytest.mark.parametrize("name", FLOATS)
def test_functions(name):
    verified(Call(FLOATS[name]), randn(3, 4) + 0.1, steps=1)


MODELS = {
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), randn(2, 3, 8)),
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU()), randn(2, 2, 6, 6)),
    "recurrence": lambda: (nn.LSTM(4, 4), randn(3, 2, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules(name):
    module, x = MODELS[name]()
    verified(module, x, steps=1)


def test_the_rest_is_refused_by_name():
    fn = bridge.export(Call(lambda x: torch.special.hermite_polynomial_h(x, 2)))
    with pytest.raises(bridge.BridgeError, match="hermite_polynomial_h"):
        fn({}, {}, jnp.eye(3))
    assert computation._plain(torch.ops.aten.special_hermite_polynomial_h.n_scalar)[0] is None
