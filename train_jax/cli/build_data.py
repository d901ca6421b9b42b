"""`trm build-data`: generates, converts or inspects a data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse_subcommand
from train_jax.errors import check_options
from train_jax.plugin import entries, load_object
from train_jax.report.progress import progress_of


@dataclass(frozen=True)
class Inspect:
    """Prints counts, recipe, size and examples of a data set, repeated examples, and test examples in the train split.

    Examples are compared exactly and up to the symmetries of the puzzle. Nothing is written."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder of a data set, built by this project or by the published builders."""

    examples: Annotated[int, Range(0, 1000)] = 1
    """Number of examples of each split to show."""

    def check(self) -> None:
        """Raises `UserError` if a value is out of range."""
        check_options(self)


def builders() -> dict[str, Any]:
    """Returns the classes of the builders of all plugins, by name."""
    return {name: load_object(data.builder, "data") for name, data in entries("data").items()}


def commands() -> Mapping[str, Any]:
    """Returns the classes of the options, by the word after `trm build-data`."""
    return {**builders(), "inspect": Inspect}


def main(config: Any) -> None:
    """Builds with a builder, or inspects a data set with `Inspect`."""
    config.check()
    with progress_of() as progress:
        if isinstance(config, Inspect):
            lines = list(_builder_of(config.directory).inspected(config.directory, config.examples, progress))
        else:
            lines = [config.made(progress)]
    print("\n\n".join(lines))


def _builder_of(directory: Path) -> Any:
    """Returns the builder of a data set. Puzzles are the first: they say what an unknown folder lacks."""
    known = list(builders().values())
    return next((each for each in known if each.recognises(directory)), known[0])


def cli(argv: list[str]) -> None:
    unknown = "kind of data {}"
    description = "Generates, converts or inspects a data set."
    main(parse_subcommand(commands(), argv, prog="trm build-data", unknown=unknown, description=description))
