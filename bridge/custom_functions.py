"""`torch.autograd.Function` as `jax.custom_vjp`: the forward runs at the call, the backward when JAX asks for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.graph import increment_version

from bridge._compat.jax import Tracer
from bridge._compat.torch import AutogradFunction, below_modes, in_function_transform, is_dual, wrapped_by_transform
from bridge.arrays import jax_dtype
from bridge.cells import differentiable, stop_gradient
from bridge.dispatch import Dispatch
from bridge.errors import BridgeError
from bridge.function_notes import Context, Notes
from bridge.kept_on_context import KeptOnContext
from bridge.recording import recorded, restarted
from bridge.tensors import BridgeTensor, fresh
from bridge.tracing import active, tracing


def apply(dispatch: Dispatch, function: type[Any], args: tuple) -> Any:
    """`function.apply(*args)`: values from its forward, gradients from its backward."""
    if dispatch.recording and recorded(args):
        raise dispatch.error(
            "the module asks PyTorch's engine for a gradient (torch.autograd.grad, backward() or the function that "
            f"torch.func.vjp returns), and {function.__name__} may be part of its graph",
            "take that gradient by torch.func.grad or torch.func.jacrev, or outside of the module with jax.grad; or "
            f"write {function.__name__} in operations of PyTorch",
        )
    adopted = functools.partial(_adopted, dispatch)
    given, args = args, tuple(map(adopted, args))
    ctx = Context()
    # Also of what PyTorch has no gradient for and JAX may: inputs and buffers.
    ctx.needs_input_grad = tuple(isinstance(a, BridgeTensor) and a.may_have_gradient for a in args)
    tracked = any(isinstance(a, BridgeTensor) and a.requires_grad for a in args)
    places = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    inputs = [args[i].value for i in places]  # read now: the forward may write in place
    with torch.no_grad():
        if function.setup_context is AutogradFunction.setup_context:
            outputs = function.forward(ctx, *args)
        else:
            outputs = function.forward(*args)
            function.setup_context(ctx, args, outputs)
    _without_wrapped_marks(ctx)
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
        raise dispatch.error(
            f"{function.__name__} has several results and calls `set_materialize_grads(False)`, but JAX does not say "
            "which of them nobody used",
            "leave the call out and take zeros for the gradient of an unused result",
        )
    enclosed = _enclosed(function)
    if enclosed:
        ctx.__dict__[ENCLOSED] = enclosed
    kept = _keep(dispatch, function, ctx)
    state = dispatch.state if _calls_modules(ctx.__dict__) or _calls_modules(function.backward) else []
    notes = Notes(dispatch, function, ctx, [args[i] for i in places], [listed[i] for i in free], state)
    backward = _Backward(dispatch, function, notes, places, listed, free)
    values = backward.attach(
        [stop_gradient(listed[i].value) for i in free], inputs, [stop_gradient(a) for a in notes.arrays]
    )
    for i, value in zip(free, values, strict=True):
        if id(listed[i]) in dirty:
            listed[i].write(value, tracked=tracked, grad_enabled=True)
        else:
            listed[i] = fresh(value, listed[i]._meta, tracked=tracked)
    notes.watch([listed[i] for i in free], {id(a): b for a, b in zip(args, given, strict=True) if a is not b})
    dispatch.contexts.append((function.__name__, kept, notes))
    return tuple(listed) if several else listed[0]


ENCLOSED = "variables that the backward encloses"
"""Where a context has the traced ones, so that the backward finds them as they are in its own trace."""


def _enclosed(function: type[Any]) -> dict[str, Any]:
    return {name: cell.cell_contents for name, cell in _cells(function) if _holds_traced(cell)}


def _cells(function: type[Any]) -> list[tuple[str, Any]]:
    backward = inspect.unwrap(function.backward)
    if not inspect.isfunction(backward):
        return []
    return list(zip(backward.__code__.co_freevars, backward.__closure__ or (), strict=True))


def _holds_traced(cell: Any) -> bool:
    try:
        value = cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return False
    leaves = jax.tree.leaves(value) if isinstance(value, (list, tuple, dict)) else [value]
    return any(map(_may_be_differentiated, leaves))


@contextlib.contextmanager
def _enclosing(function: type[Any], values: dict[str, Any]) -> Iterator[None]:
    """The backward encloses these values instead of those of the forward's trace."""
    cells = [(cell, values[name], cell.cell_contents) for name, cell in _cells(function) if name in values]
    for cell, value, _ in cells:
        cell.cell_contents = value
    try:
        yield
    finally:
        for cell, _, before in cells:
            cell.cell_contents = before


def _keep(dispatch: Dispatch, function: type[Any], ctx: Context) -> KeptOnContext:
    """Refuse what the backward would not find as in PyTorch; what the rest of the call changes is seen at its end."""
    kept = KeptOnContext(ctx.__dict__)
    state = set(map(id, dispatch.state))
    for path, tensor in kept.hidden.items():
        if wrapped_by_transform(tensor) or (_may_be_differentiated(tensor) and id(tensor) not in state):
            raise dispatch.error(
                f"{function.__name__} keeps a traced tensor inside of an object or a function, at {path}",
                "keep the tensor itself on ctx, or use ctx.save_for_backward",
            )
    return kept


def _may_be_differentiated(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, BridgeTensor) and tensor.may_have_gradient and isinstance(tensor.value, Tracer)


def refuse_changed_contexts(dispatch: Dispatch, state: Collection[Any]) -> None:
    """At the end of a call, when PyTorch would begin with the backward; `state` is what the modules hold by then.

    Tensors that were written since are refused only where the backward reads them.
    """
    held = set(map(id, state))
    for name, kept, notes in dispatch.contexts:
        notes.end(held)
        changed = kept.changed()
        if changed:
            raise dispatch.error(
                f"{changed} of {name} is changed after `{name}.apply`, and its backward would not see that",
                "keep a copy on ctx, or pass as arguments what the backward needs",
            )
    dispatch.contexts.clear()  # traced tensors would outlive their trace


def _adopted(dispatch: Dispatch, value: Any) -> Any:
    return dispatch.adopt(value) if isinstance(value, torch.Tensor) else value


def _without_wrapped_marks(ctx: Context) -> None:
    """Leave out what the rule for `torch.vmap` that PyTorch generates gives to `mark_dirty` and its like.

    These are tensors of the transformation, which PyTorch's engine does not find among the results.
    """
    for name in ("dirty_tensors", "non_differentiable"):
        if name in ctx.__dict__:
            setattr(ctx, name, tuple(t for t in ctx.__dict__[name] if not wrapped_by_transform(t)))


class _Backward:
    """One call's backward, with the metadata it needs; holds no traced array."""

    def __init__(
        self, dispatch: Dispatch, function: type[Any], notes: Notes, places: list[int], outputs: list, free: list[int]
    ):
        self._dispatch, self._function, self._notes = dispatch, function, notes
        self._places, self._free = places, free
        self._metas = [t._meta if isinstance(t, BridgeTensor) else None for t in outputs]

        @jax.custom_vjp
        def attach(outputs: list, inputs: list, arrays: list) -> list:
            return outputs

        def forward(outputs, inputs, arrays):
            # Through `attach` itself, so that a second derivative finds the same rule.
            outputs = attach(outputs, inputs, arrays)
            return outputs, (outputs, inputs, arrays)

        def backward(saved, cotangents):
            return None, self(saved, cotangents), None

        attach.defvjp(forward, backward)
        self.attach = attach

    def __call__(self, saved: tuple, cotangents: list[jax.Array]) -> list[jax.Array]:
        _, inputs, _ = saved
        returned = restarted(lambda recording: self._returned(saved, cotangents, recording))
        returned = returned if isinstance(returned, tuple) else (returned,)
        if len(returned) <= self._places[-1]:
            raise BridgeError(
                f"the backward of {self._function.__name__} gave {len(returned)} gradients and input "
                f"{self._places[-1]} needs one; return one for each argument of forward, None where there is none"
            )
        return [self._gradient(returned[p], x) for p, x in zip(self._places, inputs, strict=True)]

    def _returned(self, saved: tuple, cotangents: list[jax.Array], recording: int) -> Any:
        outputs, inputs, arrays = saved
        given = dict(zip(self._free, cotangents, strict=True))
        with (
            self._notes.state_of(arrays, recording),
            tracing(self._dispatch.again(recording)),
            torch.enable_grad(),
        ):
            ctx = self._notes.context(inputs, outputs, arrays, recording)
            grads = [
                None if meta is None else fresh(_conjugate(given.get(i, _zeros(meta))), meta)
                for i, meta in enumerate(self._metas)
            ]
            enclosed = ctx.__dict__.pop(ENCLOSED, {})
            kept = KeptOnContext(ctx.__dict__, modules=True)
            try:
                with _enclosing(self._function, enclosed):
                    returned = self._function.backward(ctx, *grads)
            except RuntimeError as error:
                if "appears to not have been used in the graph" not in str(error):
                    raise
                raise self._dispatch.error(
                    f"the backward of {self._function.__name__} differentiates what was computed before it",
                    "compute it again in the backward, under torch.enable_grad()",
                ) from error
            changed = kept.changed() or self._notes.written()
            if changed:
                raise self._dispatch.error(
                    f"the backward of {self._function.__name__} changes {changed}, which would be lost: JAX may run it "
                    "any number of times",
                    "return it from the module, and change it outside of the call",
                )
            return returned

    def _gradient(self, returned: Any, x: jax.Array) -> jax.Array:
        if returned is None:
            return jnp.zeros_like(x)
        if not _reduces_to(returned.shape, x.shape):
            raise BridgeError(
                f"the backward of {self._function.__name__} gave a gradient of shape {tuple(returned.shape)} "
                f"for an input of shape {x.shape}; return one of the input's shape"
            )
        gradient = _reduced_to(self._dispatch.adopt(returned).value, x.shape)
        if jnp.iscomplexobj(gradient) and not jnp.iscomplexobj(x):
            raise BridgeError(
                f"the backward of {self._function.__name__} gave a complex gradient for a real input; return the real "
                "part"
            )
        return _conjugate(gradient.astype(x.dtype))


def _reduces_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether PyTorch sums a gradient of this shape to the other one, which broadcasts to it."""
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


def _calls_modules(value: Any, depth: int = 4) -> bool:
    """Whether code that has `value` at hand may call a module: then it needs the parameters of the call."""
    if isinstance(value, nn.Module) or inspect.ismethod(value):
        return True
    if isinstance(value, torch.Tensor) or not depth:
        return False
    if inspect.isfunction(value):
        value = [getattr(cell, "cell_contents", None) for cell in value.__closure__ or ()]
    if isinstance(value, functools.partial):
        return True
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_calls_modules(v, depth - 1) for v in values)


def _apply(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    dispatch = active()
    # `torch.func` takes it apart and comes back for what is below its levels.
    if dispatch is None or in_function_transform():
        return super(AutogradFunction, cls).apply(*args, **kwargs)  # pyright: ignore
    if any(isinstance(a, torch.Tensor) and is_dual(a) for a in args):
        raise dispatch.error(
            f"{cls.__name__} is applied to a dual tensor, whose gradient would be lost",
            "use torch.func.jvp instead of torch.autograd.forward_ad",
        )
    return apply(dispatch, cls, args)


def install() -> None:
    """Take part in `Function.apply`, which PyTorch shows to no mode; outside a traced call it is PyTorch's own.

    The method is added below `Function.apply`, so references to it that were taken earlier come by here too.
    """
    AutogradFunction.apply = classmethod(_apply)  # pyright: ignore[reportAttributeAccessIssue]
