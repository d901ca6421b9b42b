"""One process of a run that `campaigns.faults` disturbs: `trm` with a line for each phase that begins.

    python -m campaigns.faults_process DEVICES STAGE [arguments of the stage]

A line is `phase NAME`, or `phase training STEP` before the dispatch of a step. With COMPILE_SECONDS in the environment,
every compilation of a step takes that much longer.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

devices, *arguments = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"


def announce(text: str) -> None:
    sys.stdout.write(f"phase {text}\n")
    sys.stdout.flush()


def announced(owner: Any, name: str, phase: str, seconds: float = 0.0) -> None:
    """Makes a method announce its phase."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        announce(phase)
        time.sleep(seconds)
        return method(*args, **kwargs)

    setattr(owner, name, wrapper)


def main() -> int:
    announce("starting")
    from train_jax.__main__ import command as trm

    if arguments[0] == "train":
        from train_jax.run.checkpoint import Checkpoints
        from train_jax.runtime.devices import Devices
        from train_jax.runtime.preemption import Preemption
        from train_jax.trainer.hooks.evaluating import Evaluating
        from train_jax.trainer.hooks.saving import Saving

        announced(Saving, "restore", "restoring")
        announced(Devices, "compile", "compiling", float(os.environ.get("COMPILE_SECONDS", "0")))
        announced(Checkpoints, "save", "saving")
        announced(Evaluating, "_evaluate", "evaluating")
        before_step = Preemption.before_step

        def announced_step(self: Preemption, step: int, *args: Any) -> None:
            before_step(self, step, *args)
            announce(f"training {step}")

        setattr(Preemption, "before_step", announced_step)  # noqa: B010 (another signature)
    else:
        announce("exporting")
    return trm(arguments)


if __name__ == "__main__":
    sys.exit(main())
