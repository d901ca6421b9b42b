"""The format of a row in the table of meanings: a module, its inputs, how closely it must agree with PyTorch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TOLERANCE = 1e-5
"""Float32, a handful of operations; the gradients of an op's inputs included."""
BF16 = 1e-2
"""bf16 has 8 bits, and both sides round at different places."""


@dataclasses.dataclass(frozen=True)
class Row:
    module: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[tuple, dict[str, Any]]]
    steps: int = 1
    """Calls in a row where the row is verified alone; buffers go from one to the next."""
    method: str = "forward"
    tolerance: float = TOLERANCE
    spans_calls: bool = False
    """True if the graph of one call continues in the next, so that PyTorch must go back through all of them at once."""
    input_gradients: bool = True
    """True if PyTorch lets the inputs require grad; not possible if they are written in place."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module()

    def example(self, seed: int = 1) -> tuple[tuple, dict[str, Any]]:
        """Arguments and keyword arguments of one call."""
        return self.inputs(torch.Generator().manual_seed(seed))


ROWS: dict[str, Row] = {}


def meaning(*shapes: tuple[int, ...], inputs: Callable | None = None, **settings: Any) -> Callable[[type], type]:
    """Enter the decorated module as a row. Its inputs are normal numbers of these shapes, or what `inputs` makes."""

    def tensors(generator):
        return tuple(torch.randn(shape, generator=generator) for shape in shapes), {}

    def add(cls):
        ROWS[cls.__name__] = Row(cls, inputs or tensors, **settings)
        return cls

    return add


def row(make: Callable[[], dict[str, Any]], shape: tuple[int, ...] = (3, 4), **settings: Any) -> Callable:
    """Enter a module with the attributes of `make()` and the decorated function as its forward, named in CamelCase."""

    def add(forward):
        def init(self):
            nn.Module.__init__(self)
            for name, value in make().items():
                setattr(self, name, value)

        members = {"__init__": init, "forward": forward, "__module__": forward.__module__}
        return meaning(shape, **settings)(type(forward.__name__.title().replace("_", ""), (nn.Module,), members))

    return add


def two_weights() -> dict[str, Any]:
    return {"a": nn.Parameter(torch.randn(4, 4)), "b": nn.Parameter(torch.randn(4, 4))}


weighted = functools.partial(row, two_weights)


class Weighted(nn.Module):
    """A module with two weights, for rows that need no more."""

    def __init__(self):
        super().__init__()
        self.a, self.b = two_weights().values()
