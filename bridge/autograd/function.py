"""`torch.autograd.Function` as `jax.custom_vjp`: the forward runs at the call, the backward when JAX asks for it.

JAX gives the backward the values that parameters, buffers and the context had when the Function was applied, PyTorch
those after the call. `bridge.verify` finds a backward that reads what has been written since. What the backward adds to
the `grad` of parameters, by PyTorch's engine or by itself, is added to JAX's gradient of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from bridge._compat.jax import Tracer, depends_on
from bridge._compat.torch import (
    AutogradFunction,
    Replacement,
    before_registered_backward,
    closure_of,
    engine_gradient,
    engine_leaf,
    engine_requires_grad,
    in_function_transform,
    in_place_of_function_apply,
    is_dual,
    set_engine_gradient,
    wrapped_by_transform,
)
from bridge.autograd.engine import restarted, start_graph
from bridge.context import CURRENT, CallState, current
from bridge.errors import BridgeError
from bridge.generators import refuse_draws
from bridge.symbolic.numbers import NUMBERS, as_operand, over
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.pytrees import ATOMS, built_in, convert, items_of, parts_of
from bridge.tensor.tensor import DIFFERENTIABLE, BridgeTensor, stop_gradient, wrap

Tracing = Callable[[Any], contextlib.AbstractContextManager]
"""The context in which a call runs."""


class Context(FunctionCtx):
    """PyTorch's own context, with the answers that PyTorch's engine gives."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple = ()
    dirty_tensors: tuple = ()
    non_differentiable: tuple = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def in_place_of_apply(tracing: Tracing) -> Replacement:
    """Returns the replacement of `Function.apply`, which PyTorch passes to no mode.

    `torch.func` takes the Function apart and comes back for the operations below its levels.
    """

    def is_wanted() -> bool:
        return current() is not None and not in_function_transform()

    def apply(function: type[Any], args: tuple) -> Any:
        return _apply(cast(CallState, current()), function, args, tracing)

    return in_place_of_function_apply(is_wanted, apply)


OF_LIBRARIES = before_registered_backward(
    lambda args: any(isinstance(t, BridgeTensor) and t.may_have_gradient for t in jax.tree.leaves(args))
)


def _apply(call: CallState, function: type[Any], args: tuple, tracing: Tracing) -> Any:
    """Returns `function.apply(*args)`: values are computed by its forward, gradients by its backward."""
    name = function.__name__
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if any(map(is_dual, tensors)):
        what = f"{name} is applied to a dual tensor, whose gradient would be lost"
        raise call.error(what, "use torch.func.jvp instead of torch.autograd.forward_ad")
    if call.recording and torch.is_grad_enabled() and any(map(engine_requires_grad, tensors)):
        raise call.error(
            "the module asks PyTorch's engine for a gradient (torch.autograd.grad, backward() or the function that "
            f"torch.func.vjp returns), and {name} may be part of its graph",
            "take that gradient by torch.func.grad or torch.func.jacrev, or outside of the module with jax.grad; or "
            f"write {name} in operations of PyTorch",
        )
    args = tuple(call.wrap(a) if isinstance(a, torch.Tensor) else a for a in args)
    ctx = Context()
    inputs = {i: a for i, a in enumerate(args) if isinstance(a, BridgeTensor) and a.may_have_gradient}
    ctx.needs_input_grad = tuple(i in inputs and _needs_gradient(call, a) for i, a in enumerate(args))
    arrays = [t.value for t in inputs.values()]  # read now: the forward may write in place
    results = _forward(call, function, ctx, args)
    if not inputs or not torch.is_grad_enabled():
        return results
    # This may be a real tensor: traced values were written into it, or it is a constant with a gradient of its own.
    listed = results if isinstance(results, tuple) else (results,)
    outputs = [call.wrap(t) if isinstance(t, torch.Tensor) else t for t in listed]
    fixed = set(map(id, ctx.non_differentiable))
    free = [
        i
        for i, t in enumerate(outputs)
        if isinstance(t, BridgeTensor) and t.dtype in DIFFERENTIABLE and id(t) not in fixed
    ]
    backward = _Backward(call, function, tracing)
    parts = backward.take_apart(ctx, inputs, outputs, free)
    values: Any = _attached(backward)(arrays, parts)
    for i, value in zip(free, values, strict=True):
        if any(outputs[i] is t for t in ctx.dirty_tensors):
            outputs[i].write(value, tracked=backward.tracked, grad_enabled=True)
        else:
            outputs[i] = wrap(value, outputs[i]._meta, tracked=backward.tracked)
    if isinstance(results, tuple):
        return tuple(outputs)
    return outputs[0]


def _needs_gradient(call: CallState, tensor: BridgeTensor) -> bool:
    """True as in PyTorch, and for what JAX may differentiate by, except for what is computed of buffers alone."""
    return tensor.requires_grad or depends_on(tensor.value, call.buffers) is None


def _forward(call: CallState, function: type[Any], ctx: Context, args: tuple) -> Any:
    with torch.no_grad():
        if function.setup_context is AutogradFunction.setup_context:
            results = function.forward(ctx, *args)
        else:
            results = function.forward(*args)
            function.setup_context(ctx, args, results)
    # The rule for `torch.vmap` that PyTorch generates marks tensors of the transformation, which PyTorch's engine does
    # not find among the results.
    for name in ("dirty_tensors", "non_differentiable"):
        setattr(ctx, name, tuple(call.wrap(t) for t in getattr(ctx, name) if not wrapped_by_transform(t)))
    return results


def _attached(backward: _Backward) -> Callable[[list, list], Any]:
    """Returns a function of inputs and arrays whose results are the first arrays, with the gradients of `backward`.

    Each application has its own: JAX keeps `attach`, and what it encloses, beyond the trace.
    """
    count = len(backward.free)

    @jax.custom_vjp
    def attach(inputs: list, arrays: list) -> list:
        return arrays[:count]

    def forward(inputs: list, arrays: list) -> tuple[list, list]:
        results: Any = attach(inputs, arrays)  # so that a second derivative finds the same rule
        return results, [*results, *arrays[len(results) :]]

    attach.defvjp(forward, backward)
    return attach


class _Backward:
    """The backward of one application. Its context is split into arrays, which JAX carries to it, and the rest."""

    def __init__(self, call: CallState, function: type[Any], tracing: Tracing):
        self._call = call
        self._function = function
        self._tracing = tracing
        self._name = f"the backward of {function.__name__}"
        self._tensors: list[tuple[BridgeTensor, int]] = []
        """The tensors that the backward may read, with the places of their arrays."""

    def take_apart(self, ctx: Context, inputs: dict[int, BridgeTensor], outputs: list, free: list[int]) -> list:
        """Returns the arrays of the `free` outputs, which have a gradient, and those that the backward may read."""
        self._inputs = {i: t._meta for i, t in inputs.items()}
        self._outputs = [t._meta if isinstance(t, BridgeTensor) else None for t in outputs]
        self.free = free
        self.tracked = any(t.requires_grad for t in inputs.values())
        arrays = [stop_gradient(outputs[i].value) for i in free]
        places = {id(outputs[i]): place for place, i in enumerate(free)}
        held = self._without_arrays(ctx, {id(t) for t in inputs.values()}, arrays, places)
        self._modules = {
            f"{path}.{name}".rstrip("."): module
            for path, root in held
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        }
        own = {
            id(self._call.wrap(t)) for _, t in held if isinstance(t, torch.Tensor) and self._call.constants.is_traced(t)
        }
        may_read_all = any(not isinstance(value, torch.Tensor) for _, value in held)
        self._state = [t for t in self._call.state if may_read_all or id(t) in own]
        self._tensors += [(t, len(arrays) + i) for i, t in enumerate(self._state)]
        return [*arrays, *(t._handle.read() for t in self._state)]

    def _without_arrays(self, ctx: Context, inputs: set[int], arrays: list, places: dict[int, int]) -> list:
        """Adds the arrays of the context. Returns the rest with paths: state, modules, objects."""
        call = self._call
        held = []
        seen = set()
        state = set(map(id, call.state))
        twins = {}

        def leaf(path: str, value: Any) -> Any:
            """Returns a tensor without an array in place of a traced one, also behind a number."""
            if type(value) in NUMBERS:
                return over(value, leaf(path, as_operand(value)))
            if isinstance(value, torch.Tensor) and call.constants.is_traced(value):
                value = call.wrap(value)
            if not isinstance(value, BridgeTensor) or id(value) in state:
                held.extend(_held(path, value, seen))
                return value
            if id(value) not in twins:
                # An input requires grad if `needs_input_grad` says so; code that copies the flag then differentiates.
                tracked = value.requires_grad or id(value) in inputs
                twins[id(value)] = twin = wrap(cast(jax.Array, None), value._meta, tracked=tracked)
                self._tensors.append((twin, places.get(id(value), len(arrays))))
                if id(value) not in places:
                    arrays.append(value.value)
                vars(twin).update(convert(value._attributes(), functools.partial(leaf, path)))
            return twins[id(value)]

        contents = vars(ctx).items()
        self._contents = {name: convert(value, functools.partial(leaf, f"ctx.{name}")) for name, value in contents}
        for name, value in _variables(inspect.unwrap(self._function.backward)).items():
            held += _held(name, value, seen)
        for path, value in held:
            traced = isinstance(value, BridgeTensor) and value.may_have_gradient and isinstance(value.value, Tracer)
            if id(value) not in state and (traced or (isinstance(value, torch.Tensor) and wrapped_by_transform(value))):
                raise call.error(
                    f"{self._function.__name__} keeps a traced tensor inside of an object or a function, at {path}",
                    "keep the tensor itself on ctx, or use ctx.save_for_backward",
                )
        return held

    def __call__(self, saved: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list, list]:
        """Returns the gradients of the inputs and of the arrays."""
        run = functools.partial(restarted, functools.partial(self._run, saved, cotangents))
        gradients = run()
        if CURRENT.states:
            refuse_draws(run)
        return gradients

    def _run(self, saved: list[jax.Array], cotangents: list[jax.Array], recording: int) -> tuple[list, list]:
        given = dict(zip(self.free, map(_conjugate, cotangents), strict=True))
        with self._restored(saved, recording), self._tracing(self._call.again(recording)), torch.enable_grad():
            ctx = Context()
            vars(ctx).update(convert(self._contents, lambda leaf: leaf))  # the backward may change its containers
            gradients = [
                meta if meta is None else wrap(given.get(i, jnp.zeros(meta.shape, jax_dtype(meta.dtype))), meta)
                for i, meta in enumerate(self._outputs)
            ]
            with self._nothing_lost():
                returned = self._function.backward(ctx, *gradients)
            if not isinstance(returned, tuple):
                returned = (returned,)
            if len(returned) < len(ctx.needs_input_grad):
                raise BridgeError(
                    f"{self._name} gave {len(returned)} of {len(ctx.needs_input_grad)} gradients; return one for each "
                    "argument of its forward, None for one without a gradient"
                )
            return [self._gradient(returned[i], x) for i, x in self._inputs.items()], self._left(len(saved))

    @contextlib.contextmanager
    def _restored(self, arrays: list[jax.Array], recording: int) -> Iterator[None]:
        """Gives the tensors these arrays and no `grad` while the context is active."""
        with contextlib.ExitStack() as stack:
            for tensor, place in self._tensors:
                stack.enter_context(tensor._handle.holding(arrays[place]))
                stack.callback(setattr, tensor, "_handle", tensor._handle)
                stack.callback(engine_leaf, tensor, engine_requires_grad(tensor))
                stack.callback(set_engine_gradient, tensor, engine_gradient(tensor))
                set_engine_gradient(tensor, None)
                start_graph(tensor, recording)
            yield

    @contextlib.contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """Restores the attributes of modules, and raises `BridgeError` if the backward has changed something.

        For attributes that are tensors, and for buffers, it only warns: modules that the backward runs again set them.
        """
        registries = [(known, dict(known)) for m in self._modules.values() for known in (vars(m), m._buffers)]
        before = _contents(self._modules)
        versions = [t._handle.version for t in self._state]
        try:
            yield
            after = _contents(self._modules)
        except RuntimeError as error:
            if "appears to not have been used in the graph" not in str(error):
                raise
            raise self._call.error(
                f"{self._name} differentiates what was computed before it",
                "compute it again in the backward, under torch.enable_grad()",
            ) from error
        finally:
            for registry, attributes in registries:
                registry.clear()
                registry.update(attributes)
        changed = {p: after.get(p, (None,))[0] for p in before | after if not _same(after.get(p), before.get(p))}
        written = versions != [t._handle.version for t in self._state]
        lost = [path for path, value in changed.items() if not isinstance(value, torch.Tensor)]
        if lost or (written and not self._modules):
            raise self._call.error(
                f"{self._name} changes {(*lost, 'a parameter or buffer')[0]}, which would be lost: JAX may run it any "
                "number of times",
                "return it from the module, and change it outside of the call",
            )
        if changed or written:
            self._call.warn(f"{self._name} changes {(*changed, 'buffers')[0]} once more, which is lost")

    def _left(self, arrays: int) -> list[jax.Array | None]:
        """Returns the `grad` that the backward has left on tensors, by the places of their arrays."""
        left: list[Any] = [None] * arrays
        for tensor, place in self._tensors:
            gradient = engine_gradient(tensor)
            if gradient is not None:
                array = _conjugate(self._call.wrap(gradient).value)
                left[place] = array if left[place] is None else left[place] + array
        if not self.tracked and any(array is not None for array in left):
            self._call.warn(
                f"{self._name} adds to the `grad` of parameters, and runs in PyTorch only if an input of it requires "
                "grad; here it always runs"
            )
        return left

    def _gradient(self, returned: Any, x: torch.Tensor) -> jax.Array | None:
        """Returns the gradient of an input that has the shape and the dtype of `x`."""
        if returned is None:
            return None
        if returned.is_complex() and not x.is_complex():
            raise BridgeError(f"{self._name} gave a complex gradient for a real input; return the real part")
        if returned.shape != x.shape:
            try:
                returned = returned.sum_to_size(x.shape)
            except RuntimeError as error:
                raise BridgeError(
                    f"{self._name} gave a gradient of shape {tuple(returned.shape)} for an input of shape "
                    f"{tuple(x.shape)}; return one of the input's shape"
                ) from error
        return _conjugate(self._call.wrap(returned).value.astype(jax_dtype(x.dtype)))


def _conjugate(gradient: jax.Array) -> jax.Array:
    """Returns the conjugate of a complex gradient: PyTorch's gradient is the conjugate of JAX's."""
    if jnp.iscomplexobj(gradient):
        return jnp.conj(gradient)
    return gradient


def _contents(modules: dict[str, nn.Module]) -> dict[str, tuple[Any, Any]]:
    """Returns the attributes and buffers of modules by path, each with its items if it is a container."""
    return {
        f"{path}.{name}": (value, items_of(value) if built_in(type(value)) else None)
        for path, module in modules.items()
        for name, value in (vars(module) | module._buffers).items()
        if name != "_buffers"
    }


def _same(now: Any, before: Any) -> bool:
    """True for the same object, for equal numbers or texts, and for lists of these."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    return type(now) in ATOMS and now == before


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables that a function encloses, and modules and containers among the globals that it names."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return closure_of(function) | {n: v for n, v in named.items() if isinstance(v, nn.Module) or built_in(type(v))}


def _held(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields tensors, modules, and objects that hide their contents, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) not in ATOMS and id(value) not in seen and len(seen) < 10_000:
        seen.add(id(value))
        parts = [] if isinstance(value, nn.Module) else parts_of(value)
        if not parts and not built_in(type(value)):
            yield path, value
        for name, part in parts:
            yield from _held(path + name, part, seen)
