"""Reading compiled programs: shapes in memory, loops, fusions, modules; and the sums over them."""

import jax
import jax.numpy as jnp
import pytest
from support.compiled_program import PROGRAM

import bridge
from train_jax.pod.flops import products
from train_jax.pod.hlo import Array, Program
from train_jax.pod.yardsticks import module_of, pass_of, yardsticks


@pytest.fixture(scope="module")
def program():
    return Program(PROGRAM)


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (Array("bf16", (97, 512), "1,0:T(8,128)(2,1)"), 104 * 512 * 2),
        (Array("f32", (6, 97, 100), "2,1,0:T(8,128)"), 6 * 104 * 128 * 4),
        (Array("f32", (97, 6, 100), "0,2,1:T(8,128)"), 6 * 104 * 128 * 4),
        (Array("s32", (10,), "0:T(128)"), 40),
        (Array("pred", ()), 1),
    ],
)
def test_size_of_an_array_has_the_padding_of_its_tiles(array, size):
    assert array.size_bytes == size


def test_only_space_0_is_hbm():
    assert Array("f32", (1,), "0:T(128)").in_hbm and not Array("f32", (1,), "0:T(128)S(3)").in_hbm


def test_a_loop_counts_as_often_as_it_runs(program):
    counts = {instruction.name: times for instruction, times in program.executed()}
    assert counts["product"] == 3 and counts["added"] == 1 and "c" not in counts


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(step)/jvp([Net])/layers.0[Block]/layers.0.mlp[SwiGLU]/dot_general", ("layers.0.mlp", "Block/SwiGLU")),
        (
            "jit(step)/transpose(jvp([Net]))/layers.0[Block]/checkpoint/layers.0.mlp[MLP]/mul",
            ("layers.0.mlp", "Block/MLP"),
        ),
        ("jit(step)/jvp([Net])/add", ("Net", "Net")),
        ("jit(step)/jvp()/x[0]", ("", "")),
        ("state.params['layers.0.bias']", ("", "")),
        ("", ("", "")),
    ],
)
def test_an_operation_belongs_to_its_innermost_module(op_name, module):
    assert module_of(op_name) == module


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/jvp([Net])/layers.0[Block]/dot_general", "forward"),
        ("jit(step)/transpose(jvp([Net]))/layers.0[Block]/dot_general", "backward"),
        ("jit(step)/[Net]/layers.0[Block]/dot_general", "forward"),  # an operation of an evaluation
        ("jit(step)/add", "update"),
        ("", "made by the compiler"),
    ],
)
def test_an_operation_belongs_to_a_pass(op_name, expected):
    assert pass_of(op_name) == expected


def test_costs_are_summed_by_kind_pass_module_and_class(program):
    sums = yardsticks(program)
    transferred = 3 * 2 * 104 * 512 * 2  # the weights lie in a cache
    assert (sums.total.cycles, sums.total.hbm_bytes) == (3010, transferred + 3 * 32)
    assert {name: cost.cycles for name, cost in sums.splits["kind"].items()} == {
        "matrix products": 3000,
        "elementwise, reductions": 10,
    }
    assert {name: cost.cycles for name, cost in sums.splits["pass"].items()} == {"backward": 3000, "forward": 10}
    assert {name: cost.cycles for name, cost in sums.splits["module"].items()} == {"layers.0.mlp": 3000, "": 10}
    assert {name: cost.cycles for name, cost in sums.splits["class"].items()} == {"Block/SwiGLU": 3000, "": 10}
    (collective,) = sums.collectives
    assert (collective.kind, collective.bytes, collective.asynchronous) == ("all-reduce", 32, False)


def test_flops_count_products_in_loops_branches_and_gradients():
    def function(x, w):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x).sum()

    shapes = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    one = 2 * 3 * 4 * 4
    assert products(jax.make_jaxpr(function)(*shapes)).total == 7 * one
    gradient = jax.make_jaxpr(jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1)))
    assert products(gradient(*shapes)).total == 3 * one


def test_flops_count_the_products_of_a_convolution():
    x, kernel = jax.ShapeDtypeStruct((2, 6, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2))(
        x, kernel
    )
    assert products(jaxpr).total == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


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
