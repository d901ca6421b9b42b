"""What the bridge replaces in PyTorch, it replaces while a call runs."""

import queue
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest
import torch
from eager import Call, Doubled
from torch import nn

import bridge
from bridge.dispatch.tracing import _REPLACED
from bridge.tensor.generators import _REPLACED as OF_GENERATORS

TABLE = [*_REPLACED._table, *OF_GENERATORS._table]


def now():
    return [vars(r.owner).get(r.name) for r in TABLE]


def test_importing_and_exporting_change_nothing():
    """In a fresh process, which looks at the objects before it imports the bridge."""
    names = sorted((r.owner.__name__, r.name) for r in TABLE)
    assert len(names) == 9
    code = """
import torch, torch.utils.checkpoint, torch.utils._python_dispatch
import torch.utils.flop_counter, torch.fx.experimental.proxy_tensor

PLACES = [
    (torch.autograd.function._SingleLevelFunction, "apply"),
    (torch.utils.checkpoint.checkpoint.__wrapped__, "__dynamo_disable"),
    (torch.autograd.functional, "_grad_preprocess"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
    (torch.utils._python_dispatch.TorchDispatchMode, "__enter__"),
    (torch.utils.flop_counter.FlopCounterMode, "__enter__"), (torch, "compile"),
    (torch.distributions.Distribution, "_validate_args"), (torch.random, "default_generator"),
]

def objects():
    return [vars(owner).get(name) for owner, name in PLACES]

print(sorted((owner.__name__, name) for owner, name in PLACES))
before = objects()
import bridge
assert all(a is b for a, b in zip(before, objects()))
fn = bridge.export(torch.nn.Linear(2, 2))
fn(fn.params, fn.buffers, torch.ones(1, 2).numpy())
bridge.verify(torch.nn.Dropout(), torch.ones(1, 2))
assert all(a is b for a, b in zip(before, objects()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(names)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_restores_them(fails):
    before, during = now(), queue.SimpleQueue()  # whose contents are not seen as state

    def call(module, x):
        during.put(now())
        inner = bridge.export(nn.Tanh())
        inner({}, {}, jnp.ones(2))
        during.put(now())
        if fails:
            raise ValueError("of the module")
        return module(x)

    fn = bridge.export(Call(call, nn.Linear(2, 2)))
    for _ in range(2):
        if fails:
            with pytest.raises(ValueError, match="of the module"):
                fn(fn.params, fn.buffers, jnp.ones((1, 2)))
        else:
            fn(fn.params, fn.buffers, jnp.ones((1, 2)))
    assert all(a is b for a, b in zip(before, now(), strict=True))
    assert during.qsize() == 4
    for _ in range(4):
        assert all(a is not b for a, b in zip(before, during.get(), strict=True))


def of_plain_tensors():
    """What a thread without a call sees of each replacement."""
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
    expected, seen = of_plain_tensors(), queue.SimpleQueue()

    def call(module, x):
        worker = threading.Thread(target=lambda: seen.put(of_plain_tensors()))
        worker.start()
        worker.join()
        return module(x)

    fn = bridge.export(Call(call, nn.Linear(2, 2)))
    fn(fn.params, fn.buffers, jnp.ones((1, 2)))
    assert seen.get(timeout=60) == expected


TORCHAX = """
import jax, jax.numpy as jnp, torch
from torch import nn
{imports}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + torch.zeros(3, device=x.device) + torch.arange(3, device=x.device)

module = Model()
fn = bridge.export(module)
x = jnp.ones((2, 3))
expected = fn(fn.params, fn.buffers, x)[0]
params, function = torchax.extract_jax(module)
assert jnp.allclose(jax.jit(function)(params, (x,)), expected, atol=1e-6)
torchax.enable_globally()
try:
    out = Model().to("jax")(torch.ones(2, 3, device="jax"))
    assert out.device.type == "jax" and torch.zeros(3, device=out.device).jax().shape == (3,)
finally:
    torchax.disable_globally()
with torchax.default_env():
    assert (torch.ones(3, device="jax") * 2).device.type == "jax"
assert jnp.array_equal(fn(fn.params, fn.buffers, x)[0], expected)
assert bridge.verify(module, torch.ones(2, 3)).ok
"""


@pytest.mark.parametrize("imports", ["import bridge\nimport torchax", "import torchax\nimport bridge"])
def test_torchax_beside_the_bridge(imports):
    done = subprocess.run([sys.executable, "-c", TORCHAX.format(imports=imports)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
