"""JAX's coordination service as a store of small values: the only file of this package with a private name of JAX.

Unlike the functions of `multihost_utils`, nothing here runs on the devices, so that a second thread can use it while
the main thread compiles, or waits for a collective.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import jax
from absl import flags
from jax._src import clusters, distributed  # the store and the detection alone have no public names

_TIMEOUT_SECONDS = 24 * 3600
"""Timeout of a read in seconds; long before it, `Peers` ends a process that waits for a dead one."""

_calls: defaultdict[str, Any] = defaultdict(itertools.count)


def publish(name: str, value: str) -> None:
    """Makes a value known to all processes under a name; each name can be used once."""
    _client().key_value_set(f"trm/{name}", value)


def read(name: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Returns the value of a name; blocks until it is published. Raises an error of JAX after the timeout."""
    return _client().blocking_key_value_get(f"trm/{name}", int(timeout_seconds * 1000))


def exchange(name: str, value: str) -> list[str]:
    """Returns the values of all processes, in their order. Collective: each process makes the same calls for a name."""
    index, count = place()
    if count == 1:
        return [value]
    number = next(_calls[name])
    key = f"{name}/{number}"
    publish(f"{key}/{index}", value)
    if number > 1:  # whoever published in the last call has read the values of the call before it
        _client().key_value_delete(f"trm/{name}/{number - 2}/{index}")
    return [read(f"{key}/{each}") for each in range(count)]


def place() -> tuple[int, int]:
    """Returns (index of this process, number of processes) without a backend, which may wait for other processes."""
    state = distributed.global_state
    return (state.process_id or 0, state.num_processes or 1) if state.client is not None else (0, 1)


def detect_cluster(timeout_seconds: float) -> tuple[str | None, int | None, int | None, Any]:
    """Returns the coordinator's address, number of processes, index and local devices, as JAX detects them.

    `jax.distributed.initialize()` would connect at once; here the processes can be counted before.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, max(int(timeout_seconds), 1)
    )


def wait_for_processes(name: str) -> None:
    """Blocks until every process is here. Collective."""
    exchange(name, "")


def keep_orbax_off_devices() -> None:
    """Makes Orbax's processes wait for each other in the coordination service, not in a collective of the devices."""
    if jax.process_count() == 1:
        return
    flags.FLAGS.mark_as_parsed()  # otherwise Orbax cannot read them
    flags.FLAGS.experimental_orbax_use_distributed_barrier = True


def _client() -> Any:
    return distributed.global_state.client
