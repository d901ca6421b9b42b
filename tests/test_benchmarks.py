"""The benchmarks: comparisons, bundles of a schedule, good and bad ends of a soak, sides that compute the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiled_program import PROGRAM

from benchmarks import tables
from benchmarks.step import Result, check_losses
from campaigns.soak import Disturbed, judge
from train_jax.errors import UserError
from train_jax.pods.bundles import bundles_of, read_schedules
from train_jax.pods.hlo import Program
from train_jax.pods.yardsticks import yardsticks

ROOT = Path(__file__).parents[1]


def test_only_what_became_larger_is_named(tmp_path, capsys):
    file = tmp_path / "before.json"
    figures = {"a, ms": 100.0, "b, ms": 100.0, "new, ms": 1.0}
    files = tables.Files(json=file)
    assert tables.finish(files, figures, {}, "two threads", results=[1]) == 0
    assert json.loads(file.read_text())["results"] == [1] and "two threads" in capsys.readouterr().out
    before = tables.figures_before(tables.Files(compare=file))
    assert before == figures
    assert tables.finish(tables.Files(), {"a, ms": 109.0, "b, ms": 111.0, "c, ms": 1.0}, before, "two threads") == 1
    assert re.findall("larger.*", capsys.readouterr().out) == ["larger: b, ms: 111, before 100"]
    file.write_text("[]")
    with pytest.raises(SystemExit) as error:
        tables.figures_before(tables.Files(compare=file))
    assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1


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
def folder(tmp_path):
    """The folder that libtpu writes: only one of the two equal products, and the program that calls them."""
    for name in ("17-product-02", "18-TLP-01", "19-<late-initialization>-01"):
        (tmp_path / f"{name}-final_bundles.txt").write_text(KERNEL)
        (tmp_path / f"{name}-schedule-analysis_final_bundles.txt").write_text("total scheduled bundles: 7")
    return tmp_path


def test_equal_kernels_have_one_schedule(folder):
    """Two products are equal but for names, cycles, annotations and order of text; a third one is different."""
    program = Program(PROGRAM.replace("\n  ROOT %t =", FURTHER, 1).replace("%body (", FUSED_AGAIN, 1))
    schedules = read_schedules(folder, program)
    known = {each.name for each, _ in program.executed() if schedules.of(each)}
    assert known == {"product", "again"}
    sums = yardsticks(program, cycles=lambda each: schedules.of(each) or 0)
    assert sums.total.instructions == 6, "three times two of three"
    modules = sums.splits["module"]
    assert modules["layers.0.mlp"].cycles == modules["layers.1"].cycles == 3 * 140


@pytest.mark.parametrize(
    ("kind", "statuses", "problems"),
    [
        ("SIGSTOP", [69, None, 69], []),
        ("SIGTERM", [75, 75, 75], []),
        ("SIGKILL", [None, -9, 69], ["hosts [0] had not ended after 180 s"]),
        ("SIGKILL", [1, -9, 69], ["a launch would not start the run again"]),
    ],
)
def test_how_the_hosts_may_end(kind, statuses, problems):
    fault = Disturbed("fault 0", "training", 3, 1, kind, statuses)
    judge(fault)
    assert fault.problems == problems


def test_a_side_that_computes_something_else_is_named():
    eager, bridged = (
        Result("mixer", "train", side, {"first_loss": 2.0}, [0.2], losses, 10**9)
        for side, losses in (("eager", [1.0, 0.9, 0.8]), ("bridge", [1.0, 0.9, 0.8005]))
    )
    check_losses([eager, bridged], 1e-5, 1e-3)
    with pytest.raises(SystemExit, match=r"mixer train bridge: loss 0\.8005, eager has 0\.8"):
        check_losses([eager, bridged], 1e-5, 1e-4)


@pytest.mark.campaign
def test_the_sides_agree_on_the_model_of_the_speedrun(tmp_path):
    """`torch.compile` is left out, because it needs a C++ compiler."""
    command = [sys.executable, "-m", "benchmarks.step", "--sizes", "sudoku9", "--sides", "eager", "by hand", "bridge",
               "--batch-size", "2", "--cpu-examples", "1", "--rounds", "1", "--round-seconds", "0.01",
               "--json", str(tmp_path / "step.json")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "step.json").read_text())["figures"]
    assert list(names) == [*(f"sudoku9 train {side}, ms" for side in ("eager", "by hand", "bridge")),
                           "sudoku9 evaluate eager, ms", "sudoku9 evaluate bridge, ms"]  # fmt: skip
