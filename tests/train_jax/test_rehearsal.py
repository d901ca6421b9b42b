"""`trm launch --rehearse`: processes of this machine behave as the hosts of a pod."""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support.markers import slow_or_campaign
from support.scripts import ENVIRONMENT, ROOT

from campaigns.faults_runs import relative_error
from train_jax.pods.launch import life
from train_jax.pods.launch.life import View, end_of, rehearsal, run_to_end
from train_jax.run.restore import restore

FIELDS = ("--steps", "40", "--global-batch-size", "32", "--eval-every-steps", "5", "--checkpoint-every-steps", "5",
          "--wandb", "disabled", "--eval-batch-size", "32", "--arch.halt-exploration-prob", "0.5",
          "--arch.H-cycles", "1", "--arch.L-cycles", "1")  # fmt: skip


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(life, "WAIT_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("statuses", "status", "again"),
    [
        ([0, 0], 0, False),
        ([75, 75], 75, True),
        ([137, 69, 69], 137, True),
        ([None, 69], 75, True),
        ([69, 1, 69], 1, False),
        ([124, 75], 124, False),
    ],
)
def test_the_exit_statuses_of_all_hosts_give_one_status(statuses, status, again):
    assert end_of(statuses)[:2] == (status, again)


class ScriptedHosts:
    """Hosts whose processes end with given statuses, start by start."""

    def __init__(self, *statuses):
        self.count = len(statuses[0])
        self.starts = 0
        self._statuses = statuses
        self._asked = False

    def start(self):
        self.starts += 1

    def follow(self, host, line):
        line(f"start {self.starts}")
        status = self._statuses[self.starts - 1][host]
        while status == "wait" and not self._asked:
            time.sleep(0.01)
        return 75 if status == "wait" else status

    def stop(self):
        self._asked = True

    def stops(self):
        return self._asked


def run(*statuses, restarts=2, deadline=None):
    hosts = ScriptedHosts(*statuses)
    lines = []
    hosts.deadline = deadline
    status = run_to_end(hosts, View(lines.append), restarts)
    return status, hosts.starts, lines


def test_a_run_is_started_again_until_it_finishes():
    status, starts, lines = run([75, 75], [137, 69], [0, 0])
    assert (status, starts) == (0, 3)
    assert [line for line in lines if line.startswith("launch")] == [
        "launch | 2 of 2 preempted; restart 1 of 2",
        "launch | 1 of 2 killed by SIGKILL, 1 of 2 lost another host; restart 2 of 2",
        "launch | 2 of 2 finished",
    ]
    assert sorted(lines)[:2] == ["host 0 | start 1", "host 0 | start 2"]
    status, starts, lines = run([75], [75], [75])
    assert (status, starts) == (75, 3) and "restarted 2 times, which is what --restarts allows" in lines[-1]
    assert run([69, 1])[:2] == (1, 1), "an error is final"


def test_a_deadline_stops_the_run():
    status, starts, lines = run(["wait", "wait"], deadline=time.time() + 0.1)
    assert (status, starts) == (124, 1) and lines[-1] == "launch | stopped at --max-hours"


SCRIPT = """
echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS $XLA_FLAGS $1"
trap 'echo preempted; kill $!; exit 75' TERM
if [ "$JAX_PROCESS_ID" = 0 ]; then until [ -d once-1 ]; do sleep 0.01; done; echo 'step 20/60'; fi
if mkdir "once-$JAX_PROCESS_ID" 2>/dev/null; then sleep 60 & wait; fi
"""


def test_every_host_runs_the_command_and_one_is_preempted(tmp_path, monkeypatch):
    """Host 0 is not preempted here: the script does not know the others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.sh").write_text(SCRIPT)
    (tmp_path / "once-0").mkdir()
    lines = []
    with rehearsal("2x3", ["bash", "work.sh", "a; touch b"], View(lines.append), preempt="1@15") as hosts:
        assert run_to_end(hosts, View(lines.append), 3) == 0
    assert not hosts.faults and not (tmp_path / "b").exists()
    first = [line for line in lines if " of 2 at " in line]
    ports = {re.search(r":(\d+) ", line)[1] for line in first}
    assert len(first) == 4 and 1 <= len(ports) <= 2
    assert {line.split(" at ")[0] for line in first} == {"host 0 | 0 of 2", "host 1 | 1 of 2"}
    assert all("device_count=3 a; touch b" in line for line in first)
    assert "launch | SIGTERM to host 1" in lines and "host 1 | preempted" in lines


def command(shape, data_dir, run_dir, *options):
    launch = [sys.executable, "-m", "train_jax", "launch", "--rehearse", shape, *options]
    return [*launch, "--", "train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(run_dir), *FIELDS]


def rehearse(*arguments):
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_at_step(step, *arguments):
    """Kills the launcher, and nothing else, when host 0 reports a step."""
    with subprocess.Popen(command(*arguments), cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:  # fmt: skip
        for line in process.stdout:
            match = re.match(r"host 0 \| step +(\d+)", line)
            if match and int(match[1]) >= step:
                process.send_signal(signal.SIGKILL)
                return
    pytest.fail(f"no step {step}")


def assert_same_weights(run_dir, other):
    state, expected = (restore(str(path), whole_state=True).state for path in (run_dir, other))
    for (path, leaf), right in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert "opt_state" in name or relative_error(np.asarray(leaf), np.asarray(right)) < 1e-5, name


@pytest.mark.parametrize("size", slow_or_campaign([(2, 2)], [(8, 4)]))
def test_a_rehearsal_with_faults_trains_as_one_process(tmp_path, data_dir, size):
    """The launcher is killed; the same command continues, and loses a host to a preemption and one to a kill."""
    hosts, devices = size
    shape = f"{hosts}x{devices}"
    run_dir = tmp_path / "run"
    kill_at_step(5, shape, data_dir, run_dir)
    shown = rehearse(shape, data_dir, run_dir, "--preempt", f"{hosts - 1}@15", "--kill", "0@25")
    rehearse(f"1x{hosts * devices}", data_dir, tmp_path / "one")
    assert f"launch | {hosts} of {hosts} preempted; restart 1 of 10" in shown
    assert f"launch | 1 of {hosts} killed by SIGKILL, {hosts - 1} of {hosts} lost another host; restart 2" in shown
    assert len(re.findall(r"host 0 \| .*continuing at step [1-9]", shown)) == 3
    assert f"host {hosts - 1} | trm: process 0 on" in shown and f"launch | {hosts} of {hosts} finished" in shown
    assert_same_weights(run_dir, tmp_path / "one")
