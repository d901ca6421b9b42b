"""The traced call that a thread is in, and the interface through which the parts of the bridge use it.

The lowest file: it imports nothing of the bridge. `dispatch.mode.Dispatch` implements `TraceContext`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `export`, which explains them."""

    lowerings: Mapping[str, Callable | None] = dataclasses.field(default_factory=dict)
    """By the name of the operation; None for one that shall have no lowering of the bridge."""
    functions: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    """The names of the submodules."""
    int64: str = "refuse"
    name_scopes: bool = False
    static: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Buffers that are constants, by their names, with the values that they had."""
    assumed: dict[str, None] = dataclasses.field(default_factory=dict)
    """Descriptions of the checks that calls have not made; `verify` reports them."""


class TraceContext(Protocol):
    """One traced call: its options, its random key, its tensors, and how its errors are made."""

    options: Options
    rng: Any
    """A key, a `ShardedKey`, draws made elsewhere, or None."""
    draws: int
    """The number of draws so far."""
    recording: int
    """The graph that PyTorch records of the call: `engine.NO_GRAPH`, `GRAPH` or `GRAPH_FROM_INPUTS`."""
    is_backward: bool
    """True in the backward of a `torch.autograd.Function`, which has no key."""
    is_checking: bool
    """True within a function of `values.CHECKING`."""
    condition: Any
    """A traced bool, true if PyTorch would run the current turn of a loop; None outside of such a loop."""
    handled: dict[Any, str]
    """The checks inside of `try` or `with`, by `bytecode.places_inside_handlers`, and their places in words."""
    failing: Any
    """The one of these that is to fail, to see whether the code catches what it raises; None in a call for results."""
    metas: dict[Any, Any]
    """Results on the meta device, by operation and shapes."""
    survey: Any
    """The `Survey` of a call that lists its operations; None in any other call."""
    checks_int64: bool
    """True if results are checked to fit into 32 bits; False if integers have 64 bits, or may wrap."""
    products_of_pytorch: bool
    """True if PyTorch's setting decides the precision of float32 products."""
    state: list[Any]
    """The tensors of parameters and buffers."""
    inputs: list[Any]
    """The tensors among the arguments."""
    arguments: tuple[tuple, dict[str, Any]]
    """The arguments and keywords that the call was given, with arrays for tensors."""
    buffers: Mapping[str, Any]
    """The arrays of the buffers that the call began with, by name."""

    @property
    def traced(self) -> bool:
        """True if any parameter, buffer or input is a tracer."""
        ...

    def wrap(self, real: torch.Tensor) -> Any:
        """Returns the traced tensor for any tensor: itself, the stand-in of a state tensor, or a constant."""

    def materialize(self, real: torch.Tensor) -> Any:
        """Like `wrap`; from here on `real` and whatever shares its memory is traced."""

    def may_write(self, real: torch.Tensor) -> bool:
        """True if the real tensor's memory belongs to the call."""
        ...

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is, or stands for, a tensor of the bridge; all others are plain PyTorch."""
        ...

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor that a traced one stands for; None if there is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Computes an operation as if PyTorch had dispatched it."""

    def redispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Computes an operation on traced tensors."""

    def taking_apart(self) -> AbstractContextManager[None]:
        """Returns the context for code that decomposes one operation into others, which are dispatched in turn."""
        ...

    def again(self, recording: int) -> Any:
        """Returns the context of a later pass over the same module."""

    def where(self, cause: BaseException | None = None) -> str:
        """Returns the submodule and the line of its code that are running, or that raised `cause`."""
        ...

    def warn(self, what: str, remedy: str = "") -> None:
        """Warns once per place."""

    def error(self, what: str, remedy: str, cause: BaseException | None = None) -> Any:
        """Returns the error that ends the call, even if the module's code catches it."""


class _Current(threading.local):
    """The state of a thread."""

    call: TraceContext | None = None
    recording = False
    """True if PyTorch records a graph of its own, which needs to know the leaves."""
    compiler: Any = None
    """A context that turns `torch.compile` off for the call."""
    generator: Any = None
    """The default generator of the call, once the code asks for it."""
    states: Any = None
    """The states of the generators of `random` and `numpy.random` before the last call; None if they are as before."""
    watched = False
    """True if the call refuses to draw from these generators."""


CURRENT = _Current()
RUNNING: list[TraceContext] = []
"""The calls of all threads, in the order in which they began."""


def current() -> TraceContext | None:
    """Returns the innermost traced call that this thread is in."""
    return CURRENT.call
