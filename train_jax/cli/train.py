"""`trm train PRESET`: trains a model, or continues a run."""

import sys
from typing import Any

from train_jax.run.arguments import FLAGS, option_value, parse_run
from train_jax.run.config import RunConfig
from train_jax.run.plan import differences, plan_lines, reference_run
from train_jax.run.presets import Presets, listed_presets, table_of
from train_jax.task import task_class


def main(config: RunConfig, *, verify: bool = True, heading: str = "") -> None:
    # A dry run needs none of them.
    from train_jax.run.tracking import duration
    from train_jax.runtime.clock import process_start
    from train_jax.runtime.compilation import use_compile_cache
    from train_jax.runtime.coordination import place
    from train_jax.runtime.devices import devices_of
    from train_jax.runtime.processes import is_main_process, join_processes
    from train_jax.storage.storage import path_of
    from train_jax.trainer.loop import train

    with join_processes(config.platform, cpu_devices=config.virtual_devices):
        if heading and is_main_process():
            print(heading, flush=True)
        shared = path_of(config.run_dir).parent / "compiled" if place()[1] > 1 else None
        without_cache = use_compile_cache(config.compute.compile_cache, shared)
        if without_cache and is_main_process():
            print(f"trm: {without_cache}", file=sys.stderr)
        devices = devices_of(config.compute)
        figures = train(config, devices, since=process_start(), verify=verify)
        if is_main_process():
            steps = figures["train_steps"]
            seconds = duration(figures["train_seconds"])
            summary = figures.get("summary", "not evaluated")
            print(f"finished: {config.run_dir}: {summary}, {steps:.0f} steps in {seconds}")


def dry_run(name: str, config: RunConfig, base: str | None = None) -> None:
    """Prints the differences from the baseline and the length of the run. Trains and writes nothing."""
    changed = differences(config, reference_run())
    on_data = f" on {config.data_dir}" if config.data_dir else ""
    print(f"{name}: {config.model}{on_data}, into {config.run_dir}")
    for field, (old, new) in changed.items():
        of_another = new is None and field.startswith(("arch.", "task_config."))  # another model or task has it
        if field not in ("run_dir", "data_dir") and not of_another:
            print(f"  {field}: {'' if old is None else f'baseline {old}, '}here {_shown(new)}")
    presets = _presets(name)
    known = presets.examples_per_epoch(name, config, base) if presets is not None else None
    per_epoch = task_class(config.task)(config).examples_per_epoch if known is None else known
    notes = presets.notes(name) if presets is not None else ()
    for line in (*plan_lines(config, per_epoch), *notes):
        print(f"  {line}")


def _presets(name: str) -> Presets | None:
    """Returns the table of a run that says something about its runs."""
    table = table_of(name)
    return table if isinstance(table, Presets) else None


def _shown(value: Any) -> Any:
    """Returns groups of parameters as text with the fields that are set, and any other value as it is."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], dict)):
        return value
    return "; ".join(", ".join(f"{k} {v}" for k, v in group.items() if v is not None) for group in value)


def cli(argv: list[str]) -> None:
    presets = listed_presets() if {"-h", "--help"} & set(argv) else ""
    name, config = parse_run(
        [word for word in argv if word not in FLAGS],
        prog="trm train",
        description=f"Train a model from a preset ({presets}) or an experiment (`trm sweep list`; "
        "`--preset NAME` applies its changes to another preset). d12-2026-r8 is nanochat's model of 2026 with 12 "
        "layers and 8 tokens per parameter; `--depth N` is the preset dN, or NAME with N layers. "
        "`--phase mid|sft|rl --init-from RUN` inherits from a run. `--dry-run` "
        "prints the plan, `--restarts N` restarts after a crash. `--model NAME` selects the --arch fields, `--task "
        "NAME` those of the task. `--no-verify` does not compare your own module with PyTorch.",
    )
    presets = _presets(name)
    heading = presets.heading(name, config) if presets is not None else ""
    if "--dry-run" in argv and heading:
        print(heading)
    elif "--dry-run" in argv:
        dry_run(name, config, option_value(argv, "--preset"))
    else:
        options: dict[str, Any] = {"heading": heading} if heading else {}
        if "--no-verify" in argv:
            options["verify"] = False
        main(config, **options)
