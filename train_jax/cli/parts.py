"""The plugins of this package: the one list that names its parts."""

PARTS = (
    "train_jax.cli.plugin:PLUGIN",
    "train_jax.tasks.puzzles.plugin:PLUGIN",
    "train_jax.tasks.language.plugin:PLUGIN",
    "train_jax.experiments.plugin:PLUGIN",
    "train_jax.pod.plugin:PLUGIN",
    "train_jax.serving.plugin:PLUGIN",
)
"""Earlier ones are asked first for a preset, and their stages stand first in a group of `trm --help`."""
