"""A model of a new kind and a call of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from campaigns.atlas_models import import_torchvision


class Model(NamedTuple):
    """A module and a call of it."""

    module: nn.Module
    args: tuple
    settings: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of `verify`."""


class Function(nn.Module):
    """A layer and a function of it and the inputs, as a training step has them."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.layer = layer
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layer, *inputs)


def import_without_operators() -> None:
    """Lets torchvision be imported also where its library of operators does not load."""
    with contextlib.suppress(ImportError):
        import_torchvision()
