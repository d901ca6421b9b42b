"""TRM written by hand in plain JAX, the reference for the cost of the bridged PyTorch module.

It computes the same as `models_torch/trm.py` with its loss head, as one function of a flat dict of parameters with the
PyTorch names, with `stop_gradient` in place of `no_grad` and `detach`. Loops are unrolled, as in the traced PyTorch
module.
"""

# ruff: noqa: N815 (z_H is the field's name)

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models_torch.trm import TRMConfig

Params = dict[str, Array]
Latent = Float[Array, "batch positions hidden"]
PerSequence = Float[Array, "batch"]

INNER = "model.inner."
IGNORE_LABEL_ID = -100


class Carry(NamedTuple):
    """The state between ACT steps; the same five fields as in PyTorch, flat."""

    z_H: Latent
    z_L: Latent
    steps: Int[Array, "batch"]
    halted: Bool[Array, "batch"]
    data: dict[str, Array]


def initial_carry(batch: dict[str, Array], config: TRMConfig) -> Carry:
    """Returns a carry with all sequences halted, so that the first step loads its whole batch."""
    batch_size = batch["inputs"].shape[0]
    shape = (batch_size, config.positions, config.hidden_size)
    return Carry(
        z_H=jnp.zeros(shape, config.forward_dtype),  # two arrays, because a buffer can be donated only once
        z_L=jnp.zeros(shape, config.forward_dtype),
        steps=jnp.zeros(batch_size, jnp.int32),
        halted=jnp.ones(batch_size, bool),
        data=jax.tree.map(jnp.zeros_like, batch),
    )


def take_up(carry: Carry, batch: dict[str, Array]) -> dict[str, Array]:
    """Returns the examples of the next ACT step: those of `batch` where the last example halted."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(carry.halted.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, batch, carry.data)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Applies a linear layer in PyTorch's layout, `weight` (out, in), in the dtype of `x`."""
    out = x @ weight.T.astype(x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)


def rms_norm(x: Array, epsilon: float) -> Array:
    """Returns the RMS norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def swiglu(x: Array, params: Params, name: str) -> Array:
    """Returns `down(silu(gate) * up)` with the weights at `name`."""
    gate, up = jnp.split(linear(x, params[f"{name}.gate_up_proj.weight"]), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, params[f"{name}.down_proj.weight"])


def rotary_tables(seq: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Returns the cosines and sines of the angles, both `(seq, head_dim / 2)`."""
    frequencies = 1 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.outer(jnp.arange(seq, dtype=jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "batch seq heads head_dim"], theta: float) -> Float[Array, "batch seq heads head_dim"]:
    """Applies rotary positions: channel i is rotated with channel i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table[:, None, :] for table in rotary_tables(x.shape[1], x.shape[3], theta))
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def attention(x: Latent, params: Params, name: str, config: TRMConfig) -> Latent:
    """Applies attention over all positions with the weights at `name`."""
    qkv = linear(x, params[f"{name}.qkv_proj.weight"])
    query, key, value = (part.reshape(*part.shape[:2], config.num_heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    if config.pos_encodings == "rope":
        query = rotate(query, config.rope_theta)
        key = rotate(key, config.rope_theta)
    mixed = jax.nn.dot_product_attention(query, key, value)
    return linear(mixed.reshape(x.shape), params[f"{name}.o_proj.weight"])


def level(z: Latent, injection: Latent, params: Params, config: TRMConfig) -> Latent:
    """Applies the network of TRM."""
    z = z + injection
    epsilon = config.rms_norm_eps
    for index in range(config.L_layers):
        name = f"{INNER}L_level.layers.{index}"
        if config.mlp_t:
            z_t = z.swapaxes(1, 2)
            z = rms_norm(z_t + swiglu(z_t, params, f"{name}.mlp_t"), epsilon).swapaxes(1, 2)
        else:
            z = rms_norm(z + attention(z, params, f"{name}.self_attn", config), epsilon)
        z = rms_norm(z + swiglu(z, params, f"{name}.mlp"), epsilon)
    return z


Network = Callable[[Latent, Latent, Params, TRMConfig], Latent]
"""A function with the signature and the result of `level`."""


def embed(params: Params, puzzle_rows: Array | None, inputs: Int[Array, "batch seq"], config: TRMConfig) -> Latent:
    """Returns the puzzle embedding, padded with zeros to its positions, followed by the token embeddings."""
    dtype = config.forward_dtype
    input_embeddings = params[f"{INNER}embed_tokens.embedding_weight"].astype(dtype)[inputs]
    if config.puzzle_emb_ndim:
        assert puzzle_rows is not None
        room = config.puzzle_positions * config.hidden_size
        vector = jnp.pad(puzzle_rows.astype(dtype), ((0, 0), (0, room - config.puzzle_emb_ndim)))
        vector = vector.reshape(-1, config.puzzle_positions, config.hidden_size)
        input_embeddings = jnp.concatenate((vector, input_embeddings), axis=1)
    if config.pos_encodings == "learned":
        positions = params[f"{INNER}embed_pos.embedding_weight"].astype(dtype)
        input_embeddings = math.sqrt(0.5) * (input_embeddings + positions)
    return math.sqrt(config.hidden_size) * input_embeddings


def deep_recursion(
    params: Params, input_embeddings: Latent, z_H: Latent, z_L: Latent, config: TRMConfig, network: Network = level
) -> tuple[Latent, Latent, Float[Array, "batch seq vocab"], PerSequence, PerSequence]:
    """Runs the H-cycles of one ACT step; returns latents, answer logits, halt and continue logits."""

    def h_cycle(z_H: Latent, z_L: Latent, params: Params, input_embeddings: Latent) -> tuple[Latent, Latent]:
        for _ in range(config.L_cycles):
            z_L = network(z_L, z_H + input_embeddings, params, config)
        return network(z_H, z_L, params, config), z_L

    constant_params, constant_embeddings = stop_gradient((params, input_embeddings))
    for _ in range(config.H_cycles - 1):
        z_H, z_L = h_cycle(z_H, z_L, constant_params, constant_embeddings)
    z_H, z_L = h_cycle(z_H, z_L, params, input_embeddings)

    logits = linear(z_H, params[f"{INNER}lm_head.weight"])[:, config.puzzle_positions :]
    q_logits = linear(z_H[:, 0], params[f"{INNER}q_head.weight"], params[f"{INNER}q_head.bias"])
    q_halt, q_continue = q_logits.astype(jnp.float32).T
    return stop_gradient(z_H), stop_gradient(z_L), logits, q_halt, q_continue


def act_step(
    params: Params,
    puzzle_rows: Array | None,
    carry: Carry,
    batch: dict[str, Array],
    key: PRNGKeyArray,
    config: TRMConfig,
    train: bool,
    network: Network = level,
) -> tuple[Carry, dict[str, Array]]:
    """Runs one ACT step for every sequence; returns the new carry and the outputs by their PyTorch names."""
    data = take_up(carry, batch)
    fresh = carry.halted[:, None, None]
    z_H = jnp.where(fresh, stop_gradient(params[f"{INNER}H_init"]), carry.z_H).astype(config.forward_dtype)
    z_L = jnp.where(fresh, stop_gradient(params[f"{INNER}L_init"]), carry.z_L).astype(config.forward_dtype)
    input_embeddings = embed(params, puzzle_rows, data["inputs"], config)
    z_H, z_L, logits, q_halt, q_continue = deep_recursion(params, input_embeddings, z_H, z_L, config, network)
    outputs = {"logits": logits, "q_halt_logits": q_halt, "q_continue_logits": q_continue}

    steps = jnp.where(carry.halted, 0, carry.steps) + 1
    at_limit = halted = steps >= config.halt_max_steps
    if train and config.halt_max_steps > 1:
        wants_to = q_halt > 0 if config.no_ACT_continue else q_halt > q_continue
        explore_key, minimum_key = jax.random.split(key)
        explores = jax.random.uniform(explore_key, q_halt.shape) < config.halt_exploration_prob
        minimum_steps = jax.random.randint(minimum_key, steps.shape, 2, config.halt_max_steps + 1)
        halted = (at_limit | wants_to) & (steps >= explores * minimum_steps)
        if not config.no_ACT_continue:
            *_, next_halt, next_continue = deep_recursion(params, input_embeddings, z_H, z_L, config, network)
            best = jnp.where(at_limit, next_halt, jnp.maximum(next_halt, next_continue))
            outputs["target_q_continue"] = stop_gradient(jax.nn.sigmoid(best))
    return Carry(z_H, z_L, steps, halted, data), outputs


def token_losses(
    logits: Float[Array, "batch seq vocab"], labels: Int[Array, "batch seq"], loss_type: str
) -> Float[Array, "batch seq"]:
    """Returns the cross-entropy of each token in float32, 0 if the label is ignored."""
    logits = logits.astype(jnp.float32)
    if loss_type == "stablemax_cross_entropy":
        # The inner `where` avoids the pole of the unused branch at 1, whose gradient would be NaN.
        score = jnp.where(logits < 0, 1 / (1 - jnp.where(logits < 0, logits, 0)), logits + 1)
        log_probs = jnp.log(score) - jnp.log(score.sum(axis=-1, keepdims=True))
    else:
        log_probs = jax.nn.log_softmax(logits)
    counted = labels != IGNORE_LABEL_ID
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(counted, picked, 0)


def binary_cross_entropy(logits: PerSequence, targets: PerSequence) -> Float[Array, ""]:
    """Returns the binary cross-entropy of logits, summed over the sequences."""
    return jnp.sum(jax.nn.softplus(logits) - logits * targets)


def loss_fn(
    params: Params,
    puzzle_rows: Float[Array, "batch ndim"] | None,
    carry: Carry,
    batch: dict[str, Array],
    key: PRNGKeyArray,
    config: TRMConfig,
    train: bool = True,
    network: Network = level,
) -> tuple[Float[Array, ""], tuple[Carry, dict[str, Array]]]:
    """Returns the loss summed over the batch, the new carry, and the metrics as sums and counts.

    `params` contains the parameters and the buffers `H_init` and `L_init` (which get no gradient and must not be
    optimized). `puzzle_rows` are the rows of the puzzle table for `take_up(carry, batch)`.
    """
    carry, outputs = act_step(params, puzzle_rows, carry, batch, key, config, train, network)
    logits = outputs["logits"]
    q_halt = outputs["q_halt_logits"]
    labels = carry.data["labels"]

    counted = labels != IGNORE_LABEL_ID
    label_counts = counted.sum(axis=-1)
    divisor = jnp.maximum(label_counts, 1)
    correct = (counted & (logits.argmax(axis=-1) == labels)).sum(axis=-1)
    sequence_correct = correct == label_counts
    finished = carry.halted & (label_counts > 0)

    lm_loss = (token_losses(logits, labels, config.loss_type).sum(axis=-1) / divisor).sum()
    q_halt_loss = binary_cross_entropy(q_halt, sequence_correct.astype(jnp.float32))
    metrics = {
        "count": finished.sum(),
        "accuracy": jnp.where(finished, correct / divisor, 0).sum(),
        "exact_accuracy": (finished & sequence_correct).sum(),
        "q_halt_accuracy": (finished & ((q_halt >= 0) == sequence_correct)).sum(),
        "steps": jnp.where(finished, carry.steps, 0).sum(),
        "lm_loss": lm_loss,
        "q_halt_loss": q_halt_loss,
    }
    halting_loss = q_halt_loss
    if "target_q_continue" in outputs:
        metrics["q_continue_loss"] = binary_cross_entropy(outputs["q_continue_logits"], outputs["target_q_continue"])
        halting_loss += metrics["q_continue_loss"]
    return lm_loss + 0.5 * halting_loss, (carry, stop_gradient(metrics))
