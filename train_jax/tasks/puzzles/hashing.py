"""Fingerprints of 64 bits: the mixer that they are made with, and which of them are new."""

import numpy as np
from jaxtyping import Bool, UInt64


def mix(x: UInt64[np.ndarray, "..."], *, kind: int = 0) -> UInt64[np.ndarray, "..."]:
    """A bijection of 64 bits that scatters them (the finaliser of SplitMix64), another one for every kind.

    References: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = x + np.uint64((0x9E3779B97F4A7C15 * (kind + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def first_of_each(values: UInt64[np.ndarray, "n"], *, known: UInt64[np.ndarray, "m"]) -> Bool[np.ndarray, "n"]:
    """Which values are neither among `known` nor a repetition of an earlier one."""
    keep = np.zeros(len(values), bool)
    keep[np.unique(values, return_index=True)[1]] = True
    return keep & ~np.isin(values, known)
