"""Checks the error of a reader for a bad file."""

import tracemalloc
import warnings
from pathlib import Path

import pytest

from train_jax.errors import UserError


def refusal(folder: Path, call, *, limit_bytes: int = 2**24) -> str:
    """Returns the error of `call`: one short line, without warnings, large allocations or written files."""
    before = sorted(folder.rglob("*")), sorted(Path.cwd().iterdir())
    tracemalloc.start()
    try:
        with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError) as caught:
            call()
        assert not warned and tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    assert before == (sorted(folder.rglob("*")), sorted(Path.cwd().iterdir()))
    return message
