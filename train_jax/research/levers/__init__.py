"""Levers of training: a TRM with changes of the papers, to be studied before one enters the product.

    trm train study --model train_jax.research.levers:LeverTRM --arch.options '{"hidden_size": 64, "repair": 0.2}'

The options are all fields of `LeverConfig`, those of the TRM too.
"""

from train_jax.research.levers.config import LeverConfig
from train_jax.research.levers.head import LeverTRM

__all__ = ["LeverConfig", "LeverTRM"]
