"""Private names of PyTorch."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.autograd.function
import torch.utils.checkpoint
from torch import nn
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyMode  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_map_only as tree_map_only

_TORCHAX: dict[str, types.ModuleType] = {}
"""The modules of the bridge's own copy of torchax."""


@contextlib.contextmanager
def _torchax_imports() -> Iterator[None]:
    """Let torchax's imports inside of functions find the bridge's copy."""
    others = {name: sys.modules[name] for name in _TORCHAX if name in sys.modules}
    sys.modules.update(_TORCHAX)
    try:
        yield
    finally:
        for name in _TORCHAX:
            del sys.modules[name]
        sys.modules.update(others)


GET_BASE: Any = torch.Tensor._base.__get__  # pyright: ignore
"""Of each look-up another object, equal to the others."""
IS_VIEW: Any = torch.Tensor._is_view


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that owns the memory of a view."""
    return tensor._base


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if autograd follows a write into `other` to `tensor`: it is a view of it, or both are views of a third."""
    base = base_of(tensor)
    return base is not None and (base is other or base is base_of(other))


# Its dispatcher.


@contextlib.contextmanager
def below_modes() -> Iterator[None]:
    """Plain PyTorch on plain tensors, whatever modes are active."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def below_dispatch() -> Iterator[None]:
    """As `below_modes`, for code that calls operations and no Python functions, on tensors without tangents.

    Where it looks for an overload, PyTorch may print the arguments, and then asks for their tangents.
    """
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        forward_ad._current_level = level


NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class whose tensors need none."""


def make_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
    """A tensor of a subclass, with shape, strides and dtype; who asks in C++ for its memory gets `NO_MEMORY`.

    Never one of inference mode, which PyTorch does not take for a view of a tensor from before it.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make_wrapper(cls, *args, **kwargs)
    wrapper = torch.Tensor._make_wrapper_subclass(cls, *args, **kwargs)  # pyright: ignore
    torch._C._set_throw_on_mutable_data_ptr(wrapper)  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper


NO_MEMORY = (
    "Cannot access data pointer of Tensor",
    "The tensor has a non-zero number of elements, but its data is not allocated yet",
)
"""How PyTorch's `RuntimeError` begins."""


def in_transform() -> bool:
    """True if PyTorch's own layers have to see functions first: those of `torch.func`, or of dual tensors."""
    return in_function_transform() or forward_ad._current_level >= 0


def in_function_transform() -> bool:
    """True if a transformation of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def is_dual(tensor: torch.Tensor) -> bool:
    """True if it has a tangent for PyTorch's forward mode."""
    with below_modes():
        return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


wrapped_by_transform: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore


class UncompiledDispatchMode(DispatchMode):
    """A mode of a traced call, which does not import PyTorch's compiler at its first operation, which takes 1.6 s.

    PyTorch wraps `__torch_dispatch__` so that the compiler leaves it alone; a traced call turns the compiler off.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def compiler_is_loaded() -> bool:
    """True if `torch.compile` may have been used; importing its compiler takes seconds."""
    return "torch._dynamo" in sys.modules


@functools.cache
def is_composite(op: Any) -> bool:
    """True if PyTorch itself takes the operation apart into others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@functools.cache
def casts_under_autocast(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU")


def convolution_format(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.memory_format:
    """The memory format that PyTorch's CPU gives to the result of a convolution of tensors with these strides.

    `settings`: stride, padding, dilation, transposed, output padding, groups.
    """
    x, weight = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in (x, weight))
    backend = torch._C._select_conv_backend(x, weight, None, *settings, None)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


def arguments(op: Any) -> list[Any]:
    """The declared arguments of an ATen operation."""
    return op._schema.arguments


def returns(op: Any) -> list[Any]:
    return op._schema.returns


def schema_name(op: Any) -> str:
    """`aten::mul_`, without the overload."""
    return op._schema.name


def overload_name(op: Any) -> str:
    """`Tensor` of `aten::mul_.Tensor`."""
    return op._overloadname


def storage_id(tensor: torch.Tensor) -> int:
    """The same for all tensors that share memory."""
    with torch._C.DisableTorchFunction():  # which is on where PyTorch's C++ comes here by itself, as from `x.real = …`
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # of a transformation of `torch.func`, or one without memory
            return id(tensor)


def is_without_memory(storage: torch.UntypedStorage) -> bool:
    """True if it is that of a tensor of `make_wrapper`, which PyTorch's kernels would read all the same."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return True
    return False


def mark_as_parameter(tensor: torch.Tensor, wanted: bool) -> None:
    """Set the mark that `isinstance(tensor, nn.Parameter)` reads of a subclass."""
    tensor._is_param = wanted  # pyright: ignore[reportAttributeAccessIssue]


def class_of(tensor: torch.Tensor) -> type:
    """Returns the class that code sees: `nn.Parameter` of one that is marked."""
    return nn.Parameter if getattr(tensor, "_is_param", False) else torch.Tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Also of a subclass that is marked as one."""
    return getattr(tensor, "_is_param", False)


def is_script(module: nn.Module) -> bool:
    """True if the module is compiled by TorchScript: its state lives in C++ and cannot be copied."""
    return isinstance(module, torch.jit.ScriptModule)


# Its autograd.

AutogradFunction: Any = torch.autograd.function._SingleLevelFunction
"""The class below `torch.autograd.Function` that has its `apply`."""


def engine_leaf(tensor: torch.Tensor, wanted: bool) -> None:
    """Make a tensor one from which PyTorch records its graph, whatever its class says of `requires_grad`."""
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.requires_grad.__set__(tensor, wanted)  # pyright: ignore


def engine_requires_grad(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.requires_grad.__get__(tensor)  # pyright: ignore


def engine_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the `grad` of a leaf, by PyTorch's engine or by the code."""
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.grad.__get__(tensor) if torch._C.TensorBase.is_leaf.__get__(tensor) else None  # pyright: ignore


def set_engine_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.grad.__set__(tensor, gradient)  # pyright: ignore


def below_autograd() -> bool:
    """True if the autograd layer has passed an operation on; it is not so where that layer saves a result for later."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def gradient_hooks(module: nn.Module) -> list[str]:
    """Returns the parts of the module that have a hook of PyTorch's engine, in words."""
    hooked = [
        f"parameter {name}"
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    hooked += [
        f"module {name or 'itself'}" for name, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks
    ]
    if nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks:
        hooked.append("every module")
    return hooked


class Replacement(NamedTuple):
    """A name of PyTorch's that another object takes while a call runs."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    """Returns the replacement of what has the name now, or of None. In threads without a call it acts as that does."""


class Replacements:
    """Replaces names of PyTorch's for as long as any thread is in the context, which may be entered again."""

    def __init__(self, *table: Replacement):
        self._table = table
        self._lock, self._depth = threading.Lock(), 0
        self._made: list[tuple[Any, Any]] = [(_MISSING, None)] * len(table)
        """For each name its last original and the replacement of that."""
        self._own: list[Any] = []
        """The objects of the owners themselves under these names; inherited ones are missing."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._own = [vars(r.owner).get(r.name, _MISSING) for r in self._table]
                for i, (owner, name, make) in enumerate(self._table):
                    original = getattr(owner, name, None)
                    if self._made[i][0] != original:  # each look-up of a method of C makes another object
                        self._made[i] = original, make(original)
                    setattr(owner, name, self._made[i][1])
            self._depth += 1

    def __exit__(self, *_error: Any) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                for (owner, name, _), own in zip(self._table, self._own, strict=True):
                    delattr(owner, name) if own is _MISSING else setattr(owner, name, own)


_MISSING = object()


UNVALIDATED_DISTRIBUTIONS = Replacement(torch.distributions.Distribution, "_validate_args", lambda _: False)
"""Distributions check their arguments only where they are told to: values are traced."""


def before(owner: Any, name: str, check: Callable[..., None]) -> Replacement:
    """Returns the replacement of a function that calls `check` with the same arguments first."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return original(*args, **kwargs)

        return checked

    return Replacement(owner, name, make)


def before_functional(check: Callable[[tuple, bool], None]) -> Replacement:
    """Returns the replacement that calls `check(inputs, create_graph)` before `torch.autograd.functional` begins."""

    def checked(inputs: tuple, create_graph: bool, need_graph: bool) -> None:
        check(inputs, create_graph)

    return before(torch.autograd.functional, "_grad_preprocess", checked)


def in_place_of_checkpoint(is_tracing: Callable[[], bool], checkpoint: Callable[..., Any]) -> Replacement:
    """Returns the replacement that calls `checkpoint` for `torch.utils.checkpoint.checkpoint` where `is_tracing()`.

    PyTorch looks its undecorated body up at every call, where its compiler takes part in the same way, so references to
    the function that were taken earlier come by here too.
    """
    body: Any = getattr(torch.utils.checkpoint.checkpoint, "__wrapped__")  # noqa: B009

    def make(known: Callable | None) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return checkpoint(*args, **kwargs)
            if known is not None:
                return known(*args, **kwargs)
            import torch._dynamo

            return torch._dynamo.disable(body, True, wrapping=False)(*args, **kwargs)

        return call

    return Replacement(body, "__dynamo_disable", make)


def leave_compiler_unloaded() -> None:
    """Let PyTorch's Python functions for the meta device run without importing its compiler, which takes 1.6 s.

    At its first call, each of them asks the compiler to leave it alone. While the compiler is not loaded, there is
    nothing to ask.
    """
    asks = torch._disable_dynamo(lambda: None).__code__
    seen: set[Any] = set()
    left: list[Any] = list(decomposition_table.values())
    while left:
        function: Any = left.pop()
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            variables = closure_of(function)
            if function.__code__ is asks and "fn" in variables:
                setattr(variables["fn"], "__dynamo_disable", _beside_compiler(variables["fn"]))
            left += variables.values()


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables that a function encloses and that have values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _beside_compiler(function: Any) -> Callable[..., Any]:
    """`function`, left alone by PyTorch's compiler once that is loaded."""
    known = getattr(function, "__dynamo_disable", None)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if known is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*args, **kwargs)
            known = disable(function, True, wrapping=False)
        return known(*args, **kwargs)

    return call


# Its random numbers.

default_generator: torch.Generator = torch._C.default_generator


class _DefaultGenerator:
    """In `torch.random`: the generator of the thread's traced call, PyTorch's own where there is none."""

    def __init__(self, of_the_call: Callable[[], Any]):
        self._of_the_call = of_the_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_the_call() or default_generator, name)


def in_place_of_default_generator(of_the_call: Callable[[], Any]) -> Replacement:
    """Returns the replacement that lets `torch.manual_seed` and its like act on `of_the_call()`, if that is not None.

    The functions of `torch.random` look the generator up in their module at every call.
    """
    return Replacement(torch.random, "default_generator", lambda _: _DefaultGenerator(of_the_call))
