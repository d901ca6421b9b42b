"""The right to write a run in storage: one process has it, also when its owner was killed, frozen or cut off."""

import threading
import time

import pytest

from train_jax.errors import StorageError, UserError
from train_jax.run import lease
from train_jax.run.storage import path_of, read_generation, write_generation

ELSEWHERE = b"process 7 on other\nx 1\n"


@pytest.fixture
def folder(remote, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    return path_of(remote)


def write(folder, content, generation=0):
    return write_generation(folder / "lock", content, generation)


def test_a_second_writer_is_refused_while_the_first_one_is_alive(folder, emulator):
    with lease.sole_writer(folder):
        time.sleep(0.3)
        with pytest.raises(UserError, match=rf"{folder} is being written by process \d+ on .*; wait until it ends"):
            lease.sole_writer(folder).__enter__()
        lease.check_writer(folder)
    start = time.monotonic()
    with lease.sole_writer(folder):
        assert time.monotonic() - start < 0.5, "a lease that was released is free at once"


def test_the_lease_of_a_silent_owner_is_taken_over(folder):
    write(folder, ELSEWHERE)
    start = time.monotonic()
    with lease.sole_writer(folder):
        assert time.monotonic() - start > 0.5
        lease.check_writer(folder)


def test_who_lost_the_lease_writes_nothing_more(folder, emulator):
    with lease.sole_writer(folder):
        write(folder, ELSEWHERE, emulator.generation(f"{folder.name}/lock"))
        for _ in range(2):
            with pytest.raises(StorageError, match="was taken over by process 7 on other, because this process was"):
                lease.check_writer(folder)
    assert emulator.read(f"{folder.name}/lock") == ELSEWHERE


def test_a_lost_answer_is_not_taken_for_another_writer(folder, emulator):
    lost = iter(["", "", "lost"])
    with (
        emulator.failing(lambda method, path: next(lost, "") if method == "POST" else ""),
        lease.sole_writer(folder),
    ):
        for _ in range(4):
            lease.check_writer(folder)


def test_a_lease_that_is_renewed_while_it_is_read(folder):
    generations = [write(folder, b"0")]
    stop = threading.Event()

    def renew():
        while not stop.is_set():
            generations.append(write(folder, str(len(generations)).encode(), generations[-1]))

    thread = threading.Thread(target=renew)
    thread.start()
    contents = [read_generation(folder / "lock") for _ in range(20)]
    stop.set()
    thread.join()
    assert len({generation for _, generation in contents}) > 3
    assert all(generations[int(content)] >= generation for content, generation in contents)
