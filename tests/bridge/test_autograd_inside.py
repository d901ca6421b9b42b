"""Gradients that a forward asks for itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import TRANSFORMS, Call, Calls, Doubled, compare, composes, differentiated, in_jax, raises, randn
from support.markers import slow_unless
from torch import nn

import bridge

# ---- `torch.autograd.grad` and `backward()` inside `forward` and inside a backward, against PyTorch eager


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4))


def forces(module, x):
    """A potential and minus its slope, trained on both."""
    x.requires_grad_()
    energy = module(x).square().sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -slope


def forces_of_an_input(module, x):
    """Does what code does that expects its caller to have asked for the gradient."""
    energy = module(x).square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def penalty(module, x):
    """The penalty of a Wasserstein critic."""
    mixed = (x * 0.3 + x.flip(0) * 0.7).detach().requires_grad_(True)
    score = module(mixed)
    (slope,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean() + score.mean()


def inner_loop(module, x):
    """MAML, two steps."""
    weights = {name: p for name, p in module.named_parameters()}
    for _ in range(2):
        loss = torch.func.functional_call(module, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(module, weights, (x,))


def first_order(module, x):
    """The slope is a constant without `create_graph`."""
    h = module(x)
    (slope,) = torch.autograd.grad(h.exp().sum(), h, retain_graph=True)
    return h * slope


def adversarial(module, x):
    stepped = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(stepped).square().sum(), stepped)
    return module(x + 0.1 * slope.sign())


def saved_results(module, x):
    """Operations whose backward needs what they gave."""
    h = module(x)
    y = h.exp() + h.tanh() + h.softmax(-1) + h.sigmoid() + (h**2 + 1).sqrt()
    return torch.autograd.grad(y.sum(), h, create_graph=True)[0]


def in_place_and_views(module, x):
    h = module(x)
    y = h * 2
    y[0] = y[1].exp()
    y.mul_(h)
    y.t()[1].add_(h[:, 0].sum())
    return torch.autograd.grad((y * y).sum(), [h, module[0].weight], create_graph=True)


def unused(module, x):
    h = module(x)
    y = x.clone().requires_grad_()
    first, second = torch.autograd.grad(h.sum() * 2, [h, y], allow_unused=True)
    assert second is None
    return h * first


def leaf_backward(module, x):
    leaf = module(x).detach().requires_grad_()
    (leaf**3).sum().backward()
    return module(x) * leaf.grad


def under_checkpoint(module, x):
    h = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    return torch.autograd.grad(h.square().sum(), module[0].weight, create_graph=True)[0] * h.mean()


def detached(module, x):
    h = module(x)
    y = h * h.detach() + h.data * 3
    z = (h * 5).detach_()
    return torch.autograd.grad((y * z).sum(), h, create_graph=True)[0]


def forward_mode(module, x):
    jacobian = torch.autograd.functional.jacobian
    return jacobian(lambda x: module(x).sum(0), x, strategy="forward-mode", vectorize=True)


def vmapped(module, x):
    """A known recipe for Jacobians."""
    y = module(x)[0]
    rows = torch.vmap(lambda v: torch.autograd.grad(y, module[0].weight, v, retain_graph=True)[0])(torch.eye(len(y)))
    return module(x).sum() * rows


CALLS = [
    forces, forces_of_an_input, penalty, inner_loop, first_order, adversarial, saved_results, in_place_and_views,
    unused, leaf_backward, under_checkpoint, detached, vmapped, forward_mode,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_inside_forward(call):
    compare(Call(call, small()), [randn(3, 4)], 1e-4)


class Checkpoint(torch.autograd.Function):
    """Recomputation as diffusion models have it: parameters are inputs, and the backward runs the function again."""

    @staticmethod
    def forward(ctx, run, length, *args):
        ctx.run = run
        ctx.tensors = list(args[:length])
        ctx.parameters = list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.tensors = [x.detach().requires_grad_(True) for x in ctx.tensors]
        with torch.enable_grad():
            out = ctx.run(*[x.view_as(x) for x in ctx.tensors])
        slopes = torch.autograd.grad(out, ctx.tensors + ctx.parameters, gradients, allow_unused=True)
        del ctx.tensors, ctx.parameters, out
        return (None, None, *slopes)


def diffusion(blocks, x):
    for block in blocks:
        x = Checkpoint.apply(block.forward, 1, x, *block.parameters())
    return x


def fixed_point(layers, x):
    """A deep equilibrium: its backward solves with vector-Jacobian products of a function that it closes over."""
    inner, inject = layers

    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.clone()

    def backward(ctx, gradient):
        z = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = torch.tanh(inner(z))
        total = gradient
        for _ in range(4):
            total = gradient + torch.autograd.grad(result, z, total, retain_graph=True)[0]
        return total

    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(8):
            z = torch.tanh(inner(z) + inject(x))
    return differentiated(forward, backward).apply(torch.tanh(inner(z) + inject(x)))


def test_inside_a_backward():
    compare(Call(diffusion, nn.ModuleList([small(), small()])), [randn(3, 4)], 1e-4)
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4)])
    nn.init.normal_(layers[0].weight, std=0.2, generator=torch.Generator().manual_seed(1))
    compare(Call(fixed_point, layers), [randn(3, 4)], 1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_composes(transform):
    composes(transform, Call(penalty, small()), randn(5, 3, 4))


REFUSED = {
    # Reversible networks do this: each backward also adds to `grad`.
    "grad of a parameter": (
        lambda m, x: (m(x).sum().backward(), m(x))[1],
        r"`backward\(\)` inside.*`grad` of a parameter.*torch\.autograd\.grad",
    ),
    "a custom function in the graph": (
        lambda m, x: torch.autograd.grad(Doubled.apply(m(x)).sum(), m[0].weight)[0],
        r"Doubled may be part of its graph.*jax\.grad",
    ),
    "a custom function of a written constant": (
        lambda m, x: torch.autograd.grad(Doubled.apply(torch.zeros(3, 4).add_(m(x))).sum(), m[0].weight)[0],
        r"Doubled may be part of its graph.*jax\.grad",
    ),
    # The function that `torch.func.vjp` returns asks the engine; `torch.func.grad` and `jacrev` do not.
    "torch.func.vjp": (
        lambda m, x: torch.func.vjp(torch.tanh, Doubled.apply(m(x)))[1](torch.ones(3, 4))[0],
        r"torch\.func\.vjp returns\), and Doubled may be part of its graph.*Remedy: .*torch\.func\.grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    call, message = REFUSED[name]
    raises(message, Call(call, small()), torch.ones(3, 4))


def test_torch_func_grad_of_a_custom_function():
    def call(module, x):
        return torch.func.grad(lambda z: torch.tanh(z).sum())(Doubled.apply(module(x)))

    compare(Call(call, small()), [randn(3, 4)])


def result_written_later(module, x):
    h = module(x)
    y = h.exp()
    z = y.sum()
    y.mul_(2)
    return torch.autograd.grad(z + y.sum(), h)[0]


def constant_written_later(module, x):
    h = module(x)
    y = torch.ones(3, 4)
    y.mul_(h)
    z = y.square().sum()
    y.mul_(h)
    return torch.autograd.grad(z, h)[0]


@pytest.mark.parametrize("call", [result_written_later, constant_written_later])
def test_a_result_that_a_later_write_has_changed_is_pytorch_s_error(call):
    module = Call(call, small())
    for run in (module, lambda x: in_jax(module, x)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(torch.ones(3, 4))


# ---- A call that asks PyTorch's engine for a gradient and writes traced values into tensors that it made as constants


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def messages(module, x):
    """Forces of a graph network: the sum over edges starts from zeros."""
    x.requires_grad_()
    edges = torch.tensor([0, 1, 1])
    nodes = torch.zeros(3, 4).index_add_(0, edges, module(x)[edges] ** 2)
    energy = x.pow(3).sum() + nodes.sum()
    return -torch.autograd.grad(energy, x, create_graph=True)[0]


def view_from_before(module, x):
    """The write goes into a view that was made while all was constant, and another view shows it."""
    h = module(x)
    y = torch.eye(4)
    first = y[0]
    columns = y.t()
    first.add_(h.sum(0))
    columns[1].mul_(h[1])
    return torch.autograd.grad((y * y).sum() + first.exp().sum() + columns[0].prod(), h, create_graph=True)[0]


def scan(module, x):
    h = module(x)
    states = torch.zeros(3, 4)
    state = torch.zeros(4)
    for step in range(3):
        state = torch.tanh(state * 0.5 + h[step])
        states[step] = state
    return torch.autograd.grad(states.prod(0).sum(), [h, module.weight], create_graph=True)


def running_loss(module, x):
    h = module(x)
    loss = torch.zeros(())
    loss += h.square().sum()
    loss += module.weight.square().sum()
    return (*torch.autograd.grad(loss, [h, module.weight], create_graph=True), loss)


def partly_without_gradients(module, x):
    """Values written under `no_grad` are not part of the graph, and neither are detached ones."""
    h = module(x)
    y = torch.ones(3, 4)
    z = torch.ones(3, 4)
    y.mul_(h)
    with torch.no_grad():
        z.mul_(h)
    slope = torch.autograd.grad((y * z).sum() + (y.detach() * h).sum(), h, create_graph=True)[0]
    return slope, y, z


def leaf_written_backward(module, x):
    leaf = module(x).detach().requires_grad_()
    torch.zeros(3, 4).copy_(leaf).pow(3).sum().backward()
    return module(x) * leaf.grad


def written_again(module, x):
    """A constant that the first write made traced, and a clone of a constant."""
    h = module(x)
    base = torch.arange(12.0).reshape(3, 4)
    y = base.clone()
    y.sub_(h)
    y[:, 1:] *= h[:, :1]
    return torch.autograd.grad((y * base).sum(), h, create_graph=True)[0]


WRITES = [
    messages, view_from_before, scan, running_loss, partly_without_gradients, leaf_written_backward, written_again
]  # fmt: skip


@pytest.mark.parametrize("call", WRITES, ids=lambda f: f.__name__)
def test_writes_inside_forward(call):
    compare(Call(call, layer()), [randn(3, 4)], 1e-4)


def test_writes_inside_a_backward():
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.zeros_like(x).add_(x * x)

    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = torch.zeros(3, 4).add_(x * x)
        return torch.autograd.grad(out, x, gradient)

    square = differentiated(forward, backward)
    compare(Call(lambda module, x: square.apply(module(x)), layer()), [randn(3, 4)], 1e-4)


def test_large_tensors_that_a_formula_of_gradients_fills():
    """The slope of SiLU is computed as `ones_like(x).sub_(y)`, and PyTorch does not count that write."""

    def slope(x):
        x = x * 1
        return torch.autograd.grad(F.silu(x).sum(), x)[0]

    x = randn(260, 256)
    np.testing.assert_allclose(in_jax(slope, x, jit=True), slope(x.requires_grad_()), atol=1e-6)


def test_the_graph_of_a_call_before_is_gone():
    """Documented as different by nature: a buffer is a value between two calls."""

    def decaying(m):
        m.b = m.b * 0.5 + m.w[0, 0] ** 2
        return torch.autograd.grad(m.b, m.w, create_graph=True)[0][0, 0]

    module = Calls(decaying, b=nn.Buffer(torch.tensor(0.0)))
    fn = bridge.export(module)
    first, buffers = fn(fn.params, fn.buffers)
    second, _ = fn(fn.params, buffers)
    assert [module().item(), module().item()] == [1, 1 + 0.5]
    assert [float(first), float(second)] == [1, 1]


# ---- The gradient of an operation that the call itself asks for: PyTorch's formula, on what the lowerings return

MATRICES = randn(2, 4, 4)
IMAGES = randn(2, 3, 7, 6)
BAGS = torch.tensor([[0, 1], [2, 3]])
LABELS = torch.tensor([[1, 2], [2, 1], [3, 1], [1, 3]])


def made(kind, *sizes, **options):
    torch.manual_seed(0)
    return kind(*sizes, **options)


def unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, 2, return_indices=True), 2)


OPERATIONS = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "logdet": lambda x: torch.logdet(x @ x.mT),
    "eigh": lambda x: torch.cat([each.abs().flatten() for each in torch.linalg.eigh(x)]),
    "eigvals": lambda x: torch.linalg.eigvals(x).abs(),
    "inv": lambda x: torch.linalg.inv(x + 3 * torch.eye(4)),
    "svdvals": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x)[1],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)),
    "solve": lambda x: torch.linalg.solve(x + 3 * torch.eye(4), x),
    "lu": lambda x: torch.linalg.lu(x)[1],
    "matrix_exp": torch.matrix_exp,
    "conv2d": lambda x: F.conv2d(x, x[:, :, :2, :2], padding=1),
    "avg_pool2d": lambda x: F.interpolate(F.avg_pool2d(x, 2, 1), scale_factor=2.0, mode="bilinear"),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), 1, True),
    "dilated max_pool2d": lambda x: F.max_pool2d(x, 2, 2, 0, 2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "max_unpool2d": unpooled,
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)),
    "ctc_loss": lambda x: F.ctc_loss(
        torch.cat([x, x]).log_softmax(-1), LABELS, torch.full((4,), 4), torch.full((4,), 2)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "nn.MultiheadAttention": lambda x: made(nn.MultiheadAttention, 4, 2, batch_first=True)(x, x, x)[0],
    "nn.TransformerEncoderLayer": lambda x: made(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)(x),
    "nn.LSTM": lambda x: made(nn.LSTM, 4, 4)(x)[0],
    "nn.GRU": lambda x: made(nn.GRU, 4, 4)(x)[0],
    "embedding_bag, mean": lambda x: F.embedding_bag(BAGS, x[0], mode="mean", padding_idx=1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "grid_sample": lambda x: F.grid_sample(x[:, None], x[:, None, :, :2].tanh(), align_corners=False),
    "volumes": lambda x: F.grid_sample(x[None], x[:1, :, :, None, :3].tanh(), align_corners=True),
    "margins": lambda x: F.multi_margin_loss(x[0], LABELS[:, 0], reduction="none"),
    "margins of several labels": lambda x: F.multilabel_margin_loss(x[0], torch.tensor([[3, 0, -1, 1]] * 4)),
    "interpolate": lambda x: F.interpolate(x, size=(5, 9), mode="bicubic"),
    "masked_scatter": lambda x: (x * 2).masked_scatter(x > 0, x.flatten()[1:].tanh() @ torch.ones(31, 31)),
    "pdist": lambda x: F.pdist(x[0]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "sort": lambda x: x.sort(-1)[0],
    "median": lambda x: x.median(-1)[0],
    "cummax": lambda x: x.cummax(-1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "stft": lambda x: torch.stft(x.reshape(1, -1), 8, window=torch.ones(8), return_complex=True).abs(),
    "convolution": lambda x: F.conv1d(F.pad(x, (1, 1), mode="circular"), x[:1, :, :3].expand(3, 4, 3)),
    "transposed convolution": lambda x: F.conv_transpose1d(F.pad(x, (1, 1), mode="circular"), x[0, :, None, :3]),
}
"""`F.pad` with `circular` writes into a tensor that it makes."""
OF_IMAGES = (
    "conv2d", "avg_pool2d", "max_pool2d", "dilated max_pool2d", "max_pool3d", "max_unpool2d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "volumes", "batch_norm", "group_norm",
    "interpolate",
)  # fmt: skip


def weighed(name, x):
    out = OPERATIONS[name](x)
    return (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape).cos()).sum()


FAST = ["det", "conv2d", "avg_pool2d", "attention", "convolution"]


@pytest.mark.parametrize("name", slow_unless(FAST.__contains__, OPERATIONS))
def test_by_the_engine(name):
    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(weighed(name, x), x)[0]

    compare(slope, [IMAGES if name in OF_IMAGES else MATRICES], 2e-4)


@pytest.mark.parametrize("name", slow_unless(["convolution"].__contains__, OPERATIONS))
def test_by_torch_func(name):
    def slope(x):
        return torch.func.grad(lambda x: weighed(name, x))(x.detach())

    compare(slope, [IMAGES if name in OF_IMAGES else MATRICES], 2e-4)
