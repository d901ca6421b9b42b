"""The run that the published training script derives from a depth, without training.

NANOCHAT_DIR=/path/to/nanochat python -m support.published_depths prints one JSON object for each depth, as they are in
`published_depths.jsonl`.

The statements of `scripts/base_train.py` that derive sizes, rates and steps are executed, on PyTorch's meta device; all
others are left out.
"""

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

DERIVES = {
    # November 2025
    "max_seq_len", "num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size", "embedding_lr",
    "unembedding_lr", "weight_decay", "matrix_lr", "num_layers", "model_dim", "num_heads", "num_kv_heads",
    "model_config_kwargs", "model_config", "num_params", "num_flops_per_token", "target_tokens",
    # July 2026
    "parser", "args", "build_model_meta", "model", "param_counts", "get_scaling_params", "num_scaling_params",
    "d12_ref", "D_REF", "B_REF", "batch_ratio", "batch_lr_scale", "weight_decay_scaled", "optimizer", "optimizers",
}  # fmt: skip


def wanted(node):
    """Whether a statement assigns, defines, or calls a method of, one of `DERIVES`."""
    text = ast.unparse(node)
    if isinstance(node, ast.Import | ast.ImportFrom) or any(word in text for word in ("compile(", "to_empty", "load")):
        return False
    if isinstance(node, ast.FunctionDef):
        names = {node.name}
    elif isinstance(node, ast.Expr):
        names = {"parser"} if text.startswith("parser.") else set()
    else:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return bool(names & DERIVES) and "configurator" not in text and "user_config" not in names


def derive(script, depth):
    """Returns sizes, parameters, tokens of a step, steps, and the rate and decay of each group of parameters."""
    from nanochat import gpt

    groups = []

    def record(given, **common):
        given = [each if isinstance(each, dict) else {"params": [each]} for each in given]
        groups.extend({**common, **each} for each in given)
        return SimpleNamespace(param_groups=[])

    for name in ("Muon", "MuonAdamW"):
        if hasattr(gpt, name):
            setattr(gpt, name, record)
    torch.optim.AdamW = record

    sys.argv = [script.name, f"--depth={depth}"]
    space = {
        "GPT": gpt.GPT, "GPTConfig": gpt.GPTConfig, "print0": lambda *_: None, "torch": torch, "depth": depth,
        "vocab_size": 65536 if "setup_optimizers" in vars(gpt.GPT) else 32768,
    }  # fmt: skip
    exec("import argparse, math\nfrom dataclasses import asdict", space)
    with torch.device("meta"):
        for node in filter(wanted, ast.parse(script.read_text()).body):
            exec(compile(ast.Module([node], []), str(script), "exec"), space)
    model = space["model"]
    config = space["model"].config
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {}
    for group in groups:
        for parameter in group["params"]:
            kind = names[id(parameter)]
            kind = "blocks" if kind.startswith("transformer.h.") else kind.split(".")[-2 if "wte" in kind else 0]
            rates[kind] = group["lr"], group.get("weight_decay", 0.0)
    return {
        "depth": depth, "width": config.n_embd, "heads": config.n_head,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": space.get("total_batch_size", 0), "steps": space["num_iterations"],
        "flops_per_token": space["num_flops_per_token"], "rates": rates,
    }  # fmt: skip


if __name__ == "__main__":
    folder = Path(os.environ["NANOCHAT_DIR"])
    sys.path.insert(0, str(folder))
    torch.compile = lambda model=None, **_: model or (lambda each: each)
    year = 2026 if (folder / "nanochat" / "optim.py").is_file() else 2025
    for depth in range(4, 33):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                row = derive(folder / "scripts" / "base_train.py", depth)
            except AssertionError:  # the channels do not divide into the heads
                row = {"depth": depth}
        print(json.dumps({"year": year, **row}))
