"""How parameters move: Optax for the dense ones, sign SGD for the puzzle rows in the batch, a running average."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from train_jax.core.state import Arrays
from train_jax.run.config import OptimConfig


def schedule(peak: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up, then constant or a cosine to `lr_min_ratio`. The first step is already one up the ramp.

    So it is in the published TRM, whose counter is raised before the rate is computed.
    """
    floor = config.lr_min_ratio

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, float) + 1
        ramp = step / max(config.warmup_steps, 1)
        progress = jnp.clip((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 0, 1)
        decay = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(step < config.warmup_steps, ramp, decay)

    return rate


def dense_optimizer(config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """Clipping, the optimizer's direction, decoupled weight decay, learning rate.

    The decay is `lr * weight_decay * p` with the p from before the step, for every optimizer here: PyTorch's
    `p *= 1 - lr * weight_decay` first and Optax's one sum are the same to rounding. Clipping leaves out the 1e-6 that
    `torch.nn.utils.clip_grad_norm_` adds to the norm.
    """
    if config.freeze_weights:
        return optax.set_to_zero()
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        _direction(config),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config.lr, config, total_steps)),
    )


def _direction(config: OptimConfig) -> optax.GradientTransformation:
    # Epsilon is added to sqrt(v / (1 - beta2^t)), outside the root and after the correction, as PyTorch does.
    adamw = optax.scale_by_adam(config.beta1, config.beta2, eps=1e-8)
    match config.optimizer:
        case "adamw":
            return adamw
        case "adam_atan2":
            return scale_by_adam_atan2(config.beta1, config.beta2)
        case "lion":
            return optax.scale_by_lion(config.beta1, config.beta2)
        case "muon":
            return optax.partition({"muon": scale_by_muon(config.muon_momentum), "adamw": adamw}, _muon_labels)


class ScaleByAdamATan2State(NamedTuple):
    """State of AdamATan2."""

    count: Int[Array, ""]
    """Steps taken."""
    mu: optax.Updates
    """Running mean of the gradients."""
    nu: optax.Updates
    """Running mean of their squares."""


def scale_by_adam_atan2(b1: float, b2: float, a: float = 1.0, b: float = 1.0) -> optax.GradientTransformation:
    """Adam with `a * atan2(mean, b * sqrt(square))` for its quotient: no epsilon, and no step longer than `a * pi / 2`.

    Both means are corrected for their start at zero, as in the paper. `a` and `b` are those of the `adam-atan2` 0.0.3
    that the published HRM and TRM train with (`adam-atan2-pytorch` has a = 1.27, so that a gradient that never changes
    moves a parameter by the learning rate). That package divides by `1 - b1^t` outside the arctangent instead: with b1
    0.9 its first step is up to 27 % longer than this one, the 30th 2 %, which a warm-up makes small.

    References:
      Everett et al., "Scaling Exponents Across Parameterizations and Optimizers", 2024, https://arxiv.org/abs/2407.05872
    """

    def init(params: optax.Params) -> ScaleByAdamATan2State:
        zeros_like = optax.tree.zeros_like
        return ScaleByAdamATan2State(jnp.zeros((), jnp.int32), zeros_like(params), zeros_like(params))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, ScaleByAdamATan2State]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        mean, square = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)
        angle = jax.tree.map(lambda m, v: a * jnp.arctan2(m, b * jnp.sqrt(v)), mean, square)
        return angle, ScaleByAdamATan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum made orthogonal, scaled to the length of an AdamW step so that both take one learning rate.

    Rows are outputs, as PyTorch stores weights. `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does the same with
    bfloat16 inside; here it is the gradient's dtype. `optax.contrib.muon` serves not: it corrects momentum and gradient
    differently for their start at zero, which turns the first steps, and embeddings would move by NAdamW.

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon/
      Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982
    """

    def matched(matrix: Any, _: Any) -> Float[Array, "out in"]:
        return 0.2 * math.sqrt(max(matrix.shape)) * _orthogonal(matrix)

    return optax.chain(
        optax.trace(momentum, nesterov=True), optax.scale(1 - momentum), optax.stateless_with_tree_map(matched)
    )


def _orthogonal(matrix: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """Five Newton-Schulz steps: the same singular vectors, all singular values near 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / jnp.maximum(jnp.linalg.norm(x), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


_EMBEDDING_OR_HEAD = re.compile(r"(^|\.)(\w*embed\w*|(\w+_)?emb|(\w+_)?heads?)(\.|$)", re.IGNORECASE)


def _muon_labels(params: Arrays) -> dict[str, str]:
    """`muon` for hidden matrices; `adamw` for embeddings and heads, known by their names, and what is no matrix."""
    return {
        name: "muon" if array.ndim == 2 and not _EMBEDDING_OR_HEAD.search(name) else "adamw"
        for name, array in params.items()
    }


class RowGradients(NamedTuple):
    """Gradients of some rows of a table, one for each row."""

    ids: Int[Array, "examples"]
    """Every row of the batch once; the places left over name a row past any table's end."""
    sums: Float[Array, "examples width"]

    def only_if(self, wanted: Bool[Array, ""]) -> "RowGradients":
        """These, or none."""
        return self._replace(ids=jnp.where(wanted, self.ids, _nowhere(self.ids)))


def summed_by_row(ids: Int[Array, "examples"], gradients: Float[Array, "examples width"]) -> RowGradients:
    """One gradient for each row that occurs: the sum over its examples."""
    order = jnp.argsort(ids)
    ids, gradients = ids[order], gradients[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    group = jnp.cumsum(is_first) - 1
    sums = jax.ops.segment_sum(gradients, group, num_segments=ids.size, indices_are_sorted=True)
    return RowGradients(jnp.full_like(ids, _nowhere(ids)).at[group].set(ids), sums)


def _nowhere(ids: Int[Array, "examples"]) -> int:
    return int(jnp.iinfo(ids.dtype).max)


def sparse_sign_sgd(
    table: Float[Array, "rows width"], gradients: RowGradients, lr: ArrayLike, weight_decay: float
) -> Float[Array, "rows width"]:
    """Sign SGD with decoupled weight decay on the rows that have a gradient; all others stay bit for bit."""
    # Reading a row past the end is clamped, writing one is dropped.
    moved = table[gradients.ids] * (1 - lr * weight_decay) - lr * jnp.sign(gradients.sums)
    return table.at[gradients.ids].set(moved.astype(table.dtype), mode="drop")


def trained(params: Arrays, config: OptimConfig) -> Arrays:
    """The dense parameters that move: all or, with `freeze_weights`, none."""
    return {} if config.freeze_weights else params


def average(ema: Arrays, params: Arrays, decay: float) -> Arrays:
    """One step of the running average of `params`; the average of anything else stays as it is."""
    return ema | {name: decay * ema[name] + (1 - decay) * array for name, array in params.items()}
