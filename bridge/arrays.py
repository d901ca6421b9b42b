"""The one converter each way: a PyTorch tensor's bits as a JAX array, a JAX array's bits as a PyTorch tensor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.internals import below_modes, jax_dtype_of, torch_dtype_of


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype JAX stores for a torch dtype: 64-bit types become 32-bit ones while x64 is off."""
    return jax.dtypes.canonicalize_dtype(jax_dtype_of(dtype))


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch_dtype_of(jnp.dtype(dtype))


def array_of(tensor: torch.Tensor) -> jax.Array:
    """A copy of a real tensor as a JAX array; later writes to the tensor do not reach it."""
    # Below every mode, and not staged under jit: reading memory is no operation of the module.
    with below_modes(), jax.ensure_compile_time_eval():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return jnp.array(tensor.to(torch.float32).numpy(), jnp.bfloat16)
        return jnp.array(tensor.numpy(), jax_dtype(tensor.dtype))


def tensor_of(array: jax.Array | np.ndarray) -> torch.Tensor:
    """A PyTorch tensor with a copy of the array's bits."""
    with below_modes():
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(np.array(array).view(np.int16).copy()).view(torch.bfloat16)
        host = np.array(array)
        assert torch.from_numpy(host).dtype == torch_dtype(array.dtype)
        return torch.from_numpy(host)
