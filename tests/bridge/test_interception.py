"""Engine, dispatcher and threads of PyTorch's inside `forward`: as in PyTorch, or one error that no `except` hides."""

import concurrent.futures
import contextlib
import queue
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn
from torch.autograd import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bridge

X = randn(2, 3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


# ---- derivatives by `torch.autograd.functional`

DERIVATIVES = {
    "jacobian": lambda m, x: functional.jacobian(lambda t: m(t).sin(), x[0], create_graph=True),
    "jacobian of an intermediate": lambda m, x: functional.jacobian(torch.sin, m(x)[0], create_graph=True),
    "jacobian, vectorized": lambda m, x: functional.jacobian(torch.sin, x[0], create_graph=True, vectorize=True),
    "hessian": lambda m, x: functional.hessian(lambda t: m(t).exp().sum(), x[0], create_graph=True),
    "vjp": lambda m, x: functional.vjp(lambda t: m(t).sin(), x, torch.ones(2, 3), create_graph=True)[1],
    "jvp": lambda m, x: functional.jvp(lambda t: m(t).sin(), x, torch.ones(2, 3), create_graph=True)[1],
    "hvp": lambda m, x: functional.hvp(lambda t: (m(t) ** 3).sum(), x[0], torch.ones(3), create_graph=True)[1],
    "vhp": lambda m, x: functional.vhp(lambda t: (m(t) ** 3).sum(), x[0], torch.ones(3), create_graph=True)[1],
    "without a graph": lambda m, x: functional.jacobian(lambda t: m(t).sin(), x[0]) @ x[1],
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_have_gradients(name):
    compare(Call(DERIVATIVES[name], linear()), [X], 1e-4)


# ---- hooks on saved tensors


def saved_on_cpu(module, x):
    with torch.autograd.graph.save_on_cpu():
        return (module(x).exp() * x).sin()


def saved_on_cpu_for_a_gradient(module, x):
    with torch.autograd.graph.save_on_cpu():
        h = module(x).exp()
        return torch.autograd.grad(h.sum(), module.weight, create_graph=True)[0]


def test_saving_on_the_cpu_changes_nothing():
    compare(Call(saved_on_cpu, linear()), [X])


def test_saving_on_the_cpu_for_a_gradient_inside_is_refused():
    fn = bridge.export(Call(saved_on_cpu_for_a_gradient, linear()))
    with pytest.raises(bridge.BridgeError, match="`saved_tensors_hooks` act on"):
        fn(fn.params, fn.buffers, jnp.asarray(X.numpy()))


def swallowed(context):
    def call(module, x):
        with contextlib.suppress(Exception), context():
            return module(x).sin()
        return x

    return call


class Rounding(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(torch.round, torch.round)


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * (2 if func is torch.ops.aten.sin.default else 1)


class Subtracting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sub if func in (torch.add, torch.Tensor.add) else func)(*args, **(kwargs or {}))


def subtracted(module, x):
    with Subtracting():
        return torch.add(module(x), x) + x.add(2.0)


class Scaled:
    """No tensor, but PyTorch asks it first."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = func(*(a.tensor if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls(result * 2 + result.requires_grad)


@torch.jit.script
def scripted(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = torch.tanh(x) * 2
    return x


def test_a_scripted_function_is_traced():
    compare(Call(lambda m, x: scripted(m(x), 3), linear()), [X])


def test_a_class_that_is_no_tensor_is_asked():
    def forward(x):
        x.requires_grad_()
        out = [F.linear(Scaled(x), torch.ones(3, 3)), F.scaled_dot_product_attention(*[Scaled(x)] * 3)]
        return [o.tensor for o in (*out, torch.tanh(Scaled(x)))]

    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    report = bridge.verify(Call(forward), x, input_gradients=False)
    assert report.ok, f"\n{report}"


def test_a_function_mode_is_pytorch_s():
    compare(Call(subtracted, linear()), [X])


class Own(torch.Tensor):
    pass


def as_subclass(module, x):
    with contextlib.suppress(Exception):
        return module(x).as_subclass(Own)
    return x


def of_an_own_class(module, x):
    with contextlib.suppress(Exception):
        return module(torch.Tensor.as_subclass(x, Own))
    return x


def thread(module, x):
    out = {}
    worker = threading.Thread(target=lambda: out.update(y=module(x)))
    with contextlib.suppress(BaseException):
        worker.start()
        worker.join()
    return out.get("y", x)


def pool(module, x):
    with contextlib.suppress(RuntimeError), concurrent.futures.ThreadPoolExecutor(1) as workers:
        return workers.submit(module, x).result()
    return x


def iterator(module, x):
    return {"rows": (module(row) for row in x)}


def condition(module, x):
    with contextlib.suppress(Exception):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (module(x),))
    return x


def memory_of_another(module, x):
    y = torch.zeros(2, 3)
    with contextlib.suppress(Exception):
        y.set_(x.detach() * 2)
    return y


def other_data(module, x):
    h = module(x)
    with contextlib.suppress(Exception):
        h.data = x[0]
    return h


REFUSED = {
    "saved_tensors_hooks": (swallowed(Rounding), "`saved_tensors_hooks` act on"),
    "a dispatch mode": (swallowed(Doubling), "`Doubling` is a TorchDispatchMode"),
    "as_subclass": (as_subclass, r"`as_subclass\(Own\)`"),
    "as_subclass by the class": (of_an_own_class, "outside the call.*another class"),
    "a thread": (thread, "met a traced tensor outside the call.*another thread"),
    "a pool of threads": (pool, "met a traced tensor outside the call.*another thread"),
    "an iterator": (iterator, "returns an iterator"),
    "torch.cond": (condition, "`torch.cond` and its like"),
    "set_": (memory_of_another, "`aten::set_.*has no translation.*the memory of another"),
    "data of another shape": (other_data, "`.data = …` gives a tensor another shape"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_that_nothing_hides(name):
    call, text = REFUSED[name]
    fn = bridge.export(Call(call, linear()))
    with pytest.raises(bridge.BridgeError, match=rf"{text}.* in (the )?module.*Remedy: "):
        jax.jit(lambda x: fn(fn.params, fn.buffers, x)[0])(jnp.ones((2, 3)))
    call(linear(), X)  # and PyTorch goes on as before


def test_as_subclass_of_the_plain_class():
    compare(Call(lambda m, x: m(x).as_subclass(torch.Tensor) * 2, linear()), [X])


def test_a_tensor_kept_after_the_call_does_not_reach_the_next_one():
    kept = queue.SimpleQueue()  # whose contents are not seen as state

    def call(module, x):
        if not kept.empty():
            with contextlib.suppress(RuntimeError):
                kept.get() + 1
        kept.put(x)
        return x

    fn = bridge.export(Call(call, linear()))
    fn(fn.params, fn.buffers, jnp.ones(3))
    with pytest.raises(bridge.BridgeError, match="outside the call that made it"):
        kept.get() + 1
    fn(fn.params, fn.buffers, jnp.ones(3))
