"""How exact products of float32 numbers are: as PyTorch's setting says, unless JAX has been told something itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

_OF_PYTORCH = {"highest": "highest", "high": "high", "medium": "default"}
_OF_CUDA = {"tf32": "high", "bf16": "default"}


def matmul_precision() -> str:
    """The precision of float32 products in a call traced now, in JAX's words.

    `jax.default_matmul_precision` where the user has set it, otherwise `torch.get_float32_matmul_precision()`, which
    `torch.backends.cuda.matmul.allow_tf32` sets too. JAX's own default is bf16 passes on a TPU and TF32 on a GPU;
    PyTorch's is "highest".
    """
    return _of_jax() or _of_pytorch()


def _of_jax() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def _of_pytorch() -> str:
    try:
        return _OF_PYTORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set for CUDA alone, by the newer switch
        return _OF_CUDA.get(str(torch.backends.cuda.matmul.fp32_precision), "highest")


def precision_is_given() -> bool:
    """Whether the user has set `jax.default_matmul_precision`."""
    return _of_jax() is not None


def products_of_pytorch() -> contextlib.AbstractContextManager:
    """The context of a traced call: float32 products have PyTorch's precision, unless JAX has been given one."""
    if precision_is_given():
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_of_pytorch())


def precision_for(arrays: Iterable[Any], pytorchs: bool) -> contextlib.AbstractContextManager:
    """The context for one operation of a call; `pytorchs`: whether the call is inside of `products_of_pytorch`.

    Half precision is left alone: PyTorch's setting is about float32, and the compiled program of a bf16 step stays what
    it is. An operation that takes any half-precision array multiplies in that.
    """
    if pytorchs and any(a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays):
        return jax.default_matmul_precision(None)
    return contextlib.nullcontext()
