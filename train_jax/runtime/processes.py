"""The processes of a run: initialization, common decisions, and gathering host arrays."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train_jax.errors import UserError
from train_jax.runtime.coordination import exchange
from train_jax.runtime.peers import Peers
from train_jax.runtime.relay import start_relay

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables of a multi-process run: the coordinator's address, the number of processes, and the index of
this process."""


_peers: Peers | None = None


def peers() -> Peers | None:
    """The connections of `join_processes`; None for a single process."""
    return _peers


def join_processes() -> contextlib.AbstractContextManager[Peers | None]:
    """Initializes `jax.distributed` if the environment defines several processes.

    Must run before anything else asks JAX for devices. Everything that uses several processes belongs into the returned
    context: a process that ends it is no longer missed by the others. Raises `UserError` for an incomplete set of
    variables, `LostProcessError` if a process does not come.
    """
    global _peers
    address, count, number = (os.environ.get(name, "") for name in VARIABLES)
    if not (address or count or number):
        return contextlib.nullcontext()
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise UserError(
            f"{', '.join(f'{name}={os.environ.get(name)}' for name in VARIABLES)}: expected host:port, a number of "
            "processes and a process number from 0 below it; set all three, or none"
        )
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from `Preemption`
    here = address if number == "0" else f"127.0.0.1:{start_relay(host.strip('[]'), int(port))}"
    jax.distributed.initialize(
        here,
        int(count),
        int(number),
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"[::]:{port}",
        shutdown_timeout_seconds=30,
    )
    if int(count) == 1:
        return contextlib.nullcontext()
    _peers = Peers(int(number), int(count), host.strip("[]"))
    return _peers


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
    """The sums over all processes of each number. Collective, without the devices: see `coordination`."""
    return [sum(each) for each in zip(*map(json.loads, exchange(name, json.dumps(numbers))), strict=True)]


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process. Collective."""
    return bool(gather({"flag": np.array([flag])}, axis=0)["flag"].any())


def of_main_process(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns in the first process, on every process; it must fit into JSON. Collective.

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
    """Raises `UserError` in every process if the block raised it in one process."""
    mistake = None
    try:
        yield
    except UserError as error:
        mistake = error
    failed = gather({"failed": np.array([mistake is not None])}, axis=0)["failed"]
    if mistake is not None:
        raise mistake
    if failed.any():
        raise UserError(f"process {int(failed.argmax())} of {len(failed)} failed; see its output for the reason")


def require_equal(text: str, what: str) -> None:
    """Raises `UserError` in every process unless `text`, a description of `what`, is equal in all processes."""
    checksums = gather({"text": np.array([zlib.crc32(text.encode())])}, axis=0)["text"]
    if len(set(checksums.tolist())) > 1:
        raise UserError(f"the {len(checksums)} processes were started with different {what}; start all with the same")
