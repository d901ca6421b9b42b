"""Operations that draw random numbers: of the call's key, of a seeded generator, or of a recorded call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import torch

from bridge.arrays import array_of
from bridge.generators import draw, generator_of
from bridge.randomness import Source

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch


def drawn_numbers(
    dispatch: Dispatch, func: Any, args: tuple, kwargs: dict, by_key: Callable[[Source], jax.Array]
) -> Any:
    """Random numbers: of a seeded generator, of a recorded call, or of the key."""
    generator = seeded_generator(dispatch, func, kwargs)
    if generator is not None:
        return array_of(draw(generator, func, args, kwargs))
    dispatch.draws += 1
    if isinstance(dispatch.rng, list):
        return dispatch.rng[dispatch.draws - 1]
    if dispatch.rng is None:
        what = f"`{func.name()}` draws random numbers"
        if dispatch.is_backward:
            what += " in the backward of a torch.autograd.Function, which has no key"
            raise dispatch.error(what, "draw in its forward and save the numbers")
        remedy = "pass rng=jax.random.key(…), or train=False if the module draws in training only"
        raise dispatch.error(f"{what} but the call has no key", remedy)
    return by_key(Source(dispatch.rng, (dispatch.draws,)))


def seeded_generator(dispatch: Dispatch, func: Any, kwargs: dict) -> torch.Generator | None:
    """The seeded generator that the operation draws from."""
    try:
        return generator_of(kwargs.get("generator"))
    except LookupError:
        raise dispatch.error(
            f"`{func.name()}` draws from a torch.Generator that was made before the call, so each call would draw "
            "other numbers in PyTorch",
            "seed it in the call, or leave the generator out and pass rng=jax.random.key(…)",
        ) from None
