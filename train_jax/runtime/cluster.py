"""The processes that this one belongs to (by variables, TPU pod, SLURM or Kubernetes), and their meeting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import socket
import sys
import time
from typing import Any

from train_jax.errors import LostProcessError, UserError
from train_jax.runtime import backend, coordination
from train_jax.runtime.backend import VARIABLES, Source


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One of `count` processes: the current one."""

    address: str
    """Host and port of the coordinator, which is process 0."""
    count: int
    index: int
    source: Source
    local_devices: tuple[int, ...] | None = None
    """GPUs of this process, if the processes of a host share its GPUs; None for all devices."""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def name_of(self, index: int) -> str:
        """Returns a description of another process that has not answered yet."""
        if index == 0:
            return self.host
        if self.source == "tpu":
            return f"worker {index} of the TPU"
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        return f"one of the nodes {nodes}" if self.source == "slurm" and nodes else ""


def this_cluster(platform: str, timeout_seconds: float) -> Cluster | None:
    """Returns the processes that this one belongs to; None if it is alone.

    `platform` is what the process computes on: one that leaves the TPU of a pod alone needs none of its other hosts.
    Raises `UserError` for an incomplete set of variables, or if the hosts of a pod cannot be determined.
    """
    source = backend.started_by(platform)
    if source == "variables":
        return _from_variables()
    if source is None:
        return None
    try:
        address, count, index, local = coordination.detect_cluster(timeout_seconds)
    except Exception as error:  # JAX raises whatever the metadata server, the variables or Kubernetes lead to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the other processes of this {source} job cannot be determined ({reason}); set {', '.join(VARIABLES)}"
        ) from error
    if address is None or not count or count == 1:
        return None
    shared = source == "slurm" and not os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").startswith("1")
    return Cluster(address, count, index or 0, source, tuple(local) if local and shared else None)


def use_on_one_host(wanted: backend.Platform, timeout_seconds: float = 30.0) -> None:
    """Leaves the TPU of a pod alone, whose other hosts would have to join, in a command that computes on one host.

    Raises `UserError` if that TPU is requested.
    """
    platform = backend.choose(wanted).platform
    cluster = this_cluster(platform, timeout_seconds) if platform == "tpu" and backend.tpu_files() else None
    if cluster is None or cluster.source != "tpu":
        backend.use(wanted, several=False)
        return
    if wanted == "tpu":
        raise UserError(
            f"--platform tpu: the TPU of this machine belongs to {cluster.count} hosts, and this command runs on one; "
            "use --platform cpu"
        )
    backend.use("cpu", several=False)
    sys.stderr.write(f"trm: computing on the CPU of this machine: its TPU belongs to {cluster.count} hosts\n")


def _from_variables() -> Cluster | None:
    address, count, number = (os.environ.get(name, "") for name in VARIABLES)
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise UserError(
            f"{', '.join(f'{name}={os.environ.get(name)}' for name in VARIABLES)}: expected host:port, a number of "
            "processes and a process number from 0 below it; set all three, or none"
        )
    return Cluster(address, int(count), int(number), "variables")


_GREETING = "trm"
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
"""Seconds that the others wait longer than process 0, and that a connection may take to identify itself."""

Present = list[dict[str, Any]]
"""The host and the platform of every process, in the order of the processes."""


def roll_call(cluster: Cluster, platform_name: str, timeout_seconds: float) -> Present:
    """Waits until all processes are there; returns their hosts and platforms. Collective.

    Raises `LostProcessError` that names a process that did not come within the time, in every process that did.
    """
    own = {"host": platform.node(), "platform": platform_name}
    if cluster.index == 0:
        return _call(cluster, own, timeout_seconds)
    return _answer(cluster, own, timeout_seconds)


def _call(cluster: Cluster, own: dict[str, Any], timeout_seconds: float) -> Present:
    present = {0: own}
    links = []
    deadline = time.monotonic() + timeout_seconds
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    address = ("", cluster.port)
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(
            socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
        )
        while len(present) < cluster.count and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with contextlib.suppress(OSError, ValueError, TypeError):  # the connection is not one of this run
                link = closing.enter_context(server.accept()[0])
                link.settimeout(_ANSWER_SECONDS)
                greeting, index, facts = _receive(link)
                if greeting == _GREETING and 0 < index < cluster.count:
                    present[index] = facts
                    links.append(link)
        missing = [index for index in range(cluster.count) if index not in present]
        for link in links:
            with contextlib.suppress(OSError):
                _send(link, [missing, [present.get(index) for index in range(cluster.count)]])
        if not missing:
            for link in links:  # the side that closes first keeps the port busy, so the others close first
                with contextlib.suppress(OSError):
                    link.recv(1)
    _check(cluster, missing, timeout_seconds)
    return [present[index] for index in range(cluster.count)]


def _answer(cluster: Cluster, own: dict[str, Any], timeout_seconds: float) -> Present:
    deadline = time.monotonic() + timeout_seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=_ANSWER_SECONDS) as link:
                _send(link, [_GREETING, cluster.index, own])
                link.settimeout(timeout_seconds + _ANSWER_SECONDS)
                missing, present = _receive(link)
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            time.sleep(_RETRY_SECONDS)
            continue
        _check(cluster, missing, timeout_seconds)
        return present
    where = f"could not be reached at {cluster.address} within {timeout_seconds:.0f} s ({reason})"
    raise LostProcessError(0, cluster.name_of(0), where)


def _check(cluster: Cluster, missing: list[int], timeout_seconds: float) -> None:
    if missing:
        others = f", nor did {len(missing) - 1} others" if len(missing) > 1 else ""
        name = cluster.name_of(missing[0])
        reason = f"did not connect to {cluster.address} within {timeout_seconds:.0f} s{others}"
        raise LostProcessError(missing[0], name, reason)


def _send(link: socket.socket, value: Any) -> None:
    link.sendall(json.dumps(value).encode() + b"\n")


def _receive(link: socket.socket) -> Any:
    """Returns one line of JSON. Raises `OSError` if the connection is closed before its end."""
    text = b""
    while not text.endswith(b"\n"):
        data = link.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        text += data
    return json.loads(text)
