"""The processes of a run: initialization, common decisions, and gathering host arrays."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train_jax.errors import StorageError, UserError
from train_jax.runtime import backend
from train_jax.runtime.backend import Platform
from train_jax.runtime.coordination import exchange

if TYPE_CHECKING:
    from train_jax.runtime.cluster import Cluster, Present
    from train_jax.runtime.peers import Peers

_peers: Peers | None = None


def peers() -> Peers | None:
    """Returns the connections of `join_processes`; None for a single process."""
    return _peers


def join_processes(
    platform: Platform = "auto",
    timeout_seconds: float | None = None,
    cpu_devices: Callable[[int], int] = lambda processes: 0,
) -> contextlib.AbstractContextManager[Peers | None]:
    """Initializes `jax.distributed` if this is one of several processes, and makes JAX use the platform.

    Must run before anything else asks JAX for devices. Everything that uses several processes belongs into the returned
    context: a process that ends it is no longer missed by the others. Raises `UserError` for an incomplete set of
    variables, or if a process computes on another platform; `LostProcessError` if a process does not come in time.
    `cpu_devices` returns the `cpu_devices` of `backend.use` for a number of processes.
    """
    cluster = None
    chosen = backend.choose(platform).platform
    if backend.started_by(chosen) is not None:
        # A process that is alone needs nothing of other hosts.
        from train_jax.runtime.cluster import this_cluster
        from train_jax.runtime.peers import JOIN_SECONDS

        timeout_seconds = JOIN_SECONDS if timeout_seconds is None else timeout_seconds
        cluster = this_cluster(chosen, timeout_seconds)
    count = 1 if cluster is None else cluster.count
    choice = backend.use(platform, several=count > 1, cpu_devices=cpu_devices(count))
    if cluster is None or timeout_seconds is None:
        return contextlib.nullcontext()
    return _join(cluster, choice.platform, timeout_seconds)


def _join(cluster: Cluster, platform: str, timeout_seconds: float) -> contextlib.AbstractContextManager[Peers | None]:
    """Connects this process to the others. Collective."""
    from train_jax.runtime.cluster import roll_call
    from train_jax.runtime.peers import Peers
    from train_jax.runtime.relay import start_relay

    global _peers
    present = roll_call(cluster, platform, timeout_seconds)
    _check_platforms(present)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from `Preemption`
    here = cluster.address if cluster.index == 0 else f"127.0.0.1:{start_relay(cluster.host, cluster.port)}"
    jax.distributed.initialize(
        here,
        cluster.count,
        cluster.index,
        local_device_ids=cluster.local_devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"[::]:{cluster.port}",
        initialization_timeout=max(int(timeout_seconds), 30),
        shutdown_timeout_seconds=30,
    )
    if cluster.count == 1:
        return contextlib.nullcontext()
    _peers = Peers(cluster.index, cluster.count, cluster.host)
    return _peers


def _check_platforms(present: Present) -> None:
    usual = Counter(each["platform"] for each in present).most_common(1)[0][0]
    for index, each in enumerate(present):
        if each["platform"] != usual:
            raise backend.PlatformError(
                f"process {index} on {each['host']} computes on the {each['platform']}, the others on the {usual}; "
                f"give every process the same --platform, and look for what holds the device on {each['host']}"
            )


def is_main_process() -> bool:
    """Returns whether this process writes the files of the run."""
    return jax.process_index() == 0


def process_shard() -> tuple[int, int]:
    """Returns (index of this process, number of processes)."""
    return jax.process_index(), jax.process_count()


def gather(arrays: dict[str, np.ndarray], axis: int) -> dict[str, np.ndarray]:
    """Concatenates the host arrays of all processes, in process order, along `axis`; their shapes must be equal."""
    if jax.process_count() == 1:
        return arrays
    gathered = multihost_utils.process_allgather(arrays)
    return {name: np.concatenate(list(array), axis=axis) for name, array in gathered.items()}


def sum_over_processes(name: str, numbers: list[int]) -> list[int]:
    """Returns the sum of each number over all processes. Collective, without the devices: see `coordination`."""
    return [sum(each) for each in zip(*map(json.loads, exchange(name, json.dumps(numbers))), strict=True)]


def any_process(flag: bool) -> bool:
    """Returns True if the flag is set in any process. Collective."""
    return bool(gather({"flag": np.array([flag])}, axis=0)["flag"].any())


def of_main_process(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns on every process the result of `make` in the first process, which must fit into JSON. Collective.

    A `UserError` there is raised in every process.
    """
    made: dict[str, Any] = {}
    with all_or_none():
        if is_main_process():
            made = make()
    if jax.process_count() == 1:
        return made
    text = np.frombuffer(json.dumps(made).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8) if not is_main_process() else text
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def wait_for_all(what: str) -> None:
    """Blocks until every process is here. Collective."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Raises `UserError` in every process if the block raised it in one process; `StorageError` for a `StorageError`.

    So all of them end with the same status, and `--restarts` starts all of them again, or none.
    """
    mistake = None
    try:
        yield
    except UserError as error:
        mistake = error
    statuses = gather({"statuses": np.array([mistake.STATUS if mistake is not None else 0])}, axis=0)["statuses"]
    if mistake is not None:
        raise mistake
    if statuses.any():
        failed = int(statuses.argmax())
        error = StorageError if statuses[failed] == StorageError.STATUS else UserError
        raise error(f"process {failed} of {len(statuses)} failed; see its output for the reason")


def require_equal(text: str, what: str) -> None:
    """Raises `UserError` in every process unless `text`, a description of `what`, is equal in all processes."""
    checksums = gather({"text": np.array([zlib.crc32(text.encode())])}, axis=0)["text"]
    if len(set(checksums.tolist())) > 1:
        raise UserError(f"the {len(checksums)} processes were started with different {what}; start all with the same")
