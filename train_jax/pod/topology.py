"""TPU topologies that programs are compiled for on any machine, and the data of their chips."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from train_jax.errors import UserError

DEFAULT = "v4:2x4x4"
"""32 chips in 8 hosts, which Google Cloud rents as v4-64: it counts TensorCores."""

LIBTPU = "0.0.42.*"
"""The version of the compiler that belongs to the supported version of JAX."""

_NAME = re.compile(r"(?P<chip>v4|v5e|v5p|v6e):(?P<shape>\d+(x\d+)+)")
_MEGACORE_CHIPS = ("v4", "v5p")
"""Chips with two TensorCores, which a program may use as one device."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of a TPU slice that is not there."""

    name: str
    megacore: bool
    devices: Sequence[Any]

    @property
    def hosts(self) -> int:
        return len({device.process_index for device in self.devices})

    @property
    def device_kind(self) -> str:
        return self.devices[0].device_kind

    @property
    def cores(self) -> int:
        """TensorCores of a device."""
        return self.devices[0].num_cores

    @property
    def _chip(self) -> pltpu.TpuInfo:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(self.name.partition(":")[0]), 1)

    @property
    def hbm_bytes(self) -> int:
        """Memory of a device."""
        return self._chip.hbm_capacity_bytes * self.cores

    @property
    def peak_flops(self) -> float:
        """Peak bfloat16 FLOP/s of a device."""
        return float(self._chip.bf16_ops_per_second * self.cores)

    @property
    def hbm_bandwidth(self) -> float:
        """Peak bytes/s between a device and its memory."""
        return float(self._chip.mem_bw_bytes_per_second * self.cores)

    @property
    def clock(self) -> float | None:
        """Cycles/s: peak FLOP/s by those of the matrix units in one cycle. None for v6e, where this is no clock."""
        chip = self._chip
        if chip.generation > 5:
            return None
        return chip.bf16_ops_per_second / (2 * chip.num_mxus * chip.mxu_column_size**2)

    def __str__(self) -> str:
        cores = " with megacore" if self.megacore and self.cores > 1 else ""
        return f"{self.name}{cores}: {len(self.devices)} devices ({self.device_kind}) in {self.hosts} hosts"


def topology(name: str = DEFAULT, *, megacore: bool = True) -> Topology:
    """Returns a topology such as `v4:2x4x4`, chips along each axis of the slice.

    With `megacore`, the two TensorCores of a v4 or v5p chip are one device, as on Google Cloud. Raises `UserError` for
    an unknown name, and if libtpu, the compiler, is not installed.
    """
    parsed = _NAME.fullmatch(name)
    if parsed is None:
        raise UserError(f"unknown topology {name!r}; use a chip and its axes, such as {DEFAULT}, v5e:4x8 or v6e:4x8")
    chip, axes = parsed["chip"], [int(size) for size in parsed["shape"].split("x")]
    expected = 3 if chip in _MEGACORE_CHIPS else 2
    if len(axes) != expected or not all(axes):
        raise UserError(f"topology {name!r}: {chip} has {expected} axes, such as {'x'.join('244'[:expected])}")
    _find_compiler()
    _prepare_environment(chip, axes)
    config = {"chip_config_name": "megacore" if megacore else "default"} if chip in _MEGACORE_CHIPS else {}
    try:
        devices = topologies.get_topology_desc(topology_name=name, platform="tpu", **config).devices
    except Exception as error:  # JAX and libtpu raise RuntimeError, ValueError and errors of their own
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"topology {name!r}: {reason.splitlines()[0]}") from error
    return Topology(name, megacore, devices)


def _find_compiler() -> None:
    """Names libtpu in `TPU_LIBRARY_PATH` if it lies in the folder `pod` of the environment.

    There JAX does not find it by itself, and does not search for a TPU in every program.
    """
    if "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu"):
        return
    library = Path(sys.prefix, "pod", "libtpu", "libtpu.so")
    if not library.exists():
        raise UserError(
            "the TPU compiler is not installed; run `source ./environment.sh pod` in the project's folder, or "
            f"`pip install --no-deps --target {library.parents[1]} 'libtpu=={LIBTPU}'`"
        )
    os.environ["TPU_LIBRARY_PATH"] = str(library)


def _prepare_environment(chip: str, axes: Sequence[int]) -> None:
    """Without these variables libtpu waits for the metadata server of a TPU machine."""
    chips = 1
    for size in axes:
        chips *= size
    cores = chips * (2 if chip in _MEGACORE_CHIPS else 1)
    rented_as = {"v5e": "v5litepod"}.get(chip, chip)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{rented_as}-{cores}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def use_host_backend() -> None:
    """Computes on the CPU, so that a TPU of this machine stays free; call it before anything is computed."""
    jax.config.update("jax_platforms", "cpu")
