"""Reading compiled programs: shapes in memory, loops, fusions, source functions; and the sums over them."""

import jax
import jax.numpy as jnp
import pytest

from train_jax.pod.counted import product_flops
from train_jax.pod.hlo import Array, Program
from train_jax.pod.yardsticks import yardsticks

PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "train_step"
2 "Module._call_impl"
3 "Block.forward"
4 "SwiGLU.forward"
5 "linear"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3}
4 {file_name_id=1 function_name_id=4 line=4 end_line=4}
5 {file_name_id=1 function_name_id=5 line=5 end_line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=2 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=5}
6 {file_location_id=5 parent_frame_id=6}

%fused_product (a: bf16[97,512], b: bf16[512,512]) -> bf16[97,512] {
  %a = bf16[97,512]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[97,512]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (p: (bf16[97,512], s32[])) -> (bf16[97,512], s32[]) {
  %p = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %x = bf16[97,512]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} get-tuple-element(%p), index=1
  %w = bf16[512,512]{1,0:T(8,128)(2,1)S(3)} constant({...})
  %product = bf16[97,512]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%fused_product, \
metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=6}, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %t = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%product, %n)
}

%condition (q: (bf16[97,512], s32[])) -> pred[] {
  %q = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  ROOT %true = pred[]{:T(512)} constant(true)
}

ENTRY %main (arg: bf16[97,512]) -> f32[8] {
  %arg = bf16[97,512]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%arg, %zero)
  %loop = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %vector = f32[8]{0:T(128)} constant({...})
  %added = f32[8]{0:T(128)} add(%vector, %vector), metadata={op_name="jit(step)/jvp()/add" stack_frame_id=1}, \
backend_config={"window_config":{"estimated_cycles":"10"}}
  ROOT %sum = f32[8]{0:T(128)} all-reduce(%added), replica_groups={{0,1}}, to_apply=%add
}
"""


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


def test_the_functions_of_an_instruction(program):
    product = next(each for each, _ in program.executed() if each.name == "product")
    assert program.functions(product.frame) == [
        "train_step", "Module._call_impl", "Block.forward", "Module._call_impl", "SwiGLU.forward", "linear",
    ]  # fmt: skip


def test_sums(program):
    sums = yardsticks(program)
    transferred = 3 * 2 * 104 * 512 * 2  # the weights lie in a cache
    assert (sums.total.cycles, sums.total.hbm_bytes) == (3010, transferred + 3 * 32)
    assert {name: cost.cycles for name, cost in sums.by_kind.items()} == {
        "matrix products": 3000,
        "elementwise, reductions": 10,
    }
    assert {name: cost.cycles for name, cost in sums.by_pass.items()} == {"backward": 3000, "forward": 10}
    assert {name: cost.cycles for name, cost in sums.by_module.items()} == {"Block/SwiGLU": 3000, "": 10}
    (collective,) = sums.collectives
    assert (collective.kind, collective.bytes, collective.asynchronous) == ("all-reduce", 32, False)


def test_flops_of_products_in_loops_branches_and_gradients():
    def function(x, w):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x).sum()

    shapes = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    one = 2 * 3 * 4 * 4
    assert product_flops(jax.make_jaxpr(function)(*shapes).jaxpr) == 7 * one
    gradient = jax.make_jaxpr(jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1)))
    assert product_flops(gradient(*shapes).jaxpr) == 3 * one


def test_flops_of_a_convolution():
    x, kernel = jax.ShapeDtypeStruct((2, 6, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2))(
        x, kernel
    ).jaxpr
    assert product_flops(jaxpr) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
