"""Our own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be switched off by name.

One file a subject; importing this package fills the tables.
"""

from bridge.lowerings import (
    arithmetic,  # noqa: F401
    attention,  # noqa: F401
    convolution,  # noqa: F401
    creation,  # noqa: F401
    derivatives,  # noqa: F401
    elementwise,  # noqa: F401
    indexing,  # noqa: F401
    linalg,  # noqa: F401
    losses,  # noqa: F401
    norms,  # noqa: F401
    reductions,  # noqa: F401
    sequences,  # noqa: F401
    values,  # noqa: F401
)
from bridge.lowerings.registry import BY_LAYOUT, DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS

__all__ = ["BY_LAYOUT", "DECOMPOSITIONS", "FUNCTIONS", "LOWERINGS", "METAS"]
