"""Which releases of PyTorch and JAX the bridge runs with.

`check` runs when the bridge is imported: a release that lacks one of the names is refused there, and not in the middle
of somebody's model. A release outside `TESTED` is announced by a warning.
"""

from __future__ import annotations

import operator
import warnings

import jax
import torch

from bridge._compat.torchax import TESTED, release, torchax
from bridge.errors import BridgeError, BridgeWarning

_NAMES = {
    torch: """
        _C.DisableTorchFunction _C.TensorBase.requires_grad.__set__ _C._DisableTorchDispatch
        _C._are_functorch_transforms_active _C._conv_determine_backend_memory_format _C._disabled_torch_function_impl
        _C._dispatch_has_kernel_for_dispatch_key _C._dispatch_tls_is_dispatch_key_excluded
        _C._functorch.is_functorch_wrapped_tensor _C._select_conv_backend _C._set_throw_on_mutable_data_ptr
        _C.default_generator Tensor._backward_hooks Tensor._base.__get__ Tensor._is_view Tensor._make_wrapper_subclass
        UntypedStorage._cdata _decomp.decomposition_table _disable_dynamo _ops.OpOverloadPacket _ops._OpNamespace
        _register_device_module autograd.forward_ad._current_level autograd.functional._grad_preprocess
        autograd.function._SingleLevelFunction.setup_context nn.modules.module._global_backward_hooks
        nn.modules.module._global_backward_pre_hooks ops.aten.add.Tensor._overloadname ops.aten.add.Tensor._schema
        random.default_generator utils.checkpoint.checkpoint.__wrapped__
    """,
    torchax: """
        default_env ops.mappings.t2j_dtype ops.mappings.j2t_dtype ops.jaten._aten_index_put ops.jaten._aten_embedding
        ops.jaten._aten_gather
    """,
    jax: """
        core.Tracer ensure_compile_time_eval transfer_guard _src.interpreters.batching.BatchTracer
        _src.interpreters.partial_eval.DynamicJaxprTracer.parent
        _src.interpreters.partial_eval.DynamicJaxprTracer.full_lower
        _src.interpreters.partial_eval.TracingEqn.in_tracers
    """,
}
"""Package -> names that `check` looks up in it."""


def check() -> None:
    """Raise `BridgeError` if a private name is gone; warn about a release that the tests were not run with."""
    for package, names in _NAMES.items():
        for name in names.split():
            try:
                operator.attrgetter(name)(package)
            except AttributeError:
                raise BridgeError(
                    f"{package.__name__} {package.__version__} has no {name}, which the bridge needs; "
                    "install the versions in constraints.txt"
                ) from None
    for package in (torch, jax):
        oldest, newest = TESTED[package.__name__]
        if not oldest <= release(package) <= newest:
            span = " to ".join(".".join(map(str, r)) for r in (oldest, newest))
            warnings.warn(
                BridgeWarning(
                    f"{package.__name__} {package.__version__} is untested: the bridge is tested with {span}"
                ),
                stacklevel=2,
            )
