"""Strides of results, and what depends on them: whether `flatten` copies, whether `view` is possible."""

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from support.markers import slow_unless
from torch import nn

import bridge

V = torch.rand(3)
W = randn(4, 3, 3, 3)


class Strides(nn.Module):
    """The strides of `function(layout(x))`, as numbers of the result; dimensions of size 1 have none."""

    def __init__(self, function, layout):
        super().__init__()
        self.function, self.layout = function, layout
        self.w = nn.Parameter(W.contiguous(memory_format=torch.channels_last))

    def forward(self, x):
        out = self.function(self, self.layout(x))
        return torch.tensor([s if n > 1 else -1 for n, s in zip(out.shape, out.stride(), strict=True)])


LAYOUTS = {
    "channels last": (randn(2, 3, 6, 6), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "one row": (randn(1, 3, 1, 6), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "plain": (randn(2, 3, 6, 6), lambda x: x),
    "permuted": (randn(6, 6, 3, 2), lambda x: x.permute(3, 2, 0, 1)),
    "sequence": (randn(2, 8, 3), lambda x: x.transpose(1, 2)),
    "volume": (randn(2, 3, 4, 4, 4), lambda x: x.contiguous(memory_format=torch.channels_last_3d)),
}
FUNCTIONS = {
    "convolution": lambda m, x: F.conv2d(x, W, padding=1),
    "weights channels last": lambda m, x: F.conv2d(x, m.w, padding=1),
    "kernel of size 1": lambda m, x: F.conv2d(x, W[:, :, :1, :1].contiguous(memory_format=torch.channels_last)),
    "depthwise": lambda m, x: F.conv2d(x, W[:3, :1], groups=3, padding=1),
    "transposed": lambda m, x: F.conv_transpose2d(x, W[:3, :2, :2, :2], stride=2),
    "of sequences": lambda m, x: F.conv1d(x, W[..., 0]),
    "of volumes": lambda m, x: F.conv3d(x, W[..., None]),
    "batch norm": lambda m, x: F.batch_norm(x, None, None, V, V, True),
    "batch norm, no weight": lambda m, x: F.batch_norm(x, V, V + 1),
    "log sigmoid": lambda m, x: F.logsigmoid(x),
    "padding": lambda m, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "shuffle": lambda m, x: F.channel_shuffle(x, 3),
    "roll": lambda m, x: x.roll(1, 1),
    "logical": lambda m, x: torch.logical_and(x > 0, x.contiguous() > 0),
    "division": lambda m, x: torch.div(x, V.view(-1, *[1] * (x.dim() - 2)), rounding_mode="floor"),
    "copysign": lambda m, x: torch.copysign(x, V[0]),
    "lerp": lambda m, x: torch.lerp(x, x.contiguous(), 0.5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("kernel of size 1", "division"), FUNCTIONS))
def test_strides(name, layout):
    x, arranged = LAYOUTS[layout]
    module = Strides(FUNCTIONS[name], arranged)
    try:
        with torch.no_grad():
            expected = module(x)
    except (RuntimeError, NotImplementedError):
        pytest.skip("PyTorch does not take this shape")
    fn = bridge.export(module)
    assert fn(fn.params, fn.buffers, jnp.asarray(x.numpy()))[0].tolist() == expected.tolist()


def flattened(module, x):
    h = module(x)
    h.detach().flatten(1).mul_(0)  # of a copy, where `h` is channels last
    return h


def viewed(module, x):
    h = module(x)
    return h.permute(0, 2, 3, 1).view(h.shape[0], -1) * 2


@pytest.mark.parametrize("function", [flattened, viewed])
def test_what_depends_on_strides(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)

        def forward(self, x):
            return function(self.c, x)

    torch.manual_seed(0)
    report = bridge.verify(Model(), randn(2, 2, 3, 3), train=False)
    assert report.ok, f"\n{report}"


def test_batch_norm_of_a_transposed_sequence_can_be_viewed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x.transpose(1, 2)).view(x.shape[0], -1)

    assert bridge.verify(Model(), randn(4, 5, 3), train=True, steps=2).ok


def test_log_sigmoid_is_contiguous():
    x = torch.randn(2, 3, 4, 5)

    def strides(x):
        return torch.tensor(F.logsigmoid(x.to(memory_format=torch.channels_last)).stride())

    assert bridge.export(Call(strides))({}, {}, x.numpy())[0].tolist() == strides(x).tolist() == [60, 20, 5, 1]


POOLED = {
    "of a transposed sequence": (lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1), randn(2, 5, 4)),
    "channels last": (lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).flatten(1), randn(2, 4, 5, 3)),
    "written later": (lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).mul_(2).sin_(), randn(2, 4, 5, 3)),
    "volume": (lambda x: F.adaptive_avg_pool3d(x.permute(0, 4, 1, 2, 3), 1), randn(2, 3, 2, 2, 3)),
    "gradient inside": (
        lambda x: torch.autograd.grad(
            F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).square().sum(), x, create_graph=True
        )[0],
        randn(2, 4, 5, 3),
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_pooling_to_one_element_of_channels_last_images(name):
    """PyTorch writes the strides of its own result anew."""
    function, x = POOLED[name]
    compare(Call(function), [x])


@pytest.mark.parametrize(
    "write", [lambda y: y.as_strided_((4, 3), (1, 4)), lambda y: y[1:].as_strided_((2, 4), (4, 1), 0)]
)
def test_another_layout_of_memory_in_place_is_refused(write):
    fn = bridge.export(Call(lambda x: write(x * 1)))
    with pytest.raises(bridge.BridgeError, match=r"as_strided_.*use as_strided"):
        fn({}, {}, randn(3, 4).numpy())
