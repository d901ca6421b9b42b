"""Accelerator types of Cloud TPU: their names, their sizes, the hosts of a slice, and its software version.

References: https://cloud.google.com/tpu/docs/v4, v5e, v5p, v6e (sizes), and https://cloud.google.com/tpu/docs/runtimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from train_jax.errors import UserError

_CHIPS_OF_A_HOST = 4


class _Generation(NamedTuple):
    """TPUs whose types have the same name before the number."""

    runtime: str
    """Software version for JAX."""
    cores_per_chip: int
    """The number in a type counts these."""
    chips_of_one_host: int
    """Largest number of chips in a slice of one host."""
    sizes: Sequence[int]
    """Numbers that a type may have."""
    sizes_text: str


def _cubes(largest: int) -> list[int]:
    """Returns the cores of slices of chips in three dimensions: up to a cube of 64 chips, then whole cubes."""
    return [8, 16, 32, 64, *range(128, largest + 1, 128)]


_FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
_FLAT_TEXT = "1, 4, 8, 16, 32, 64, 128 or 256 chips"
_CUBES_TEXT = "8, 16, 32, 64 or a multiple of 128 cores"
_GENERATIONS = {
    "v2": _Generation("tpu-ubuntu2204-base", 2, 4, (8, 32, 128, 256, 512), "8, 32, 128, 256 or 512 cores"),
    "v3": _Generation(
        "tpu-ubuntu2204-base", 2, 4, (8, 32, 64, 128, 256, 512, 1024, 2048), "8 or a power of two from 32 to 2048 cores"
    ),
    "v4": _Generation("tpu-ubuntu2204-base", 2, 4, _cubes(8192), _CUBES_TEXT),
    "v5litepod": _Generation("v2-alpha-tpuv5-lite", 1, 8, _FLAT, _FLAT_TEXT),
    "v5p": _Generation("v2-alpha-tpuv5", 2, 4, _cubes(12288), _CUBES_TEXT),
    "v6e": _Generation("v2-alpha-tpuv6e", 1, 8, _FLAT, _FLAT_TEXT),
}
_OTHER_NAMES = {"v5e": "v5litepod"}


def check_type(accelerator_type: str, runtime_version: str = "") -> None:
    """Raises `UserError` for a type that is not in the table, with the nearest one that is; empty is none.

    With a `runtime_version`, only a name that Cloud TPU writes in another way is refused: a new type can be used.
    """
    if not accelerator_type:
        return
    name, size = _parts(accelerator_type)
    written = _OTHER_NAMES.get(name)
    if written:
        raise UserError(f"--type {accelerator_type}: this type is called {_nearest(written, size)}; use this name")
    if runtime_version:
        return
    generation = _GENERATIONS.get(name)
    if generation is None:
        known = ", ".join(_nearest(each, size) for each in reversed(_GENERATIONS))
        raise UserError(
            f"--type {accelerator_type}: the TPU {name} is not known; use {known}, or also give the "
            "--runtime-version of a new one"
        )
    if size not in generation.sizes:
        raise UserError(
            f"--type {accelerator_type}: a {name} slice has {generation.sizes_text}; use {_nearest(name, size)}"
        )


def worker_count(accelerator_type: str) -> int:
    """Returns the hosts of a slice; of a TPU that is not in the table, as if its type had the number of chips."""
    if not accelerator_type:
        return 1
    name, size = _parts(accelerator_type)
    generation = _GENERATIONS.get(name)
    chips = size // generation.cores_per_chip if generation else size
    chips_of_one_host = generation.chips_of_one_host if generation else _CHIPS_OF_A_HOST
    return 1 if chips <= chips_of_one_host else chips // _CHIPS_OF_A_HOST


def runtime_of(accelerator_type: str) -> str:
    """Returns the software version for JAX on a type of the table."""
    return _GENERATIONS[_parts(accelerator_type)[0]].runtime


def _parts(accelerator_type: str) -> tuple[str, int]:
    name, _, size = accelerator_type.partition("-")
    return name, int(size)


def _nearest(name: str, size: int) -> str:
    """Returns the type of a generation whose size is the nearest one."""
    return f"{name}-{min(_GENERATIONS[name].sizes, key=lambda each: abs(each - size))}"
