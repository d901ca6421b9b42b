"""A model of a new kind and a call of it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

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


def without_init(name: str) -> None:
    """Lets modules of a package be imported without what the package itself imports, which needs more packages."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name!r}")
    package = ModuleType(name)
    package.__spec__ = spec
    package.__path__ = [*(spec.submodule_search_locations or ())]
    sys.modules[name] = package


def without(*names: str) -> Any:
    """Returns a context in which modules of packages that a model does not need are stand-ins."""
    return mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names})
