"""Our own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be switched off by name.

One file a subject; importing this package fills the tables.
"""

from bridge.lowerings import (
    attention,
    binary,
    convolution,
    creation,
    ctc,
    derivatives,
    elementwise,
    extremes,
    fourier,
    linalg,
    memory_formats,
    no_derivative,
    norms,
    pooling,
    quantization,
    recurrent,
    reductions,
    resizing,
    scatter,
    sequences,
    special,
    values,
)
from bridge.lowerings.registry import DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS

__all__ = [
    "DECOMPOSITIONS",
    "FUNCTIONS",
    "LOWERINGS",
    "METAS",
    "attention",
    "binary",
    "convolution",
    "creation",
    "ctc",
    "derivatives",
    "elementwise",
    "extremes",
    "fourier",
    "linalg",
    "memory_formats",
    "no_derivative",
    "norms",
    "pooling",
    "quantization",
    "recurrent",
    "reductions",
    "resizing",
    "scatter",
    "sequences",
    "special",
    "values",
]
