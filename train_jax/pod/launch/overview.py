"""`trm launch list`: every launch and node, what it costs, and which nodes nobody needs any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from train_jax.pod.launch.gcloud import LABEL, Gcloud, list_nodes
from train_jax.pod.launch.node import TpuNode
from train_jax.pod.launch.record import Record, records
from train_jax.pod.launch.workers import Workers


class Row(NamedTuple):
    """A launch, a node, or both."""

    tpu: str
    zone: str
    type: str
    node: str
    """State of the node."""
    phase: str
    """Of the launch."""
    hours: str
    remark: str


def overview(commands: Gcloud, zones: Sequence[str], project: str) -> list[Row]:
    """Every launch of this machine, and the nodes in its zones and in `zones` that carry the label of a launch."""
    launches = records()
    places = {(record.zone, record.project) for record in launches if not _is_history(record)}
    nodes: dict[tuple[str, str], dict[str, Any]] = {}
    for zone, owner in sorted(places | {(zone, project) for zone in zones}):
        for node in commands.json(list_nodes(zone, owner)) or []:
            nodes[node["name"].rpartition("/")[2], zone] = node
    rows = [_row(record, nodes.pop((record.tpu, record.zone), None), commands) for record in launches]
    return [
        *rows,
        *(_unknown(name, zone, node) for (name, zone), node in nodes.items() if LABEL in node.get("labels", {})),
    ]


def _is_history(record: Record) -> bool:
    return record.over and record.ready_since is None


def _row(record: Record, node: dict[str, Any] | None, commands: Gcloud) -> Row:
    state = "" if node is None else node.get("state", "")
    phase = record.phase if record.status is None else f"{record.phase} ({record.status})"
    remark = _remark(record, state, commands)
    return Row(record.tpu, record.zone, record.request.type, state or "none", phase, record.cost(), remark)


def _remark(record: Record, state: str, commands: Gcloud) -> str:
    """What is wrong: a node that nobody uses or watches."""
    name = record.tpu
    if state in ("", "PREEMPTED", "TERMINATED"):
        gone = not record.over and record.phase != "new" and not record.is_watched()
        return f"its node is gone: `trm launch watch {name}` goes on" if gone else ""
    if record.over:
        return f"idle: the run is over; {f'`trm launch delete {name}`' if record.created else 'it was there before'}"
    if record.deadline is not None and time.time() > record.deadline + 600:
        return f"past --max-hours; `trm launch delete {name}`"
    if record.is_watched():
        return ""
    if record.phase == "running" and state == "READY":
        states = Workers(commands, TpuNode(commands, record, lambda _: None), lambda _: None).states()
        if "running" not in states:
            return f"idle: no host runs anything; `trm launch watch {name}` ends it"
    return f"orphaned: nobody would start it again or delete it; `trm launch watch {name}`"


def _unknown(name: str, zone: str, node: dict[str, Any]) -> Row:
    kind = node.get("acceleratorType", "").rpartition("/")[2]
    return Row(name, zone, kind, node.get("state", ""), "", "", "orphaned: created by a launch that is not known here")


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table, each remark on a line of its own."""
    cells = [("tpu", "zone", "type", "node", "launch", "hours"), *(row[:-1] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    remarks = ["", *(f"  {row.remark}" if row.remark else "" for row in rows)]
    return [line for pair in zip(lines, remarks, strict=True) for line in pair if line]
