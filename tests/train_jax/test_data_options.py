"""Options of `trm build-data` whose data set does not fit: refused before the work, and nothing is written."""

import dataclasses

import pytest
from support.arc_files import write_source

from train_jax.errors import UserError
from train_jax.stages.build_data import ArcData, MazeData, SudokuData, main
from train_jax.tasks.puzzles import building
from train_jax.tasks.puzzles.arc import data as arc_dataset
from train_jax.tasks.puzzles.maze import data as maze_dataset
from train_jax.tasks.puzzles.sudoku import data as sudoku_dataset


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SudokuData(num_train=10**9), "needs about 4"),
        (SudokuData(num_aug=10**6 - 1), "needs about 1"),
        (MazeData(num_test=10**9), "needs about 5,4"),
        (MazeData(num_train=10**6, augment=True), "needs about 18"),
        (ArcData("files", num_aug=900_000), "needs about 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_work(tmp_path, monkeypatch, config, message):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    if isinstance(config, ArcData):
        config = dataclasses.replace(config, source=str(write_source(tmp_path / "files")))
    for module, work in ((sudoku_dataset, "generate"), (maze_dataset, "generate"), (arc_dataset, "draw")):
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
    assert not list((tmp_path / "work").iterdir())


def test_the_available_memory_is_known():
    assert 10**7 < building.available_memory_bytes() < 10**15
