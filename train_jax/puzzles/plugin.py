"""Puzzles: their task, presets, kinds of data and commands."""

from train_jax.plugin import Data, Plugin, Stage

PLUGIN = Plugin(
    name="puzzles",
    tasks={"puzzles": "train_jax.puzzles.task:PuzzleTask"},
    reports={"puzzles": "train_jax.puzzles.commands:PuzzleCommands"},
    presets=("train_jax.puzzles.presets:PRESETS",),
    data={  # in the order in which kinds are tried for a data set that does not name its kind
        "sudoku": Data("train_jax.puzzles.sudoku.data:SudokuData", kind="train_jax.puzzles.sudoku.kind:SudokuKind"),
        "maze": Data("train_jax.puzzles.maze.data:MazeData", kind="train_jax.puzzles.maze.kind:MazeKind"),
        "arc": Data("train_jax.puzzles.arc.data:ArcData", kind="train_jax.puzzles.arc.kind:ArcKind"),
    },
    stages={
        "score": Stage(
            "train_jax.puzzles.stages.score:Score",
            "evaluation",
            "count the votes in files of predictions for an ARC data set",
        ),
        "solve": Stage(
            "train_jax.puzzles.stages.solve:Solve",
            "evaluation",
            "show a run's answer to one puzzle after every ACT step",
        ),
    },
)
