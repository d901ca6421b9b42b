"""The difficulty of a Sudoku: the guesses of a fixed solver to find the solution and to prove that it is unique.

The solver fills in naked and hidden singles until there are none. Then it guesses: it selects the cell with the fewest
candidates (the first of equals) and searches both branches, the lowest candidate set and the lowest candidate excluded.
A rating of 0 means that no guess is needed. The solver always searches the whole tree, so the order of the search does
not matter. The choice between equal cells does, so an equivalent puzzle may have a slightly different rating.

Among random 9x9 puzzles without a redundant given, 59 % need a guess, 14 % five, 3 % ten and 0.5 % twenty. With 50
empty cells it is 11 %, 0.5 %, 0.07 % and none (4096 puzzles each). The rating in the public Sudoku-Extreme tables
counts the backtracks of another solver (tdoku), so its scale is different.
"""

import numpy as np
from jaxtyping import Float, Integer, Num, UInt8

from train_jax.tasks.puzzles.sudoku.grid import Geometry
from train_jax.tasks.puzzles.sudoku.solver import solve


def ratings(puzzles: UInt8[np.ndarray, "n cells"], geometry: Geometry) -> Integer[np.ndarray, "n"]:
    """Returns the number of guesses for every puzzle. Every puzzle must have one solution or none."""
    return solve(puzzles, geometry, limit=2).guesses


def describe_guesses(guesses: Integer[np.ndarray, "n"]) -> str:
    """Describes the distribution of guesses in one line."""
    return (
        f"{guesses.min()} to {guesses.max()} guesses, mean {guesses.mean():.1f}, median {np.median(guesses):g}, "
        f"{(guesses > 0).mean():.1%} need one"
    )


def rank_correlation(one: Num[np.ndarray, "n"], other: Num[np.ndarray, "n"]) -> float:
    """Returns Spearman's rank correlation; 0 if one of the arrays is constant."""
    ranks = np.stack([_ranks(values) for values in (one, other)])
    if ranks.std(axis=1).min() == 0:
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Num[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Returns the ranks of the values; equal values get the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
