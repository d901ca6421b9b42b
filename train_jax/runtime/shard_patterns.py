"""The patterns of `--shard`: which axes of a mesh divide the dimensions of a parameter, by its name.

Adapters of peft have names and shapes of their own. A pattern that is written for the model without adapters means
their parts, too: `layers.0.q_proj.weight` is also `base_model.model.layers.0.q_proj.base_layer.weight`, and its first
and last dimension are those of `lora_B` and `lora_A`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from train_jax.errors import UserError

AXES = ("data", "model")
"""The axes of the mesh: the examples are divided over `data`, and each replica of the model over `model`."""

Axes = tuple[str, ...]
"""The axes of the mesh that divide a dimension; () for none."""


@dataclasses.dataclass(frozen=True)
class ShardPattern:
    """The axes of the parameters whose names match."""

    pattern: str
    dimensions: tuple[Axes, ...]

    def of(self, name: str) -> tuple[Axes, ...] | None:
        """Returns the axes of the dimensions of a parameter; None if the pattern does not match its name."""
        outer, own = _outer_name(name)
        if re.fullmatch(self.pattern, outer):
            return self.dimensions if own is None else _without_whole_ends([self._of_dimension(n) for n in own])
        return self.dimensions if re.fullmatch(self.pattern, name) else None

    def _of_dimension(self, number: int | None) -> Axes:
        return () if number is None or number >= len(self.dimensions) else self.dimensions[number]


def _without_whole_ends(dimensions: list[Axes]) -> tuple[Axes, ...]:
    """Returns the dimensions up to the last one that is divided."""
    end = max((number for number, axes in enumerate(dimensions, 1) if axes), default=0)
    return tuple(dimensions[:end])


def read_pattern(text: str) -> ShardPattern:
    """Reads `NAMES=AXES`, such as `layers.*.weight=data,model`. Raises `UserError` for anything else.

    AXES has an entry for each dimension: `data`, `model`, `data+model`, or nothing for a dimension that is whole.
    """
    pattern, found, axes = text.rpartition("=")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"--shard {text!r}: {pattern!r} is not a regular expression ({error}); correct it") from None
    if not found or not pattern:
        raise UserError(
            f"--shard {text!r} has no names or no axes; write NAMES=AXES, such as '.*proj.weight=data,model'"
        )
    entries = [each.strip() for each in axes.split(",")] if axes.strip() else []
    dimensions = tuple(tuple(each.split("+")) if each else () for each in entries)
    used = [axis for dimension in dimensions for axis in dimension]
    for axis in used:
        if axis not in AXES:
            raise UserError(f"--shard {text!r}: {axis!r} is no axis; use data, model, data+model, or nothing")
    if len({*used}) < len(used):
        raise UserError(f"--shard {text!r} divides two dimensions over one axis; name each axis once")
    return ShardPattern(pattern, dimensions)


def read_patterns(texts: Sequence[str]) -> tuple[ShardPattern, ...]:
    return tuple(read_pattern(each) for each in texts)


_ADAPTERS: tuple[tuple[str, tuple[int | None, ...] | None], ...] = (
    # (part of the name between the layer and its parameter, the layer's dimensions that the dimensions are)
    (r"\.base_layer", None),
    (r"\.original_module", None),
    (r"\.modules_to_save\.[^.]+", None),
    (r"\.lora_A\.[^.]+", (None, 1, 2, 3, 4)),  # [rank, inputs, …] of a weight [outputs, inputs, …]
    (r"\.lora_B\.[^.]+", (0, None)),
    (r"\.lora_magnitude_vector\.[^.]+", (0,)),
)
_EMBEDDINGS = (
    (r"(.*)\.lora_embedding_A\.[^.]+", (None, 0)),  # [rank, tokens] of a table [tokens, width]
    (r"(.*)\.lora_embedding_B\.[^.]+", (1, None)),
)
_PREFIX = r"(?:base_model\.model\.)?"


def _outer_name(name: str) -> tuple[str, tuple[int | None, ...] | None]:
    """Returns the name of the parameter of the model without adapters that a parameter belongs to.

    Returns also the dimension of that parameter that each of its own dimensions is; None if they are the same.
    """
    for part, dimensions in _ADAPTERS:
        if found := re.fullmatch(rf"{_PREFIX}(.*){part}(\.[^.]+)", name):
            return found[1] + found[2], dimensions
    for whole, dimensions in _EMBEDDINGS:
        if found := re.fullmatch(_PREFIX + whole, name):
            return f"{found[1]}.weight", dimensions
    return re.sub(rf"^{_PREFIX}", "", name), None
