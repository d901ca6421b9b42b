"""Gradients: the operations through which they flow, and those at which they stop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, array, compare, differentiated, in_jax, raises, randn, verified
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.autograd.nondifferentiable import without_derivative

# ---- A stopped gradient is stopped for every tensor: buffers and complex numbers too, which PyTorch does not track

X = randn(3, 4)


def recurrent(cut):
    """A hidden state in a buffer; `cut` ends the gradient between two calls."""

    def forward(m, x):
        m.h = torch.tanh(x + cut(m.h) @ m.w)
        return m.h * 1

    return Calls(forward, w=nn.Parameter(randn(4, 4)), h=nn.Buffer(randn(3, 4)))


def without_grad(h):
    with torch.no_grad():
        return torch.tanh(h) * 2


def view_without_grad(h):
    with torch.no_grad():
        return h.view(-1)[:12].view(3, 4)


def written_without_grad(h):
    out = torch.ones_like(h)
    with torch.no_grad():
        out.copy_(h)
    return out


def filled_in_place(h):
    """A write while gradients are off keeps the path of what was there, which the buffer is a part of."""
    out = h * 2
    with torch.no_grad():
        out.mul_(0.5)
    return out


def by_data(h):
    out = torch.zeros_like(h)
    out.data = h.data * 1.5
    return out


def written_after_detach(h):
    """The detached tensor shares the memory and sees the write, not its gradient."""
    base = torch.zeros_like(h)
    seen = base.detach()
    base.add_(h)
    return seen + h.new_zeros(())


def random_around(h):
    return torch.normal(h, 0.0 * h.detach() + 1e-20)


CUTS = {
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "no_grad": without_grad,
    "view": view_without_grad,
    "write": written_without_grad,
    "kept": filled_in_place,
    "data =": by_data,
    "after detach": written_after_detach,
    "normal": random_around,
}


@pytest.mark.parametrize("name", CUTS)
def test_two_calls_inside_one_gradient(name):
    """Truncated backpropagation: the second call reads what the first one wrote into a buffer."""
    module = recurrent(CUTS[name])
    fn = bridge.export(recurrent(CUTS[name]))
    sum((module(X + i) ** 2).sum() for i in range(2)).backward()
    expected = module.w.grad.numpy()

    def loss(params):
        buffers = fn.buffers
        total = 0.0
        for i in range(2):
            out, buffers = fn(params, buffers, X.numpy() + i, rng=jax.random.key(i))
            total = total + (out**2).sum()
        return total

    found = jax.jit(jax.grad(loss))(fn.params)["w"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def complex_without_grad(h):
    with torch.no_grad():
        return h * 2


@pytest.mark.parametrize("cut", [lambda h: h.detach(), lambda h: h, complex_without_grad])
def test_complex_numbers(cut):
    def call(linear, x):
        h = torch.fft.fft(linear(x))
        assert h.requires_grad
        return cut(h).abs() + linear(x)

    compare(Call(call, nn.Linear(4, 4)), [X], 1e-5)


# ---- Gradient hooks are PyTorch's engine's: they are refused by one error, wherever they hang, and never left out


def double(gradient):
    return gradient * 2


INSIDE = {
    "register_hook": lambda linear, h: h.register_hook(double),
    "register_hook of a parameter": lambda linear, h: linear.weight.register_hook(double),
    "retain_grad": lambda linear, h: h.retain_grad(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_hook_registered_inside(name):
    def call(linear, x):
        h = linear(x)
        INSIDE[name](linear, h)
        return h.sum()

    message = rf"`{name.split()[0]}`.*in the module itself.*autograd\.Function"
    raises(message, Call(call, nn.Linear(4, 4)), jnp.ones((2, 4)))


def nothing(*_):
    pass


OUTSIDE = {
    "parameter": (lambda m: m[0].weight.register_hook(double), "parameter 0.weight"),
    "accumulated": (lambda m: m[0].weight.register_post_accumulate_grad_hook(nothing), "parameter 0.weight"),
    "module": (lambda m: m[1].register_full_backward_hook(nothing), "module 1"),
    "before": (lambda m: m[1].register_full_backward_pre_hook(nothing), "module 1"),
    "globally": (lambda m: nn.modules.module.register_module_full_backward_hook(nothing), "every module"),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("late", [False, True], ids=["before export", "after export"])
def test_a_hook_registered_outside(name, late):
    module, (register, where) = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), OUTSIDE[name]
    fn = bridge.export(module)
    handle = register(module)
    try:
        with pytest.raises(bridge.BridgeError, match=f"{where} has a gradient hook.*remove"):
            if late:
                fn(fn.params, fn.buffers, jnp.ones((2, 4)))
            else:
                bridge.export(module)
    finally:
        handle.remove()
    fn(fn.params, fn.buffers, jnp.ones((2, 4)))


def test_a_module_hook_registered_inside():
    def call(linear, x):
        linear.register_full_backward_hook(nothing)
        return linear(x)

    raises("hook", Call(call, nn.Linear(4, 4)), jnp.ones((2, 4)))


def test_forward_hooks_are_kept():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module[1].register_forward_hook(lambda m, inputs, output: output * 3)
    verified(module, torch.ones(2, 4))


# ---- Inputs require no grad, as in PyTorch where nobody asks for their gradient; JAX has it all the same


def product(ctx, x, y):
    ctx.save_for_backward(x, y)
    return x * y


def slopes_that_are_asked_for(ctx, gradient):
    (x, y), (of_x, of_y) = ctx.saved_tensors, ctx.needs_input_grad
    return gradient * y * 3 if of_x else None, gradient * x * 5 if of_y else None


NEEDY = differentiated(product, slopes_that_are_asked_for)


def branches(x):
    seen = [x.requires_grad, (x * 2).requires_grad, x[0].requires_grad, torch.nn.functional.relu(x).requires_grad]
    return x + torch.tensor([float(s) for s in seen])


def test_inputs_and_what_comes_of_them_do_not_require_grad():
    np.testing.assert_array_equal(in_jax(branches, X), branches(X).numpy())


def test_with_a_parameter_results_do():
    module = Call(lambda m, x: x * (2.0 if m(x).requires_grad else 3.0), nn.Linear(4, 4))
    compare(module, [randn(3, 4)])


def required_inside(x):
    h = x * 2
    x.requires_grad_()
    seen = [x.requires_grad, h.requires_grad, (x * 2).requires_grad]
    return x * x * h.detach() + torch.tensor([float(s) for s in seen]).sum()


def test_an_input_made_to_require_grad_inside():
    """The caller then finds its `grad` in PyTorch."""
    x = randn(3, 4)
    fn = bridge.export(Call(required_inside))
    out, slope = jax.jit(jax.value_and_grad(lambda x: fn({}, {}, x)[0].sum()))(array(x))
    expected = required_inside(x).sum()
    expected.backward()
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(slope, x.grad, rtol=1e-5)


def test_the_gradient_of_an_input_goes_through_a_custom_function():
    inputs = [randn(3, 4), randn(3, 4, seed=2)]
    compare(NEEDY.apply, inputs)
    compare(lambda x, y: NEEDY.apply(x + 1, y.sin()), inputs)


# ---- Functions that PyTorch does not differentiate: no gradient where it has none, an error where it raises one

POSITIVE = randn(3)
Y = randn(3, seed=2).abs() + 0.5
PLACES = torch.tensor([0, 1, 2])

REFUSED = {
    "heaviside": torch.heaviside,
    "floor division": lambda x, y: x // y,
    "floor division in place": lambda x, y: (x * 1).floor_divide_(y),
    "product scattered": lambda x, y: x.scatter(0, PLACES, y, reduce="multiply"),
}
SILENT = {
    "histc": lambda x, y: torch.histc(x.detach(), 3) + y,
    "floor division, compared": lambda x, y: torch.where(x // y > 0, x, y),
    "floor division, as an index": lambda x, y: y[(x // 9).long().abs()] * x,
    "heaviside without gradients": lambda x, y: no_grad(torch.heaviside, x, y) * x,
    "gammainc by its second": lambda x, y: torch.special.gammainc(torch.ones(3), y) + x,
    "soft_margin_loss by its first": lambda x, y: F.soft_margin_loss(x, torch.ones(3)) + y,
    "nextafter": torch.nextafter,
}


def no_grad(function, *args):
    with torch.no_grad():
        return function(*args)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_pytorch_has_no_derivative(name):
    with pytest.raises((RuntimeError, NotImplementedError), match=r"not implemented|not differentiable"):
        REFUSED[name](POSITIVE.clone().requires_grad_(), Y.clone().requires_grad_()).sum().backward()
    fn = bridge.export(Call(REFUSED[name]))

    def call(x, y):
        return fn({}, {}, x, y)[0]

    def beside(x, y):
        return (x * y).sum(), call(x, y)

    arrays = POSITIVE.numpy(), Y.numpy()
    with pytest.raises(bridge.BridgeError, match=r"has no derivative of `\w+`.* in the module itself"):
        jax.eval_shape(jax.grad(lambda x, y: call(x, y).sum(), (0, 1)), *arrays)
    with pytest.raises(bridge.BridgeError, match="has no derivative"):
        jax.jit(lambda *tangents: jax.jvp(call, arrays, tangents)).lower(*arrays)
    jax.eval_shape(jax.grad(beside, (0, 1), has_aux=True), *arrays)
    np.testing.assert_allclose(call(*arrays), REFUSED[name](POSITIVE, Y), rtol=2e-5)


@pytest.mark.parametrize("name", SILENT)
def test_no_gradient_where_pytorch_has_none(name):
    compare(SILENT[name], [POSITIVE, Y])


def test_requires_grad_is_that_of_pytorch():
    def function(linear, x):
        made = torch.histc(linear.weight), linear.weight // 2, torch.heaviside(linear.weight, x)
        return [t.requires_grad for t in made]

    module = Call(function, nn.Linear(1, 3))
    assert module(torch.ones(3, 1)) == in_jax(module, torch.ones(3, 1)) == [False, True, True]


def rounded(x):
    return without_derivative(jnp.floor(x), [x], "there is none")


def test_the_error_comes_only_where_a_cotangent_does():
    x = jnp.ones(3)

    def scanned(x):
        return jax.lax.scan(lambda c, _: ((c[0] * x, rounded(c[0])), None), (x, x), None, length=2)[0][0].sum()

    def beside(x):
        return (x * x).sum(), rounded(x)

    for function in (beside, jax.jit(beside), jax.checkpoint(beside)):
        assert (jax.grad(function, has_aux=True)(x)[0] == 2).all()
    assert (jax.grad(scanned)(x) == 3).all()
    assert (jax.vmap(jax.grad(beside, has_aux=True))(x)[0] == 2).all()
    with pytest.raises(bridge.BridgeError, match="there is none"):
        jax.vmap(jax.grad(lambda x: rounded(x) * x))(x)
    with pytest.raises(bridge.BridgeError, match="there is none"):
        jax.hessian(lambda x: (rounded(x * x)).sum())(x)


# ---- Entries that are compared with their largest one under `jit`, where XLA computes them again with another rounding

CASES = {
    "amax": lambda h: h.amax(0),
    "amax of two dimensions": lambda h: h.amax((0, 2)),
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=0)),
    "max": lambda h: h.max(),
    "median": lambda h: h.median(),
    "norm": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=0),
    "distances": lambda h: torch.cdist(h.flatten(1), h.flatten(1) * 0.3, p=float("inf")),
    "scatter_reduce": lambda h: torch.full((1, 4, 5, 6), -9.0).scatter_reduce(0, h.long() * 0, h, "amax"),
    "cummax": lambda h: h.cummax(0).values,
    "pooling": lambda h: F.max_pool2d(h, 2, 1, 1, return_indices=True)[0],
    "dilated pooling": lambda h: F.max_pool2d(h, 2, 1, 1, dilation=2),
    "adaptive pooling": lambda h: F.adaptive_max_pool2d(h, (2, 3)),
    "kthvalue": lambda h: h.kthvalue(2, 0).values,
    "logsumexp": lambda h: h.logsumexp(0),
    "logcumsumexp": lambda h: h.logcumsumexp(0),
}


class Normalised(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm = nn.GroupNorm(3, 6)
        self.function = function
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5, generator=generator)
            self.norm.bias.normal_(generator=generator)

    def forward(self, x):
        return self.function(self.norm(x).transpose(1, 3))


def gradients(fn, x, weights):
    def loss(params, x):
        return (fn(params, fn.buffers, x)[0] * weights).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(fn.params, x)


@pytest.fixture
def as_users_compile():
    """Compiles with all of XLA's optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


RED_BEFORE = {"amax", "aminmax", "norm", "distances", "scatter_reduce"}


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", slow_unless(RED_BEFORE.__contains__, CASES))
def test_gradient_under_jit(name):
    for seed in range(2):
        x = torch.randn(4, 6, 5, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        module = Normalised(CASES[name])
        out = module(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        (out * weights).sum().backward()
        ours = gradients(bridge.export(module), array(x.detach()), array(weights))
        largest = float(x.grad.abs().max())
        np.testing.assert_allclose(ours[1], x.grad.numpy(), rtol=0, atol=1e-5 * largest)
        largest = float(module.norm.bias.grad.abs().max())
        np.testing.assert_allclose(ours[0]["norm.bias"], module.norm.bias.grad.numpy(), rtol=0, atol=1e-5 * largest)


def eval_then_train(norm, x):
    norm.eval()
    first = norm(x)
    norm.train()
    return first.sin().sum() + 0 * norm(x).sum()


def test_batch_norm_in_eval_and_then_in_train_mode_has_the_derivative_of_its_result():
    x = randn(6, 3, seed=0) * 3
    fn = bridge.export(Call(eval_then_train, nn.BatchNorm1d(3)))
    slope = jax.jit(jax.grad(lambda x: fn(fn.params, fn.buffers, x, train=True)[0]))(array(x))
    step = torch.zeros(6, 3, dtype=torch.float64)
    wide = x.double()
    step[0, 0] = 1e-6
    with torch.no_grad():
        high, low = (eval_then_train(nn.BatchNorm1d(3).double(), wide + sign * step) for sign in (1, -1))
    assert float(slope[0, 0]) == pytest.approx(float(high - low) / 2e-6, rel=1e-4)
