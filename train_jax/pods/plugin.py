"""Commands for TPU slices and other machines with several hosts."""

from train_jax.plugin import Plugin, Stage

PLUGIN = Plugin(
    name="pods",
    stages={
        "preflight": Stage(
            "train_jax.pods.stages.preflight:cli", "pods", "check hosts, devices, code, data and run folder"
        ),
        "prove": Stage(
            "train_jax.pods.stages.prove:cli",
            "pods",
            "measure on these devices what the project claims, in minutes; --choose kernels",
        ),
        "compile-pod": Stage(
            "train_jax.pods.stages.compile_pod:cli",
            "pods",
            "compile a run for TPUs or GPUs, without them, and print what it costs",
        ),
        "launch": Stage(
            "train_jax.pods.stages.launch:cli",
            "pods",
            "run a command on every host of a TPU slice, or rehearse it here (--rehearse 8x4)",
        ),
    },
)
