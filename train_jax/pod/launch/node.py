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

_GONE = {"PREEMPTED", "TERMINATED", "SUSPENDED", "SUSPENDING", "FAILED", "DELETING", "HIDDEN"}


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
        if state == "READY":
            fresh = self.record.ready_since is None
        else:
            fresh = True
            self._account()
            self._bring(state, again)
            self._wait()
        if fresh:
            now = time.time()
            self.change(ready_since=now, begun=self.record.begun or now)
        return fresh

    def _bring(self, state: str, again: bool) -> None:
        """Makes a request for a node that is in no state to be used."""
        record = self.record
        if state == "STOPPED":
            self._gcloud.run(gcloud.start_node(record.node))
            return
        if state in _GONE:
            if not record.created:
                raise UserError(
                    f"{record.tpu} is {state} and was not created by a launch; delete it, or use another name"
                )
            self._say(f"{record.tpu} is {state}: deleting it")
            self.delete()
        elif state:
            return  # somebody creates or repairs it
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
                if time.time() > min(until, self.record.deadline or until) or self.stops():
                    raise
                self._say(f"no node yet: {error}")
            time.sleep(pause)
            pause = min(2 * pause, 40 * POLL_SECONDS)

    def _wait(self) -> None:
        queued, said = self.record.request.queued and self.record.created, ""
        until = time.time() + READY_SECONDS
        while (state := self._request_state() if queued else "ACTIVE") != "ACTIVE" or (
            state := self.state()
        ) != "READY":
            if state in _GONE - {"DELETING"} or (not queued and time.time() > until):
                raise GcloudError(f"{self.record.tpu} is {state}, and was to be READY")
            if state != said:
                self._say(f"{self.record.tpu} is {state or 'not there yet'}")
            said = state
            time.sleep(POLL_SECONDS)

    def stops(self) -> bool:
        """Whether somebody asked the run to stop."""
        newest = None if self._gcloud.dry else read_record(self.record.tpu)
        self.record = newest or self.record
        return self.record.stop_asked

    def is_gone(self) -> bool:
        """Whether the machines of the run are not there any more."""
        return self.state() in _GONE | {"", "STOPPED", "STOPPING"}

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
