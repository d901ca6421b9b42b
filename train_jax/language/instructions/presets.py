"""Presets of HRM-Text: a small one for a CPU, and the published sizes for a slice of 32 chips."""

from collections.abc import Callable
from functools import partial

from models_torch.hrm_text import HRMTextConfig
from train_jax.core.optim.config import OptimConfig
from train_jax.language.instructions.task import InstructionConfig
from train_jax.run.config import ComputeConfig, RunConfig

SIZES = {"b": (12, 1024, 5376, 2.5e-4), "l": (24, 1280, 5376, 2.5e-4), "xl": (32, 1536, 6144, 2.2e-4)}
"""Layers of both stacks together, channels, tokens of a row, learning rate. A step has 32 rows: as many tokens as the
published ones of L (172 032) and XL (196 608). Nothing is published on the steps of B, which has those of L."""


def _optimizer(lr: float, warmup_steps: int, ema_decay: float = 0.9999) -> OptimConfig:
    return OptimConfig(
        optimizer="adam_atan2_published",
        lr=lr,
        warmup_steps=warmup_steps,
        weight_decay=0.1,
        ema_decay=ema_decay,
        skip_zero_gradients=True,
    )


def _published(size: str) -> RunConfig:
    layers, channels, row, lr = SIZES[size]
    name = f"hrm-text-{size}"
    return RunConfig(
        data_dir="data/instructions",
        run_dir=f"runs/{name}",
        task="instructions",
        task_config=InstructionConfig(),
        model="hrm_text",
        arch=HRMTextConfig(n_layers=layers, hidden_size=channels, num_heads=channels // 128, seq_len=row),
        optim=_optimizer(lr, 2000),
        compute=ComputeConfig(),
        epochs=4,
        global_batch_size=32,
        eval_batch_size=32,
        eval_every_steps=1000,
        eval_examples=4096,
        checkpoint_every_steps=1000,
    )


def _tiny() -> RunConfig:
    arch = HRMTextConfig(
        n_layers=4, hidden_size=128, num_heads=4, mlp_multiple_of=32, seq_len=128, forward_dtype="float32"
    )
    return RunConfig(
        data_dir="data/instructions",
        run_dir="runs/hrm-text-tiny",
        task="instructions",
        task_config=InstructionConfig(),
        model="hrm_text",
        arch=arch,
        # After 1000 steps, averages that decay by 0.9999 would still consist of the initial weights by 90 %.
        optim=_optimizer(1e-3, 100, ema_decay=0.99),
        compute=ComputeConfig(),
        steps=1000,
        global_batch_size=8,
        eval_batch_size=8,
        eval_every_steps=250,
        eval_examples=512,
        checkpoint_every_steps=250,
        log_every_steps=25,
    )


BUILDERS: dict[str, Callable[[], RunConfig]] = {
    "hrm-text-tiny": _tiny,
    **{f"hrm-text-{size}": partial(_published, size) for size in SIZES},
}
"""Presets by name, each built when it is requested."""
