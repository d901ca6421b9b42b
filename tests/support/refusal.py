"""How a reader refuses a file."""

import tracemalloc
import warnings
from pathlib import Path

import pytest

from train_jax.errors import UserError


def refusal(folder: Path, call, *, limit_bytes: int = 2**24) -> str:
    """How `call` refuses: in one short line, without a warning, without much memory, and with nothing written."""
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
