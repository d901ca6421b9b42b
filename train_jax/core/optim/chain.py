"""The optimizer of the dense parameters as one Optax transformation, with parameter groups and frozen parameters."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from train_jax.core.optim.config import OptimConfig
from train_jax.core.optim.muon import muon_labels, scale_by_shape
from train_jax.core.optim.rules import ELEMENTWISE_RULES, MATRIX_RULES, Rule, decayed_weights
from train_jax.core.optim.schedule import learning_rate, momentum
from train_jax.core.state import Arrays
from train_jax.errors import UserError
from train_jax.plugin import load_object, names_object

Norm = Callable[[Arrays], jax.Array]
"""Returns the global norm of all parameters or gradients."""


class Optimizer(NamedTuple):
    """An optimizer of the dense parameters, and what is logged of it."""

    transformation: optax.GradientTransformation
    rates: Mapping[str, optax.Schedule]
    """Learning rates by the name of a parameter group; one that is named "" if all have the same."""
    parts: Mapping[str, optax.GradientTransformation] = {}
    """The optimizers of the parts of a step, whose states `transformation` initializes; empty for one step."""


def dense_optimizer(
    config: OptimConfig, total_steps: int, norm: Norm = optax.tree.norm
) -> optax.GradientTransformation:
    """Returns clipping by the global norm, then, for each group, update rule, decoupled weight decay and learning rate.

    `norm` is that of a `Sharding`, by default of parameters that are whole.

    For every optimizer here, the weight decay is `lr * weight_decay * p` with the value of p before the step. PyTorch
    applies `p *= 1 - lr * weight_decay` first, which is equal up to rounding. Clipping omits the 1e-6 that
    `torch.nn.utils.clip_grad_norm_` adds to the norm.
    """
    clip = _clip_by_norm(config.clip_norm, norm) if config.clip_norm else optax.identity()
    if not config.groups:
        chain = _group_chain(config, total_steps)
        return optax.chain(clip, *((_if_reached(*chain),) if config.skip_zero_gradients else chain))
    chains: dict[Hashable, optax.GradientTransformation] = {
        label: optax.chain(*_group_chain(of_group, total_steps)) for label, of_group in _by_label(config)
    }
    return optax.chain(clip, optax.partition(chains, lambda params: group_labels(params, config)))


def group_labels(params: Mapping[str, Any], config: OptimConfig) -> dict[str, str]:
    """Returns the group of each parameter. Raises `UserError` for a group without parameters."""
    labels = {}
    for name in params:
        numbers = (n for n, group in enumerate(config.groups) if re.fullmatch(group.pattern, name))
        labels[name] = _label(next(numbers, None))
    for number, group in enumerate(config.groups):
        if params and _label(number) not in labels.values():
            raise UserError(
                f"optim.groups: the pattern {group.pattern!r} matches no trained parameter that an earlier group does "
                f"not match; use one that matches names such as {', '.join(list(params)[:3])}, …"
            )
    return labels


def logged_learning_rates(params: Iterable[str], config: OptimConfig, total_steps: int) -> dict[str, optax.Schedule]:
    """Returns the learning rates to log; the update rules have theirs from the same `schedule.learning_rate`.

    One is named "" if it is that of all trained parameters; otherwise there are those of the parameter groups,
    `default` and `group_0`, …
    """
    used = set(group_labels(dict.fromkeys(params), config).values())
    configs = {label: of_group for label, of_group in _by_label(config) if label in used}
    schedules = {(c.lr, c.warmup_steps, c.decay, c.decay_share, c.lr_min_ratio) for c in configs.values()}
    if len(schedules) == 1:
        configs = {"": next(iter(configs.values()))}
    return {label.replace(" ", "_"): learning_rate(c.lr, c, total_steps) for label, c in configs.items()}


def matrices_alike(params: Arrays, config: OptimConfig) -> list[list[str]]:
    """Returns the trained matrices that a `muon` optimizer updates, in lists of one parameter group and shape."""
    params = trainable(params, config)
    labels = group_labels(params, config)
    configs = dict(_by_label(config))
    alike: dict[Hashable, list[str]] = {}
    for name, rule in muon_labels(params).items():
        if rule == "muon" and configs[labels[name]].optimizer in MATRIX_RULES:
            array = params[name]
            alike.setdefault((labels[name], array.shape, array.dtype), []).append(name)
    return list(alike.values())


def _by_label(config: OptimConfig) -> Iterator[tuple[str, OptimConfig]]:
    """Yields the label and the configuration of each parameter group."""
    yield _label(None), config
    for number, group in enumerate(config.groups):
        yield _label(number), config.of_group(group)


def _label(number: int | None) -> str:
    return "default" if number is None else f"group {number}"


def trainable(params: Arrays, config: OptimConfig) -> Arrays:
    """Returns the dense parameters that are trained: all except those that `config.freeze` matches.

    Raises `UserError` for a pattern that matches no parameter.
    """
    if not config.freeze:
        return params
    trained = {name: array for name, array in params.items() if not re.fullmatch(config.freeze, name)}
    if len(trained) == len(params) and params:
        raise UserError(
            f"optim.freeze {config.freeze!r} matches no parameter; use one that matches names such as "
            f"{', '.join(list(params)[:3])}, …"
        )
    return trained


def _clip_by_norm(largest: float, norm: Norm) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm` with the norm of parameters that may be sharded."""

    def clip(updates: Any, _: Any = None) -> Any:
        total = norm(updates)
        fits = jnp.squeeze(total < largest)
        return jax.tree.map(lambda u: jax.lax.select(fits, u, (u / total.astype(u.dtype)) * largest), updates)

    return optax.stateless(clip)


def _if_reached(
    rule: optax.GradientTransformation, *rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Applies the transformations to a parameter unless its gradient is zero everywhere; `rule` has a state for each.

    The others have schedules, which count all steps.
    """
    following = optax.chain(*rest)

    def reached(gradient: Any) -> Any:
        return jnp.any(gradient != 0)

    def init(params: Any) -> Any:
        return {name: rule.init({name: array}) for name, array in params.items()}, following.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        directions: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for name, gradient in updates.items():
            direction, new = rule.update({name: gradient}, state[0][name], {name: params[name]})
            directions[name] = direction[name]  # pyright: ignore
            states[name] = jax.tree.map(partial(jnp.where, reached(gradient)), new, state[0][name])
        changes, following_state = following.update(directions, state[1], params)
        changes = jax.tree.map(lambda change, gradient: jnp.where(reached(gradient), change, 0), changes, updates)
        return changes, (states, following_state)

    return optax.GradientTransformation(init, update)


def _group_chain(config: OptimConfig, total_steps: int) -> tuple[optax.GradientTransformation, ...]:
    by_shape = (scale_by_shape(),) if config.optimizer in ("muon_2025", "muon_2026") else ()
    return (
        update_rule(config, total_steps),
        decayed_weights(config, total_steps),
        *by_shape,
        optax.scale_by_learning_rate(learning_rate(config.lr, config, total_steps)),
    )


def update_rule(config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns the update rule without weight decay and learning rate. Raises `UserError` for an unknown name."""
    if names_object(config.optimizer):
        return load_object(config.optimizer, "optim.optimizer")(config)
    if config.optimizer in MATRIX_RULES:
        # Epsilon is added to sqrt(v / (1 - beta2^t)), outside the root and after the bias correction, as in PyTorch.
        adamw = optax.scale_by_adam(config.beta1, config.beta2, eps=config.eps)
        matrices = _scheduled(MATRIX_RULES[config.optimizer], config.muon_momentum, config, total_steps)
        return optax.partition({"muon": matrices, "adamw": adamw}, muon_labels)
    if config.optimizer in ELEMENTWISE_RULES:
        return _scheduled(ELEMENTWISE_RULES[config.optimizer], config.beta1, config, total_steps)
    raise UserError(
        f"optim.optimizer is {config.optimizer!r}; use one of {', '.join((*ELEMENTWISE_RULES, *MATRIX_RULES))}, "
        "or package.module:function for your own"
    )


def _scheduled(rule: Rule, peak: float, config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns a rule with its momentum, which may change from step to step."""
    value = momentum(peak, config, total_steps)
    if not callable(value):
        return rule(value, config)

    def with_momentum(momentum: ArrayLike) -> optax.GradientTransformation:
        return rule(momentum, config)

    return optax.inject_hyperparams(with_momentum)(momentum=value)
