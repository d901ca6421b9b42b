"""The traced call that a thread is in: its state, its errors, and the operations that `dispatch.aten.Dispatch` adds."""

from __future__ import annotations

import abc
import collections
import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch

from bridge._compat.jax import Tracer
from bridge.errors import BridgeError, BridgeWarning, where_in_module


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
    known_inputs: str = ""
    """A regular expression over names of inputs that are known while tracing."""
    assumed: dict[str, None] = dataclasses.field(default_factory=dict)
    """Descriptions of the checks that calls have not made; `verify` reports them."""
    branches: dict[Any, str] = dataclasses.field(default_factory=dict)
    """The branches on traced values that calls compared by `verify` have met, and their places in words."""


@dataclasses.dataclass(eq=False, repr=False)
class CallState(abc.ABC):
    """One traced call: its options, its random key, its tensors, and how its errors are made.

    `dispatch.aten.Dispatch` adds what needs the rest of the bridge.
    """

    options: Options
    names: Mapping[int, str]
    """`id` of a submodule -> its qualified name."""
    constants: Any
    """The `ConstantTable`, which knows the traced tensor of every real one."""
    rng: Any = None
    """A key, a `ShardedKey`, draws made elsewhere, or None."""
    draws: int = 0
    """The number of draws so far."""
    recording: int = 0
    """The graph that PyTorch records of the call: `engine.NO_GRAPH`, `GRAPH` or `GRAPH_FROM_INPUTS`."""
    survey: Any = None
    """The `Survey` of a call that lists its operations; None in any other call."""
    is_backward: bool = False
    """True in the backward of a `torch.autograd.Function`, which has no key."""
    is_checking: bool = False
    """True within a function of `values.CHECKING`."""
    condition: Any = None
    """A traced bool, true if PyTorch would run the current turn of a loop; None outside of such a loop."""
    truths: list[tuple[Any, bool]] = dataclasses.field(default_factory=list)
    """Traced conditions, and their truth on the side of a branch that is being traced."""
    sides: int = 0
    """The number of sides that have been traced inside of the outermost branch."""
    off_path: bool = False
    """True on a side that PyTorch did not take, in a call with its draws, which has none for it."""
    left_gradients: str = ""
    """Where `backward()` has given a parameter or buffer a gradient, which the call has to take away again."""
    turns: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    """Branch -> the number of times that the call has met it, where PyTorch did."""
    handled: dict[Any, str] = dataclasses.field(default_factory=dict)
    """The checks inside of `try` or `with`, by `bytecode.places_inside_handlers`, and their places in words."""
    failing: Any = None
    """The one of these that is to fail, to see whether the code catches what it raises; None in a call for results."""
    failed: BridgeError | None = None
    """The first error, which the module's own code may have caught."""
    said: set[str] = dataclasses.field(default_factory=set)
    """The places that a warning has named."""
    has_numbers: bool = False
    """True once a traced number has been made, so that one may be among the arguments of an operation."""
    metas: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Results on the meta device by operation and shapes, because recursion asks for the same ones again."""
    checks_int64: bool = True
    """True if results are checked to fit into 32 bits; False if integers have 64 bits, or may wrap."""
    products_of_pytorch: bool = dataclasses.field(
        default_factory=lambda: jax.config.jax_default_matmul_precision is None  # pyright: ignore
    )
    """True if PyTorch's setting decides the precision of float32 products."""
    state: list[Any] = dataclasses.field(default_factory=list)
    """The traced tensors of parameters and buffers."""
    inputs: list[Any] = dataclasses.field(default_factory=list)
    """The tensors among the arguments."""
    arguments: tuple[tuple, dict[str, Any]] = ((), {})
    """The arguments and keywords that the call was given, with arrays for tensors."""
    buffers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The arrays of the buffers that the call began with, by name."""

    @property
    def traced(self) -> bool:
        """True if any parameter, buffer or input is a tracer."""
        return any(isinstance(t._handle.storage.array, Tracer) for t in (*self.state, *self.inputs))

    def where(self, cause: BaseException | None = None) -> str:
        """Returns the submodule and the line of its code that are running, or that raised `cause`."""
        return where_in_module(self.names, cause)

    def warn(self, what: str, remedy: str = "") -> None:
        """Warns once per place."""
        place = self.where()
        if place not in self.said:
            self.said.add(place)
            warnings.warn(BridgeWarning(f"{what} {place}" + (remedy and f": {remedy}")), stacklevel=2)

    def note_check(self) -> None:
        """Reports that a check is not made: in a warning, and in the report of `verify`."""
        self.options.assumed[self.where()] = None
        self.warn("a check of traced values is not made")

    def error(self, what: str, remedy: str, cause: BaseException | None = None) -> BridgeError:
        """Returns the error that ends the call, even if the module's code catches it.

        It names the place where `cause` was raised, if there is one.
        """
        error = BridgeError(f"{what} {self.where(cause)}. Remedy: {remedy}.")
        self.failed = self.failed or error
        return error

    @abc.abstractmethod
    def wrap(self, real: torch.Tensor) -> Any:
        """Returns the traced tensor for any tensor: itself, the stand-in of a state tensor, or a constant."""

    @abc.abstractmethod
    def materialize(self, real: torch.Tensor) -> Any:
        """Like `wrap`; from here on `real` and whatever shares its memory is traced."""

    @abc.abstractmethod
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Computes an operation as if PyTorch had dispatched it."""

    @abc.abstractmethod
    def redispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Computes an operation on traced tensors."""

    @abc.abstractmethod
    def number_of(self, tensor: Any) -> Any:
        """Returns the value of a tensor of one element as a number, which is traced if the value is not known."""

    @abc.abstractmethod
    def value_for_python(self, tensor: Any) -> Any:
        """Returns the value of a tensor that Python insists on. Raises `BridgeError` if it is traced and unknown."""

    @abc.abstractmethod
    def taking_apart(self) -> AbstractContextManager[None]:
        """Returns the context for code that decomposes one operation into others, which are dispatched in turn."""

    @abc.abstractmethod
    def again(self, recording: int) -> Any:
        """Returns the state of a `torch.autograd.Function`'s backward: this call's names and tensors, no key."""


class _Current(threading.local):
    """The state of a thread."""

    call: CallState | None = None
    recording = False
    """True if PyTorch records a graph of its own, which needs to know the leaves."""
    compiler: Any = None
    """A context that turns `torch.compile` off for the call."""
    generator: Any = None
    """The default generator of the call, once the code asks for it."""
    states: Any = None
    """The states of the generators of `random` and `numpy.random` before the last call; None if they are as before."""
    answers: Any = None
    """The `branches.Answers` of PyTorch's side, which runs, or whose draws the call gets; None outside of `verify`."""
    watched = False
    """True if the call refuses to draw from these generators."""


CURRENT = _Current()
RUNNING: list[CallState] = []
"""The calls of all threads, in the order in which they began."""


def current() -> CallState | None:
    """Returns the innermost traced call that this thread is in."""
    return CURRENT.call


def refusal(what: str, remedy: str) -> BridgeError:
    """Returns the error of this thread's call.

    A thread without a call may have been started by one, which would not notice if the thread ended here. The error
    then belongs to every call that is being traced.
    """
    call = current()
    errors = [each.error(what, remedy) for each in ([call] if call is not None else tuple(RUNNING))]
    if errors:
        return errors[-1]
    return BridgeError(f"{what} {where_in_module({})}. Remedy: {remedy}.")
