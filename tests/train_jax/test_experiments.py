"""The table of experiments: every id is a run, dry runs start nothing."""

import dataclasses

import pytest

from train_jax.__main__ import main
from train_jax.cli import build_data
from train_jax.research.runs import experiment_run
from train_jax.research.table import EXPERIMENTS, data_sets
from train_jax.run.plan import differences, plan
from train_jax.run.presets import preset
from train_jax.runtime.batch_size import epochs_to_steps


@pytest.mark.parametrize("experiment_id", EXPERIMENTS)
def test_every_id_is_a_run_that_changes_only_what_its_row_says(experiment_id):
    row = EXPERIMENTS[experiment_id]
    baseline = experiment_run("baseline")
    changed = {name for name in differences(experiment_run(experiment_id), baseline) if name != "run_dir"}
    assert changed - {"data_dir"} <= {*row.changes, *(["init_from"] if row.starts_from else [])}
    usual = (row.puzzles, row.augmentations, row.data) == (1000, 1000, ("sudoku",))
    assert ("data_dir" in changed) != usual
    assert plan(experiment_run(experiment_id), row.puzzles).steps > 0


def test_twins_have_equal_steps_or_a_warm_up_in_proportion():
    for experiment_id, row in EXPERIMENTS.items():
        for base in (None, "sudoku6") if row.twin else ():
            config = experiment_run(experiment_id, base)
            length = plan(config, row.puzzles)
            if row.twin == "equal_steps":
                assert length.steps == (preset(base).steps if base else 8138)
            else:
                assert config.optim.warmup_steps == int(0.1 * length.steps) and length.warmup_share <= 0.1


def test_sizes_of_a_preset_keep_their_proportions():
    tiny = preset("tiny")
    arch = dataclasses.replace(tiny.arch, H_cycles=3)
    same = dataclasses.replace(tiny, arch=arch, run_dir="runs/exp02b/exp02b_03")
    assert experiment_run("exp02b_03", "tiny") == same, "cycles are literal"
    wide = experiment_run("exp01f", "tiny")
    assert (wide.arch.hidden_size, wide.arch.puzzle_emb_ndim, wide.arch.num_heads) == (96, 96, 2)
    large = experiment_run("exp06_f", "tiny")
    assert (large.global_batch_size, large.steps) == (16 * 8, tiny.steps // 8)
    assert large.optim.lr == pytest.approx(tiny.optim.lr * 8**0.5)
    few = experiment_run("exp04a_250", "tiny")
    assert (few.steps, few.data_dir) == (10, "data/sudoku-4x4-25-aug-0")
    curriculum = experiment_run("contrib01_curriculum", "sudoku6")
    ends = epochs_to_steps(1000, curriculum.task_config.curriculum_epochs, curriculum.global_batch_size)
    assert ends == 0.2 * preset("sudoku6").steps


def test_a_dry_run_prints_the_plan_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "exp01a", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "arch.hidden_size: baseline 512, here 256", "steps            8,138", "share of warm-up 24.6%",
        "examples seen    49,999,872", "warning: warm-up takes more than 10% of the steps",
    ):  # fmt: skip
        assert line in shown
    assert main(["train", "chat-tiny", "--dry-run"]) == 2, "no data set for the length of an epoch"
    shown = capsys.readouterr().out
    assert "  arch.n_layer: here 4\n" in shown and "optimizer muon_2025, lr 0.03, momentum_start" in shown
    assert "None" not in shown and not list(tmp_path.iterdir())


def test_every_experiment_is_listed(capsys):
    assert main(["sweep", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in EXPERIMENTS)


def test_a_run_reads_the_folder_that_build_data_writes(monkeypatch):
    built = []
    monkeypatch.setattr(build_data, "main", built.append)

    def folders(*commands):
        built.clear()
        for words in commands:
            build_data.cli(list(words))
            built[-1].check()
        return ",".join(str(each.directory) for each in built)

    assert folders(["sudoku", "--source", "sapientinc/sudoku-extreme"]) == preset("sudoku-extreme").data_dir
    for name, size in (("sudoku9", "9"), ("sudoku6", "6"), ("tiny", "4")):
        assert folders(["sudoku", "--size", size]) == preset(name).data_dir
    for name, base in (("contrib06_joint", None), ("contrib05_50_local", "tiny")):
        sets = data_sets(EXPERIMENTS[name], base or "sudoku-extreme")
        assert folders(*(each.command[1:] for each in sets)) == experiment_run(name, base).data_dir
