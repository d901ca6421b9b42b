"""Qualified names of submodules in the names of JAX's operations, for profiles and compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from torch import nn


def name_calls(modules: Mapping[str, nn.Module]) -> None:
    """Calls of each module run under `jax.named_scope("layers.0[Block]")`: its qualified name and its class.

    It writes into the modules themselves, which are copies for one call.
    """
    for name, module in modules.items():
        if getattr(type(module), "forward", None) in (None, nn.Module.forward):  # a container
            continue
        forward = module.forward
        scoped = jax.named_scope(f"{name}[{type(module).__name__}]")(forward)
        module.__dict__["forward"] = functools.update_wrapper(scoped, forward)
