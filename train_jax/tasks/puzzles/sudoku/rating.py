"""How hard a Sudoku is: the guesses that a fixed solver needs to solve it and to prove that there is no other solution.

The solver fills in naked and hidden singles until there are none. Then it guesses: it takes the cell with the fewest
candidates, the first of equals, tries the lowest one and rules it out, and follows both ways to their ends. A rating of
0 needs no guess. The search always goes over the whole tree, so its order does not matter; ties between cells do, so a
symmetric copy of a puzzle may have a slightly different rating.

Of random 9x9 puzzles from which no given can be left out, 59 % need a guess, 14 % five, 3 % ten and 0.5 % twenty; of
those with 50 empty cells 11 %, 0.5 %, 0.07 % and none (4096 of each). The rating in the public Sudoku-Extreme tables
counts the backtracks of another solver (tdoku), so its scale is another one.
"""

import numpy as np
from jaxtyping import Float, Integer, Num, UInt8

from train_jax.tasks.puzzles.sudoku.grid import Geometry
from train_jax.tasks.puzzles.sudoku.solver import solve


def ratings(puzzles: UInt8[np.ndarray, "n cells"], geometry: Geometry) -> Integer[np.ndarray, "n"]:
    """Guesses for every puzzle; they have to have one solution or none."""
    return solve(puzzles, geometry, limit=2).guesses


def describe_guesses(guesses: Integer[np.ndarray, "n"]) -> str:
    """The distribution in a few words."""
    return (
        f"{guesses.min()} to {guesses.max()} guesses, mean {guesses.mean():.1f}, median {np.median(guesses):g}, "
        f"{(guesses > 0).mean():.1%} need one"
    )


def rank_correlation(one: Num[np.ndarray, "n"], other: Num[np.ndarray, "n"]) -> float:
    """Spearman's; 0 where one of them is the same everywhere."""
    ranks = np.stack([_ranks(values) for values in (one, other)])
    if ranks.std(axis=1).min() == 0:
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Num[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Equal values share the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
