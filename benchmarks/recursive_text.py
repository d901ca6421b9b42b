"""Measures if recursion helps a small language model: sums, sorting and Sudokus of 4 x 4 cells, with checked answers.

`python -m benchmarks.recursive_text write FILE.jsonl` writes the samples for `trm build-data instructions`;
`python -m benchmarks.recursive_text score DATA RUN …` prints the share of held-out responses that are right, by task,
as the engine generates them, and with --cycles for other numbers of cycles; docs/hrm_text.md has the commands.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from train_jax.language.chat.sudoku import solved_grids
from train_jax.language.documents import is_test
from train_jax.language.generation import TextModel, with_cycles
from train_jax.language.sampling import Sampling
from train_jax.run.restore import restore

COUNT = 12_000
"""Number of different samples of a task; there are 10 000 sums."""
TEST_SHARE = 0.05
Pair = tuple[str, str]
"""An instruction and its response."""


def add(rng: Random) -> Pair:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a}+{b}", str(a + b)


def sort(rng: Random) -> Pair:
    digits = [rng.choice("0123456789") for _ in range(8)]
    return "sort " + "".join(digits), "".join(sorted(digits))


def sudokus() -> Callable[[Random], Pair]:
    """Returns puzzles with 8 to 10 empty cells and one solution."""
    solved = solved_grids()

    def sudoku(rng: Random) -> Pair:
        grid, empty = rng.choice(solved), rng.randrange(8, 11)
        while True:
            hidden = set(rng.sample(range(16), empty))
            asked = "".join("." if place in hidden else cell for place, cell in enumerate(grid))
            fits = sum(all(a in (".", b) for a, b in zip(asked, other, strict=True)) for other in solved)
            if fits == 1:
                return asked, grid

    return sudoku


def pairs(seed: int = 0) -> Iterator[Pair]:
    rng, seen = Random(seed), set()
    for task in (add, sort, sudokus()):
        count = 0
        for _ in range(4 * COUNT):
            if count == COUNT:
                break
            pair = task(rng)
            if pair[0] not in seen:
                seen.add(pair[0])
                count += 1
                yield pair


def task_of(instruction: str) -> str:
    return "sums" if "+" in instruction else "sorting" if instruction.startswith("sort") else "Sudokus"


def score(data_dir: str, run_dir: str, cycles: int) -> dict[str, float]:
    """Returns the share of correct responses by task."""
    held_out = [pair for pair in pairs() if is_test(pair[0], 0, TEST_SHARE)]
    model = TextModel(with_cycles(restore(run_dir), cycles), data_dir)
    sampling = Sampling(temperature=0)
    requests = model.requests([asked for asked, _ in held_out], num_samples=1, max_tokens=20, sampling=sampling)
    right: dict[str, list[bool]] = {}
    for (asked, response), row in zip(held_out, model.complete(requests, batch_size=128), strict=True):
        found = row.finish == "stop" and model.tokenizer.decode(row.content) == response
        right.setdefault(task_of(asked), []).append(found)
    all_tasks = [verdict for verdicts in right.values() for verdict in verdicts]
    return {task: sum(each) / len(each) for task, each in (right | {"all": all_tasks}).items()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "score"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--cycles", type=int, nargs="*", default=[0])
    options = parser.parse_args(argv)
    if options.what == "write":
        lines = (json.dumps({"instruction": asked, "response": response}) for asked, response in pairs())
        Path(options.paths[0]).write_text("".join(f"{line}\n" for line in lines))
        return
    data_dir, *run_dirs = options.paths
    for run_dir, cycles in itertools.product(run_dirs, options.cycles):
        shares = score(data_dir, run_dir, cycles)
        figures = "  ".join(f"{task} {share:.3f}" for task, share in shares.items())
        print(f"{run_dir}  cycles {cycles or 'as trained'}  {figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
