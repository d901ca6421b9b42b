"""The experiments of the study: their runs by name, sweeps and their analysis."""

from train_jax.plugin import Plugin, Stage

PLUGIN = Plugin(
    name="research",
    presets=("train_jax.research.runs:EXPERIMENT_RUNS",),
    derivations={"--preset": "train_jax.research.runs:at_preset"},
    recipes="train_jax.research.table:recipes",
    stages={
        "sweep": Stage(
            "train_jax.research.stages.sweep:cli",
            "training",
            "train experiments by name, or list them: trm sweep exp01 exp02b --dry-run",
        ),
        "analyze": Stage(
            "train_jax.research.stages.analyze:Analyze",
            "results",
            "write the report of a sweep: the answer of each group, plots, tables",
        ),
    },
)
