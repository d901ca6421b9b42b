"""Reading compiled programs: shapes in memory, loops, modules, sums over them; FLOPs counted by hand."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from support.compiled_program import GPU_PROGRAM, PROGRAM

import bridge
from models_torch.flops import language_flops_per_token
from models_torch.gpt import GPTConfig
from models_torch.trm import TRMConfig
from train_jax.language.task import UnbuiltText
from train_jax.pods.compile import Compiled, Memory, train_step_arguments
from train_jax.pods.flops import Products, products
from train_jax.pods.hlo import Array, Program
from train_jax.pods.results import figures_of, lines_of
from train_jax.pods.yardsticks import module_of, pass_of, yardsticks
from train_jax.puzzles.task import UnbuiltPuzzles
from train_jax.run.config import ComputeConfig
from train_jax.run.performance import model_flops
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import assemble


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (Array("bf16", (97, 512), "1,0:T(8,128)(2,1)"), 104 * 512 * 2),
        (Array("f32", (97, 6, 100), "0,2,1:T(8,128)S(3)"), 6 * 104 * 128 * 4),
        (Array("pred", ()), 1),
    ],
)
def test_size_of_an_array_has_the_padding_of_its_tiles(array, size):
    assert array.size_bytes == size and array.in_hbm == ("S(3)" not in array.layout), "space 0 is HBM"


@pytest.mark.parametrize(
    ("op_name", "module", "expected"),
    [
        ("jit(s)/jvp([Net])/layers.0[Block]/layers.0.mlp[SwiGLU]/dot", ("layers.0.mlp", "Block/SwiGLU"), "forward"),
        ("jit(s)/transpose(jvp([Net]))/layers.0[Block]/dot_general", ("layers.0", "Net/Block"), "backward"),
        ("jit(s)/jvp([Net])/layers.0[Block]/checkpoint/layers.0.mlp[MLP]", ("layers.0.mlp", "Block/MLP"), "backward"),
        ("jit(s)/jvp([Net])/add", ("Net", "Net"), "forward"),
        ("state.params['layers.0.bias']", ("", ""), "update"),
        ("", ("", ""), "made by the compiler"),
    ],
)
def test_an_operation_belongs_to_its_innermost_module_and_a_pass(op_name, module, expected):
    assert (module_of(op_name), pass_of(op_name)) == (module, expected)


def test_costs_are_summed_by_kind_pass_module_and_class():
    sums = yardsticks(Program(PROGRAM))
    transferred = 3 * 2 * 104 * 512 * 2  # the weights lie in a cache
    assert (sums.total.cycles, sums.total.hbm_bytes) == (3010, transferred + 3 * 32)
    assert {split: {name: cost.cycles for name, cost in parts.items()} for split, parts in sums.splits.items()} == {
        "kind": {"matrix products": 3000, "elementwise, reductions": 10},
        "pass": {"backward": 3000, "forward": 10},
        "module": {"layers.0.mlp": 3000, "": 10},
        "class": {"Block/SwiGLU": 3000, "": 10},
    }
    (collective,) = sums.collectives
    assert (collective.kind, collective.bytes, collective.asynchronous) == ("all-reduce", 32, False)


def test_every_kernel_of_a_gpu_counts_with_its_operands_results_and_workspace():
    sums = yardsticks(Program(GPU_PROGRAM), counts=lambda each: each.launches)
    rows = 96 * 512 * 2
    weight = 512 * 512 * 2
    kinds = {
        "matrix products": (3, 3 * (2 * rows + weight)),
        "fused attention of cuDNN": (1, 4 * rows + 1000),
        "collectives": (1, 2 * 32),
    }
    assert {name: (cost.instructions, cost.hbm_bytes) for name, cost in sums.splits["kind"].items()} == kinds
    assert [*sums.splits["kind"]] == [*kinds], "the most bytes first"
    (collective,) = sums.collectives
    assert (collective.kind, collective.bytes, collective.asynchronous) == ("all-reduce", 32, True)
    assert not yardsticks(Program(GPU_PROGRAM.replace("false}", "true}"))).collectives[0].asynchronous


def test_flops_count_products_in_loops_branches_gradients_and_convolutions():
    def function(x, w):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x).sum()

    shapes = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    one = 2 * 3 * 4 * 4
    assert products(jax.make_jaxpr(function)(*shapes)).total == 7 * one
    gradient = jax.make_jaxpr(jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1)))
    assert products(gradient(*shapes)).total == 3 * one
    images = jax.ShapeDtypeStruct((2, 6, 8, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    convolution = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    grouped = jax.make_jaxpr(functools.partial(convolution, feature_group_count=2))(images, kernel)
    assert products(grouped).total == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


def test_blocks_that_a_kernel_skips_are_not_counted():
    """Causal attention over two blocks of 1024 rows and as many keys has one empty block of four; the backward pass has
    blocks of 2048 keys, computes the scores again and skips none."""
    shape = jax.ShapeDtypeStruct((2, 3, 2048, 128), jnp.bfloat16)

    def attended(query, key, value):
        return bridge.fused_attention(query, key, value, is_causal=True)

    one = 2 * 2 * 3 * 2048 * 2048 * 128
    assert products(jax.make_jaxpr(jax.jit(attended))(shape, shape, shape)).total == 2 * one * 3 / 4

    def loss(*inputs):
        return attended(*inputs).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.jit(jax.grad(loss, argnums=(0, 1, 2))))(shape, shape, shape)
    assert products(jaxpr).total == pytest.approx(2 * one * 3 / 4 + 5 * one, rel=1e-3)  # and sums of gradients


def test_a_loop_runs_as_often_as_its_condition_holds():
    """The compiler does not note the trips of every `lax.scan`, such as that over the parts of an accumulation."""
    test = """  %limit = s32[]{:T(128)} constant(5)
  %counter = s32[]{:T(128)} get-tuple-element(%q), index=1
  ROOT %true = pred[]{:T(512)} compare(%counter, %limit), direction=LT"""
    text = PROGRAM.replace("  ROOT %true = pred[]{:T(512)} constant(true)", test)

    def cycles(text):
        return yardsticks(Program(text)).total.cycles

    assert cycles(text) == 3010, "what the compiler notes comes first"
    text = text.replace('"known_trip_count":{"n":"3"}', "")
    assert cycles(text) == 5010
    assert cycles(text.replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(2)")) == 1010
    assert cycles(text.replace("direction=LT", "direction=NE")) == 1010


BATCH = 4
CELLS = 81
PUZZLE_POSITIONS = 16
HIDDEN = 32
"""The baseline's shapes, but its width of 512."""
POSITIONS = CELLS + PUZZLE_POSITIONS


def product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def swiglu(rows: int, features: int, multiple: int) -> int:
    width = -(-round(4 * features * 2 / 3) // multiple) * multiple
    return product(rows, features, 2 * width) + product(rows, width, features)


def attention(rows: int) -> int:
    projections = product(rows, HIDDEN, 3 * HIDDEN) + product(rows, HIDDEN, HIDDEN)
    return projections + 2 * product(rows, HIDDEN, POSITIONS)  # scores and values


@pytest.mark.slow
def test_flops_of_the_train_step():
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": 2, "mlp_multiple_of": 16, "puzzle_emb_ndim": HIDDEN}
    config = dataclasses.replace(preset("sudoku-extreme"), arch=TRMConfig(**sizes), global_batch_size=BATCH)
    training = assemble(config, UnbuiltPuzzles(config), Devices(available=jax.devices()[:1]))
    jaxpr = jax.make_jaxpr(training.parallel_step())(*train_step_arguments(training))

    rows = BATCH * POSITIONS
    network = 2 * (attention(rows) + swiglu(rows, HIDDEN, 16))  # blocks
    updates = 6 + 1  # updates of z_L and of z_H in an H-cycle
    heads = product(rows, HIDDEN, training.task.sizes["vocab_size"]) + product(BATCH, HIDDEN, 2)
    # Two H-cycles without gradients, one with them; a backward has two products for each of the forward.
    expected = (2 + 3) * updates * network + 3 * heads
    counted = products(jaxpr)
    assert counted.total == pytest.approx(expected, rel=1e-3)
    assert (counted.of_model, counted.recomputed, counted.outside) == (counted.total, 0, 0)
    analytic = model_flops(training.config, training.task, training.devices.count)
    assert analytic == pytest.approx(counted.of_model, rel=1e-3)
    sums = yardsticks(Program(""), products=counted.by_name)
    updates_of_all = (2 + 3) * updates
    perceptron = swiglu(rows, HIDDEN, 16) - product(rows, 96, HIDDEN)  # without its last product, a module of its own
    mlp = sums.splits["module"]["model.inner.L_level.layers.1.mlp"].product_flops
    assert mlp == pytest.approx(updates_of_all * perceptron)
    assert sums.splits["pass"]["backward"].product_flops == pytest.approx(2 * (updates * network + heads), rel=1e-3)


def test_flops_of_a_language_model():
    """The FLOPs are those of the published formula; recomputation and the optimizer are counted separately."""
    config = preset("chat-tiny")
    assert isinstance(config.arch, GPTConfig)
    sizes: dict[str, Any] = {"seq_len": 16, "vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 1, "n_kv_head": 1}
    arch = dataclasses.replace(config.arch, **sizes)
    config = dataclasses.replace(config, arch=arch, global_batch_size=2, compute=ComputeConfig(remat="blocks"))
    training = assemble(config, UnbuiltText(config), Devices(available=jax.devices()[:1]))
    counted = products(jax.make_jaxpr(training.parallel_step())(*train_step_arguments(training)))
    analytic = 2 * 16 * language_flops_per_token(arch)
    assert model_flops(training.config, training.task, training.devices.count) == analytic
    assert counted.of_model == analytic
    blocks = 2 * 12 * 48 * 48
    attention = 4 * 48 * 16
    # A block is computed again up to its last product, whose result is not needed.
    last = 2 * 48 * 4 * 48
    assert counted.recomputed == 2 * 16 * (2 * blocks + 2 * attention - 2 * last)
    by_pass = yardsticks(Program(""), products=counted.by_name).splits["pass"]
    assert by_pass["update"].product_flops == counted.outside
    assert by_pass["backward"].product_flops == counted.recomputed + 2 * by_pass["forward"].product_flops
    # Newton-Schulz iterates five times with three products; more rows than columns are transposed.
    square = 4 * (3 * 2 * 48**3)
    wide = 2 * (2 * 2 * 48 * 48 * 192 + 2 * 48**3)
    assert counted.outside == 2 * 5 * (square + wide)


# ---- the figures of a compiled step


PRODUCTS = {
    "jit(step)/transpose(jvp([Net]))/layers.0[Block]/layers.0.mlp[SwiGLU]": 12e8,
    "jit(step)/transpose(jvp([Net]))/rematted_computation/layers.0[Block]": 3e8,
    "jit(step)/optimizer": 5e8,
}
"""FLOPs of products by their names."""


class Slice:
    """Stands for a `Topology`: four devices of 1 GiB and 100 TFLOP/s."""

    name = "v4:2x2x1"
    devices = range(4)
    hosts = 1
    is_gpu = False
    hbm_bytes = 2**30
    peak_flops = 1e14


def test_the_figures_of_a_step_add_up_and_name_what_does_not_fit():
    compute = SimpleNamespace(runner="pmap", remat="", attention="plain", accumulation_steps=1)
    config = SimpleNamespace(global_batch_size=16, eval_batch_size=32, model="trm", compute=compute)
    training = cast(Any, SimpleNamespace(config=config))
    topology = cast(Any, Slice())
    memory = Memory(arguments=2**28, temporaries=2**30, outputs=0, code=0)
    compiled = Compiled(None, None, Program(PROGRAM), memory, 3e9, Products(PRODUCTS), 1.5, 60.25)
    figures = figures_of("tiny", "evaluate", training, topology, compiled)
    assert not figures["fits"] and figures["roofline_seconds"] == 20e8 / 1e14
    for split in ("by_kind", "by_pass", "by_module", "by_class"):
        for total in ("product_flops", "hbm_bytes"):
            assert sum(part[total] for part in figures[split].values()) == figures[total]
    lines = [" ".join(line.split()) for line in lines_of(figures)]
    assert lines[0] == "tiny, evaluate step: trm, 32 examples (8 on a device)"
    assert "memory 1.25 of 1.00 GiB: DOES NOT FIT (arguments 0.25, temporaries 1.00, code 0.00)" in lines
    assert "HBM kB share GFLOP share by module" in lines and "FLOPs 2.000 G in matrix products;" in " ".join(lines)
    assert "638.976 100.0% 1.200 60.0% layers.0.mlp" in lines
    assert "0.000 0.0% 0.300 15.0% layers.0" in lines, "a product of a fusion that is counted elsewhere"
    assert not any("bundles" in line or "cycles" in line for line in lines), "no unit beside another one"


class Bundles:
    """Stands for `Schedules`: 2 million bundles of the kernel in the loop."""

    def of(self, instruction):
        return 2_000_000 if instruction.name == "product" else None


def test_bundles_and_bytes_are_the_figures_of_a_tpu_v4_and_no_time_is_below_the_bound():
    compute = SimpleNamespace(
        runner="pmap", remat="", attention="plain", accumulation_steps=1, steps_per_dispatch=2, choices=""
    )
    config = dataclasses.replace(preset("tiny"), compute=cast(Any, compute), global_batch_size=16, log_every_steps=10)
    training: Any = SimpleNamespace(
        config=config, task=UnbuiltPuzzles(config), devices=SimpleNamespace(count=4), total_steps=8138
    )
    memory = Memory(arguments=2**28, temporaries=0, outputs=0, code=0)
    compiled = Compiled(None, None, Program(PROGRAM), memory, 3e9, Products({"jit(step)": 332e10}), 1.5, 60.25)
    figures = figures_of("tiny", "train", training, cast(Any, Slice()), compiled, schedules=cast(Any, Bundles()))
    assert figures["bundles"] == 6e6 and figures["estimated_cycles"] == 3010
    lines = [" ".join(line.split()) for line in lines_of(figures)]
    assert "bundles 6.0 M, at most one in a cycle of a core" in lines
    at = lines.index("at peak FLOP/s 33.20 ms, a bound and not an estimate")
    assert lines[at + 1] == "x 4069 steps: 2.3 minutes at the peak, 11 at 20 % of it", "two steps in a dispatch"
    assert sum(" ms" in line for line in lines) == 1
    assert "Mbundles share HBM kB share TFLOP share by kind" in lines
    assert "6.000 100.0% 638.976 100.0% 0.000 0.0% layers.0.mlp" in lines


def test_a_gpu_has_kernels_and_bytes():
    training: Any = SimpleNamespace(config=dataclasses.replace(preset("tiny"), eval_batch_size=16))
    card = Slice()
    card.is_gpu = True
    memory = Memory(arguments=0, temporaries=0, outputs=0, code=0)
    compiled = Compiled(None, None, Program(GPU_PROGRAM), memory, 0.0, Products({}), 1.5, 60.25)
    figures = figures_of("tiny", "evaluate", training, cast(Any, card), compiled)
    lines = [" ".join(line.split()) for line in lines_of(figures)]
    assert "kernels 5" in lines and "HBM bytes 2.56 MB" in lines
    assert "kernels share HBM MB share FLOP share by kind" in lines
    assert "FLOPs 0 in matrix products" in lines, "XLA has no count for a GPU"
