"""Code that checks values. In a test's own file, pytest would write each `assert` anew."""

import torch


def compared(x):
    assert x.max().item() <= 99, f"too large: {x.max()}"
    assert 0 <= x.abs().min().item() < 99


def all_of(x):
    assert (x < 99).all() and torch.all(x > -99).item()
    assert not x.isnan().any()


def raising(x):
    if x.isnan().any() or x.max() >= 99:
        message = f"not a number, or {x.max()}"
        raise ValueError(message)
    if not torch.equal(x, x.clone()):
        raise ValueError("changed")


def used_otherwise(x):
    largest = x.max().item()
    assert largest < 99
    return x * largest


def branch_that_also_computes(x):
    if x.max() > 99:
        x = x.clamp(max=99)
        if len(x) > 3:
            raise ValueError("long")
    return x
