"""Parses the arguments that name a run: a preset or an experiment, then any field of `RunConfig`."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

import tyro

from train_jax.command_line import parse
from train_jax.core.optim.config import ParameterGroup
from train_jax.errors import UserError
from train_jax.plugin import entries, load_object, names_object
from train_jax.run.config import RunConfig, with_model
from train_jax.run.presets import listed_presets, preset, preset_names
from train_jax.task import task_class

_DEPTH = re.compile(r"(?:(?<=^chat-)|^)d[0-9]+(?=-|$)")
"""The depth in the name of a preset, such as d12-2026-r8 or chat-d4."""


FLAGS = ("--dry-run", "--no-verify")
"""Options of `trm train` without a value, which are no fields of the run."""
SHORT = {"--bf16": ("--arch.forward-dtype", "bfloat16"), "--shard": ("--compute.shard",)}
"""Short words for fields of a run."""


def parse_run(argv: list[str], *, prog: str, description: str) -> tuple[str, RunConfig]:
    """Parses `NAME [--field value …]`; returns the name and the configuration. `--help` prints it and exits.

    `--preset NAME` applies the changes of an experiment to another preset; `--phase NAME` inherits the fields of the
    run `--init-from`; `--model` and `--task` determine the fields of the architecture and of the task; `--depth N` is
    that of a preset by depth; `SHORT` has words for fields. Raises `UserError` for invalid arguments.
    """
    argv = with_depth(argv)
    argv = [each for word in argv for each in SHORT.get(word, (word,))]
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    if name is None and not {"-h", "--help"} & set(rest):
        raise UserError(f"{prog} needs a preset or an experiment as its first argument; presets are {listed_presets()}")
    default = preset(name or preset_names()[0])
    for option, function in entries("derivations").items():
        value, rest = take_option(rest, option)
        if value is not None:
            default = load_object(function, option)(name or "", default, value, rest)
    model = option_value(rest, "--model")
    task = option_value(rest, "--task")
    default = with_model(default, model or default.model, task or default.task)
    _refuse_arguments_of_an_own_model(default, rest)
    config = parse(
        RunConfig,
        rest,
        default=default,
        prog=f"{prog} {name or 'PRESET'}",
        description=description,
        registry=JSON_VALUES,
    )
    check_given = getattr(task_class(config.task), "check_given", None)  # a user's task may be a function
    if check_given is not None:
        check_given(config, given_fields(rest))
    return name or "", config


def _refuse_arguments_of_an_own_model(config: RunConfig, argv: Sequence[str]) -> None:
    """Raises `UserError` for `--arch.hidden-size` where the model is a class of the user: it takes --arch.options."""
    if not names_object(config.model):
        return
    known = {field.name for field in dataclasses.fields(config.arch)}
    for word in argv:
        option, _, _ = word.partition("=")
        name = option.removeprefix("--arch.").replace("-", "_")
        if option.startswith("--arch.") and name not in known and name.removeprefix("no_") not in known:
            options = json.dumps({name: "…"}, ensure_ascii=False).replace('"…"', "…")
            raise UserError(f"{option} is no option of {config.model}; give it as --arch.options '{options}'")


def given_fields(argv: Sequence[str]) -> list[str]:
    """Returns the fields that options set, by dotted name, whatever their values are."""
    options = [word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--")]
    names = [option.replace("-", "_").rpartition(".") for option in options]
    return [f"{part}{dot}{field.removeprefix('no_')}" for part, dot, field in names]


def split_arguments(argv: list[str], command: Any, *, prog: str) -> tuple[list[str], list[str]]:
    """Splits `NAME [--option …]` into the arguments of a stage and those that name the run, both with NAME.

    The options of the stage are the fields of its dataclass; boolean ones have no value. Raises `UserError` without a
    NAME.
    """
    argv = with_depth(argv)
    if {"-h", "--help"} & set(argv):
        return ["--help"], []
    if not argv or argv[0].startswith("-"):
        raise UserError(f"{prog} needs a preset or an experiment as its first argument")
    fields = {f"--{field.name.replace('_', '-')}": field.type for field in dataclasses.fields(command)}
    flags = {option for option, kind in fields.items() if kind in (bool, "bool")}
    flags |= {option.replace("--", "--no-", 1) for option in flags}
    own = argv[:1]
    rest = argv[:1]
    words = iter(argv[1:])
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in flags:
            own.append(word)
        elif option in fields:
            own += [word] if "=" in word else [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
    return own, rest


def with_depth(argv: list[str]) -> list[str]:
    """Replaces `--depth N` by the name of a preset: `dN`, or the NAME given with another depth.

    Raises `UserError` for what is no depth, and for a NAME without one.
    """
    depth, rest = take_option(argv, "--depth")
    if depth is None:
        return argv
    if not re.fullmatch(r"[0-9]{1,6}", depth):
        raise UserError(
            f"--depth {depth} is not a number of layers; presets by depth are {listed_presets(by_depth=True)}"
        )
    if not rest or rest[0].startswith("-"):
        return [f"d{depth}", *rest]
    name, count = _DEPTH.subn(f"d{int(depth)}", rest[0], count=1)
    if not count:
        presets = listed_presets(by_depth=True)
        raise UserError(f"--depth {depth} is no option of {rest[0]}; omit it, or use a preset by depth: {presets}")
    return [name, *rest[1:]]


def take_option(argv: list[str], option: str) -> tuple[str | None, list[str]]:
    """Returns the value of an option, and the arguments without it."""
    value = option_value(argv, option)
    rest = []
    words = iter(argv)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            rest.append(word)
    return value, rest


def option_value(argv: Sequence[str], option: str) -> str | None:
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
    # The type of a default with groups, which a preset may have, names each of them.
    if get_origin(field.type) is tuple and {*get_args(field.type), ...} == {ParameterGroup, ...}:
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
