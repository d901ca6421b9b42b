"""Every torch operation of a traced call: PyTorch decides shape, dtype and aliasing, a JAX lowering the values.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations, and for each one of four things happens: it makes a view, it
draws random numbers, it writes in place, or it computes a new tensor. Lowerings are ours (`lowerings/`) or torchax's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.core import Tracer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.errors import BridgeError, BridgeWarning, where_in_module
from bridge.lowerings import DECOMPOSITIONS, FUNCTIONS, LOWERINGS, METAS
from bridge.memory import elements, positions
from bridge.operations import (
    decomposition,
    draws_numbers,
    functional_of,
    functional_op,
    is_composite,
    kind_of,
    shapes_by_data,
    torchax_lowering,
)
from bridge.randomness import RANDOM, Rng, Source
from bridge.semantics import BridgeTensor, as_view, blank, differentiable, fresh, jax_dtype, stop_gradient
from bridge.views import view_steps

aten = torch.ops.aten

_STATIC_LIMIT = 2**16
"""Elements up to which a constant is computed while tracing; larger ones would bloat the compiled program."""

_TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)


@dataclasses.dataclass
class Survey:
    """The operations that a call made, and who serves them."""

    ops: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(op, `ours`, `torchax`, `view`, `random`) -> times."""
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
    """op -> why and where first."""


class Dispatch(TorchDispatchMode):
    """One traced call: its random key, its tensors, its submodules' names."""

    def __init__(
        self,
        rng: Rng | None,
        names: Mapping[int, str],
        off: frozenset[str] = frozenset(),
        survey: Survey | None = None,
        traced: bool = True,
    ):
        super().__init__()
        self.traced = traced
        self.survey = survey
        self._rng, self._draws = rng, 0
        self._names = names
        self._off = off
        self._real: dict[int, tuple[torch.Tensor, BridgeTensor]] = {}
        self._memory: dict[int, list[BridgeTensor]] = {}
        self._said: set[str] = set()
        self.failed: BridgeError | None = None
        """The first error, which the module's own code may have caught."""
        self._known_metas: dict[Any, Any] = {}

    def again(self) -> Dispatch:
        """For a later pass over the same module: its names and tensors, no random key."""
        other = Dispatch(None, self._names, self._off)
        other._real, other._memory = self._real, self._memory
        return other

    # Real tensors: the module's own, which stand for what the caller passed, and constants.

    def stand_in(self, real: torch.Tensor, tensor: BridgeTensor) -> None:
        """Whenever the code touches `real`, or a view of it, it gets `tensor`."""
        self._real[id(real)] = (real, tensor)
        self._memory.setdefault(real.untyped_storage()._cdata, []).append(tensor)

    def adopt(self, real: torch.Tensor) -> BridgeTensor:
        """The traced tensor for any tensor: itself, the stand-in for a state tensor, or a constant."""
        if isinstance(real, BridgeTensor):
            return real
        known = self._real.get(id(real))
        if known is not None:
            return known[1]
        owners = self._memory.get(real.untyped_storage()._cdata)
        if owners is not None:  # a view or `.data` of a state tensor, taken before the call
            owner = next((o for o in owners if elements(o._meta, positions(real)) is not None), None)
            if owner is None:
                raise self.error(
                    "a tensor shares memory with a parameter or buffer and reaches beyond it",
                    "register the whole tensor as one parameter or buffer, or clone it",
                )
            tensor = self.window(owner, real, differentiable=real.requires_grad)
        else:
            if real.requires_grad and real.grad_fn is not None:
                raise self.error("a tensor with a PyTorch graph", "pass it as an argument or make it a parameter")
            array = array_of(real)
            meta = blank(real.shape, real.stride(), real.dtype)
            tensor = fresh(array, meta, static=real.numel() <= _STATIC_LIMIT, live=False)
        self._real[id(real)] = (real, tensor)
        return tensor

    def window(self, owner: BridgeTensor, real: torch.Tensor, differentiable: bool) -> BridgeTensor:
        """What `real` shows of the owner of its memory."""
        with torch.set_grad_enabled(differentiable):
            return self._view(aten.as_strided.default, (owner, real.shape, real.stride(), real.storage_offset()), {})

    def _adopt_all(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.adopt(value)
        if type(value) in (list, tuple):
            return type(value)(self._adopt_all(v) for v in value)
        return value

    # The dispatcher.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        args = self._adopt_all(args)
        kwargs = {k: self._adopt_all(v) for k, v in kwargs.items()}
        try:
            return self._run(func, args, kwargs)
        except _TRACE_ERRORS as error:
            what = "makes a shape that depends on data" if shapes_by_data(func) else "needs a traced tensor's values"
            raise self.error(f"`{func.name()}` {what}", _SHAPE_REMEDY) from error
        except NotImplementedError as error:
            if self.survey is not None:
                return self._skip(func, args, kwargs, str(error))
            if shapes_by_data(func):
                raise self.error(f"`{func.name()}` makes a shape that depends on data", _SHAPE_REMEDY) from error
            raise self.error(f"`{func.name()}` has no translation ({error})", _UNSUPPORTED_REMEDY) from error

    def _skip(self, func: Any, args: tuple, kwargs: dict, why: str) -> Any:
        """While surveying: note it, and go on with zeros of the right shape."""
        assert self.survey is not None
        self.survey.unsupported.setdefault(func.name(), f"{why}, {where_in_module(self._names)}")
        metas = _meta_of(func, args, kwargs)
        zeros = [fresh(jnp.zeros(m.shape, jax_dtype(m.dtype)), m) for m in _listed(metas)]
        return type(metas)(zeros) if isinstance(metas, (tuple, list)) else zeros[0]

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is aten._local_scalar_dense.default or func is aten.is_nonzero.default:
            return self._scalar(func, args[0])
        ours = func in DECOMPOSITIONS and func.name() not in self._off
        if ours and (func not in LOWERINGS or draws_numbers(func, args, kwargs)):
            with self:
                return DECOMPOSITIONS[func](*args, **kwargs)
        if is_composite(func) and func not in LOWERINGS and func not in RANDOM:
            # Met inside a decomposition, where PyTorch's autograd layer no longer takes it apart.
            with self:
                return func.decompose(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        kind = kind_of(func)
        if kind == "view":
            return self._view(func, args, kwargs)
        if kind == "write":
            return self._write(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: tuple, kwargs: dict, like: BridgeTensor | None = None) -> Any:
        """A new tensor, or several. `like`: the tensor an in-place operation will write, which fixes the dtype."""
        inputs: list[BridgeTensor] = []
        arrays = _map(args, _value(inputs))
        array_kwargs = {k: _map(v, _value(inputs)) for k, v in kwargs.items()}
        random = RANDOM.get(func)
        lowering = None if random else self._lowering(func)
        if random is None and lowering is None:
            return self._decompose(func, args, kwargs)
        self._note(func, "random" if random else "ours" if lowering is LOWERINGS.get(func) else "torchax")
        metas = self._metas_of(func, args, kwargs) if like is None else like._meta
        outs = _listed(metas)
        static = random is None and all(t._cell.static for t in inputs)
        static = static and all(isinstance(o, torch.Tensor) and o.numel() <= _STATIC_LIMIT for o in outs)
        with jax.ensure_compile_time_eval() if static else contextlib.nullcontext():
            if random and isinstance(self._rng, list):
                values = self._rng[self._draws]
                self._draws += 1
            elif random:
                values = random(self._next_source(func, kwargs.get("generator")), metas, *arrays, **array_kwargs)
            else:
                assert lowering is not None
                values = _lowered(lowering, arrays, array_kwargs)
            if not isinstance(metas, (tuple, list)):
                values = (values,)
            elif len(values) != len(outs):
                raise NotImplementedError(f"its lowering gives {len(values)} results, PyTorch {len(outs)}")
            tracked = random is None and torch.is_grad_enabled() and any(t._cell.tracked for t in inputs)
            live = any(t._cell.live for t in inputs)
            stopped = live and (random is not None or not torch.is_grad_enabled())
            results = tuple(
                self._result(func, value, meta, tracked, static, live, stopped)
                for value, meta in zip(values, outs, strict=True)
            )
        return type(metas)(results) if isinstance(metas, (tuple, list)) else results[0]

    def _metas_of(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`_meta_of`, asked once for each operation on arguments of these shapes: recursion asks again and again."""
        key = func, _signature(args), _signature(tuple(kwargs.items())), torch.get_default_dtype()
        try:
            return self._known_metas[key]
        except KeyError:
            found = self._known_metas[key] = _meta_of(func, args, kwargs)
            return found
        except TypeError:  # an argument that has no hash
            return _meta_of(func, args, kwargs)

    def _result(self, func: Any, value: Any, meta: Any, tracked: bool, static: bool, live: bool, stopped: bool) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta if value is None else value
        value = jnp.asarray(value)
        if value.shape != tuple(meta.shape):
            raise self.error(
                f"the lowering of `{func.name()}` gave shape {value.shape}, PyTorch gives {tuple(meta.shape)}",
                "this is a defect of the lowering; please report it",
            )
        if value.dtype != jax_dtype(meta.dtype):
            value = value.astype(jax_dtype(meta.dtype))
        self._notice_narrowing(meta.dtype, value)
        if stopped:
            value, live = stop_gradient(value), False
        free = differentiable(meta.dtype)
        return fresh(value, meta, tracked=tracked and free, static=static, live=live and free)

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        base: BridgeTensor = args[0]
        metas = _meta_of_strided(base, *args[1:], **kwargs) if func is aten.as_strided.default else None
        metas = _meta_of(func, args, kwargs) if metas is None else metas
        outs = list(_listed(metas))
        self._note(func, "view")
        steps = view_steps(func, base, args, kwargs, outs)
        if func is aten.as_strided.default:  # counts in memory: starts over from the cell's base
            base = BridgeTensor(base._cell, base._meta)
        tracks = torch.is_grad_enabled() and func is not aten.detach.default
        made = [as_view(base, o, s, differentiable=tracks) for o, s in zip(outs, steps, strict=True)]
        return made if isinstance(metas, (tuple, list)) else made[0]

    def _reshape_in_place(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`transpose_`, `squeeze_` and their like: the same tensor object becomes a view of what it was."""
        target = args[0]
        view = self._view(functional_op(func), args, kwargs)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            func(*args, **kwargs)  # PyTorch's own record of the shape
        target.become(view)
        return target

    def _write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        target, functional, args, kwargs = functional_of(func, args, kwargs)
        inputs: list[BridgeTensor] = []
        _map((args, *kwargs.values()), _value(inputs))
        self._check_write(func, target, args, kwargs)
        source = self._compute(functional, args, kwargs, like=target)
        if not isinstance(source, BridgeTensor) or source.shape != target.shape:
            raise NotImplementedError("an in-place operation that changes the shape")
        value = source.value.astype(jax_dtype(target.dtype))
        tracked = any(t._cell.tracked for t in inputs if t is not target) or source._cell.tracked
        target.write(
            value,
            tracked=tracked,
            grad_enabled=torch.is_grad_enabled(),
            static=source._cell.static,
            live=source._cell.live,
        )
        return target

    def _check_write(self, func: Any, target: BridgeTensor, args: tuple, kwargs: dict) -> None:
        """PyTorch's own verdict on the write (broadcasting, dtype), on the meta device."""
        if func._schema.name.endswith("_"):
            scratch = blank(target.shape, target._meta.stride(), target.dtype)
            kwargs = _placed_on_meta({k: _map(v, _twin) for k, v in kwargs.items()})
            with torch._C._DisableTorchDispatch():
                func(scratch, *_map(args[1:], _twin), **kwargs)

    def _scalar(self, func: Any, tensor: BridgeTensor) -> Any:
        value = tensor.value
        if isinstance(value, Tracer):
            raise self.error(
                "Python code asks for the value of a traced tensor (a branch, `.item()`, `int()` or a loop bound)",
                "use torch.where, or pass the number as a Python argument that is static under jit",
            )
        return bool(value) if func is aten.is_nonzero.default else value.item()

    def _note(self, func: Any, server: str) -> None:
        if self.survey is not None:
            self.survey.ops[func.name(), server] += 1

    def _lowering(self, func: Any) -> Callable | None:
        if func.name() not in self._off:
            ours = LOWERINGS.get(func)
            if ours is not None:
                return ours
        return torchax_lowering(func)

    def _decompose(self, func: Any, args: tuple, kwargs: dict) -> Any:
        made_of = decomposition(func)
        if made_of is None:
            raise NotImplementedError("neither a lowering nor a decomposition")
        with self:
            result = made_of(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError("its decomposition does not take these arguments")
        return result

    def _next_source(self, func: Any, generator: torch.Generator | None) -> Source:
        if self._rng is None:
            raise self.error(
                f"`{func.name()}` draws random numbers but the call has no key",
                "pass rng=jax.random.key(…), or train=False if the module draws in training only",
            )
        assert not isinstance(self._rng, list)
        self._draws += 1
        own = () if generator is None else (generator.initial_seed() % 2**32,)
        return Source(self._rng, (*own, self._draws))

    def _notice_narrowing(self, dtype: torch.dtype, value: jax.Array) -> None:
        if dtype in (torch.float64, torch.complex128) and value.dtype.itemsize * 8 < torch.finfo(dtype).bits:
            place = where_in_module(self._names)
            if place not in self._said:
                self._said.add(place)
                text = f"{dtype} is computed as {value.dtype} {place}: set JAX_ENABLE_X64=1 for full precision"
                warnings.warn(BridgeWarning(text), stacklevel=2)

    def error(self, what: str, remedy: str) -> BridgeError:
        error = BridgeError(f"{what} {where_in_module(self._names)}. Remedy: {remedy}.")
        self.failed = self.failed or error
        return error


_SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
_UNSUPPORTED_REMEDY = "write it with supported operations, or add a lowering to bridge.LOWERINGS"


class Functions(TorchFunctionMode):
    """What has to be caught before PyTorch breaks it up, or never reaches its dispatcher."""

    def __init__(self, dispatch: Dispatch):
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = FUNCTIONS.get(func)
        if op is not None and not torch.is_autocast_enabled("cpu") and op.name() not in self._dispatch._off:
            return self._dispatch.__torch_dispatch__(op, types, args, kwargs)
        if func is F.dropout and any(isinstance(v, BridgeTensor) for v in (*args[1:], *kwargs.values())):
            return _dropout_by_traced_number(*args, **kwargs)
        if func is _DATA_GET and not isinstance(args[0], BridgeTensor):
            return self._dispatch.adopt(args[0]).detach()  # C++ would hand out the real memory
        if func in _HOOKS:
            raise self._dispatch.error(f"`{func.__name__}` asks PyTorch's engine for a gradient", _HOOK_REMEDY)
        if func in _DETACH_IN_PLACE:  # PyTorch's autograd layer would answer it by itself
            tensor = self._dispatch.adopt(args[0])
            tensor.detach_in_place()
            return tensor
        if kwargs.get("requires_grad") is True and func not in _REQUIRES_GRAD:  # `torch.zeros(3, requires_grad=True)`
            return self._dispatch.adopt(func(*args, **(kwargs | {"requires_grad": False}))).requires_grad_()
        return func(*args, **kwargs)


_HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)
_HOOK_REMEDY = "write what the hook does as the backward of a torch.autograd.Function, or leave it out"
_DETACH_IN_PLACE = (torch.Tensor.detach_, torch.detach_)
_REQUIRES_GRAD = (torch.Tensor.requires_grad_,)
_DATA_GET = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]


def _dropout_by_traced_number(x: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """PyTorch insists on a Python number for the probability, which an override is not."""
    if not training:
        return x
    kept = torch.where(torch.rand_like(x) < p, 0, x / (1 - p))  # a share of 1 drops the division by 0 with it
    return x.copy_(kept) if inplace else kept


def array_of(tensor: torch.Tensor) -> jax.Array:
    """A copy of a real tensor as a JAX array; later writes to the tensor do not reach it."""
    # Below every mode, and not staged under jit: reading memory is no operation of the module.
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), jax.ensure_compile_time_eval():
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            return jnp.array(tensor.to(torch.float32).numpy(), jnp.bfloat16)
        return jnp.array(tensor.numpy(), jax_dtype(tensor.dtype))


def _listed(values: Any) -> tuple | list:
    return values if isinstance(values, (tuple, list)) else (values,)


def _map(value: Any, leaf: Callable[[BridgeTensor], Any]) -> Any:
    if isinstance(value, BridgeTensor):
        return leaf(value)
    if type(value) in (list, tuple):
        return type(value)(_map(v, leaf) for v in value)
    return value


def _value(seen: list[BridgeTensor]) -> Callable[[BridgeTensor], jax.Array]:
    def leaf(tensor: BridgeTensor) -> jax.Array:
        seen.append(tensor)
        return tensor.value

    return leaf


def _lowered(lowering: Callable, args: tuple, kwargs: dict) -> Any:
    """What the lowering gives; one that was not written for these arguments is as good as none."""
    try:
        return lowering(*args, **kwargs)
    except _TRACE_ERRORS:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise NotImplementedError(f"its lowering does not take these arguments: {said[0]}") from error


def _signature(value: Any) -> Any:
    """What of an argument decides the shape, dtype and strides of a result. `True` and `1` are not the same."""
    if isinstance(value, BridgeTensor):
        meta = value._meta
        return meta.shape, meta.stride(), meta.dtype
    if type(value) in (list, tuple):
        return tuple(map(_signature, value))
    return type(value), value


def _twin(tensor: BridgeTensor) -> torch.Tensor:
    return tensor._meta


def _meta_of_strided(base: BridgeTensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """Without PyTorch's check: the twin of a view of memory knows the view's own memory only."""
    offset = base._meta.storage_offset() if storage_offset is None else storage_offset
    return blank(size, stride, base.dtype, int(offset))


def _placed_on_meta(kwargs: dict) -> dict:
    return {k: "meta" if k == "device" else v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}


def _meta_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """What PyTorch says of the result: shapes, dtypes, strides."""
    kwargs = _placed_on_meta({k: _map(v, _twin) for k, v in kwargs.items()})
    if any(a.name == "device" for a in func._schema.arguments):
        kwargs["device"] = "meta"
    if "generator" in func._overloadname:
        kwargs["generator"] = None
    with torch._C._DisableTorchDispatch():
        answer = METAS.get(func) or func
        return answer(*_map(args, _twin), **kwargs)


@functools.cache
class _Active(threading.local):
    dispatch: Dispatch | None = None


_ACTIVE = _Active()


def active() -> Dispatch | None:
    """The traced call that this thread is in."""
    return _ACTIVE.dispatch


@contextlib.contextmanager
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Run the code under it through the bridge. Modes are thread-local: other threads' PyTorch work is not touched.

    An error of the bridge leaves it even where the code caught it: what the code does then is not what it does in
    PyTorch.
    """
    before, _ACTIVE.dispatch = _ACTIVE.dispatch, dispatch
    try:
        with dispatch, Functions(dispatch):
            yield
    except Exception as error:
        if dispatch.failed is not None and error is not dispatch.failed:
            raise dispatch.failed from error
        raise
    else:
        if dispatch.failed is not None:
            raise dispatch.failed
    finally:
        _ACTIVE.dispatch = before
