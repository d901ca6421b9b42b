"""`--restarts`: which runs are started again, and how often."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.runtime import supervisor
from train_jax.runtime.supervisor import Supervisor, restarts_option

HEADER = """
import os, signal, sys, time
from pathlib import Path
from train_jax.runtime import supervisor
supervisor.BEAT_SECONDS = 0.05
supervisor.connect_to_supervisor()
starts = Path(sys.argv[1])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
"""
"""`number` counts the earlier starts."""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Runs a script under a supervisor; returns its exit status, its starts and the lines of the supervisor."""
    monkeypatch.setattr(supervisor, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.1)

    def run(code, restarts=10):
        said = []
        starts = tmp_path / "starts"
        command = [sys.executable, "-c", HEADER + code, str(starts)]
        status = Supervisor(command, restarts, said.append, wait_scale=0).run()
        return status, len(starts.read_text()), said

    return run


def test_a_crash_is_followed_by_a_restart(supervised):
    crash = "os.kill(os.getpid(), signal.SIGKILL) if number == 0 else sys.exit(0 if number == 2 else 69)"
    killed = "the run was killed by SIGKILL; restart 1 of 10 in 10 s"
    assert supervised(crash) == (0, 3, [killed, "the run ended with status 69; restart 2 of 10 in 20 s"])


@pytest.mark.parametrize("status", [0, 2, 75, 130])
def test_nothing_is_restarted_that_would_end_the_same_way(supervised, status):
    assert supervised(f"sys.exit({status})") == (status, 1, [])


def test_the_number_of_restarts_is_limited(supervised):
    status, starts, said = supervised("supervisor.report_start(number); sys.exit(1)", restarts=4)
    assert (status, starts) == (1, 5)
    assert said[-1] == "the run ended with status 1; it was restarted 4 times, which is what --restarts allows"
    assert said[-2] == "the run ended with status 1; restart 4 of 4 in 5 s", "progress, so the shortest wait"


@pytest.mark.parametrize("report", ["supervisor.report_start(40)", "pass"])
def test_a_run_without_progress_is_given_up(supervised, report):
    status, starts, said = supervised(f"{report}; sys.exit(1)")
    assert status == 1 and starts == (4 if "40" in report else 3)
    assert "3 restarts in a row made no progress beyond step" in said[-1]


def test_a_frozen_process_is_killed_and_restarted(supervised):
    freeze = "time.sleep(0.3); os.kill(os.getpid(), signal.SIGSTOP) if number == 0 else sys.exit(0)"
    status, starts, said = supervised(freeze)
    assert (status, starts) == (0, 2) and "sent no sign of life for 1 s and was killed" in said[0]


@pytest.mark.parametrize("handler", ["lambda *_: sys.exit(75)", "signal.SIG_DFL"], ids=["saves", "is killed"])
def test_sigterm_goes_to_the_run_and_nothing_is_restarted(supervised, handler):
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert supervised(f"signal.signal(signal.SIGTERM, {handler}); time.sleep(30)") == (75, 1, [])


def test_a_run_without_its_supervisor_stops_as_after_sigterm(tmp_path):
    code = HEADER + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(30)"
    read, write = os.pipe()
    command = [sys.executable, "-c", code, str(tmp_path / "starts")]
    variables = {supervisor.PIPE: str(write)}
    child = subprocess.Popen(command, env=os.environ | variables, pass_fds=[write])
    while not (tmp_path / "starts").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    os.close(write)
    os.close(read)
    assert child.wait(timeout=10) == 75


def test_the_option_is_taken_from_the_arguments(capsys):
    assert restarts_option(["tiny", "--restarts", "3", "--steps", "5"]) == (3, ["tiny", "--steps", "5"])
    assert restarts_option(["tiny", "--restarts=3"]) == (3, ["tiny"])
    assert restarts_option(["tiny"]) == (0, ["tiny"])
    with pytest.raises(UserError, match="--restarts -1: expected a number of restarts"):
        restarts_option(["tiny", "--restarts", "-1"])
    assert main(["train", "tiny", "--restarts", "often"]) == 2
    assert "--restarts often: expected a number" in capsys.readouterr().err
