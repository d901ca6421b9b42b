"""Training scripts: the task that trains the model of a plain PyTorch file, and its presets, one for each file."""

from train_jax.plugin import Plugin

PLUGIN = Plugin(
    name="script",
    tasks={"script": "train_jax.script.task:ScriptTask"},
    reports={"script": "train_jax.script.commands:ScriptCommands"},
    presets=("train_jax.script.presets:presets",),
)
