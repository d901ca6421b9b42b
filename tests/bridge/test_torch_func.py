"""Transformations of `torch.func` inside `forward`: their levels wrap tensors of the bridge and mean what they mean."""

import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import bridge

X, RUNNING = randn(3, 4), randn(3).abs()


class Cubed(torch.autograd.Function):
    """With a gradient that is not its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 5


class Exponential(torch.autograd.Function):
    """With derivatives for both modes, of its own result."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0]


def attention(x, **settings):
    return F.scaled_dot_product_attention(x, x * 0.5, torch.sin(x), **settings)


def parameters(module):
    return dict(module.named_parameters())


def squared(module):
    return lambda p, x: functional_call(module, p, (x,)).square().sum()


def ensemble(module, x):
    """Two copies with other weights, called at once."""
    stacked = {name: torch.stack([p, p * 2]) for name, p in module.named_parameters()}
    return vmap(lambda p: functional_call(module, p, (x,)))(stacked)


def inner_step(module, x):
    """MAML: the loss after one step of gradient descent on the module's own parameters."""
    slopes = grad(squared(module))(parameters(module), x)
    stepped = {name: p - 0.1 * slopes[name] for name, p in module.named_parameters()}
    return squared(module)(stepped, x)


def in_place(x):
    y = x.clone()
    y[0] += 1
    y.mul_(x)
    return y


def with_detach(x):
    return (x * x.detach() + x.data).sum()


def without_grad(x):
    with torch.no_grad():
        scale = x.square()
    return (x * scale).sum()


LINEAR = {
    "vmap": lambda m, x: vmap(m)(x),
    "vmap over weights": lambda m, x: vmap(lambda w: F.linear(x, w))(torch.stack([m.weight, m.weight * 2])),
    "vmap over vmap": lambda m, x: vmap(vmap(m))(x.expand(2, 3, 4)),
    "grad": lambda m, x: grad(lambda x: m(x).sin().sum())(x),
    "gradient for each example": lambda m, x: vmap(grad(squared(m)), (None, 0))(parameters(m), x)["weight"],
    "jvp": lambda m, x: jvp(lambda x: m(x).sin(), (x,), (torch.ones_like(x),)),
    "jvp along an expanded tangent": lambda m, x: jvp(lambda x: m(x).sin(), (x,), (x[:, :1].expand_as(x),)),
    "jvp of vectors": lambda m, x: jvp(lambda x: m(x).outer(x @ m.weight.T), (x[1],), (m.weight[0],)),
    "jacfwd of a column": lambda m, x: jacfwd(lambda z: m(z).outer(z) @ z)(x.T.contiguous()[:, 1]),
    "vjp": lambda m, x: vjp(m, x)[1](torch.sin(x))[0],
    "jacrev": lambda m, x: jacrev(lambda x: m(x).tanh())(x[0]),
    "jacfwd": lambda m, x: jacfwd(lambda x: m(x).tanh())(x[0]),
    "hessian": lambda m, x: hessian(lambda x: m(x).tanh().sum())(x[0]),
    "ensemble": ensemble,
    "inner step": inner_step,
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    torch.manual_seed(0)
    compare(Call(LINEAR[name], nn.Linear(4, 4)), [X])


FUNCTIONS = {
    "attention under vmap": lambda x: vmap(attention)(x.reshape(2, 1, 3, 4)),
    "causal attention under vmap": lambda x: vmap(lambda x: attention(x, is_causal=True))(x.reshape(2, 1, 3, 4)),
    "attention under grad": lambda x: grad(lambda x: attention(x).sin().sum())(x.reshape(1, 2, 3, 4)),
    "quantile under jvp": lambda x: jvp(lambda x: x.quantile(0.3), (x.detach(),), (x.cos(),)),
    "attention under jvp": lambda x: jvp(attention, (x.reshape(1, 2, 3, 4),), (torch.ones(1, 2, 3, 4),)),
    "layer norm": lambda x: vmap(grad(lambda x: F.layer_norm(x, (3, 4)).sin().sum()))(x),
    "softmax": lambda x: vmap(jacrev(lambda x: x.softmax(-1)))(x.reshape(6, 4)),
    "convolution": lambda x: vmap(grad(lambda x: F.conv1d(x, torch.ones(2, 3, 2)).sin().sum()))(x[:, None]),
    "group norm": lambda x: grad(lambda x: F.group_norm(x, 3).sin().sum())(x.repeat(1, 2, 1)),
    "batch norm in evaluation": lambda x: grad(lambda x: F.batch_norm(x, RUNNING, RUNNING + 1).sin().sum())(x),
    "batch norm": lambda x: grad(lambda x: F.batch_norm(x, None, None, training=True).sin().sum())(x),
    "average pooling": lambda x: grad(lambda x: F.avg_pool2d(x, 2, 1).sin().sum())(x),
    "adaptive pooling": lambda x: grad(lambda x: F.adaptive_avg_pool2d(x, (2, 3)).sin().sum())(x),
    "bilinear": lambda x: grad(lambda x: F.interpolate(x[None], (5, 7), mode="bilinear").sin().sum())(x),
    "nearest": lambda x: grad(lambda x: F.interpolate(x, scale_factor=2).sin().sum())(x),
    "replication": lambda x: grad(lambda x: F.pad(x, (1, 2), mode="replicate").sin().sum())(x),
    "max pooling": lambda x: grad(lambda x: F.max_pool2d(x, 2, 1).sin().sum())(x),
    "embedding": lambda x: grad(lambda x: F.embedding(torch.tensor([0, 1, 1]), x[0]).sin().sum())(x),
    "in place": lambda x: vmap(in_place)(x),
    "detach": lambda x: vmap(grad(with_detach))(x),
    "no_grad": lambda x: vmap(grad(without_grad))(x),
    "custom function under grad": lambda x: grad(lambda x: Cubed.apply(x).sum())(x),
    "custom function under vmap": lambda x: vmap(Cubed.apply)(x),
    "custom function under jvp": lambda x: jvp(Exponential.apply, (x,), (x.cos(),)),
    "custom function under jvp of grad": lambda x: jvp(
        grad(lambda x: Exponential.apply(x).sum()), (x,), (torch.ones_like(x),)
    ),
    "take_along_dim": lambda x: vmap(lambda x: torch.take_along_dim(x, x.argsort(-1), -1))(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernel has no second derivative
        compare(Call(FUNCTIONS[name]), [randn(2, 3, 4)])


def test_one_hot():
    """PyTorch's own insists on knowing the number of classes under `vmap`, and has it here."""
    compare(Call(lambda i: vmap(lambda i: F.one_hot(i, 5).float())(i)), [torch.tensor([[1, 2], [0, 4]])])


def test_an_ensemble_by_stack_module_state():
    """Of modules that `export` does not see: their weights are constants."""
    torch.manual_seed(0)
    params, buffers = stack_module_state([nn.Linear(4, 2), nn.Linear(4, 2)])
    params = {name: p.detach() for name, p in params.items()}
    template = nn.Linear(4, 2)
    compare(Call(lambda x: vmap(lambda p, b: functional_call(template, (p, b), (x,)))(params, buffers)), [X])


@pytest.fixture
def restored_validation():
    """PyTorch's compiler, which `linearize` imports, turns the checks of distributions off."""
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


def test_linearize_is_refused(restored_validation):
    fn = bridge.export(Call(lambda m, x: torch.func.linearize(m, x)[1](x), nn.Linear(4, 4)))
    with pytest.raises(bridge.BridgeError, match=r"`torch.func.linearize` and .* record a graph.*Remedy: "):
        fn(fn.params, {}, X.numpy())


def test_dual_tensors():
    """Forward-mode derivatives by `torch.autograd.forward_ad`, with a gradient of them."""
    layer = nn.Linear(4, 3)

    def tangent(layer, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(torch.tanh(layer(forward_ad.make_dual(x, x * 0.5)))).tangent

    compare(Call(tangent, layer), [randn(2, 4)])


def test_a_function_of_a_dual_tensor_is_refused():
    def forward(x):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(Exponential.apply(forward_ad.make_dual(x, torch.ones_like(x)))))

    with pytest.raises(bridge.BridgeError, match=r"Exponential is applied to a dual tensor.*torch\.func\.jvp"):
        bridge.export(Call(forward))({}, {}, X.numpy())
