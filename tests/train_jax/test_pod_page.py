"""The figures of `trm compile-pod`: as JSON, and their lines on the terminal."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.compiled_program import PROGRAM

from train_jax.pod.compile import Compiled, Memory
from train_jax.pod.flops import Products
from train_jax.pod.hlo import Program
from train_jax.pod.results import figures_of, lines_of

PRODUCTS = {
    "jit(step)/jvp([Net])/layers.0[Block]": 4e8,
    "jit(step)/transpose(jvp([Net]))/layers.0[Block]/layers.0.mlp[SwiGLU]": 12e8,
    "jit(step)/transpose(jvp([Net]))/rematted_computation/layers.0[Block]": 3e8,
    "jit(step)/optimizer": 1e8,
}
"""FLOPs of products by their names."""


class Slice:
    """Stands for a `Topology`: four devices of 1 GiB, 1 TB/s, 100 TFLOP/s and 1 GHz."""

    name, devices, hosts = "v4:2x2x1", range(4), 1
    hbm_bytes, hbm_bandwidth, peak_flops, clock = 2**30, 1e12, 1e14, 1e9

    def __str__(self):
        return "v4:2x2x1: 4 devices (TPU v4) in 1 hosts"


def figures(temporaries=2**28):
    compute = SimpleNamespace(runner="pmap", remat="", attention="plain", accumulation_steps=1)
    config = SimpleNamespace(global_batch_size=16, eval_batch_size=32, model="trm", compute=compute)
    training: Any = SimpleNamespace(config=config)
    topology: Any = Slice()
    memory = Memory(arguments=2**28, temporaries=temporaries, outputs=0, code=0)
    compiled = Compiled(None, None, Program(PROGRAM), memory, 3e9, Products(PRODUCTS), 1.5, 60.25)
    return figures_of("tiny", "evaluate", training, topology, compiled)


def words(figures):
    return [" ".join(line.split()) for line in lines_of(figures)]


def test_the_lines_of_a_step():
    lines = words(figures())
    assert lines[0] == "tiny, evaluate step: trm, 32 examples (8 on a device)"
    assert "memory 0.50 of 1.00 GiB: fits (arguments 0.25, temporaries 0.25, code 0.00)" in lines
    assert "FLOPs 0.002 T in matrix products; XLA counts 0.003 T in all, a loop once" in lines
    assert "estimated cycles 0.0 M, 0.00 ms at the clock of the chip" in lines
    assert "collective 1 x all-reduce, 0.00 MB, nothing else runs meanwhile" in lines
    of_training = figures(2**30) | {"step": "train", "analytic_flops": 1.6e9}
    assert "memory 1.25 of 1.00 GiB: DOES NOT FIT (arguments 0.25, temporaries 1.00, code 0.00)" in words(of_training)
    assert "--search compiles variants that need less memory" in words(of_training)
    counted = "forward and backward 0.002 T, the analytic count 0.002 T; recomputed 0.000 T, optimizer 0.000 T"
    assert counted in words(of_training)


def test_every_yardstick_has_the_share_of_each_module():
    of_step = figures()
    lines = words(of_step)
    assert "Mcycles share HBM ms share peak ms share by module" in lines
    assert "0.003 99.7% 0.001 100.0% 0.012 60.0% layers.0.mlp" in lines
    assert "0.000 0.3% 0.000 0.0% 0.001 5.0% (no module)" in lines
    assert "0.000 0.0% 0.000 0.0% 0.007 35.0% layers.0" in lines, "a product of a fusion that is counted elsewhere"
    assert "0.003 99.7% 0.001 100.0% 0.015 75.0% backward" in lines
    for name in ("by_kind", "by_pass", "by_module", "by_class"):
        for total in ("roofline_seconds", "hbm_seconds"):
            assert sum(part[total] for part in of_step[name].values()) == pytest.approx(of_step[total])
