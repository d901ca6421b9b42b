"""Importing the bridge and calling an exported module change nothing of PyTorch's: its compiler works as before."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled_process.py")


def said(*arguments: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_compiler_flex_attention_and_global_tables_are_as_without_the_bridge():
    """`torch.compile` of a module with a checkpoint and its own backward, before and after a call of the bridge."""
    assert said() == said("without the bridge")


def test_importing_the_bridge_claims_no_devices():
    """`jax.distributed.initialize` must come before that."""
    code = "import bridge; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_traced_call_does_not_import_the_compiler():
    """Which takes 1.6 s; PyTorch would at the first operation of a mode, and at the first one on its meta device."""
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
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "result"),
    [
        ("torch.compile(torch.sin, fullgraph=True)(x)", "[0.]"),
        ("torch.cond(x.sum() > 1, torch.sin, torch.cos, (x,))", "`cond` takes functions"),
    ],
    ids=["compile", "cond"],
)
def test_a_traced_call_that_first_loads_the_compiler_turns_it_off(forward, result):
    """Dynamo would run under the modes of the call; afterwards the compiler works as if the call had not been."""
    code = f"""
import jax.numpy as jnp, torch
import bridge

class Module(torch.nn.Module):
    def forward(self, x):
        return {forward}

fn = bridge.export(Module())
try:
    print(fn(fn.params, fn.buffers, jnp.zeros(1))[0])
except bridge.BridgeError as error:
    print(error)
compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert compiled(torch.ones(1)) == 2 and torch._dynamo.eval_frame._stance.stance == "default"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and result in done.stdout.replace("[0.]", "[0.]"), done.stderr[-2000:]
