"""The plugins of this package: the one list that names its parts."""

PARTS = (
    "train_jax.cli.plugin:PLUGIN",
    "train_jax.puzzles.plugin:PLUGIN",
    "train_jax.language.plugin:PLUGIN",
    "train_jax.research.plugin:PLUGIN",
    "train_jax.pods.plugin:PLUGIN",
    "train_jax.serve.plugin:PLUGIN",
)
"""Earlier ones are asked first for a preset, and their stages stand first in a group of `trm --help`."""

SCRIPT = "train_jax.script.plugin:PLUGIN"
"""The part that trains the files of users; it is imported with the first of them."""
