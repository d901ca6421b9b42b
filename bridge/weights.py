"""Import and export of weights under PyTorch names: `.pt`, safetensors, sharded files; strict and bit-exact."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from bridge.errors import BridgeError, named_failure
from bridge.functional import Functional
from bridge.module.state import state_of
from bridge.tensor.arrays import alias_roots, array_of, elements, jax_dtype, storage_offsets, tensor_of

_LFS_POINTER = b"version https://git-lfs"
_WRAPPERS = ("_orig_mod.", "module.")  # prefixes of torch.compile and DataParallel


def load_weights(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Reads a `.pt`-like file (tensors only, nothing is executed), a `.safetensors` file, an `.index.json` of a sharded
    checkpoint, or a folder with one of these. Prefixes that wrappers of modules add to every name are removed.

    Raises `BridgeError` for a file that is absent, unreadable or holds anything but named tensors.
    """
    path = Path(path)
    if path.is_dir():
        path = _find_in(path)
    if not path.is_file():
        raise BridgeError(f"no weights at {path}; give a .pt or .safetensors file, an .index.json, or a folder")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise BridgeError(f"{path} is a pointer of Git LFS, not the weights; run `git lfs pull` in its repository")
    with named_failure(f"{path} cannot be read as weights", "; it must hold tensors by name"):
        if path.name.endswith(".index.json"):
            return _sharded(path)
        state: Any = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    if not isinstance(state, Mapping):
        raise BridgeError(f"{path} holds a {type(state).__name__}, expected tensors by name; save module.state_dict()")
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        shown = ", ".join(map(str, [*state][:8])) + ", …" * (len(state) > 8)
        raise BridgeError(
            f"{path} holds something else than tensors by name in {others[0]}; of its keys {shown}, save the one with "
            "the weights alone, as by torch.save(module.state_dict(), …)"
        )
    while state and (prefix := next((p for p in _WRAPPERS if all(n.startswith(p) for n in state)), None)):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return dict(state)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Maps a file without reading it: the pages of each large tensor are released with the tensor."""
    state = load_file(path)
    for name, tensor in state.items():
        if tensor.nbytes > 2**20:
            with safe_open(path, "pt") as file:
                state[name] = file.get_tensor(name)
    return state


def _read_pt(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text proposes to execute the file's contents
        found = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        raise BridgeError(
            f"{path} holds an object of {found[1]}, and nothing in a file is executed; save module.state_dict()"
            if found
            else f"{path} is not a file of torch.save; save module.state_dict()"
        ) from error


def _find_in(folder: Path) -> Path:
    for pattern in ("*.index.json", "*.safetensors", "*.pt", "*.pth", "*.bin"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise BridgeError(f"{folder} holds {len(found)} files {pattern}; name the one to load")
    raise BridgeError(f"{folder} holds no .index.json, .safetensors, .pt, .pth or .bin file")


def _sharded(index: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        if Path(shard).name != shard:
            raise BridgeError(f"{index} names the shard {shard!r}, which is not a plain file name")
        state |= load_weights(index.parent / shard)
    return state


def into(
    fn: Functional, weights: Mapping[str, torch.Tensor] | str | os.PathLike
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns `(params, buffers)` of `fn` with the values of a PyTorch state dict; non-persistent buffers are kept.

    `weights`: the state dict, or a file of `load_weights`, whose tensors are released once they are arrays.

    Raises `BridgeError` with the whole list of differences when a name is missing or surplus or a shape differs.
    """
    if isinstance(weights, Mapping):
        state = dict(weights)
    else:
        state = load_weights(weights)
    given = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    wanted = {name: tuple(tensor.shape) for name, tensor in _tensors_of(fn.module).items()}
    problems = [f"missing   {name} {shape}" for name, shape in wanted.items() if name not in given]
    problems += [f"surplus   {name} {shape}" for name, shape in given.items() if name not in wanted]
    for name, shape in wanted.items():
        if given.get(name, shape) != shape:
            problems.append(f"shape     {name} is {given[name]}, expected {shape}")
        elif name in fn.options.static and name in given and not torch.equal(state[name], fn.options.static[name]):
            problems.append(f"static    {name} has other values; export a module that has loaded these weights")
    for name, array in {**fn.params, **fn.buffers}.items():
        if isinstance(array, jax.ShapeDtypeStruct) and name not in wanted:
            what = "is on the meta device and no part of a state dict; assign its values before export"
            problems.append(f"no values {name} {array.shape} {what}")
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  … and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise BridgeError(f"the weights are of another module, {len(problems)} differences:\n  {shown}")
    params = dict(fn.params)
    buffers = dict(fn.buffers)
    for arrays in (params, buffers):  # a tied weight's other names hold the same values
        arrays |= {name: array_of(state.pop(name)).astype(arrays[name].dtype) for name in given.keys() & arrays.keys()}
    return params, buffers


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict without the entries of `get_extra_state`."""
    own = set(map(id, state_of(module).values()))
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) in own}


def state_dict(
    fn: Functional, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array]
) -> dict[str, torch.Tensor]:
    """Returns a PyTorch state dict: persistent tensors only, a tied weight under each name, and no extra state."""
    reals = state_of(fn.module)
    first_names = {id(tensor): name for name, tensor in reals.items()}
    windows = alias_roots(reals)
    arrays = {**params, **buffers, **{name: array_of(tensor) for name, tensor in fn.options.static.items()}}
    state = {}
    for name, slot in _tensors_of(fn.module).items():
        array = arrays[first_names[id(slot)]]
        tensor = tensor_of(array)
        root = windows.get(first_names[id(slot)], "")
        if root in params:  # it may have been updated since, and takes precedence
            shown = elements(reals[root], storage_offsets(slot))
            tensor = tensor_of(params[root]).reshape(-1)[torch.from_numpy(shown)]
        if jax_dtype(slot.dtype) == array.dtype:
            state[name] = tensor.to(slot.dtype)
        else:
            state[name] = tensor
    return state


def save_weights(path: str | os.PathLike, state: Mapping[str, torch.Tensor]) -> None:
    """Writes safetensors, either the whole file or nothing."""
    path = Path(path)
    scratch = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, scratch)
    os.replace(scratch, path)
