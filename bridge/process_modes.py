"""Modes of PyTorch that hold for a thread or the process, which a call has to leave as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributions import Distribution

from bridge.internals import validates_distributions


class _Mode(NamedTuple):
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _precision() -> str | None:
    """None where it was set for one backend alone, which PyTorch's general question refuses to tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


_MODES = (
    _Mode("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Mode("autocast", partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    _Mode("the dtype of autocast", partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    _Mode(
        "the use of deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    _Mode("the precision of float32 products", _precision, torch.set_float32_matmul_precision),
    _Mode("the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
)


def modes() -> dict[str, Any]:
    """The value of each mode."""
    return {mode.name: mode.get() for mode in _MODES}


def put_back(before: dict[str, Any]) -> list[str]:
    """Restores the modes; returns the names of those that were changed."""
    changed = [mode for mode in _MODES if before[mode.name] is not None and mode.get() != before[mode.name]]
    for mode in changed:
        mode.put(before[mode.name])
    return [mode.name for mode in changed]


_BEFORE: list[bool] = []
"""For each traced call of the process, whether distributions checked their arguments when it began."""
_LOCK = threading.Lock()


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Within it distributions check their arguments only where they are told to: values are traced."""
    with _LOCK:
        _BEFORE.append(validates_distributions())
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _LOCK:
            Distribution.set_default_validate_args(_BEFORE.pop())
