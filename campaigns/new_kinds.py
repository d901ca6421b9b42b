"""Draws two lists of 60 models each, of kinds and packages that the atlas lacks.

usage: python -m campaigns.new_kinds

`new_kinds.tsv` has the candidates: name, package whose style the model follows, what it exercises. The first list is
for work on the bridge. The second is held out: it is run once, after that work, and not read before.
"""

from __future__ import annotations

import random
from pathlib import Path

_SEED = 54
_SIZE = 60
_HERE = Path(__file__).parent
LISTS = ("new_kinds_work.tsv", "new_kinds_held_out.tsv")


def drawn() -> list[list[str]]:
    """Returns the lines of each list, in the order of the candidates."""
    candidates = (_HERE / "new_kinds.tsv").read_text().splitlines()
    order = random.Random(_SEED).sample(range(len(candidates)), _SIZE * len(LISTS))
    parts = [sorted(order[i * _SIZE : (i + 1) * _SIZE]) for i in range(len(LISTS))]
    return [[candidates[i] for i in part] for part in parts]


def main() -> None:
    for name, lines in zip(LISTS, drawn(), strict=True):
        (_HERE / name).write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {len(lines)} models")


if __name__ == "__main__":
    main()
