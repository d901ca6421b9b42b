"""`torch.autograd.Function` as `jax.custom_vjp`: the forward runs at the call, the backward when JAX asks for it.

JAX gives the backward what parameters, buffers and the context held when the Function was applied, PyTorch what they
hold after the call. `bridge.verify` finds a backward that reads what has been written since. What the backward adds to
the `grad` of parameters, by PyTorch's engine or by itself, is added to JAX's gradient of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
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
from bridge.tensor.pytrees import ATOMS, built_in, convert, items_of, parts_of
from bridge.tensor.tensor import BridgeTensor, differentiable, fresh, stop_gradient

Tracing = Callable[[Any], contextlib.AbstractContextManager]
"""The context in which a call runs."""


class Context(FunctionCtx):
    """PyTorch's own context, with the answers that its engine gives."""

    needs_input_grad: tuple[bool, ...] = ()
    to_save: tuple = ()
    dirty_tensors: tuple = ()
    non_differentiable: tuple = ()

    @property
    def saved_tensors(self) -> tuple:
        return self.to_save


def in_place_of_apply(tracing: Tracing) -> Replacement:
    """Returns the replacement of `Function.apply`, which PyTorch shows to no mode.

    The method is added below `Function.apply`, so references to it that were taken earlier come by here too.
    """

    def apply(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        call = current()
        # `torch.func` takes it apart and comes back for what is below its levels.
        if call is None or in_function_transform():
            return super(AutogradFunction, cls).apply(*args, **kwargs)  # pyright: ignore
        return _apply(call, cls, args, tracing)

    method = classmethod(apply)
    return Replacement(AutogradFunction, "apply", lambda _: method)


def _apply(call: TraceContext, function: type[Any], args: tuple, tracing: Tracing) -> Any:
    """`function.apply(*args)`: values from its forward, gradients from its backward."""
    if any(isinstance(a, torch.Tensor) and is_dual(a) for a in args):
        raise call.error(
            f"{function.__name__} is applied to a dual tensor, whose gradient would be lost",
            "use torch.func.jvp instead of torch.autograd.forward_ad",
        )
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
    inputs = {i: args[i] for i, needed in enumerate(ctx.needs_input_grad) if needed}
    arrays = [t.value for t in inputs.values()]  # read now: the forward may write in place
    results = _forward(call, function, ctx, args)
    if not inputs or not torch.is_grad_enabled():
        return results
    # A real tensor, too: one that traced values were written into, or a constant with a gradient of the backward's own.
    outputs = [adopted(t) for t in (results if isinstance(results, tuple) else [results])]
    fixed = set(map(id, ctx.non_differentiable))
    free = [
        i
        for i, t in enumerate(outputs)
        if isinstance(t, BridgeTensor) and differentiable(t.dtype) and id(t) not in fixed
    ]
    backward = _Backward(call, function, tracing, ctx, inputs, outputs, free)
    values = _attach(backward, [stop_gradient(outputs[i].value) for i in free], arrays, backward.arrays)
    tracked = any(t.requires_grad for t in inputs.values())
    for i, value in zip(free, values, strict=True):
        if any(outputs[i] is t for t in ctx.dirty_tensors):
            outputs[i].write(value, tracked=tracked, grad_enabled=True)
        else:
            outputs[i] = fresh(value, outputs[i]._meta, tracked=tracked)
    return tuple(outputs) if isinstance(results, tuple) else outputs[0]


def _forward(call: TraceContext, function: type[Any], ctx: Context, args: tuple) -> Any:
    with torch.no_grad():
        if function.setup_context is AutogradFunction.setup_context:
            results = function.forward(ctx, *args)
        else:
            results = function.forward(*args)
            function.setup_context(ctx, args, results)
    # The rule for `torch.vmap` that PyTorch generates marks tensors of the transformation, which PyTorch's engine does
    # not find among the results.
    for name in ("dirty_tensors", "non_differentiable"):
        setattr(ctx, name, tuple(call.adopt(t) for t in getattr(ctx, name) if not wrapped_by_transform(t)))
    with below_modes():
        increment_version([t for t in ctx.dirty_tensors if not t.is_inference()])  # as PyTorch's engine
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(backward: _Backward, outputs: list, inputs: list, arrays: list) -> list:
    """Returns the outputs; the backward has the gradients of the inputs, and of the arrays of its context."""
    return outputs


def _attach_forward(backward: _Backward, *operands: list) -> tuple[list, tuple[list, list]]:
    outputs = _attach(backward, *operands)  # so that a second derivative finds the same rule
    return outputs, (outputs, operands[-1])


_attach.defvjp(_attach_forward, lambda backward, saved, cotangents: (None, *backward(saved, cotangents)))


class _Leaf:
    """In place of a traced tensor on a context: where its array is among those of the backward, and all the rest."""

    def __init__(self, place: int, meta: torch.Tensor, tracked: bool, attributes: Any):
        self.place, self.meta, self.tracked, self.attributes = place, meta, tracked, attributes


class _Backward:
    """The backward of one application; its context is taken apart into arrays, which JAX carries to it, and the rest.

    `free`: the places of the results that have a gradient. Their arrays are the first that the backward is given.
    """

    def __init__(
        self,
        call: TraceContext,
        function: type[Any],
        tracing: Tracing,
        ctx: Context,
        inputs: dict[int, BridgeTensor],
        outputs: list,
        free: list[int],
    ):
        self._call, self._function, self._tracing, self._free = call, function, tracing, free
        self._inputs = {i: t._meta for i, t in inputs.items()}
        self._outputs = [t._meta if isinstance(t, BridgeTensor) else None for t in outputs]
        self._is_run_by_pytorch = any(t.requires_grad for t in inputs.values())
        held = self._held_by(ctx)
        self._modules = {
            f"{path}.{name}".rstrip("."): module
            for path, root in held
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        }
        own = {id(call.adopt(t)) for _, t in held if isinstance(t, torch.Tensor) and call.is_traced(t)}
        may_read_all = any(not isinstance(value, torch.Tensor) for _, value in held)
        state = [t for t in call.state if may_read_all or id(t) in own]
        self._state = {id(t): (t, len(free) + i) for i, t in enumerate(state)}
        """The parameters and buffers that the backward may read, with the places of their arrays."""
        self.arrays = [t._cell.read() for t in state]
        self._contents = self._without_arrays(
            vars(ctx), {id(t) for t in inputs.values()}, {id(outputs[i]): place for place, i in enumerate(free)}
        )

    def _held_by(self, ctx: Context) -> list[tuple[str, Any]]:
        """Returns what the backward finds besides plain values, with paths."""
        state, seen = set(map(id, self._call.state)), set()
        held = [each for name, value in vars(ctx).items() for each in _held(f"ctx.{name}", value, seen)]
        for name, value in _variables(inspect.unwrap(self._function.backward)).items():
            held += _held(name, value, seen, False)
        for path, value, is_leaf in held:
            if not is_leaf and id(value) not in state and _may_be_differentiated(value):
                raise self._call.error(
                    f"{self._function.__name__} keeps a traced tensor inside of an object or a function, at {path}",
                    "keep the tensor itself on ctx, or use ctx.save_for_backward",
                )
        return [(path, value) for path, value, _ in held]

    def _without_arrays(self, contents: dict[str, Any], inputs: set[int], places: dict[int, int]) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and self._call.is_traced(value):
                value = self._call.adopt(value)
            if not isinstance(value, BridgeTensor) or id(value) in self._state:
                return value
            if id(value) not in places:
                places[id(value)] = len(self._free) + len(self.arrays)
                self.arrays.append(value.value)
            # An input requires grad as `needs_input_grad` says, so that code that copies the flag differentiates by it.
            tracked = value.requires_grad or id(value) in inputs
            return _Leaf(places[id(value)], value._meta, tracked, convert(value._attributes(), leaf))

        return convert(contents, leaf)

    def __call__(self, saved: tuple[list, list], cotangents: list[jax.Array]) -> tuple[list, list]:
        """Returns the gradients of the inputs and of the arrays of the context."""
        return restarted(lambda recording: self._run(saved, cotangents, recording))

    def _run(self, saved: tuple[list, list], cotangents: list[jax.Array], recording: int) -> tuple[list, list]:
        values, given = [*saved[0], *saved[1]], dict(zip(self._free, cotangents, strict=True))

        def gradient(i: int, meta: torch.Tensor) -> BridgeTensor:
            return fresh(_conjugate(given[i]) if i in given else jnp.zeros(meta.shape, jax_dtype(meta.dtype)), meta)

        with self._state_of(values, recording), self._tracing(self._call.again(recording)), torch.enable_grad():
            ctx, tensors = self._context(values, recording)
            gradients = [None if meta is None else gradient(i, meta) for i, meta in enumerate(self._outputs)]
            with self._nothing_lost():
                returned = self._function.backward(ctx, *gradients)
            returned = returned if isinstance(returned, tuple) else (returned,)
            left = self._left([*self._state.values(), *tensors])
            return [self._gradient(returned[i], meta) for i, meta in self._inputs.items()], left[len(saved[0]) :]

    @contextlib.contextmanager
    def _state_of(self, values: list, recording: int) -> Iterator[None]:
        """Parameters and buffers hold what they held when the Function was applied, and have no `grad`."""
        with contextlib.ExitStack() as stack:
            for tensor, place in self._state.values():
                stack.enter_context(tensor._cell.holding(values[place]))
                stack.callback(setattr, tensor, "_cell", tensor._cell)
                stack.callback(engine_leaf, tensor, engine_requires_grad(tensor))
                stack.callback(set_engine_gradient, tensor, engine_gradient(tensor))
                set_engine_gradient(tensor, None)
                start_graph(tensor, recording)
            yield

    def _context(self, values: list, recording: int) -> tuple[Context, list[tuple[BridgeTensor, int]]]:
        """Returns a context with these values, and the tensors on it with the places of their arrays."""
        ctx, tensors = Context(), []

        def rebuilt(leaf: Any) -> Any:
            if not isinstance(leaf, _Leaf):
                return leaf
            tensor = fresh(values[leaf.place], leaf.meta, tracked=leaf.tracked)
            tensors.append((tensor, leaf.place))
            vars(tensor).update(convert(leaf.attributes, rebuilt))
            return start_graph(tensor, recording)

        vars(ctx).update(convert(self._contents, rebuilt))
        return ctx, tensors

    @contextlib.contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """Puts the attributes of modules back. Raises where the backward has changed something, which would be lost.

        It only warns of tensors that are attributes, and of buffers: a module whose code it runs again changes these.
        """
        registries = [(known, dict(known)) for m in self._modules.values() for known in (vars(m), m._buffers)]
        before, versions = _contents(self._modules), [t._cell.version for t, _ in self._state.values()]
        try:
            yield
            after = _contents(self._modules)
        except RuntimeError as error:
            if "appears to not have been used in the graph" not in str(error):
                raise
            raise self._call.error(
                f"the backward of {self._function.__name__} differentiates what was computed before it",
                "compute it again in the backward, under torch.enable_grad()",
            ) from error
        finally:
            for registry, attributes in registries:
                registry.clear()
                registry.update(attributes)
        changed = {p: after.get(p, (None,))[0] for p in before | after if not _same(after.get(p), before.get(p))}
        written = versions != [t._cell.version for t, _ in self._state.values()]
        lost = [path for path, value in changed.items() if not isinstance(value, torch.Tensor)]
        what = f"the backward of {self._function.__name__} changes"
        if lost or (written and not self._modules):
            raise self._call.error(
                f"{what} {(*lost, 'a parameter or buffer')[0]}, which would be lost: JAX may run it any number of "
                "times",
                "return it from the module, and change it outside of the call",
            )
        if changed or written:
            self._call.warn(f"{what} {(*changed, 'buffers')[0]} once more, which is lost")

    def _left(self, tensors: list[tuple[BridgeTensor, int]]) -> list[jax.Array | None]:
        """Returns the `grad` that the backward has left on the tensors, by the places of their arrays."""
        left: list[Any] = [None] * (len(self._free) + len(self.arrays))
        for tensor, place in tensors:
            gradient = engine_gradient(tensor)
            if gradient is not None:
                array = _conjugate(self._call.adopt(gradient).value)
                left[place] = array if left[place] is None else left[place] + array
        if not self._is_run_by_pytorch and any(array is not None for array in left):
            self._call.warn(
                f"the backward of {self._function.__name__} adds to the `grad` of parameters, and runs in PyTorch only "
                "if an input of it requires grad; here it always runs"
            )
        return left

    def _gradient(self, returned: Any, meta: torch.Tensor) -> jax.Array | None:
        """Returns the gradient of an input, whose shape and dtype `meta` has."""
        if returned is None:
            return None
        what = f"the backward of {self._function.__name__} gave a"
        if returned.is_complex() and not meta.is_complex():
            raise BridgeError(f"{what} complex gradient for a real input; return the real part")
        try:
            gradient = self._call.adopt(returned.sum_to_size(meta.shape)).value
        except RuntimeError as error:
            raise BridgeError(
                f"{what} gradient of shape {tuple(returned.shape)} for an input of shape {tuple(meta.shape)}; return "
                "one of the input's shape"
            ) from error
        return _conjugate(gradient.astype(jax_dtype(meta.dtype)))


def _conjugate(gradient: jax.Array) -> jax.Array:
    """Of a complex number PyTorch's gradient is the conjugate of JAX's."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


def _contents(modules: dict[str, nn.Module]) -> dict[str, tuple[Any, Any]]:
    """Returns the attributes and buffers of modules by path, each with its items if it is a container."""
    return {
        f"{path}.{name}": (value, items_of(value) if built_in(type(value)) else None)
        for path, module in modules.items()
        for name, value in (vars(module) | module._buffers).items()
        if name != "_buffers"
    }


def _same(now: Any, before: Any) -> bool:
    """True for the same object, number or text, and for lists of such."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    return type(now) in ATOMS and now == before


def _variables(function: Any) -> dict[str, Any]:
    """Returns the variables that a function encloses, and modules and containers among the globals that it names."""
    if not isinstance(function, types.FunctionType):
        return {}
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    named = {name: value for name, value in named.items() if isinstance(value, nn.Module) or built_in(type(value))}
    return closure_of(function) | named


def _held(path: str, value: Any, seen: set[int], visible: bool = True) -> Iterator[tuple[str, Any, bool]]:
    """Yields tensors, modules, and objects that hide what they hold: path, object, and whether `convert` finds it."""
    if isinstance(value, torch.Tensor):
        yield path, value, visible
    elif type(value) not in ATOMS and id(value) not in seen and len(seen) < _LOOKED_AT:
        seen.add(id(value))
        parts = [] if isinstance(value, nn.Module) else parts_of(value)
        if not parts and not built_in(type(value)):
            yield path, value, visible
        visible = visible and (isinstance(value, (dict, list, tuple)) or dataclasses.is_dataclass(value))
        for name, part in parts:
            yield from _held(path + name, part, seen, visible)


_LOOKED_AT = 10_000
"""Objects in which tensors are looked for."""


def _may_be_differentiated(value: Any) -> bool:
    if isinstance(value, BridgeTensor):
        return value.may_have_gradient and isinstance(value.value, Tracer)
    return isinstance(value, torch.Tensor) and wrapped_by_transform(value)
