"""The command line of a configuration: `trm train NAME --field value …`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from train_jax.run.config import RunConfig, with_model


def command_of(name: str, config: RunConfig, default: RunConfig, preset: str | None = None) -> tuple[str, ...]:
    """Returns the words after `trm` that train `config`; `default` is what NAME, on this preset, stands for."""
    words = ["train", name, *(["--preset", preset] if preset else [])]
    if config.model != default.model:
        words += ["--model", config.model]
    return (*words, *options_of(config, with_model(default, config.model)))


def options_of(value: Any, default: Any) -> Iterator[str]:
    """Yields the options of the fields of a dataclass that differ from those of `default`."""
    return _options(value, default, "")


def _options(value: Any, default: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(value):
        here = getattr(value, field.name)
        before = getattr(default, field.name, dataclasses.MISSING)
        if dataclasses.is_dataclass(here):
            own = "" if field.name == "task_config" else f"{prefix}{field.name}."
            yield from _options(here, before, own)
        elif here != before:
            yield from _option(prefix, field.name, here)


def _option(prefix: str, name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{prefix}{'' if value else 'no-'}{name}".replace("_", "-")]
    option = f"--{prefix}{name}".replace("_", "-")
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [option, json.dumps([dataclasses.asdict(each) for each in value])]
    if isinstance(value, dict):
        return [option, json.dumps(value)]
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    return [f"{option}={value}"] if isinstance(value, str) else [option, str(value)]
