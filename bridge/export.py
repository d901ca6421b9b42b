"""`export(module)`: the module as a pure function of its parameters, its buffers, its inputs and a key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import nn

from bridge.adoption import window
from bridge.arrays import array_of, jax_dtype, torch_dtype
from bridge.dispatch import Dispatch, Survey
from bridge.errors import BridgeError
from bridge.internals import Tracer, gradient_hooks, mark_as_parameter
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.memory import check_kinds, roots
from bridge.overrides import override
from bridge.pytrees import convert, is_array
from bridge.randomness import Rng
from bridge.recomputation import recomputed
from bridge.recording import GRAPH_FROM_INPUTS, record, restarted
from bridge.shadow import shadow
from bridge.tensors import BridgeTensor, blank, fresh
from bridge.tracing import tracing


class Result(NamedTuple):
    """Everything a call leaves behind."""

    outputs: Any
    buffers: dict[str, jax.Array]
    params: dict[str, jax.Array]
    """With what the module wrote into its own parameters (a leaf filled under `no_grad`, a renormalised embedding)."""


@dataclasses.dataclass(frozen=True)
class Functional:
    """A module as a pure function. Composes with `jit`, `grad`, `vmap`, `pmap`, `scan`, `checkpoint`.

    Made by `export`. `params` and `buffers` are the state at that time, keyed by qualified names; a tied weight is
    there once, under its first name.
    """

    module: nn.Module
    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    without_lowerings: frozenset[str] = frozenset()
    """Names of ops (`"aten::scaled_dot_product_attention"`) that shall not use the bridge's own lowering."""
    recompute: tuple[str, ...] = ()
    """Names of submodules whose intermediate results are computed again in the backward pass."""

    def __call__(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        *args: Any,
        rng: Rng | None = None,
        train: bool | None = None,
        method: str = "forward",
        overrides: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Run `method` with this state; returns its outputs and the buffers with every in-place write.

        `rng` is a JAX key (or a `ShardedKey`), needed only where the module draws random numbers. `train`
        sets the mode of every submodule for this call, `None` keeps each one's own. `overrides` gives numbers that the
        module keeps in attributes by their dotted path (`{"layers.0.dropout.p": 0.2}`), traced like any input: another
        value compiles nothing anew. Everything in the module that shares the object sees the change.

        Raises `BridgeError` for a missing or surplus name, a wrong shape, randomness without a key, and whatever
        cannot be translated.
        """
        result = self.run(params, buffers, *args, rng=rng, train=train, method=method, overrides=overrides, **kwargs)
        return result.outputs, result.buffers

    def run(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        *args: Any,
        rng: Rng | None = None,
        train: bool | None = None,
        method: str = "forward",
        overrides: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Result:
        """As calling it, and also returns the parameters with what the module wrote into them."""
        return self._run(params, buffers, args, kwargs, rng, train, method, overrides or {})

    def survey(
        self, *args: Any, rng: Rng | None = None, train: bool | None = None, method: str = "forward", **kwargs: Any
    ) -> Survey:
        """The operations that a call makes, without computing anything; what is not supported is listed, not raised."""
        found = Survey()

        def call(params, buffers, args, kwargs):
            return self._run(params, buffers, args, kwargs, rng, train, method, {}, found).outputs

        jax.eval_shape(call, self.params, self.buffers, args, kwargs)
        return found

    def _run(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        args: tuple,
        kwargs: dict[str, Any],
        rng: Rng | None,
        train: bool | None,
        method: str,
        overrides: Mapping[str, Any],
        survey: Survey | None = None,
    ) -> Result:
        def trace(recording: int) -> Result:
            return self._trace(params, buffers, args, kwargs, rng, train, method, overrides, survey, recording)

        return restarted(trace)

    def _trace(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        args: tuple,
        kwargs: dict[str, Any],
        rng: Rng | None,
        train: bool | None,
        method: str,
        overrides: Mapping[str, Any],
        survey: Survey | None,
        recording: int,
    ) -> Result:
        self._check(params, self.params, "parameter")
        self._check(buffers, self.buffers, "buffer")
        _refuse_gradient_hooks(self.module)
        module, copies = shadow(self.module)
        names = {id(copies[id(m)]): name for name, m in self.module.named_modules()}
        names |= {id(m): name for name, m in self.module.named_modules()}
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((params, buffers, args, kwargs, overrides)))
        dispatch = Dispatch(rng, names, self.without_lowerings, survey, traced, recording)
        state = {}
        reals = _state(self.module)
        windows = roots(reals)
        for name, real in sorted(reals.items(), key=lambda item: item[0] in windows):
            trained = name in self.params
            array = jnp.asarray(params[name] if trained else buffers[name])
            dtype = real.dtype if array.dtype == jax_dtype(real.dtype) else torch_dtype(array.dtype)
            if name in windows:  # written into the memory that it shows, as `load_state_dict` does
                tensor = window(state[windows[name]], real, differentiable=False)
                tensor.write(array.astype(tensor.value.dtype), tracked=False, grad_enabled=False, static=False)
            else:
                meta = blank(real.shape, real.stride(), dtype, int(real.storage_offset()))
                tensor = fresh(array, meta, tracked=trained)
            state[name] = tensor
            mark_as_parameter(tensor, isinstance(real, nn.Parameter))
            if recording:
                record(tensor)
            dispatch.stand_in(real, tensor)
        for name in self.recompute:
            twin = copies[id(self.module.get_submodule(name))]
            twin.__dict__["forward"] = functools.partial(recomputed, twin.forward)
        for name, number in overrides.items():
            override(module, list(copies.values()), name, fresh(jnp.asarray(number), tracked=True))
        slots = _fill(self.module, copies, {id(real): state[name] for name, real in _state(self.module).items()})

        if train is not None:
            _set_mode(module, list(copies.values()), train, dispatch, state, slots)

        def to_torch(value: Any) -> Any:
            if is_array(value):
                # No `requires_grad`, as in PyTorch unless the code differentiates by it; JAX may do so all the same.
                tensor = fresh(jnp.asarray(value), tracked=recording == GRAPH_FROM_INPUTS)
                if recording:
                    record(tensor)
                return tensor
            return value

        def to_jax(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return dispatch.adopt(value).value
            return value

        args, kwargs = convert((args, kwargs), to_torch)
        with tracing(dispatch):
            try:
                outputs = getattr(module, method)(*args, **kwargs)
            finally:  # PyTorch's own error about one that the call registered says nothing of that
                _refuse_gradient_hooks(module)
            # A buffer may have been assigned anew (`self.count = self.count + 1`) instead of written.
            final = {name: getattr(owner, slot) for name, (owner, slot) in slots.items()}
            outputs = convert(outputs, to_jax)
            arrays = {name: to_jax(value) for name, value in final.items()}
        return Result(
            outputs,
            {name: arrays[name] for name in self.buffers},
            {name: arrays[name] for name in self.params},
        )

    def _check(self, given: Mapping[str, Any], expected: Mapping[str, jax.Array], what: str) -> None:
        missing = [name for name in expected if name not in given]
        surplus = [name for name in given if name not in expected]
        if missing or surplus:
            lists = [("missing", missing), ("surplus", surplus)]
            words = [f"{w} {what}s: {', '.join(n[:5])}{' …' if len(n) > 5 else ''}" for w, n in lists if n]
            raise BridgeError(f"{'; '.join(words)}; pass exactly the names that export(module) gave")
        for name, array in expected.items():
            if tuple(jnp.shape(given[name])) != array.shape:
                raise BridgeError(
                    f"{what} {name} has shape {tuple(jnp.shape(given[name]))}, expected {array.shape}: "
                    "pass arrays shaped as in the exported module"
                )


def export(module: nn.Module, *, without_lowerings: tuple[str, ...] = (), recompute: str = "") -> Functional:
    """The module as a `Functional`. The module is not changed, now or by any later call, and stays usable in PyTorch.

    Every state tensor with `requires_grad` becomes a parameter; all others, frozen parameters and non-persistent
    buffers included, become buffers. `recompute` is a regular expression: calls of the submodules whose whole qualified
    name it matches are as if wrapped in `torch.utils.checkpoint`. `without_lowerings` names operations (`"aten::gelu"`)
    that shall not use the bridge's own lowering. Raises `BridgeError` for a name or expression that matches nothing.
    """
    known = {op.name() for op in (*LOWERINGS, *DECOMPOSITIONS)}
    for name in without_lowerings:
        if name not in known:
            close = ", ".join(difflib.get_close_matches(name, known)) or "see bridge.LOWERINGS"
            raise BridgeError(f"no lowering is called {name}; there are: {close}")
    state = _state(module)
    check_kinds(state)
    roots(state)  # refuses what two arrays cannot say
    _refuse_gradient_hooks(module)
    chosen = tuple(name for name, _ in module.named_modules() if re.fullmatch(recompute, name)) if recompute else ()
    if recompute and not chosen:
        names = ", ".join(name for name, _ in list(module.named_modules())[1:6])
        raise BridgeError(f"recompute {recompute!r} matches no submodule; names here are {names} …")
    return Functional(
        module,
        {name: array_of(t) for name, t in state.items() if t.requires_grad},
        {name: array_of(t) for name, t in state.items() if not t.requires_grad},
        frozenset(without_lowerings),
        chosen,
    )


def _refuse_gradient_hooks(module: nn.Module) -> None:
    """They belong to PyTorch's engine, which does not run; what they do to a gradient would be left out."""
    hooked = gradient_hooks(module)
    if hooked:
        raise BridgeError(
            f"{hooked[0]} has a gradient hook, which JAX's differentiation does not call; remove it, or write what it "
            "does as the backward of a torch.autograd.Function"
        )


def _set_mode(
    module: nn.Module,
    tree: list[nn.Module],
    train: bool,
    dispatch: Dispatch,
    state: Mapping[str, BridgeTensor],
    slots: Mapping[str, tuple[nn.Module, str]],
) -> None:
    """`module.train(train)` on the copy, by the modules' own methods where one has its own."""
    if all(type(m).train is nn.Module.train and "train" not in vars(m) for m in tree):
        for m in tree:
            m.training = train
        return
    before = {name: (tensor, tensor._cell.storage, tensor._cell.version) for name, tensor in state.items()}
    with tracing(dispatch):
        module.train(train)
    for name, (owner, slot) in slots.items():
        now = getattr(owner, slot)
        if now is not before[name][0] or (now._cell.storage, now._cell.version) != before[name][1:]:
            raise BridgeError(
                f"train({train}) writes {name}, and what else it keeps would be lost with the call; "
                f"call module.train({train}) before export, and leave train=None"
            )


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its first qualified name; a tied one once."""
    seen: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            state[name] = tensor
    return state


def _fill(
    module: nn.Module, copies: dict[int, nn.Module], tensors: dict[int, BridgeTensor]
) -> dict[str, tuple[nn.Module, str]]:
    """Put the traced tensors where the real ones were; returns where each name lives."""
    slots: dict[str, tuple[nn.Module, str]] = {}
    placed: set[int] = set()
    for prefix, original in module.named_modules():
        twin = copies[id(original)]
        for registry in ("_parameters", "_buffers"):
            for slot, real in getattr(original, registry).items():
                if real is None:
                    continue
                getattr(twin, registry)[slot] = tensors[id(real)]
                if id(real) not in placed:
                    placed.add(id(real))
                    slots[f"{prefix}.{slot}" if prefix else slot] = (twin, slot)
    return slots
