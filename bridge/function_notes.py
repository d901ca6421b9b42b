"""What the backward of a `torch.autograd.Function` finds: its context, and parameters and buffers as they were.

In PyTorch it finds the tensors as they are after the call. JAX gives it what they were when the Function was applied,
so it may not read those that have been written since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.autograd.function import FunctionCtx

from bridge._compat.torch import engine_leaf, engine_requires_grad
from bridge.adoption import version_of
from bridge.cells import Cell, Storage, UnreadableCell
from bridge.dispatch import Dispatch
from bridge.errors import BridgeError
from bridge.pytrees import convert
from bridge.recording import start_graph
from bridge.tensors import BridgeTensor, fresh


class Context(FunctionCtx):
    """What `forward` leaves for `backward`: PyTorch's own notebook, with the two answers that its engine gives."""

    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple:
        return tuple(getattr(self, "to_save", ()))


class Notes:
    """A context taken apart into arrays, which JAX carries to the backward pass, and the rest."""

    def __init__(
        self,
        dispatch: Dispatch,
        function: type[Any],
        ctx: Context,
        inputs: list[BridgeTensor],
        outputs: list[BridgeTensor],
        state: list[BridgeTensor],
    ):
        self.arrays: list[jax.Array] = []
        self._dispatch, self._name = dispatch, function.__name__
        self._late: set[Any] = set()
        """Tensors of the state, by identity, and of the context, by home, that were written after the call."""
        self._state_cells = [(t, t._cell) for t in state]
        self.cells = list(dict.fromkeys(t._cell for t in state))
        """Those of parameters and buffers, which a backward that calls modules reads without having saved them."""
        own = {id(t) for t in state}
        self._own = {i: t for i, t in enumerate(inputs) if id(t) in own}
        known = {id(t): ("input", i) for i, t in enumerate(inputs)} | {
            id(t): ("output", i) for i, t in enumerate(outputs)
        }

        cells = {id(t._cell.storage) for t in dispatch.state}
        self._of_state: set[tuple[str, int]] = set()
        """Which of them are parameters or buffers, or views of those."""
        self._rebuilt: list[tuple[BridgeTensor, int]] = []
        memory: dict[Any, torch.Tensor] = {}

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and dispatch.is_traced(value):
                value = dispatch.adopt(value)
            if not isinstance(value, BridgeTensor):
                if isinstance(value, torch.Tensor):
                    memory["constant", id(value)] = value
                return _Leaf("constant", value, None, False)
            if id(value) not in known:
                known[id(value)] = ("array", len(self.arrays))
                self.arrays.append(value.value)
            memory[known[id(value)]] = value
            if id(value._cell.storage) in cells:
                self._of_state.add(known[id(value)])
            return _Leaf(*known[id(value)], value._meta, value.requires_grad)

        self._state = convert(dict(ctx.__dict__), leaf)
        self._saved = len(self.arrays)
        self.arrays += [cell.read() for cell in self.cells]
        self._memory, self._outputs = memory, outputs
        self._changes: list[tuple[Any, Callable[[], bool]]] = []
        """Of each tensor of the context or the state: its key in `_late`, and whether it has been written since."""

    def watch(self, outputs: list[BridgeTensor], constants: dict[int, torch.Tensor]) -> None:
        """From now on for writes.

        `outputs` are what the code gets for those of the forward; `constants` are real arguments, by the identity of
        their traced tensors.
        """
        storages = {
            id(before._cell.storage): after._cell.storage for before, after in zip(self._outputs, outputs, strict=True)
        }
        for home, tensor in self._memory.items():
            if isinstance(tensor, BridgeTensor):
                self._changes.append((home, _written(storages.get(id(tensor._cell.storage), tensor._cell.storage))))
            real = constants.get(id(tensor), tensor)
            if not isinstance(real, BridgeTensor):
                self._changes.append((home, self._replaced(real)))
        self._changes += [(id(t), _written(cell.storage)) for t, cell in self._state_cells]
        self._memory, self._outputs = {}, []

    def end(self, held: set[int]) -> None:
        """Of the call: which tensors have other values by now than at the call of the Function.

        `held` has the identities of the parameters and buffers that the modules hold.
        """
        self._late = {home for home, is_changed in self._changes if is_changed()}
        self._late |= {id(t) for t, _ in self._state_cells} - held
        self._changes = []

    def _replaced(self, real: torch.Tensor) -> Callable[[], bool]:
        """Whether the real tensor has other values than now, or traced ones."""
        version, traced = version_of(real), self._dispatch.is_traced(real)
        return lambda: version_of(real) != version or self._dispatch.is_traced(real) != traced

    def _refusal(self) -> BridgeError:
        return self._dispatch.error(
            f"the backward of {self._name} reads a tensor that is written after `{self._name}.apply`, and would not "
            "see that",
            "keep a copy of the tensor on ctx, or write it before",
        )

    def _unreadable(self, cell: Cell) -> Cell:
        return UnreadableCell(cell, self._refusal)

    @contextlib.contextmanager
    def state_of(self, arrays: list, recording: int) -> Iterator[None]:
        """Parameters and buffers hold what they held at the call; then they were arrays of another trace."""
        tensors = list(self._own.values())
        with contextlib.ExitStack() as stack:
            for tensor, cell in self._state_cells:  # another one where it has been frozen since
                stack.callback(setattr, tensor, "_cell", tensor._cell)
                tensor._cell = cell
            for cell, array in zip(self.cells, arrays[self._saved :], strict=True):
                stack.enter_context(cell.holding(array))
            for tensor, cell in self._state_cells:
                if id(tensor) in self._late:
                    tensor._cell = self._unreadable(cell)
            if recording:
                for tensor in tensors:
                    stack.callback(engine_leaf, tensor, engine_requires_grad(tensor))
                    start_graph(tensor, recording)
            yield

    def context(self, inputs: list, outputs: list, arrays: list, recording: int) -> Context:
        homes = {"input": inputs, "output": outputs, "array": arrays}

        def rebuilt(leaf: _Leaf) -> Any:
            if leaf.meta is None:
                if ("constant", id(leaf.value)) in self._late:
                    raise self._refusal()
                return leaf.value
            if leaf.home == "input" and leaf.value in self._own:
                return self._own[leaf.value]  # the very tensor that the modules hold
            # An input requires grad as `needs_input_grad` says, so that code that copies the flag differentiates by it.
            tracked = leaf.tracked or leaf.home == "input"
            tensor = fresh(homes[leaf.home][leaf.value], leaf.meta, tracked=tracked)
            if (leaf.home, leaf.value) in self._late:
                tensor._cell = self._unreadable(tensor._cell)
            if (leaf.home, leaf.value) in self._of_state:
                self._rebuilt.append((tensor, tensor._cell.version))
            return start_graph(tensor, recording)

        ctx, self._rebuilt = Context(), []
        ctx.__dict__.update(jax.tree.map(rebuilt, self._state, is_leaf=lambda v: isinstance(v, _Leaf)))
        return ctx

    def written(self) -> str:
        """Whether the backward wrote into a parameter or buffer that the context holds."""
        rebuilt, self._rebuilt = self._rebuilt, []
        return "a parameter or buffer" if any(t._cell.version != version for t, version in rebuilt) else ""


class _Leaf:
    def __init__(self, home: str, value: Any, meta: torch.Tensor | None, tracked: bool):
        self.home, self.value, self.meta, self.tracked = home, value, meta, tracked


def _written(storage: Storage) -> Callable[[], bool]:
    version = storage.version
    return lambda: storage.version != version
