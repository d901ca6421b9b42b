"""Every torch operation of a traced call: PyTorch decides shape, dtype and aliasing, a JAX lowering the values.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations, and for each one of four things happens: it makes a view, it
draws random numbers, it writes in place, or it computes a new tensor. Lowerings are ours (`lowerings/`) or torchax's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.adoption import Adopted
from bridge.argument_checks import ORDINARY, raise_if_not_cast, raise_if_refused
from bridge.arrays import array_of, jax_dtype, tensor_of
from bridge.cells import differentiable, stop_gradient
from bridge.errors import BridgeError, BridgeWarning, where_in_module
from bridge.exception_handlers import caught_by_the_module
from bridge.generators import draw, generator_of
from bridge.integers import REMEDY, Integers, RangeError, checked, fitting
from bridge.internals import (
    DispatchMode,
    HigherOrderOperator,
    Tracer,
    below_autograd,
    below_modes,
    decomposition,
    is_composite,
    returns,
    schema_name,
    torchax_lowering,
)
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.lowerings.no_derivative import NO_DERIVATIVE, apply_rule
from bridge.metas import MetaCache, check_write, listed, map_tensors, meta_of, meta_of_strided
from bridge.operations import (
    draws_numbers,
    each_of,
    functional_of,
    functional_op,
    is_random,
    kind_of,
    shapes_by_data,
    takes_dimension,
    written_arguments,
)
from bridge.precision import precision_for, precision_is_given
from bridge.randomness import RANDOM, Rng, Source
from bridge.recording import NO_GRAPH
from bridge.tensors import BridgeTensor, as_view, fresh
from bridge.value_checks import answer_to_a_check
from bridge.views import view_steps

aten = torch.ops.aten

_TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)


_OF_THE_RUN = (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError)
"""What a lowering raises without a defect of its own: `jax.debug_nans`, and devices that are out of memory."""


@dataclasses.dataclass
class Survey:
    """The operations that a call made, and who serves them."""

    ops: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(op, `ours`, `torchax`, `view`, `random`) -> times."""
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
    """op -> why and where first."""


class Dispatch(DispatchMode):
    """One traced call: its random key, its tensors, its submodules' names."""

    supports_higher_order_operators = True  # comes to `__torch_dispatch__`, and is refused by name

    def __init__(
        self,
        rng: Rng | None,
        names: Mapping[int, str],
        off: frozenset[str] = frozenset(),
        survey: Survey | None = None,
        traced: bool = True,
        int64: str = "refuse",
        recording: int = NO_GRAPH,
    ):
        super().__init__()
        self.traced = traced
        self.recording = recording
        self.state: list[BridgeTensor] = []
        """What stands for parameters and buffers."""
        self.survey = survey
        self._rng, self._draws = rng, 0
        self._names = names
        self._off = off
        self._adopted = Adopted()
        self._said: set[str] = set()
        self._nested = 0
        """In how many decompositions the operation at hand is: PyTorch has no part in what those are made of."""
        self.failed: BridgeError | None = None
        """The first error, which the module's own code may have caught."""
        self._metas_of = MetaCache()
        self._products_of_pytorch = not precision_is_given()
        self._int64 = int64
        self.integers = Integers() if checked(int64) else None

    def again(self, recording: int) -> Dispatch:
        """For a later pass over the same module: its names and tensors, no random key."""
        other = Dispatch(None, self._names, self._off, int64=self._int64, recording=recording)
        other._adopted, other.state = self._adopted, self.state
        other._products_of_pytorch = self._products_of_pytorch
        return other

    # Real tensors.

    def stand_in(self, real: torch.Tensor, tensor: BridgeTensor) -> None:
        """Whenever the code touches `real`, or a view of it, it gets `tensor`."""
        self._adopted.stand_in(real, tensor)

    def adopt(self, real: torch.Tensor) -> BridgeTensor:
        """The traced tensor for any tensor: itself, the stand-in for a state tensor, or a constant."""
        tensor = self._adopted.adopt(self, real)
        if self.integers is not None and tensor is not real:
            try:
                self.integers.constant(real, tensor)
            except RangeError as error:
                what = f"a constant holds 64-bit integers that 32 bits do not hold: they {error}"
                raise self.error(what, REMEDY) from None
        return tensor

    def take_over(self, real: torch.Tensor) -> BridgeTensor:
        """As `adopt`; from here on `real` and whatever shares its memory is traced."""
        return self._adopted.take_over(self, real)

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether it is, or stands for, a tensor of the bridge; all others are plain PyTorch."""
        return self._adopted.is_traced(tensor)

    def may_write(self, real: torch.Tensor) -> bool:
        """Whether the memory of the real tensor is the call's own."""
        return self._adopted.may_write(real)

    def _adopt_all(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.adopt(value)
        if type(value) in (list, tuple):
            return type(value)(self._adopt_all(v) for v in value)
        return value

    # The dispatcher.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise self.error(f"`{func.name()}` takes functions, which has no translation", _UNSUPPORTED_REMEDY)
        try:
            if func not in ORDINARY:
                raise_if_refused(func, args, kwargs, nested=bool(self._nested))
            return self._translated(func, args, kwargs)
        except Exception as error:
            if not isinstance(error, BridgeError) and not hasattr(error, "__notes__"):
                error.add_note(where_in_module(self._names))  # to PyTorch's own message
            raise

    def _translated(self, func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            return self._run(func, args, kwargs)
        except _TRACE_ERRORS as error:
            what = "makes a shape that depends on data" if shapes_by_data(func) else "needs a traced tensor's values"
            raise self.error(f"`{func.name()}` {what}", _SHAPE_REMEDY) from error
        except NotImplementedError as error:
            return self._untranslated(func, args, kwargs, error)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args = self._adopted.without_values(func, args, kwargs) or args
        if self._is_constant(func, args, kwargs):
            return self._in_pytorch(func, args, kwargs)
        rule = NO_DERIVATIVE.get(func)
        if rule is not None and not self._nested:
            return apply_rule(rule, self.replay, func, args, kwargs, lambda: where_in_module(self._names))
        return self.replay(func, args, kwargs)

    def _untranslated(self, func: Any, args: tuple, kwargs: dict, error: NotImplementedError) -> Any:
        if self.survey is not None:
            return self._skip(func, args, kwargs, str(error))
        if shapes_by_data(func):
            raise self.error(f"`{func.name()}` makes a shape that depends on data", _SHAPE_REMEDY) from error
        if isinstance(error, _LoweringError):
            raise self.error(f"the lowering of `{func.name()}` failed ({error})", _DEFECT_REMEDY) from error
        remedy = _NESTED_REMEDY if "nested" in func.name() else _UNSUPPORTED_REMEDY
        raise self.error(f"`{func.name()}` has no translation ({error})", remedy) from error

    @contextlib.contextmanager
    def _taking_apart(self) -> Iterator[None]:
        """Code that makes one operation of others, which come here in turn."""
        self._nested += 1
        try:
            with self:
                yield
        finally:
            self._nested -= 1

    def _is_constant(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Whether the result depends on no input, on no parameter, buffer or key."""
        if self._adopted.any_traced(args, kwargs):
            return False
        if is_random(func):
            return self._generator(func, kwargs) is not None
        return not self._adopted.is_large(func, args, kwargs)

    def _generator(self, func: Any, kwargs: dict) -> torch.Generator | None:
        """The seeded generator that the operation draws from."""
        try:
            return generator_of(kwargs.get("generator"))
        except LookupError:
            raise self.error(
                f"`{func.name()}` draws from a torch.Generator that was made before the call, so each call would draw "
                "other numbers in PyTorch",
                "seed it in the call, or leave the generator out and pass rng=jax.random.key(…)",
            ) from None

    def _in_pytorch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on constants."""
        for target in written_arguments(func, args, kwargs):
            if not self.may_write(target):
                self.take_over(target)  # which is an error
        if is_random(func):
            generator = self._generator(func, kwargs)
            assert generator is not None
            return self._adopted.compute(lambda *a, **k: draw(generator, func, a, k), func, args, kwargs)
        return self._adopted.compute(func, func, args, kwargs)

    def _skip(self, func: Any, args: tuple, kwargs: dict, why: str) -> Any:
        """While surveying: note it, and go on with zeros of the right shape."""
        assert self.survey is not None
        self.survey.unsupported.setdefault(func.name(), f"{why}, {where_in_module(self._names)}")
        metas = meta_of(func, args, kwargs)
        zeros = [fresh(jnp.zeros(m.shape, jax_dtype(m.dtype)), m) for m in listed(metas)]
        return type(metas)(zeros) if isinstance(metas, (tuple, list)) else zeros[0]

    def replay(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on traced tensors."""
        by_values = _DECIDED_BY_VALUES.get(func)
        if by_values is not None:
            return by_values(self, func, self.adopt(args[0]), *args[1:], **kwargs)
        ours = func in DECOMPOSITIONS and not self.is_off(func)
        if ours and (func not in LOWERINGS or draws_numbers(func, args, kwargs)):
            with self._taking_apart():
                return DECOMPOSITIONS[func](*args, **kwargs)
        if is_composite(func) and func not in LOWERINGS and func not in RANDOM:
            # Met inside a decomposition, where PyTorch's autograd layer no longer takes it apart.
            with self._taking_apart():
                return func.decompose(*args, **kwargs)
        for target in written_arguments(func, args, kwargs):
            self.take_over(target)
        args = self._adopt_all(args)
        kwargs = {k: self._adopt_all(v) for k, v in kwargs.items()}
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        of_its_kind = _BY_KIND.get(kind_of(func))
        if of_its_kind is not None:
            return of_its_kind(self, func, args, kwargs)
        result = self._compute(func, args, kwargs)
        if kwargs.get("check_errors"):
            name = schema_name(func).removeprefix("aten::").lstrip("_").replace("linalg_", "linalg.")
            self._check_matrix(func, result[-1], name, is_matrix=args[0].dim() == 2)
        return result

    def _compute(self, func: Any, args: tuple, kwargs: dict, like: BridgeTensor | None = None) -> Any:
        """A new tensor, or several. `like`: the tensor an in-place operation will write, which fixes the dtype."""
        inputs: list[BridgeTensor] = []
        arrays = map_tensors(args, _value(inputs))
        array_kwargs = {k: map_tensors(v, _value(inputs)) for k, v in kwargs.items()}
        arrays, array_kwargs = fitting(func, arrays, array_kwargs, any(differentiable(t.dtype) for t in inputs))
        random = RANDOM.get(func)
        lowering = None if random else self._lowering(func)
        if random is None and lowering is None:
            return self._decompose(func, args, kwargs)
        self._note(func, "random" if random else "ours" if lowering is LOWERINGS.get(func) else "torchax")
        metas = self._metas_of(func, args, kwargs) if like is None else like._meta
        outs = listed(metas)
        bounds = self._bounds(func, args, kwargs, outs)
        if random:
            values = self._drawn(func, args, kwargs, lambda source: random(source, metas, *arrays, **array_kwargs))
        else:
            assert lowering is not None
            with precision_for((t.value for t in inputs), self._products_of_pytorch):
                if inputs and not inputs[0].dim() and takes_dimension(func):
                    values = _lowered_in_one_dimension(lowering, arrays, array_kwargs, metas)
                else:
                    values = _lowered(lowering, arrays, array_kwargs)
        if not isinstance(metas, (tuple, list)):
            values = (values,)
        elif len(values) != len(outs):
            raise NotImplementedError(f"its lowering gives {len(values)} results, PyTorch {len(outs)}")
        tracked = random is None and torch.is_grad_enabled() and any(t._cell.tracked for t in inputs)
        live = any(t._cell.live for t in inputs)
        stopped = live and (random is not None or not torch.is_grad_enabled())
        results = tuple(
            self._result(func, value, meta, tracked, live, stopped) for value, meta in zip(values, outs, strict=True)
        )
        if self.integers is not None and bounds is not None:
            self.integers.note(results, bounds)
        return type(metas)(results) if isinstance(metas, (tuple, list)) else results[0]

    def _bounds(self, func: Any, args: tuple, kwargs: dict, outs: Any) -> list | None:
        """What 64-bit integers among the results may be, where JAX stores them in 32 bits."""
        if self.integers is None:
            return None
        try:
            return self.integers.bounds(func, args, kwargs, outs)
        except RangeError as error:
            what = f"`{func.name()}` makes or takes 64-bit integers that 32 bits do not hold: they {error}"
            if self.survey is None:
                raise self.error(what, REMEDY) from None
            self.survey.unsupported.setdefault(func.name(), f"{what}, {where_in_module(self._names)}")
            return None

    def _result(self, func: Any, value: Any, meta: Any, tracked: bool, live: bool, stopped: bool) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta if value is None else value
        value = jnp.asarray(value)
        if value.shape != tuple(meta.shape):
            raise self.error(
                f"the lowering of `{func.name()}` gave shape {value.shape}, PyTorch gives {tuple(meta.shape)}",
                _DEFECT_REMEDY,
            )
        if value.dtype != jax_dtype(meta.dtype):
            value = value.astype(jax_dtype(meta.dtype))
        self._notice_narrowing(meta.dtype, value)
        if stopped:
            value, live = stop_gradient(value), False
        free = differentiable(meta.dtype)
        return fresh(value, meta, tracked=tracked and free, live=live and free)

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        base: BridgeTensor = args[0]
        metas = meta_of_strided(base, *args[1:], **kwargs) if func is aten.as_strided.default else None
        metas = meta_of(func, args, kwargs) if metas is None else metas
        outs = list(listed(metas))
        self._note(func, "view")
        steps = view_steps(func, base, args, kwargs, outs)
        if func is aten.as_strided.default:  # counts in memory: starts over from the cell's base
            base = BridgeTensor(base._cell, base._meta)
        tracks = torch.is_grad_enabled() and func is not aten.detach.default
        if func is aten.detach.default and self.recording and not below_autograd():
            tracks = True  # no operation: PyTorch's graph keeps a result for its backward
        made = [as_view(base, o, s, differentiable=tracks) for o, s in zip(outs, steps, strict=True)]
        return made if isinstance(metas, (tuple, list)) else made[0]

    def _each(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on lists of tensors, such as `_foreach_add`."""
        with self:
            results = [one(*mine, **keywords) for one, mine, keywords in each_of(func, args, kwargs)]
        return results if returns(func) else None

    def _reshape_in_place(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`transpose_`, `squeeze_` and their like: the same tensor object becomes a view of what it was."""
        target = args[0]
        if schema_name(func) == "aten::set_":
            raise NotImplementedError("it gives a tensor the memory of another one")
        _refuse_write_into_leaf(target)
        view = self._view(functional_op(func), args, kwargs)
        with below_modes():
            func(*args, **kwargs)  # PyTorch's own record of the shape
        target.become(view)
        return target

    def _write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        target, functional, args, kwargs = functional_of(func, args, kwargs)
        if not isinstance(target, torch.Tensor):
            raise NotImplementedError("it writes a list of tensors; write them one by one")
        inputs: list[BridgeTensor] = []
        map_tensors((args, *kwargs.values()), _value(inputs))
        _refuse_write_into_leaf(target)
        check_write(func, target, args, kwargs)
        raise_if_not_cast(func, args, kwargs)
        source = self._compute(functional, args, kwargs, like=target)
        if isinstance(source, torch.Tensor):  # a constant where what was written there does not count, as in `zero_`
            source = self.adopt(source)
        if not isinstance(source, BridgeTensor) or source.shape != target.shape:
            raise NotImplementedError("an in-place operation that changes the shape")
        value = source.value.astype(jax_dtype(target.dtype))
        tracked = any(t._cell.tracked for t in inputs if t is not target) or source._cell.tracked
        target.write(
            value,
            tracked=tracked,
            grad_enabled=torch.is_grad_enabled(),
            live=source._cell.live,
        )
        if self.integers is not None:
            self.integers.written(target, source)
        return target

    def _scalar(self, func: Any, tensor: BridgeTensor) -> Any:
        value = tensor.value
        if isinstance(value, Tracer):
            answer = answer_to_a_check()
            if answer is not None:
                what = "the values of a distribution" if answer else "the variances"
                self.warn(f"{what} are traced and not checked", "validate_args=False" if answer else "")
                return answer
            raise self.error(
                "Python code asks for the value of a traced tensor (a branch, `.item()`, `int()` or a loop bound)",
                "use torch.where, or pass the number as a Python argument that is static under jit",
            )
        return bool(value) if func is aten.is_nonzero.default else value.item()

    def _check_matrix(self, _func: Any, info: BridgeTensor, api_name: str, *, is_matrix: bool) -> None:
        """Raise what PyTorch raises for a singular matrix, say; where values are traced, results are NaN instead."""
        if not isinstance(info.value, Tracer):
            with below_modes():
                aten._linalg_check_errors.default(tensor_of(info.value), api_name, is_matrix=is_matrix)
        elif caught_by_the_module(torch.linalg.LinAlgError):
            name = f"torch.{api_name.removeprefix('torch.')}"
            raise self.error(
                f"the module catches the error of `{name}` for some matrices, which traced values never raise",
                "choose by the info of torch.linalg.cholesky_ex, inv_ex or solve_ex with torch.where",
            )

    def is_off(self, op: Any) -> bool:
        """Whether the bridge's own lowering of it is switched off."""
        return op.name() in self._off

    def _note(self, func: Any, server: str) -> None:
        if self.survey is not None:
            self.survey.ops[func.name(), server] += 1

    def _lowering(self, func: Any) -> Callable | None:
        if not self.is_off(func):
            ours = LOWERINGS.get(func)
            if ours is not None:
                return ours
        return torchax_lowering(func)

    def _decompose(self, func: Any, args: tuple, kwargs: dict) -> Any:
        made_of = decomposition(func)
        if made_of is None:
            raise NotImplementedError("neither a lowering nor a decomposition")
        with self._taking_apart():
            result = made_of(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError("its decomposition does not take these arguments")
        return result

    def _drawn(self, func: Any, args: tuple, kwargs: dict, by_key: Callable[[Source], jax.Array]) -> Any:
        """Random numbers: of a seeded generator, of a recorded call, or of the key."""
        generator = self._generator(func, kwargs)
        if generator is not None:
            return array_of(draw(generator, func, args, kwargs))
        self._draws += 1
        if isinstance(self._rng, list):
            return self._rng[self._draws - 1]
        if self._rng is None:
            raise self.error(
                f"`{func.name()}` draws random numbers but the call has no key",
                "pass rng=jax.random.key(…), or train=False if the module draws in training only",
            )
        return by_key(Source(self._rng, (self._draws,)))

    def _notice_narrowing(self, dtype: torch.dtype, value: jax.Array) -> None:
        if dtype in (torch.float64, torch.complex128) and value.dtype.itemsize < dtype.itemsize:
            self.warn(f"{dtype} is computed as {value.dtype}", "set JAX_ENABLE_X64=1 for full precision")

    def warn(self, what: str, remedy: str = "") -> None:
        """Once for each place."""
        place = where_in_module(self._names)
        if place not in self._said:
            self._said.add(place)
            warnings.warn(BridgeWarning(f"{what} {place}" + (remedy and f": {remedy}")), stacklevel=2)

    def error(self, what: str, remedy: str, cause: BaseException | None = None) -> BridgeError:
        """The error that the call ends with; it names the place where `cause` was raised, if there is one."""
        error = BridgeError(f"{what} {where_in_module(self._names, cause)}. Remedy: {remedy}.")
        self.failed = self.failed or error
        return error


_BY_KIND = {"view": Dispatch._view, "write": Dispatch._write, "each": Dispatch._each}
_DECIDED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: Dispatch._scalar,
    aten.is_nonzero.default: Dispatch._scalar,
    aten._linalg_check_errors.default: Dispatch._check_matrix,
}
"""Operations that give PyTorch's Python code a number, or raise."""


_SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
_DEFECT_REMEDY = "this is a defect of the lowering, please report it; `without_lowerings` switches one of ours off"
_UNSUPPORTED_REMEDY = "write it with supported operations, or add a lowering to bridge.LOWERINGS"

_NESTED_REMEDY = (
    "JAX has no nested tensors; make the TransformerEncoder with enable_nested_tensor=False, or call "
    "torch.backends.mha.set_fastpath_enabled(False): PyTorch then computes rows of padding instead of filling in zeros"
)


def _refuse_write_into_leaf(target: BridgeTensor) -> None:
    """Raise what PyTorch raises for a write with gradients on: the leaf would no longer be one."""
    if target.requires_grad and target._cell.leaf is not None and torch.is_grad_enabled():
        what = "a leaf Variable" if target.is_leaf else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def _value(seen: list[BridgeTensor]) -> Callable[[BridgeTensor], jax.Array]:
    def leaf(tensor: BridgeTensor) -> jax.Array:
        seen.append(tensor)
        return tensor.value

    return leaf


class _LoweringError(NotImplementedError):
    """A lowering raised for arguments that it takes: its own defect."""


def _lowered(lowering: Callable, args: tuple, kwargs: dict) -> Any:
    """What the lowering gives. Raises `NotImplementedError` if it was not written for these arguments."""
    try:
        return lowering(*args, **kwargs)
    except (*_TRACE_ERRORS, *_OF_THE_RUN, NotImplementedError, BridgeError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        if not _takes(lowering, args, kwargs):
            raise NotImplementedError(f"its lowering does not take these arguments: {lines[0]}") from error
        raise _LoweringError(f"{type(error).__name__}: {lines[0]}") from error


def _lowered_in_one_dimension(lowering: Callable, args: tuple, kwargs: dict, metas: Any) -> Any:
    """As `_lowered`, of tensors without dimensions: PyTorch lets them have one, of size 1, wherever one is named."""

    def lift(value: Any) -> Any:
        return jnp.reshape(value, 1) if isinstance(value, jax.Array) and not value.ndim else value

    def drop(value: Any, meta: Any) -> Any:
        fits = isinstance(meta, torch.Tensor) and jnp.size(value) == meta.numel()
        return jnp.reshape(value, meta.shape) if fits else value

    args, kwargs = jax.tree.map(lift, (args, kwargs))
    values = _lowered(lowering, args, kwargs)
    return tuple(map(drop, values, metas)) if isinstance(metas, (tuple, list)) else drop(values, metas)


def _takes(lowering: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether the arguments fit the lowering's signature."""
    try:
        inspect.signature(lowering).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a Python signature
        pass
    return True
