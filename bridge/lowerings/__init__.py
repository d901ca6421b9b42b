"""Our own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be switched off by name.

One file a subject; importing this package fills the tables.
"""

from bridge.lowerings import (
    arithmetic,
    attention,
    convolution,
    creation,
    derivatives,
    elementwise,
    indexing,
    linalg,
    losses,
    no_derivative,
    norms,
    polynomials,
    reductions,
    sequences,
    values,
)
from bridge.lowerings.registry import BY_LAYOUT, DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS

__all__ = [
    "BY_LAYOUT",
    "DECOMPOSITIONS",
    "FUNCTIONS",
    "LOWERINGS",
    "METAS",
    "arithmetic",
    "attention",
    "convolution",
    "creation",
    "derivatives",
    "elementwise",
    "indexing",
    "linalg",
    "losses",
    "no_derivative",
    "norms",
    "polynomials",
    "reductions",
    "sequences",
    "values",
]
