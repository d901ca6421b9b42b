"""Options of `trm build-data`: ranges, sizes that do not fit; a mistake writes nothing."""

import pytest
from support.arc_files import write_source

from models_torch.ranges import Range, field_rules
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.stages.build_data import COMMANDS, ArcData, MazeData, SudokuData, main
from train_jax.tasks.puzzles import building
from train_jax.tasks.puzzles.arc import data as arc_dataset
from train_jax.tasks.puzzles.maze import data as maze_dataset
from train_jax.tasks.puzzles.sudoku import data as sudoku_dataset

RANGES = {
    (command, name): rule.declared
    for command, options_class in COMMANDS.items()
    for name, rule in field_rules(options_class).items()
    if isinstance(rule.declared, Range)
}
NEEDED = {"subsample_size": ["--source", "x/y"]}


def test_every_number_has_a_range():
    assert {name for _, name in RANGES} == {
        "num_train", "num_test", "num_aug", "num_empty", "min_difficulty", "min_path", "max_path", "size",
        "subsample_size", "seed", "workers", "examples", "vocab_size", "shard_tokens", "test_share", "epochs",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["text", "chat"])
@pytest.mark.parametrize("share", ["0", "0.51", "-1", "nan", "x"])
def test_a_share_out_of_its_range_is_one_line(command, share, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trm(["build-data", command, "--test-share", share]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "name"), [key for key in RANGES if key[1] != "test_share"])
def test_a_number_out_of_its_range_is_one_line(command, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    low, high = RANGES[command, name].low, RANGES[command, name].high
    required = {"arc": ["--source", "none"], "inspect": ["set"]}.get(command, NEEDED.get(name, []))
    option = f"--{name.replace('_', '-')}"
    for value in (low - 1, high + 1, -(10**30), 10**30):
        assert trm(["build-data", command, *required, option, str(value)]) == 2
        bound = f"at least {low}" if value < low else f"at most {high}"
        assert capsys.readouterr() == ("", f"trm: {option} is {value}; use {bound}\n")
    for text in ("nan", "", "1.5", "x"):
        assert trm(["build-data", command, *required, f"{option}={text}"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SudokuData(num_train=10**9), "needs about 4"),
        (SudokuData(num_aug=10**6 - 1), "needs about 1"),
        (MazeData(num_test=10**9), "needs about 5,4"),
        (MazeData(num_train=10**6, augment=True), "needs about 18"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_work(tmp_path, monkeypatch, config, message):
    monkeypatch.chdir(tmp_path)
    for module, work in ((sudoku_dataset, "generate"), (maze_dataset, "generate")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("the work was begun"))
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(UserError, match=rf"{message}[\d,.]* GB of memory, 1.0 GB are available; use"):
        main(config)
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**15)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    with pytest.raises(
        UserError, match=r"has 1.0 GB of free space, expected at least .* GB; free some space, choose another"
    ):
        main(config)
    assert not list(tmp_path.iterdir())


def test_augmentations_of_arc_that_do_not_fit_are_refused_before_the_work(tmp_path, monkeypatch):
    source = write_source(tmp_path / "files")
    monkeypatch.setattr(arc_dataset, "draw", lambda *_: pytest.fail("the work was begun"))
    config = ArcData(str(source), output_dir=tmp_path / "set", num_aug=900_000)
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(UserError, match=r"needs about 3.4 GB of memory, .*; use a smaller --num-aug"):
        main(config)
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**15)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(
        UserError, match=r"0.0 GB of free space, expected at least 111.8 GB.* or use a smaller --num-aug"
    ):
        main(config)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_memory_is_known_here():
    assert 10**7 < building.available_memory_bytes() < 10**15
