"""Presets of language runs."""

from models_torch.gpt import GPTConfig
from train_jax.optim.config import OptimConfig, ParameterGroup
from train_jax.run.config import RunConfig
from train_jax.tasks.language.config import LanguageConfig


def _chat(
    name: str,
    arch: GPTConfig,
    *,
    vocab_size: int,
    steps: int,
    rows: int,
    eval_every_steps: int,
    matrix_lr: float = 0.02,
    decay_share: float = 0.2,
) -> RunConfig:
    """Returns a run on a data set of `trm build-data text --output-dir data/text-VOCAB_SIZE --vocab-size VOCAB_SIZE`.

    The optimizer and, by default, its schedule are those of nanochat in November 2025: no warm-up, constant rates, and
    a linear decay to 0 over the last fifth. Newton-Schulz is in float32. Rows are shuffled: the files of the standard
    library are long, and the rows of a batch that follow each other would be of one or two files.
    """
    scale = (arch.n_embd / 768) ** -0.5
    return RunConfig(
        data_dir=f"data/text-{vocab_size}",
        run_dir=f"runs/{name}",
        task="language",
        task_config=LanguageConfig(packing="shuffled"),
        model="gpt",
        arch=arch,
        optim=OptimConfig(
            optimizer="adamw",
            warmup_steps=0,
            decay="warmdown",
            decay_share=decay_share,
            lr_min_ratio=0.0,
            beta1=0.8,
            beta2=0.95,
            eps=1e-10,
            weight_decay=0.0,
            clip_norm=1.0,
            ema_decay=0.0,
            groups=(
                ParameterGroup(
                    pattern=r"transformer\.h\..*",
                    optimizer="muon_2025",
                    lr=matrix_lr,
                    momentum_start=0.85,
                    momentum_warmup_steps=300,
                ),
                ParameterGroup(pattern=r"transformer\.wte\..*", lr=0.2 * scale),
                ParameterGroup(pattern=r"lm_head\..*", lr=0.004 * scale),
            ),
        ),
        steps=steps,
        global_batch_size=rows,
        eval_every_steps=eval_every_steps,
        eval_batch_size=rows,
        eval_examples=4 * rows,
        checkpoint_every_steps=eval_every_steps,
        log_every_steps=25,
    )


PRESETS: dict[str, RunConfig] = {
    "chat-tiny": _chat(
        "chat-tiny",
        GPTConfig(seq_len=256, vocab_size=1024, n_layer=4, n_head=2, n_kv_head=2, n_embd=128, forward_dtype="float32"),
        vocab_size=1024,
        steps=600,
        rows=16,
        eval_every_steps=200,
        matrix_lr=0.03,
        decay_share=0.5,
    ),
    "chat-small": _chat(
        "chat-small",
        GPTConfig(seq_len=512, vocab_size=4096, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, forward_dtype="float32"),
        vocab_size=4096,
        steps=240,
        rows=16,
        eval_every_steps=120,
        decay_share=0.5,
    ),
}
