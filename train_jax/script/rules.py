"""Update rules of `torch.optim`: what `step()` does to one parameter, with PyTorch's operations in PyTorch's order.

Optax's own rules differ in rounding: they compute `1 - beta2 ** t` in the precision of the parameters, which in float32
has a relative error of 6e-5 at the first step, where PyTorch has a Python float. Here every number that depends on
settings and on the step, but on no array, is a coefficient: computed before training in float64, and rounded once.

References:
  The algorithms at https://docs.pytorch.org/docs/stable/optim.html, and `_single_tensor_*` in `torch/optim` for the
  order of the operations
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike

Number = float | np.ndarray
"""A constant, or float64 values for each step, `[steps]`."""
Settings = Mapping[str, Any]
"""The settings of a parameter group: numbers, tuples of numbers such as `betas`, and flags."""
Coefficients = Mapping[str, Any]
Memory = dict[str, Any]
"""What a rule keeps for a parameter, under the names that PyTorch has in `optimizer.state[parameter]`."""
Round = Callable[[Any], Any]
"""Rounds the result of an operation to the parameter's dtype."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The update rule of one class of optimizers."""

    settings: tuple[str, ...]
    """Numbers in a parameter group, which may change from step to step, and pairs of them."""
    flags: tuple[str, ...]
    """Switches in a parameter group."""
    memory: Callable[[Settings], dict[str, float]]
    """Returns the arrays to keep for each parameter of a group, each with its value before the first step."""
    coefficients: Callable[[Settings, np.ndarray], dict[str, Number]]
    """Returns the numbers that `update` uses from the settings and the steps, `[1, 2, …]`."""
    update: Callable[[Any, Any, Memory, Coefficients, Round], tuple[Any, Memory]]
    """Takes parameter, gradient, memory, coefficients and `Round`; returns parameter and memory after the step."""


def rounding(dtype: Any) -> Round:
    """Returns the rounding of results of type `dtype`: PyTorch computes in float32 for 16 bits, and rounds each result.

    XLA leaves out a conversion to 16 bits and back, unless it is a `reduce_precision`.
    """
    if dtype == jnp.bfloat16:
        return lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:  # `reduce_precision` flushes subnormal numbers, which the squares of gradients often are
        return lambda x: jax.lax.optimization_barrier(x.astype(jnp.float16)).astype(jnp.float32)
    return lambda x: x


def _lerp(start: Any, end: Any, weight: ArrayLike) -> Any:
    """Returns `start.lerp(end, weight)`, which PyTorch computes from the nearer end."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1 - weight)
    if isinstance(weight, float):
        return near_start if abs(weight) < 0.5 else near_end
    return jnp.where(jnp.abs(weight) < 0.5, near_start, near_end)


# ---- weight decay


def _decay(s: Settings, decoupled: bool) -> dict[str, Number]:
    """Returns the coefficients of a weight decay: decoupled, or as part of the gradient (L2)."""
    if decoupled:
        return {"shrink": 1 - s["lr"] * s["weight_decay"], "l2": 0.0}
    return {"shrink": 1.0, "l2": s["weight_decay"]}


def _decayed(p: Any, g: Any, c: Coefficients, r: Round) -> tuple[Any, Any]:
    """Returns the parameter and the gradient with the weight decay. One of the two is multiplied by exactly 1 or 0."""
    return r(p * c["shrink"]), r(g + c["l2"] * p)


# ---- SGD


def _momentum(value: Number, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of the buffer and of the new direction in it; a buffer stays at steps without momentum."""
    momentum = np.broadcast_to(value, t.shape)
    return np.where(momentum != 0, momentum, 1.0), np.where(momentum != 0, 1.0, 0.0)


def _sgd_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    keep, takes = _momentum(s["momentum"], t)
    add = takes * (1 - s["dampening"])
    if takes.any():
        add[np.argmax(takes)] = 1.0  # the buffer begins as the gradient, without dampening
    direct = np.ones(len(t)) if s["nesterov"] else 1 - takes
    return {
        "l2": s["weight_decay"],
        "keep": keep,
        "add": add,
        "direct": direct,
        "through_buffer": takes * s["momentum"] if s["nesterov"] else takes,
        "step": -s["lr"],
    }


def _sgd(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    g = r(g + c["l2"] * p)
    if "momentum_buffer" in memory:
        buffer = r(r(c["keep"] * memory["momentum_buffer"]) + c["add"] * g)
        g = r(c["direct"] * g + c["through_buffer"] * buffer)
        memory = {"momentum_buffer": buffer}
    return r(p + c["step"] * g), memory


# ---- Adam and its relatives


def _adam_memory(s: Settings) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0} | ({"max_exp_avg_sq": 0.0} if s.get("amsgrad") else {})


def _moment_coefficients(s: Settings) -> dict[str, Number]:
    """Returns the coefficients of `_decayed` and `_moments`, and epsilon."""
    beta1, beta2 = s["betas"]
    moments = {"mean": 1 - beta1, "keep": beta2, "square": 1 - beta2, "eps": s["eps"]}
    return _decay(s, s["decoupled_weight_decay"]) | moments


def _adam_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    beta1, beta2 = s["betas"]
    return _moment_coefficients(s) | {
        "correction": np.sqrt(1 - beta2**t),
        "step": -(s["lr"] / (1 - beta1**t)),
    }


def _moments(g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Any]:
    """Returns the running means of the gradients and of their squares."""
    mean = r(_lerp(memory["exp_avg"], g, c["mean"]))
    return mean, _mean_square(g, memory["exp_avg_sq"], c, r)


def _mean_square(g: Any, before: Any, c: Coefficients, r: Round) -> Any:
    return r(r(c["keep"] * before) + c["square"] * g * g)


def _adam(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    p, g = _decayed(p, g, c, r)
    mean, square = _moments(g, memory, c, r)
    after = {"exp_avg": mean, "exp_avg_sq": square}
    if "max_exp_avg_sq" in memory:
        square = jnp.maximum(memory["max_exp_avg_sq"], square)
        after["max_exp_avg_sq"] = square
    root = r(r(r(jnp.sqrt(square)) / c["correction"]) + c["eps"])
    return r(p + c["step"] * mean / root), after


def _adamax_memory(s: Settings) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_inf": 0.0}


def _adamax_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    beta1, beta2 = s["betas"]
    return {
        "l2": s["weight_decay"],
        "mean": 1 - beta1,
        "keep": beta2,
        "eps": s["eps"],
        "step": -(s["lr"] / (1 - beta1**t)),
    }


def _adamax(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    g = r(g + c["l2"] * p)
    mean = r(_lerp(memory["exp_avg"], g, c["mean"]))
    largest = jnp.maximum(r(c["keep"] * memory["exp_inf"]), r(jnp.abs(g) + c["eps"]))
    return r(p + c["step"] * mean / largest), {"exp_avg": mean, "exp_inf": largest}


def _scalar_dtype() -> Any:
    """Returns the type in which PyTorch keeps numbers of its optimizers between steps."""
    return np.float64 if torch.get_default_dtype() == torch.float64 else np.float32


def _nadam_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    beta1, beta2 = s["betas"]
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * s["momentum_decay"]))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * s["momentum_decay"]))
    product = np.cumprod(mu.astype(_scalar_dtype())).astype(np.float64)
    return _moment_coefficients(s) | {
        "correction": 1 - beta2**t,
        "gradient_step": -s["lr"] * (1 - mu) / (1 - product),
        "mean_step": -s["lr"] * mu_next / (1 - product * mu_next),
    }


def _nadam(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    p, g = _decayed(p, g, c, r)
    mean, square = _moments(g, memory, c, r)
    root = r(r(jnp.sqrt(r(square / c["correction"]))) + c["eps"])
    p = r(p + c["gradient_step"] * g / root)
    p = r(p + c["mean_step"] * mean / root)
    return p, {"exp_avg": mean, "exp_avg_sq": square}


def _radam_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    beta1, beta2 = s["betas"]
    correction2 = 1 - beta2**t
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * t * beta2**t / correction2
    rectified = length > 5
    squared = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    return _moment_coefficients(s) | {
        "correction1": 1 - beta1**t,
        "lr": s["lr"],
        "root_correction": np.sqrt(correction2),
        "rectified": rectified.astype(np.float64),
        "rectification": np.sqrt(np.where(rectified, squared, 1.0)),
    }


def _radam(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    p, g = _decayed(p, g, c, r)
    mean, square = _moments(g, memory, c, r)
    plain = r(r(mean / c["correction1"]) * c["lr"])
    adaptive = r(c["root_correction"] / r(r(jnp.sqrt(square)) + c["eps"]))
    rectified = r(r(plain * adaptive) * c["rectification"])
    p = r(p - jnp.where(c["rectified"] > 0, rectified, plain))
    return p, {"exp_avg": mean, "exp_avg_sq": square}


# ---- others with running squares


def _adagrad_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    return {"l2": s["weight_decay"], "eps": s["eps"], "step": -(s["lr"] / (1 + (t - 1) * s["lr_decay"]))}


def _adagrad(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    g = r(g + c["l2"] * p)
    total = r(memory["sum"] + g * g)
    return r(p + c["step"] * g / r(r(jnp.sqrt(total)) + c["eps"])), {"sum": total}


def _rmsprop_memory(s: Settings) -> dict[str, float]:
    memory = {"square_avg": 0.0}
    if s["centered"]:
        memory["grad_avg"] = 0.0
    if np.any(np.asarray(s["momentum"]) > 0):
        memory["momentum_buffer"] = 0.0
    return memory


def _rmsprop_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    keep, takes = _momentum(s["momentum"], t)
    return {
        "l2": s["weight_decay"],
        "keep": s["alpha"],
        "square": 1 - s["alpha"],
        "eps": s["eps"],
        "keep_buffer": keep,
        "add": takes,
        "direct": 1 - takes,
        "step": -s["lr"],
    }


def _rmsprop(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    g = r(g + c["l2"] * p)
    square = _mean_square(g, memory["square_avg"], c, r)
    after = {"square_avg": square}
    if "grad_avg" in memory:
        mean = r(_lerp(memory["grad_avg"], g, c["square"]))
        after["grad_avg"] = mean
        square = r(square - mean * mean)
    root = r(r(jnp.sqrt(square)) + c["eps"])
    if "momentum_buffer" not in memory:
        return r(p + c["step"] * g / root), after
    buffer = r(r(c["keep_buffer"] * memory["momentum_buffer"]) + c["add"] * g / root)
    after["momentum_buffer"] = buffer
    return r(p + c["step"] * (c["add"] * buffer + c["direct"] * g / root)), after


def _adadelta_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    rho = s["rho"]
    return {"l2": s["weight_decay"], "keep": rho, "square": 1 - rho, "eps": s["eps"], "step": -s["lr"]}


def _adadelta(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    g = r(g + c["l2"] * p)
    square = _mean_square(g, memory["square_avg"], c, r)
    root = r(jnp.sqrt(r(square + c["eps"])))
    delta = r(r(r(jnp.sqrt(r(memory["acc_delta"] + c["eps"]))) / root) * g)
    after = {"square_avg": square, "acc_delta": _mean_square(delta, memory["acc_delta"], c, r)}
    return r(p + c["step"] * delta), after


# ---- others


def _rprop_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    smaller, larger = s["etas"]
    smallest, largest = s["step_sizes"]
    return {"smaller": smaller, "larger": larger, "smallest": smallest, "largest": largest}


def _rprop(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    agreement = r(g * memory["prev"])
    factor = jnp.where(agreement > 0, c["larger"], jnp.where(agreement < 0, c["smaller"], 1.0))
    size = jnp.clip(r(memory["step_size"] * r(factor.astype(p.dtype))), c["smallest"], c["largest"])
    g = jnp.where(agreement < 0, 0, g)
    return r(p - jnp.sign(g) * size), {"prev": g, "step_size": size}


def _asgd_coefficients(s: Settings, t: np.ndarray) -> dict[str, Number]:
    """The rate is kept between steps, so that of a step comes from the settings of the step before it."""
    lr = np.broadcast_to(s["lr"], t.shape)
    following = lr / (1 + s["lambd"] * lr * t) ** s["alpha"]
    eta = np.concatenate([lr[:1], following[:-1]]).astype(_scalar_dtype()).astype(np.float64)
    return {"l2": s["weight_decay"], "shrink": 1 - s["lambd"] * eta, "step": -eta}


def _asgd(p: Any, g: Any, memory: Memory, c: Coefficients, r: Round) -> tuple[Any, Memory]:
    """PyTorch also keeps an average of the parameters in its state, `ax`, which nothing reads."""
    g = r(g + c["l2"] * p)
    return r(r(p * c["shrink"]) + c["step"] * g), memory


def _has_momentum(s: Settings) -> dict[str, float]:
    return {"momentum_buffer": 0.0} if np.any(np.asarray(s["momentum"]) != 0) else {}


_ADAM = ("lr", "betas", "eps", "weight_decay")
_adam_rule = Rule(_ADAM, ("amsgrad", "decoupled_weight_decay", "maximize"), _adam_memory, _adam_coefficients, _adam)
RULES: dict[type, Rule] = {
    torch.optim.SGD: Rule(
        ("lr", "momentum", "dampening", "weight_decay"),
        ("nesterov", "maximize"),
        _has_momentum,
        _sgd_coefficients,
        _sgd,
    ),
    torch.optim.Adam: _adam_rule,
    torch.optim.AdamW: _adam_rule,
    torch.optim.Adamax: Rule(_ADAM, ("maximize",), _adamax_memory, _adamax_coefficients, _adamax),
    torch.optim.NAdam: Rule(
        (*_ADAM, "momentum_decay"), ("decoupled_weight_decay", "maximize"), _adam_memory, _nadam_coefficients, _nadam
    ),
    torch.optim.RAdam: Rule(_ADAM, ("decoupled_weight_decay", "maximize"), _adam_memory, _radam_coefficients, _radam),
    torch.optim.Adagrad: Rule(
        ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"),
        ("maximize",),
        lambda s: {"sum": s["initial_accumulator_value"]},
        _adagrad_coefficients,
        _adagrad,
    ),
    torch.optim.RMSprop: Rule(
        ("lr", "alpha", "eps", "weight_decay", "momentum"),
        ("centered", "maximize"),
        _rmsprop_memory,
        _rmsprop_coefficients,
        _rmsprop,
    ),
    torch.optim.Adadelta: Rule(
        ("lr", "rho", "eps", "weight_decay"),
        ("maximize",),
        lambda s: {"square_avg": 0.0, "acc_delta": 0.0},
        _adadelta_coefficients,
        _adadelta,
    ),
    torch.optim.Rprop: Rule(
        ("lr", "etas", "step_sizes"),
        ("maximize",),
        lambda s: {"prev": 0.0, "step_size": float(np.ravel(s["lr"])[0])},
        _rprop_coefficients,
        _rprop,
    ),
    torch.optim.ASGD: Rule(
        ("lr", "lambd", "alpha", "weight_decay"), ("maximize",), lambda s: {}, _asgd_coefficients, _asgd
    ),
}
"""The optimizers that are translated."""
