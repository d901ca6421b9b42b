"""A TPU node of a launch: created, waited for, created again after a preemption, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.launch import gcloud
from train_jax.pod.launch.gcloud import Gcloud, GcloudError
from train_jax.pod.launch.record import Record, read_record, update

POLL_SECONDS = 15.0
"""Between looks at a node that is being created."""
READY_SECONDS = 3600.0
"""How long a node may take to be ready; a queued one waits for its turn without a limit."""
CAPACITY_SECONDS = 24 * 3600.0
"""How long a node is asked for again after a preemption, while there is none."""

_LASTING = {"READY", "STOPPED", "PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "HIDDEN"}
"""States that end only if somebody acts; the others are on the way to one of these, or to no node."""
_GONE = _LASTING - {"READY"} | {"", "STOPPING", "SUSPENDING", "DELETING"}


class TpuNode:
    """The node of a record, which it updates."""

    def __init__(self, commands: Gcloud, record: Record, say: Callable[[str], None]):
        self.record, self._gcloud, self._say = record, commands, say

    def change(self, **changes: Any) -> None:
        if not self._gcloud.dry:
            self.record = update(self.record.tpu, **changes)
        else:
            self.record = self.record.replaced(**changes)

    def state(self) -> str:
        """READY, another state of Google Cloud, or nothing for a node that does not exist."""
        described = self._describe()
        return "" if described is None else _state(described)

    def addresses(self) -> list[str]:
        """The internal addresses of the workers, in their order."""
        described = self._describe() or {}
        return [endpoint["ipAddress"] for endpoint in described.get("networkEndpoints", [])]

    def make_ready(self) -> bool:
        """Creates the node, or starts it, unless it is there; returns whether it is another machine than before.

        Raises `UserError` for a node that is not there and must not be created.
        """
        state, again = self.state(), self.record.begun is not None
        fresh = state != "READY" or self.record.ready_since is None
        if state != "READY":
            self._account()
            self._bring(again)
        if fresh:
            now = time.time()
            self.change(ready_since=now, begun=self.record.begun or now)
        return fresh

    def _bring(self, again: bool) -> None:
        """Waits, creates, starts until the node is ready; `again`: also if a new node is preempted before it is."""
        requested = False
        while (state := self._settled(requested)) != "READY":
            if requested and (not again or state == "FAILED"):
                raise GcloudError(f"{self.record.tpu} is {state}, and was to be READY")
            self._request(state, again)
            requested = True

    def _request(self, state: str, again: bool) -> None:
        """Starts or creates a node that is in no state to be used."""
        record = self.record
        if state == "STOPPED":
            self._gcloud.run(gcloud.start_node(record.node))
            return
        if state:
            if not record.created:
                raise UserError(
                    f"{record.tpu} is {state} and was not created by a launch; delete it, or use another name"
                )
            self._say(f"{record.tpu} is {state}: deleting it")
            self.delete()
        if not record.request.type:
            raise UserError(f"{record.tpu} does not exist in {record.zone}; give --type, such as v4-64, to create it")
        self.change(phase="creating", created=True)
        self._say(f"creating {record.tpu}, {record.request.type}, {record.request.capacity}")
        self._create(CAPACITY_SECONDS if again else 0.0)

    def _create(self, patience_seconds: float) -> None:
        until, pause = time.time() + patience_seconds, POLL_SECONDS
        while True:
            try:
                self._gcloud.run(gcloud.create(self.record.node, self.record.request))
                return
            except GcloudError as error:
                if time.time() > min(until, self.record.deadline or until):
                    raise
                self.check_not_stopped()
                self._say(f"no node yet: {error}")
            time.sleep(pause)
            pause = min(2 * pause, 40 * POLL_SECONDS)

    def _settled(self, requested: bool) -> str:
        """Waits while the node changes its state; returns a state that lasts. `requested`: it is to exist soon.

        A queued request is waited for without a limit, a node for `READY_SECONDS`.
        """
        queued, said, until = requested and self.record.request.queued and self.record.created, "", 0.0
        while True:
            request = self._request_state() if queued else "ACTIVE"
            if request in ("FAILED", "SUSPENDED"):
                return request
            state = self.state() if request == "ACTIVE" else request
            if request == "ACTIVE":
                until = until or time.time() + READY_SECONDS
                if state in _LASTING or not (state or requested):
                    return state
                if time.time() > until:
                    raise GcloudError(f"{self.record.tpu} is {state or 'not there'}, and was to be READY")
            self.check_not_stopped()
            if state != said:
                self._say(f"{self.record.tpu} is {state or 'not there yet'}")
            said = state
            time.sleep(POLL_SECONDS)

    def check_not_stopped(self) -> None:
        """Raises `GcloudError` if somebody asked for an end before the run could be started."""
        if self.stops():
            raise GcloudError(f"the launch {self.record.tpu} was stopped before the run was started")

    def stops(self) -> bool:
        """Whether somebody asked the run to stop."""
        newest = None if self._gcloud.dry else read_record(self.record.tpu)
        self.record = newest or self.record
        return self.record.stop_asked

    def is_gone(self) -> bool:
        """Whether the machines of the run are not there any more."""
        return self.state() in _GONE

    def delete(self) -> None:
        """Deletes the node, and the request for it if it was queued. One that is not there is no error."""
        queued = self.record.request.queued and self.record.created
        try:
            self._gcloud.run(gcloud.delete(self.record.node, queued=queued))
        except GcloudError as error:
            if "NOT_FOUND" not in str(error):
                raise
        self._account()

    def _account(self) -> None:
        """Adds the hours of a node that is gone."""
        hours = self.record.node_hours()
        self.change(ready_since=None, seconds_before=3600 * hours)

    def _describe(self) -> dict[str, Any] | None:
        return self._gcloud.json(gcloud.describe(self.record.node))

    def _request_state(self) -> str:
        described = self._gcloud.json(gcloud.describe(self.record.node, queued=True))
        return "" if described is None else _state(described)


def _state(described: dict[str, Any]) -> str:
    """That of a node is a word, that of a queued request an object."""
    state = described.get("state", "")
    return state.get("state", "") if isinstance(state, dict) else state
