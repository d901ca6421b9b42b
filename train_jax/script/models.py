"""The module of a script: one model, or several in a dict, with methods that are added to it."""

from __future__ import annotations

from typing import Any

from torch import nn


class Models(nn.ModuleDict):
    """The models of a script that returns several in a dict."""


def as_given(module: nn.Module) -> Any:
    """Returns the models as the script knows them: a dict if `model` returns one."""
    return dict(module.items()) if isinstance(module, Models) else module


def add_method(module: nn.Module, name: str, method: Any) -> None:
    """Adds a method to one module by a subclass of its class, which keeps the names of its parameters."""
    own = type(module)
    subclass = type(own.__name__, (own,), {name: method, "__module__": own.__module__})
    subclass.__qualname__ = own.__qualname__
    module.__class__ = subclass
