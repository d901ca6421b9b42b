"""A run of a script as a folder of `save_pretrained`, or as a program that serves its model without PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax import export
from torch import nn

import bridge
from train_jax.core.objective import Objective
from train_jax.errors import UserError
from train_jax.run.model import build_module
from train_jax.run.restore import Restored
from train_jax.script.models import Models, add_method, as_given
from train_jax.script.program import LAYOUT, PROGRAM, WEIGHT, Program, as_stored
from train_jax.script.structure import Form, arrays_in
from train_jax.script.task import ScriptTask
from train_jax.storage.files import whole_file

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms of a program, by their names in `jax.export`."""
AGREEING = 1e-4
"""Largest difference of an output from PyTorch's, relative to its largest entry."""
_METHOD = "script_forward"


def write_pretrained(run: Restored, folder: Path) -> Iterator[Path]:
    """Writes the model by its own `save_pretrained`, each of several into a folder of its name; yields the files.

    Raises `UserError` for a model without this method.
    """
    task = _task_of(run)
    module = _module_of(run, task)
    for name, model in as_given(module).items() if isinstance(module, Models) else [("", module)]:
        model.__class__ = task.class_of(model)
        save: Any = getattr(model, "save_pretrained", None)
        if not callable(save):
            what = f"{type(model).__name__} {name}".strip()
            raise UserError(f"{task.script.line_of('model')}: {what} has no save_pretrained; use --format safetensors")
        with task.script.errors_of("save_pretrained()"):
            save(str(folder / name))
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def write_program(run: Restored, output: Path, sizes: Sequence[int]) -> str:
    """Writes the model as programs of `jax.export` for batches of these sizes, with its weights, into one file.

    The model is called as the loss calls it first, in evaluation mode. Returns a line about the comparison with
    PyTorch. Raises `UserError` for several models, for a loss that does not call the model, and where PyTorch differs.
    """
    task = _task_of(run)
    if not sizes or min(sizes) < 1:
        raise UserError(f"--batch-sizes has {sizes}, expected numbers of examples, such as 1,8")
    module = build_module(run.config, task, 1).eval()
    if isinstance(module, Models):
        raise UserError(f"{task.script.line_of('model')}: model() returns several; a program serves one")
    calls = {size: _first_call(module, task, size) for size in sorted(set(sizes))}
    largest = calls[max(calls)]
    add_method(module, _METHOD, _forward_of(largest))
    objective = Objective(bridge.export(module), task)
    weights = {f"params.{n}": a for n, a in run.state.eval_params.items()}
    weights |= {f"buffers.{n}": a for n, a in run.state.buffers.items()}
    stored, dtypes = as_stored({name: np.asarray(array) for name, array in weights.items()})

    def serve(weights: dict[str, Any], inputs: dict[str, Any], call: _Call) -> dict[str, Any]:
        params = {n.removeprefix("params."): a for n, a in weights.items() if n.startswith("params.")}
        buffers = {n.removeprefix("buffers."): a for n, a in weights.items() if n.startswith("buffers.")}
        run_method = objective.call(params, buffers, train=False, rng=jax.random.key(0))
        outputs = run_method(call.arrays | inputs, method=_METHOD)[0]
        return {name: array for name, array in outputs.items() if array.ndim and len(array) == call.size}

    used = _used_inputs(serve, weights, largest)
    entries = {WEIGHT + name: array for name, array in stored.items()}
    for size, made in calls.items():
        inputs = {name: made.arrays[name] for name in used}
        program = export.export(jax.jit(functools.partial(serve, call=made)), platforms=PLATFORMS)(weights, inputs)
        entries[f"{PROGRAM}{size}"] = np.frombuffer(program.serialize(), np.uint8)
    rows = {name: bool(a.ndim) and len(a) == largest.size for name, a in largest.arrays.items()}
    described = {n: [largest.arrays[n].dtype.name, list(largest.arrays[n].shape), rows[n]] for n in used}
    layout = {"sizes": sorted(calls), "inputs": described, "dtypes": dtypes, "jax": jax.__version__}
    entries[LAYOUT] = np.frombuffer(json.dumps(layout).encode(), np.uint8)
    with whole_file(output) as scratch, scratch.open("wb") as file:
        np.savez(file, **entries)  # pyright: ignore[reportArgumentType]
    return _comparison(run, task, largest, Program(output))


def _used_inputs(serve: Any, weights: Any, call: _Call) -> list[str]:
    """Returns the names of the inputs that outputs with a row for each example depend on: labels, say, are not."""
    program = export.export(jax.jit(functools.partial(serve, call=call)))(weights, call.arrays)
    if not program.out_avals:
        raise UserError("the model returns no tensor with a row for each example, which a program needs")
    leaves = list(jax.tree.leaves(({n: "" for n in weights}, {n: n for n in call.arrays})))
    return [leaves[index] for index in program.module_kept_var_idx if leaves[index]]


@dataclasses.dataclass(frozen=True)
class _Call:
    """The first call of the model on a batch of a size."""

    size: int
    form: Form
    """Its arguments by the names in the signature of `forward`."""
    arrays: dict[str, np.ndarray]
    arguments: dict[str, Any]
    signature: inspect.Signature


class _Called(BaseException):
    """Ends the loss at the first call of the model; no `except Exception` of the script ends it."""


def _first_call(module: nn.Module, task: ScriptTask, size: int) -> _Call:
    data = task.test_data or task.train_data
    if data.count is None:
        raise UserError(f"{task.script.file} has no examples by number, whose shapes a program has; return a Dataset")
    if size > data.count:
        raise UserError(f"--batch-sizes {size} is above the {data.count} examples; give smaller sizes")
    batch = data.rows(0, size)
    found: list[tuple[Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))
        raise _Called

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), task.script.errors_of("loss()"):
            task.script.loss(module, batch)
    except _Called:
        pass
    finally:
        hook.remove()
    if not found:
        raise UserError(f"{task.script.line_of('loss')}: loss() does not call the model itself, which a program needs")
    signature = inspect.signature(module.forward)
    args, kwargs = found[0]
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    form = Form(arguments)
    return _Call(size, form, form.arrays(arguments, "loss()"), arguments, signature)


def _forward_of(call: _Call) -> Any:
    """Returns the method that calls the model with arrays by name, and returns the tensors of its result by name."""

    def script_forward(self: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.BoundArguments(call.signature, call.form.batch(inputs))  # pyright: ignore[reportArgumentType]
        return arrays_in(self(*bound.args, **bound.kwargs))

    return script_forward


def _comparison(run: Restored, task: ScriptTask, call: _Call, program: Program) -> str:
    module = _module_of(run, task).eval()
    bound = inspect.BoundArguments(call.signature, call.arguments)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        theirs = arrays_in(module(*bound.args, **bound.kwargs))
    ours = program({name: call.arrays[name] for name in program.inputs})
    worst = 0.0
    for name, array in ours.items():
        expected = torch.as_tensor(theirs[name]).double().numpy()
        error = np.abs(expected - array.astype(np.float64)).max(initial=0.0)
        worst = max(worst, float(error / max(np.abs(expected).max(initial=0.0), 1e-30)))
    if not worst <= AGREEING:
        raise UserError(f"{run.folder.path}: the program differs from PyTorch by {worst:.0e} of the largest output")
    return f"PyTorch agrees: {', '.join(ours)} of {call.size} examples to {worst:.0e}"


def _module_of(run: Restored, task: ScriptTask) -> nn.Module:
    """Returns the module of the script with the weights of the run."""
    module = build_module(run.config, task, 1)
    module.load_state_dict(run.state_dict(), strict=True)
    return module


def _task_of(run: Restored) -> ScriptTask:
    assert isinstance(run.task, ScriptTask)
    return run.task
