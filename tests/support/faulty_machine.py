"""A script: `trm preflight` or `trm prove` on a machine with something wrong in it.

python -m support.faulty_machine FAULT DEVICES COMMAND NAME [option …]

FAULT is `none`, or functions below with the processes that have them, such as `clock:1`, `timings:0,1` or
`memory+logistic`. DEVICES is the number of virtual devices.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

fault, devices, *arguments = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax._src.lax.lax import _dot_general_lower  # noqa: E402
from jax.interpreters import mlir  # noqa: E402

from train_jax.__main__ import main  # noqa: E402
from train_jax.pods.check import devices as on_devices  # noqa: E402
from train_jax.pods.check import kernels  # noqa: E402
from train_jax.runtime import backend  # noqa: E402

process = os.environ.get("JAX_PROCESS_ID", "0")


def clock():
    """8 seconds ahead."""
    right = time.time
    time.time = lambda: right() + 8


def tpu():
    """A machine with a TPU, among others that have none."""
    folder = Path(tempfile.mkdtemp())
    (folder / "accel0").touch()
    backend._DEVICE_FILES = folder


def memory():
    """A device with a megabyte."""
    on_devices._MEMINFO = Path(tempfile.mkdtemp()) / "meminfo"
    on_devices._MEMINFO.write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")


def logistic():
    """A device whose sigmoid, and with it SiLU, is 1 % too low."""
    wrong = mlir.lower_fun(lambda x, **_: 0.99 / (1 + jnp.exp(-x)), multiple_results=False)
    mlir.register_lowering(lax.logistic_p, wrong, platform="cpu")


def product():
    """A device that adds the products of bfloat16 matrices in bfloat16."""

    def add_up(a, b, *, preferred_element_type, **_):
        def add(k, total):
            return total + a[:, k][:, None] * b[k][None]

        return lax.fori_loop(0, len(b), add, jnp.zeros((len(a), b.shape[1]), a.dtype)).astype(preferred_element_type)

    rounding = mlir.lower_fun(add_up, multiple_results=False)
    right = _dot_general_lower

    def lower(ctx, a, b, *, dimension_numbers, **options):
        matrices = dimension_numbers == (((1,), (0,)), ((), ())) and all(each.ndim == 2 for each in ctx.avals_in)
        rule = rounding if matrices and ctx.avals_in[0].dtype == jnp.bfloat16 else right
        return rule(ctx, a, b, dimension_numbers=dimension_numbers, **options)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def timings():
    """A clock by which each implementation takes half the time of the one before, and twice the time in process 1."""
    times = [8.0]
    kernels.milliseconds = lambda _: times.append(times[-1] * (2 if process == "1" else 0.5)) or times[-1]
    show_choices()


def wrong():
    """A device on which the other implementations of the mixing of positions are wrong by one element."""
    for name, right in kernels.CANDIDATES["cpu"]["trm::mix_positions"].items():
        kernels.CANDIDATES["cpu"]["trm::mix_positions"][name] = lambda x, *others, right=right: (
            right(x, *others).at[0, 0, 0].add(0.5)
        )


def show_choices():
    """Plants no fault: every process prints its choice."""
    named = kernels.named

    def printed(name, text, **more):
        if name == "choices":
            print("chosen:", text.partition(";")[0])
        return named(name, text, **more)

    kernels.named = printed


FAULTS = {each.__name__: each for each in (clock, tpu, memory, logistic, product, timings, wrong, show_choices)}
for each in fault.split("+"):
    name, _, processes = each.partition(":")
    if name != "none" and process in (processes or "0").split(","):
        FAULTS[name]()
sys.exit(main(arguments))
