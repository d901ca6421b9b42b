"""Scheduled bundles: loops in the text of a kernel, equal kernels, and the sums over a program."""

import re

import pytest
from support.compiled_program import PROGRAM

from benchmarks.bundles import bundles_of, read_schedules
from train_jax.errors import UserError
from train_jax.pod.hlo import Program
from train_jax.pod.yardsticks import yardsticks

KERNEL = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 4 } /* Start region 0 */
   0x1 LB: > { %s2 = sphi %s1, %s3 }
   0x2   : > { %s3 = sadd.s32 1, %s2 }
   0x3 LB: > > { %v1 = vld [vmem:[%s2]] }
   0x4   :  {} /* End region 3 */
   0x5   : > > { %p1 = scmp.ge.s32.totalorder %s4, 10 /* loop exit test */ }
   0x6 PF: > { %p2 = scmp.ge.s32.totalorder %s2, 2 }
   0x7   : > { %p3 = scmp.ge.s32.totalorder %s3, 4 /* loop exit test */ }
   0x8   :  { %5 = sbr.rel (!%p3) target = $region1 }
   0x9 LB: > { %6 = vwait.ge [#allocation3], %s9 }
   0xa   :  { %7 = vsyncpa [#allocation9], 1 }
"""


def test_loops_count_as_often_as_they_run():
    """Four times the outer loop, and ten times in each the three bundles of the inner one; the second is empty."""
    assert bundles_of(KERNEL) == 3 + 4 * (4 + 10 * 3) + 1
    with pytest.raises(UserError, match="of another form; use --no-bundles"):  # libtpu writes such bundles for v5e
        bundles_of("   0x4 LB: { %s2 = sadd.s32 1, %s1 }\n")


FURTHER = """
  %again = bf16[97,512]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%fused_again, \
sharding={replicated}, metadata={op_name="jit(step)/jvp([Net])/layers.1[Block]/mul"}, \
backend_config={"window_config":{"estimated_cycles":"900"}}
  %other = bf16[97,512]{1,0:T(8,128)(2,1)} fusion(%w, %w), kind=kOutput, calls=%fused_again, \
backend_config={"window_config":{"estimated_cycles":"90"}}
  ROOT %t ="""
FUSED_AGAIN = """%fused_again (c: bf16[97,512], d: bf16[512,512]) -> bf16[97,512] {
  %d = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  %c.1 = bf16[97,512]{1,0:T(8,128)(2,1)} parameter(0), frontend_attributes={kernel_metadata={}}
  ROOT %e = bf16[97,512]{1,0:T(8,128)(2,1)} convolution(%c.1, %d), dim_labels=bf_io->bf
}

%body ("""


@pytest.fixture
def program():
    """Returns two products that are equal but for names, cycles, annotations and order of text, and a different one."""
    return Program(PROGRAM.replace("\n  ROOT %t =", FURTHER, 1).replace("%body (", FUSED_AGAIN, 1))


@pytest.fixture
def folder(tmp_path):
    """The folder that libtpu writes: only one of the two equal products, and the program that calls them."""
    for name in ("17-product-02", "18-TLP-01", "19-<late-initialization>-01"):
        (tmp_path / f"{name}-final_bundles.txt").write_text(KERNEL)
        (tmp_path / f"{name}-schedule-analysis_final_bundles.txt").write_text("total scheduled bundles: 7")
    return tmp_path


def test_equal_kernels_have_one_schedule(program, folder):
    schedules = read_schedules(folder, program)
    known = {each.name for each, _ in program.executed() if schedules.of(each)}
    assert known == {"product", "again"}
    sums = yardsticks(program, cycles=lambda each: schedules.of(each) or 0)
    assert sums.total.instructions == 6, "three times two of three"
    modules = sums.splits["module"]
    assert modules["layers.0.mlp"].cycles == modules["layers.1"].cycles == 3 * 140


def test_a_pallas_kernel_has_no_estimate(folder):
    """The kernel's bundles can replace the estimate."""
    kernel = (
        '\n  %product = bf16[97,512]{1,0:T(8,128)(2,1)} custom-call(%w), custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(step)/jvp([Net])/attn[Attention]/pallas_call"}\n  ROOT %t ='
    )
    program = Program(re.sub(r"\n  %product = .*", "", PROGRAM).replace("\n  ROOT %t =", kernel, 1))
    schedules = read_schedules(folder, program)
    known = yardsticks(program, cycles=lambda each: schedules.of(each) or 0).splits["kind"]["Pallas kernels"]
    assert (known.kernels, known.cycles) == (3, 3 * 140)
    unknown = yardsticks(program).splits["kind"]["Pallas kernels"]
    assert (unknown.kernels, unknown.cycles) == (3, 0)
