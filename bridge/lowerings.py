"""Our own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be switched off by name.

They are sorted by subject into `lowerings_*.py`; importing this file fills the tables.
"""

from bridge import (
    lowerings_attention,
    lowerings_creation,
    lowerings_elementwise,
    lowerings_linalg,
    lowerings_norms,
    lowerings_pooling,
    lowerings_recurrent,
    lowerings_reductions,
    lowerings_scatter,
    lowerings_values,
)
from bridge.lowerings_registry import DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS

SUBJECTS = (
    lowerings_attention,
    lowerings_creation,
    lowerings_elementwise,
    lowerings_linalg,
    lowerings_norms,
    lowerings_pooling,
    lowerings_recurrent,
    lowerings_reductions,
    lowerings_scatter,
    lowerings_values,
)

__all__ = ["DECOMPOSITIONS", "FUNCTIONS", "LOWERINGS", "METAS", "SUBJECTS"]
