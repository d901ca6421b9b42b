"""Every torch operation of a traced call: PyTorch decides shape, dtype and aliasing, a JAX lowering the values.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations, and for each one of four things happens: it makes a view or
writes in place (`aliasing.py`), it draws random numbers (`draws.py`), or it computes a new tensor (`computation.py`).
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    HigherOrderOperator,
    UncompiledDispatchMode,
    is_composite,
    is_without_memory,
    returns,
    schema_name,
)
from bridge.adoption import Adopted
from bridge.aliasing import GIVES_MEMORY, make_view, reshape_in_place, write_in_place
from bridge.argument_checks import ORDINARY, raise_if_refused
from bridge.computation import compute
from bridge.draws import seeded_generator
from bridge.errors import BridgeError, BridgeWarning, where_in_module
from bridge.generators import draw
from bridge.integers import REMEDY, Integers, RangeError, checked
from bridge.kernel_checks import as_said_by_kernel
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.lowerings.no_derivative import NO_DERIVATIVE, apply_rule
from bridge.metas import MetaCache
from bridge.operations import draws_numbers, each_of, is_random, kind_of, shapes_by_data, written_arguments
from bridge.precision import precision_is_given
from bridge.randomness import RANDOM, Rng
from bridge.recording import NO_GRAPH
from bridge.tensors import BridgeTensor
from bridge.traced_positions import Positions
from bridge.untranslated import SHAPE_REMEDY, TRACE_ERRORS, UNSUPPORTED_REMEDY, Survey, of_functions, untranslated
from bridge.value_checks import check_matrix, number_of

aten = torch.ops.aten


class Dispatch(UncompiledDispatchMode):
    """One traced call: its random key, its tensors, its submodules' names."""

    supports_higher_order_operators = True  # comes to `__torch_dispatch__`, and is refused by name

    def __init__(
        self,
        rng: Rng | None,
        names: Mapping[int, str],
        off: frozenset[str] = frozenset(),
        lowerings: Mapping[str, Callable] = types.MappingProxyType({}),
        survey: Survey | None = None,
        traced: bool = True,
        int64: str = "refuse",
        recording: int = NO_GRAPH,
        functions: Mapping[str, Callable] = types.MappingProxyType({}),
    ):
        super().__init__()
        self.functions = functions
        """Names of Python functions -> what the calls of this module run in their place."""
        self.traced = traced
        self.recording = recording
        self.state: list[BridgeTensor] = []
        """What stands for parameters and buffers."""
        self.contexts: list[tuple[str, Any, Any]] = []
        """What the `torch.autograd.Function`s of the call keep, by their names."""
        self.survey = survey
        self.rng, self.draws = rng, 0
        self.is_backward = False
        self._names = names
        self._off, self._lowerings = off, lowerings
        self._adopted = Adopted()
        self._said: set[str] = set()
        self._nested = 0
        """In how many decompositions the operation at hand is: PyTorch has no part in what those are made of."""
        self.failed: BridgeError | None = None
        """The first error, which the module's own code may have caught."""
        self.metas_of = MetaCache()
        self.products_of_pytorch = not precision_is_given()
        self._int64 = int64
        self.integers = Integers() if checked(int64) else None
        self.positions = Positions()
        self.is_istft = False
        """Whether the operations are those of `torch.istft`."""
        self.entry: types.FrameType | None = None
        """The frame in which the bridge runs the module's code, while it does."""

    def again(self, recording: int) -> Dispatch:
        """For a later pass over the same module: its names and tensors, no random key."""
        other = Dispatch(
            None,
            self._names,
            self._off,
            self._lowerings,
            int64=self._int64,
            recording=recording,
            functions=self.functions,
        )
        other.is_backward = True
        other._adopted, other.state = self._adopted, self.state
        other.products_of_pytorch = self.products_of_pytorch
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

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that a traced one stands for; None if there is none."""
        return self._adopted.real_of(tensor)

    def may_write(self, real: torch.Tensor) -> bool:
        """Whether the memory of the real tensor is the call's own."""
        return self._adopted.may_write(real)

    def _adopt_all(self, value: Any, *, constants: bool = True) -> Any:
        """`value` with the traced tensors of those in it, `constants` or only of those that are traced."""
        if isinstance(value, torch.Tensor):
            return self.adopt(value) if constants or self.is_traced(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._adopt_all(v, constants=constants) for v in value)
        return value

    # The dispatcher.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise self.error(*of_functions(func))
        try:
            if func not in ORDINARY:
                raise_if_refused(func, args, kwargs, nested=bool(self._nested))
            return self._translated(func, args, kwargs)
        except Exception as error:
            of_kernel = None if self._nested else as_said_by_kernel(error, func, args, kwargs)
            if of_kernel is not None:
                of_kernel.add_note(self.where())
                raise of_kernel from None
            if isinstance(error, ValueError) and func not in ORDINARY and func.namespace == "aten":
                # Of PyTorch's form in Python, which its meta device runs; the kernel has not refused the arguments.
                raise self.error(f"`{func.name()}` has no translation ({error})", UNSUPPORTED_REMEDY) from error
            if not isinstance(error, BridgeError) and not hasattr(error, "__notes__"):
                error.add_note(self.where())  # to PyTorch's own message
            raise

    def _translated(self, func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            return self._run(func, args, kwargs)
        except TRACE_ERRORS as error:
            what = "makes a shape that depends on data" if shapes_by_data(func) else "needs a traced tensor's values"
            raise self.error(f"`{func.name()}` {what}", SHAPE_REMEDY) from error
        except NotImplementedError as error:
            return untranslated(self, func, args, kwargs, error)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args = self._adopted.without_values(func, args, kwargs) or args
        if self._is_constant(func, args, kwargs):
            return self._in_pytorch(func, args, kwargs)
        if self.recording or func in DECOMPOSITIONS:
            # What PyTorch has kept for its backward may be a real tensor that traced values were written into.
            args = self._adopt_all(args, constants=False)
            kwargs = {k: self._adopt_all(v, constants=False) for k, v in kwargs.items()}
        rule = NO_DERIVATIVE.get(func)
        if rule is not None and not self._nested and rule.applies(*args, **kwargs):
            return apply_rule(rule, self.replay, func, args, kwargs, self.where)
        return self.replay(func, args, kwargs)

    @contextlib.contextmanager
    def taking_apart(self) -> Iterator[None]:
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
            return seeded_generator(self, func, kwargs) is not None
        return not self._adopted.is_large(func, args, kwargs)

    def _in_pytorch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on constants."""
        if any(isinstance(a, torch.UntypedStorage) and is_without_memory(a) for a in args):
            raise NotImplementedError(GIVES_MEMORY)
        for target in written_arguments(func, args, kwargs):
            if not self.may_write(target):
                self.take_over(target)  # which is an error
        if is_random(func):
            generator = seeded_generator(self, func, kwargs)
            assert generator is not None
            return self._adopted.compute(lambda *a, **k: draw(generator, func, a, k), func, args, kwargs)
        return self._adopted.compute(func, func, args, kwargs)

    def replay(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on traced tensors."""
        if self.is_istft and func is aten.equal.default and isinstance(self.adopt(args[0]).value, Tracer):
            return False  # it asks whether the windows add up to nearly 0 somewhere, to raise
        by_values = _DECIDED_BY_VALUES.get(func)
        if by_values is not None:
            return by_values(self, func, self.adopt(args[0]), *args[1:], **kwargs)
        ours = func in DECOMPOSITIONS and not self.is_off(func)
        if ours and (func not in LOWERINGS or draws_numbers(func, args, kwargs)):
            with self.taking_apart():
                return DECOMPOSITIONS[func](*args, **kwargs)
        if is_composite(func) and func not in LOWERINGS and func not in RANDOM:
            # Met inside a decomposition, where PyTorch's autograd layer no longer takes it apart.
            with self.taking_apart():
                return func.decompose(*args, **kwargs)
        for target in written_arguments(func, args, kwargs):
            self.take_over(target)
        args = self._adopt_all(args)
        kwargs = {k: self._adopt_all(v) for k, v in kwargs.items()}
        if torch.Tag.inplace_view in func.tags:
            return reshape_in_place(self, func, args, kwargs)
        of_its_kind = _BY_KIND.get(kind_of(func))
        if of_its_kind is not None:
            return of_its_kind(self, func, args, kwargs)
        result = compute(self, func, args, kwargs)
        if kwargs.get("check_errors"):
            name = schema_name(func).removeprefix("aten::").lstrip("_").replace("linalg_", "linalg.")
            check_matrix(self, func, result[-1], name, is_matrix=args[0].dim() == 2)
        return result

    def is_off(self, op: Any) -> bool:
        """Whether the bridge's own lowering of it is switched off."""
        return op.name() in self._off

    def chosen_lowering(self, op: Any) -> Callable | None:
        """The lowering that `export` was given for it."""
        return self._lowerings.get(op.name()) if self._lowerings else None

    def note(self, func: Any, server: str) -> None:
        if self.survey is not None:
            self.survey.ops[func.name(), server] += 1

    def where(self, cause: BaseException | None = None) -> str:
        """The submodule and the line of its code that are running, or that raised `cause`."""
        return where_in_module(self._names, cause)

    def warn(self, what: str, remedy: str = "") -> None:
        """Once for each place."""
        place = self.where()
        if place not in self._said:
            self._said.add(place)
            warnings.warn(BridgeWarning(f"{what} {place}" + (remedy and f": {remedy}")), stacklevel=2)

    def error(self, what: str, remedy: str, cause: BaseException | None = None) -> BridgeError:
        """The error that the call ends with; it names the place where `cause` was raised, if there is one."""
        error = BridgeError(f"{what} {self.where(cause)}. Remedy: {remedy}.")
        self.failed = self.failed or error
        return error


def _each(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on lists of tensors, such as `_foreach_add`."""
    with dispatch:
        results = [one(*mine, **keywords) for one, mine, keywords in each_of(func, args, kwargs)]
    return results if returns(func) else None


_BY_KIND = {"view": make_view, "write": write_in_place, "each": _each}
_DECIDED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: number_of,
    aten.is_nonzero.default: number_of,
    aten._linalg_check_errors.default: check_matrix,
    aten._has_same_storage_numel.default: lambda *_: True,  # of a tangent and its primal: they have no memory here
}
"""Operations that give PyTorch's code a number, or raise."""
