"""An arbiter for leaves beyond tolerance: both sides in float64, and finite differences of PyTorch's.

Roundings decide in 16 bits, at a ReLU at 0, or in a BatchNorm of two images, where noise of that size moves PyTorch's
leaf. Other leaves are decided where both sides agree in float64. Two gradients that do not are compared along their
difference with the finite difference of the objective in PyTorch and float64, in which no rule of autograd has a part;
not where the module cuts or replaces gradients, which need not be derivatives then.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import numpy as np
import torch

from bridge.errors import first_line
from bridge.parity.report import Leaves, Row, difference, largest_gradient, magnitude
from bridge.parity.sides import Draws, JaxSide, Shifts, TorchSide, in_float64, widened

_STEPS = (1e-3, 1e-5)
"""Steps of finite differences along a unit direction: a module may round to float32 in between, or have corners."""
_NEAR = 0.1
"""A side is right if its distance from the judge is below this fraction of the difference between the sides."""
_NOISE = 1e-6
"""A relative change of the parameters, or one rounding of the type where that is more. If it moves a leaf by `_NEAR` of
the difference, rounding does."""
_TRIES = 8  # of that noise
NARROW = 1e-4
"""A type whose roundings are larger than this has 16 bits or fewer."""
Moves = dict[int, dict[tuple[str, str], float]]
"""Step -> (kind, name) -> how far noise moves a leaf."""
_MOST = 8  # decided leaves of a report: each one takes two to four more runs


@dataclasses.dataclass
class Arbiter:
    """Decides about leaves beyond tolerance. `torch_side` and `jax_side` make a new side in float64."""

    torch_side: Callable[[], TorchSide]
    jax_side: Callable[[], JaxSide]
    narrow_side: Callable[[], TorchSide]
    """Makes PyTorch's side in the precision of the comparison, where no tensors share memory, as in float64."""
    limit: float
    """The largest difference from float64, relative to a leaf's scale, that is considered rounding of float32."""
    draws: list[Draws] = dataclasses.field(default_factory=list)
    """The draws of each step."""
    leaves: list[tuple[Leaves, Leaves]] = dataclasses.field(default_factory=list)
    """The leaves of each step, PyTorch's and JAX's."""

    epsilon: float = 0.0
    """The distance from 1 to the next number in the narrowest floating-point type of the steps."""
    derivatives: bool = True
    """False if the module cuts or replaces gradients: a finite difference says nothing then."""

    def add(self, side: TorchSide, ours: Leaves, theirs: Leaves) -> None:
        """Adds a step that `side` took, with the leaves of both sides."""
        self.draws.append(side.draws)
        self.leaves.append((ours, theirs))
        self.epsilon = side.epsilon
        self.derivatives = not side.cuts_gradients

    def decide(self, rows: list[Row]) -> list[Row]:
        """Returns the rows, with larger tolerances where roundings decide, and notes on the worst of the others."""
        rows = [self._beside_float64(row) if is_beyond(row) else row for row in rows]
        undecided = [row for row in rows if _is_open(row)]
        if not undecided:
            return rows
        wide = self._in_float64()
        moves = {step: self._moved(step) for step in {row.step for row in undecided}}
        if len(wide) == 2:
            rows = [self._beside_noise(row, wide, moves) if _is_open(row) else row for row in rows]
        first = {(row.kind, row.name): row for row in reversed(rows) if _is_open(row)}
        chosen = sorted(first.values(), key=lambda row: -row.error)[:_MOST]
        notes = {id(row): self._decision(row, wide, moves) for row in chosen}
        return [dataclasses.replace(r, note="; ".join(filter(None, (notes.get(id(r)), r.note)))) for r in rows]

    @functools.cached_property
    def _second_run(self) -> tuple[list[Leaves], list[Leaves]] | str:
        """PyTorch's leaves of all steps once more, in float64 and in the module's own types; or why there are none."""
        try:
            side = self.narrow_side()
            with in_float64():
                wide = self._repeated(self.torch_side())
            return wide, [side.next(draws) for draws in self.draws]
        except Exception as error:
            return f"PyTorch fails in float64, so the leaf cannot be judged: {first_line(error)}"

    def _repeated(self, side: TorchSide | JaxSide) -> list[Leaves]:
        leaves = []
        for draws in self.draws:
            wide = copy.copy(draws)
            wide[:] = map(widened, draws)
            leaves.append(side.next(wide))
        return leaves

    def _beside_float64(self, row: Row) -> Row:
        if isinstance(self._second_run, str):
            return dataclasses.replace(row, note=self._second_run)
        wide, same = (leaves[row.step] for leaves in self._second_run)
        limit = None if self.epsilon > NARROW else self.limit
        return beside_float64(row, self.leaves[row.step][0], wide, same, limit)

    def _in_float64(self) -> list[list[Leaves]]:
        """Returns the leaves of PyTorch's side by step, and those of JAX's; without those of a side that fails."""
        if isinstance(self._second_run, str):
            return []
        wide = [self._second_run[0]]
        with in_float64(), contextlib.suppress(Exception), jax.enable_x64(True):
            wide.append(self._repeated(self.jax_side()))
        return wide

    def _decision(self, row: Row, wide: list[list[Leaves]], moves: Moves) -> str:
        narrow = [leaves[row.kind][row.name].values for leaves in self.leaves[row.step]]
        gap = narrow[1] - narrow[0]
        decision = "undecided"
        text = ""
        if wide:
            decision, text = self._by_float64(row, wide, gap / np.linalg.norm(gap), narrow)
        moved = moves[row.step][row.kind, row.name]
        if decision == "undecided" and moved >= _NEAR * np.abs(gap).max():
            noise = f"noise of {self._noise:.2g} in the parameters moves PyTorch's by {moved:.2g}"
            decision = "rounding"
            text = "; ".join(filter(None, (noise, text)))
        if text:
            return f"{decision}: {text}"
        return ""

    def _by_float64(self, row: Row, wide: list, direction: np.ndarray, narrow: list[np.ndarray]) -> tuple[str, str]:
        """Returns the decision, and the numbers of both sides and the judge along the direction."""

        def number(values: np.ndarray) -> float:
            return float((values.conj() * direction).sum().real)

        ours, theirs = map(number, narrow)
        near = _NEAR * abs(theirs - ours)
        decision = "undecided"
        judged = ""
        wides = [*(number(side[row.step][row.kind][row.name].values) for side in wide), math.nan][:2]
        agreed = wides[0] if abs(wides[1] - wides[0]) <= near else math.nan
        steps = _STEPS if "gradient" in row.kind and self.derivatives else ()
        differences = (("finite difference", self._finite_difference(row, direction, step)) for step in steps)
        for name, judge in itertools.chain([("both in float64", agreed)], differences):
            judged = f"{name} {judge:.7g}"
            if (abs(ours - judge) <= near) != (abs(theirs - judge) <= near):
                decision = "JAX is off" if abs(ours - judge) <= near else "PyTorch is off"
                break
        inner = f"in float64 PyTorch {wides[0]:.7g}, JAX {wides[1]:.7g}"
        return decision, f"{judged}, PyTorch {ours:.7g}, JAX {theirs:.7g}; {inner}"

    def _moved(self, step: int) -> dict[tuple[str, str], float]:
        """Returns how far noise of about a rounding in the parameters moves each leaf in PyTorch's own float32."""
        expected = {(k, n): leaf.values for k, leaves in self.leaves[step][0].items() for n, leaf in leaves.items()}
        moves = dict.fromkeys(expected, 0.0)
        for seed in range(_TRIES):
            generator = torch.Generator().manual_seed(seed)
            side = self.narrow_side()
            noise = {n: t.detach() * torch.randn(t.shape, generator=generator) for n, t in side.trained.items()}
            shifts = {("gradient", name): self._noise * each for name, each in noise.items()}
            leaves = self._shifted(side, step, shifts)
            for kind, name in moves:
                moved = difference(leaves[kind][name].values, expected[kind, name])
                moves[kind, name] = max(moves[kind, name], moved if math.isfinite(moved) else 0.0)
        return moves

    @property
    def _noise(self) -> float:
        return max(_NOISE, self.epsilon)

    def _beside_noise(self, row: Row, wide: list[list[Leaves]], moves: Moves) -> Row:
        """Returns the row, judged by 8 times what rounding moves PyTorch's own leaf, if both sides agree in float64.

        That is how far noise moves it, and in 16 bits its distance from float64 where that is more.
        """
        exact, others = (side[row.step][row.kind][row.name].values for side in wide)
        if difference(exact, others) > _NEAR * row.tolerance * row.scale:
            return row
        moved = moves[row.step][row.kind, row.name] / row.scale
        note = f"noise of {self._noise:.2g} in the parameters moves PyTorch's by {moved:.1e}"
        if self.epsilon > NARROW:
            ours = self.leaves[row.step][0][row.kind][row.name].values
            own = difference(ours, exact) / row.scale
            if own > moved:
                moved = own
                note = f"float64 differs from PyTorch's own by {own:.1e}"
        if row.error > 8 * moved:
            return row
        note = f"rounding: both sides agree in float64, and {note}"
        return dataclasses.replace(row, tolerance=8 * moved, note=note)

    def _finite_difference(self, row: Row, direction: np.ndarray, length: float) -> float:
        ends: list[float] = []
        for shift in (length * direction, -length * direction):
            with in_float64():
                side = self.torch_side()
                self._shifted(side, row.step, {(row.kind, row.name): torch.from_numpy(shift)})
            ends.append(side.objective)
        return (ends[0] - ends[1]) / (2 * length)

    def _shifted(self, side: TorchSide, step: int, shifts: Shifts) -> Leaves:
        """Returns the leaves of a step at shifted parameters."""
        for drawn in self.draws[:step]:
            side.next(drawn)
        return side.next(self.draws[step], shifts)


def beside_float64(row: Row, expected: Leaves, wide: Leaves, same: Leaves, limit: float | None) -> Row:
    """Returns the row, judged by 8 times the difference between PyTorch's own float32 and float64 at this leaf.

    A gradient that is zero in float64 may be 8 roundings of the largest gradient. `expected`, `wide` and `same`:
    PyTorch's leaves, those in float64, and those of another run, which distinguish rounding from state outside of the
    module. `limit`: the largest difference from float64, relative to a leaf's scale, that is considered rounding; None
    in 16 bits, where the size of a difference says nothing.
    """
    first = expected[row.kind][row.name].values
    double = wide[row.kind].get(row.name)
    second = same[row.kind].get(row.name)
    if double is None or second is None or not difference(second.values, first) <= row.tolerance * row.scale:
        return dataclasses.replace(row, note="PyTorch itself computes something else when it is called again")
    own = difference(double.values, first) / row.scale
    allowed = 8 * own
    note = f"float64 differs from PyTorch's own by {own:.1e}"
    if limit is None:
        return dataclasses.replace(row, note=note)
    largest = largest_gradient(expected)
    if "gradient" in row.kind and magnitude(double.values) <= 1e-12 * largest:
        allowed = max(allowed, 8 * float(np.finfo(np.float32).eps) * largest / row.scale)
        limit = max(limit, 0.05)  # relative to a scale of at least 1e-3 of the largest
        note = "zero in float64"
    if not own <= limit:
        return dataclasses.replace(row, note=f"{note}, which counts as more than rounding")
    return dataclasses.replace(row, tolerance=max(row.tolerance, allowed), note=note)


def is_beyond(row: Row) -> bool:
    """True if the leaf differs, and both sides have it."""
    return row.verdict == "beyond tolerance" and math.isfinite(row.error)


def _is_open(row: Row) -> bool:
    """True if a decision is wanted, and PyTorch reproduces its result."""
    return is_beyond(row) and row.kind != ".grad" and not row.note.startswith("PyTorch itself")
