"""An arbiter for leaves beyond tolerance: both sides in float64, and finite differences of PyTorch's.

A leaf is decided where both sides agree in float64. Two gradients that do not are compared along their difference with
the finite difference of the objective in PyTorch and float64, in which no rule of autograd has a part. Roundings decide
at a ReLU at 0, or in a BatchNorm of two images: there noise of their size moves PyTorch's own number as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from bridge.parity.report import Leaves, Row
from bridge.parity.sides import JaxSide, Shifts, TorchSide, in_float64, widened

_STEPS = (1e-3, 1e-5)
"""Steps of finite differences along a unit direction: a module may round to float32 in between, or have corners."""
_NEAR = 0.1
"""A side is right if its distance from the judge is below this fraction of the difference between the sides."""
_NOISE, _TRIES = 1e-6, 4
"""Relative changes of the parameters in float32. If they move a leaf by `_NEAR` of the difference, rounding does."""
_MOST = 8
"""The largest number of leaves that are decided in a report: each one takes two to four more runs."""


@dataclasses.dataclass(frozen=True)
class Arbiter:
    """Decides about leaves beyond tolerance. `torch_side` and `jax_side` make a new side in float64."""

    torch_side: Callable[[], TorchSide]
    jax_side: Callable[[], JaxSide]
    narrow_side: Callable[[], TorchSide]
    """Makes PyTorch's side in the precision of the comparison."""
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
        narrow_only = any(row.note.startswith("PyTorch fails") for row in chosen)
        wide = [] if narrow_only else self._in_float64(max(row.step for row in chosen))
        notes = {id(row): self._decision(row, wide) for row in chosen}
        return [dataclasses.replace(r, note="; ".join(filter(None, (notes.get(id(r)), r.note)))) for r in rows]

    def _in_float64(self, last: int) -> list[list[Leaves]]:
        """Returns the leaves of both sides by step; those of JAX are none if it fails."""
        with in_float64():
            wide = [self._repeated(self.torch_side, last)]
            try:
                with jax.enable_x64(True):
                    wide.append(self._repeated(self.jax_side, last))
            except Exception:  # the number is then nan
                wide.append([])
        return wide

    def _repeated(self, make: Callable[[], TorchSide | JaxSide], last: int) -> list[Leaves]:
        """Returns the leaves of one side in float64 by step."""
        side = make()
        return [side.next([widened(draw) for draw in drawn]) for drawn in self.draws[: last + 1]]

    def _decision(self, row: Row, wide: list[list[Leaves]]) -> str:
        narrow = [leaves[row.kind][row.name].values for leaves in self.leaves[row.step]]
        gap = narrow[1] - narrow[0]
        direction = gap / np.linalg.norm(gap)
        place = np.unravel_index(np.abs(gap).argmax(), gap.shape)

        def number(values: np.ndarray) -> float:
            of_gradient = "gradient" in row.kind
            return float((values.conj() * direction).sum().real if of_gradient else values[place].real)

        ours, theirs = map(number, narrow)
        decision, text, near = "undecided", "", _NEAR * abs(theirs - ours)
        if wide:
            decision, text = self._by_float64(row, wide, number, direction, (ours, theirs))
        unsure = decision == "undecided" or text.startswith("both")
        if unsure and (moved := max(abs(number(v) - ours) for v in self._moved(row))) >= near:
            noise = f"noise of {_NOISE:g} in the parameters changes PyTorch's by {moved:.2g}"
            decision, text = "rounding", "; ".join(filter(None, (noise, text)))
        return f"{decision}: {text}" if text else ""

    def _by_float64(self, row: Row, wide: list, number: Callable, direction: np.ndarray, sides: Any) -> tuple[str, str]:
        """Returns the decision, and the numbers of both sides and the judge along the direction, or at the place."""
        ours, theirs = sides
        near = _NEAR * abs(theirs - ours)
        wides = [number(side[row.step][row.kind][row.name].values) if side else math.nan for side in wide]
        decision, judged = "undecided", ""
        agreed = wides[0] if abs(wides[1] - wides[0]) <= near else math.nan
        steps = _STEPS if "gradient" in row.kind else ()
        differences = (("finite difference", self._finite_difference(row, direction, step)) for step in steps)
        for name, judge in itertools.chain([("both in float64", agreed)], differences):
            judged = f"{name} {judge:.7g}"
            if (abs(ours - judge) <= near) != (abs(theirs - judge) <= near):
                decision = "JAX is off" if abs(ours - judge) <= near else "PyTorch is off"
                break
        return decision, (
            f"{judged}, PyTorch {ours:.7g}, JAX {theirs:.7g}; in float64 PyTorch {wides[0]:.7g}, JAX {wides[1]:.7g}"
        )

    def _moved(self, row: Row) -> Iterator[np.ndarray]:
        """Yields the values of a leaf in PyTorch's own float32, at parameters that are moved by about a rounding."""
        for seed in range(_TRIES):
            generator = torch.Generator().manual_seed(seed)
            side = self.narrow_side()
            noise = {n: t.detach() * torch.randn(t.shape, generator=generator) for n, t in side.trained.items()}
            leaves = self._shifted(side, row, {("gradient", name): _NOISE * each for name, each in noise.items()})
            yield leaves[row.kind][row.name].values

    def _finite_difference(self, row: Row, direction: np.ndarray, length: float) -> float:
        ends: list[float] = []
        for shift in (length * direction, -length * direction):
            with in_float64():
                side = self.torch_side()
                self._shifted(side, row, {(row.kind, row.name): torch.from_numpy(shift)})
            ends.append(side.objective)
        return (ends[0] - ends[1]) / (2 * length)

    def _shifted(self, side: TorchSide, row: Row, shifts: Shifts) -> Leaves:
        """Returns the leaves of the step of a row, at shifted parameters."""
        for drawn in self.draws[: row.step]:
            side.next(drawn)
        return side.next(self.draws[row.step], shifts)


def _is_open(row: Row) -> bool:
    """True if a decision is wanted, and PyTorch reproduces its result."""
    again = not row.note.startswith("PyTorch itself")
    return (
        again
        and row.verdict == "beyond tolerance"
        and math.isfinite(row.error)
        and row.kind not in (".grad", "parameter")
    )
