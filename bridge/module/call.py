"""One traced call of a module: a copy with arrays for its state, the run, and everything that the run leaves behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from bridge._compat.jax import Tracer
from bridge._compat.torch import gradient_hooks, is_view_of, mark_as_parameter, storage_id
from bridge.autograd.checkpoint import recomputed
from bridge.autograd.engine import GRAPH_FROM_INPUTS, NO_GRAPH, Restart, check_left_gradients, restarted, start_graph
from bridge.context import CURRENT, Options
from bridge.dispatch.aten import Dispatch
from bridge.dispatch.constants import alias_of
from bridge.dispatch.random import CallGenerator, Rng
from bridge.dispatch.values import Survey
from bridge.errors import BridgeError, add_place
from bridge.generators import refuse_draws
from bridge.module.arguments import Arguments
from bridge.module.changes import UNREADABLE, Place, Snapshot
from bridge.module.copying import name_calls, override, shadow
from bridge.module.effects import Shapes, Verdicts
from bridge.module.modes import tracing
from bridge.module.state import Start, check_final, check_tied, slot_of, slots_of, state_of, value_in
from bridge.symbolic.numbers import NUMBERS, as_operand
from bridge.symbolic.ranges import check_values
from bridge.tensor.arrays import COUNTERPARTS, alias_roots, array_of, has_overlap, jax_dtype, torch_dtype
from bridge.tensor.pytrees import (
    NO_PYTREE,
    convert,
    is_array,
    tensor_inside,
)
from bridge.tensor.tensor import BridgeTensor, empty_meta, wrap


@dataclasses.dataclass(frozen=True, eq=False)
class Exported:
    """A module, its state, and the options that it was exported with."""

    module: nn.Module
    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    options: Options = dataclasses.field(default_factory=Options)
    second_names: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Further names of a parameter or buffer -> its first name."""
    verdicts: Verdicts = dataclasses.field(default_factory=Verdicts, init=False, repr=False, compare=False)
    """Decisions on the effects that calls have on the module."""


class Result(NamedTuple):
    """Everything a call leaves behind."""

    outputs: Any
    buffers: dict[str, jax.Array]
    params: dict[str, jax.Array]
    """The parameters with what the module wrote into them (a leaf filled under `no_grad`, a renormalised embedding)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a call."""

    params: Mapping[str, Any]
    buffers: Mapping[str, Any]
    args: tuple
    kwargs: dict[str, Any]
    rng: Rng | None
    train: bool | None
    method: str
    overrides: Mapping[str, Any] | None
    module_kwargs: Mapping[str, Any] | None
    survey: Survey | None = None


def _known(value: Any) -> jax.Array:
    """Returns a NumPy array or a number as an array that stays known while tracing."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value)


class Call:
    """A copy of the module, ready to run."""

    def __init__(self, fn: Exported, request: Request, recording: int = NO_GRAPH):
        self._fn = fn
        self.recording = recording
        original = fn.module
        options = fn.options
        submodules = dict(original.named_modules())
        names = {id(m): name for name, m in submodules.items()}
        self._dispatch = Dispatch(options, names, rng=request.rng, survey=request.survey, recording=recording)
        reals = state_of(original)
        constant: dict[int, torch.Tensor] = {}
        for name, tensor in options.static.items():
            constant[id(reals.pop(name))] = tensor
        state = self._bound_state(reals, request)
        self._dispatch.state = [*state.values()]
        self._dispatch.buffers = request.buffers
        self._start = {
            name: Start(t, t._handle.storage, t.requires_grad, t._handle.storage.version) for name, t in state.items()
        }
        tensors = {id(real): state[name] for name, real in reals.items()} | constant
        self._module, self._copies = shadow(original, tensors, reals.values())
        self._modules: dict[str, nn.Module] = {}
        for name, submodule in submodules.items():
            self._modules[name] = twin = self._copies[id(submodule)]
            names[id(twin)] = name
        for name in options.recompute:
            twin = self._modules[name]
            twin.__dict__["forward"] = functools.update_wrapper(
                functools.partial(recomputed, twin.forward), twin.forward
            )
        if options.name_scopes:
            name_calls(self._modules)
        for name, number in (request.overrides or {}).items():
            tensor = wrap(jnp.asarray(number), tracked=True, leaf=True)
            override(self._module, self._copies.values(), name, start_graph(tensor, recording))
        self._slots = slots_of(self._modules, reals)
        self._second_slots = {name: slot_of(self._module, name) for name in fn.second_names}
        if request.train is not None:
            self._set_mode(request.train)
        self.changes: dict[Place, Any] = {}
        """Places that the run has changed besides parameters and buffers, with their values."""
        self.written: list[str] = []
        """The names of parameters that the run has written."""
        self.changed_arguments: list[str] = []
        """The names of arguments that the run has changed and does not return."""

    def run(self, request: Request, values: Mapping[Place, Any] | None = None) -> Result:
        """Runs one call, with these values at their places as an earlier one leaves them."""
        snapshot = Snapshot(self._modules, self._slots, self._copies.values())
        if values is not None:
            snapshot.put(values)
        result = self._run(request)
        self.changes = snapshot.changes()
        parted = False
        for name, start in self._start.items():
            tensor = self._final[name]
            if name in self._fn.params and start.written(tensor):
                self.written.append(name)
            trained = name in self._fn.params and tensor is start.tensor
            if trained and tensor.requires_grad != start.requires_grad:  # the call froze or unfroze it
                self.changes[name, "requires_grad"] = tensor.requires_grad
            parted = parted or self._memory[name] is not start.memory
        if parted:
            self.changes |= snapshot.holders(self._has_parted)
        return result

    def run_again(self, first: Request, last: Request, calls: int, hidden: Place | None) -> tuple[Result, Result, dict]:
        """Runs calls on this copy, each with the buffers that the one before it leaves; all but the last are equal.

        The last call cannot read the value at the `hidden` place. Returns the results of the last two calls, and the
        changes of the last one.
        """
        for _ in range(calls - 1):
            before = self._run(first)
        self._dispatch.rng = last.rng
        self._dispatch.draws = 0
        self._dispatch.turns.clear()
        for name, array in last.params.items():  # as an optimizer does between the calls
            tensor = value_in(name, self._slots[name])
            self._dispatch.wrap(tensor).write(array, tracked=False, grad_enabled=False)
        start = Snapshot(self._modules, self._slots, self._copies.values())
        if hidden is not None:
            start.put({hidden: UNREADABLE})
        after = self._run(last, check=False)
        return before, after, start.changes()

    def _has_parted(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is over memory that a parameter or buffer had before the call and has no longer.

        In PyTorch that memory lives on; in a later call, the tensor would be over the new one.
        """
        memory = self._memory_of(tensor)
        return memory not in self._memory.values() and any(memory is start.memory for start in self._start.values())

    def _run(self, request: Request, check: bool = True) -> Result:
        dispatch = self._dispatch
        dispatch.arguments = request.args, request.kwargs
        args, kwargs = convert(dispatch.arguments, self._to_torch, objects=True)
        method = method_of(self._module, request.method)
        arguments = Arguments(method, args, kwargs)
        with tracing(dispatch):
            try:
                outputs = method(*args, **kwargs)
            except Exception as error:
                add_place(error, dispatch.where)
                raise
            finally:  # PyTorch's own error about a buffer that the call registered does not name it
                refuse_gradient_hooks(self._module)
            check_left_gradients(dispatch)
            # A buffer may have been assigned anew (`self.count = self.count + 1`) instead of written.
            final = {name: value_in(name, slot) for name, slot in self._slots.items()}
            if check:
                self._final = final
                self._memory = check_final(self._start, final, self._memory_of)
                if self._second_slots:
                    check_tied(self._fn.second_names, self._second_slots, final)
            self.changed_arguments = arguments.changed(outputs)
            outputs = convert(outputs, self._to_jax, objects=True)
            arrays = {name: self._to_jax(value) for name, value in final.items()}
        params = self._fn.params
        buffers = {name: arrays[name] for name in self._fn.buffers}
        return Result(outputs, buffers, {name: arrays[name] for name in params})

    def _to_jax(self, value: Any) -> Any:
        if isinstance(value, Iterator):
            what = "an iterator, whose code would run after the call, is returned"
            raise self._dispatch.error(what, "return a list")
        if isinstance(value, torch.Tensor):
            return self._dispatch.wrap(value).value
        if type(value) in NUMBERS:
            return as_operand(value).value
        hidden = tensor_inside(value)
        if hidden is not None:
            place = f" (`{hidden}`)" if hidden else ""
            what = f"the call returns a tensor inside {type(value).__name__}{place}, which is no pytree"
            raise self._dispatch.error(what, NO_PYTREE)
        return value

    def _memory_of(self, tensor: torch.Tensor) -> Any:
        """Returns an object that tensors over one memory have in common."""
        if self._dispatch.constants.is_traced(tensor):
            tensor = self._dispatch.wrap(tensor)
        if isinstance(tensor, BridgeTensor):
            return tensor._handle.storage
        return storage_id(tensor)

    def _to_torch(self, value: Any) -> Any:
        """Converts an input. No input has `requires_grad`, as in PyTorch, unless the code differentiates by it."""
        real = isinstance(value, torch.Tensor) and not isinstance(value, BridgeTensor)
        if real and value.layout is torch.strided and value.dtype in COUNTERPARTS:
            value = array_of(value)  # as in a cache that the caller has made
        if not is_array(value):
            if isinstance(value, torch.Generator):
                return CallGenerator()
            return value
        if self._dispatch.checks_int64 and isinstance(value, (np.ndarray, np.generic)):
            check_values("an input", value)
        array = jnp.asarray(value) if isinstance(value, jax.Array) else _known(value)
        if set(map(type, array.shape)) - {int}:
            shape = str(array.shape).replace("'", "")
            raise BridgeError(
                f"an input has the symbolic shape {shape}; PyTorch's code is traced for a number for each size: for a "
                "symbolic batch, export the program of one row under jax.vmap; else export one for every size"
            )
        dtype = torch_dtype(array.dtype)
        if dtype == torch.int32 and array.dtype == jax_dtype(torch.int64):
            dtype = torch.int64  # JAX has no wider dtype, and labels and indices of PyTorch are wide
        meta = empty_meta(array.shape, None, dtype)
        tensor = wrap(array, meta, tracked=self.recording == GRAPH_FROM_INPUTS, leaf=True)
        self._dispatch.inputs.append(tensor)
        if self.recording:
            return start_graph(tensor, self.recording)
        return tensor

    def _bound_state(self, reals: Mapping[str, torch.Tensor], request: Request) -> dict[str, BridgeTensor]:
        """Returns the traced tensor of each parameter and buffer."""
        state: dict[str, BridgeTensor] = {}
        windows = alias_roots(reals)
        for name in sorted(reals, key=windows.__contains__):
            real = reals[name]
            trained = name in self._fn.params
            array = jnp.asarray(request.params[name] if trained else request.buffers[name])
            if array.dtype == jax_dtype(real.dtype):
                dtype = real.dtype
            else:
                dtype = torch_dtype(array.dtype)
            if name in windows:  # is written into the memory that it views, as `load_state_dict` does
                tensor = alias_of(state[windows[name]], real, differentiable=is_view_of(real, reals[windows[name]]))
                if windows[name] not in self._fn.params:  # a parameter may have been updated since, and decides
                    tensor.write(array.astype(tensor.value.dtype), tracked=False, grad_enabled=False)
            else:
                meta = empty_meta(real.shape, real.stride(), dtype, int(real.storage_offset()))
                tensor = wrap(array, meta, tracked=trained, leaf=True)
                tensor._handle.storage.overlaps = has_overlap(meta)
            state[name] = tensor
            mark_as_parameter(tensor, isinstance(real, nn.Parameter))
            if self.recording:
                start_graph(tensor, self.recording)
            self._dispatch.constants.bind(real, tensor)
        return state

    def _set_mode(self, train: bool) -> None:
        """Runs `module.train(train)` on the copy, by the modules' own methods where a module has its own."""
        if all(type(m).train is nn.Module.train and "train" not in vars(m) for m in self._modules.values()):
            for m in self._modules.values():
                m.training = train
            return
        with tracing(self._dispatch):
            self._module.train(train)
        for name, slot in self._slots.items():
            if self._start[name].written(value_in(name, slot)):
                raise BridgeError(
                    f"train({train}) writes {name}, and what else it keeps would be lost with the call; "
                    f"call module.train({train}) before export, and leave train=None"
                )


def run_call(fn: Exported, request: Request) -> tuple[Result, list[str]]:
    """Returns everything that the call leaves behind, and the parameters that it has written.

    Raises `BridgeError` for an effect on the module that a later call would miss; warns about harmless losses.
    """

    def traced(recording: int) -> tuple[Call, Result]:
        call = Call(fn, request, recording)
        return call, call.run(request)

    call, result = restarted(traced)
    if CURRENT.states and request.survey is None:
        refuse_draws(lambda: traced(call.recording))
    for check, place in call._dispatch.handled.items():
        _check_raise(fn, request, call.recording, check, place)
    if call.changes and request.survey is None:
        numbers = _Numbers(request)
        # In eval mode the parameters are the same in the next call, so a table computed from them remains valid.
        if request.train is None:
            training = any(m.training for m in fn.module.modules())
        else:
            training = request.train

        def next_call(first: list, last: list, calls: int = 2, hidden: Place | None = None) -> tuple:
            one = numbers.put(first)
            two = numbers.put(last)
            if not training:
                two = dataclasses.replace(two, params=one.params)
            before, *after = Call(fn, one, call.recording).run_again(one, two, calls, hidden)
            two = dataclasses.replace(two, buffers=before.buffers)
            alone = Call(fn, two, call.recording)
            return after, (alone.run(two), alone.changes)

        def later_call(values: Mapping[Place, Any], given: list) -> Result:
            later = numbers.put(given)
            return Call(fn, later, call.recording).run(later, values)

        kind = request.method, request.train, numbers.signature
        fn.verdicts.check(call.changes, kind, next_call, later_call, numbers.shapes)
    if call.changed_arguments:
        what = "the call changes its argument {}, and the caller's own stays as it was; return it from the call"
        fn.verdicts.warn(call.changed_arguments, what)
    return result, call.written


def _check_raise(fn: Exported, request: Request, recording: int, check: Hashable, place: str) -> None:
    """Raises `BridgeError` if the code catches what this check of a traced value raises: it decides a result then."""
    caught = fn.verdicts.caught
    if check not in caught:
        trial = Call(fn, request, recording)
        trial._dispatch.failing = check
        caught[check] = True
        try:
            jax.eval_shape(lambda: trial.run(request) and None)
        except (BridgeError, Restart):  # what the code does then is not translated
            pass
        except Exception:
            caught[check] = False
    if caught[check]:
        raise BridgeError(
            f"Python code catches what it raises for a traced value {place}. Remedy: compute both ways and choose with "
            "torch.where; give a loop that ends early a fixed number of steps"
        )


class _Numbers:
    """The arrays of a request except its overrides, and requests with other arrays in their place.

    NumPy arrays stay NumPy arrays beside traced ones: they are constants of the traced program.
    """

    def __init__(self, request: Request):
        self._request = request
        parts = [dict(request.params), dict(request.buffers), request.args, request.kwargs, request.rng]
        self._leaves, self._structure = jax.tree.flatten(convert(parts, lambda v: v, objects=True))
        fixed = any(isinstance(leaf, Tracer) for leaf in self._leaves)
        self._changing = {}  # by identity: an argument that is given twice stays one
        for leaf in self._leaves:
            if is_array(leaf) and not (fixed and isinstance(leaf, np.ndarray)):
                self._changing[id(leaf)] = leaf
        of_state = len(request.params) + len(request.buffers)
        state = {id(leaf) for leaf in self._leaves[:of_state]}
        abstract = [jax.typeof(jnp.asarray(v)) for v in self._changing.values()]
        self.shapes = Shapes(abstract, len(state & self._changing.keys()))
        others = [repr(v) for v in self._leaves if id(v) not in self._changing]
        self.signature = str(self._structure), tuple(others), tuple(map(str, abstract))

    def put(self, arrays: list) -> Request:
        new = dict(zip(self._changing, arrays, strict=True))
        leaves = [new.get(id(v), v) for v in self._leaves]
        params, buffers, args, kwargs, rng = jax.tree.unflatten(self._structure, leaves)
        given = {"params": params, "buffers": buffers, "args": args, "kwargs": kwargs, "rng": rng}
        return dataclasses.replace(self._request, **given)


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns the function that a call runs: for `forward` the module itself, with its hooks and its own `__call__`."""
    if name == "forward":
        return module
    return getattr(module, name)


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Refuses hooks of PyTorch's engine, which does not run; their effect on a gradient would be lost."""
    hooked = gradient_hooks(module)
    if hooked:
        raise BridgeError(
            f"{hooked[0]} has a gradient hook, which JAX's differentiation does not call; remove it, or write what it "
            "does as the backward of a torch.autograd.Function"
        )
