"""The parts of a proof, the most valuable first."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import NamedTuple

from train_jax.pods.check.context import Context
from train_jax.pods.check.foreign import foreign_rows
from train_jax.pods.check.kernels import choose_rows, pallas_rows
from train_jax.pods.check.record import Row, absent
from train_jax.pods.check.rows import Pod
from train_jax.pods.check.runner import CHECKS, run_checks
from train_jax.pods.check.steps import input_rows, step_rows
from train_jax.runtime import backend
from train_jax.runtime.coordination import exchange


class Part(NamedTuple):
    """A part of a proof; every process calls its function, which returns rows."""

    name: str
    function: Callable[[Context], list[Row]]


def preflight_rows(context: Context) -> list[Row]:
    """Returns the checks of `trm preflight`, with the run's own model beside PyTorch and the collectives' rate."""
    hosts = exchange("prove hosts", platform.node())
    pod = Pod(context.config, backend.choose(context.config.platform), hosts)
    reason = f"there is no data set at {context.config.data_dir}; trm build-data makes one"
    without = () if context.has_data else ("data", "configuration trains", "disk", "model beside PyTorch", "memory")
    if without:
        pod.task, pod.devices = context.task, context.devices
    result = run_checks(pod, _CHECK_SECONDS, quick=False, without=without)
    rows = []
    for each in result.rows:
        text = each.measured + (f" ({each.where})" if each.where else "")
        text += f"; warning: {each.remedy}" if each.status == "WARN" else f"; {each.remedy}" * each.failed
        rows.append(Row(each.name, "FAIL" if each.failed else "PASS", text, each.limit))
    rows += [absent(name, reason) for name in without]
    rows += [absent(name, "left out because of what failed before it") for name in result.left_out]
    others = [check.name for check in CHECKS if check.name not in {row.name for row in rows}]
    return rows + [absent(name, "one process has nothing to compare") for name in others]


_CHECK_SECONDS = 120.0
CHOOSE = "kernels at the run's shapes"
PARTS = (
    Part("preflight", preflight_rows),
    Part(CHOOSE, choose_rows),
    Part("steps", step_rows),
    Part("foreign modules", foreign_rows),
    Part("input", input_rows),
    Part("Pallas kernels", pallas_rows),
)
