"""Presets of language runs.

Those named `d20` and so on have the sizes, the optimizer and the length of nanochat's base training, by depth.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from models_torch.gpt import GPTConfig
from models_torch.gpt_2026 import GPT2026Config, has_value_embedding
from train_jax.optim.config import NewtonSchulzDtype, OptimConfig, ParameterGroup
from train_jax.run.config import ComputeConfig, RunConfig
from train_jax.tasks.language.task import LanguageConfig, Packing

REFERENCE_TOKENS = 2**19
"""Tokens of a step for which the published learning rates are."""
_REFERENCE_WIDTH = 768
_REFERENCE_DEPTH = 12
_ADAMW = OptimConfig(
    optimizer="adamw",
    warmup_steps=0,
    decay="warmdown",
    beta1=0.8,
    beta2=0.95,
    eps=1e-10,
    weight_decay=0.0,
    ema_decay=0.0,
    newton_schulz_dtype="bfloat16",
)


def width_and_heads(depth: int) -> tuple[int, int]:
    """Returns the channels and the heads of the published model: 64 channels a layer, at most 128 channels a head."""
    return 64 * depth, math.ceil(64 * depth / 128)


def optimizer_2025(
    arch: GPTConfig,
    *,
    matrix_lr: float = 0.02,
    decay_share: float = 0.2,
    newton_schulz_dtype: NewtonSchulzDtype = "bfloat16",
) -> OptimConfig:
    """Returns the published optimizer of November 2025, for steps of 2**19 tokens.

    It has no warm-up, constant rates and, by default, a linear decay to 0 over the last fifth.
    """
    adamw_lr = (arch.n_embd / _REFERENCE_WIDTH) ** -0.5
    return dataclasses.replace(
        _ADAMW,
        newton_schulz_dtype=newton_schulz_dtype,
        decay_share=decay_share,
        lr_min_ratio=0.0,
        clip_norm=1.0,
        groups=(
            ParameterGroup(
                r"transformer\.h\..*",
                optimizer="muon_2025",
                lr=matrix_lr,
                momentum_start=0.85,
                momentum_warmup_steps=300,
            ),
            ParameterGroup(r"transformer\.wte\..*", lr=0.2 * adamw_lr),
            ParameterGroup(r"lm_head\..*", lr=0.004 * adamw_lr),
        ),
    )


def optimizer_2026(arch: GPT2026Config, tokens_per_step: int) -> OptimConfig:
    """Returns the published optimizer of July 2026: Muon for the blocks, and six groups of AdamW.

    Learning rates grow with the root of the tokens of a step, except that of smear and backout. The weight decay of
    Muon also falls with the number of tokens that the run would have at a fixed number of tokens per parameter.
    """
    by_batch = math.sqrt(tokens_per_step / REFERENCE_TOKENS)
    adamw_lr = by_batch * (arch.n_embd / _REFERENCE_WIDTH) ** -0.5
    width, heads = width_and_heads(_REFERENCE_DEPTH)
    reference = dataclasses.replace(arch, n_layer=_REFERENCE_DEPTH, n_embd=width, n_head=heads, n_kv_head=heads)
    return dataclasses.replace(
        _ADAMW,
        warmup_steps=40,
        decay_share=0.65,
        lr_min_ratio=0.05,
        groups=(
            ParameterGroup(
                r"transformer\.h\..*",
                optimizer="muon_2026",
                lr=0.02 * by_batch,
                muon_momentum=0.97,
                momentum_start=0.85,
                momentum_warmup_steps=400,
                momentum_end=0.90,
                muon_beta2=0.9,
                weight_decay=0.28 * by_batch * scaling_parameters(reference) / scaling_parameters(arch),
                weight_decay_schedule="cosine",
                cautious_decay=True,
            ),
            ParameterGroup(r"lm_head\..*", lr=0.008 * adamw_lr, beta2=0.96, weight_decay=0.01),
            ParameterGroup(r"transformer\.wte\..*", lr=0.3 * adamw_lr, beta2=0.995, weight_decay=0.001),
            ParameterGroup(r"value_embeds\..*", lr=0.15 * adamw_lr, beta2=0.995, weight_decay=0.01),
            ParameterGroup(r"resid_lambdas", lr=0.005 * by_batch, weight_decay=0.05),
            ParameterGroup(r"x0_lambdas", lr=0.5 * by_batch, beta1=0.96),
            ParameterGroup(r"smear_gate\..*|smear_lambda|backout_lambda", lr=0.2),
        ),
    )


def scaling_parameters(arch: GPTConfig) -> int:
    """Returns the parameters that decide the length of a run: all of November 2025, blocks and head of July 2026."""
    key_value = arch.n_embd * arch.n_kv_head // arch.n_head
    blocks = arch.n_layer * arch.n_embd * (2 * arch.n_embd + 2 * key_value + 8 * arch.n_embd)
    if not isinstance(arch, GPT2026Config):
        return blocks + 2 * arch.vocab_size * arch.n_embd
    gated = sum(has_value_embedding(layer, arch.n_layer) for layer in range(arch.n_layer))
    return blocks + gated * 12 * arch.n_kv_head + -(-arch.vocab_size // 64) * 64 * arch.n_embd


def steps_of(arch: GPTConfig, tokens_per_step: int, tokens_per_parameter: float) -> int:
    """Returns the number of steps for so many tokens per parameter."""
    return int(tokens_per_parameter * scaling_parameters(arch)) // tokens_per_step


def _run(
    name: str,
    arch: GPTConfig,
    optim: OptimConfig,
    *,
    rows: int,
    steps: int,
    packing: Packing,
    eval_every_steps: int = 250,
    eval_batches: int = 16,
    compute: ComputeConfig | None = None,
) -> RunConfig:
    """Returns a run on the data set of `trm build-data text --output-dir data/text-N --vocab-size N`."""
    return RunConfig(
        data_dir=f"data/text-{arch.vocab_size}",
        run_dir=f"runs/{name}",
        task="language",
        task_config=LanguageConfig(packing=packing),
        model="gpt_2026" if isinstance(arch, GPT2026Config) else "gpt",
        arch=arch,
        optim=optim,
        compute=compute or ComputeConfig(attention="fused"),
        steps=steps,
        global_batch_size=rows,
        eval_batch_size=rows,
        eval_every_steps=eval_every_steps,
        eval_examples=eval_batches * rows,
        checkpoint_every_steps=eval_every_steps,
        log_every_steps=25,
    )


def of_2025(depth: int, **compute: Any) -> RunConfig:
    """Returns the published run of a depth, November 2025: 2**19 tokens a step, 20 tokens per parameter.

    `compute` are fields of `ComputeConfig`.
    """
    width, heads = width_and_heads(depth)
    arch = GPTConfig(seq_len=2048, vocab_size=65536, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=width)
    steps, options = steps_of(arch, REFERENCE_TOKENS, 20), ComputeConfig(attention="fused", **compute)
    return _run(f"d{depth}", arch, optimizer_2025(arch), rows=256, steps=steps, packing="stream", compute=options)


def of_2026(depth: int, *, rows: int, tokens_per_parameter: float) -> RunConfig:
    """Returns the published run of a depth, July 2026, with rows of 2048 tokens."""
    width, heads = width_and_heads(depth)
    arch = GPT2026Config(n_layer=depth, n_embd=width, n_head=heads, n_kv_head=heads)
    steps = steps_of(arch, rows * arch.seq_len, tokens_per_parameter)
    optim = optimizer_2026(arch, rows * arch.seq_len)
    return _run(f"d{depth}-2026", arch, optim, rows=rows, steps=steps, packing="bestfit")


def _chat(name: str, arch: GPTConfig, *, steps: int, eval_every_steps: int, matrix_lr: float = 0.02) -> RunConfig:
    """Returns a small run with the optimizer of November 2025 and Newton-Schulz in float32.

    Rows are shuffled: the files of the standard library are long, and the rows of a batch that follow each other would
    be of one or two files.
    """
    optim = optimizer_2025(arch, matrix_lr=matrix_lr, decay_share=0.5, newton_schulz_dtype="float32")
    return _run(
        name,
        arch,
        optim,
        rows=16,
        steps=steps,
        packing="shuffled",
        eval_every_steps=eval_every_steps,
        eval_batches=4,
        compute=ComputeConfig(),
    )


def _tiny_2026() -> RunConfig:
    """Returns a small run on the data set of `chat-tiny`."""
    arch = GPT2026Config(
        seq_len=256, vocab_size=1024, n_layer=3, n_head=3, n_kv_head=3, n_embd=192, forward_dtype="float32"
    )
    optim = dataclasses.replace(optimizer_2026(arch, 16 * arch.seq_len), newton_schulz_dtype="float32")
    return _run(
        "chat-tiny-2026", arch, optim, rows=16, steps=600, packing="bestfit", eval_every_steps=200, eval_batches=4
    )


PRESETS: dict[str, RunConfig] = {
    "chat-tiny": _chat(
        "chat-tiny",
        GPTConfig(seq_len=256, vocab_size=1024, n_layer=4, n_head=2, n_kv_head=2, n_embd=128, forward_dtype="float32"),
        steps=600,
        eval_every_steps=200,
        matrix_lr=0.03,
    ),
    "chat-small": _chat(
        "chat-small",
        GPTConfig(seq_len=512, vocab_size=4096, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, forward_dtype="float32"),
        steps=240,
        eval_every_steps=120,
    ),
    "chat-tiny-2026": _tiny_2026(),
    **{f"d{depth}": of_2025(depth) for depth in (20, 26)},
    "d32": of_2025(32, shard_optimizer=True, remat=r"transformer\.h\.\d+\.mlp"),  # what fits a TPU v4-64
    "d24-2026": of_2026(24, rows=512, tokens_per_parameter=8),
}
