"""What was reported as saved survives a loss of power at any moment: checkpoints, FINISHED, records, data sets."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from support.power_loss import Disk, write_tree
from support.presets import SMALL_RUN
from test_checkpoint import assert_same, made

from train_jax.__main__ import main
from train_jax.puzzles.format import load_split
from train_jax.run.checkpoint import Checkpoints, Retention
from train_jax.run.folder import RunFolder, complete_steps, read_run
from train_jax.run.restore import restore
from train_jax.run.tracking import read_metrics
from train_jax.storage.files import append_text, write_text
from train_jax.storage.lines import LineFile
from train_jax.trainer.hooks.saving import Saving


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


def test_a_file_is_there_as_it_was_reported_or_as_it_is_about_to_be(disk, tmp_path, monkeypatch):
    path = disk.root / "runs" / "run" / "record.json"
    with disk.recorded(monkeypatch):
        for number in range(3):
            write_text(path, str(number))
            disk.report(str(number))
            append_text(path.with_name("lines"), f"{number}\n")
        lines = LineFile(path.with_name("metrics"))
        lines.write({"step": 1})
        lines.sync()
        disk.report("line")
        lines.close()
        write_text(path.with_name("heartbeat"), "a sign of life", durable=False)
    assert len(disk.states) > 5
    contents = [None, b"0", b"1", b"2", b"2"]
    lines = [None, b"0\n", b"0\n1\n", b"0\n1\n2\n"]
    for reported, tree in disk.states:
        count = len([text for text in reported if text.isdecimal()])
        assert tree.get("runs/run/record.json") in contents[count : count + 2], (reported, tree)
        assert tree.get("runs/run/lines") in lines[max(count - 1, 0) : count + 1]
        assert "line" not in reported or tree["runs/run/metrics"] == b'{"step": 1}\n'


def states_after(disk: Disk, folder: Path):
    """Yields what had been reported and the run that is left, written to `folder`; each once."""
    seen = []
    for reported, tree in disk.states:
        named = {name: content for name, content in tree.items() if ".orbax-checkpoint-tmp" not in name}
        if (reported, named) not in seen:
            seen.append((reported, named))
            write_tree(tree, folder)
            yield reported, RunFolder(folder / "run")


def tree_of(folder: Path):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_checkpoint_that_was_reported_is_restored(disk, tmp_path, monkeypatch):
    """And one that has its name is whole: the one before is deleted after that."""
    with disk.recorded(monkeypatch), closing(Checkpoints(RunFolder(disk.root / "run"), Retention(1))) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, *made(step), {})
            checkpoints.wait()
            disk.report(str(step))
    found = set()
    restored = []
    for reported, folder in states_after(disk, tmp_path / "after"):
        newest = max(complete_steps(folder.checkpoints), default=0)
        found.add(newest)
        assert newest >= len(reported), reported
        if newest and (content := tree_of(folder.checkpoints / str(newest))) not in restored:
            restored.append(content)
            with closing(Checkpoints(folder, writes=False)) as checkpoints:
                resumed = checkpoints.restore_step(newest, made(0)[0])
            assert_same((resumed.state, resumed.carry_like(made(0)[1])), made(newest))
    assert found == {0, 1, 2}


@pytest.mark.slow
def test_a_run_that_has_saved_or_finished_has_its_metrics_and_results(disk, data_dir, tmp_path, monkeypatch):
    words = ["train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(disk.root / "run"), *SMALL_RUN]
    waited = Saving.wait

    def wait(self):
        waited(self)
        disk.report("saved")

    monkeypatch.setattr(Saving, "wait", wait)
    with disk.recorded(monkeypatch):
        assert main([*words, "--steps", "4", "--keep-checkpoints", "1"]) == 0
        disk.report("finished")
    count = 0
    for reported, folder in states_after(disk, tmp_path / "after"):
        steps = complete_steps(folder.checkpoints)
        assert steps or "saved" not in reported
        assert folder.finished.exists() or "finished" not in reported
        if steps:
            count += 1
            run, config = read_run(str(folder.path))
            assert run.run_id and config.steps == 4
            assert {record["step"] for record in read_metrics(folder)} >= set(range(1, steps[-1] + 1))
        if folder.finished.exists():
            assert json.loads(folder.finished.read_text())["train_steps"] == steps[-1] == 4
            assert json.loads(folder.evaluation("test").read_text())
            assert any(name.startswith("eval/") for name in read_metrics(folder)[-1])
            assert restore(str(folder.path)).step == 4
    assert count > 3


def test_a_data_set_that_has_its_name_is_whole(disk, tmp_path, monkeypatch, data_dir):
    with disk.recorded(monkeypatch):
        words = ["sudoku", "--size", "4", "--num-train", "4", "--num-test", "4", "--output-dir", str(disk.root / "run")]
        assert main(["build-data", *words]) == 0
        disk.report("built")
    whole = {load_split(disk.root / "run", split).fingerprint for split in ("train", "test")}
    for reported, folder in states_after(disk, tmp_path / "after"):
        assert folder.path.exists() or not reported
        if folder.path.exists():
            assert {load_split(folder.path, split).fingerprint for split in ("train", "test")} == whole
