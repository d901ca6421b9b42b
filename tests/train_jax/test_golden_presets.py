"""The configuration of every preset is that of its text file.

After a wanted change, write the files anew and read their difference before you commit it:

    WRITE_GOLDEN=1 bash tests/run.sh tests/train_jax/test_golden_presets.py

A file has the values that differ from the defaults of their class; `defaults.txt` has the defaults.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from train_jax.run.config import RunConfig
from train_jax.run.presets import preset, preset_names

FOLDER = Path(__file__).parents[1] / "golden" / "presets"
DERIVED = ("d4-2026-r0.5", "d24-2026-r8")
"""Names of presets that are not listed: their ends are tokens per parameter."""


def default_of(field: dataclasses.Field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def text_of(value: object) -> str:
    """Returns a value as text; floats without the last digits, which depend on the machine's `pow`."""
    return f"{value:.12g}" if isinstance(value, float) else repr(value)


def differing_lines(config: object, prefix: str = "") -> Iterator[str]:
    """Yields `name: value` for the values that are not the defaults of their class; names of nested ones have dots."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield f"{name}: {type(value).__name__}"
            yield from differing_lines(value, f"{name}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for number, each in enumerate(value):
                yield from differing_lines(each, f"{name}[{number}].")
        elif value != default_of(field):
            yield f"{name}: {text_of(value)}"


def classes_of(config: object) -> Iterator[type]:
    """Yields the class of a configuration and those of the values in it."""
    yield type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                yield from classes_of(each)


def default_lines(cls: type) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        default = default_of(field)
        if default is dataclasses.MISSING:
            yield f"{cls.__name__}.{field.name}"
        elif not dataclasses.is_dataclass(default):
            yield f"{cls.__name__}.{field.name}: {text_of(default)}"


def texts() -> dict[str, str]:
    """Returns the text of every file by its name."""
    presets: dict[str, RunConfig] = {name: preset(name) for name in (*preset_names(), *DERIVED)}
    classes = {cls for config in presets.values() for cls in classes_of(config)}
    lines = {name: list(differing_lines(config)) for name, config in presets.items()}
    lines["defaults"] = [line for cls in sorted(classes, key=lambda cls: cls.__name__) for line in default_lines(cls)]
    return {f"{name}.txt": "".join(f"{line}\n" for line in each) for name, each in lines.items()}


def test_every_preset_is_that_of_its_file():
    found = texts()
    if os.environ.get("WRITE_GOLDEN"):
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path in FOLDER.iterdir():
            path.unlink()
        for name, text in found.items():
            (FOLDER / name).write_text(text)
    expected = {path.name: path.read_text() for path in FOLDER.iterdir()}
    differences = []
    for name in sorted(found.keys() | expected.keys()):
        before = expected.get(name, "")
        after = found.get(name, "")
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"file {name}", f"preset {name}", n=0, lineterm=""
        )
        differences += lines
    assert not differences, "\n".join(["write the files anew if this is wanted:", *differences])
