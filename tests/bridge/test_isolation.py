"""A call leaves nothing behind: no tracer in the module, no change in PyTorch's global state or in another thread."""

import functools
import gc
import random
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch._dynamo  # which PyTorch imports, and changes itself, at the first call under a mode
from rows import ROWS
from support.markers import slow_unless
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import bridge
from bridge.tensor.convert import array_of
from bridge.tensor.pytrees import convert
from bridge.tensor.tensor import BridgeTensor

# ---- the module


def arrays(tree):
    return convert(tree, lambda v: array_of(v) if torch.is_tensor(v) else v)


def traced(row, module, train=True):
    """Trace, differentiate and forget."""
    fn, (args, kwargs) = bridge.export(module), arrays(row.example())

    def objective(params):
        out = fn.run(params, fn.buffers, *args, rng=jax.random.key(0), train=train, method=row.method, **kwargs).outputs
        return sum(leaf.sum() for leaf in jax.tree.leaves(out) if hasattr(leaf, "sum")).astype(jnp.float32)

    jax.make_jaxpr(jax.grad(objective))(fn.params)


def contents(module):
    """All that a module is made of, by value where it is a number and by identity where it is an object."""
    parts = {}
    for name, m in module.named_modules():
        for key, value in m.__dict__.items():
            inside = list(value.items()) if isinstance(value, dict) else value
            parts[name, key] = repr(inside) if isinstance(inside, (list, bool, int, set)) else id(inside)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        data = tensor.detach().clone() if tensor.dtype != torch.bfloat16 else tensor.detach().float()
        parts[name] = (
            type(tensor),
            id(tensor),
            tensor._version,
            tensor.requires_grad,
            tensor.grad,
            data.numpy().tobytes(),
        )
    return parts


def tracers():
    gc.collect()
    return [o for o in gc.get_objects() if isinstance(o, BridgeTensor)]


@pytest.mark.parametrize("part", slow_unless(lambda part: not part, range(6)))
def test_modules_are_as_they_were(part):
    for name, row in list(ROWS.items())[part::6]:
        module = row.build()
        before = contents(module)
        with jax.checking_leaks():
            traced(row, module)
        assert contents(module) == before, name
    assert not tracers()


class Count(nn.Module):
    """Assigns a buffer anew: done to the original, it would stay there."""

    def __init__(self):
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x * self.count


class KeptElsewhere(nn.Module):
    """The same submodule in the registry, in a list, in a namespace, as methods, behind a weak reference."""

    def __init__(self):
        super().__init__()
        self.child = Count()
        self.list, self.namespace = [(self.child, 1)], types.SimpleNamespace(child={"deep": self.child})
        self.method, self.partial = self.child.forward, functools.partial(self.child.forward)
        self.reference = weakref.ref(self.child)

    def forward(self, x):
        x = self.list[0][0](x) + self.namespace.child["deep"](x) + self.method(x)
        return x + self.partial(x) + self.reference()(x)


class Collects(nn.Module):
    """Results kept in containers, at any depth, by the code and by a hook."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.cache = nn.Linear(3, 3), [], {"deep": [{}]}
        self.linear.register_forward_hook(lambda module, args, out: self.seen.append(out))

    def forward(self, x):
        self.cache["deep"][0]["x"] = x
        self.last = self.linear(self.cache["deep"][0]["x"])
        return self.last + self.seen[-1]


class Puts(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        self.shared.append(x * 2)
        return x


class Gets(Puts):
    def forward(self, x):
        return x + self.shared.pop()


class SharedList(nn.Module):
    """One submodule puts, another gets."""

    def __init__(self):
        super().__init__()
        shared = []
        self.put, self.get = Puts(shared), Gets(shared)

    def forward(self, x):
        return self.get(self.put(x))


@pytest.mark.parametrize("cls", [KeptElsewhere, Collects, SharedList])
def test_a_submodule_or_a_container_is_one_wherever_it_hangs(cls):
    """In the copy as in the original; only then does nothing reach the original."""
    torch.manual_seed(0)
    module, x = cls(), torch.randn(2, 3)
    before = contents(module)
    fn = bridge.export(module)
    jax.make_jaxpr(lambda p, b, x: fn(p, b, x))(fn.params, fn.buffers, jnp.asarray(x.numpy()))
    assert contents(module) == before and not tracers()
    buffers = fn.buffers
    for _ in range(2):  # beside the module itself: a deep copy has its hooks and weak references to the original
        out, buffers = fn(fn.params, buffers, jnp.asarray(x.numpy()))
        np.testing.assert_allclose(out, module(x).detach().numpy(), rtol=1e-5)
    for name, buffer in module.named_buffers():
        np.testing.assert_array_equal(buffers[name], buffer.numpy())


def test_an_error_leaves_nothing_either():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Count()

        def forward(self, x):
            with torch.no_grad(), torch.autocast("cpu"):
                self.kept = self.child(x)
                return torch.special.airy_ai(x)

    module = Fails()
    before, state = contents(module), global_state()
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match="airy_ai"):
        jax.jit(lambda x: fn({}, fn.buffers, x))(jnp.ones(3))
    assert contents(module) == before and global_state() == state and not tracers()


def test_a_default_dtype_set_in_forward_ends_with_the_call():
    """PyTorch keeps it; a compiled call would set it only the first time."""

    class Half(nn.Module):
        def forward(self, x):
            torch.set_default_dtype(torch.float16)
            return x.half() + torch.ones(3)

    fn = bridge.export(Half())
    assert fn({}, {}, jnp.ones(3))[0].dtype == jnp.float16 and torch.get_default_dtype() == torch.float32


# ---- PyTorch's global state


def global_state():
    """Everything of PyTorch, NumPy and Python that one piece of code can change under another."""
    cudnn = torch.backends.cudnn.flags
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), torch.is_autocast_cache_enabled())
            for d in ("cpu", "cuda")
        ],
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes": (torch._C._len_torch_function_stack(), len(_get_current_dispatch_mode_stack())),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(), cudnn),
        "hooks": [repr(value) for name, value in vars(hooks).items() if name.startswith("_global_")],
        "numbers": (torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())),
        "patched": [{n: id(v) for n, v in vars(place).items()} for place in (torch, torch.Tensor, torch.nn.functional)],
    }


@pytest.mark.parametrize("name", ["NoGrad", "InferenceMode", "Autocast", "EveryDraw", "BatchNorm", "WeightNormByHook"])
def test_global_state_is_as_it_was(name):
    row = ROWS[name]
    module, (args, kwargs) = row.build(), arrays(row.example())
    before = global_state()
    fn = bridge.export(module)
    assert global_state() == before
    call = jax.jit(lambda p, b: fn(p, b, *args, rng=jax.random.key(0), train=True, **kwargs)[0])
    for _ in range(2):  # traced, and from the cache
        call(fn.params, fn.buffers)
        assert global_state() == before
    fn.survey(*args, rng=jax.random.key(0), **kwargs)
    assert global_state() == before


def test_the_callers_modes_are_kept_and_decide():
    """A call inside the caller's own `no_grad` has no gradients, as in PyTorch, and the mode is there after it."""
    module = ROWS["Detach"].build()
    fn, x = bridge.export(module), jnp.ones((3, 4))
    gradient = jax.grad(lambda p: fn(p, {}, x)[0].sum())
    with torch.no_grad():
        silent = gradient(fn.params)
        assert not torch.is_grad_enabled()
    assert all((g == 0).all() for g in silent.values())
    assert all((g != 0).any() for g in gradient(fn.params).values())
