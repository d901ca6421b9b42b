"""Run in a process of its own: every row of the table of meanings on eight virtual devices.

python replicas_process.py OUT.json

One `pmap` takes all rows in both modes, a shard of inputs on each device; the reference is PyTorch, shard by shard. A
row whose program is the same in both modes is there once.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={DEVICES}"  # XLA's newer emitters, as users have them
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from rows import ROWS  # noqa: E402
from rows_state import Noise  # noqa: E402
from side_by_side import (  # noqa: E402
    call,
    gradient_of,
    in_pytorch,
    inputs_of,
    leaves_of,
    objective_of,
    report,
    stacked,
)

import bridge  # noqa: E402

SEEDS = range(1, DEVICES + 1)
AXES = (None, 0, None, 0)
"""Axes of parameters, inputs, buffers and draws."""


class Case:
    def __init__(self, name: str, train: bool):
        self.row = ROWS[name]
        self.references = [in_pytorch(self.row, train, range(s, s + 1)) for s in SEEDS]
        fn, objective = objective_of(self.row, train)
        self.gradient = gradient_of(objective)
        draws = stacked([r.draws[0] for r in self.references])
        self.arguments = fn.params, inputs_of(self.row, SEEDS), fn.buffers, draws
        one = [call(a, 0) if axis == 0 else a for a, axis in zip(self.arguments, AXES, strict=True)]
        self.program = name, str(jax.make_jaxpr(self.gradient)(*one))

    def report(self, results: Any) -> dict:
        per_device = []
        for i in range(DEVICES):
            (_, result), gradients = call(results, i)
            per_device.append(leaves_of(self.row, [result.outputs], result, gradients, [gradients[1]]))
        outcome = report(self.row, self.references, per_device)
        return {"ok": outcome.ok, "leaves": len(outcome.rows), "table": str(outcome)}


def matrix_of_meanings() -> dict[str, dict]:
    cases = {f"{name}-{mode}": Case(name, mode == "train") for name in ROWS for mode in ("train", "eval")}
    programs = {case.program: case for case in cases.values()}

    def all_gradients(arguments):
        return [case.gradient(*given) for case, given in zip(programs.values(), arguments, strict=True)]

    given = [case.arguments for case in programs.values()]
    results = jax.device_get(jax.pmap(all_gradients, in_axes=([AXES] * len(given),))(given))
    by_program = dict(zip(programs, results, strict=True))
    return {name: case.report(by_program[case.program]) for name, case in cases.items()}


def draws() -> dict[str, list]:
    """Returns the draws of `Noise` on eight devices for a batch of sixteen rows, and on one."""
    fn = bridge.export(Noise())
    x = jnp.zeros((16, 3))
    key = jax.random.key(0)

    def on_each(x, key):
        rng = bridge.ShardedKey(key, jax.lax.axis_index("replicas"), DEVICES, len(x))
        return fn({}, {}, x, rng=rng)[0]

    whole, _ = fn({}, {}, x, rng=bridge.ShardedKey(key, 0, 1, 16))
    sharded = jax.pmap(on_each, axis_name="replicas", in_axes=(0, None))(x.reshape(DEVICES, 2, 3), key)
    return {name: [np.asarray(a).tolist() for a in arrays] for name, arrays in (("whole", whole), ("sharded", sharded))}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({"meanings": matrix_of_meanings(), "draws": draws()}))
