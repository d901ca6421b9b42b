"""A launch brings a node in any state to READY or fails; `worker.sh` ends a run that is stopped when it begins."""

import subprocess
import time

import pytest
from support.scripts import ROOT

from train_jax.pod.launch import tpu
from train_jax.pod.launch.gcloud import QUEUED, Gcloud, GcloudError
from train_jax.pod.launch.record import WORKER_SCRIPT, Record, read_record, update, write_record
from train_jax.pod.launch.tpu import Tpu


class Cloud(Gcloud):
    """Answers `describe` with one state after the other, the last one for ever; records the other verbs.

    A request is granted, unless the state is one that only a request has.
    """

    def __init__(self, *states):
        self.states, self.verbs = list(states), []

    def run(self, argv):
        self.verbs.append(argv[4])
        return ""

    def json(self, argv):
        state = self.states[0]
        if argv[3] == QUEUED and state not in ("WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"):
            return {"state": {"state": "ACTIVE"}}
        if len(self.states) > 1:
            self.states.pop(0)
        return {"state": {"state": state} if argv[3] == QUEUED else state} if state else {}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """`node(cloud, field=value, …)`: the node of a launch."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tpu, "POLL_SECONDS", 0.0)

    def make(cloud, **fields):
        fields = {"type": "v4-16", "command": ("train", "tiny"), "token": "t", "created": True} | fields
        write_record(Record("mine", "us-central2-b", **fields))
        return Tpu(cloud, read_record("mine"), lambda text: None)

    return make


RUNNING = {"begun": 1.0, "ready_since": 1.0, "starts": 1}


@pytest.mark.parametrize(
    ("states", "fields", "verbs"),
    [
        (["READY"], RUNNING, []),
        (["", "", "CREATING", "READY"], {"created": False}, ["create"]),
        (["STOPPING", "STOPPING", "PREEMPTED", "CREATING", "READY"], RUNNING, ["delete", "create"]),
        (["DELETING", "DELETING", "", "CREATING", "READY"], RUNNING, ["delete", "create"]),
        (["", "", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "READY"], {"created": False}, ["create"]),
        (["", "", "SUSPENDED", "CREATING", "READY"], RUNNING, ["delete", "create"] * 2),
        (["PREEMPTED", "PREEMPTED", "CREATING", "PREEMPTED", "READY"], RUNNING, ["delete", "create"] * 2),
        (["REPAIRING", "REPAIRING", "READY"], RUNNING, []),
    ],
)
def test_a_node_is_made_ready(node, states, fields, verbs):
    cloud = Cloud(*states)
    fresh = node(cloud, **fields).make_ready()
    assert cloud.verbs == verbs and fresh == (states != ["READY"])
    assert read_record("mine").ready_since is not None


@pytest.mark.parametrize(
    ("states", "fields", "message"),
    [
        (["", "", "CREATING", "PREEMPTED"], {"created": False}, "mine is PREEMPTED, expected READY"),
        (["PREEMPTED", "PREEMPTED", "CREATING", "FAILED"], RUNNING, "mine is FAILED, expected READY"),
        (["PREEMPTED"], {"created": False}, "was not created by a launch"),
        (["STOPPED"], {"created": False}, "mine is STOPPED and was not created by a launch; delete it"),
        (["", ""], {"type": ""}, "give --type"),
        (["", "", "FAILED"], {}, "mine is FAILED, expected READY"),
        (["CREATING"], {"stop_asked": True}, "was stopped before the run was started"),
        (["CREATING"], {**RUNNING, "max_hours": 1.0}, "--max-hours of mine passed before the run was started again"),
    ],
)
def test_a_node_that_cannot_be_ready_is_an_error(node, states, fields, message):
    with pytest.raises(Exception, match=message):
        node(Cloud(*states), **fields).make_ready()


def test_a_node_that_does_not_settle_is_given_up(node, monkeypatch):
    monkeypatch.setattr(tpu, "READY_SECONDS", 0.02)
    with pytest.raises(GcloudError, match="mine is CREATING, expected READY"):
        node(Cloud("CREATING")).make_ready()


def test_a_stop_ends_the_wait_for_capacity(node):
    class Full(Cloud):
        def run(self, argv):
            update("mine", stop_asked=argv[4] == "create")
            return super().run(argv)

    with pytest.raises(GcloudError, match="was stopped before the run was started"):
        node(Full("", "", "WAITING_FOR_RESOURCES"), **RUNNING).make_ready()


# ---- worker.sh


@pytest.fixture
def worker(tmp_path):
    """`worker(command, argument, …)` runs the script in the folder of a launch whose environment does nothing."""
    script = tmp_path / "code" / WORKER_SCRIPT
    script.parent.mkdir(parents=True)
    script.write_bytes((ROOT / WORKER_SCRIPT).read_bytes())
    (tmp_path / "code" / "environment.sh").write_text("sleep 0.3\n")
    (tmp_path / "extras").write_text("tpu\n")

    def run(*words):
        return subprocess.run(["bash", script, *words], capture_output=True, text=True, timeout=30)

    return run


@pytest.mark.slow  # a second of shell scripts
@pytest.mark.parametrize("wait", [0.0, 0.1, 0.35])
def test_a_run_that_is_stopped_when_it_begins_ends(worker, wait):
    """The run stops before its process is known, while its environment is made, and about when its command starts."""
    worker("start", "a", "0", "--", "sleep", "60")
    time.sleep(wait)
    assert worker("stop", "a").returncode == 0
    assert worker("follow", "a", "0", "mark").stdout.startswith("mark\n")  # then perhaps what bash says of a signal
    for _ in range(40):
        if (status := worker("status", "a").stdout.split())[0] == "ended":
            break
        time.sleep(0.05)
    assert status == ["ended", "143"]


def test_a_start_that_never_began_is_not_followed_for_ever(worker, tmp_path):
    script = tmp_path / "code" / WORKER_SCRIPT
    script.write_text(script.read_text().replace("-lt 300", "-lt 2"))
    (tmp_path / "a").mkdir()
    assert worker("follow", "a", "0", "mark").returncode == 4
    assert worker("status", "a").stdout == "lost\n"
