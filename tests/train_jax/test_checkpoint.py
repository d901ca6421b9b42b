"""Checkpoints: when a run saves, what each reader loads, which are kept, and that no damaged one is ever used; full
disks."""

import contextlib
import dataclasses
import errno
import json
import os
import platform
import random
import re
import resource
import shutil
import sys
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace
from unittest.mock import DEFAULT, MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_or_campaign

from train_jax.__main__ import main
from train_jax.core.guard import new_guard
from train_jax.core.state import TrainState
from train_jax.errors import StorageError, UserError
from train_jax.run import checkpoint as agreed_steps
from train_jax.run.checkpoint import Checkpoints, DamagedCheckpointError, Retention, checksum_of_json, checksums
from train_jax.run.folder import RunFolder, write_bytes
from train_jax.run.presets import preset
from train_jax.run.restore import choose
from train_jax.runtime.devices import Devices
from train_jax.storage.files import remove_folder, upload_folder
from train_jax.storage.lines import LineFile
from train_jax.storage.storage import is_remote, path_of
from train_jax.trainer.hooks import saving as saving_hook
from train_jax.trainer.hooks.saving import Saving

ROWS = 24
SLOW_SEEDS = range(12, 140, 9)


def made(step: int) -> tuple[TrainState, dict]:
    """Returns a state and a carry that differ for each step."""
    rng = np.random.default_rng(step)
    params = {"w": rng.normal(size=(5, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    buffers = {"table": rng.normal(size=(7, 2)).astype(jnp.bfloat16), "count": np.int32(step), "none": np.zeros((0, 2))}
    moments = {"mu": {name: array * 2 for name, array in params.items()}, "count": np.int32(step)}
    ema = {name: array / 2 for name, array in params.items()}
    carry = {"z": rng.normal(size=(ROWS, 4)).astype(np.float32), "halted": rng.random(ROWS) < 0.5}
    return TrainState(jnp.int32(step), params, ema, moments, buffers, new_guard(scales_loss=False)), carry


def saved(folder: RunFolder, steps, values=None, **retention) -> RunFolder:
    with closing(Checkpoints(folder, Retention(**retention))) as checkpoints:
        for step in steps:
            checkpoints.save(step, *made(step), {"train_seconds": step / 2}, value=(values or {}).get(step))
    return folder


def copied(run: RunFolder, place) -> RunFolder:
    """Returns a copy in `place`, on the disk or in storage."""
    if is_remote(place):
        upload_folder(run.path, place / "run", last=[])
    else:
        shutil.copytree(run.path, place / "run")
    return RunFolder(place / "run")


def kept(folder: RunFolder) -> list[int]:
    return sorted(int(path.name) for path in folder.checkpoints.iterdir())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> RunFolder:
    """A run with checkpoints at steps 1 and 2; copy it to change it."""
    return saved(RunFolder(tmp_path_factory.mktemp("run")), [1, 2])


def assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_everything_comes_back_bit_for_bit(two, place):
    with closing(Checkpoints(copied(two, place), writes=False)) as checkpoints:
        resumed = checkpoints.restore_newest(made(0)[0])
    assert (resumed.step, resumed.damaged, resumed.notes["train_seconds"]) == (2, (), 1.0)
    assert_same((resumed.state, resumed.carry_like(made(0)[1])), made(2))


@pytest.mark.parametrize(
    ("retention", "values", "expected"),
    [
        ({"newest": 2}, {}, [5, 6]),
        ({"newest": 1, "every_steps": 2}, {}, [2, 4, 6]),
        ({"newest": 1}, {1: 0.1, 2: 0.9, 3: 0.9, 5: 0.3}, [2, 6]),
    ],
)
def test_the_newest_the_best_and_every_nth_checkpoint_are_kept(tmp_path, retention, values, expected):
    assert kept(saved(RunFolder(tmp_path), range(1, 7), values, **retention)) == expected


def test_the_best_one_is_remembered_by_a_run_that_continues(place):
    folder = saved(RunFolder(place), [1, 2], {1: 0.9}, newest=1)
    with closing(Checkpoints(folder, Retention(newest=1))) as checkpoints:
        assert checkpoints.restore_newest(made(0)[0]).step == 2
        checkpoints.save(3, *made(3), {}, value=0.5)
    assert kept(folder) == [1, 3]


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best(tmp_path):
    folder = saved(RunFolder(tmp_path), range(1, 7), {1: 0.1, 3: 0.9, 5: 0.3}, newest=2)
    with closing(Checkpoints(folder, writes=False)) as checkpoints:
        assert [choose(checkpoints, wanted) for wanted in ("newest", "best", "5")] == [6, 3, 5]
        for wanted in ("4", "last", "-1"):
            with pytest.raises(UserError, match=rf"no checkpoint of step {wanted}; use one of 3, 5, 6, newest, best"):
                choose(checkpoints, wanted)
        damage(folder.checkpoints / "6" / "notes" / "metadata", 0, random.Random(0))
        assert choose(checkpoints, "best") == 3, "as an older checkpoint knows it"


def test_all_processes_continue_from_the_checkpoint_that_the_first_one_finds(two, monkeypatch):
    """Another host may see other folders on a network file system."""
    monkeypatch.setattr(agreed_steps, "SEEN_SECONDS", 0.1)
    with closing(Checkpoints(two, writes=False)) as checkpoints:
        monkeypatch.setattr(agreed_steps, "of_main_process", lambda find: {"steps": [1]})
        assert checkpoints.restore_newest(made(0)[0]).step == 1
        monkeypatch.setattr(agreed_steps, "of_main_process", lambda find: {"steps": [1, 2, 3]})
        with pytest.raises(StorageError, match=rf"no checkpoint of step 3 on {platform.node()}, but has one on the"):
            checkpoints.restore_newest(made(0)[0])


def test_a_checkpoint_of_another_model_is_not_a_damaged_one(two):
    state, _ = made(0)
    with closing(Checkpoints(two, writes=False)) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints/2 is of another model \(carry.*is unexpected\)"):
            checkpoints.restore_newest(state).carry_like(())
        for name, shape, message in (
            ("w", (5, 4), r"\(state.ema.w is float32\[5, 3\], expected float32\[5, 4\]"),
            ("more", 1, r"\(state.ema.more is missing"),
        ):
            with pytest.raises(UserError, match=f"of another model {message}"):
                checkpoints.restore_newest(state._replace(ema=state.ema | {name: np.zeros(shape, np.float32)}))


# ---- damage


def damage(path, kind: int, rng) -> None:
    """Flips a bit of a file, cuts it, overwrites its end, or removes it."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if kind == 0:
        content[at] ^= 1 << rng.randrange(8)
    else:
        content[at:] = rng.randbytes(len(content) - at) if kind == 2 else b""
    path.write_bytes(content)
    if kind == 3:
        path.unlink()


@pytest.mark.parametrize("seed", [*range(12), *slow_or_campaign(SLOW_SEEDS, set(range(12, 140)) - set(SLOW_SEEDS))])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(two, tmp_path, seed):
    """A damaged one is used if everything that is read of it is intact."""
    folder = copied(two, tmp_path)
    files = sorted(file for file in (folder.checkpoints / "2").rglob("*") if file.is_file() and file.stat().st_size)
    damage(files[seed // 4 % len(files)], seed % 4, random.Random(seed))
    with closing(Checkpoints(folder)) as checkpoints:
        resumed = checkpoints.restore_newest(made(0)[0])
        assert_same((resumed.state, resumed.carry_like(made(0)[1])), made(resumed.step))
        if resumed.step == 1:
            assert f"{folder.checkpoints / '2'} is damaged (" in resumed.damaged[0]
            assert (folder.path / "damaged" / "2").is_dir()
            checkpoints.save(2, *made(2), {"train_seconds": 1.0})
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(two, place):
    folder = copied(two, place)
    for step in ("1", "2"):
        remove_folder(folder.checkpoints / step / "model")
    damaged = pytest.raises(DamagedCheckpointError, match=r"2 is damaged \(.*and no older one is intact")
    with closing(Checkpoints(folder)) as checkpoints, damaged:
        checkpoints.restore_newest(made(0)[0])


def test_checksums_see_every_change_and_are_those_of_checkpoints_that_were_saved_before():
    """Otherwise every run of an earlier version would count as damaged; distribution makes no difference."""
    arrays = {"rows": np.arange(6, dtype=np.int32).reshape(3, 2), "scalar": np.float32(1.5), "none": np.zeros((0, 2))}
    assert checksums(arrays) == {"rows": 2957297695, "scalar": 1557669231, "none": 0}
    for same in (jnp.asarray(arrays["rows"]), arrays["rows"].reshape(3, 2, 1)):
        assert checksums({"rows": same}) == {"rows": 2957297695}
    assert checksums({"rows": arrays["rows"][[0, 2, 1]]}) != {"rows": 2957297695}
    assert checksum_of_json({"b": 1, "a": [0.5]}) == 540963997


# ---- identity


def of_run(folder: RunFolder, run_id: str) -> RunFolder:
    return dataclasses.replace(folder, run_id=run_id)


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(two, tmp_path):
    folder = copied(two, tmp_path)
    (folder.checkpoints / "1").rename(folder.checkpoints / "900")
    renamed = r"checkpoints/900 was saved at step 1 \(rename it to 1 to use it\)"
    with closing(Checkpoints(folder, writes=False)) as checkpoints, pytest.raises(UserError, match=renamed):
        checkpoints.restore_step(900, made(0)[0])
    with closing(Checkpoints(folder)) as checkpoints:
        resumed = checkpoints.restore_newest(made(0)[0])
    assert (resumed.step, kept(folder)) == (2, [2]) and (folder.path / "damaged" / "900").is_dir()
    assert re.search(renamed, resumed.damaged[0])


def test_a_checkpoint_of_another_run_is_not_used(tmp_path):
    folder = saved(of_run(RunFolder(tmp_path), "aa"), [1])
    other = r"checkpoints/1 is of another run \(aa, and config.json says bb; .* write its id there\), and no older one"
    with closing(Checkpoints(of_run(folder, "bb"))) as checkpoints, pytest.raises(DamagedCheckpointError, match=other):
        checkpoints.restore_newest(made(0)[0])
    saved(of_run(folder, "aa"), [2])
    for run_id in ("aa", ""):
        with closing(Checkpoints(of_run(folder, run_id), writes=False)) as checkpoints:
            assert checkpoints.restore_newest(made(0)[0]).step == 2


def test_a_checkpoint_of_a_newer_format_is_kept_and_one_without_an_identity_is_read_with_one_warning(
    two, tmp_path, monkeypatch, capsys
):
    folder = of_run(copied(two, tmp_path), "aa")

    def rewrite(number, **changes):
        """Writes the notes as another version may have written them."""
        path = folder.checkpoints / str(step) / "notes" / "metadata"
        notes = {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"} | changes
        notes = {name: value for name, value in notes.items() if value is not None}
        path.write_text(json.dumps(notes | {"checksum": checksum_of_json(notes)}))

    monkeypatch.setattr(agreed_steps, "_warned", set())
    for step in (1, 2):
        rewrite(step, step=None, run=None, format=None)
    with closing(Checkpoints(folder)) as checkpoints:
        assert [checkpoints.restore_step(step, made(0)[0]).step for step in (1, 2)] == [1, 2]
        assert capsys.readouterr().err.count("trm: ") == 1
        rewrite(2, format=2)
        with pytest.raises(UserError, match=r"checkpoints/2 has format 2, .* reads up to 1; use a newer version"):
            checkpoints.restore_newest(made(0)[0])
        assert kept(folder) == [1, 2]


# ---- outages are not damage


def test_a_checkpoint_that_storage_refuses_to_give_is_not_put_aside(two, remote, emulator, impatient):
    refusal = pytest.raises(UserError, match=r"checkpoints/2.*(cannot be read \(|no permission)")
    with closing(Checkpoints(copied(two, path_of(remote)))) as checkpoints:
        with emulator.failing(lambda method, path: "403" if method == "GET" and "%2Fd%2F" in path else ""), refusal:
            checkpoints.restore_newest(made(0)[0])
        assert checkpoints.restore_newest(made(0)[0]).step == 2 and checkpoints.steps() == [1, 2]


def test_a_checkpoint_on_a_disk_that_fails_is_tried_again_and_not_put_aside(two, tmp_path, monkeypatch):
    """Orbax does not tell a file that cannot be read from one that is not there."""
    folder = copied(two, tmp_path)
    with closing(Checkpoints(folder)) as checkpoints:
        outcomes = [DamagedCheckpointError("once"), *[DEFAULT] * 9]
        monkeypatch.setattr(checkpoints, "_read", MagicMock(side_effect=outcomes, wraps=checkpoints._read))
        assert checkpoints.restore_newest(made(0)[0]).step == 2
        remove_folder(folder.checkpoints / "2" / "model")
        failure = OSError(errno.EIO, os.strerror(errno.EIO), "file")
        monkeypatch.setattr("train_jax.storage.files.local_copy", MagicMock(side_effect=failure))
        with pytest.raises(StorageError, match=r"cannot be read \(Input/output error\); run the command again"):
            checkpoints.restore_newest(made(0)[0])
        assert checkpoints.steps() == [1, 2]


# ---- when a run saves

LAST = 40


def saving(tmp_path, minutes):
    fields = {"checkpoint_every_steps": 20, "checkpoint_every_minutes": minutes, "log_every_steps": 4}
    config = dataclasses.replace(preset("tiny"), run_dir=str(tmp_path), **fields)
    training = SimpleNamespace(config=config, devices=None, total_steps=LAST)
    return closing(Saving(training, RunFolder(tmp_path), SimpleNamespace()))


def test_checkpoints_by_minutes_are_after_log_lines(tmp_path, monkeypatch):
    """Checkpoints by steps stay where they were; only the first process reads its clock."""
    steps = range(1, LAST + 1)
    for minutes, expected in ((0, [20, 40]), (0.5, [12, 20, 32, 40])):
        with saving(tmp_path, minutes) as run:
            run.due(0.5, 0.0, np.zeros(2))  # the clock starts
            assert [step for step in steps if run.due(step, 2.5 * step, np.zeros(2))] == expected
    asked = []
    monkeypatch.setattr(saving_hook, "is_main_process", lambda: False)
    monkeypatch.setattr(saving_hook, "any_process", lambda flag: asked.append(flag) or True)
    with saving(tmp_path, 1) as run:
        assert [step for step in steps if run.due(step, 1e6 * step, np.zeros(2))] == list(range(4, LAST + 1, 4))
    assert asked == [False] * 8, "without a collective at the steps where every process saves anyway"


@pytest.mark.parametrize("move", ["to_global", "to_rows"])
def test_a_save_writes_a_copy(move):
    """The next step reuses the memory of state and carry while they are written."""
    devices = Devices(1)
    array = devices.shard({"z": np.ones((1, 6, 64), np.float32)})["z"]
    on_device = np.asarray(array)  # on a CPU this is the memory of the device
    assert on_device.base is not None and np.shares_memory(on_device, np.asarray(array))
    assert not np.shares_memory(getattr(devices, move)({"z": array})["z"], on_device)


# ---- full disks

LIMIT_BYTES = 100_000


@contextmanager
def full_disk():
    """No file can become larger than `LIMIT_BYTES`: a write beyond fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def too_large(step: int) -> tuple[TrainState, dict]:
    """Returns a state with an array that is larger than the limit and does not compress."""
    params = {"w": np.random.default_rng(step).normal(size=LIMIT_BYTES).astype(np.float32)}
    return TrainState(np.int32(step), params, params, (), {}, new_guard(scales_loss=False)), {}


def test_a_failed_save_is_reported_and_two_stop_the_run_with_the_last_good_one(tmp_path, capsys):
    checkpoints = Checkpoints(RunFolder(tmp_path))
    checkpoints.save(1, *too_large(1), {})
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, *too_large(2), {})
        while checkpoints._manager.is_saving_in_progress():
            time.sleep(0.01)
    checkpoints.save(3, *too_large(3), {})
    checkpoints.wait()
    assert "checkpoints/2 could not be saved (" in capsys.readouterr().err and checkpoints.steps() == [1, 3]
    with full_disk():
        checkpoints.save(4, *too_large(4), {})
        with pytest.raises(StorageError, match=r"checkpoints/5 could not be saved \(.*step 3 is intact, and the same"):
            checkpoints.save(5, *too_large(5), {})
        checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == ["1", "3"]
    with closing(Checkpoints(RunFolder(tmp_path), writes=False)) as again:
        resumed = again.restore_newest(too_large(0)[0])
    np.testing.assert_array_equal(resumed.state.params["w"], too_large(3)[0].params["w"])


def test_the_writes_that_a_failed_save_abandons_print_nothing(tmp_path, monkeypatch):
    """The first one that fails ends the event loop of the others, which Python reports without a traceback of ours."""
    state, carry = too_large(1)
    state = state._replace(buffers={str(number): state.params["w"] + number for number in range(24)})
    shown = MagicMock()
    monkeypatch.setattr(sys, "unraisablehook", shown)
    checkpoints = Checkpoints(RunFolder(tmp_path))
    with full_disk():
        checkpoints.save(1, state, carry, {})
        while checkpoints._manager.is_saving_in_progress():
            time.sleep(0.01)
        time.sleep(0.3)  # of the next steps, before the run notices
    with contextlib.suppress(StorageError):
        checkpoints.close()
    assert not shown.called, shown.call_args


def test_a_line_or_a_file_that_does_not_fit(tmp_path, monkeypatch, capsys):
    """The system writes of a line what fits, without an error; a file stays as it was."""
    (tmp_path / "metrics.jsonl").write_bytes(b"\n" * (LIMIT_BYTES - 10))
    write = lambda argv: LineFile(tmp_path / "metrics.jsonl").write({"a": 10**9})  # noqa: E731
    monkeypatch.setattr("train_jax.__main__._run", write)
    with full_disk():
        assert main(["train"]) == StorageError.STATUS
    assert "metrics.jsonl cannot be written (No space left on device); free some space" in capsys.readouterr().err
    write_bytes(tmp_path / "file", b"before")
    with full_disk(), pytest.raises(StorageError, match=r"file cannot be written \(File too large\); free some space"):
        write_bytes(tmp_path / "file", bytes(LIMIT_BYTES + 1))
    assert (tmp_path / "file").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 2
