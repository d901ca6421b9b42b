"""The meeting of all processes before JAX connects them: a process that does not come is named.

JAX itself ends a process with an abort and a stack trace if another one is late. Process 0 listens on the coordinator's
port, where JAX's service will listen afterwards; the others connect and say who they are. Everybody is answered with
the list of all, or with the number of one that is missing.
"""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import time
from typing import Any

from train_jax.errors import LostProcessError
from train_jax.runtime.cluster import Cluster

_GREETING = "trm"
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
"""How much longer than process 0 the others wait, and how long a connection may take to say who it is."""

Present = list[dict[str, Any]]
"""For every process, in their order: its host and the platform that it computes on."""


def roll_call(cluster: Cluster, platform_name: str, timeout_seconds: float) -> Present:
    """Waits until all processes are there; returns their hosts and platforms. Collective.

    Raises `LostProcessError` that names a process that did not come within the time, in every process that did.
    """
    own = {"host": platform.node(), "platform": platform_name}
    if cluster.index == 0:
        return _call(cluster, own, timeout_seconds)
    return _answer(cluster, own, timeout_seconds)


def _call(cluster: Cluster, own: dict[str, Any], timeout_seconds: float) -> Present:
    present, links = {0: own}, []
    deadline = time.monotonic() + timeout_seconds
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    address = ("", cluster.port)
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(
            socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
        )
        while len(present) < cluster.count and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with contextlib.suppress(OSError, ValueError, TypeError):  # of a connection that is none of ours
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
            for link in links:  # who closes first keeps the port busy: not this side
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
    """One line of JSON. Raises `OSError` if the connection is closed before its end."""
    text = b""
    while not text.endswith(b"\n"):
        data = link.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        text += data
    return json.loads(text)
