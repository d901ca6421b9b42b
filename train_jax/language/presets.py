"""Presets of language runs.

`d12`, `d12-2026` and so on have the sizes, the optimizer and the length of nanochat's base training, derived from the
depth; the end of a name such as `d12-2026-r8` is the number of tokens per parameter.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from models_torch.gpt import GPTConfig
from models_torch.gpt_2026 import GPT2026Config, has_value_embedding
from models_torch.registry import LANGUAGE_MODELS
from train_jax.core.optim.config import OptimConfig, ParameterGroup
from train_jax.errors import UserError
from train_jax.language.instructions.presets import BUILDERS
from train_jax.language.task import LanguageConfig, Packing
from train_jax.run.config import ComputeConfig, RunConfig
from train_jax.run.presets import Presets

REFERENCE_TOKENS = 2**19
"""Tokens of a step that the published learning rates belong to."""
_REFERENCE_WIDTH = 768
_REFERENCE_DEPTH = 12
_BATCH_EXPONENT = 0.383
"""The tokens of a step grow with this power of the tokens of a run (https://arxiv.org/abs/2505.13738)."""
_CHAT_TINY: dict[str, Any] = {"seq_len": 256, "vocab_size": 1024, "forward_dtype": "float32"}
DEPTHS = range(2, 65)
LISTED_DEPTHS = range(4, 33)
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


def arch_2025(depth: int) -> GPTConfig:
    """Returns the published model of a depth: 64 channels a layer, in as few heads as have at most 128 channels each.

    Raises `UserError` for a depth whose channels do not divide into these heads.
    """
    width = 64 * depth
    heads = math.ceil(64 * depth / 128)
    if width % (2 * heads):
        raise UserError(
            f"the rule of 2025 has no depth {depth}: {width} channels do not divide into {heads} heads; use "
            f"{depth - 1} or {depth + 1}, or d{depth}-2026"
        )
    return GPTConfig(seq_len=2048, vocab_size=65536, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=width)


def arch_2026(depth: int) -> GPT2026Config:
    """Returns the published model of a depth: 64 channels a layer, rounded up to heads of 128 channels."""
    heads = math.ceil(64 * depth / 128)
    return GPT2026Config(n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=128 * heads)


def optimizer_2025(arch: GPTConfig, *, matrix_lr: float = 0.02, decay_share: float = 0.2) -> OptimConfig:
    """Returns the published optimizer of November 2025, for steps of 2**19 tokens.

    It has no warm-up, constant rates and, by default, a linear decay to 0 over the last fifth.
    """
    adamw_lr = (arch.n_embd / _REFERENCE_WIDTH) ** -0.5
    return dataclasses.replace(
        _ADAMW,
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


def optimizer_2026(arch: GPT2026Config, tokens_per_step: int, *, batch_exponent: float = 0.5) -> OptimConfig:
    """Returns the published optimizer of July 2026: Muon for the blocks, and six groups of AdamW.

    Learning rates grow with the root of the tokens of a step (`batch_exponent`), except that of smear and backout. The
    weight decay of Muon keeps tokens of a step / (learning rate x decay x tokens of the run) as in the reference, at a
    fixed number of tokens per parameter.
    """
    batch = tokens_per_step / REFERENCE_TOKENS
    by_batch = batch**batch_exponent
    adamw_lr = by_batch * (arch.n_embd / _REFERENCE_WIDTH) ** -0.5
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
                weight_decay=0.28 * batch / by_batch / _relative_size(arch),
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
    """Returns the parameters that determine the length of a run: all in 2025, only blocks and head in 2026."""
    key_value = arch.n_embd * arch.n_kv_head // arch.n_head
    blocks = arch.n_layer * arch.n_embd * (2 * arch.n_embd + 2 * key_value + 8 * arch.n_embd)
    if not isinstance(arch, GPT2026Config):
        return blocks + 2 * arch.vocab_size * arch.n_embd
    gated = sum(has_value_embedding(layer, arch.n_layer) for layer in range(arch.n_layer))
    return blocks + gated * 12 * arch.n_kv_head + -(-arch.vocab_size // 64) * 64 * arch.n_embd


def _relative_size(arch: GPT2026Config) -> float:
    """Returns the parameters that determine the length of a run, relative to the reference with the same vocabulary."""
    reference = arch_2026(_REFERENCE_DEPTH)
    return scaling_parameters(arch) / scaling_parameters(dataclasses.replace(reference, vocab_size=arch.vocab_size))


def parameters(arch: GPTConfig) -> int:
    """Returns the number of all parameters."""
    if not isinstance(arch, GPT2026Config):
        return scaling_parameters(arch)
    embedding = -(-arch.vocab_size // 64) * 64 * arch.n_embd
    values = sum(has_value_embedding(layer, arch.n_layer) for layer in range(arch.n_layer))
    scalars = 2 * arch.n_layer + 24 + 2  # scalars of the residual stream, smear gate, smear and backout
    return scaling_parameters(arch) + embedding + values * embedding * arch.n_kv_head // arch.n_head + scalars


def steps_of(arch: GPTConfig, tokens_per_step: int, tokens_per_parameter: float) -> int:
    """Returns the number of steps for this number of tokens per parameter."""
    steps = int(tokens_per_parameter * scaling_parameters(arch)) // tokens_per_step
    if not steps:
        raise UserError(
            f"{tokens_per_parameter:g} tokens per parameter are less than a step of {tokens_per_step:,} tokens; use at "
            f"least {math.ceil(1000 * tokens_per_step / scaling_parameters(arch)) / 1000:g}"
        )
    return steps


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


def of_2025(name: str, depth: int, tokens_per_parameter: float = 20) -> RunConfig:
    """Returns the published run of a depth, November 2025: 2**19 tokens a step."""
    arch = arch_2025(depth)
    # d32 needs this to fit a TPU v4-64, d26 does not; the depths between them were not compiled.
    large = ComputeConfig(attention="fused", shard_optimizer=True, remat=r"transformer\.h\.\d+\.mlp")
    return _run(
        name,
        arch,
        optimizer_2025(arch),
        rows=REFERENCE_TOKENS // arch.seq_len,
        steps=steps_of(arch, REFERENCE_TOKENS, tokens_per_parameter),
        packing="stream",
        compute=large if depth > 26 else None,
    )


def of_2026(name: str, depth: int, tokens_per_parameter: float = 12) -> RunConfig:
    """Returns the published run of a depth, July 2026: the tokens of a step are a power of 2."""
    arch = arch_2026(depth)
    tokens_per_step = 2 ** round(math.log2(REFERENCE_TOKENS * _relative_size(arch) ** _BATCH_EXPONENT))
    return _run(
        name,
        arch,
        optimizer_2026(arch, tokens_per_step),
        rows=tokens_per_step // arch.seq_len,
        steps=steps_of(arch, tokens_per_step, tokens_per_parameter),
        packing="bestfit",
    )


def _chat(
    name: str, arch: GPTConfig, optim: OptimConfig, *, steps: int, rows: int = 16, eval_every_steps: int = 200
) -> RunConfig:
    """Returns a small run for a CPU, with Newton-Schulz in float32.

    Rows are shuffled: the files of the standard library are long, and the rows of a batch that follow each other would
    be of one or two files.
    """
    return _run(
        name,
        arch,
        dataclasses.replace(optim, newton_schulz_dtype="float32"),
        rows=rows,
        steps=steps,
        packing="shuffled",
        eval_every_steps=eval_every_steps,
        eval_batches=4,
        compute=ComputeConfig(),
    )


def _chat_2026(
    name: str, layers: int, width: int, heads: int, *, rows: int, steps: int = 0, ratio: float = 0.0
) -> RunConfig:
    """Returns a small run of the model of July 2026, without the rules that do not scale down.

    Rates do not fall with the tokens of a step, warm-ups are shares of a short run, and rows are not packed by best
    fit, which would use only the beginnings of documents that are much longer than a row.
    """
    arch = GPT2026Config(**_CHAT_TINY, n_layer=layers, n_embd=width, n_head=heads, n_kv_head=heads)
    steps = steps or steps_of(arch, rows * arch.seq_len, ratio)
    optim = optimizer_2026(arch, rows * arch.seq_len, batch_exponent=0)
    muon, *others = optim.groups
    muon = dataclasses.replace(muon, momentum_warmup_steps=min(400, 2 * steps // 3))
    optim = dataclasses.replace(optim, warmup_steps=min(40, steps // 10), groups=(muon, *others))
    return _chat(name, arch, optim, steps=steps, rows=rows)


def laptop(name: str, depth: int, tokens_per_parameter: float = 4) -> RunConfig:
    """Returns a run by depth for a CPU: 16 channels a layer in heads of 16, on the data set of `chat-tiny`."""
    return _chat_2026(name, depth, 16 * depth, depth, rows=8, ratio=tokens_per_parameter)


def _tiny() -> RunConfig:
    arch = GPTConfig(**_CHAT_TINY, n_layer=4, n_head=2, n_kv_head=2, n_embd=128)
    return _chat("chat-tiny", arch, optimizer_2025(arch, matrix_lr=0.03, decay_share=0.5), steps=600)


def _small() -> RunConfig:
    arch = GPTConfig(
        seq_len=512, vocab_size=4096, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, forward_dtype="float32"
    )
    return _chat("chat-small", arch, optimizer_2025(arch, decay_share=0.5), steps=240, eval_every_steps=120)


_NAMED: dict[str, Callable[[], RunConfig]] = {
    "chat-tiny": _tiny,
    "chat-small": _small,
    "chat-tiny-2026": lambda: _chat_2026("chat-tiny-2026", 4, 128, 2, rows=16, steps=600),
}
_NAMED |= BUILDERS
_RULES: dict[str, Callable[..., RunConfig]] = {"d": of_2025, "d-2026": of_2026, "chat-d": laptop}
_BY_DEPTH = re.compile(r"(d|chat-d)(\d{1,6})(-2026)?(?:-r(\d{1,9}(?:\.\d{1,9})?))?")


class LanguagePresets(Presets):
    """Presets by name, each built when it is requested. Raises `UserError` for a depth that has no run."""

    def __contains__(self, name: object) -> bool:
        return name in _NAMED or is_by_depth(str(name))

    def __getitem__(self, name: str) -> RunConfig:
        if name in _NAMED:
            return _NAMED[name]()
        match = _BY_DEPTH.fullmatch(name)
        if match is None:
            raise KeyError(name)
        depth = int(match[2])
        rule = _RULES[match[1] + (match[3] or "")]
        if depth not in DEPTHS:
            raise UserError(
                f"{name} has depth {depth}; use {DEPTHS[0]} to {DEPTHS[-1]}, such as d12, d12-2026 or chat-d4"
            )
        return rule(name, depth, float(match[4])) if match[4] else rule(name, depth)

    def __iter__(self) -> Iterator[str]:
        yield from _NAMED
        has_heads = {7, 15, 31, *range(0, 65, 2)}  # depths that the rule of 2025 takes
        yield from (f"d{depth}" for depth in LISTED_DEPTHS if depth in has_heads)
        yield from (f"d{depth}-2026" for depth in LISTED_DEPTHS)
        yield from (f"chat-d{depth}" for depth in range(2, 9))

    def heading(self, name: str, config: RunConfig) -> str:
        """Returns the derived values of a run by depth, of a model of this package; empty for other runs."""
        if config.model not in LANGUAGE_MODELS or not is_by_depth(name):
            return ""
        return f"{name}: {config.run_dir}\n{derived(config)}"


PRESETS = LanguagePresets()


def is_by_depth(name: str) -> bool:
    """Returns whether a name is that of a preset by depth."""
    return _BY_DEPTH.fullmatch(name) is not None


def derived(config: RunConfig) -> str:
    """Returns a table of the derived values of a run by depth: sizes, length, rates, schedule."""
    from models_torch.flops import language_flops_per_token  # imports PyTorch's counters

    arch: Any = config.arch
    optim = config.optim
    tokens = config.global_batch_size * arch.seq_len
    counted = "all" if scaling_parameters(arch) == parameters(arch) else f"{scaling_parameters(arch):,}"
    flops = language_flops_per_token(arch) * tokens * config.steps
    momenta = [group for group in optim.groups if group.optimizer]
    decay = ", ".join(f"{group.weight_decay:.4g}" for group in momenta if group.weight_decay) or "0"
    rates = [f"{group.pattern.replace(chr(92), '').replace('..*', '')} {group.lr:.4g}" for group in optim.groups]
    rows = {
        "model": f"{config.model}, {arch.n_layer} layers, {arch.n_embd} channels, {arch.n_head} heads of "
        f"{arch.n_embd // arch.n_head}",
        "parameters": f"{parameters(arch):,}, of which {counted} decide the length",
        "step": f"{config.global_batch_size:,} rows of {arch.seq_len:,} tokens: {tokens:,}",
        "length": f"{config.steps:,} steps, {tokens * config.steps:,} tokens, "
        f"{tokens * config.steps / scaling_parameters(arch):.2f} per parameter, {flops:.3g} FLOP",
        "rates": ", ".join(rates),
        "schedule": f"{optim.warmup_steps} steps of warm-up, decay to {optim.lr_min_ratio:g} over the last "
        f"{optim.decay_share:.0%}",
        "weight decay": f"{decay} for the blocks",
    }
    return "\n".join(f"  {name:<13} {text}" for name, text in rows.items())
