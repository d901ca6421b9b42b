"""The numbers of a case of the corpus: trees of tensors or arrays, their leaves, errors and summaries.

None of the bridge's own functions is used, so that a fault in them is seen.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

Leaves = dict[str, np.ndarray]
"""Maps "kind path" to numbers."""


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the containers of inputs with other tensors."""
    if torch.is_tensor(tree) or isinstance(tree, (jax.Array, np.ndarray)):
        return leaf(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(new, field.name, mapped(getattr(tree, field.name), leaf))
        return new
    if isinstance(tree, dict):
        new = copy.copy(tree)
        for key, value in tree.items():
            dict.__setitem__(new, key, mapped(value, leaf))
        return new
    if isinstance(tree, (list, tuple)):
        items = [mapped(value, leaf) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def flat(tree: Any, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yields the tensors, arrays and numbers of a tree with their paths, those in attributes of objects too."""
    if torch.is_tensor(tree) or isinstance(tree, (jax.Array, np.ndarray, bool, int, float, complex)):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}", seen)
    elif isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", range(len(tree)))
        for name, value in zip(names, tree, strict=True):
            yield from flat(value, f"{path}/{name}", seen)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from flat(getattr(tree, field.name), f"{path}/{field.name}", seen)
    elif hasattr(tree, "__dict__") and id(tree) not in seen and not isinstance(tree, nn.Module) and not callable(tree):
        yield from flat(vars(tree), path, seen | {id(tree)})


def weights(number: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([7, number]).standard_normal((*shape, 2)).astype(np.float32)


def projection(outputs: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    """Returns the sum of all floating-point outputs, each entry times a fixed random weight."""
    total: Any = 0.0
    for number, (_, leaf) in enumerate(flat(outputs)):
        name = str(getattr(leaf, "dtype", ""))
        if "float" not in name and "complex" not in name:
            continue
        if torch.is_tensor(leaf) and not leaf.requires_grad:
            continue
        weight = convert(weights(number, tuple(leaf.shape)))
        if "complex" in name:
            total = total + (leaf.real * weight[..., 0]).sum() + (leaf.imag * weight[..., 1]).sum()
        else:
            total = total + (leaf * weight[..., 0]).sum()
    return total


def numbers(value: Any) -> np.ndarray:
    if torch.is_tensor(value):
        value = value.detach().resolve_conj().resolve_neg()
        value = value.to_dense() if value.layout is not torch.strided else value
        return value.float().numpy() if value.dtype in (torch.bfloat16, torch.float16) else value.numpy()
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array


def errors(ours: Leaves, theirs: Leaves) -> dict[str, float]:
    """Returns the largest difference of each leaf, relative to its largest entry."""
    gradients = [_magnitude(a) for name, a in ours.items() if "gradient" in name]
    largest = max(gradients, default=0.0)
    relative = {}
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            relative[name] = float("inf")
            continue
        a, b = (_wide(leaves[name]) for leaves in (ours, theirs))
        floor = max(1e-3 * largest if "gradient" in name else 1e-3, 1e-30)
        scale = 1.0 if ours[name].dtype.kind in "biu" else max(_magnitude(a), floor)
        with np.errstate(invalid="ignore"):
            gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        relative[name] = float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0)) / scale
    return relative


def _wide(a: np.ndarray) -> np.ndarray:
    return a if a.dtype.kind == "c" else a.astype(np.float64)


def _magnitude(a: np.ndarray) -> float:
    size = np.abs(_wide(a))
    return float(size.max(initial=0.0, where=np.isfinite(size)))


def summary(calls: list[Leaves]) -> dict[str, Any]:
    """Returns the SHA-256 of all numbers, and two numbers of each leaf, with six digits: norm and a projection."""
    digest = hashlib.sha256()
    summaries = {}
    for call, leaves in enumerate(calls):
        for name, array in sorted(leaves.items()):
            digest.update(f"{call} {name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
            wide = np.nan_to_num(np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)).ravel()
            signs = np.random.default_rng(5).choice([-1.0, 1.0], wide.size)
            summaries[f"{call} {name}"] = [float(f"{v:.6g}") for v in (np.linalg.norm(wide), float(wide @ signs))]
    return {"sha256": digest.hexdigest(), "leaves": summaries}
