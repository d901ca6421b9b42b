"""`trm train PRESET`: train a model, or go on where the run stopped."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.optim.config import ParameterGroup
from train_jax.run.config import RunConfig, with_model, with_task
from train_jax.run.presets import all_presets, preset
from train_jax.run.tracking import duration
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process, join_processes


def main(config: RunConfig) -> None:
    join_processes()
    devices = Devices(runner=config.compute.runner)
    figures = train(config, devices)
    if is_main_process():
        steps, seconds = figures["train_steps"], duration(figures["train_seconds"])
        print(f"finished: {config.run_dir}: {figures['summary']}, {steps:.0f} steps in {seconds}")


def cli(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    presets = all_presets()
    if name is None and not {"-h", "--help"} & set(rest):
        raise UserError(f"trm train needs a preset first; one of {', '.join(presets)}")
    default = preset(name or next(iter(presets)))
    default = with_task(default, option_value(rest, "--task") or default.task)
    main(
        parse(
            RunConfig,
            rest,
            default=with_model(default, option_value(rest, "--model") or default.model),
            prog=f"trm train {name or 'PRESET'}",
            description=f"Train a model. Presets: {', '.join(presets)}. Defaults below are those of the preset. "
            "`--model NAME` also decides which --arch fields there are, `--task NAME` which fields of the task.",
            registry=JSON_VALUES,
        )
    )


def option_value(argv: list[str], option: str) -> str | None:
    """The value of an option that decides which other options there are, so that it is read before the rest."""
    values = [after for word, after in itertools.pairwise(argv) if word == option]
    values += [word.removeprefix(f"{option}=") for word in argv if word.startswith(f"{option}=")]
    return values[-1] if values else None


JSON_VALUES = tyro.constructors.ConstructorRegistry()


@JSON_VALUES.primitive_rule
def json_value(field: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """`--arch.options '{"hidden": 64}'` and `--optim.groups '[{"pattern": ".*bias", "weight_decay": 0}]'`."""
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
