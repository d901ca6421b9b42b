"""Operations at borders and with arguments that few use, against PyTorch eager."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, compare, gradients, in_jax, raises, randn, same, verified
from support.markers import slow_unless
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

X = randn(3, 4, seed=0)


def put(x):
    y = x * 2
    some = torch.tensor([-1, 0, 0])
    of_masks = (x > 0).put(torch.tensor([0, 0, 5]), x[0, :3] > -9, accumulate=True)
    return y.put(some, x[0, :3], accumulate=True), y.put(some[:2], x[0, :2]), of_masks


FUNCTIONS = {
    "results with names": lambda x: (torch.max(x, 1), {"slogdet": torch.linalg.slogdet(x[:, :3])}),
    "put": put,
    "factors of no matrices": lambda x: (
        *(x * 2, torch.linalg.cholesky(x.new_zeros(0, 3, 3) + x[0, 0])),
        torch.linalg.cholesky_ex(x[:0, :0]),
    ),
    "multilabel margin": lambda x: F.multilabel_margin_loss(x[:2], torch.tensor([[1, 2, -1, 0], [-1, 0, 0, 0]])),
    "floats to small integers": lambda x: (
        *((x * 1000).to(d) for d in (torch.int8, torch.uint8, torch.int16)),
        torch.zeros(3, 4, dtype=torch.int8).copy_(x * 300) + x,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    """Only one call is compared, because half precision rounds other numbers differently."""
    verified(FUNCTIONS[name], X, int64="wrap", steps=1)


MODULES = {
    "transposed, all": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
        (2, 4, 5, 6),
    ),
    "transposed, dilation": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=3, bias=False), (1, 2, 4, 4, 4)),
    "circular": (lambda: nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular", groups=4, dilation=2), (2, 4, 5, 6)),
    "same, even kernel": (lambda: nn.Conv1d(4, 2, 4, padding="same", bias=False), (2, 4, 7)),
    "norms": (lambda: weight_norm(weight_norm(nn.Linear(4, 3), "bias"), "weight", 1), (2, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    verified(make(), torch.randn(shape))


def test_hooks_and_the_call_of_the_module_itself():
    class Called(nn.Linear):
        def __call__(self, x):
            return super().__call__(x * 2) + 1

    for hooked in (nn.Linear(4, 3), Called(4, 3)):
        hooked.register_forward_hook(lambda module, args, out: out + 100)
        hooked.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
        np.testing.assert_allclose(in_jax(hooked, X), hooked(X).detach(), rtol=1e-5)
        verified(hooked, X)


BITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def beside_narrow_floats(x, y):
    sums = x + 0.1, x - 0.1, x + 1001, torch.add(x, y, alpha=0.3), torch.sub(x, 0.1, alpha=0.3)
    products = x * 1001, x * 0.3, x // 0.3, torch.div(x, 0.3, rounding_mode="floor")
    return *sums, torch.rsub(x, y, alpha=0.3), *products, F.leaky_relu(x, 0.1), F.softshrink(x, 0.1)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_numbers_beside_narrow_floats_are_rounded_where_pytorch_does(dtype):
    """Bit for bit."""
    same(beside_narrow_floats, *(randn(32, 32, seed=s).to(dtype) * 3 for s in (1, 2)))


# ---- Values and gradients at borders, ties, zero distances and infinite losses, against PyTorch eager

SQUARE = randn(4, 4, seed=0)
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
    return F.grid_sample(VOLUME, points, padding_mode="border", align_corners=True)


CASES = {
    "border": sampled("border", True),
    "border, corners": sampled("border", False),
    "border, cubic": sampled("border", False, "bicubic"),
    "border, nearest": sampled("border", False, "nearest"),
    "a volume": (sampled_volume, [torch.tensor([[[[[-1.0, 1, 0.3], [0.2, -0.4, 1.5]]]]])]),
    "distances": (lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"), [WITH_ZEROS]),
    "distances of many": (lambda x: torch.cdist(x.repeat(8, 1), x), [WITH_ZEROS]),
    "branch cuts": (lambda x: (z := torch.complex(-x.abs(), -0.0 * x.abs()), z.log().imag, z.angle()), [SQUARE]),
    "impossible labels": (
        lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1, 1, 1]]), (4,), (3,), reduction="none"),
        [SQUARE],
    ),
    "shifts": (lambda x: (x > 0).long().__ilshift__(3).__irshift__(1) * x, [SQUARE]),
}


NEWER = "border, cubic"
"""A point between two cells, where XLA's older way to compile fused loops, that of the other tests, rounds to the other
side."""


@pytest.mark.parametrize(
    "name",
    [
        *slow_unless(("border", "distances", "shifts").__contains__, [case for case in CASES if case != NEWER]),
        pytest.param(NEWER, marks=pytest.mark.campaign),
    ],
)
def test_values_and_gradients(name):
    function, inputs = CASES[name]
    compare(function, inputs)


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
        forward(SQUARE.clone().requires_grad_() * 2)
    of_weights = Calls(lambda m, x: forward(x @ m.w), w=nn.Parameter(torch.eye(4)))
    raises("multiple views", of_weights, SQUARE, error=RuntimeError)
    in_jax(lambda x: forward(x.detach().clone()), SQUARE)  # without gradients, PyTorch takes it


def taken(take, write, mode=torch.no_grad):
    """A view that is taken while gradients are off, and a write into it."""

    def forward(m, x):
        y = x * m.w
        with mode():
            view = take(y)
        write(view, m.w)
        return y

    return forward


def written_in_inference_mode(m, x):
    y = x * m.w
    with torch.inference_mode():
        y[0].add_(1)
    return y * m.w


FORBIDDEN = {
    "a row": taken(lambda y: y[0], lambda v, w: v.add_(1)),
    "in inference mode": taken(lambda y: y[0], lambda v, w: v.add_(1), torch.inference_mode),
    "a view of it": taken(lambda y: y.view(-1), lambda v, w: v[:2].zero_()),
    "transposed in place": taken(lambda y: y[:2], lambda v, w: v.t_()),
}
TAKEN = {
    "detached": taken(lambda y: y.detach(), lambda v, w: v.add_(1)),
    "data": taken(lambda y: y[0], lambda v, w: v.data.add_(1)),
    "detached of several": lambda m, x: [x * m.w, (x * m.w).unbind()[0].detach().mul_(m.w)],
    "written in inference mode": written_in_inference_mode,
}


def weighted(function):
    return Calls(function, w=nn.Parameter(torch.arange(1.0, 5)))


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_write_into_a_view_made_without_gradients_is_pytorch_s_error(name):
    module = weighted(FORBIDDEN[name])
    message = r"A view was created in (no_grad|inference) mode|is a view of a view which was created in no_grad mode"
    with pytest.raises(RuntimeError, match=message):
        module(SQUARE.clone())
    raises(message, module, SQUARE, error=RuntimeError)


@pytest.mark.parametrize("name", TAKEN)
def test_a_write_into_a_view_that_pytorch_takes(name):
    compare(weighted(TAKEN[name]), [SQUARE])


def test_by_nature():
    """docs/bridge.md lists these."""
    singular = torch.diag(torch.tensor([0.0, 2, 3]))
    slope = jax.grad(lambda x: in_jax(torch.linalg.det, x))(singular.numpy())[0, 0]
    assert slope == pytest.approx(6) or slope == 0  # before and since JAX 0.12
    leaf = singular.clone().requires_grad_()
    torch.linalg.det(leaf).backward()
    assert leaf.grad is not None and leaf.grad[0, 0] == 0
    root = in_jax(lambda x, y: torch.complex(x, y).sqrt().imag, np.float32(-3), np.float32(-0.0))
    assert root > 0 > torch.complex(*torch.tensor([-3, -0.0])).sqrt().imag


def test_batch_norm_of_one_image_whose_result_is_transposed():
    """PyTorch's gradient of the bias is not the sum of the gradient of the result."""
    image = randn(1, 16, 4, 4)
    weight = randn(1, 16, 16, seed=2)
    norm = nn.BatchNorm2d(16)
    module = Call(lambda norm, x: norm(x).flatten(2).transpose(1, 2) * weight, norm)
    expected = weight.sum((0, 1))
    np.testing.assert_allclose(gradients(module, image)["module.bias"], expected, rtol=1e-5)
    module(image).sum().backward()
    assert norm.bias.grad is not None and (norm.bias.grad - expected).abs().max() > 1


def nested_autocast(linear, x):
    """The second product is an error in PyTorch: the cache of casts does not tell one dtype from another."""
    with torch.autocast("cpu", torch.bfloat16):
        first = linear(x)
        with torch.autocast("cpu", torch.float16):
            return first, linear(x)


def test_small_differences_by_nature():
    """docs/bridge.md lists these, too."""
    y = torch.tensor([1.0, -2.0])
    slope = jax.grad(lambda x: in_jax(lambda x: torch.where(y > 0, torch.xlogy(x, y), 0.0).sum(), x))(y.numpy())
    assert np.isnan(slope).tolist() == [False, True]
    large, small = torch.tensor([1e4, 10]).half()
    plain, compiled = (in_jax(lambda x: (x.half() * large * small).float(), X[:1, 0] * 0 + 0.01, jit=j) for j in (0, 1))
    assert plain == 1000 and (np.isinf(compiled) or compiled == 1000)  # before and since JAX 0.12
    outs = in_jax(Call(nested_autocast, nn.Linear(2, 2)), jnp.ones((2, 2)))
    assert [out.dtype for out in outs] == [jnp.bfloat16, jnp.float16]
    conjugate = Call(lambda z: z * torch.tensor(z.conj().is_conj()))
    z = torch.tensor([1j])
    assert conjugate(z) == 1j and in_jax(conjugate, z)[0] == 0


@pytest.mark.campaign  # other tests compile fused loops in a different way
def test_rounding_under_jit_decides_between_equals():
    """XLA joins the mean's division and the difference, without rounding the quotient: 9 / 36 is no longer 1 / 4."""
    counts = torch.tensor([[9.0, 10, 8, 9]])

    def balance(x):
        shares = x / 36
        return torch.sign(shares.mean() - shares)

    assert balance(counts).tolist() == in_jax(balance, counts).tolist() == [[0, -1, 1, 0]]
    compiled = in_jax(balance, counts, jit=True)
    by_hand = jax.jit(lambda x: jnp.sign((x / 36).mean() - x / 36))(counts.numpy())
    assert compiled.tolist() == by_hand.tolist() != [[0, -1, 1, 0]]


def test_the_sign_of_a_zero_and_numbers_below_the_normal_ones():
    """docs/bridge.md lists these: XLA leaves out `+ 0`, takes the larger of -0 and 0, and flushes subnormal numbers."""

    def angles(x):
        return torch.atan2(x + 0.0, torch.tensor(-1.0)), torch.atan2(torch.relu(x), torch.tensor(-1.0))

    x = torch.tensor([-0.0])
    assert np.sign(in_jax(angles, x, jit=True)).ravel().tolist() == [-1, 1]
    assert np.sign(angles(x)).ravel().tolist() == [1, -1]
    small = torch.tensor([1e-40])
    assert small != 0 and not in_jax(lambda x: x != 0, small)


# ---- Tensors without dimensions, which PyTorch takes for one dimension of size 1 wherever a dimension is named

SCALAR = torch.tensor(0.7)
zero = torch.tensor(0)

ALONG = (
    *("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "sum", "mean", "prod", "nansum"),
    *("nanmean", "amax", "amin", "argmax", "argmin", "argsort", "median", "nanmedian", "mode", "max", "min", "cummax"),
    *("cummin", "squeeze"),
)
"""`function(x, 0)`."""

SPECIAL = {
    "all": lambda x: (x > 0).all(0),
    "sort": lambda x: (x.sort(0), x.sort(-1, descending=True), x.sort(stable=True, dim=0)),
    "topk": lambda x: (x.topk(1), x.topk(1, 0, largest=False)),
    "quantile": lambda x: torch.quantile(x, 0.4, 0),
    "flip": lambda x: (x.flip(0), x.flip(-1)),
    "roll": lambda x: x.roll(1),
    "norm": lambda x: (x.norm(), x.norm(dim=0), x.norm(1, 0)),
    "aminmax": lambda x: x.aminmax(dim=0),
    "std": lambda x: (x.std(0, correction=0), x.std(dim=0, correction=0, keepdim=True)),
    "count_nonzero": lambda x: x.count_nonzero(0),
    "gather": lambda x: (x.gather(0, zero), x.gather(-1, zero)),
    "index_select": lambda x: x.index_select(0, zero),
    "index_add": lambda x: x.index_add(0, zero, x * 2),
    "index_reduce": lambda x: x.index_reduce(0, zero, x * 2, "amax"),
    "scatter": lambda x: (x.scatter(0, zero, x * 2), x.scatter(0, zero, 4.0) + x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, zero, x * 2, "prod"),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1)),
    "cosine": lambda x: F.cosine_similarity(x, x * 2, 0),
    "repeat_interleave": lambda x: x.repeat_interleave(3),
    "stack": lambda x: (torch.stack([x, x * 2]), torch.stack([x, x * 2], -1)),
    "take": lambda x: x.take(zero),
    "diff": lambda x: x[None].diff(),
}


OF_SCALARS = {name: functools.partial(lambda f, x: f(x, 0), getattr(torch, name)) for name in ALONG} | SPECIAL
NAMES = [*OF_SCALARS]


def flat(out):
    return [t for o in out for t in flat(o)] if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("names", [NAMES[i::4] for i in range(4)], ids=" ".join)
def test_no_dimensions(names):
    """A quarter of the functions in each program."""
    compare(lambda x: [t for name in names for t in flat(OF_SCALARS[name](x))], [SCALAR])
