"""Processes of a run that die, freeze, fail or are late, without training."""

import json
import os
import platform
import signal
import socket
import subprocess
import time

import pytest
from support.processes import free_port
from support.scripts import ENVIRONMENT, ROOT, script

from train_jax.errors import LostProcessError
from train_jax.runtime import peers

SILENCE = 2.6


class Processes:
    def __init__(self, folder, *doing):
        options = {"cwd": ROOT, "env": os.environ | ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
        self._running = [
            subprocess.Popen(script("peer_process", folder, index, len(doing), SILENCE, what), **options)
            for index, what in enumerate(doing)
        ]
        deadline = time.monotonic() + 60
        while not all((folder / f"{index}.ready").exists() for index in range(len(doing))):
            if time.monotonic() > deadline:
                self.ended(timeout_seconds=0)  # raises `TimeoutExpired`, and kills them
            time.sleep(0.01)

    def send(self, index, number):
        self._running[index].send_signal(number)

    def ended(self, *, without=None, timeout_seconds=20):
        """Exit status and standard error by process."""
        others = {index: process for index, process in enumerate(self._running) if index != without}
        try:
            return {i: (process.wait(timeout=timeout_seconds), process.stderr.read()) for i, process in others.items()}
        finally:
            for process in self._running:
                process.kill()
                process.wait()


@pytest.mark.parametrize(("victim", "number"), [(0, "SIGKILL"), (1, "SIGSTOP")])
def test_the_others_end_with_an_error_that_names_the_lost_process(tmp_path, victim, number):
    processes = Processes(tmp_path, "wait", "wait", "wait")
    processes.send(victim, signal.Signals[number])
    reason = "died" if number == "SIGKILL" else "sent no sign of life for 3 s"
    for status, error in processes.ended(without=victim).values():
        assert status == LostProcessError.STATUS
        assert error.startswith(f"trm: process {victim} on {platform.node()} {reason}; stopped.")
        assert error.count("\n") == 1
    lasts = [(tmp_path / f"{index}.last").read_text() for index in range(3) if index != victim]
    assert all(last.startswith(f"error: process {victim} on {platform.node()} {reason}; stopped.") for last in lasts)


def test_all_wait_for_a_process_that_is_late(tmp_path):
    assert Processes(tmp_path, "end", "late").ended() == {0: (0, ""), 1: (0, "")}


def test_an_error_of_one_process_ends_the_others(tmp_path):
    ended = Processes(tmp_path, "wait", "fail").ended()
    assert ended[0][0] == LostProcessError.STATUS
    assert f"process 1 on {platform.node()} ended with an error (OSError: no space left)" in ended[0][1]
    assert ended[1][0] == 1 and "OSError: no space left" in ended[1][1] and "trm:" not in ended[1][1]


def test_a_process_that_does_not_connect_is_named_and_a_stranger_is_not_taken_for_it(monkeypatch):
    strangers = []

    def publish(name, value):
        """Everybody can connect, and only the processes of the run know the token."""
        port, token = json.loads(value)
        for line in (b"GET / HTTP/1.1", b'[1, "other", "guessed"]', f'[2, "third", "{token}"]'.encode()):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            strangers[-1].sendall(line + b"\n")

    monkeypatch.setattr(peers, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(peers.coordination, "publish", publish)
    with pytest.raises(LostProcessError, match="process 1 did not connect; stopped"):
        peers.Peers(0, 3, "127.0.0.1")
    address = json.dumps([free_port(), "token"])
    monkeypatch.setattr(peers.coordination, "read", lambda name, timeout: address)
    with pytest.raises(
        LostProcessError, match=r"process 0 on 127\.0\.0\.1 could not be reached \(.*refused\); stopped"
    ):
        peers.Peers(1, 3, "127.0.0.1")
    for stranger in strangers:
        stranger.close()
