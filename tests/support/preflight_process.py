"""A script: `trm preflight` on a machine with something wrong in it.

python -m support.preflight_process FAULT DEVICES NAME [option …]

FAULT is `none`, or functions below with the index of the process that has them, such as `clock:1` or `memory+logistic`.
DEVICES is the number of virtual devices.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

fault, devices, *arguments = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.interpreters import mlir  # noqa: E402

from train_jax.__main__ import main  # noqa: E402
from train_jax.pod.preflight import devices as on_devices  # noqa: E402
from train_jax.runtime import backend  # noqa: E402


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
    """A device that adds the products of bfloat16 numbers in bfloat16."""

    def add_up(a, b, *, preferred_element_type, **_):
        def add(k, total):
            return total + a[:, k][:, None] * b[k][None]

        return lax.fori_loop(0, len(b), add, jnp.zeros((len(a), b.shape[1]), a.dtype)).astype(preferred_element_type)

    mlir.register_lowering(lax.dot_general_p, mlir.lower_fun(add_up, multiple_results=False), platform="cpu")


FAULTS = {each.__name__: each for each in (clock, tpu, memory, logistic, product)}
names, _, index = fault.partition(":")
if names != "none" and os.environ.get("JAX_PROCESS_ID", "0") == (index or "0"):
    for name in names.split("+"):
        FAULTS[name]()
sys.exit(main(["preflight", *arguments]))
