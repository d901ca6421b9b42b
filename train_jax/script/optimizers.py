"""An optimizer of `torch.optim` and its schedule as one Optax transformation; clipping of gradients as in PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jaxtyping import Array, Int

from train_jax.errors import UserError
from train_jax.script.rules import RULES, Memory, Number, Rule, Settings, rounding
from train_jax.script.schedules import LONGEST, at_step, settings_by_step, shortened


@dataclasses.dataclass(frozen=True)
class Translated:
    """A `torch.optim` optimizer for `jax.jit` and `jax.pmap`."""

    transformation: optax.GradientTransformation
    """Takes and returns dicts of arrays by qualified name, with some or all of the names in `trained`. It needs
    `params`, which `optax.apply_updates` makes what PyTorch has after `optimizer.step()`. Gradients are those of
    `jax.grad`."""
    trained: tuple[str, ...]
    """The parameters in the optimizer's groups that require grad, in the order of `named_parameters`."""
    rates: dict[str, optax.Schedule]
    """The learning rates as functions of the optimizer steps made before: one named "" if all are the same, otherwise
    by the `name` of a group, or `group_0`, …"""


class OptimizerState(NamedTuple):
    """The state of a translated optimizer."""

    count: Int[Array, ""]
    """Steps taken."""
    memory: dict[str, dict[str, Any]]
    """Arrays by PyTorch's name of what is kept (`exp_avg`, …) and by parameter; `MaskedNode` where a group has none."""


class _Group(NamedTuple):
    """A parameter group."""

    coefficients: dict[str, Number]
    memory: dict[str, float]
    sign: float
    """-1 for a group that maximizes."""


def translate(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    schedule: object | None,
    total_steps: int,
    *,
    where: str,
) -> Translated:
    """Returns the optimizer with its parameter groups and settings, and the values of its schedule at every step.

    `where` is the beginning of messages, such as the file and the line of `optimizer`. None of the objects changes.
    Raises `UserError` for a class that is not in `RULES`, for an optimizer that has made steps or has hooks, for a
    parameter that is in two groups or not in the model, and for the mistakes of `settings_by_step`.
    """
    rule = _rule_of(optimizer, where)
    _check_unused(optimizer, where)
    group_of = _group_by_name(optimizer, model, where)
    settings = settings_by_step(optimizer, schedule, total_steps, rule.settings, where=where)
    for each, group in zip(settings, optimizer.param_groups, strict=True):
        each.update((flag, bool(group.get(flag, False))) for flag in rule.flags)
    known: dict[bytes, Number] = {}
    groups = [_group(rule, each, total_steps, known, where) for each in settings]
    used = sorted(set(group_of.values()))
    labels = _labels(optimizer)
    rates = {labels[index]: shortened(settings[index]["lr"]) for index in used}
    return Translated(
        _transformation(rule, groups, group_of),
        tuple(group_of),
        {label: _schedule(values) for label, values in _merged(rates).items()},
    )


def clip_grad_norm(
    max_norm: float, norm_type: float = 2.0, norm: Callable[[Any], jax.Array] | None = None
) -> optax.GradientTransformation:
    """Returns `torch.nn.utils.clip_grad_norm_`: gradients times `max_norm / (norm + 1e-6)`, if that is below 1.

    `norm` returns the norm of all gradients where they are sharded, whose `norm_type` is 2.
    """

    def clip(updates: Any, _: Any = None) -> Any:
        total = norm(updates) if norm else _total_norm(jax.tree.leaves(updates), norm_type)
        factor = jnp.minimum(max_norm / (total + 1e-6), 1.0)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(clip)


def clip_grad_value(clip_value: float) -> optax.GradientTransformation:
    """Returns `torch.nn.utils.clip_grad_value_`: every element is clipped to `[-clip_value, clip_value]`."""
    return optax.stateless(
        lambda updates, _=None: jax.tree.map(lambda g: jnp.clip(g, -clip_value, clip_value), updates)
    )


def _total_norm(arrays: list[jax.Array], kind: float) -> jax.Array:
    """Returns the norm of the norms, each rounded to the type of its array."""

    def norm(array: jax.Array, dtype: Any) -> jax.Array:
        magnitudes = jnp.abs(array).astype(_compute_dtype(dtype))
        return jnp.linalg.vector_norm(magnitudes, ord=cast(Any, kind)).astype(dtype)

    if not arrays:
        return jnp.zeros(())
    norms = jnp.stack([norm(array, jnp.finfo(array.dtype).dtype) for array in arrays])
    return norm(norms, norms.dtype)


# ---- reading the optimizer


def _rule_of(optimizer: Any, where: str) -> Rule:
    rule = RULES.get(type(optimizer))
    if rule is None:
        supported = ", ".join(cls.__name__ for cls in RULES)
        kind = type(optimizer)
        raise UserError(
            f"{where}: the optimizer is a {kind.__module__}.{kind.__qualname__}, which has no translation; return "
            f"one of torch.optim's {supported} itself, no subclass, or leave `optimizer` out and choose one of ours "
            "with --optim.optimizer"
        )
    return rule


def _check_unused(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises `UserError` for an optimizer with hooks, or with a state that a step has left."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UserError(
            f"{where}: the optimizer has hooks on its step, which would not run; remove them, and clip gradients with "
            "--optim.clip-norm"
        )
    for state in optimizer.state.values():
        if float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None:
            raise UserError(
                f"{where}: the optimizer has made steps already, and its state would be lost; return a new one, and "
                "continue a run by its run folder"
            )


def _group_by_name(optimizer: torch.optim.Optimizer, model: torch.nn.Module, where: str) -> dict[str, int]:
    """Returns the index of the group of each parameter that is trained, in the order of the model's parameters.

    A tied weight has its first name, as in `bridge.export`.
    """
    group_of: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"{where}: a parameter of shape {tuple(parameter.shape)} in parameter group {index} of the "
                    "optimizer is not in the model; give the optimizer parameters of the model that is passed to it"
                )
            if id(parameter) in group_of:
                first = group_of[id(parameter)]
                places = f"groups {first} and {index}" if first != index else f"group {index} twice"
                raise UserError(f"{where}: the parameter {name} is in {places} of the optimizer; list it once")
            group_of[id(parameter)] = index
    trained = {
        name: group_of[id(parameter)]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in group_of
    }
    if not trained:
        raise UserError(
            f"{where}: no parameter of the optimizer requires grad, so nothing would be trained; give it some that do"
        )
    return trained


def _labels(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the name of each parameter group: its own, if all groups have one, otherwise a number."""
    names = [group.get("name") for group in optimizer.param_groups]
    if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
        return [str(name).replace(" ", "_") for name in names]
    return [f"group_{index}" for index in range(len(names))]


def _merged(rates: Mapping[str, Number]) -> dict[str, Number]:
    first = next(iter(rates.values()))
    if all(np.array_equal(first, each) for each in rates.values()):
        return {"": first}
    return dict(rates)


def _schedule(values: Number) -> optax.Schedule:
    def rate(count: Any) -> jax.Array:
        return jnp.asarray(at_step(values, count, jnp.result_type(float)), float)

    return rate


def _group(rule: Rule, settings: Settings, total_steps: int, known: dict[bytes, Number], where: str) -> _Group:
    """Returns the coefficients of a group. Equal arrays of several groups are one, which is in the program once."""
    steps = np.arange(1, min(total_steps, LONGEST) + 1, dtype=np.float64)
    with np.errstate(all="ignore"):
        coefficients = {name: shortened(values) for name, values in rule.coefficients(settings, steps).items()}
    for name, values in coefficients.items():
        if isinstance(values, np.ndarray):
            if len(values) == len(steps) < total_steps:
                raise UserError(
                    f"{where}: settings of the optimizer change until the end of {total_steps} steps; use at most "
                    f"{LONGEST}, or settings that do not change"
                )
            coefficients[name] = known.setdefault(values.tobytes(), values)
    return _Group(coefficients, rule.memory(settings), -1.0 if settings["maximize"] else 1.0)


# ---- the transformation


def _transformation(rule: Rule, groups: list[_Group], group_of: Mapping[str, int]) -> optax.GradientTransformation:
    kinds = sorted({kind for index in set(group_of.values()) for kind in groups[index].memory})

    def new(kind: str, name: str, parameter: jax.Array) -> Any:
        start = groups[group_of[name]].memory.get(kind)
        if start is None:
            return optax.MaskedNode()
        if jnp.iscomplexobj(parameter):
            start = complex(start, start)
        return jnp.full_like(parameter, start)

    def init(params: Any) -> OptimizerState:
        memory = {kind: {name: new(kind, name, p) for name, p in params.items()} for kind in kinds}
        return OptimizerState(jnp.zeros((), jnp.int32), memory)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OptimizerState]:
        kind_of = {name: (group_of[name], _compute_dtype(params[name].dtype)) for name in updates}
        coefficients = _at_count(groups, set(kind_of.values()), state.count)
        changes: dict[str, jax.Array] = {}
        memory: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, gradient in updates.items():
            group = groups[group_of[name]]
            kept = {kind: state.memory[kind][name] for kind in group.memory}
            values = coefficients[kind_of[name]]
            changes[name], kept = _update(rule, group.sign, params[name], gradient, kept, values)
            for kind in kinds:
                memory[kind][name] = kept.get(kind, optax.MaskedNode())
        count = cast(jax.Array, optax.safe_increment(state.count))
        return changes, OptimizerState(count, memory)

    return optax.GradientTransformation(init, update)


def _at_count(groups: list[_Group], kinds: set[tuple[int, Any]], count: jax.Array) -> dict[Any, dict[str, Any]]:
    """Returns the coefficients of the next step for groups and types of computation. An array is read once for all."""
    tables: dict[tuple[int, Any], Any] = {}
    found: dict[Any, dict[str, Any]] = {kind: {} for kind in kinds}
    for (index, dtype), coefficients in found.items():
        for name, values in groups[index].coefficients.items():
            table = id(values), dtype
            if table not in tables:
                tables[table] = at_step(values, count, dtype)
            coefficients[name] = tables[table]
    return found


def _update(
    rule: Rule, sign: float, parameter: jax.Array, gradient: jax.Array, memory: Memory, coefficients: Mapping[str, Any]
) -> tuple[jax.Array, Memory]:
    """Returns the change of a parameter, in at least float32, and what is kept.

    Complex numbers are two real ones, as in PyTorch; the gradient of `jax.grad` is the conjugate of PyTorch's.
    """
    dtype = _compute_dtype(parameter.dtype)
    before = _real(parameter).astype(dtype)
    after, memory = rule.update(
        before,
        sign * _real(jnp.conj(gradient)).astype(dtype),
        {kind: _real(array).astype(dtype) for kind, array in memory.items()},
        coefficients,
        rounding(parameter.dtype),
    )
    # In 16 bits, the difference of two parameters may have more digits than 16 bits hold.
    change = after - before
    kept = {kind: _like(array, parameter).astype(parameter.dtype) for kind, array in memory.items()}
    return _like(change, parameter), kept


def _compute_dtype(dtype: Any) -> Any:
    """Returns the real type of the operations: float32 for 16 bits."""
    return jnp.finfo(dtype).dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _real(array: jax.Array) -> jax.Array:
    return jnp.stack([array.real, array.imag], -1) if jnp.iscomplexobj(array) else array


def _like(array: jax.Array, other: jax.Array) -> jax.Array:
    return jax.lax.complex(array[..., 0], array[..., 1]) if jnp.iscomplexobj(other) else array
