"""`trm train PRESET`: trains a model, or continues a run."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.experiments.runs import differences, named_run, plan
from train_jax.experiments.table import EXPERIMENTS
from train_jax.loop import train
from train_jax.optim.config import ParameterGroup
from train_jax.run.config import RunConfig, with_model, with_task
from train_jax.run.presets import all_presets
from train_jax.run.tracking import duration
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process, join_processes
from train_jax.tasks.task import task_class


def main(config: RunConfig) -> None:
    with join_processes():
        devices = Devices(runner=config.compute.runner)
        figures = train(config, devices)
        if is_main_process():
            steps, seconds = figures["train_steps"], duration(figures["train_seconds"])
            print(f"finished: {config.run_dir}: {figures['summary']}, {steps:.0f} steps in {seconds}")


def dry_run(name: str, config: RunConfig) -> None:
    """Prints the differences from the baseline and the length of the run. Trains and writes nothing."""
    changed = differences(config, named_run("baseline"))
    print(f"{name}: {config.model} on {config.data_dir}, into {config.run_dir}")
    for field, (old, new) in changed.items():
        if field not in ("run_dir", "data_dir"):
            print(f"  {field}: baseline {old}, here {new}")
    row = EXPERIMENTS.get(name)
    if row is not None and config.data_dir == row.data_dir:
        per_epoch = float(row.puzzles)  # an epoch has one augmentation of each puzzle; the data set need not exist
    else:
        per_epoch = task_class(config.task)(config).examples_per_epoch
    for line in plan(config, per_epoch).lines():
        print(f"  {line}")


def cli(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    presets = all_presets()
    if name is None and not {"-h", "--help"} & set(rest):
        raise UserError(
            f"trm train needs a preset or an experiment as its first argument; presets are {', '.join(presets)}"
        )
    base, rest = take_option(rest, "--preset")
    default = named_run(name or next(iter(presets)), base)
    default = with_task(default, option_value(rest, "--task") or default.task)
    config = parse(
        RunConfig,
        [word for word in rest if word != "--dry-run"],
        default=with_model(default, option_value(rest, "--model") or default.model),
        prog=f"trm train {name or 'PRESET'}",
        description=f"Train a model from a preset ({', '.join(presets)}) or an experiment (`trm sweep list`; "
        "`--preset NAME` applies its changes to another preset). Defaults below are those of the preset. `--dry-run` "
        "prints the differences from the baseline, steps and examples, and trains nothing. `--restarts N` starts the "
        "run again after a crash, up to N times. `--model NAME` selects "
        "the --arch fields, `--task NAME` the fields of the task.",
        registry=JSON_VALUES,
    )
    if "--dry-run" in rest:
        dry_run(name or "", config)
    else:
        main(config)


def take_option(argv: list[str], option: str) -> tuple[str | None, list[str]]:
    """Returns the value of an option, and the arguments without it."""
    value, rest = option_value(argv, option), []
    words = iter(argv)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            rest.append(word)
    return value, rest


def option_value(argv: list[str], option: str) -> str | None:
    """Returns the value of an option that determines the other options, and is therefore parsed first."""
    values = [after for word, after in itertools.pairwise(argv) if word == option]
    values += [word.removeprefix(f"{option}=") for word in argv if word.startswith(f"{option}=")]
    return values[-1] if values else None


JSON_VALUES = tyro.constructors.ConstructorRegistry()


@JSON_VALUES.primitive_rule
def json_value(field: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parses `--arch.options '{"hidden": 64}'` and `--optim.groups '[{"pattern": ".*bias", "weight_decay": 0}]'`."""
    if field.type == dict[str, Any]:
        return _json_spec(dict, "object", "'{\"name\": value}'", lambda value: value, lambda value: value)
    if field.type == tuple[ParameterGroup, ...]:
        return _json_spec(
            list,
            "list of objects",
            '\'[{"pattern": ".*bias", "weight_decay": 0}]\'',
            lambda groups: tuple(ParameterGroup(**group) for group in groups),
            lambda groups: [dataclasses.asdict(group) for group in groups],
        )
    return None


def _json_spec(
    kind: type, name: str, example: str, read: Callable[[Any], Any], write: Callable[[Any], Any]
) -> tyro.constructors.PrimitiveConstructorSpec:
    def parse_json(words: list[str]) -> Any:
        try:
            value = json.loads(words[0])
            if not isinstance(value, kind):
                raise TypeError
            return read(value)
        except (ValueError, TypeError):
            raise ValueError(f"{words[0]} is not a JSON {name}; write it as {example}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=parse_json,
        is_instance=lambda value: isinstance(value, (dict, tuple)),
        str_from_instance=lambda value: [json.dumps(write(value))],
    )


if __name__ == "__main__":
    cli(sys.argv[1:])
