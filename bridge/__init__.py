"""Any `torch.nn.Module` as a pure JAX function that means the same thing.

    fn = bridge.export(module)
    outputs, buffers = fn(fn.params, fn.buffers, inputs, rng=jax.random.key(0), train=True)

Knows PyTorch, torchax and JAX; knows no model and no training.
"""

from bridge._compat.torchax import check_releases
from bridge.blocks import Blocks, export_blocks
from bridge.dispatch.random import ShardedKey
from bridge.dispatch.replacements import register_function
from bridge.errors import BridgeError, BridgeWarning
from bridge.functional import Functional, Result, export
from bridge.graphs import GraphPadding, shapes_of
from bridge.lowerings import LOWERINGS
from bridge.lowerings.attention import fused_attention
from bridge.parity import ParityReport, verify
from bridge.sharding import shardings
from bridge.tensor.pytrees import register
from bridge.weights import into, load_weights, save_weights, state_dict

__all__ = [
    "LOWERINGS",
    "Blocks",
    "BridgeError",
    "BridgeWarning",
    "Functional",
    "GraphPadding",
    "ParityReport",
    "Result",
    "ShardedKey",
    "export",
    "export_blocks",
    "fused_attention",
    "into",
    "load_weights",
    "register",
    "register_function",
    "save_weights",
    "shapes_of",
    "shardings",
    "state_dict",
    "verify",
]

check_releases()
