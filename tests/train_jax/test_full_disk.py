"""A disk that is full while a run is saved: earlier checkpoints are intact, and nothing damaged is left behind."""

import contextlib
import resource
import time

import numpy as np
import pytest

from train_jax.__main__ import main
from train_jax.core.guard import new_guard
from train_jax.core.state import TrainState
from train_jax.errors import StorageError
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.folder import RunFolder, write_bytes
from train_jax.run.lines import LineFile

LIMIT_BYTES = 100_000


@contextlib.contextmanager
def full_disk():
    """No file can become larger than `LIMIT_BYTES`: a write beyond fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def made(step: int) -> tuple[TrainState, dict]:
    """Returns a state with an array that is larger than the limit and does not compress."""
    params = {"w": np.random.default_rng(step).normal(size=LIMIT_BYTES).astype(np.float32)}
    return TrainState(np.int32(step), params, params, (), {}, new_guard(scales_loss=False)), {}


def wait_until(holds):
    while not holds():
        time.sleep(0.01)


def test_a_failed_save_is_reported_and_two_stop_the_run_with_the_last_good_one(tmp_path, capsys):
    checkpoints = Checkpoints(RunFolder(tmp_path))
    checkpoints.save(1, *made(1), {})
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, *made(2), {})
        wait_until(lambda: not checkpoints._manager.is_saving_in_progress())
    checkpoints.save(3, *made(3), {})
    checkpoints.wait()
    assert "checkpoints/2 could not be saved (" in capsys.readouterr().err and checkpoints.steps() == [1, 3]
    with full_disk():
        checkpoints.save(4, *made(4), {})
        with pytest.raises(StorageError, match=r"checkpoints/5 could not be saved \(.*step 3 is intact, and the same"):
            checkpoints.save(5, *made(5), {})
        checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == ["1", "3"]
    again = Checkpoints(RunFolder(tmp_path), writes=False)
    resumed = again.restore_newest(made(0)[0])
    again.close()
    np.testing.assert_array_equal(resumed.state.params["w"], made(3)[0].params["w"])


def test_a_line_that_fits_in_part_is_a_full_disk(tmp_path, monkeypatch, capsys):
    """The system writes what fits, without an error."""
    (tmp_path / "metrics.jsonl").write_bytes(b"\n" * (LIMIT_BYTES - 10))
    monkeypatch.setattr(
        "train_jax.__main__._run", lambda argv: LineFile(tmp_path / "metrics.jsonl").write({"a": 10**9})
    )
    with full_disk():
        assert main(["train"]) == StorageError.STATUS
    assert capsys.readouterr().err.endswith(
        "metrics.jsonl cannot be written (No space left on device); free some space\n"
    )


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path):
    write_bytes(tmp_path / "file", b"before")
    with full_disk(), pytest.raises(StorageError, match=r"file cannot be written \(File too large\); free some space"):
        write_bytes(tmp_path / "file", bytes(LIMIT_BYTES + 1))
    assert (tmp_path / "file").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
