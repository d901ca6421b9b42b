"""GPUs that a program can be compiled for without one: their data, and JAX's CUDA plugin, which has the compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from train_jax.errors import UserError
from train_jax.run.performance import PEAK_BYTES_PER_SECOND

CUDA_FOLDER = Path("nvidia", "cu13")
"""Where the wheels of CUDA have their assembler and libraries of device code."""

CUDNN_VERSION = 91000
"""The version that JAX takes for granted while it traces: 9.10.0, the oldest with all forms of fused attention."""

_PLUGIN = "jax_plugins.xla_cuda13"
_WHEELS = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm"


@dataclasses.dataclass(frozen=True)
class Card:
    """What XLA's compiler asks of a GPU.

    References:
      XLA, `xla/backends/gpu/target_config/specs`: the same data of each card
    """

    device_kind: str
    """JAX's name of the device, which `train_jax.run.performance` has peaks for."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    """Float32 units of a multiprocessor."""
    threads: int
    """Threads that a multiprocessor holds."""
    clock_ghz: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    """Shared memory of a multiprocessor. A block can have all of it but 1 KiB."""
    has_accelerated_features: bool
    """True if the compiler may use instructions of this architecture alone, such as `wgmma`: `sm_90a`."""


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 1.41, 85100068864, 40 * 2**20, 164 * 2**10, False),
    "a6000": Card("NVIDIA RTX A6000", (8, 6), 84, 128, 1536, 1.8, 51041271808, 6 * 2**20, 100 * 2**10, False),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 1.98, 84942979072, 50 * 2**20, 228 * 2**10, True),
    "h200": Card("NVIDIA H200", (9, 0), 132, 128, 2048, 1.98, 151397597184, 50 * 2**20, 228 * 2**10, True),
    "b200": Card("NVIDIA B200", (10, 0), 148, 128, 2048, 1.965, 191514411008, 132644864, 228 * 2**10, True),
    "rtx6000pro": Card(
        "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 128, 1536, 2.6, 103079215104, 128 * 2**20, 128 * 2**10, False
    ),
}
"""Cards by the names of topologies, such as `gpu:h100`."""


def target_of(card: Card) -> str:
    """Returns the description of a card for XLA: a `GpuTargetConfigProto` as text."""
    major, minor = card.compute_capability
    # 128 KiB of the multiprocessor of capability 12 are shared with the first cache; a block has at most 99 KiB.
    most = 99 * 2**10 if card.compute_capability == (12, 0) else card.shared_bytes - 2**10
    features = "feature_extension: ACCELERATED_FEATURES" if card.has_accelerated_features else ""
    bandwidth = PEAK_BYTES_PER_SECOND[card.device_kind]
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {card.multiprocessors}
  fpus_per_core: {card.lanes}
  threads_per_core_limit: {card.threads}
  clock_rate_ghz: {card.clock_ghz}
  device_memory_size: {card.memory_bytes}
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {card.l2_bytes}
  shared_memory_per_core: {card.shared_bytes}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {most}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{card.device_kind}"
"""


def use_gpu_compiler() -> Path:
    """Returns the folder of the CUDA plugin of JAX and its wheels; makes it importable.

    Beside the environment's packages, in the folder `gpu-aot`, JAX does not search for a GPU in every program. Raises
    `UserError` if the plugin is not installed.
    """
    folder = Path(sys.prefix, "gpu-aot")
    if not _is_installed():
        if not Path(folder, "jax_plugins").exists():
            raise UserError(
                "the GPU compiler is not installed; run `source ./environment.sh gpu-aot` in the project's folder, or "
                f"`pip install --no-deps -c constraints.txt --target {folder} {_WHEELS}`"
            )
        sys.path.append(str(folder))
    spec = importlib.util.find_spec(_PLUGIN)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[2]


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_PLUGIN) is not None
    except ModuleNotFoundError:  # there is no plugin of JAX at all
        return False
