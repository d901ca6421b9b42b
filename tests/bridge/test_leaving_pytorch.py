"""Python code that takes a traced tensor out of PyTorch, or meets PyTorch's engine, dispatcher and threads."""

import contextlib
import copy
import pickle
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, Restored, compare, in_jax, raises, randn, verified
from torch import nn
from torch.autograd import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bridge

# ---- Python code that takes a traced tensor out of PyTorch, copies it, or brings a tensor that is no plain one

X = randn(3, 4)


def copied_weight(module, x):
    with torch.no_grad():
        teacher = copy.deepcopy(module)
        teacher.weight.mul_(2)
    return module(x) * teacher(x).detach() + copy.deepcopy(module)(x)


def tied_copies(module, x):
    first, second = copy.deepcopy((module.weight, module.weight))
    assert first is second and isinstance(first, nn.Parameter) and first.requires_grad
    return x @ first.T


def shallow(module, x):
    alias = copy.copy(module.weight)
    with torch.no_grad():
        module.weight.add_(1)
    return x @ alias.T + module(x)


def fresh_parameter(module, x):
    return x @ nn.Parameter(module.weight.detach() * 2).T + module(x)


def full_of_weight(module, x):
    with torch.no_grad():
        factor = torch.full((4,), module.weight.mean(), out=torch.empty(4))
    return factor * module(x)


RIGHT = {
    "deepcopy of a module": copied_weight,
    "deepcopy of a tied weight": tied_copies,
    "copy of a weight": shallow,
    "deepcopy of an input": lambda m, x: copy.deepcopy(x) * m(x),
    "deepcopy of a detached result": lambda m, x: copy.deepcopy(m(x).detach()) * m(x),
    "a new parameter": fresh_parameter,
    "torch.tensor of numbers": lambda m, x: torch.tensor([x[0, 0], x[1, 1], 2.0, True]) * m(x),
    "torch.tensor of lists": lambda m, x: torch.tensor([[x[0, 0], 1], [3, x[2, 2]]]) @ m(x)[:2],
    "torch.tensor of one-element tensors": lambda m, x: torch.tensor([x[0, :1], x[1, :1], 1, 2]) * m(x),
    "torch.tensor with dtype": lambda m, x: torch.tensor([x[0, 0] * 9] * 4, dtype=torch.bfloat16) * m(x),
    "new_tensor": lambda m, x: m(x).new_tensor([x[0, 0], 1, 2, 3]) * m(x),
    "a leaf": lambda m, x: torch.tensor([x[0, 0]] * 4, requires_grad=True) * m(x),
    "torch.tensor of a tensor": lambda m, x: torch.as_tensor(x[0]) * m(x),
    "torch.full": lambda m, x: torch.full((4,), x.detach().mean()) * m(x),
    "torch.full of a weight": full_of_weight,
    "full_like": lambda m, x: torch.full_like(x, dtype=torch.int32, fill_value=9 * x.detach()[0, 0]) * m(x),
    "new_full": lambda m, x: x.new_full(fill_value=x.detach().sum() > 0, size=(4,)) * m(x),
    "scalar_tensor": lambda m, x: torch.scalar_tensor(x.detach().sum()) * m(x),
    "keywords": lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
}


@pytest.mark.parametrize("name", RIGHT)
def test_is_pytorch_s(name):
    torch.manual_seed(0)
    compare(Restored(Call(RIGHT[name], nn.Linear(4, 4))), [X])


FILLED = {
    "torch.full": lambda number: torch.full((2,), number),
    "full_like": lambda number: torch.full_like(torch.zeros(2, dtype=torch.float16), number),
    "new_full": lambda number: torch.zeros(2, dtype=torch.int64).new_full((1,), number),
    "scalar_tensor": torch.scalar_tensor,
}


@pytest.mark.parametrize("name", FILLED)
def test_dtypes_of_filled_tensors(name):
    def filled(x):
        return [FILLED[name](x[0].to(dtype)) for dtype in (torch.float16, torch.int32, torch.bool)]

    expected = [str(t.dtype).removeprefix("torch.").replace("64", "32") for t in filled(torch.ones(1))]
    assert [str(o.dtype) for o in in_jax(filled, jnp.ones(1))] == expected


@pytest.mark.parametrize("name", FILLED)
def test_a_number_that_requires_grad_is_refused_as_by_pytorch(name):
    def call(module, x):
        return FILLED[name](module.weight.mean())

    module = Call(call, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be Number, not Tensor"):
        module(None)
    raises("must be Number, not Tensor", module, jnp.ones(2), error=TypeError)


def test_one_hot_under_autocast():
    def call(i):
        with torch.autocast("cpu", torch.bfloat16):
            return F.one_hot(i, 5), F.one_hot(input=i, num_classes=5).float() + 1

    compare(call, [torch.tensor([1, 4])])


def said(action, x=X[0]):
    with pytest.raises(bridge.BridgeError) as caught:
        in_jax(action, x, jit=True)
    text = str(caught.value)
    assert "\n" not in text and "test_leaving_pytorch.py:" in text and "Remedy: " in text
    return text


TO_DLPACK = torch._C._to_dlpack  # the function as code has it that imported it before the bridge

REFUSED = {
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "a function of NumPy": lambda x: torch.as_tensor(np.sin(x.detach())),
    "storage": lambda x: x * (x.untyped_storage() is x[1:].untyped_storage()),
    "data_ptr": lambda x: x * (x.data_ptr() % 2),
    "from_dlpack": lambda x: torch.from_dlpack(x.detach()).mul(2),
    "jax": lambda x: jax.dlpack.from_dlpack(x),
    "code of C++": lambda x: torch.from_dlpack(TO_DLPACK(x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_memory_of_a_traced_tensor_is_refused(name):
    assert "asks for the memory of a traced tensor" in said(REFUSED[name])


def test_memory_that_a_tensor_is_set_to_is_refused():
    """PyTorch would read it from where no memory is."""
    assert "it gives a tensor the memory of another one" in said(lambda x: torch.empty(0).set_(x, 1, (2,), (1,)) * 2)


def test_the_value_of_a_traced_tensor_is_refused():
    assert "a traced number is formatted" in said(lambda x: x if f"{x.sum():.3f}" else 0)
    assert "a tensor of the call is pickled" in said(lambda x: pickle.loads(pickle.dumps(x)))


def test_nested_tensors_are_refused():
    """PyTorch fills rows of padding with zeros there, which it does not without nested tensors."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    padding = torch.tensor([[False, False, True]])

    def forward(encoder, x):
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=padding)

    nested, plain = (nn.TransformerEncoder(layer, 1, enable_nested_tensor=n).eval() for n in (True, False))
    x = torch.ones(1, 3, 4)
    assert (forward(nested, x)[0, 2] == 0).all()
    assert "enable_nested_tensor=False" in said(lambda x: forward(nested, x), x)
    assert bridge.verify(Call(forward, plain), x).ok


def test_numpy_of_known_values():
    def function(x):
        return torch.from_numpy(np.sin(x.detach().numpy())) + x.long().numpy().dtype.itemsize + X.numpy().ndim

    np.testing.assert_allclose(in_jax(function, jnp.ones(3)), np.sin(1.0) + 8 + 2, rtol=1e-6)


class Tagged(torch.Tensor):
    """A subclass that doubles whatever is computed with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.add else out


KINDS = {
    "subclass": (lambda: torch.ones(3).as_subclass(Tagged), "is a .*Tagged.*plain tensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "is on the meta device.*bridge.into"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse.*dense"),
}


@pytest.mark.parametrize("name", KINDS)
def test_state_and_constants_that_are_no_plain_tensors_are_refused(name):
    make, text = KINDS[name]
    if name != "meta":  # whose values come later
        with pytest.raises(bridge.BridgeError, match=f"weight {text}"):
            bridge.export(Calls(lambda m, x: x + m.weight, weight=nn.Parameter(make())))
    raises(text.partition(".*")[0], Calls(lambda m, x: x + m.constant, constant=make()), jnp.ones(3))


def test_state_that_is_not_initialized_is_refused():
    with pytest.raises(bridge.BridgeError, match=r"weight is not initialized.*call the module once"):
        bridge.export(nn.LazyLinear(2))


# ---- Engine, dispatcher and threads of PyTorch's inside `forward`: as in PyTorch, or one error that no `except` hides

ROW = randn(2, 3)


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
    "without a graph": lambda m, x: functional.jacobian(lambda t: m(t).sin(), x[0]) @ x[1],
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_have_gradients(name):
    compare(Call(DERIVATIVES[name], linear()), [ROW], 1e-4)


# ---- hooks on saved tensors


def saved_on_cpu(module, x):
    with torch.autograd.graph.save_on_cpu():
        return (module(x).exp() * x).sin()


def saved_on_cpu_for_a_gradient(module, x):
    with torch.autograd.graph.save_on_cpu():
        h = module(x).exp()
        return torch.autograd.grad(h.sum(), module.weight, create_graph=True)[0]


def test_saving_on_the_cpu_changes_nothing():
    compare(Call(saved_on_cpu, linear()), [ROW])


def test_saving_on_the_cpu_for_a_gradient_inside_is_refused():
    raises("`saved_tensors_hooks` act on", Call(saved_on_cpu_for_a_gradient, linear()), ROW)


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
    """An object that is no tensor, but that PyTorch asks first."""

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
    compare(Call(lambda m, x: scripted(m(x), 3), linear()), [ROW])


@torch.jit.script
def contracted(x: torch.Tensor, power: int = 2, scale: float = 0.5) -> torch.Tensor:
    y = scripted(x * x.sin(), 1).pow(power)
    return torch.stack([x[..., 0] * y[..., 1], y[..., 2] - scale * x[..., 2]], -1)


def forces(layer, x):
    x.requires_grad_()
    energy = contracted(layer(x), scale=0.25).square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("calls", [0, 4], ids=["the first call", "optimized by PyTorch before"])
def test_the_second_derivative_of_a_scripted_function(calls):
    """Calls of PyTorch's own come first: its graph executor counts them, and then has derivatives of its own."""
    contracted._debug_flush_compilation_cache()
    torch.manual_seed(0)
    module = Call(forces, linear())
    for _ in range(calls):
        module(ROW.clone()).sum().backward()
    module.zero_grad()
    compare(module, [ROW])


def test_a_wrong_call_of_a_scripted_function_is_an_error():
    for wrong in (lambda x: contracted(x, 2, 0.5, 3), lambda x: contracted(x, times=2), lambda x: contracted()):
        for side in (wrong, lambda x, wrong=wrong: in_jax(wrong, x)):
            with pytest.raises(RuntimeError, match=r"contracted\("):
                side(ROW)


def test_a_class_that_is_no_tensor_is_asked():
    def forward(x):
        x.requires_grad_()
        out = [F.linear(Scaled(x), torch.ones(3, 3)), F.scaled_dot_product_attention(*[Scaled(x)] * 3)]
        return [o.tensor for o in (*out, torch.tanh(Scaled(x)))]

    verified(forward, ROW, input_gradients=False)


def test_a_function_mode_is_pytorch_s():
    compare(Call(subtracted, linear()), [ROW])


class Own(torch.Tensor):
    pass


def as_subclass(module, x):
    with contextlib.suppress(Exception):
        return module(x).as_subclass(Own)
    return x


def thread(module, x):
    out = {}
    worker = threading.Thread(target=lambda: out.update(y=module(x)))
    with contextlib.suppress(BaseException):
        worker.start()
        worker.join()
    return out.get("y", x)


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


INTERCEPTED = {
    "saved_tensors_hooks": (swallowed(Rounding), "`saved_tensors_hooks` act on"),
    "a dispatch mode": (swallowed(Doubling), "`Doubling` is a TorchDispatchMode"),
    "as_subclass": (as_subclass, r"`as_subclass\(Own\)`"),
    "a thread": (thread, "met a traced tensor outside the call.*another thread"),
    "an iterator": (iterator, "an iterator, whose code .* is returned"),
    "torch.cond": (condition, "`torch.cond` and its like"),
    "set_": (memory_of_another, "`aten::set_.*has no translation.*the memory of another"),
    "data of another shape": (other_data, "`.data = …` gives a tensor another shape"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", INTERCEPTED)
def test_an_error_that_nothing_hides(name):
    call, text = INTERCEPTED[name]
    raises(rf"{text}.* in (the module|module|the call).*Remedy: ", Call(call, linear()), jnp.ones((2, 3)))
    call(linear(), ROW)  # and PyTorch goes on as before


def test_as_subclass_of_the_plain_class():
    compare(Call(lambda m, x: m(x).as_subclass(torch.Tensor) * 2, linear()), [ROW])


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
