"""A call changes nothing outside of it: the module, PyTorch, its global state and other threads are as before."""

import contextlib
import functools
import gc
import queue
import random
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch._dynamo  # PyTorch imports it, and changes itself, at the first call under a mode
from eager import Call, Calls, Doubled, in_jax, raises, randn
from rows import ROWS
from support.markers import slow_unless
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import bridge
from bridge.dispatch.random import DEFAULT_GENERATOR
from bridge.module.modes import _REPLACED
from bridge.tensor.arrays import array_of
from bridge.tensor.pytrees import convert
from bridge.tensor.tensor import BridgeTensor

# ---- A call leaves nothing behind in the module


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
    """Returns the contents of a module, numbers by value and objects by identity."""
    parts = {}
    for name, m in module.named_modules():
        for key, value in m.__dict__.items():
            inside = list(value.items()) if isinstance(value, dict) else value
            parts[name, key] = repr(inside) if isinstance(inside, (list, bool, int, set)) else id(inside)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        data = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
        identity = type(tensor), id(tensor), tensor._version, tensor.requires_grad, tensor.grad
        parts[name] = (*identity, data.numpy().tobytes())
    return parts


@pytest.fixture(autouse=True)
def only_new_objects():
    """JAX keeps programs of other tests for a while, with tensors in them; the search for tensors leaves these out."""
    gc.freeze()  # for good: gc.unfreeze() would also return the modules, which tests/conftest.py has frozen


def tracers():
    """Returns the traced tensors that the test has made and something still refers to."""
    gc.collect()
    return [o for o in gc.get_objects() if isinstance(o, BridgeTensor)]


@pytest.mark.parametrize("part", slow_unless(lambda part: not part, range(12)))
def test_modules_are_as_they_were(part):
    for name, row in list(ROWS.items())[part::12]:
        module = row.build()
        before = contents(module)
        with jax.checking_leaks():
            traced(row, module)
        assert contents(module) == before, name
    assert not tracers()


def counted(m, x):
    m.count = m.count + 1
    return x * m.count


def counter():
    """Assigns a buffer anew: done to the original, it would stay there."""
    return Calls(counted, count=nn.Buffer(torch.zeros(())))


def kept_elsewhere():
    """Keeps one submodule in the registry, in a list, in a namespace, as methods, and behind a weak reference."""

    def forward(m, x):
        x = m.list[0][0](x) + m.namespace.child["deep"](x) + m.method(x)
        return x + m.partial(x) + m.reference()(x)

    child = counter()
    places = {"child": child, "list": [(child, 1)], "namespace": types.SimpleNamespace(child={"deep": child})}
    methods = {"method": child.forward, "partial": functools.partial(child.forward), "reference": weakref.ref(child)}
    return Calls(forward, **places, **methods)


def collects():
    """Results kept in containers, at any depth, by the code and by a hook."""

    def forward(m, x):
        m.cache["deep"][0]["x"] = x
        m.last = m.linear(m.cache["deep"][0]["x"])
        return m.last + m.seen[-1]

    module = Calls(forward, linear=nn.Linear(3, 3), seen=[], cache={"deep": [{}]})
    module.linear.register_forward_hook(lambda linear, args, out: module.seen.append(out))
    return module


def shared_list():
    """Returns a module in which one submodule puts and another gets."""
    shared = []
    put = Calls(lambda m, x: m.shared.append(x * 2) or x, shared=shared)
    get = Calls(lambda m, x: x + m.shared.pop(), shared=shared)
    return Calls(lambda m, x: m.get(m.put(x)), put=put, get=get)


@pytest.mark.parametrize("make", [kept_elsewhere, collects, shared_list])
def test_a_submodule_or_a_container_is_one_wherever_it_hangs(make):
    """The copy shares like the original; only then does nothing reach the original."""
    module = make()
    x = randn(2, 3)
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
    def fails(m, x):
        with torch.no_grad(), torch.autocast("cpu"):
            m.kept = m.child(x)
            return torch.special.airy_ai(x)

    module = Calls(fails, child=counter())
    before = contents(module)
    state = global_state()
    raises("airy_ai", module, jnp.ones(3))
    assert contents(module) == before and global_state() == state and not tracers()


def test_a_default_dtype_set_in_forward_ends_with_the_call():
    """PyTorch keeps it; a compiled call would set it only the first time."""

    def half(x):
        torch.set_default_dtype(torch.float16)
        return x.half() + torch.ones(3)

    assert in_jax(half, jnp.ones(3)).dtype == jnp.float16 and torch.get_default_dtype() == torch.float32


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
    fn = bridge.export(module)
    x = jnp.ones((3, 4))
    gradient = jax.grad(lambda p: fn(p, {}, x)[0].sum())
    with torch.no_grad():
        silent = gradient(fn.params)
        assert not torch.is_grad_enabled()
    assert all((g == 0).all() for g in silent.values())
    assert all((g != 0).any() for g in gradient(fn.params).values())


# ---- Training in PyTorch is the same before, between and after bridged calls, and in other threads


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x):
        with torch.no_grad():
            x = x + torch.rand_like(x)
        return self.layers(x)


def training(steps, between=lambda: None):
    """Plain PyTorch, with the global generator; returns all it ends with."""
    torch.manual_seed(3)
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    between()
    for _ in range(steps):
        module(torch.randn(8, 4)).square().mean().backward()
        between()
        optimizer.step()
        between()
        optimizer.zero_grad()
        with torch.no_grad():
            module.layers[0].weight.mul_(0.999)
    return torch.cat([t.detach().double().reshape(-1) for t in module.state_dict().values()])


def bridged(module):
    """Runs one traced call with gradients of a module that uses every mode, draws and writes."""
    fn = bridge.export(module)
    x = jnp.ones((8, 4))
    jax.make_jaxpr(jax.grad(lambda p: fn(p, fn.buffers, x, rng=jax.random.key(0), train=True)[0].sum()))(fn.params)


def test_work_before_between_and_after_calls_is_the_same():
    alone = training(4)
    module = Classifier()
    assert torch.equal(training(4, between=lambda: bridged(module)), alone)
    assert torch.equal(training(4), alone)


def test_a_second_thread_is_not_disturbed():
    """The second thread trains in PyTorch, with the global generator, until this one has traced call after call."""
    alone = training(10)
    module = Classifier()
    trainings = []
    done = threading.Event()

    def work():
        while not trainings or not done.is_set():
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), type(torch.ones(2) + 1)
            trainings.append((training(10), modes))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        bridged(module)
    done.set()
    thread.join()
    for end, modes in trainings:
        assert torch.equal(end, alone) and modes == (True, False, torch.Tensor)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# ---- Importing the bridge and calling an exported module change nothing of PyTorch's: its compiler works as before

SCRIPT = str(Path(__file__).with_name("compiled_process.py"))


def python(*arguments: str) -> str:
    """Returns what a fresh process prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_compiler_flex_attention_and_global_tables_are_as_without_the_bridge():
    """`torch.compile` of a module with a checkpoint and its own backward, before and after a call of the bridge."""
    assert python(SCRIPT) == python(SCRIPT, "without the bridge")


@pytest.mark.slow
def test_a_traced_call_does_not_import_the_compiler():
    """The import takes 1.6 s; PyTorch would run it at the first operation of a mode, or on its meta device."""
    code = """
import sys, jax, jax.numpy as jnp, torch
import bridge

class Module(torch.nn.Linear):
    def forward(self, x):
        y = torch.cat([super().forward(x), x]) * 2 - 1
        return torch.where(y > 0, y, torch.zeros_like(y)).clamp(max=1).mean(1).exp()

fn = bridge.export(Module(3, 3))
jax.make_jaxpr(jax.grad(lambda p: fn(p, fn.buffers, jnp.ones((2, 3)))[0].sum()))(fn.params)
assert "torch._dynamo" not in sys.modules
"""
    python("-c", code)


@pytest.mark.slow
def test_a_traced_call_that_first_loads_the_compiler_turns_it_off():
    """Dynamo would run under the modes of the call; afterwards the compiler works as if the call had not been."""
    code = """
import jax.numpy as jnp, torch
import bridge

class Module(torch.nn.Module):
    def forward(self, x):
        return torch.compile(torch.sin, fullgraph=True)(x)

fn = bridge.export(Module())
assert fn(fn.params, fn.buffers, jnp.zeros(1))[0] == 0
compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert compiled(torch.ones(1)) == 2 and torch._dynamo.eval_frame._stance.stance == "default"
"""
    python("-c", code)


# ---- The bridge replaces names of PyTorch only while a call runs

TABLE = [*_REPLACED._table, *DEFAULT_GENERATOR._table]


def now():
    return [vars(r.owner).get(r.name) for r in TABLE]


@pytest.mark.slow
def test_importing_and_exporting_change_nothing():
    """A fresh process looks at the objects before it imports the bridge. Importing claims no devices, either:
    `jax.distributed.initialize` must come before that."""
    names = sorted((r.owner.__name__, r.name) for r in TABLE)
    assert len(names) == 13
    code = """
import torch, torch.utils.checkpoint, torch.utils._python_dispatch
import torch.utils.flop_counter, torch.fx.experimental.proxy_tensor

PLACES = [
    (torch.autograd.function.FunctionMeta, "__getattribute__"),
    (torch.utils.checkpoint.checkpoint.__wrapped__, "__dynamo_disable"),
    (torch.autograd.functional, "_grad_preprocess"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
    (torch.utils._python_dispatch.TorchDispatchMode, "__enter__"),
    (torch.utils.flop_counter.FlopCounterMode, "__enter__"), (torch, "compile"),
    (torch.distributions.Distribution, "_validate_args"), (torch.random, "default_generator"),
    (torch.nn.AdaptiveLogSoftmaxWithLoss, "forward"), (torch._C, "_any_requires_grad"),
    (torch.jit.ScriptFunction, "__call__"), (torch, "from_numpy"),
]

def objects():
    return [vars(owner).get(name) for owner, name in PLACES]

print(sorted((owner.__name__, name) for owner, name in PLACES))
before = objects()
import bridge
assert all(a is b for a, b in zip(before, objects()))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
fn = bridge.export(torch.nn.Linear(2, 2))
fn(fn.params, fn.buffers, torch.ones(1, 2).numpy())
bridge.verify(torch.nn.Dropout(), torch.ones(1, 2))
assert all(a is b for a, b in zip(before, objects()))
"""
    assert python("-c", code).strip() == str(names)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_restores_them(fails):
    # whose contents are not seen as state
    before = now()
    during = queue.SimpleQueue()

    def call(module, x):
        during.put(now())
        in_jax(nn.Tanh(), jnp.ones(2))
        during.put(now())
        if fails:
            raise ValueError("of the module")
        return module(x)

    fn = bridge.export(Call(call, nn.Linear(2, 2)))
    for _ in range(2):
        with pytest.raises(ValueError, match="of the module") if fails else contextlib.nullcontext():
            fn(fn.params, fn.buffers, jnp.ones((1, 2)))
    assert all(a is b for a, b in zip(before, now(), strict=True))
    assert during.qsize() == 4
    for _ in range(4):
        assert all(a is not b for a, b in zip(before, during.get(), strict=True))


def of_plain_tensors():
    """Returns what a thread without a call sees of each replacement."""
    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x).sum().backward()
    y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
    jacobian = torch.autograd.functional.jacobian(torch.sin, torch.ones(1), create_graph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x.exp().sum().backward()
    torch.manual_seed(3)
    numbers = torch.rand(2).tolist(), torch.initial_seed()
    return x.grad.tolist(), y.item(), jacobian.tolist(), numbers


def test_another_thread_sees_pytorch_s_own():
    """The thread is started in the middle of a call; two calls at once are two calls."""
    expected = of_plain_tensors()
    seen = queue.SimpleQueue()

    def look():
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), len(_get_current_dispatch_mode_stack())
        seen.put((of_plain_tensors(), modes, in_jax(torch.tanh, jnp.ones(2))))

    def call(x):
        with torch.no_grad(), torch.autocast("cpu"):
            in_a_thread(look)
        return x + 1

    assert (in_jax(call, jnp.zeros(2)) == 1).all()
    plain, modes, through_bridge = seen.get(timeout=60)
    assert plain == expected and modes == (True, False, 0)
    np.testing.assert_allclose(through_bridge, np.tanh(np.ones(2)), atol=1e-6)


TORCHAX = """
import jax, jax.numpy as jnp, torch
from torch import nn
{imports}

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.zeros(3, device=x.device) + torch.arange(3, device=x.device)

module = Model(3, 3)
fn = bridge.export(module)
x = jnp.ones((2, 3))
expected = fn(fn.params, fn.buffers, x)[0]
params, function = torchax.extract_jax(module)
assert jnp.allclose(jax.jit(function)(params, (x,)), expected, atol=1e-6)
torchax.enable_globally()
try:
    out = Model(3, 3).to("jax")(torch.ones(2, 3, device="jax"))
    assert out.device.type == "jax" and torch.zeros(3, device=out.device).jax().shape == (3,)
finally:
    torchax.disable_globally()
with torchax.default_env():
    assert (torch.ones(3, device="jax") * 2).device.type == "jax"
assert jnp.array_equal(fn(fn.params, fn.buffers, x)[0], expected)
assert bridge.verify(module, torch.ones(2, 3)).ok
"""


BOTH = "import bridge\nimport torchax", "import torchax\nimport bridge"


@pytest.mark.slow
@pytest.mark.parametrize("imports", BOTH)
def test_torchax_beside_the_bridge(imports):
    python("-c", TORCHAX.format(imports=imports))
