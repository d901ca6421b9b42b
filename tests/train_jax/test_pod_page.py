"""`trm compile-pod --html`: the page has the figures of the terminal, and names what they are."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from support.compiled_program import PROGRAM

from train_jax.pod.compile import Compiled, Memory
from train_jax.pod.flops import Products
from train_jax.pod.hlo import Program
from train_jax.pod.results import Result, page
from train_jax.pod.search import Tried, Variant, search_page
from train_jax.pod.yardsticks import yardsticks

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
    megacore, hbm_bytes, hbm_bandwidth, peak_flops, clock = True, 2**30, 1e12, 1e14, 1e9

    def __str__(self):
        return "v4:2x2x1 with megacore: 4 devices (TPU v4) in 1 hosts"


def result(temporaries=2**28):
    compute = SimpleNamespace(runner="pmap", remat="", attention="plain", accumulation_steps=1)
    config = SimpleNamespace(global_batch_size=16, model="trm", compute=compute)
    training: Any = SimpleNamespace(config=config)
    topology: Any = Slice()
    memory = Memory(arguments=2**28, temporaries=temporaries, outputs=0, code=0)
    compiled = Compiled(None, None, Program(PROGRAM), memory, 3e9, Products(PRODUCTS), 1.5, 60.25)
    sums = yardsticks(compiled.program, products=PRODUCTS)
    return Result("ti<ny", "train", training, topology, compiled, sums, 1.6e9)


def words(html):
    return " ".join(re.sub("<[^>]*>", " ", re.sub("(?s)<style>.*?</style>", "", html)).split())


def test_the_page_of_a_step():
    of_step = result()
    html = page(of_step)
    text = words(html)
    assert "ti&lt;ny, train step on v4:2x2x1" in text and "none is measured on a TPU" in text
    assert "0.50 GiB of 1.00 GiB: fits" in text and "temporaries 0.250 25.00%" in text
    assert "0.0 M 0.00 ms at the clock of the chip" in text and "0.002 TFLOP 0.02 ms at the peak" in text
    assert "forward and backward 0.002 TFLOP the analytic count is 0.002" in text
    # Mcycles, HBM GB and ms, TFLOP and ms, with their shares.
    assert "matrix products 0.00 99.67% 0.00 0.00 99.98% 0.002 0.02 100.00% 3" in text
    assert "layers.0.mlp 0.00 99.67% 0.00 0.00 99.98% 0.001 0.01 60.00% 3" in text
    assert "layers.0 0.00 0.00% 0.00 0.00 0.00% 0.001 0.01 35.00% 0" in text and "Block/SwiGLU 0.00 99.67%" in text
    assert "all-reduce 1 0.00 no" in text and "60.2 s measured here" in text
    assert "http" not in html, "one file, that loads nothing"


def test_every_yardstick_has_the_share_of_each_module():
    of_step = result()
    lines = [" ".join(line.split()) for line in of_step.lines()]
    assert "Mcycles share HBM ms share peak ms share by module" in lines
    assert "0.00 99.7% 0.00 100.0% 0.01 60.0% layers.0.mlp" in lines
    assert "0.00 0.3% 0.00 0.0% 0.00 5.0% (no module)" in lines
    assert "0.00 0.0% 0.00 0.0% 0.01 35.0% layers.0" in lines, "a product of a fusion that is counted elsewhere"
    assert "0.00 99.7% 0.00 100.0% 0.01 75.0% backward" in lines
    figures = of_step.to_json()
    for name in ("by_kind", "by_pass", "by_module", "by_class"):
        for total in ("roofline_seconds", "hbm_seconds"):
            assert sum(part[total] for part in figures[name].values()) == pytest.approx(figures[total])


def test_a_step_that_does_not_fit():
    text = words(page(result(temporaries=2**30)))
    assert "1.25 GiB of 1.00 GiB: does not fit" in text and "--search compiles variants that need less" in text


def test_the_page_of_a_search():
    one = result()
    tried = [Tried(Variant(16, "", 1), one), Tried(Variant(32, "", 1), None, "refuses <it>")]
    text = words(search_page("tiny", tried, one.topology))
    assert "Estimated fastest in the 1.00 GiB of a device: --global-batch-size 16" in text
    assert "--global-batch-size 16 yes 0.50 0.0 0.8" in text and "--global-batch-size 32 refused" in text
    assert "--global-batch-size 32 : refuses &lt;it&gt;" in text
    assert "No variant fits the 1.00 GiB" in words(search_page("tiny", tried[1:], one.topology))
