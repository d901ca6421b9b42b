"""Images and texts that `preview(outputs, batch)` of a script makes of the first test examples, for `trm report`.

They are computed by PyTorch with the weights of the run, in evaluation mode.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import bridge
from train_jax.core.objective import Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.model import build_module
from train_jax.script.models import as_given
from train_jax.script.structure import is_array, mapped
from train_jax.storage.files import write_text

if TYPE_CHECKING:
    from train_jax.run.folder import RunFolder
    from train_jax.script.task import ScriptTask

EXAMPLES = 8
"""Number of examples of a preview."""
FILE = "previews"
"""Name of the file in the folder with the evaluations of a run."""

Item = dict[str, str]
"""A `name`, and a `text` or a `png` in base64."""


def initial_preview(task: ScriptTask, config: RunConfig) -> list[Item]:
    """Returns the preview of the model before training. Raises `UserError` for a mistake in `preview`."""
    return _items(task, build_module(config, task, 1))


def trained_preview(task: ScriptTask, config: RunConfig, objective: Objective, state: TrainState) -> list[Item]:
    """Returns the preview of a state on the host; a mistake in `preview`, which ends no run, is its text."""
    module = build_module(config, task, 1)
    fn = objective.fn
    module.load_state_dict(bridge.state_dict(fn, fn.params | state.eval_params, fn.buffers | state.buffers))
    try:
        return _items(task, module)
    except UserError as error:
        return [{"name": "error", "text": str(error)}]


def write_preview(folder: RunFolder, items: list[Item]) -> None:
    write_text(folder.evaluation(FILE), json.dumps({"items": items}))


def _items(task: ScriptTask, module: nn.Module) -> list[Item]:
    script = task.script
    data = task.test_data or task.train_data
    if data.count is None:
        batch = data.batch(0, task.config.global_batch_size, (0, 1), task.config.seed)
    else:
        batch = data.rows(0, min(EXAMPLES, data.count))
    outputs = _outputs(task, module.eval(), batch)
    with torch.no_grad():
        made = script.call("preview", outputs, batch)
    return _listed(made, "", script.line_of("preview"))


def _outputs(task: ScriptTask, module: nn.Module, batch: Any) -> Any:
    """Returns what the model returns as the loss calls it first; a dict of this for several models."""
    script, models, found = task.script, as_given(module), dict[str, Any]()

    def noting(name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            found.setdefault(name, mapped(output, _detached))

        return note

    named = models.items() if isinstance(models, dict) else [("", models)]
    hooks = [each.register_forward_hook(noting(name)) for name, each in named]
    dtype = task.config.arch.torch_dtype
    try:
        # With gradients, which the loss of a potential needs for its forces.
        with (
            torch.random.fork_rng(devices=[]),
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
            script.errors_of("loss()"),
        ):
            torch.manual_seed(task.config.seed)
            script.loss(models, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise UserError(f"{script.line_of('loss')}: loss() does not call the model itself, whose outputs preview shows")
    return found if isinstance(models, dict) else found[""]


def _detached(value: Any, _: str) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _listed(value: Any, name: str, where: str) -> list[Item]:
    """Returns the items in a result of `preview`. Raises `UserError` for what is neither an image nor text."""
    if isinstance(value, str):
        return [{"name": name, "text": value}]
    if is_array(value):
        return [{"name": name, "png": base64.b64encode(_png(_pixels(value, name, where))).decode()}]
    if isinstance(value, Mapping):
        pairs = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(str(number), each) for number, each in enumerate(value, 1)]
    else:
        kind = type(value).__name__
        raise UserError(
            f"{where}: preview() returns {kind}, expected arrays H x W or H x W x 3, text, or a dict of them"
        )
    return [item for key, each in pairs for item in _listed(each, f"{name} {key}".strip(), where)]


def _pixels(value: Any, name: str, where: str) -> np.ndarray:
    """Returns an image as bytes; numbers with a fraction are from 0 to 1."""
    array = value.detach().float().numpy() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    array = np.asarray(array)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3) or not array.size:
        shape = tuple(array.shape)
        raise UserError(
            f"{where}: preview() returns {name or 'an array'} of shape {shape}, expected H x W or H x W x 3"
        )
    if array.dtype.kind == "f":
        return (np.nan_to_num(array).clip(0, 1) * 255).round().astype(np.uint8)
    return array.astype(np.int64).clip(0, 255).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """Returns an image of bytes, H x W or H x W x 3, as a PNG file."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = pixels.reshape(height, -1)
    without_filter = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(without_filter.tobytes())),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
