"""The speed of a run: examples per second, utilization of the devices, the FLOPs that a step of the model needs."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from models_torch.outside import is_outside
from train_jax.run.config import RunConfig
from train_jax.run.model import sized
from train_jax.task import Task


def model_flops(config: RunConfig, task: Task, devices: int) -> float | None:
    """Returns the FLOPs of the matrix products in one forward and one backward pass, of the examples of one device.

    Recomputation and the optimizer are not counted. None for models of the user that cannot be counted.
    """
    examples = config.global_batch_size // devices
    from models_torch.flops import train_flops_per_example  # imports PyTorch's counters

    try:
        return examples * train_flops_per_example(config.model, sized(config.arch, task, examples))
    except ValueError:
        if not is_outside(config.model):
            raise
        return None


PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA RTX A6000": 155e12,
    "NVIDIA RTX PRO 6000 Blackwell": 504e12,
}
"""Peak dense bfloat16 FLOP/s of one device, by JAX's `device_kind`, from the vendors' data sheets. A TPU v4 device with
megacore is a whole chip."""

PEAK_BYTES_PER_SECOND = {
    "TPU v4": 1228e9,
    "TPU v5 lite": 819e9,
    "TPU v5e": 819e9,
    "TPU v5": 2765e9,
    "TPU v5p": 2765e9,
    "TPU v6 lite": 1640e9,
    "TPU v6e": 1640e9,
    "NVIDIA A100-SXM4-40GB": 1555e9,
    "NVIDIA A100-SXM4-80GB": 2039e9,
    "NVIDIA H100 80GB HBM3": 3350e9,
    "NVIDIA H100 PCIe": 2000e9,
    "NVIDIA H200": 4800e9,
    "NVIDIA B200": 8000e9,
    "NVIDIA RTX A6000": 768e9,
    "NVIDIA RTX PRO 6000 Blackwell": 1792e9,
}
"""Peak bytes/s between one device and its memory, from the same sources."""


def peak_flops() -> float | None:
    """Returns the peak bfloat16 FLOP/s of a device of this process; None if it is not known, for example of a CPU."""
    return PEAK_BF16_FLOPS.get(jax.local_devices()[0].device_kind)


def performance(
    *, per_second: Mapping[str, float], flops: Mapping[str, float | None], step_seconds: float
) -> dict[str, float]:
    """Returns `perf/examples_per_s` and the like, `perf/hfu`, `perf/mfu` and `perf/hbm_peak` (bytes), as far as they
    are known.

    `flops` are those of one step on one device. `hfu` is hardware FLOPs utilization: all FLOPs that XLA counts in the
    compiled program, recomputed activations and the optimizer included. `mfu` is model FLOPs utilization: those of the
    matrix products of one forward and one backward pass.

    References:
      Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, appendix B
    """
    figures = {f"perf/{unit}_per_s": rate for unit, rate in per_second.items()}
    peak = peak_flops()
    if peak is not None and step_seconds > 0:
        known = {name: count for name, count in flops.items() if count is not None}
        figures |= {f"perf/{name}": count / step_seconds / peak for name, count in known.items()}
    memory = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in memory:
        figures["perf/hbm_peak"] = float(memory["peak_bytes_in_use"])
    return figures
