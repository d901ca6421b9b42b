"""Batch normalisation with `momentum=None`: a cumulative average, for which PyTorch asks the counter for its number."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from bridge._compat.jax import Tracer
from bridge.errors import is_framework
from bridge.omitted_arguments import frame_of

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch

_FORWARD = nn.BatchNorm1d.forward
"""That of every dimension."""


def asks_for_counter() -> bool:
    """Whether `forward` of such a module wants its counter as a Python number."""
    frame = sys._getframe(1)
    while frame is not None and is_framework(frame.f_code.co_filename):
        if frame.f_code is _FORWARD.__code__:
            return frame.f_locals["self"].momentum is None
        frame = frame.f_back
    return False


def batch_norm(dispatch: Dispatch, args: tuple, kwargs: dict) -> Any:
    """`F.batch_norm`, where `forward` of such a module calls it with a traced counter; None elsewhere."""
    frame = frame_of(F.batch_norm)
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code is not _FORWARD.__code__:
        return None
    module = caller.f_locals["self"]
    averages = module.momentum is None and module.training and module.track_running_stats
    if not averages or module.num_batches_tracked is None:
        return None
    counter = dispatch.adopt(module.num_batches_tracked)
    if not isinstance(counter.value, Tracer):
        return None
    x, *averaged = args
    settings: dict[str, Any] = {**kwargs, "momentum": 1.0}
    batch = [torch.zeros_like(running) for running in averaged]
    out = F.batch_norm(x, batch[0], batch[1], **settings)
    with torch.no_grad():
        for running, now in zip(averaged, batch, strict=True):
            share = 1 / counter.to(running.dtype)
            running.mul_(1 - share).add_(now * share)
    return out
