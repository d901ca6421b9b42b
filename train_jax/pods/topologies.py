"""The devices of an absent TPU slice or of absent GPUs, by the name of a topology."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from bridge._compat.jax import tracing_for_gpu
from train_jax.errors import UserError
from train_jax.pods.gpus import CARDS, CUDA_FOLDER, CUDNN_VERSION, target_of, use_gpu_compiler
from train_jax.run.performance import PEAK_BF16_FLOPS, PEAK_BYTES_PER_SECOND

DEFAULT_TOPOLOGY = "v4:2x4x4"
"""32 chips in 8 hosts, which Google Cloud rents as v4-64: it counts TensorCores."""

LIBTPU = "0.0.42.*"
"""The version of the compiler that belongs to the supported version of JAX."""

_TPUS = re.compile(r"(?P<chip>v4|v5e|v5p|v6e):(?P<shape>\d+(x\d+)+)")
_GPUS = re.compile(r"gpu:(?P<card>[a-z]\w*)(:((?P<hosts>[1-9]\d*)x)?(?P<count>[1-9]\d*))?")
_MEGACORE_CHIPS = ("v4", "v5p")
"""Chips with two TensorCores, which a program may use as one device."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of an absent TPU slice, or absent GPUs."""

    name: str
    devices: Sequence[Any]
    hbm_bytes: int
    """Memory of a device in bytes."""
    peak_flops: float
    """Peak bfloat16 FLOP/s of a device."""
    hbm_bandwidth: float
    """Peak bytes/s between a device and its memory."""
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Options of `jax.stages.Lowered.compile`."""
    compute_capability: tuple[int, int] | None = None
    """That of NVIDIA GPUs; None for TPUs."""

    @property
    def hosts(self) -> int:
        return len({device.process_index for device in self.devices})

    @property
    def is_gpu(self) -> bool:
        return self.compute_capability is not None

    def __str__(self) -> str:
        return f"{self.name}: {len(self.devices)} devices ({self.devices[0].device_kind}) in {self.hosts} hosts"

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Traces programs as on these devices: on a GPU, attention is a kernel of cuDNN."""
        if self.compute_capability is None:
            return contextlib.nullcontext()
        return tracing_for_gpu(self.compute_capability, CUDNN_VERSION)


def topology(name: str = DEFAULT_TOPOLOGY) -> Topology:
    """Returns a topology such as `v4:2x4x4`, chips along each axis of the slice, or `gpu:h100:8`, GPUs of one host.

    The two TensorCores of a v4 or v5p chip are one device, as on Google Cloud. Raises `UserError` for an unknown name,
    and if the compiler, libtpu or the CUDA plugin of JAX, is not installed.
    """
    if name.startswith("gpu:"):
        return _gpus(name)
    return _slice(name)


def use_host_backend() -> None:
    """Makes JAX compute on the CPU, so that a TPU of this machine stays free; call it before anything is computed."""
    jax.config.update("jax_platforms", "cpu")


def _described(name: str, platform: str, **options: Any) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(platform=platform, **options).devices
    except Exception as error:  # JAX and the compilers raise RuntimeError, ValueError and errors of their own
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"topology {name!r}: {reason.splitlines()[0]}") from error


# ---- GPUs


def _gpus(name: str) -> Topology:
    parsed = _GPUS.fullmatch(name)
    card = CARDS.get(parsed["card"]) if parsed else None
    if parsed is None or card is None:
        raise UserError(
            f"unknown topology {name!r}; use gpu: and one of {', '.join(CARDS)}, then :8 for 8 GPUs or :2x8 for 2 hosts"
        )
    folder = use_gpu_compiler()
    shape = f"1x{parsed['hosts'] or 1}x{parsed['count'] or 1}"
    return Topology(
        name,
        _described(name, "cuda", topology=shape, target_config=target_of(card)),
        hbm_bytes=card.memory_bytes,
        peak_flops=PEAK_BF16_FLOPS[card.device_kind],
        hbm_bandwidth=PEAK_BYTES_PER_SECOND[card.device_kind],
        compiler_options={"xla_gpu_cuda_data_dir": str(folder / CUDA_FOLDER)},
        compute_capability=card.compute_capability,
    )


# ---- TPUs


def _slice(name: str) -> Topology:
    parsed = _TPUS.fullmatch(name)
    if parsed is None:
        raise UserError(
            f"unknown topology {name!r}; use a chip and its axes, such as {DEFAULT_TOPOLOGY}, v5e:4x8 or v6e:4x8, or a "
            "GPU such as gpu:h100:8"
        )
    chip = parsed["chip"]
    axes = [int(size) for size in parsed["shape"].split("x")]
    expected = 3 if chip in _MEGACORE_CHIPS else 2
    if len(axes) != expected or not all(axes):
        raise UserError(f"topology {name!r}: {chip} has {expected} axes, such as {'x'.join('244'[:expected])}")
    _find_libtpu()
    # Without these variables libtpu waits for the metadata server of a TPU machine.
    cores = math.prod(axes) * (2 if chip in _MEGACORE_CHIPS else 1)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{'v5litepod' if chip == 'v5e' else chip}-{cores}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    config = {"chip_config_name": "megacore"} if chip in _MEGACORE_CHIPS else {}
    devices = _described(name, "tpu", topology_name=name, **config)
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(chip), 1)  # the figures of one TensorCore
    cores = devices[0].num_cores
    return Topology(
        name,
        devices,
        hbm_bytes=info.hbm_capacity_bytes * cores,
        peak_flops=float(info.bf16_ops_per_second * cores),
        hbm_bandwidth=float(info.mem_bw_bytes_per_second * cores),
    )


def _find_libtpu() -> None:
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
