"""`trm export RUN_DIR`: writes the averaged weights with PyTorch names and checks them in plain PyTorch, or writes a
folder for `transformers`."""

import dataclasses
import json
from typing import Annotated, Literal

import tyro

import bridge
from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.report.commands import Console, commands_of
from train_jax.report.progress import progress
from train_jax.run.restore import Restored, restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.storage.files import check_output, check_regular, local_copy, whole_file, write_text
from train_jax.storage.storage import is_folder, path_of


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the averaged weights of a run as safetensors with PyTorch names, and compare PyTorch with JAX."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Folder of a run of `trm train`, also gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step, whose results are then in RUN/at-step-N."""
    average: str = ""
    """Export the mean of the weights of these checkpoints, such as 10,20,30, into RUN/average-of-10-20-30."""
    average_last: Annotated[int, Range(0, 10**6)] = 0
    """Export the mean of the weights of this many newest checkpoints; 0 for none."""
    format: Literal["safetensors", "huggingface", "program"] = "safetensors"
    """A file with the names of the PyTorch module; a folder for from_pretrained, of --model gpt and hrm_text and of
    scripts whose model has save_pretrained, which is not checked; or, of scripts, a file that serves the model without
    PyTorch (docs/your_script.md)."""
    batch_sizes: str = "1,8"
    """Numbers of examples for which --format program has a program."""
    output: str | None = None
    """Output file or folder; by default weights.safetensors, huggingface or model.npz in the run folder."""
    train_step: bool = False
    """Write the training step instead, with all state of a checkpoint: forward, backward, optimizer and averages, a
    folder that runs without PyTorch (docs/jax.md)."""
    devices: Annotated[int, Range(1, 10**6)] = 1
    """Number of devices for --train-step, at most those of this machine."""
    check: bool = True
    """Load the file with strict=True into the PyTorch module and compare: the answers to all test puzzles, or the
    losses of held-out text."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(config: Export) -> None:
    use_on_one_host(config.platform)
    if config.train_step:
        _write_step(config)
        return
    average = _numbers("--average", config.average)
    run = restore(config.run_dir, step=config.step, average=average, average_last=config.average_last)
    if config.format == "huggingface":
        _write_folder(config, run)
        return
    commands = commands_of(run.config.task)
    if config.format == "program":
        output = path_of(config.output) if config.output else run.folder.path / "model.npz"
        check_output(output)
        check_regular(output, "give another --output")
        line = commands.write_program(run, output, _numbers("--batch-sizes", config.batch_sizes))
        print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; {line}")
        return
    if config.check and not commands.checks_exports:
        raise UserError(f"runs of task {run.config.task} have no check in PyTorch; use --no-check")
    output = path_of(config.output) if config.output else run.folder.weights
    if not config.output:
        output.parent.mkdir(exist_ok=True)
    check_output(output)
    if config.check:
        check_regular(output, "use --no-check")
    state = run.state_dict()
    with whole_file(output) as scratch:
        bridge.save_weights(scratch, state)
    print(f"{output}: {len(state)} tensors, {output.stat().st_size / 1e6:.1f} MB")
    if not config.check:
        return
    print("comparing its outputs in PyTorch and in JAX; --no-check leaves that out", flush=True)
    # Both sides compute in float32: the check is of the weights, and the two frameworks round bfloat16 differently.
    with local_copy(output) as weights:
        check = commands.check_export(run.in_float32(), weights, Console(print, progress))
    write_text(run.folder.export_check, json.dumps(dataclasses.asdict(check), indent=1))
    print(f"{check}{check.details}")
    if not check.agrees:
        raise SystemExit(1)


def _write_folder(config: Export, run: Restored) -> None:
    output = path_of(config.output) if config.output else run.folder.results / "huggingface"
    if not config.output:
        output.parent.mkdir(exist_ok=True)
    if not is_folder(output.parent):
        raise UserError(f"{output.parent} is not a folder; give --output in an existing folder")
    for path in commands_of(run.config.task).write_folder(run, output):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _write_step(config: Export) -> None:
    from train_jax.trainer.exported_step import export_step, write_step  # imports everything that training needs

    if config.average or config.average_last or config.format != "safetensors":
        raise UserError("--train-step exports one checkpoint; leave out --average, --average-last and --format")
    exported = export_step(config.run_dir, config.step, config.devices)
    output = path_of(config.output) if config.output else path_of(config.run_dir) / "train-step"
    write_step(output, exported)
    size = sum(array.nbytes for array in exported.arrays.values()) / 1e6
    print(f"{output}: the step after step {exported.step}, {len(exported.arrays)} arrays, {size:.1f} MB")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(step) for step in text.split(",") if step)
    except ValueError:
        raise UserError(f"{option} {text} is not a list of numbers; write it as 10,20,30") from None
