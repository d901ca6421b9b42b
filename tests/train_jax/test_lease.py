"""Who may write a run in storage: one process, also when its owner was killed, frozen or cut off."""

import json
import threading
import time

import pytest

from train_jax.errors import StorageError, UserError
from train_jax.run import lease
from train_jax.run.storage import path_of, read_generation, write_generation

ELSEWHERE = {"owner": "process 7 on other", "token": "x", "machine": "other", "pid": 7, "started": "1"}


@pytest.fixture
def folder(remote, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    return path_of(remote)


def write(folder, content, generation=0):
    return write_generation(folder / "lock", json.dumps(content).encode(), generation)


def test_a_second_writer_is_refused_while_the_first_one_is_alive(folder, emulator):
    with lease.sole_writer(folder):
        time.sleep(0.3)
        with pytest.raises(UserError, match=rf"{folder} is being written by process \d+ on .*; wait until it ends"):
            lease.sole_writer(folder).__enter__()
        lease.check_writer(folder)
    assert f"{folder.name}/lock" not in emulator.names()
    with lease.sole_writer(folder):
        pass


def test_the_lease_of_a_silent_owner_is_taken_over(folder):
    write(folder, ELSEWHERE)
    start = time.monotonic()
    with lease.sole_writer(folder):
        assert time.monotonic() - start > 0.5
        lease.check_writer(folder)


def test_the_lease_of_a_process_of_this_machine_that_has_ended_is_taken_over_at_once(folder, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 60)
    ended = lease._identity(1) | {"started": "0"}  # another process has its number now
    write(folder, ELSEWHERE | ended)
    with lease.sole_writer(folder):
        pass


def test_who_lost_the_lease_writes_nothing_more(folder, emulator):
    with lease.sole_writer(folder):
        write(folder, ELSEWHERE, emulator.generation(f"{folder.name}/lock"))
        for _ in range(2):
            with pytest.raises(StorageError, match="was taken over by process 7 on other, because this process was"):
                lease.check_writer(folder)
    assert json.loads(emulator.read(f"{folder.name}/lock")) == ELSEWHERE


def test_a_lost_answer_is_not_taken_for_another_writer(folder, emulator):
    lost = iter(["", "", "lost"])
    with (
        emulator.failing(lambda method, path: next(lost, "") if method == "POST" else ""),
        lease.sole_writer(folder),
    ):
        for _ in range(4):
            lease.check_writer(folder)


def test_two_writers_at_the_same_moment(folder, emulator):
    """Both found no lease; the second write names a version that is no longer the newest."""
    assert write(folder, {"token": "first"}) is not None
    assert write(folder, {"token": "second"}) is None
    assert json.loads(emulator.read(f"{folder.name}/lock")) == {"token": "first"}


def test_a_lease_that_is_renewed_while_it_is_read(folder):
    generations = [write(folder, {"token": 0})]
    stop = threading.Event()

    def renew():
        while not stop.is_set():
            generations.append(write(folder, {"token": len(generations)}, generations[-1]))

    thread = threading.Thread(target=renew)
    thread.start()
    contents = [read_generation(folder / "lock") for _ in range(20)]
    stop.set()
    thread.join()
    assert len({generation for _, generation in contents}) > 3
    assert all(generations[json.loads(content)["token"]] == generation for content, generation in contents)
