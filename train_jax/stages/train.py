"""`trm train PRESET`: train a model, or go on where the run stopped."""

import itertools
import json
import sys
from typing import Any

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.run.config import PRESETS, RunConfig, preset, with_model
from train_jax.run.tracking import duration
from train_jax.runtime.devices import Devices, join_processes


def main(config: RunConfig) -> None:
    join_processes()
    devices = Devices(runner=config.compute.runner)
    figures = train(config, devices)
    if not devices.writes:
        return
    print(
        f"finished: {config.run_dir}: exact accuracy {figures['exact_accuracy']:.4f} on {figures['count']:.0f} "
        f"held-out puzzles, {figures['train_steps']:.0f} steps in {duration(figures['train_seconds'])}"
    )


def cli(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    if name is None and not {"-h", "--help"} & set(rest):
        raise UserError(f"trm train needs a preset first; one of {', '.join(PRESETS)}")
    default = preset(name or next(iter(PRESETS)))
    main(
        parse(
            RunConfig,
            rest,
            default=with_model(default, model_in(rest) or default.model),
            prog=f"trm train {name or 'PRESET'}",
            description=f"Train a model. Presets: {', '.join(PRESETS)}. Defaults below are those of the preset. "
            "`--model NAME` also decides which --arch fields there are.",
            registry=JSON_OBJECTS,
        )
    )


def model_in(argv: list[str]) -> str | None:
    """What `--model` says: which fields of `--arch` there are hangs on it, so it is read before the rest."""
    given = [after for option, after in itertools.pairwise(argv) if option == "--model"]
    given += [word.removeprefix("--model=") for word in argv if word.startswith("--model=")]
    return given[-1] if given else None


JSON_OBJECTS = tyro.constructors.ConstructorRegistry()


@JSON_OBJECTS.primitive_rule
def json_object(field: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """`--arch.options '{"hidden": 64}'`."""
    if field.type != dict[str, Any]:
        return None

    def parse(words: list[str]) -> dict[str, Any]:
        try:
            value = json.loads(words[0])
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{words[0]} is no JSON object; write it as '{{\"name\": value}}'")
        return value

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


if __name__ == "__main__":
    cli(sys.argv[1:])
