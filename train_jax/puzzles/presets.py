"""Presets of puzzle runs."""

import dataclasses

from models_torch.trm import TRMConfig
from train_jax.core.optim.config import OptimConfig
from train_jax.puzzles.task import PuzzleConfig
from train_jax.run.config import ComputeConfig, RunConfig


def _small_sudoku(
    size: int, *, steps: int, eval_every_steps: int, halt_max_steps: int, halt_exploration_prob: float
) -> RunConfig:
    """Returns the settings that learn fastest on two CPU cores.

    They are one wide mixer block, softmax, a high learning rate and full decay; docs/dev/log.md lists the alternatives.
    """
    return RunConfig(
        data_dir=f"data/sudoku-{size}x{size}",
        run_dir=f"runs/sudoku{size}",
        task_config=PuzzleConfig(),
        arch=TRMConfig(
            mlp_t=True,
            pos_encodings="none",
            hidden_size=128,
            L_layers=1,
            H_cycles=2,
            L_cycles=2,
            mlp_multiple_of=16,
            puzzle_emb_ndim=128,
            puzzle_emb_len=1,
            halt_max_steps=halt_max_steps,
            halt_exploration_prob=halt_exploration_prob,
            forward_dtype="float32",
            loss_type="softmax_cross_entropy",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=100, lr_min_ratio=0.02, sparse_lr=1e-2, ema_decay=0.99),
        steps=steps,
        global_batch_size=32,
        eval_every_steps=eval_every_steps,
        eval_batch_size=64,
        eval_examples=250,
        checkpoint_every_steps=200,
        log_every_steps=25,
        compute=ComputeConfig(cpu_examples=4, mlp="fused"),
    )


MAZE_UNIQUE = RunConfig(
    data_dir="data/maze-unique",
    run_dir="runs/maze-unique",
    task_config=PuzzleConfig(augment=True),
    arch=TRMConfig(
        convolution_window=3,
        pos_encodings="none",
        hidden_size=48,
        L_layers=1,
        H_cycles=3,
        L_cycles=4,
        expansion=3.0,
        mlp_multiple_of=16,
        puzzle_emb_ndim=48,
        puzzle_emb_len=1,
        halt_max_steps=4,
        halt_exploration_prob=1.0,
        forward_dtype="float32",
        loss_type="softmax_cross_entropy",
    ),
    optim=OptimConfig(lr=2e-3, warmup_steps=100, weight_decay=1.0, lr_min_ratio=0.02, sparse_lr=1e-2, ema_decay=0.99),
    steps=2000,
    global_batch_size=32,
    eval_every_steps=400,
    eval_batch_size=250,
    eval_examples=250,
    checkpoint_every_steps=200,
    log_every_steps=25,
)
"""Perfect mazes (`trm build-data maze --kind perfect`) with 36 864 parameters in the block, a 3x3 convolution.

A dead end is seen from the cells beside it, and filling dead ends one after another leaves the path. Three H-cycles
make 15 rounds an ACT step, of which the last five have gradients; with one or two, accuracy falls again in the course
of training. Every example draws its number of ACT steps, or nothing would teach the network to keep a solution that it
has reached. docs/dev/log.md has the figures."""


def _study() -> RunConfig:
    """Returns a narrower and shorter `sudoku6`, with a fresh symmetry of its 1 000 puzzles for every example."""
    base = _small_sudoku(6, steps=300, eval_every_steps=50, halt_max_steps=4, halt_exploration_prob=0.1)
    return dataclasses.replace(
        base,
        run_dir="runs/study",
        task_config=PuzzleConfig(augment=True),
        arch=dataclasses.replace(base.arch, hidden_size=64, puzzle_emb_ndim=64),
        optim=dataclasses.replace(base.optim, lr=4e-3, lr_min_ratio=1.0, warmup_steps=30, ema_decay=0.95),
        eval_batch_size=250,
        checkpoint_every_steps=300,
        compute=ComputeConfig(),
    )


PRESETS: dict[str, RunConfig] = {
    "sudoku-extreme": RunConfig(
        data_dir="data/sudoku-extreme",
        run_dir="runs/sudoku-extreme",
        task_config=PuzzleConfig(),
        arch=TRMConfig(mlp_t=True, pos_encodings="none"),
        eval_examples=12_288,
    ),
    "sudoku9": _small_sudoku(9, steps=2200, eval_every_steps=550, halt_max_steps=5, halt_exploration_prob=0.3),
    "sudoku6": _small_sudoku(6, steps=700, eval_every_steps=175, halt_max_steps=8, halt_exploration_prob=0.1),
    "study": _study(),
    "maze-unique": MAZE_UNIQUE,
    "tiny": RunConfig(
        data_dir="data/sudoku-4x4",
        run_dir="runs/tiny",
        task_config=PuzzleConfig(),
        arch=TRMConfig(
            mlp_t=True,
            pos_encodings="none",
            hidden_size=32,
            num_heads=2,
            L_layers=1,
            H_cycles=2,
            L_cycles=2,
            mlp_multiple_of=16,
            puzzle_emb_ndim=32,
            puzzle_emb_len=1,
            halt_max_steps=4,
            forward_dtype="float32",
        ),
        optim=OptimConfig(lr=1e-3, warmup_steps=10, weight_decay=0.1, ema_decay=0.9),
        steps=40,
        global_batch_size=16,
        eval_every_steps=20,
        eval_batch_size=16,
        checkpoint_every_steps=10,
        log_every_steps=5,
    ),
}
"""`sudoku-extreme` is the research baseline for a pod or another accelerator. `sudoku9` (about half the cells empty)
trains on two CPU cores in minutes, `sudoku6` in half a minute. `study` is for groups of experiments on one core. `tiny`
finishes in seconds and learns little."""
