"""`torch.autograd.Function` as `jax.custom_vjp`: the forward runs at the call, the backward when JAX asks for it.

JAX gives the backward what parameters, buffers and the context held when the Function was applied, PyTorch what they
hold after the call. `bridge.verify` finds a backward that reads what has been written since. What the backward adds to
the `grad` of parameters, by PyTorch's engine or by itself, is added to JAX's gradient of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import increment_version

from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    AutogradFunction,
    Replacement,
    below_modes,
    closure_of,
    engine_gradient,
    engine_leaf,
    engine_requires_grad,
    in_function_transform,
    is_dual,
    set_engine_gradient,
    wrapped_by_transform,
)
from bridge.autograd.engine import recorded, restarted, start_graph
from bridge.context import TraceContext, current
from bridge.errors import BridgeError
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.pytrees import built_in, convert, items_of, parts_of
from bridge.tensor.tensor import BridgeTensor, Cell, UnreadableCell, differentiable, fresh, stop_gradient

Tracing = Callable[[Any], contextlib.AbstractContextManager]
"""The context in which a call runs."""


class Context(FunctionCtx):
    """PyTorch's own context, with the two answers that its engine gives."""

    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple:
        return tuple(getattr(self, "to_save", ()))


def in_place_of_apply(tracing: Tracing) -> Replacement:
    """Returns the replacement of `Function.apply`, which PyTorch shows to no mode.

    The method is added below `Function.apply`, so references to it that were taken earlier come by here too.
    """

    def replacement(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        call = current()
        # `torch.func` takes it apart and comes back for what is below its levels.
        if call is None or in_function_transform():
            return super(AutogradFunction, cls).apply(*args, **kwargs)  # pyright: ignore
        if any(isinstance(a, torch.Tensor) and is_dual(a) for a in args):
            raise call.error(
                f"{cls.__name__} is applied to a dual tensor, whose gradient would be lost",
                "use torch.func.jvp instead of torch.autograd.forward_ad",
            )
        return _apply(call, cls, args, tracing)

    return Replacement(AutogradFunction, "apply", lambda _: classmethod(replacement))


def _apply(call: TraceContext, function: type[Any], args: tuple, tracing: Tracing) -> Any:
    """`function.apply(*args)`: values from its forward, gradients from its backward."""
    if call.recording and recorded(args):
        raise call.error(
            "the module asks PyTorch's engine for a gradient (torch.autograd.grad, backward() or the function that "
            f"torch.func.vjp returns), and {function.__name__} may be part of its graph",
            "take that gradient by torch.func.grad or torch.func.jacrev, or outside of the module with jax.grad; or "
            f"write {function.__name__} in operations of PyTorch",
        )

    def adopted(value: Any) -> Any:
        return call.adopt(value) if isinstance(value, torch.Tensor) else value

    args = tuple(map(adopted, args))
    ctx = Context()
    # Also of what PyTorch has no gradient for and JAX may: inputs and buffers.
    ctx.needs_input_grad = tuple(isinstance(a, BridgeTensor) and a.may_have_gradient for a in args)
    tracked = any(isinstance(a, BridgeTensor) and a.requires_grad for a in args)
    places = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    inputs = [args[i].value for i in places]  # read now: the forward may write in place
    outputs = _forward(function, ctx, args)
    dirty = {id(t): t for t in map(adopted, getattr(ctx, "dirty_tensors", ()))}
    with below_modes():
        increment_version([t for t in dirty.values() if not t.is_inference()])  # as PyTorch's engine
    if not inputs or not torch.is_grad_enabled():
        return outputs
    several = isinstance(outputs, tuple)
    # A real tensor, too: one that traced values were written into, or a constant with a gradient of the backward's own.
    listed = [adopted(t) for t in (outputs if several else [outputs])]
    fixed = {id(adopted(t)) for t in getattr(ctx, "non_differentiable", ())}
    free = [
        i
        for i, t in enumerate(listed)
        if isinstance(t, BridgeTensor) and differentiable(t.dtype) and id(t) not in fixed
    ]
    if len(free) > 1 and not getattr(ctx, "materialize_grads", True):
        raise call.error(
            f"{function.__name__} has several results and calls `set_materialize_grads(False)`, but JAX does not say "
            "which of them nobody used",
            "leave the call out and take zeros for the gradient of an unused result",
        )
    saved = _Saved(call, function, ctx, [args[i] for i in places], [listed[i] for i in free])
    backward = _Backward(call, function, saved, places, listed, free)
    backward.tracing, backward.is_run_by_pytorch = tracing, tracked
    values = backward.attach([stop_gradient(listed[i].value) for i in free], inputs, saved.arrays)
    for i, value in zip(free, values, strict=True):
        if id(listed[i]) in dirty:
            listed[i].write(value, tracked=tracked, grad_enabled=True)
        else:
            listed[i] = fresh(value, listed[i]._meta, tracked=tracked)
    return tuple(listed) if several else listed[0]


def _forward(function: type[Any], ctx: Context, args: tuple) -> Any:
    with torch.no_grad():
        if function.setup_context is AutogradFunction.setup_context:
            outputs = function.forward(ctx, *args)
        else:
            outputs = function.forward(*args)
            function.setup_context(ctx, args, outputs)
    # The rule for `torch.vmap` that PyTorch generates marks tensors of the transformation, which PyTorch's engine does
    # not find among the results.
    for name in ("dirty_tensors", "non_differentiable"):
        if name in ctx.__dict__:
            setattr(ctx, name, tuple(t for t in ctx.__dict__[name] if not wrapped_by_transform(t)))
    return outputs


class _Leaf:
    """A leaf of a context: the place of its tensor, or the value itself.

    `home`: "input", "output" or "array", in which `value` is an index; or "whole". `attributes`: what the code has set
    on the tensor.
    """

    def __init__(self, home: str, value: Any, meta: Any = None, tracked: bool = False, attributes: Any = None):
        self.home, self.value, self.meta, self.tracked, self.attributes = home, value, meta, tracked, attributes


_ENCLOSED = "variables that the backward encloses"
"""The entry of a context with the traced ones, which the backward encloses as they are in its own trace."""


class _Saved:
    """A context taken apart into arrays, which JAX carries to the backward pass, and the rest."""

    def __init__(
        self,
        call: TraceContext,
        function: type[Any],
        ctx: Context,
        inputs: list[BridgeTensor],
        outputs: list[BridgeTensor],
    ):
        self._call, self._name = call, function.__name__
        backward = inspect.unwrap(function.backward)
        held = self._held_by(ctx, backward)
        modules = {id(m): (path, m) for path, root in held if isinstance(root, nn.Module) for m in root.modules()}
        self.modules = list(modules.values())
        """Those that the backward may call, each with a path to it."""
        self.arrays: list[jax.Array] = []
        self._tree = self._taken_apart(ctx.__dict__ | {_ENCLOSED: _enclosed(backward)}, inputs, outputs)
        adopted = [call.adopt(t) for _, t in held if isinstance(t, torch.Tensor) and call.is_traced(t)]
        self._own = set(map(id, adopted)) & set(map(id, call.state))
        """The parameters and buffers of the context."""
        self._state = {id(t): (t, t._cell) for t in call.state if modules or id(t) in self._own}
        """Parameters and buffers that the backward may read."""
        self._cells = {cell: len(self.arrays) + i for i, cell in enumerate({c: 0 for _, c in self._state.values()})}
        """Their cells, with the places of the arrays of these."""
        self.arrays += [cell.read() for cell in self._cells]
        self._rebuilt: list[tuple[BridgeTensor, tuple[str, int], int]] = []
        """The tensors of the context of a backward, their homes, and how often each had been written."""
        self._versions: dict[Cell, int] = {}
        """The versions of the parameters and buffers before it."""

    def _held_by(self, ctx: Context, backward: Any) -> list[tuple[str, Any]]:
        """The tensors and modules that the backward finds, with their paths."""
        state, seen = set(map(id, self._call.state)), set()
        held = [each for name, value in ctx.__dict__.items() for each in _held(f"ctx.{name}", value, seen)]
        for path, value, is_leaf in held:
            if is_leaf or isinstance(value, nn.Module) or id(value) in state:
                continue
            if wrapped_by_transform(value) or _may_be_differentiated(value):
                raise self._call.error(
                    f"{self._name} keeps a traced tensor inside of an object or a function, at {path}",
                    "keep the tensor itself on ctx, or use ctx.save_for_backward",
                )
        for name, value in (closure_of(backward) | _globals(backward)).items():
            held += _held(name, value, seen)
        return [(path, value) for path, value, _ in held]

    def _taken_apart(self, contents: dict, inputs: list[BridgeTensor], outputs: list[BridgeTensor]) -> Any:
        call, own = self._call, set(map(id, self._call.state))
        memory = {id(t._cell.storage) for t in call.state}
        homes = {id(t): ("input", i) for i, t in enumerate(inputs)}
        homes |= {id(t): ("output", i) for i, t in enumerate(outputs)}
        self._of_state: set[tuple[str, int]] = set()
        """Views of parameters and buffers."""

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and call.is_traced(value):
                value = call.adopt(value)
            if not isinstance(value, BridgeTensor) or id(value) in own:
                return _Leaf("whole", value)
            if id(value) not in homes:
                homes[id(value)] = "array", len(self.arrays)
                self.arrays.append(value.value)
            home = homes[id(value)]
            if id(value._cell.storage) in memory:
                self._of_state.add(home)
            attributes = convert(value._attributes(), leaf)
            return _Leaf(*home, value._meta, value.requires_grad, attributes)

        return convert(contents, leaf)

    def _not_held(self) -> BridgeError:
        return self._call.error(
            f"the backward of {self._name} reads a parameter or buffer that neither its context nor a module there "
            "holds",
            "keep the module, or the parameter, on ctx",
        )

    @contextlib.contextmanager
    def state_of(self, arrays: list, recording: int) -> Iterator[None]:
        """Parameters and buffers hold what they held at the call, and have no `grad`."""
        with contextlib.ExitStack() as stack:
            for cell, place in self._cells.items():
                stack.enter_context(cell.holding(arrays[place]))
            self._versions = {cell: cell.version for cell in self._cells}
            for tensor in self._call.state:
                stack.callback(setattr, tensor, "_cell", tensor._cell)
                _, cell = self._state.get(id(tensor), (tensor, tensor._cell))  # another one if frozen since
                tensor._cell = cell if cell in self._cells else UnreadableCell(cell, self._not_held)
                stack.callback(engine_leaf, tensor, engine_requires_grad(tensor))
                stack.callback(set_engine_gradient, tensor, engine_gradient(tensor))
                set_engine_gradient(tensor, None)
                start_graph(tensor, recording)
            yield

    def context(self, inputs: list, outputs: list, arrays: list, recording: int) -> Context:
        homes = {"input": inputs, "output": outputs, "array": arrays}

        def rebuilt(leaf: _Leaf) -> Any:
            if leaf.meta is None:
                return leaf.value
            # An input requires grad as `needs_input_grad` says, so that code that copies the flag differentiates by it.
            tensor = fresh(homes[leaf.home][leaf.value], leaf.meta, tracked=leaf.tracked or leaf.home == "input")
            place = leaf.home, leaf.value
            self._rebuilt.append((tensor, place, tensor._cell.version))
            vars(tensor).update(jax.tree.map(rebuilt, leaf.attributes, is_leaf=_is_leaf))
            return start_graph(tensor, recording)

        ctx, self._rebuilt = Context(), []
        ctx.__dict__.update(jax.tree.map(rebuilt, self._tree, is_leaf=_is_leaf))
        return ctx

    def gradients(self) -> dict[tuple[str, int], jax.Array]:
        """Returns each `grad` that the backward has left, by the home of its tensor."""
        left = [(home, tensor) for tensor, home, _ in self._rebuilt]
        left += [(("array", self._cells[cell]), t) for t, cell in self._state.values()]
        sums: dict[tuple[str, int], jax.Array] = {}
        for home, tensor in left:
            gradient = engine_gradient(tensor)
            if gradient is not None:
                array = _conjugate(self._call.adopt(gradient).value)
                sums[home] = sums[home] + array if home in sums else array
        return sums

    def written(self) -> tuple[bool, bool]:
        """True if the backward has written a parameter or buffer of its context; true if it has written any."""
        written = [i in self._own for i, (_, c) in self._state.items() if c.version != self._versions[c]]
        views = any(home in self._of_state and t._cell.version != version for t, home, version in self._rebuilt)
        return views or any(written), bool(written)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _Leaf)


class _Attributes:
    """A snapshot of the attributes of modules, and of the containers among them."""

    def __init__(self, modules: Collection[tuple[str, nn.Module]]):
        self._attributes = [(path, each, dict(each)) for path, m in modules for each in (vars(m), m._buffers)]
        self._containers = [
            (f"{path}.{name}", value, items_of(value))
            for path, m in modules
            for name, value in vars(m).items()
            if built_in(type(value)) and name != "_buffers"
        ]

    def put_back(self) -> tuple[list[str], list[str]]:
        """Returns the paths of what has changed: of attributes that are tensors now, and of others."""
        tensors, others = [], []
        for path, attributes, before in self._attributes:
            for name in attributes.keys() | before.keys():
                value = attributes.get(name)
                if not _same(value, before.get(name)):
                    (tensors if isinstance(value, torch.Tensor) else others).append(f"{path}.{name}")
                    if name in before:
                        attributes[name] = before[name]
                    else:
                        del attributes[name]
        others += [path for path, container, before in self._containers if not _same(items_of(container), before)]
        return tensors, others


def _same(now: Any, before: Any) -> bool:
    """True for the same object, number or text, and for lists of such."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    return isinstance(now, (int, float, complex, str, bytes)) and now == before


class _Backward:
    """One call's backward, with the metadata it needs; holds no traced array."""

    def __init__(
        self, call: TraceContext, function: type[Any], saved: _Saved, places: list[int], outputs: list, free: list[int]
    ):
        self._call, self._function, self._saved = call, function, saved
        self._places, self._free = places, free
        self._metas = [t._meta if isinstance(t, BridgeTensor) else None for t in outputs]
        self.tracing: Tracing = contextlib.nullcontext
        self.is_run_by_pytorch = True
        """True if an input requires grad."""

        @jax.custom_vjp
        def attach(outputs: list, inputs: list, arrays: list) -> list:
            return outputs

        def forward(outputs, inputs, arrays):
            # Through `attach` itself, so that a second derivative finds the same rule.
            outputs = attach(outputs, inputs, arrays)
            return outputs, (outputs, inputs, arrays)

        attach.defvjp(forward, lambda saved, cotangents: (None, *self(saved, cotangents)))
        self.attach = attach

    def __call__(self, saved: tuple, cotangents: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
        """Returns the gradients of the inputs and of the arrays of the context."""
        _, inputs, arrays = saved
        returned, left = restarted(lambda recording: self._run(saved, cotangents, recording))
        returned = returned if isinstance(returned, tuple) else (returned,)
        if len(returned) <= self._places[-1]:
            raise BridgeError(
                f"the backward of {self._function.__name__} gave {len(returned)} gradients and input "
                f"{self._places[-1]} needs one; return one for each argument of forward, None where there is none"
            )
        gradients = [self._gradient(returned[p], x) for p, x in zip(self._places, inputs, strict=True)]
        for i, gradient in enumerate(gradients):
            gradients[i] = gradient + left.pop(("input", i), 0)
        if left and not self.is_run_by_pytorch:
            self._call.warn(
                f"the backward of {self._function.__name__} adds to the `grad` of parameters, and runs in PyTorch only "
                "if an input of it requires grad; here it always runs"
            )
        return gradients, [left.get(("array", i)) for i in range(len(arrays))]

    def _run(self, saved: tuple, cotangents: list[jax.Array], recording: int) -> tuple[Any, dict]:
        """Returns what the backward returns, and the `grad` of each tensor that it leaves one on."""
        outputs, inputs, arrays = saved
        given = dict(zip(self._free, cotangents, strict=True))
        with (
            self._saved.state_of(arrays, recording),
            self.tracing(self._call.again(recording)),
            torch.enable_grad(),
        ):
            ctx = self._saved.context(inputs, outputs, arrays, recording)
            gradients = [
                None if meta is None else fresh(_conjugate(given.get(i, _zeros(meta))), meta)
                for i, meta in enumerate(self._metas)
            ]
            attributes = _Attributes(self._saved.modules)
            try:
                with _enclosing(inspect.unwrap(self._function.backward), ctx.__dict__.pop(_ENCLOSED)):
                    returned = self._function.backward(ctx, *gradients)
            except RuntimeError as error:
                if "appears to not have been used in the graph" not in str(error):
                    raise
                raise self._call.error(
                    f"the backward of {self._function.__name__} differentiates what was computed before it",
                    "compute it again in the backward, under torch.enable_grad()",
                ) from error
            finally:
                assigned, changed = attributes.put_back()
            self._check_lost(assigned, changed)
            return returned, self._saved.gradients()

    def _check_lost(self, assigned: list[str], changed: list[str]) -> None:
        what = f"the backward of {self._function.__name__} changes"
        direct, by_modules = self._saved.written()
        if changed or direct:
            raise self._call.error(
                f"{what} {next(iter(changed), 'a parameter or buffer')}, which would be lost: JAX may run it any "
                "number of times",
                "return it from the module, and change it outside of the call",
            )
        if assigned or by_modules:  # by the code of a module that it runs again
            self._call.warn(f"{what} {next(iter(assigned), 'buffers')} once more, which is lost")

    def _gradient(self, returned: Any, x: jax.Array) -> jax.Array:
        if returned is None:
            return jnp.zeros_like(x)
        if not _reduces_to(returned.shape, x.shape):
            raise BridgeError(
                f"the backward of {self._function.__name__} gave a gradient of shape {tuple(returned.shape)} "
                f"for an input of shape {x.shape}; return one of the input's shape"
            )
        gradient = _reduced_to(self._call.adopt(returned).value, x.shape)
        if jnp.iscomplexobj(gradient) and not jnp.iscomplexobj(x):
            raise BridgeError(
                f"the backward of {self._function.__name__} gave a complex gradient for a real input; return the real "
                "part"
            )
        return _conjugate(gradient.astype(x.dtype))


def _globals(function: Any) -> dict[str, Any]:
    """The globals that a function names, without other functions."""
    if not isinstance(function, types.FunctionType):
        return {}
    values = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in values.items() if isinstance(value, nn.Module) or built_in(type(value))}


def _enclosed(backward: Any) -> dict[str, Any]:
    """The traced variables that the backward encloses, those in containers, too."""

    def leaves(value: Any) -> list:
        return jax.tree.leaves(value) if isinstance(value, (list, tuple, dict)) else [value]

    return {name: v for name, v in closure_of(backward).items() if any(map(_may_be_differentiated, leaves(v)))}


@contextlib.contextmanager
def _enclosing(backward: Any, values: dict[str, Any]) -> Iterator[None]:
    """The backward encloses these values instead of those of the forward's trace."""
    cells = dict(zip(backward.__code__.co_freevars, backward.__closure__, strict=True)) if values else {}
    before = {name: cells[name].cell_contents for name in values}
    for name, value in values.items():
        cells[name].cell_contents = value
    try:
        yield
    finally:
        for name, value in before.items():
            cells[name].cell_contents = value


def _may_be_differentiated(tensor: Any) -> bool:
    return isinstance(tensor, BridgeTensor) and tensor.may_have_gradient and isinstance(tensor.value, Tracer)


def _held(path: str, value: Any, seen: set[int], visible: bool = True) -> Iterator[tuple[str, Any, bool]]:
    """Yields the tensors and modules that `value` holds: its path, itself, and whether JAX finds it as a leaf."""
    if isinstance(value, (torch.Tensor, nn.Module)):
        yield path, value, visible
    elif id(value) not in seen and len(seen) < _LOOKED_AT:
        seen.add(id(value))
        visible = visible and (isinstance(value, (dict, list, tuple)) or dataclasses.is_dataclass(value))
        for name, part in parts_of(value):
            yield from _held(path + name, part, seen, visible)


_LOOKED_AT = 10_000
"""Objects in which tensors are looked for."""


def _reduces_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """True if PyTorch sums a gradient of this shape to the other one, which broadcasts to it."""
    kept = tuple(shape)[max(len(shape) - len(wanted), 0) :]
    return len(kept) == len(wanted) and all(b in (1, a) for a, b in zip(kept, wanted, strict=True))


def _reduced_to(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    lead = gradient.ndim - len(shape)
    narrow = [i + lead for i, n in enumerate(shape) if n != gradient.shape[i + lead]]
    return jnp.reshape(jnp.sum(gradient, (*range(lead), *narrow)), shape) if gradient.shape != shape else gradient


def _zeros(meta: torch.Tensor) -> jax.Array:
    return jnp.zeros(meta.shape, jax_dtype(meta.dtype))


def _conjugate(gradient: jax.Array) -> jax.Array:
    """Of a complex number PyTorch's gradient is the conjugate of JAX's."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient
