"""Everything that the processes of a run do together, without training.

python -m support.work_of_processes FOLDER prints a line of JSON: what this process got. With `JAX_COORDINATOR_ADDRESS`
and the other variables of `train_jax.runtime.processes`, it is one of several processes, with two devices each.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
import queue
from pathlib import Path

import jax
import numpy as np

from train_jax.core.optim.chain import dense_optimizer
from train_jax.core.optim.config import OptimConfig
from train_jax.core.reduction import AXIS
from train_jax.core.sharding import Replicated, Sharded
from train_jax.core.state import new_state
from train_jax.errors import UserError
from train_jax.run.checkpoint import Checkpoints, agreed_steps, checksums, items_of
from train_jax.run.folder import RunFolder
from train_jax.runtime import coordination, processes
from train_jax.runtime.devices import Devices
from train_jax.runtime.placement import Placement, ShardedState

ROWS = 8
rng = np.random.default_rng(0)
PARAMS = {name: rng.normal(size=shape).astype(np.float32) for name, shape in {"flat": (3, 3), "rows": (8, 2)}.items()}
BUFFERS = {"average": np.arange(3, dtype=np.float32)}
CARRY = {"z": rng.normal(size=(ROWS, 3)).astype(np.float32), "number": np.arange(ROWS, dtype=np.int32)}


def message_of(call):
    try:
        return call()
    except UserError as error:
        return str(error)


def fails():
    raise UserError("no data; build them")


def agreements(peers):
    """Returns what the processes tell each other through the coordination service and through their connections."""
    index, _ = processes.process_shard()
    heard = queue.Queue()
    peers.send("greeting", "early")
    sums = [processes.sum_over_processes("numbers", [index + 1, number]) for number in range(4)]
    processes.wait_for_all("four sums")
    kept = coordination._client().key_value_dir_get("trm/numbers")
    peers.listen("greeting", lambda *message: heard.put(message))
    return {
        "place": coordination.place(),
        "sums": sums,
        "kept": len(kept) // 2,
        "heard": sorted(heard.get(timeout=20) for _ in range(2)),
        "gathered": processes.gather({"a": np.array([[index, 7]])}, axis=1)["a"].tolist(),
        "any": [processes.any_process(index == each) for each in range(3)],
        "of main": processes.of_main_process(lambda: {"made by": index}),
        "failure of main": message_of(lambda: processes.of_main_process(fails)),
        "equal": message_of(lambda: processes.require_equal("text", "fields")),
        "different": message_of(lambda: processes.require_equal(f"text {index}", "fields")),
        "steps": agreed_steps(Path("run"), lambda: [2, 4] if index == 0 else [2, 4, 6]),
    }


def on_devices(devices, folder):
    """Carry and state on the devices, and a checkpoint of both."""
    index, count = processes.process_shard()
    own = devices.split_batch({name: np.split(array, count)[index] for name, array in CARRY.items()})
    carry = devices.shard(own)
    rows = devices.to_rows(carry)
    sums = devices.parallel_map(lambda params, buffers, batch: jax.lax.psum(batch["number"].sum(), AXIS))
    results = {
        "count": devices.count,
        "positions": devices.positions,
        "sums": devices.to_host(sums(devices.replicate(PARAMS), {}, carry)).tolist(),
        "own rows": equal(devices.from_rows(rows, own), own),
        "checksums": checksums(rows) == checksums(CARRY),
        "rows of a function": jax.tree.map(
            lambda x: devices.to_host(x).tolist(), devices.by_rows(lambda x: [x[:4], x[:3], x[-1]], rows["number"])
        ),
    }
    state = new_state(PARAMS, BUFFERS, dense_optimizer(OptimConfig(), 10))
    for name, placement in {
        "replicated": Placement(devices, Replicated()),
        "sharded": ShardedState(devices, Sharded(PARAMS, PARAMS, (), devices.count)),
    }.items():
        placed = placement.place(state)
        saved = placement.to_checkpoint(placed)
        results[name] = {
            "shapes": shapes(placement.shapes(state).params),
            "held": shapes(devices.to_host(placed.params)),
            "is whole": equal(devices.to_host(placement.whole(placed).params), PARAMS),
            "saved as it was": checksums(items_of(saved, ())["optimizer"])
            == checksums(items_of(state, ())["optimizer"]),
        }
    checkpoints = Checkpoints(RunFolder(folder))
    checkpoints.save(3, saved, rows, {"train_seconds": 1.5})
    checkpoints.wait()
    resumed = checkpoints.restore_newest(state, devices.row_sharding)
    checkpoints.close()
    same = equal(devices.from_rows(resumed.carry_like(rows), own), own), equal(resumed.state, state)
    results["restored"] = [*same, resumed.step, resumed.notes["train_seconds"]]
    return results


def shapes(tree):
    return jax.tree.map(lambda x: list(x.shape), tree)


def equal(tree, expected):
    return jax.tree.all(jax.tree.map(np.array_equal, tree, expected))


def main(folder):
    with processes.join_processes("cpu", 60) as peers:
        results: dict = {"agreements": agreements(peers)}
        for runner in ("pmap", "shard_map"):
            results[runner] = on_devices(Devices(runner=runner), Path(folder) / runner)
        coordination.wait_for_processes("end")
        print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
