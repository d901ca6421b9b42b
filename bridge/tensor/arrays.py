"""PyTorch tensors as JAX arrays: dtypes, bits, and the positions of elements in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bridge._compat.torch import below_modes, storage_id
from bridge._compat.torchax import jax_dtype_of, torch_dtype_of
from bridge.context import refusal
from bridge.errors import BridgeError

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
COUNTERPARTS: dict[torch.dtype, Any] = {}
"""Dtype of PyTorch -> that of JAX, which is stored as one of 32 bits if it has 64 and x64 is off."""
for _dtype in DTYPES:
    with contextlib.suppress(RuntimeError):
        COUNTERPARTS[_dtype] = jnp.dtype(jax_dtype_of(_dtype))


def jax_dtype(dtype: torch.dtype) -> Any:
    """Returns the dtype in which JAX stores a torch dtype: 64-bit types become 32-bit ones while x64 is off.

    Raises `BridgeError` for one that JAX does not have.
    """
    refuse_dtype(dtype)
    return jax.dtypes.canonicalize_dtype(COUNTERPARTS[dtype])


def refuse_dtype(dtype: torch.dtype) -> None:
    """Raises `BridgeError` for a dtype that JAX does not have."""
    if dtype not in COUNTERPARTS:
        if dtype == torch.complex32:
            remedy = "call .float() before the operation that makes complex numbers, or .to(torch.complex64)"
            raise refusal(f"a tensor is {dtype}, which JAX does not have", remedy)
        raise refusal(
            f"a tensor is {dtype}, which has no counterpart in the bridge",
            "convert it to another dtype, such as torch.float32",
        )


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch_dtype_of(jnp.dtype(dtype))


COPIED_BY_NUMPY_BYTES = 2**20
"""JAX compiles a program for each shape that it copies, which takes longer than to copy so few bytes twice."""


def array_of(tensor: torch.Tensor) -> jax.Array:
    """Returns a copy of a real tensor as a JAX array; later writes to the tensor do not reach it."""
    dtype = jax_dtype(tensor.dtype)
    # Read below every mode, and not staged under jit: reading memory is no operation of the module.
    with below_modes(), jax.ensure_compile_time_eval():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return jnp.array(tensor.to(torch.float32).numpy(), jnp.bfloat16)
        host = np.from_dlpack(tensor)  # after `numpy()`, PyTorch could not resize it any more
        if host.nbytes < COPIED_BY_NUMPY_BYTES:
            return jnp.asarray(host.astype(dtype), dtype)
        array = jnp.asarray(host, dtype)  # `jnp.array` would copy twice if memory is not aligned as JAX's
        if array.unsafe_buffer_pointer() == host.ctypes.data:
            array = array.copy()
        return array.block_until_ready()


def tensor_of(array: jax.Array | np.ndarray) -> torch.Tensor:
    """Returns a PyTorch tensor with a copy of the array's bits."""
    with below_modes():
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(np.array(array).view(np.int16).copy()).view(torch.bfloat16)
        host = np.array(array)
        assert torch.from_numpy(host).dtype == torch_dtype(array.dtype)
        return torch.from_numpy(host)


# ---- places in memory

PLAIN = (torch.Tensor, nn.Parameter)
"""Classes of tensors whose numbers are their whole meaning."""


def what_is_special(tensor: torch.Tensor) -> str | None:
    """Returns the reason why an array cannot represent the tensor, with the remedy; None if one can."""
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        return "is not initialized; call the module once before export"
    if type(tensor) not in PLAIN:
        kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
        return f"is a {kind}, whose own behaviour would be lost; make it a plain tensor"
    if tensor.is_meta:
        return (
            "is on the meta device and has no values; assign them before export, or register it as a buffer and load "
            "weights by bridge.into"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "is sparse, quantized or nested; make it dense"
    if tensor.dtype not in COUNTERPARTS:
        other = torch.complex64 if tensor.is_complex() else torch.float32
        return f"is {tensor.dtype}, which JAX does not have; convert it before, to {other} for instance"
    return None


def check_kinds(state: Mapping[str, torch.Tensor], meta: bool = False) -> None:
    """Raises `BridgeError` for state that has more, or less, than its numbers; `meta`: values may come later."""
    for name, tensor in state.items():
        special = what_is_special(tensor)
        if special is not None and not (meta and tensor.is_meta and type(tensor) in PLAIN):
            raise BridgeError(f"{name} {special}")


def move_to_meta(tensor: torch.Tensor) -> None:
    """Frees the memory: the tensor object is then on the meta device, and has no values."""
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, False)
    vars(twin).update(vars(tensor))
    torch.utils.swap_tensors(tensor, twin.requires_grad_(tensor.requires_grad))


def storage_offsets(tensor: torch.Tensor) -> np.ndarray:
    """Returns the position of each element in the tensor's storage, in the tensor's shape."""
    place = np.asarray(tensor.storage_offset(), np.int64)
    for n, s in zip(tensor.shape, tensor.stride(), strict=True):
        place = place[..., None] + np.arange(n, dtype=np.int64) * s
    return place


def elements(owner: torch.Tensor, wanted: np.ndarray) -> np.ndarray | None:
    """Returns the elements of `owner`, in row-major order, at the positions; None if one is no element of it."""
    if owner.is_contiguous():
        index = wanted - owner.storage_offset()
        if not index.size or (index.min() >= 0 and index.max() < owner.numel()):
            return index
        return None
    mine = storage_offsets(owner).reshape(-1)
    order = np.argsort(mine, kind="stable")
    at = np.searchsorted(mine, wanted, sorter=order)
    if mine.size:
        index = order[np.minimum(at, mine.size - 1)]
    else:
        index = np.zeros_like(wanted)
    if not wanted.size or (mine.size and np.array_equal(mine[index], wanted)):
        return index
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    return start, start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors over the same memory have an element in common."""
    if not a.numel() or not b.numel():
        return False
    if a.dtype != b.dtype:  # positions count elements of another size
        return True
    start, stop = _span(a)
    first, last = _span(b)
    if stop <= first or last <= start:
        return False
    return bool(np.intersect1d(storage_offsets(a), storage_offsets(b)).size)


def refuse_overlap(written: torch.Tensor, read: torch.Tensor) -> None:
    """Raises for an operation that reads elements that it writes, unless it reads each at the place that it writes.

    PyTorch raises if both tensors are dense. Otherwise its result depends on the order in which a kernel visits
    the elements; that case raises `NotImplementedError` here.
    """
    same = (written.shape, written.stride(), written.storage_offset()) == (
        read.shape, read.stride(), read.storage_offset(),
    )  # fmt: skip
    if (same and written.dtype == read.dtype) or not overlap(written, read):
        return
    if _is_dense(written) and _is_dense(read):
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )
    raise NotImplementedError("it reads elements that it writes, so that their order counts; clone what it reads")


def has_overlap(tensor: torch.Tensor) -> bool:
    """True if several elements of the tensor share memory, as in an expanded or unfolded one."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < reach:
            return np.unique(storage_offsets(tensor)).size < tensor.numel()
        reach += (size - 1) * stride
    return False


def _is_dense(tensor: torch.Tensor) -> bool:
    start, stop = _span(tensor)
    return stop - start == tensor.numel()


def alias_roots(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns names of state tensors that are windows on others -> the names of these.

    Raises `BridgeError` for two parameters that share elements, since an optimizer would update each alone, and for
    tensors of which none holds all the elements of the others.
    """
    shared: dict[int, list[str]] = {}
    for name, tensor in state.items():
        shared.setdefault(storage_id(tensor), []).append(name)
    windows: dict[str, str] = {}
    for names in shared.values():
        for group in _overlapping(state, names) if len(names) > 1 else ():
            if len({state[name].dtype for name in group}) > 1:
                raise BridgeError(f"{' and '.join(group)} share memory under different dtypes; clone one")
            root = max(group, key=lambda name: (state[name].requires_grad, state[name].numel()))
            windows |= {name: root for name in group if name != root}
    for name, root in windows.items():
        if state[name].requires_grad:
            raise BridgeError(
                f"the parameters {root} and {name} share memory; assign the same Parameter to both names to tie them, "
                "or clone one"
            )
        if elements(state[root], storage_offsets(state[name])) is None:
            raise BridgeError(f"{root} and {name} share only a part of their memory; clone one")
    return windows


def _overlapping(state: Mapping[str, torch.Tensor], names: list[str]) -> list[list[str]]:
    """Returns groups of names, each of several tensors that are connected by shared elements."""
    groups: list[list[str]] = []
    for name in names:
        met = [g for g in groups if any(overlap(state[name], state[other]) for other in g)]
        groups = [g for g in groups if g not in met] + [[*(n for g in met for n in g), name]]
    return [g for g in groups if len(g) > 1]


def version_of(tensor: torch.Tensor) -> Any:
    """Returns the write count of a tensor; one made in inference mode does not count, so each value is unique."""
    if tensor.is_inference():
        return object()
    return tensor._version
