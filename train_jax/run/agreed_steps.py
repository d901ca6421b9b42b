"""Which checkpoints the processes of a run take into account: those that the first process finds."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

from train_jax.errors import StorageError
from train_jax.runtime.processes import all_or_none, of_main_process

SEEN_SECONDS = 90.0
"""How long a host may take to show a folder of another one: with the defaults of NFS, up to a minute."""


def agreed_steps(folder: Path, find: Callable[[], list[int]]) -> list[int]:
    """The steps that the first process finds, newest last, on every process. Collective.

    `find` lists those that this host shows. Waits until they are all there; raises `StorageError` if they are not.
    """
    steps = of_main_process(lambda: {"steps": find()})["steps"]
    deadline = time.monotonic() + SEEN_SECONDS
    with all_or_none():
        while missing := set(steps).difference(find()):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{folder} has no checkpoint of step {max(missing)} on {platform.node()}, but has one on the host "
                    "of process 0; start again when all hosts show the same folder"
                )
            time.sleep(min(1.0, SEEN_SECONDS / 10))
    return steps
