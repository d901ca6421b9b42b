"""Which side is right where a leaf is beyond tolerance: both sides in float64, and finite differences of PyTorch's.

The two gradients of a leaf are compared along the direction in which they differ. There the finite difference of the
objective, which PyTorch computes in float64 and in which no rule of autograd has a part, agrees with one of them at
most. Other leaves are decided where both sides agree in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import torch

from bridge.parity.report import Leaves, Row
from bridge.parity.sides import JaxSide, TorchSide, in_float64, widened

_STEPS = (1e-3, 1e-5)
"""The steps of finite differences along a unit direction: a module may round to float32 in between, or have corners."""
_NEAR = 0.1
"""A side is right if it is nearer to the judge than this part of the difference between the sides."""
_MOST = 8
"""Leaves that are decided in a report: each one takes two to four runs more."""


@dataclasses.dataclass(frozen=True)
class Arbiter:
    """Decides about leaves beyond tolerance. `torch_side` and `jax_side` make either side anew, in float64."""

    torch_side: Callable[[], TorchSide]
    jax_side: Callable[[], JaxSide]
    draws: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    """The draws of each step."""
    leaves: list[tuple[Leaves, Leaves]] = dataclasses.field(default_factory=list)
    """The leaves of each step, PyTorch's and JAX's."""

    def decide(self, rows: list[Row]) -> list[Row]:
        """Returns the rows; the worst leaves beyond tolerance have the decision in their note, at their first step."""
        first = {(row.kind, row.name): row for row in reversed(rows) if _is_open(row)}
        chosen = sorted(first.values(), key=lambda row: -row.error)[:_MOST]
        if not chosen:
            return rows
        last = max(row.step for row in chosen)
        with in_float64():
            wide = [self._repeated(self.torch_side, last)]
            try:
                with jax.enable_x64(True):
                    wide.append(self._repeated(self.jax_side, last))
            except Exception:  # its number is nan
                wide.append([])
            notes = {id(row): self._decision(row, wide) for row in chosen}
        return [dataclasses.replace(r, note="; ".join(filter(None, (notes.get(id(r)), r.note)))) for r in rows]

    def _repeated(self, make: Callable[[], TorchSide | JaxSide], last: int) -> list[Leaves]:
        """Returns the leaves of one side in float64 by step."""
        side = make()
        return [side.next([widened(draw) for draw in drawn]) for drawn in self.draws[: last + 1]]

    def _decision(self, row: Row, wide: list[list[Leaves]]) -> str:
        narrow = [leaves[row.kind][row.name].values for leaves in self.leaves[row.step]]
        gap = narrow[1] - narrow[0]
        if "gradient" in row.kind:
            direction = gap / np.linalg.norm(gap)
            judges, name = (partial(self._finite_difference, row, direction, s) for s in _STEPS), "finite difference"

            def number(values: np.ndarray) -> float:
                return float((values.conj() * direction).sum().real)
        else:
            place = np.unravel_index(np.abs(gap).argmax(), gap.shape)

            def number(values: np.ndarray) -> float:
                return float(values[place].real)

            judges, name = [lambda: wides[0] if abs(wides[1] - wides[0]) <= near else math.nan], "both in float64"
        ours, theirs = map(number, narrow)
        near = _NEAR * abs(theirs - ours)
        wides = [number(side[row.step][row.kind][row.name].values) if side else math.nan for side in wide]
        decision, judge = "undecided", math.nan
        for ask in judges:
            judge = ask()
            if (abs(ours - judge) <= near) != (abs(theirs - judge) <= near):
                decision = "JAX is off" if abs(ours - judge) <= near else "PyTorch is off"
                break
        return (
            f"{decision}: {name} {judge:.7g}, PyTorch {ours:.7g}, JAX {theirs:.7g}; "
            f"in float64 PyTorch {wides[0]:.7g}, JAX {wides[1]:.7g}"
        )

    def _finite_difference(self, row: Row, direction: np.ndarray, length: float) -> float:
        ends: list[float] = []
        for shift in (length * direction, -length * direction):
            side = self.torch_side()
            for drawn in self.draws[: row.step]:
                side.next(drawn)
            side.next(self.draws[row.step], {(row.kind, row.name): torch.from_numpy(shift)})
            ends.append(side.objective)
        return (ends[0] - ends[1]) / (2 * length)


def _is_open(row: Row) -> bool:
    """True if a decision is wanted, and PyTorch computes the same again, also in float64."""
    again = not row.note.startswith(("PyTorch itself", "PyTorch fails"))
    return (
        again
        and row.verdict == "beyond tolerance"
        and math.isfinite(row.error)
        and row.kind not in (".grad", "parameter")
    )
