"""Private names of PyTorch."""

from __future__ import annotations

import contextlib
import functools
import operator
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
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyMode  # noqa: F401
from torch.nn.modules.adaptive import _ASMoutput
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_map_only as tree_map_only

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Returns the tensor that owns the memory of a view."""


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if autograd follows a write into `other` to `tensor`: it is a view of it, or both are views of a third."""
    base = base_of(tensor)
    return base is not None and (base is other or base is base_of(other))


# PyTorch's dispatcher.


@contextlib.contextmanager
def below_modes() -> Iterator[None]:
    """Runs plain PyTorch on plain tensors, whatever modes are active."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def below_dispatch() -> Iterator[None]:
    """Like `below_modes`, for code that calls operations and no Python functions, on tensors without tangents.

    When PyTorch looks for an overload, it may print the arguments, and printing asks for their tangents.
    """
    level = forward_ad._current_level
    forward_ad._current_level = -1
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        forward_ad._current_level = level


lazy_conjugates = functools.partial(torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.Conjugate, False)
"""Lets an operation under a dispatch mode see that a view is conjugate: PyTorch's `linalg.pinv` is wrong without."""

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class whose tensors do not need one."""


def make_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Returns a tensor of a subclass with shape, strides and dtype; C++ code that asks for its memory gets `NO_MEMORY`.

    The tensor is never an inference tensor, which PyTorch does not accept as a view of a tensor made outside that mode.
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
"""The beginning of PyTorch's `RuntimeError`."""


def in_transform() -> bool:
    """True if PyTorch's own layers, those of `torch.func` or of dual tensors, have to see functions first."""
    return in_function_transform() or forward_ad._current_level >= 0


in_function_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True if a transformation of `torch.func` is active."""


def is_dual(tensor: torch.Tensor) -> bool:
    """True if the tensor has a tangent for PyTorch's forward mode."""
    with below_modes():
        return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


wrapped_by_transform: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore


class UncompiledDispatchMode(DispatchMode):
    """The mode of a traced call. Its first operation does not import PyTorch's compiler, which takes 1.6 s.

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
    """True if PyTorch itself decomposes the operation."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@functools.cache
def casts_under_autocast(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU")


def convolution_format(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.memory_format:
    """Returns the memory format that PyTorch's CPU gives to the result of a convolution of tensors with these strides.

    `settings`: stride, padding, dilation, transposed, output padding, groups.
    """
    x, weight = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in (x, weight))
    backend = torch._C._select_conv_backend(x, weight, None, *settings, None)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


arguments: Callable[[Any], list[Any]] = operator.attrgetter("_schema.arguments")
"""The declared arguments of an ATen operation."""
returns: Callable[[Any], list[Any]] = operator.attrgetter("_schema.returns")
schema_name: Callable[[Any], str] = operator.attrgetter("_schema.name")
"""`aten::mul_`, without the overload."""
overload_name: Callable[[Any], str] = operator.attrgetter("_overloadname")
"""`Tensor` of `aten::mul_.Tensor`."""


def storage_id(tensor: torch.Tensor) -> int:
    """Returns an id that is the same for all tensors that share memory."""
    with torch._C.DisableTorchFunction():  # torch functions are active where PyTorch's C++ calls this: `x.real = …`
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # a tensor of a `torch.func` transformation, or one without memory
            return id(tensor)


def is_without_memory(storage: torch.UntypedStorage) -> bool:
    """True for the storage of a tensor of `make_wrapper`; PyTorch's kernels would read it all the same."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return True
    return False


def mark_as_parameter(tensor: torch.Tensor, wanted: bool) -> None:
    """Sets the mark of a subclass that `isinstance(tensor, nn.Parameter)` reads."""
    tensor._is_param = wanted  # pyright: ignore[reportAttributeAccessIssue]


def class_of(tensor: torch.Tensor) -> type:
    """Returns the class that code sees: `nn.Parameter` for a tensor that is marked as one."""
    if getattr(tensor, "_is_param", False):
        return nn.Parameter
    return torch.Tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """True for a parameter, and for a tensor of a subclass that is marked as one."""
    return getattr(tensor, "_is_param", False)


# PyTorch's autograd.

AutogradFunction: Any = torch.autograd.function._SingleLevelFunction
"""The class below `torch.autograd.Function` that has its `apply`."""


def engine_leaf(tensor: torch.Tensor, wanted: bool) -> None:
    """Makes a tensor a leaf of the graph that PyTorch records, whatever its class returns for `requires_grad`."""
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.requires_grad.__set__(tensor, wanted)  # pyright: ignore


def engine_requires_grad(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.requires_grad.__get__(tensor)  # pyright: ignore


def engine_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the `grad` of a leaf, set by PyTorch's engine or by the code."""
    with torch._C.DisableTorchFunction():
        if torch._C.TensorBase.is_leaf.__get__(tensor):  # pyright: ignore
            return torch._C.TensorBase.grad.__get__(tensor)  # pyright: ignore
        return None


def set_engine_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.grad.__set__(tensor, gradient)  # pyright: ignore


def below_autograd() -> bool:
    """True if the autograd layer has passed an operation on; False where that layer saves a result for later."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def gradient_hooks(module: nn.Module) -> list[str]:
    """Returns the parts of the module that have a hook of PyTorch's engine, in words."""
    hooked = []
    for name, p in nn.Module.named_parameters(module):
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            hooked.append(f"parameter {name}")
    for name, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            hooked.append(f"module {name or 'itself'}")
    if nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks:
        hooked.append("every module")
    return hooked


def is_differentiated(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """True if this release of PyTorch differentiates a function of one tensor; 2.15 does so for Bessel functions."""
    with torch.enable_grad():
        return function(torch.ones(1, requires_grad=True)).requires_grad


def _gradient_at_the_bound() -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        return torch.autograd.grad(x.clamp(min=1), x)[0]


TIES_ARE_SHARED = not _gradient_at_the_bound().item()
"""True if `clamp` has no gradient at a number, and `clamp` and `fmax` share theirs between equal tensors.

That is so since PyTorch 2.15 (2.14 was not looked at); before, the whole gradient went to the first argument.
"""


def _rounds_thresholds() -> bool:
    with torch.inference_mode(False):
        x, threshold = torch.tensor([0.2373, 0.1]).bfloat16()
        return torch.equal(nn.functional.softshrink(x, 0.1), x - threshold)


ROUNDS_THRESHOLDS = _rounds_thresholds()
"""True if `softshrink` rounds its threshold to the dtype of the tensor, since PyTorch 2.15 (2.14 was not looked at)."""


class Replacement(NamedTuple):
    """A name of PyTorch's that refers to another object while a call runs."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    """Returns the replacement of the current object, or of None. In threads without a call it acts as the original."""


class Replacements:
    """Replaces names of PyTorch's for as long as any thread is in the context, which may be entered again."""

    def __init__(self, *table: Replacement):
        self._table = table
        self._made: list[Any] = [(_MISSING, None)] * len(table)
        """For each name, the object that was replaced last, and its replacement."""
        self._lock = threading.Lock()
        self._depth = 0
        self._own: list[Any] = []
        """The owners' own objects under these names; inherited ones are missing."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._own = [vars(owner).get(name, _MISSING) for owner, name, _ in self._table]
                for i, (owner, name, make) in enumerate(self._table):
                    original = getattr(owner, name, None)
                    if self._made[i][0] != original:
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
"""Distributions check their arguments only if the caller asks for it, because values are traced."""


def before(owner: Any, name: str, check: Callable[..., None]) -> Replacement:
    """Returns the replacement of a function that first calls `check` with the same arguments."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return original(*args, **kwargs)

        return checked

    return Replacement(owner, name, make)


def in_place_of_function_apply(is_wanted: Callable[[], bool], apply: Callable[[Any, tuple], Any]) -> Replacement:
    """Returns the replacement with which `Function.apply(*args)` returns `apply(function, args)` if `is_wanted()`.

    `Function.apply` is C code, since PyTorch 2.14 without a Python function above it, and code may have taken it from
    its class long ago. So it runs, and gets what it asks the class for: `_backward_cls`, then `forward`, which it calls
    with gradients off, and `setup_context`, if the class has its own, which it calls afterwards.
    """
    asked = threading.local()

    def make(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def getattribute(function: Any, name: str) -> Any:
            if name == "_backward_cls" and is_wanted():
                asked.function = function
                asked.gradients = torch.is_grad_enabled()
            elif name == "forward" and vars(asked).get("function") is function:
                asked.function = None
                return functools.partial(forward, function, asked.gradients)
            elif name == "setup_context" and vars(asked).get("applied") is function:
                asked.applied = None
                return keep
            return look_up(function, name)

        return getattribute

    def forward(function: Any, gradients: bool, *given: Any) -> Any:
        has_setup = function.setup_context is not AutogradFunction.setup_context
        args = given if has_setup else given[1:]
        with torch.set_grad_enabled(gradients), forward_ad._set_fwd_grad_enabled(True):
            results = apply(function, args)
        if has_setup:
            asked.applied = function
        else:
            keep(given[0], args, results)
        return results

    def keep(ctx: Any, args: tuple, results: Any) -> None:
        """Makes PyTorch return the results as they are: without a gradient of its own, inputs not as views."""
        listed = results if isinstance(results, tuple) else (results,)
        tensors = [t for t in listed if isinstance(t, torch.Tensor)]
        ctx.mark_non_differentiable(*tensors)
        ctx.mark_dirty(*(t for t in tensors if any(t is a for a in args)))

    return Replacement(torch.autograd.function.FunctionMeta, "__getattribute__", make)


def before_registered_backward(wanted: Callable[[tuple], bool]) -> Replacement:
    """Returns the replacement with which an operation of `torch.library` has its registered backward if `wanted(args)`.

    The operation asks whether an argument requires grad. If so, it is applied as a `torch.autograd.Function`, whose
    backward raises an error if none was registered.
    """

    def make(asks: Callable[..., bool]) -> Callable[..., bool]:
        def any_requires_grad(*args: Any) -> bool:
            if wanted(args):
                definition = _maybe_get_opdef(sys._getframe(1).f_locals["op"])  # it is not among the arguments
                if definition is None or definition._backward_fn is not None:
                    return True
            return asks(*args)

        return any_requires_grad

    return Replacement(torch._C, "_any_requires_grad", make)


def before_functional(check: Callable[[tuple, bool], None]) -> Replacement:
    """Returns the replacement that calls `check(inputs, create_graph)` before `torch.autograd.functional` begins."""

    def checked(inputs: tuple, create_graph: bool, need_graph: bool) -> None:
        check(inputs, create_graph)

    return before(torch.autograd.functional, "_grad_preprocess", checked)


def in_place_of_checkpoint(is_tracing: Callable[[], bool], checkpoint: Callable[..., Any]) -> Replacement:
    """Returns the replacement that calls `checkpoint` instead of `torch.utils.checkpoint.checkpoint` if `is_tracing()`.

    PyTorch looks up the undecorated body at every call, where its compiler hooks in the same way, so references to
    the function that were taken earlier reach this replacement, too.
    """
    body: Any = getattr(torch.utils.checkpoint.checkpoint, "__wrapped__")  # noqa: B009

    def make(known: Callable | None) -> Callable:
        otherwise = known or _beside_compiler(body)
        return lambda *args, **kwargs: (checkpoint if is_tracing() else otherwise)(*args, **kwargs)

    return Replacement(body, "__dynamo_disable", make)


def in_place_of_adaptive_softmax(is_tracing: Callable[[], bool]) -> Replacement:
    """Returns the replacement with which a loss computes all logarithms, and then picks those of the targets.

    PyTorch looks up which targets are in which cluster, and computes only the logarithms of these.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
            dims = target_.dim()
            target = torch.atleast_1d(target_)
            fits = dims < 2 and input_.dim() == dims + 1 and (not dims or len(input_) == len(target_))
            if not is_tracing() or not fits:  # PyTorch raises its own error
                return original(self, input_, target_)
            picked = self.log_prob(torch.atleast_2d(input_)).gather(1, target.unsqueeze(1)).squeeze(1)
            return _ASMoutput(picked if dims else picked.squeeze(0), (-picked).mean())

        return forward

    return Replacement(nn.AdaptiveLogSoftmaxWithLoss, "forward", make)


def in_place_of_script_call(is_tracing: Callable[[], bool]) -> Replacement:
    """Returns the replacement with which a function of `torch.jit.script` runs unoptimized if `is_tracing()`.

    PyTorch's optimizations give several operations one backward of its own, whose derivatives are lost in the bridge.
    A copy runs, because a function that has been optimized stays so.
    """

    def make(original: Callable) -> Callable:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_tracing():
                return original(function, *args, **kwargs)
            copied = torch._C._create_function_from_graph(function.name, function.inlined_graph.copy())
            rest = function.schema.arguments[len(args) :]
            defaults = {a.name: a.default_value for a in rest if a.has_default_value()}  # the copy has none
            with torch.jit.optimized_execution(False):
                return original(copied, *args, **(defaults | kwargs))

        return call

    return Replacement(torch.jit.ScriptFunction, "__call__", make)


def leave_compiler_unloaded() -> None:
    """Lets PyTorch's Python functions for the meta device run without importing its compiler, which takes 1.6 s.

    At its first call, each of these functions asks the compiler to leave it alone. As long as the compiler is not
    loaded, there is nothing to ask.
    """
    asks = torch._disable_dynamo(lambda: None).__code__
    seen: set[Any] = set()
    left: list[Any] = list(decomposition_table.values())
    while left:
        function: Any = left.pop()
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            variables = closure_of(function)
            if function.__code__ is asks and not hasattr(variables["fn"], "__dynamo_disable"):
                setattr(variables["fn"], "__dynamo_disable", _beside_compiler(variables["fn"]))
            left += variables.values()


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables that a function encloses and that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _beside_compiler(function: Any) -> Callable[..., Any]:
    """Returns `function`, which PyTorch's compiler leaves alone once it is loaded."""

    disabled = functools.cache(lambda: sys.modules["torch._dynamo"].disable(function, True, wrapping=False))

    def call(*args: Any, **kwargs: Any) -> Any:
        loaded = hasattr(sys.modules.get("torch._dynamo"), "disable")
        return (disabled() if loaded else function)(*args, **kwargs)

    return call


# PyTorch's random numbers.

default_generator: torch.Generator = torch._C.default_generator


def in_place_of_default_generator(of_the_call: Callable[[], Any]) -> Replacement:
    """Returns the replacement with which `torch.manual_seed` and its like act on `of_the_call()`, unless that is None.

    The functions of `torch.random` look the generator up in their module at every call.
    """

    class Default:
        def __getattr__(self, name: str) -> Any:
            return getattr(of_the_call() or default_generator, name)

    return Replacement(torch.random, "default_generator", lambda _: Default())
