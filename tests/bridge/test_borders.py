"""Values and gradients at borders, ties, zero distances and infinite losses, against PyTorch eager."""

import jax
import jax.numpy as jnp
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


def off(mode, take):
    with mode():
        return take()


def taken(take, write, mode=torch.no_grad):
    """A view that is taken while gradients are off, and a write into it."""

    def forward(x, weight):
        y = x * weight
        write(off(mode, lambda: take(y)), weight)
        return y

    return forward


def written_in_inference_mode(x, weight):
    y = x * weight
    off(torch.inference_mode, lambda: y[0].add_(1))
    return y * weight


FORBIDDEN = {
    "a row": taken(lambda y: y[0], lambda v, w: v.add_(1)),
    "in inference mode": taken(lambda y: y[0], lambda v, w: v.add_(1), torch.inference_mode),
    "a view of it": taken(lambda y: y.view(-1), lambda v, w: v[:2].zero_()),
    "one of several": taken(lambda y: y.unbind()[0], lambda v, w: v.mul_(2)),
    "without a gradient before": taken(lambda y: y.detach()[0], lambda v, w: v.mul_(w)),
    "transposed in place": taken(lambda y: y[:2], lambda v, w: v.t_()),
    "a constant": taken(lambda y: torch.ones(2, 4)[0], lambda v, w: v.mul_(w)),
}
TAKEN = {
    "detached": taken(lambda y: y.detach(), lambda v, w: v.add_(1)),
    "a row of it, detached": taken(lambda y: y.detach()[0], lambda v, w: v.add_(1)),
    "detached afterwards": taken(lambda y: y[0], lambda v, w: v.detach().mul_(w)),
    "data": taken(lambda y: y[0], lambda v, w: v.data.add_(1)),
    "detached of several": lambda x, w: [x * w, (x * w).unbind()[0].detach().mul_(w)],
    "written in inference mode": written_in_inference_mode,
    "a row of what has no gradient": taken(lambda y: torch.ones(2, 4)[0], lambda v, w: v.add_(1)),
}


class Weighted(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, torch.nn.Parameter(torch.arange(1.0, 5))

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_write_into_a_view_made_without_gradients_is_pytorch_s_error(name):
    module = Weighted(FORBIDDEN[name])
    message = r"A view was created in (no_grad|inference) mode|is a view of a view which was created in no_grad mode"
    with pytest.raises(RuntimeError, match=message):
        module(X.clone())
    fn = bridge.export(module)
    with pytest.raises(RuntimeError, match=message):
        jax.eval_shape(lambda x: fn(fn.params, {}, x)[0], X.numpy())


@pytest.mark.parametrize("name", TAKEN)
def test_a_write_into_a_view_that_pytorch_takes(name):
    compare(Weighted(TAKEN[name]), [X])


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


class Nested(torch.nn.Module):
    """In PyTorch the second product is an error: the cache of casts does not tell one dtype from another."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            first = self.linear(x)
            with torch.autocast("cpu", torch.float16):
                return first, self.linear(x)


def test_small_differences_by_nature():
    """docs/bridge.md lists these, too."""
    y = np.float32([1, -2])
    fn = bridge.export(Call(lambda x, y: torch.where(y > 0, torch.xlogy(x, y), 0.0).sum()))
    assert np.isnan(jax.grad(lambda x: fn({}, {}, x, y)[0])(y)).tolist() == [False, True]
    large, small = torch.tensor([1e4, 10]).half()
    fn = bridge.export(Call(lambda x: (x.half() * large * small).float()))
    x = np.float32([0.01])
    assert fn({}, {}, x)[0] == 1000 and np.isinf(jax.jit(lambda x: fn({}, {}, x)[0])(x))
    nested = bridge.export(Nested())
    assert [out.dtype for out in nested(nested.params, {}, np.ones((2, 2), np.float32))[0]] == [
        jnp.bfloat16,
        jnp.float16,
    ]
    conjugate = Call(lambda z: z * torch.tensor(z.conj().is_conj()))
    assert conjugate(torch.tensor([1j])) == 1j and bridge.export(conjugate)({}, {}, np.complex64([1j]))[0] == 0


def test_rounding_under_jit_decides_between_equals():
    """XLA joins the mean's division and the difference, without rounding the quotient: 9 / 36 is no longer 1 / 4."""
    counts = torch.tensor([[9.0, 10, 8, 9]])

    def balance(x):
        shares = x / 36
        return torch.sign(shares.mean() - shares)

    fn = bridge.export(Call(balance))
    assert balance(counts).tolist() == fn({}, {}, counts.numpy())[0].tolist() == [[0, -1, 1, 0]]
    compiled = jax.jit(lambda x: fn({}, {}, x)[0])(counts.numpy())
    by_hand = jax.jit(lambda x: jnp.sign((x / 36).mean() - x / 36))(counts.numpy())
    assert compiled.tolist() == by_hand.tolist() != [[0, -1, 1, 0]]


def test_the_sign_of_a_zero_and_numbers_below_the_normal_ones():
    """docs/bridge.md lists these: XLA leaves out `+ 0`, takes the larger of -0 and 0, and flushes subnormal numbers."""

    def angles(x):
        return torch.atan2(x + 0.0, torch.tensor(-1.0)), torch.atan2(torch.relu(x), torch.tensor(-1.0))

    x = np.float32([-0.0])
    ours = jax.jit(lambda x: bridge.export(Call(angles))({}, {}, x)[0])(x)
    assert np.sign(ours).ravel().tolist() == [-1, 1] and np.sign(angles(torch.tensor(x))).ravel().tolist() == [1, -1]
    small = np.float32([1e-40])
    assert torch.tensor(small) != 0 and not bridge.export(Call(lambda x: x != 0))({}, {}, small)[0]
