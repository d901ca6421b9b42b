"""The bridge's own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be disabled by name.

Each file covers one subject; importing this package fills the tables. To add an operation, decorate a function of
arrays with `@lowers(op)`, or a function of tensors with `@decomposes(op)`, in the file of its subject.
"""

from bridge._compat.torchax import MISSING, MissingOperation, missing_operations_tolerated
from bridge.lowerings.registry import BY_LAYOUT, DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS

with missing_operations_tolerated(MISSING):
    from bridge.lowerings import (
        attention,  # noqa: F401
        convolution,  # noqa: F401
        creation,  # noqa: F401
        derivatives,  # noqa: F401
        elementwise,  # noqa: F401
        indexing,  # noqa: F401
        linalg,  # noqa: F401
        losses,  # noqa: F401
        norms,  # noqa: F401
        plain,
        reductions,  # noqa: F401
        sequences,  # noqa: F401
        values,  # noqa: F401
    )

for _table in (LOWERINGS, DECOMPOSITIONS, BY_LAYOUT, METAS, plain.PLAIN):
    for _op in [op for op in _table if isinstance(op, MissingOperation)]:
        del _table[_op]

__all__ = ["BY_LAYOUT", "DECOMPOSITIONS", "FUNCTIONS", "LOWERINGS", "METAS"]
