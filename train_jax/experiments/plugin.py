"""The experiments of the study: their runs by name, sweeps and their analysis."""

from train_jax.plugin import Plugin, Stage

PLUGIN = Plugin(
    name="research",
    presets=("train_jax.experiments.runs:EXPERIMENT_RUNS",),
    derivations={"--preset": "train_jax.experiments.runs:at_preset"},
    recipes="train_jax.experiments.table:recipes",
    stages={
        "sweep": Stage(
            "train_jax.stages.sweep:cli",
            "training",
            "train experiments by name, or list them: trm sweep exp01 exp02b --dry-run",
        ),
        "analyze": Stage(
            "train_jax.stages.analyze:Analyze",
            "results",
            "write the report of a sweep: the answer of each group, plots, tables",
        ),
    },
)
