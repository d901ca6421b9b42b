"""The commands for runs of any task."""

from train_jax.plugin import Plugin, Stage

PLUGIN = Plugin(
    name="commands",
    stages={
        "build-data": Stage(
            "train_jax.cli.build_data:cli",
            "data",
            "build a data set (sudoku, maze, arc, text, chat), or inspect one",
        ),
        "train": Stage(
            "train_jax.cli.train:cli",
            "training",
            "train a model, or continue a run: trm train PRESET [--field value …]",
        ),
        "check": Stage(
            "train_jax.cli.check:cli",
            "training",
            "check hosts, the step beside PyTorch, or kernels: trm check mine.py",
        ),
        "status": Stage(
            "train_jax.cli.status:Status",
            "training",
            "show runs: step, speed, time left, last checkpoint, health, goodput",
        ),
        "summary": Stage(
            "train_jax.cli.summary:Summary",
            "training",
            "print the accuracy, training time and files of a run",
        ),
        "profile": Stage(
            "train_jax.cli.profile:Profile",
            "training",
            "print where the time of profiled steps went: trm train NAME --profile 5",
        ),
        "evaluate": Stage(
            "train_jax.cli.evaluate:Evaluate",
            "evaluation",
            "score a run on its test set with its EMA weights",
        ),
        "export": Stage(
            "train_jax.cli.export:Export",
            "results",
            "write a run's EMA weights under PyTorch names and check them in PyTorch",
        ),
        "report": Stage("train_jax.cli.report:Report", "results", "write a run's HTML report"),
    },
)
