"""Values and gradients at borders, ties, zero distances and infinite losses, against PyTorch eager."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from support.markers import slow_unless

import bridge

X = randn(4, 4, seed=0)
IMAGE = randn(1, 2, 3, 5, seed=1)
VOLUME = randn(1, 1, 3, 2, 4, seed=2)
IDENTITY = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]])
POINTS = torch.tensor(
    [[[[-1, -1], [1, 1], [0, 0], [1.5, 0], [1 / 3, -2 / 3], [-2 / 3, 2 / 3], [-3.2, 2.6], [0.2, 0.7]]]]
)
WITH_ZEROS = torch.tensor([[1.0, 2], [1, 2], [0, 0], [3, -1]])


def sampled(padding, align_corners, mode="bilinear"):
    """Sizes such that no coordinate lies beside a pixel only by rounding, where the gradient jumps."""
    image = IMAGE if align_corners else IMAGE[..., :4]
    settings = {"padding_mode": padding, "align_corners": align_corners, "mode": mode}

    def forward(theta, points):
        grid = F.affine_grid(theta, image.shape, align_corners=align_corners)
        return F.grid_sample(image, grid, **settings), F.grid_sample(image, points, **settings)

    return forward, [IDENTITY, POINTS]


def sampled_volume(points):
    return [F.grid_sample(VOLUME, points, padding_mode=mode, align_corners=True) for mode in ("border", "reflection")]


CASES = {
    "border": sampled("border", True),
    "border, corners": sampled("border", False),
    "reflection": sampled("reflection", True),
    "reflection, corners": sampled("reflection", False),
    "border, cubic": sampled("border", False, "bicubic"),
    "border, nearest": sampled("border", False, "nearest"),
    "distances": (lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"), [WITH_ZEROS]),
    "distances of many": (lambda x: torch.cdist(x.repeat(8, 1), x), [WITH_ZEROS]),
    "largest coordinates": (lambda x: (torch.cdist(x, x + 1, p=float("inf")), F.pdist(x, float("inf"))), [WITH_ZEROS]),
    "no degrees of freedom": (lambda x: (x[:1].var(0), x.var(1, correction=6), x.std((0, 1), correction=20)), [X]),
    "no degrees of freedom, all": (lambda x: (x.var(correction=16), x[:2].std(correction=9)), [X]),
    "branch cuts": (lambda x: (z := torch.complex(-x.abs(), -0.0 * x.abs()), z.log().imag, z.angle()), [X]),
    "impossible labels": (
        lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1, 1, 1]]), (4,), (3,), reduction="none"),
        [X],
    ),
    "shifts": (lambda x: (x > 0).long().__ilshift__(3).__irshift__(1) * x, [X]),
}


@pytest.mark.parametrize("name", slow_unless(("border", "distances", "shifts").__contains__, CASES))
def test_values_and_gradients(name):
    function, inputs = CASES[name]
    compare(Call(function), inputs)


@pytest.mark.slow
def test_a_volume_is_sampled_or_refused():
    points = torch.tensor([[[[[-1.0, 1, 0.3], [0.2, -0.4, 1.5]]]]])
    compare(Call(sampled_volume), [points])


WRITES = {
    "unbind": lambda x: x.unbind()[0].add_(1),
    "split": lambda x: x.split([1, 3])[1][:, 1:].mul_(2),
    "chunk": lambda x: x.chunk(2)[0].zero_(),
    "iteration": lambda x: next(iter(x)).copy_(x[1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_one_of_several_views_is_pytorch_s_error(name):
    def forward(x):
        WRITES[name](x)
        return x

    with pytest.raises(RuntimeError, match="multiple views"):
        forward(X.clone().requires_grad_() * 2)
    fn = bridge.export(Call(lambda x: forward(x * torch.ones(4, requires_grad=True))))
    with pytest.raises(RuntimeError, match="multiple views"):
        jax.eval_shape(lambda x: fn({}, {}, x)[0], X.numpy())
    unseen = bridge.export(Call(lambda x: forward(x.detach().clone())))  # without gradients, PyTorch takes it
    jax.eval_shape(lambda x: unseen({}, {}, x)[0], X.numpy())


def test_by_nature():
    """docs/bridge.md lists these."""
    singular = torch.diag(torch.tensor([0.0, 2, 3]))
    fn = bridge.export(Call(torch.linalg.det))
    np.testing.assert_allclose(jax.grad(lambda x: fn({}, {}, x)[0])(singular.numpy())[0, 0], 6)
    leaf = singular.clone().requires_grad_()
    torch.linalg.det(leaf).backward()
    assert leaf.grad is not None and leaf.grad[0, 0] == 0
    root = bridge.export(Call(lambda x, y: torch.complex(x, y).sqrt().imag))
    assert root({}, {}, np.float32(-3), np.float32(-0.0))[0] > 0 > torch.complex(*torch.tensor([-3, -0.0])).sqrt().imag
