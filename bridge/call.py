"""One traced call of a module: a copy of it with arrays for its state, the run, and what the run leaves behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from bridge.adoption import window
from bridge.arrays import array_of, has_counterpart, jax_dtype, torch_dtype
from bridge.attributes import Attributes, Place
from bridge.custom_functions import refuse_changed_contexts
from bridge.dispatch import Dispatch
from bridge.errors import BridgeError, placed
from bridge.final_state import (
    changed_flags,
    changed_layouts,
    memory_of,
    refuse_changed_sharing,
    refuse_lost_sharing,
    refuse_parted,
    refuse_removed,
    refuse_stale_arrays,
)
from bridge.generators import CallGenerator
from bridge.integers import check_values
from bridge.internals import Tracer, gradient_hooks, mark_as_parameter, storage_id
from bridge.memory import has_overlap, roots
from bridge.pytrees import NO_PYTREE, convert, is_array, tensor_inside
from bridge.randomness import Rng
from bridge.recomputation import recomputed
from bridge.recording import GRAPH_FROM_INPUTS, NO_GRAPH, start_graph
from bridge.shadow import name_calls, override, shadow
from bridge.slots import fill, place_of, state_of, value_in
from bridge.tensors import BridgeTensor, blank, fresh
from bridge.tracing import tracing
from bridge.untranslated import Survey
from bridge.written_arguments import Arguments, refuse_shared

if TYPE_CHECKING:
    from bridge.export import Functional


class Result(NamedTuple):
    """Everything a call leaves behind."""

    outputs: Any
    buffers: dict[str, jax.Array]
    params: dict[str, jax.Array]
    """With what the module wrote into its own parameters (a leaf filled under `no_grad`, a renormalised embedding)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a call is given."""

    params: Mapping[str, Any]
    buffers: Mapping[str, Any]
    args: tuple
    kwargs: dict[str, Any]
    rng: Rng | None
    train: bool | None
    method: str
    overrides: Mapping[str, Any]
    survey: Survey | None = None

    @property
    def traced(self) -> bool:
        """Whether any number is a tracer."""
        numbers = (self.params, self.buffers, self.args, self.kwargs, self.overrides)
        return any(isinstance(x, Tracer) for x in jax.tree.leaves(numbers))


class Call:
    """A copy of the module, ready to run once.

    `start` are values of attributes that the copy shall start with, as the call `first` left them.
    """

    def __init__(
        self,
        fn: Functional,
        request: Request,
        start: Mapping[Place, Any] | None = None,
        recording: int = NO_GRAPH,
        first: Call | None = None,
    ):
        self._fn, self._request, self.recording = fn, request, recording
        original = fn.module
        names = {id(m): name for name, m in original.named_modules()}
        self._dispatch = Dispatch(
            request.rng,
            names,
            fn.without_lowerings,
            fn.lowerings,
            request.survey,
            request.traced,
            fn.int64,
            recording,
            fn.functions,
        )
        self._state = self._stand_ins(start or {})
        self._flags = {name: tensor.requires_grad for name, tensor in self._state.items()}
        self._memory = {name: tensor._cell.storage for name, tensor in self._state.items()}
        self._metas = {name: tensor._meta for name, tensor in self._state.items()}
        self._dispatch.state = list(self._state.values())
        tensors = {id(real): self._state[name] for name, real in state_of(original).items()}
        self._module, copies, replaced = shadow(original, tensors)
        names |= {id(copies[id(m)]): name for name, m in original.named_modules()}
        for name in fn.recompute:
            twin = copies[id(original.get_submodule(name))]
            twin.__dict__["forward"] = functools.update_wrapper(
                functools.partial(recomputed, twin.forward), twin.forward
            )
        if fn.name_scopes:
            name_calls({name: copies[id(m)] for name, m in original.named_modules()})
        tree = list(copies.values())
        for name, number in request.overrides.items():
            tensor = fresh(jnp.asarray(number), tracked=True, leaf=True)
            override(self._module, replaced.values(), name, start_graph(tensor, recording))
        self._slots = fill(original, copies, tensors)
        self._second_slots = {name: place_of(self._module, name) for name in fn.second_names}
        if request.train is not None:
            self._set_mode(tree, request.train)
        self._attributes = Attributes(
            {name: copies[id(m)] for name, m in original.named_modules()},
            self._state,
            {(id(owner), slot) for owner, slot in self._slots.values()},
            replaced,
            fn.reached(request.method),
        )
        self._own = [*tree, *self._state.values()]
        if start and first is not None:
            self._attributes.set(start, {id(a): b for a, b in zip(first._own, self._own, strict=True)})
        self.changes: dict[Place, Any] = {}
        """What the run has changed besides parameters and buffers."""
        self.written: list[str] = []
        """Parameters that the run has written."""
        self._inputs: list[tuple[Any, BridgeTensor]] = []
        self.changed_arguments: list[str] = []
        """The names of arguments that the run has changed and does not return."""

    def run(self) -> Result:
        return self._attributes.context.run(self._run)

    def _run(self) -> Result:
        request, dispatch = self._request, self._dispatch
        args, kwargs = convert((request.args, request.kwargs), self._to_torch, objects=True)

        def to_jax(value: Any) -> Any:
            if isinstance(value, Iterator):
                raise dispatch.error("the call returns an iterator, whose code would run after it", "return a list")
            if isinstance(value, torch.Tensor):
                return dispatch.adopt(value).value
            hidden = tensor_inside(value)
            if hidden is not None:
                place = f" (`{hidden}`)" if hidden else ""
                what = f"the call returns a tensor inside {type(value).__name__}{place}, which is no pytree"
                raise dispatch.error(what, NO_PYTREE)
            return value

        method = method_of(self._module, request.method)
        arguments = Arguments(method, args, kwargs)
        before = self._versions()
        writes = {name: storage.version for name, storage in self._memory.items()}
        try:
            self._attributes.start()
            with tracing(dispatch):
                try:
                    with placed(dispatch.where):
                        outputs = method(*args, **kwargs)
                finally:  # PyTorch's own error about one that the call registered says nothing of that
                    refuse_gradient_hooks(self._module)
                # A buffer may have been assigned anew (`self.count = self.count + 1`) instead of written.
                final = {name: value_in(name, *place) for name, place in self._slots.items()}
                refuse_changed_contexts(dispatch, final.values())
                refuse_removed(final)
                memory = {n: memory_of(dispatch, t) for n, t in final.items() if isinstance(t, torch.Tensor)}
                refuse_changed_sharing(self._memory, memory, final)
                self._fn.shared_slots.update(
                    n for n in memory if not dispatch.is_traced(final[n]) and not dispatch.may_write(final[n])
                )
                refuse_parted(self._fn.second_names, self._second_slots, final)
                left = changed_flags({n: (self._state[n], self._flags[n], final[n]) for n in self._fn.buffers})
                left |= changed_layouts({n: self._metas[n] for n in self._fn.buffers}, final)
                left |= self._parted(memory, final)
                self.changed_arguments = arguments.changed(outputs)
                refuse_shared(self._inputs)
                outputs = convert(outputs, to_jax, objects=True)
                arrays = {name: to_jax(value) for name, value in final.items()}
            self.changes = self._attributes.changes() | left
            now = self._versions()
            self._fn.written_slots.update(n for n, version in writes.items() if self._memory[n].version != version)
            refuse_lost_sharing(self._fn.shared_slots & self._fn.written_slots)
            self.written = [name for name in self._fn.params if now[name] != before[name]]
            changing = [*self._fn.params, *(n for n in self._fn.buffers if now[n] != before[n])]
        finally:
            self._attributes.restore()
        refuse_stale_arrays(self._attributes.arrays, self._fn.module, changing)
        return Result(
            outputs,
            {name: arrays[name] for name in self._fn.buffers},
            {name: arrays[name] for name in self._fn.params},
        )

    def _to_torch(self, value: Any) -> Any:
        """No input has `requires_grad`, as in PyTorch, unless the code itself differentiates by it; JAX always may."""
        real = isinstance(value, torch.Tensor) and not isinstance(value, BridgeTensor)
        if real and value.layout is torch.strided and has_counterpart(value.dtype):
            value = array_of(value)  # as in a cache that the caller has made
        if not is_array(value):
            return CallGenerator() if isinstance(value, torch.Generator) else value
        integers = self._dispatch.integers
        if integers is not None and isinstance(value, (np.ndarray, np.generic)):
            check_values("an input", value)
        array = jnp.asarray(value)
        if not all(isinstance(size, int) for size in array.shape):
            shape = str(array.shape).replace("'", "")
            raise BridgeError(
                f"an input has the symbolic shape {shape}; PyTorch's code is traced for a number for each size: "
                "export the program once for every shape that it is called with"
            )
        dtype = torch_dtype(array.dtype)
        if dtype == torch.int32 and array.dtype == jax_dtype(torch.int64):
            dtype = torch.int64  # JAX has no wider one, and labels and indices of PyTorch are wide
        meta = blank(array.shape, None, dtype)
        tensor = fresh(array, meta, tracked=self.recording == GRAPH_FROM_INPUTS, leaf=True)
        if integers is not None:
            integers.input(tensor)
        self._inputs.append((value, tensor))
        return start_graph(tensor, self.recording)

    def _stand_ins(self, start: Mapping[Place, Any]) -> dict[str, BridgeTensor]:
        """The traced tensor of each parameter and buffer."""
        request, state = self._request, {}
        reals = state_of(self._fn.module)
        windows = roots(reals)
        for name, real in sorted(reals.items(), key=lambda item: item[0] in windows):
            trained = name in self._fn.params
            array = jnp.asarray(request.params[name] if trained else request.buffers[name])
            dtype = real.dtype if array.dtype == jax_dtype(real.dtype) else torch_dtype(array.dtype)
            if name in windows:  # written into the memory that it shows, as `load_state_dict` does
                tensor = window(state[windows[name]], real, differentiable=False)
                if windows[name] not in self._fn.params:  # a parameter may have been updated since, and decides
                    tensor.write(array.astype(tensor.value.dtype), tracked=False, grad_enabled=False)
            else:
                stride = start.get((name, "layout"))
                offset = int(real.storage_offset()) if stride is None else 0
                meta = blank(real.shape, real.stride() if stride is None else stride, dtype, offset)
                grad = start.get((name, "requires_grad"))  # of a buffer
                tensor = fresh(array, meta, tracked=trained or bool(grad), leaf=grad != "result")
                tensor._cell.storage.overlaps = has_overlap(meta)
            state[name] = tensor
            vars(tensor).update({key: value for key, value in vars(real).items() if key not in vars(tensor)})
            mark_as_parameter(tensor, isinstance(real, nn.Parameter))
            self._dispatch.stand_in(real, start_graph(tensor, self.recording))
        return state

    def _parted(self, memory: Mapping[str, Any], final: Mapping[str, Any]) -> dict[Place, Any]:
        """Where the module keeps a tensor over the memory that a parameter or buffer had before the call gave it other.

        In PyTorch that memory lives on; in a later call, the kept tensor would be over the memory at that time.
        """
        moved = {name for name, at in memory.items() if at is not self._memory[name]}
        if not moved:
            return {}
        reals = state_of(self._fn.module)
        storages = {storage_id(reals[name]) for name in moved} | {id(self._memory[name]) for name in moved}
        replaced = {id(self._state[name]) for name in moved if final[name] is not self._state[name]}

        def is_kept(tensor: torch.Tensor) -> bool:
            if isinstance(tensor, BridgeTensor):
                return id(tensor) in replaced or (
                    id(tensor._cell.storage) in storages and all(tensor is not t for t in self._state.values())
                )
            return tensor.layout is torch.strided and storage_id(tensor) in storages

        return self._attributes.kept(is_kept, lambda tensor: fresh(self._dispatch.adopt(tensor).value))

    def _versions(self) -> dict[str, tuple]:
        """What is in each parameter's and buffer's place, and how often it was written."""
        versions = {}
        for name, (owner, slot) in self._slots.items():
            now = value_in(name, owner, slot)
            cell = now._cell if isinstance(now, BridgeTensor) else self._state[name]._cell
            versions[name] = id(now), id(cell.storage), cell.version
        return versions

    def _set_mode(self, tree: list[nn.Module], train: bool) -> None:
        """`module.train(train)` on the copy, by the modules' own methods where one has its own."""
        if all(type(m).train is nn.Module.train and "train" not in vars(m) for m in tree):
            for m in tree:
                m.training = train
            return
        before = self._versions()
        with tracing(self._dispatch):
            self._module.train(train)
        now = self._versions()
        for name, version in before.items():
            if now[name] != version:
                raise BridgeError(
                    f"train({train}) writes {name}, and what else it keeps would be lost with the call; "
                    f"call module.train({train}) before export, and leave train=None"
                )


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """What a call of the method runs: for `forward` the module itself, with its hooks and its own `__call__`."""
    return module if name == "forward" else getattr(module, name)


def refuse_gradient_hooks(module: nn.Module) -> None:
    """They belong to PyTorch's engine, which does not run; what they do to a gradient would be left out."""
    hooked = gradient_hooks(module)
    if hooked:
        raise BridgeError(
            f"{hooked[0]} has a gradient hook, which JAX's differentiation does not call; remove it, or write what it "
            "does as the backward of a torch.autograd.Function"
        )
