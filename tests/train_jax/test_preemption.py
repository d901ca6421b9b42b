"""SIGTERM at any moment: what has finished is saved, the exit status says so, and the same command continues."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.markers import slow_or_campaign

from campaigns.faults_runs import Run, differences
from train_jax.errors import PreemptedError
from train_jax.runtime import preemption
from train_jax.runtime.preemption import Preemption, _Agreement
from train_jax.trainer.hooks.preempting import Preempting
from train_jax.trainer.hooks.saving import Saving


class Network:
    """Passes the messages of several `_Agreement` on, in the same order to all, as `Peers` does."""

    def __init__(self, count):
        self.count = count
        self.agreements = []
        self._handlers = []
        self._index = 0
        for self._index in range(count):
            self.agreements.append(_Agreement(self))

    def listen(self, kind, handler):
        self._handlers.append((kind, handler))

    def send(self, kind, value=None):
        """`preempted` reaches all of them before any of their votes."""
        self._index = (self._index + (kind != "preempted")) % self.count
        for handler in [handler for each, handler in self._handlers if each == kind]:
            handler(self._index, value)


def test_processes_stop_after_the_last_step_that_one_of_them_has_begun():
    network = Network(3)
    first, second, third = network.agreements
    assert first.begin(7) and second.begin(6) and third.begin(6)
    third.propose()
    assert [agreement.result() for agreement in network.agreements] == [7, 7, 7]
    assert second.begin(7), "the first one cannot finish it alone"
    assert not second.begin(8) and not first.begin(8) and not second.stops_at(6)


def test_no_step_begins_while_the_processes_agree():
    agreement = _Agreement(type("Silent", (), {"count": 2, "listen": lambda *_: None, "send": lambda *_: None})())
    assert agreement.begin(1)
    agreement._vote()
    thread = threading.Thread(target=agreement.begin, args=(2,), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    agreement._count(0, 1)
    agreement._count(1, 2)
    thread.join(2)
    assert not thread.is_alive()


@pytest.fixture
def watched(monkeypatch):
    """`watched(main, save)`: SIGTERM comes after the second step; `main(preemption)` is what the main thread then does.

    Returns what was logged and saved, and how another thread then ended the process.
    """
    monkeypatch.setattr(preemption, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(preemption, "CLOSING_SECONDS", 0.1)

    def run(main, save=lambda: None):
        seen = []
        exited = threading.Event()

        def exit_now(status, reason):
            seen.append((status, reason))
            exited.set()
            raise SystemExit  # ends the thread

        def saved():
            seen.append("saved")
            save()

        monkeypatch.setattr(preemption, "exit_now", exit_now)
        before = signal.getsignal(signal.SIGTERM)
        with Preemption().watching() as watching:
            for step in (1, 2):
                watching.before_step(step, lambda: seen.append("logged"))
                with watching.lock:
                    watching.after_step(step, saved)
                watching.check()
            os.kill(os.getpid(), signal.SIGTERM)
            assert watching._agreement.result() == 2
            main(watching)
            assert exited.wait(5)
        assert signal.getsignal(signal.SIGTERM) is before
        return seen

    return run


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.mark.parametrize("call", [Preemption.check, lambda each: each.before_step(3, each._log)], ids=["end", "next"])
def test_the_main_thread_saves_at_the_end_of_a_step_or_before_the_next_one(watched, capsys, call):
    """Another thread ends the process if the main thread has saved, and does not end it."""

    def main(watching):
        with pytest.raises(PreemptedError, match="saved after step 2"):
            call(watching)

    assert watched(main) == ["logged", "saved", (PreemptedError.STATUS, "preempted")]
    assert "trm: stopped by SIGTERM, saved after step 2; the same command continues" in capsys.readouterr().err


def test_another_thread_saves_and_ends_a_process_whose_main_thread_is_busy(watched, capsys):
    assert watched(lambda watching: None) == ["logged", "saved", (PreemptedError.STATUS, "preempted")]

    def full_disk():
        raise OSError("no space left")

    failed = "stopped by SIGTERM; saving failed (no space left)"
    assert watched(lambda watching: None, full_disk) == ["logged", "saved", (1, f"error: {failed}")]
    assert f"trm: {failed}\n" in capsys.readouterr().err


@pytest.mark.parametrize("processes", slow_or_campaign([2], [1]))
def test_a_compilation_of_a_minute_does_not_delay_the_stop(tmp_path, data_dir, processes):
    """If there are several processes, one that is not process 0 gets the signal."""
    run = Run(tmp_path / "run", data_dir, processes)
    run.start(COMPILE_SECONDS="60")
    run.wait_for_phase("compiling", 1)
    time.sleep(2)
    start = time.monotonic()
    run.send(processes - 1, signal.SIGTERM)
    assert run.wait(30, set()) == [PreemptedError.STATUS] * processes
    run.kill()
    assert time.monotonic() - start < 25
    assert all("before the first step" in run.text(index) for index in range(processes))


@pytest.mark.campaign
@pytest.mark.parametrize("case", [(2, "saving"), (1, "training"), (2, "evaluating")])
def test_a_run_that_is_preempted_ends_as_one_that_is_not(tmp_path, data_dir, case):
    """Only the last process gets the signal; all save the same step, and end."""
    processes, phase = case
    whole, stopped = (Run(tmp_path / name, data_dir, processes) for name in ("whole", "run"))
    whole.finish()
    stopped.start()
    stopped.wait_for_phase(phase, 2)
    start = time.monotonic()
    stopped.send(processes - 1, signal.SIGTERM)
    assert stopped.wait(30, set()) == [PreemptedError.STATUS] * processes, stopped.text(0)
    assert time.monotonic() - start < 15
    saved = {stopped.text(index).split("saved after step ")[1].split(";")[0] for index in range(processes)}
    stopped.kill()
    stopped.start()
    stopped.finish()
    assert saved == {str(stopped.continued_at())}
    assert not differences(tmp_path / "run", tmp_path / "whole", metrics=False)


def test_no_other_thread_saves_while_a_due_save_begins():
    """A notice during a save: the second thread would begin one that the other processes do not."""
    watched = Preemption()
    free = []

    def start(_session):
        with ThreadPoolExecutor() as pool:
            free.append(pool.submit(watched.lock.acquire, blocking=False).result())

    logging = SimpleNamespace(flush=lambda _: None)
    saving = Saving.__new__(Saving)
    saving._logging = logging
    saving.due = lambda *_: True
    saving.start = start
    Preempting(watched, logging, saving)
    events = SimpleNamespace(progress=lambda: None)
    clock = SimpleNamespace(now=lambda: 0.0)
    pausing = contextlib.nullcontext
    saving.after(SimpleNamespace(step=20, clock=clock, pausing=pausing, events=events), {})
    assert free == [False]
