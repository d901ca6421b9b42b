"""Branches on traced values: both sides are traced, and become one `jax.lax.cond`.

Converted code (`symbolic.conversion`) calls these functions. A side runs as a region: what it returns, binds, writes or
puts into containers and attributes leaves it as arrays, and is undone before the other side runs. A name on which the
sides disagree in more than numbers is refused where it is used, anything else at once. A side that raises is a check:
it is assumed not to be taken.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch import nn

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, in_transform
from bridge.context import CURRENT, CallState, current, refusal
from bridge.dispatch.constants import WrittenByOneSide
from bridge.dispatch.values import asked_inside, fails
from bridge.errors import BridgeError
from bridge.symbolic.constants import as_constant
from bridge.symbolic.conversion import FUNCTIONS
from bridge.symbolic.numbers import IN_PLACE_OF, NUMBERS, as_operand, extreme, number_of
from bridge.symbolic.ranges import known_number
from bridge.symbolic.rows import Rows
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.pytrees import ATOMS, built_in, convert, is_plain_class, items_of, parts_of
from bridge.tensor.tensor import (
    INTERNAL,
    REGION,
    AutogradHandle,
    BridgeTensor,
    Storage,
    Undo,
    empty_meta,
    has_tangents,
    wrap,
)

_MOST = 64
"""The largest number of sides inside of one branch."""
_LONGEST = 32
"""The largest number of sides inside of a loop whose turns are branches."""
_REMEDY = "compute both ways and choose with torch.where"
_MISSING = object()
"""The value of a name that is not bound."""
_MEMORY = frozenset({"_handle", "_views", "_meta"})
"""The attributes of a tensor that change with the memory that it is over."""


# ---- what converted code calls


def nothing() -> None:
    """The side of a branch that does nothing."""


def branch(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any], ended: str = "") -> Any:
    """Returns `then()` if the test is true, else `otherwise()`; for a traced test, what either of them gives.

    `ended` has names that the sides bind and nobody reads afterwards.
    """
    return _branch(test, then, otherwise, ended)


def both(first: Any, rest: Callable[[], Any]) -> Any:
    """Returns `first and rest()`."""
    return _branch(first, rest, lambda: first)


def either(first: Any, rest: Callable[[], Any]) -> Any:
    """Returns `first or rest()`."""
    return _branch(first, lambda: first, rest)


def negated(value: Any) -> Any:
    """Returns `not value`; a tensor if that is traced."""
    found = truth(value)
    if isinstance(found, bool):
        return not found
    return torch.logical_not(found)


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`; a traced number for one of traced values, of which Python would ask them."""
    if kwargs:
        return function(*args, **kwargs)
    if function is max or function is min:
        return _extreme(function, args)
    if current() is None:
        return function(*args)
    if function is len and type(args[0]) is Rows:
        return args[0].shape[0]
    instead, most = IN_PLACE_OF.get(id(function), (None, 0))
    if instead is None or len(args) > most or all(_unknown(each) is None for each in args):
        return function(*args)
    return instead(*args)


def _unknown(value: Any) -> BridgeTensor | None:
    """Returns the traced tensor of a number, or of a tensor of one element, whose value is not known; else None."""
    call = current()
    value = as_operand(value)
    if call is None or not isinstance(value, torch.Tensor) or type(value) is Rows or in_transform():
        return None
    if value.numel() != 1 or not call.constants.is_traced(value):
        return None
    tensor = call.wrap(value)
    return tensor if isinstance(tensor.value, Tracer) and known_number(tensor) is None else None


def _extreme(function: Callable[..., Any], args: tuple) -> Any:
    """Returns the result of `max` or `min`, which return the first of the largest or least items."""
    if len(args) == 1 and isinstance(args[0], Iterator):
        args = (list(args[0]),)
    items = args
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        items = args[0]
    if not any(isinstance(item, torch.Tensor) and type(item) is not Rows and item.numel() == 1 for item in items):
        has_number = not NUMBERS.isdisjoint(map(type, items))
        return extreme(function, items) if has_number else function(*args)
    found, *rest = items
    for item in rest:
        better = item > found if function is max else item < found
        found = _branch(better, lambda item=item: item, lambda found=found: found)
    return found


def truth(value: Any) -> Any:
    """Returns `bool(value)`; a tensor of the type bool if that is traced."""
    call = current()
    tensor = _unknown(value)
    if call is None or tensor is None or call.is_checking:
        return bool(as_operand(value))
    for array, answer in call.truths:
        if array is tensor.value:
            return answer
    if tensor.dtype == torch.bool and not tensor.dim():
        return tensor
    return tensor.detach().reshape(()) != 0


def _conditions(call: CallState, condition: jax.Array) -> list[jax.Array]:
    """Returns the condition of a branch, and those of the branches of which a side is being traced."""
    return [condition, *(array for array, _ in call.truths)]


def _remedy(conditions: list[jax.Array]) -> str:
    """Returns the remedy for sides that disagree: a constant, if the condition of one of the branches can be one."""
    remedies = (as_constant(condition, _REMEDY) for condition in conditions)
    return next((remedy for remedy in remedies if remedy != _REMEDY), _REMEDY)


def used(value: Any) -> Any:
    """Returns the value of a name. Raises `BridgeError` if the sides of a branch disagree on it."""
    if isinstance(value, _Disagreement):
        raise refusal(value.text, _remedy(value.conditions))
    return value


def ends(stop: Any) -> bool:
    """True if a loop is known to end here; turns of one that may have ended are branches."""
    return stop is True


def ends_loop(stop: Any) -> bool:
    """`ends` for a loop that has no other end."""
    if isinstance(stop, torch.Tensor):
        raise _endless()
    return stop


def _endless() -> BridgeError:
    inside, remedy = asked_inside(
        "give it a fixed number of steps, as a `for` loop and `while i < n and …` by one of Python's numbers have"
    )
    return refusal(f"a `while` loop ends by a traced value{inside}", remedy)


def repeat(body: Callable[[], Any], *tests: Callable[[], Any], first: int = 0) -> None:
    """Runs a `while` loop as long as all tests are true, of which the first turn has had `first` ones.

    From the first traced test on, the rest of the loop is a side of a branch. On that side a counter of turns stays one
    of Python's numbers, so that it can end the loop.
    """
    while True:
        for done, test in enumerate(tests[first:], first + 1):
            found = truth(test())
            if isinstance(found, torch.Tensor):
                call = current()
                if call is not None and call.sides > _LONGEST:
                    raise _endless()
                return _branch(found, lambda done=done: repeat(body, *tests, first=done), nothing)
            _branch(found, nothing, nothing)  # `verify` counts the turns
            if not found:
                return None
        body()
        first = 0


# ---- the answers that PyTorch gives while `verify` compares


class Unrecorded(BaseException):
    """The sides that PyTorch took are not known yet; it is no `Exception`, which the module's code might catch."""


class Answers(dict[Any, list[bool]]):
    """Branch -> the sides that PyTorch took, in order."""

    functions = 0
    """The number of functions that had been converted then."""


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Converted code notes its answers, or a call gets the draws that PyTorch made with these."""
    before = CURRENT.answers
    CURRENT.answers = answers
    try:
        yield
    finally:
        CURRENT.answers = before


def _place() -> tuple[types.CodeType, int]:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _recorded(call: CallState, answers: Answers, place: Any) -> bool | None:
    """Returns the side that PyTorch took; None where it did not come here."""
    if call.off_path:
        return None
    turn = call.turns[place]
    call.turns[place] += 1
    return next(iter(answers.get(place, [])[turn:]), None)


# ---- one branch


def _branch(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any], ended: str = "") -> Any:
    call = current()
    found = truth(test)
    answers = CURRENT.answers
    place = None if answers is None else _place()
    answer = None
    if answers is not None:
        if call is None:
            answers.setdefault(place, []).append(found)
        else:
            answer = _recorded(call, answers, place)
    if isinstance(found, bool):
        return then() if found else otherwise()
    assert call is not None
    if answers is not None and answer is None and not call.off_path and answers.functions != len(FUNCTIONS):
        raise Unrecorded
    if call.recording:
        what = "a branch on a traced value in a call that asks PyTorch's engine for a gradient"
        raise call.error(what, "torch.func.grad in the place of torch.autograd.grad; or torch.where")
    if place is not None:
        call.options.branches.setdefault(place, call.where())
    return _Branch(call, found.value, {True: then, False: otherwise}, answer, ended.split()).run()


@jax.custom_jvp
def _only_if(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x, whose gradient is zero where the side is not taken.

    Under `vmap` a `cond` computes both sides, and the other one's gradient may be NaN.
    """
    return x


@_only_if.defjvp
def _only_if_jvp(primals, tangents):
    condition, x = primals
    return _only_if(condition, x), jax.lax.select(condition, tangents[1], jnp.zeros_like(tangents[1]))


class _Leaf(NamedTuple):
    """A tensor that a side leaves."""

    tensor: torch.Tensor
    array: int
    """The number of the side's result that has its array."""
    meta: torch.Tensor
    tracked: bool
    live: bool
    storage: Storage
    is_number: bool
    rows: Rows | None
    """Those of which this is the tensor of all rows."""


class _Zeros(NamedTuple):
    """A tensor that the other side leaves under a name that this one does not bind."""

    meta: torch.Tensor


class _Tree(NamedTuple):
    """A value that a side leaves, taken apart."""

    value: Any
    leaves: list[Any]
    structure: Any


class _Disagreement(NamedTuple):
    """Stands for a name on which the sides disagree."""

    text: str
    conditions: list[jax.Array]
    """That of the branch, and those around it."""


@dataclasses.dataclass
class _Side:
    """What a side has left."""

    trees: dict[Any, _Tree] = dataclasses.field(default_factory=dict)
    """The place of a value -> the value. At the place None is what the side returns."""
    holders: dict[int, tuple[int, bool, bool]] = dataclasses.field(default_factory=dict)
    """`id` of a storage or a handle -> the number of the result with its array, `tracked` and `live`."""
    arrays: list[Any] = dataclasses.field(default_factory=list)
    closed: Any = None
    draws: int = 0

    def add(self, array: jax.Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def apart(self, call: CallState, value: Any) -> _Tree:
        def leaf(part: Any) -> Any:
            is_number = type(part) in NUMBERS
            part = as_operand(part)
            if not isinstance(part, torch.Tensor) or part.layout is not torch.strided:
                return part
            rows = part if type(part) is Rows else None
            tensor = call.wrap(part if rows is None else rows.whole)
            handle = tensor._handle
            array = self.add(tensor.value)
            same = part if rows is not None else tensor  # a real tensor and its traced one are the same to the code
            return _Leaf(same, array, tensor._meta, tensor.requires_grad, handle.live, handle.storage, is_number, rows)

        leaves, structure = jax.tree.flatten(convert(value, lambda part: part, objects=True))
        return _Tree(value, list(map(leaf, leaves)), structure)


class _Branch:
    """One branch on a traced value."""

    def __init__(
        self,
        call: CallState,
        condition: jax.Array,
        sides: dict[bool, Callable[[], Any]],
        answer: bool | None,
        ended: list[str],
    ):
        self._call = call
        self._condition = condition
        self._sides = sides
        self._answer = answer
        """The side that PyTorch took, if that is known."""
        self._held = list(_containers(sides.values(), call))
        self._ended = {id(cell) for side in sides.values() for name, cell in _cells(side) if name in ended}
        self._holders: dict[int, Storage | AutogradHandle] = {}
        """Storages that were there before and that a side has written, and the handles over them."""

    def run(self) -> Any:
        call = self._call
        outermost = not call.sides
        call.sides += 2
        if call.sides > _MOST:
            what = f"branches on traced values have more than {_MOST} sides inside of one"
            raise call.error(what, "let the sides set variables, and return after the last branch")
        made = dict[bool, _Side]()
        for answer in (True, False):
            try:
                made[answer] = self._traced(answer, made.get(True, _Side()))
            except BridgeError:
                raise
            except Exception as error:
                if not _is_raised(error) or fails(call):
                    raise
                return self._sides[not answer]()
        then, otherwise = made[True], made[False]
        if otherwise.trees.keys() - then.trees.keys() or otherwise.holders.keys() - then.holders.keys():
            then = self._traced(True, otherwise)
        if outermost:
            call.sides = 0
        call.draws = max(then.draws, otherwise.draws) if self._answer is None else made[self._answer].draws
        return self._merge(then, otherwise)

    def _traced(self, answer: bool, other: _Side) -> _Side:
        """Traces a side, again if it writes tensors of known numbers from before it, which are traced by then."""
        call = self._call
        turns = collections.Counter(call.turns)
        while True:
            try:
                return self._trace(answer, other)
            except WrittenByOneSide as found:
                call.turns = turns.copy()
                call.constants.materialize_with_aliases(call, found.root)

    def _trace(self, answer: bool, other: _Side) -> _Side:
        """Traces a side and undoes what it did. Also keeps the values at places that the other side has changed."""
        call = self._call
        side = _Side()
        before = call.draws, call.off_path, call.constants.known(), REGION.notes, REGION.undo
        before_side = call.constants.before_side
        call.constants.before_side = call.constants.own_memory()
        call.off_path = call.off_path or (CURRENT.answers is not None and self._answer is not answer)
        call.truths.append((self._condition, answer))
        REGION.undo = undo = Undo()
        REGION.notes = []

        def traced() -> list[Any]:
            values = {None: self._sides[answer]()}
            values |= {place: self._at(place) for place in other.trees if place is not None}
            values |= self._changes()
            side.trees = {place: side.apart(call, value) for place, value in values.items()}
            self._holders |= {id(holder): holder for holder in undo.written()}
            for number, holder in self._holders.items():
                if isinstance(holder, Storage):
                    side.holders[number] = side.add(holder.array), False, False
                else:
                    side.holders[number] = side.add(holder.read()), holder.tracked, holder.live
            return side.arrays

        try:
            side.closed = jax.make_jaxpr(traced)()
            side.draws = call.draws
        finally:
            side.arrays = []
            for note in REGION.notes:
                holder = note()
                if isinstance(holder, BridgeTensor):
                    holder._cache = None
            call.truths.pop()
            call.draws, call.off_path, known, REGION.notes, REGION.undo = before
            call.constants.restore(known)
            call.constants.before_side = before_side
            undo.run()
            for container, items in self._held:
                _put(container, items)
        return side

    def _at(self, place: tuple[int, Any]) -> Any:
        number, key = place
        return _items(self._held[number][0]).get(key, _MISSING)

    def _changes(self) -> dict[tuple[int, Any], Any]:
        """Returns the present value at each place, (number of a container, key), that has changed."""
        found = {}
        for number, (container, before) in enumerate(self._held):
            now = _items(container)
            changed = [key for key in {**before, **now} if now.get(key, _MISSING) is not before.get(key, _MISSING)]
            if not changed or changed == ["_cache"] or id(container) in self._ended:
                continue
            is_cell = isinstance(container, types.CellType)
            if not is_cell and (now.keys() != before.keys() or not _MEMORY.isdisjoint(changed)):
                names = ", ".join(map(repr, changed[:3]))
                kind = type(container).__name__
                what = f"one side of a branch on a traced value adds, removes or exchanges {names} in a {kind}"
                raise self._call.error(what, _remedy(_conditions(self._call, self._condition)))
            found |= {(number, key): now.get(key, _MISSING) for key in changed if key not in INTERNAL}
        return found

    def _merge(self, then: _Side, otherwise: _Side) -> Any:
        """Emits the `cond`, and puts its results at the places that the sides have changed."""
        merge = _Merge(self._call, self._condition)
        plans = {place: merge.plan(then.trees[place], otherwise.trees[place]) for place in then.trees}
        holders = []
        for number, (array, tracked, live) in then.holders.items():
            other = otherwise.holders[number]
            of_either = tracked or other[1], live or other[2]
            holders.append((self._holders[number], merge.pair(array, other[0]), of_either))
        results = self._results(merge.pairs, then.closed, otherwise.closed)
        for holder, place, _ in holders:
            if isinstance(holder, Storage):
                holder.put(results[place])
        for holder, place, of_either in holders:
            if isinstance(holder, AutogradHandle):
                holder.put(results[place], *of_either)
        for place, plan in plans.items():
            if place is not None:
                self._set(place, plan(results))
        return used(plans[None](results))

    def _set(self, place: tuple[int, Any], value: Any) -> None:
        number, key = place
        container = self._held[number][0]
        if not isinstance(container, types.CellType):
            container[key] = used(value)
        elif value is not _MISSING:
            container.cell_contents = value

    def _results(self, pairs: list[tuple[Any, Any]], then: Any, otherwise: Any) -> list[jax.Array]:
        """Returns the arrays that a `cond` chooses of each pair of arrays or numbers of the sides' results."""
        condition = self._condition

        def side(closed: Any, which: int, condition: jax.Array) -> list[jax.Array]:
            consts = [_only_if(condition, c) if has_tangents(c) else c for c in closed.consts]
            made = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))()
            chosen = [made[pair[which]] if type(pair[which]) is int else pair[which] for pair in pairs]
            return [jax.lax.convert_element_type(array, jnp.result_type(array)) for array in chosen]

        if not then.jaxpr.eqns and not otherwise.jaxpr.eqns:  # a choice of what is there
            both = zip(side(then, 0, condition), side(otherwise, 1, jnp.logical_not(condition)), strict=True)
            return [jnp.where(condition, *pair) for pair in both]
        if not pairs:
            return []
        return jax.lax.cond(
            condition,
            lambda: side(then, 0, condition),
            lambda: side(otherwise, 1, jnp.logical_not(condition)),
        )


class _Merge:
    """Makes one value of the two that the sides leave."""

    def __init__(self, call: CallState, condition: jax.Array):
        self._call = call
        self._condition = condition
        self.pairs: list[tuple[Any, Any]] = []

    def pair(self, a: Any, b: Any) -> int:
        self.pairs.append((a, b))
        return len(self.pairs) - 1

    def plan(self, a: _Tree, b: _Tree) -> Callable[[list[jax.Array]], Any]:
        """Returns the function that makes the value of the results of the `cond`."""
        if a.value is b.value:
            return lambda _: a.value
        if a.value is _MISSING:  # PyTorch raises an error if this side is taken and the name is used
            a = _blank(b)
        elif b.value is _MISSING:
            b = _blank(a)
        given = f"{_shown(a)} and {_shown(b)} {self._call.where()}"
        text = f"the sides of a branch on a traced value give {given}; this is used"
        disagreement = _Disagreement(text, _conditions(self._call, self._condition))
        if a.structure != b.structure:
            return lambda _: disagreement
        size = len(self.pairs)
        parts: list[Any] = [self._leaf(*both) for both in zip(a.leaves, b.leaves, strict=True)]
        if any(part is None for part in parts):
            del self.pairs[size:]
            return lambda _: disagreement
        return lambda results: jax.tree.unflatten(a.structure, [part(results) for part in parts])

    def _leaf(self, a: Any, b: Any) -> Callable[[list[jax.Array]], Any] | None:
        """Returns the same for a leaf; None if the sides disagree on it."""
        if isinstance(a, _Leaf) and isinstance(b, _Leaf) and a.tensor is b.tensor and a.is_number == b.is_number:
            return lambda _: number_of(a.tensor) if a.is_number else a.tensor
        kinds = _meta(a), _meta(b)
        if kinds[0] is None or kinds[1] is None or (type(a) is type(b) and type(a) in ATOMS and a == b):
            same = a is b or (type(a) is type(b) and type(a) in ATOMS and a == b)
            return (lambda _: a) if same else None
        meta = _common(a, kinds[0], b, kinds[1])
        if meta is None or not _of_same_rows(a, b):
            return None
        leaves = [each for each in (a, b) if isinstance(each, _Leaf)]
        place = self.pair(*(x.array if isinstance(x, _Leaf) else _array(x, meta) for x in (a, b)))
        tracked = any(each.tracked for each in leaves)
        live = any(each.live for each in leaves)
        storages = [weakref.ref(each.storage) for each in leaves]
        is_number = bool(leaves) and all(each.is_number for each in leaves)
        rows = next((each.rows for each in leaves), None)

        def make(results: list[jax.Array]) -> Any:
            tensor = wrap(results[place], meta, tracked=tracked, live=live)
            if is_number:
                return number_of(tensor)
            _share(tensor._handle.storage, storages)
            return tensor if rows is None else rows.like(tensor)

        return make


def _of_same_rows(a: Any, b: Any) -> bool:
    """True if neither leaf is rows, or both are by a mask that was there before the branch."""
    one, other = (getattr(leaf, "rows", None) for leaf in (a, b))
    if one is None or other is None:
        return one is other
    return one.mask is other.mask and one.first == other.first


def _is_raised(error: Exception) -> bool:
    """True if a `raise` or an `assert` of the module's code, or of a library, has raised it."""
    *_, last = _tracebacks(error)
    is_ours = last.tb_frame.f_globals["__name__"].startswith(("bridge.", "jax"))
    return not is_ours and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _tracebacks(error: Exception) -> Iterator[types.TracebackType]:
    following = error.__traceback__
    while following is not None:
        yield following
        following = following.tb_next


def _blank(tree: _Tree) -> _Tree:
    """Returns the same value with zeros for its tensors; one of another kind stays only if it holds no array."""
    keeps = (*ATOMS, types.FunctionType, types.MethodType, nn.Module, type)

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, _Leaf) and leaf.rows is None:
            return _Zeros(leaf.meta)
        return leaf if isinstance(leaf, keeps) else object()

    return tree._replace(value=None, leaves=list(map(blank, tree.leaves)))


def _shown(tree: _Tree) -> str:
    shapes = [f"{leaf.meta.dtype} of shape {tuple(leaf.meta.shape)}" for leaf in tree.leaves if isinstance(leaf, _Leaf)]
    if len(shapes) == 1 and isinstance(tree.value, torch.Tensor):
        return shapes[0]
    return f"a {type(tree.value).__name__} with {len(shapes)} tensors" if shapes else repr(tree.value)[:40]


def _meta(leaf: Any) -> torch.Tensor | None:
    """Returns a tensor on the meta device for a tensor or a number of Python's; None for anything else."""
    if isinstance(leaf, (_Leaf, _Zeros)):
        return leaf.meta
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    if type(leaf) not in dtypes:
        return None
    return empty_meta((), None, dtypes[type(leaf)])


def _common(a: Any, meta_of_a: torch.Tensor, b: Any, meta_of_b: torch.Tensor) -> torch.Tensor | None:
    """Returns the kind of tensor that may be either of the two; None if there is none."""
    if meta_of_a.shape != meta_of_b.shape:
        return None
    dtype = torch.promote_types(meta_of_a.dtype, meta_of_b.dtype)
    for leaf, meta in ((a, meta_of_a), (b, meta_of_b)):
        if isinstance(leaf, (_Leaf, _Zeros)) and meta.dtype != dtype:
            return None
    with below_modes():
        return torch.empty_like(meta_of_a if isinstance(a, _Leaf) else meta_of_b, dtype=dtype)


def _array(leaf: Any, meta: torch.Tensor) -> jax.Array:
    number = 0 if isinstance(leaf, _Zeros) else leaf
    return jnp.full(meta.shape, number, jax_dtype(meta.dtype))


class _Shared:
    """True while other memory lives that may be the same in PyTorch, so that a write would have to reach it, too."""

    def __init__(self, before: Any, others: Iterable[weakref.ref]):
        self._before = before
        self._others = list(others)

    def __bool__(self) -> bool:
        return bool(self._before) or any(other() is not None for other in self._others)


def _share(new: Storage, others: list[weakref.ref]) -> None:
    new.overlaps = _Shared(new.overlaps, others)  # pyright: ignore[reportAttributeAccessIssue]
    for other in others:
        storage = other()
        if storage is not None:
            storage.overlaps = _Shared(storage.overlaps, [weakref.ref(new)])  # pyright: ignore


# ---- what the sides can reach


def _cells(side: Callable) -> Iterator[tuple[str, types.CellType]]:
    """Yields the names of a function around a side, or around the rest of a function that it takes along."""
    for name, cell in zip(side.__code__.co_freevars, side.__closure__ or (), strict=True):
        yield name, cell
        if name.startswith("bridge_rest"):
            yield from _cells(cell.cell_contents)


def _containers(functions: Iterable[Callable], call: CallState) -> Iterator[tuple[Any, dict]]:
    """Yields each container, and each dict of attributes, that the functions can reach, with its items."""
    todo: list[Any] = list(functions)
    seen = set[int]()
    for value in todo:
        kind = type(value)
        if kind in ATOMS or id(value) in seen or isinstance(value, (type, types.ModuleType, Storage, AutogradHandle)):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            todo += [*(value.__closure__ or ()), *(value.__defaults__ or ())]
        elif isinstance(value, types.CellType):
            items = _items(value)
            yield value, items
            todo += items.values()
            if isinstance(items.get(0), Iterator):
                what = (
                    f"a branch on a traced value can reach a {type(items[0]).__name__}, which each side would advance"
                )
                raise call.error(what, "take the items out of it before, as a list")
        elif built_in(kind) or isinstance(value, set):
            if not isinstance(value, tuple):
                yield value, _items(value)
            todo += _items(value).values()
        elif isinstance(value, (types.MethodType, functools.partial)):
            todo += [part for _, part in parts_of(value)]
        if kind.__dictoffset__ and (
            isinstance(value, (nn.Module, BridgeTensor)) or is_plain_class(kind) or built_in(kind)
        ):
            yield vars(value), dict(vars(value))
            todo += vars(value).values()


def _items(container: Any) -> dict:
    if isinstance(container, types.CellType):
        try:
            return {0: container.cell_contents}
        except ValueError:
            return {}
    if isinstance(container, set):
        return dict.fromkeys(container)
    return dict(items_of(container))


def _put(container: Any, items: dict) -> None:
    """Gives a container the items that it had before."""
    now = _items(container)
    if now.keys() == items.keys() and all(now[key] is item for key, item in items.items()):
        return
    if isinstance(container, types.CellType):
        if items:
            container.cell_contents = items[0]
        else:
            del container.cell_contents
        return
    base: Any = set if isinstance(container, set) else built_in(type(container))
    base.clear(container)
    if issubclass(base, dict):
        for key, item in items.items():
            dict.__setitem__(container, key, item)  # pyright: ignore[reportArgumentType]
    elif base is set:
        base.update(container, items)
    else:
        base.extend(container, items.values())
