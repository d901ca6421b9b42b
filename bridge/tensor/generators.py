"""PyTorch's generators in a traced call: numbers from one that the call seeds are constants, as they are in PyTorch.

A draw from the default generator follows the call's JAX key, unless the call has seeded it (`torch.manual_seed`,
`fork_rng`): a call has a default generator of its own, which nobody has seeded at its start. A generator that the
module holds, or that is passed, would give other numbers at every call; it is refused, unless the call seeds it first.
One that the code reaches as a global name or through a closure is taken for one of the call.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from bridge._compat.torch import (
    Replacements,
    below_modes,
    default_generator,
    in_place_of_default_generator,
    tree_map_only,
)
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_UNSEEDED = range(0x5EED_0F_0_C_A11, 0x5EED_0F_0_C_A11 + 2**32)
"""Seeds of generators that the call has not seeded yet, each its own: PyTorch's dispatcher passes the seed and the
state on, and not the Python object."""
_SEEDS = itertools.cycle(_UNSEEDED)

_BY_SHAPE = (
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random", "uniform", "normal_functional",
    "exponential", "geometric", "log_normal", "cauchy", "randperm", "bernoulli.p",
)  # fmt: skip
"""Draws whose numbers depend on the shapes of their tensors and not on the values."""


class CallGenerator(torch.Generator):
    """The stand-in, in a traced call, for a generator of the module or its arguments."""

    def __init__(self):
        super().__init__()
        with below_modes():
            self.manual_seed(next(_SEEDS))


def seeded(generator: torch.Generator) -> bool:
    """True unless the bridge made it and the call has not seeded it since."""
    with below_modes():
        seed = generator.initial_seed()
        unused = torch.Generator().manual_seed(seed) if seed in _UNSEEDED else None
        return unused is None or not torch.equal(generator.get_state(), unused.get_state())


class WatchedGenerator:
    """PyTorch's default generator, which notes whether it has been seeded since."""

    def __init__(self):
        self.seeded = False
        self._when_saved: dict[bytes, bool] = {}

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeded = True
        return default_generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        state = default_generator.get_state()
        with below_modes():
            self._when_saved[state.numpy().tobytes()] = self.seeded
        return state

    def set_state(self, state: torch.Tensor) -> None:
        with below_modes():
            self.seeded = self._when_saved.get(state.numpy().tobytes(), True)
        default_generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(default_generator, name)


_Default = TypeVar("_Default", CallGenerator, WatchedGenerator)


class _Current(threading.local):
    generator: CallGenerator | WatchedGenerator | None = None


_CURRENT = _Current()
_REPLACED = Replacements(in_place_of_default_generator(lambda: _CURRENT.generator))


@contextlib.contextmanager
def default_generator_as(generator: _Default) -> Iterator[_Default]:
    """In this thread and the code under it, `torch.manual_seed` and its like act on this generator."""
    before, _CURRENT.generator = _CURRENT.generator, generator
    try:
        with _REPLACED:
            yield generator
    finally:
        _CURRENT.generator = before


def generator_of(given: torch.Generator | None) -> torch.Generator | None:
    """The generator that a draw takes its numbers from; None if that is the default one and the call has not seeded it.

    Raises `LookupError` for one that was made before the call and that the call has not seeded.
    """
    default = _CURRENT.generator
    if given is None:
        return default if isinstance(default, CallGenerator) and seeded(default) else None
    if not seeded(given):
        raise LookupError
    return given


def state_of_python() -> tuple:
    """Returns the states of `random` and `numpy.random`."""
    return random.getstate(), np.random.get_state()


def restore_python(state: tuple) -> str | None:
    """Put the state back; returns which of the two has drawn since, if one has."""
    drawn = None
    if random.getstate() != state[0]:
        random.setstate(state[0])
        drawn = "`random`"
    now = np.random.get_state()
    if not all(np.array_equal(a, b) for a, b in zip(now, state[1], strict=True)):
        np.random.set_state(state[1])
        drawn = "`numpy.random`"
    return drawn


def draw(generator: torch.Generator, func: Any, args: tuple, kwargs: dict) -> Any:
    """The operation in PyTorch, with the generator's numbers; tensors of the bridge count by their shape.

    Raises `NotImplementedError` where their values count.
    """
    name = func.name().removeprefix("aten::")
    by_shape = name in _BY_SHAPE or name.partition(".")[0] in _BY_SHAPE

    def zeros(tensor: BridgeTensor) -> torch.Tensor:
        if not by_shape:
            raise NotImplementedError("numbers of a seeded generator around traced values")
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with below_modes():
        args, kwargs = tree_map_only(BridgeTensor, zeros, (args, kwargs))
        if name == "bernoulli.p" and len(args) == 1:
            args = (*args, 0.5)  # the default of `bernoulli_`, whose functional form has none
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # Not every operation has a form that takes a generator.
        state = default_generator.get_state()
        try:
            default_generator.set_state(generator.get_state())
            out = func(*args, **kwargs)
            generator.set_state(default_generator.get_state())
        finally:
            default_generator.set_state(state)
        return out
