"""Performance figures of a run: examples per second, model FLOPs utilization, peak device memory."""

from __future__ import annotations

import jax

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
}
"""Peak dense bfloat16 FLOP/s of one device, by JAX's `device_kind`, from the vendors' data sheets. A TPU v4 device with
megacore is a whole chip."""


def performance(*, examples_per_second: float, step_flops: float | None, step_seconds: float) -> dict[str, float]:
    """Returns `perf/examples_per_s`, `perf/mfu` and `perf/hbm_peak` (bytes), as far as they are known.

    `step_flops` are the FLOPs of one step on one device, as counted by XLA for the compiled program, including
    recomputed activations. `perf/mfu` also needs the peak FLOP/s of the device, `perf/hbm_peak` its memory statistics.
    """
    device = jax.local_devices()[0]
    figures = {"perf/examples_per_s": examples_per_second}
    peak = PEAK_BF16_FLOPS.get(device.device_kind)
    if peak is not None and step_flops is not None and step_seconds > 0:
        figures["perf/mfu"] = step_flops / step_seconds / peak
    memory = device.memory_stats() or {}
    if "peak_bytes_in_use" in memory:
        figures["perf/hbm_peak"] = float(memory["peak_bytes_in_use"])
    return figures
