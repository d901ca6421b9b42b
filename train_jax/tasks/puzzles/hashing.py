"""64-bit hashes: the mixing function, and the selection of new values."""

import numpy as np
from jaxtyping import Bool, UInt64


def mix(x: UInt64[np.ndarray, "..."], *, kind: int = 0) -> UInt64[np.ndarray, "..."]:
    """Applies the finaliser of SplitMix64, a bijection of 64-bit integers; every `kind` is a different one.

    References: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = x + np.uint64((0x9E3779B97F4A7C15 * (kind + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def first_of_each(values: UInt64[np.ndarray, "n"], *, known: UInt64[np.ndarray, "m"]) -> Bool[np.ndarray, "n"]:
    """Returns which values are neither in `known` nor equal to an earlier value."""
    keep = np.zeros(len(values), bool)
    keep[np.unique(values, return_index=True)[1]] = True
    return keep & ~np.isin(values, known)
