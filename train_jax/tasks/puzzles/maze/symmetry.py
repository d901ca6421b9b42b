"""The symmetries of mazes: the eight rotations and reflections ("turns") of a square, and invariant fingerprints."""

from functools import lru_cache

import numpy as np
from jaxtyping import Integer, UInt8, UInt64

from train_jax.tasks.puzzles.dihedral import TURNS, cell_orders, turned
from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.kind import Tokens, Words
from train_jax.tasks.puzzles.maze.grid import GOAL, START, VOCAB_SIZE

BLOCK = 1024


def all_turns(mazes: UInt8[np.ndarray, "n cells"]) -> UInt8[np.ndarray, "n 8 cells"]:
    """Applies the eight turns to every maze, in the order of the published builder; the first is the identity."""
    return mazes[:, cell_orders(round(mazes.shape[1] ** 0.5))]


def transform_tokens(inputs: Tokens, labels: Tokens, words: Words) -> tuple[Tokens, Tokens]:
    """Transforms every example of a batch by the turn that its random words select, all turns equally likely."""
    size = round(inputs.shape[1] ** 0.5)
    turns = words[0] >> np.uint64(61)
    new_inputs, new_labels = np.empty_like(inputs), np.empty_like(labels)
    for turn in range(len(TURNS)):
        rows = np.flatnonzero(turns == turn)
        for tokens, new in ((inputs, new_inputs), (labels, new_labels)):
            new[rows] = turned(tokens[rows].reshape(-1, size, size), turn).reshape(-1, size**2)
    return new_inputs, new_labels


@lru_cache
def _cell_numbers(size: int) -> UInt64[np.ndarray, "cells vocab"]:
    """Returns a random number for every token in every cell (Zobrist hashing); start and goal share their number."""
    rng = np.random.Generator(np.random.Philox(key=size))
    numbers = rng.integers(2**64, size=(size**2, VOCAB_SIZE), dtype=np.uint64)
    numbers[:, GOAL] = numbers[:, START]
    return numbers


def fingerprints(inputs: UInt8[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    """Returns a hash for every maze, equal for two mazes that a turn makes equal, up to an exchange of start and goal.

    The reversed path is the same path, so such mazes count as equivalent when train and test splits are compared. Two
    other mazes have equal hashes with probability 2**-64.
    """
    blocks = [_fingerprint_block(inputs[i : i + BLOCK]) for i in range(0, len(inputs), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def _fingerprint_block(inputs: Integer[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    size = round(inputs.shape[1] ** 0.5)
    numbers = _cell_numbers(size)
    of_turn = np.zeros((len(cell_orders(size)), len(inputs)), np.uint64)
    for turn, order in enumerate(cell_orders(size)):
        # Transforming the maze is equivalent to transforming the numbers by the inverse.
        for cell, own in enumerate(order):
            of_turn[turn] += numbers[cell][inputs[:, own]]
    return mix(of_turn).min(axis=0)
