"""The one converter each way: a PyTorch tensor's bits as a JAX array, a JAX array's bits as a PyTorch tensor."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.torch import below_modes
from bridge._compat.torchax import jax_dtype_of, torch_dtype_of
from bridge.errors import refusal


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype JAX stores for a torch dtype: 64-bit types become 32-bit ones while x64 is off.

    Raises `BridgeError` for one that JAX does not have.
    """
    refuse_dtype(dtype)
    return jax.dtypes.canonicalize_dtype(jax_dtype_of(dtype))


def refuse_dtype(dtype: torch.dtype) -> None:
    """Raise `BridgeError` for a dtype that JAX does not have."""
    if not has_counterpart(dtype):
        if dtype == torch.complex32:
            remedy = "call .float() before the operation that makes complex numbers, or .to(torch.complex64)"
            raise refusal(f"a tensor is {dtype}, which JAX does not have", remedy)
        raise refusal(
            f"a tensor is {dtype}, which has no counterpart in the bridge",
            "convert it to another dtype, such as torch.float32",
        )


@functools.cache
def has_counterpart(dtype: torch.dtype) -> bool:
    """True if JAX has the dtype, or one of 32 bits for one of 64."""
    try:
        jax_dtype_of(dtype)
    except RuntimeError:
        return False
    return True


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch_dtype_of(jnp.dtype(dtype))


def array_of(tensor: torch.Tensor) -> jax.Array:
    """A copy of a real tensor as a JAX array; later writes to the tensor do not reach it."""
    dtype = jax_dtype(tensor.dtype)
    # Below every mode, and not staged under jit: reading memory is no operation of the module.
    with below_modes(), jax.ensure_compile_time_eval():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return jnp.array(tensor.to(torch.float32).numpy(), jnp.bfloat16)
        return jnp.array(tensor.numpy(), dtype)


def tensor_of(array: jax.Array | np.ndarray) -> torch.Tensor:
    """A PyTorch tensor with a copy of the array's bits."""
    with below_modes():
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(np.array(array).view(np.int16).copy()).view(torch.bfloat16)
        host = np.array(array)
        assert torch.from_numpy(host).dtype == torch_dtype(array.dtype)
        return torch.from_numpy(host)
