"""The platform that a command computes on: `--platform auto|tpu|gpu|cpu`, decided before JAX initializes a backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import jax

from train_jax.errors import UserError


def cores() -> int:
    """Counts the cores in the CPU affinity mask if the system has one, otherwise all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Platform = Literal["auto", "tpu", "gpu", "cpu"]

_DEVICE_FILES = Path("/dev")
_JAX_NAMES = {"tpu": "tpu,cpu", "gpu": "cuda,cpu", "cpu": "cpu"}
"""Values of `jax_platforms`; a named backend that cannot be initialized is an error."""


class PlatformError(UserError):
    """The processes of a run would compute on different platforms."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that `--platform` selected."""

    platform: str
    """One of tpu, gpu and cpu, or another name that JAX_PLATFORMS has."""
    reason: str
    may_fall_back: bool = False
    """True if one process may compute on the CPU instead."""

    def __str__(self) -> str:
        return f"{self.platform} ({self.reason})"


def choose(wanted: Platform) -> Choice:
    """Returns the platform that a process will compute on, without a query of a backend."""
    if wanted != "auto":
        return Choice(wanted, "as requested")
    config: Any = jax.config
    first = (config.jax_platforms or "").partition(",")[0]
    if first:
        return Choice({"cuda": "gpu", "rocm": "gpu"}.get(first, first), "chosen by auto: jax_platforms names it")
    if files := tpu_files():
        return Choice("tpu", f"chosen by auto: this machine has {files[0]}")
    if files := gpu_files():
        return Choice("gpu", f"chosen by auto: this machine has {files[0]}", may_fall_back=True)
    return Choice("cpu", "chosen by auto: this machine has no TPU and no GPU")


VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables of a multi-process run: the coordinator's address, the number of processes, and the index of
this process."""
Source = Literal["variables", "tpu", "slurm", "kubernetes"]


def started_by(platform: str) -> Source | None:
    """Returns what may have started several processes, by their environment; None for a process that is alone.

    JAX, which may use the network, is asked for the other processes only if there is such a sign.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return "variables"
    if platform == "tpu" and tpu_files():
        return "tpu"
    if os.environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in os.environ:
        return "slurm"
    indexed = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return "kubernetes" if indexed and importlib.util.find_spec("kubernetes") else None


_chosen: Choice | None = None


def chosen() -> Choice | None:
    """Returns the choice of `use` in this process."""
    return _chosen


def use(wanted: Platform, *, several: bool, cpu_devices: int = 0) -> Choice:
    """Makes JAX use the chosen platform and returns it; call it before anything is computed.

    Where a TPU is chosen, and with several processes, a backend that cannot be initialized is an error: nothing falls
    back to the CPU. `auto` leaves one process on a machine with a GPU to JAX, which may not be installed for it.
    A chosen CPU, and one that `auto` may fall back to, is divided into `cpu_devices` virtual devices, unless that is 0
    or XLA_FLAGS or JAX_NUM_CPU_DEVICES gives their number.
    """
    global _chosen
    _chosen = choice = choose(wanted)
    if choice.platform in _JAX_NAMES and (wanted != "auto" or choice.platform == "tpu" or several):
        config: Any = jax.config
        if choice.platform != (config.jax_platforms or "").partition(",")[0]:
            config.update("jax_platforms", _JAX_NAMES[choice.platform])
    given = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ
    if (choice.platform == "cpu" or choice.may_fall_back) and cpu_devices and not given:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    return choice


def local_devices() -> list[Any]:
    """Returns `jax.local_devices()`. Raises `UserError` if the backend cannot be initialized, or JAX omits it."""
    config: Any = jax.config
    wanted = (config.jax_platforms or "cpu").partition(",")[0]
    remedy = "`trm preflight` shows who holds the device; --platform cpu computes without it"
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(f"{reason}; {remedy}") from error
    if devices[0].platform == "cpu" != wanted:  # JAX leaves out `cuda` without an error if it sees no GPU
        raise UserError(f"there is no device of the platform {wanted}, only the CPU; {remedy}")
    return devices


def host_device() -> Any | None:
    """Returns the CPU as a device of this process, whatever the platform; None if `jax_platforms` leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def tpu_files() -> list[Path]:
    """Returns the device files of TPU chips on this machine: /dev/accel0, or /dev/vfio/0 of newer ones."""
    return sorted(_DEVICE_FILES.glob("accel[0-9]*")) or sorted(_DEVICE_FILES.glob("vfio/[0-9]*"))


def gpu_files() -> list[Path]:
    return sorted(_DEVICE_FILES.glob("nvidia[0-9]*")) or sorted(_DEVICE_FILES.glob("kfd"))
