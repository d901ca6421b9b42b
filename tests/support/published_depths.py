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
from typing import Any

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


def assigned(node: ast.AST) -> set[str]:
    """Returns the names that a statement assigns, defines, or whose method it calls."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        owner = node.value.func.value
        return {owner.id} if isinstance(owner, ast.Name) and owner.id == "parser" else set()
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def derive(script: Path, depth: int) -> dict[str, Any]:
    """Returns sizes, parameters, tokens of a step, steps, and the rate and decay of each group of parameters."""
    from nanochat import gpt

    groups: list[dict[str, Any]] = []

    def record(given: Any, **common: Any) -> Any:
        given = [each if isinstance(each, dict) else {"params": [each]} for each in given]
        groups.extend({**common, **each} for each in given)
        return type("Optimizer", (), {"param_groups": []})()

    for name in ("Muon", "MuonAdamW"):
        if hasattr(gpt, name):
            setattr(gpt, name, record)
    torch.optim.AdamW = record  # pyright: ignore[reportAttributeAccessIssue]

    sys.argv = [script.name, f"--depth={depth}"]
    space: dict[str, Any] = {
        "GPT": gpt.GPT, "GPTConfig": gpt.GPTConfig, "print0": lambda *_: None, "torch": torch, "depth": depth,
        "vocab_size": 65536 if "setup_optimizers" in vars(gpt.GPT) else 32768,
    }  # fmt: skip
    exec("import argparse, math\nfrom dataclasses import asdict", space)
    statements = [node for node in ast.parse(script.read_text()).body if wanted(node)]
    with torch.device("meta"):
        for node in statements:
            exec(compile(ast.Module([node], []), str(script), "exec"), space)
    model, config = space["model"], space["model"].config
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


def wanted(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    if isinstance(node, ast.Import | ast.ImportFrom) or "compile(" in text or "to_empty" in text:
        return False
    names = assigned(node)
    return bool(names & DERIVES) and "load" not in text and "configurator" not in text and "user_config" not in names


def main() -> None:
    folder = Path(os.environ["NANOCHAT_DIR"])
    sys.path.insert(0, str(folder))
    torch.compile = lambda model=None, **_: model or (lambda each: each)  # pyright: ignore[reportAttributeAccessIssue]
    for depth in range(4, 33):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                row = derive(folder / "scripts" / "base_train.py", depth)
            except AssertionError:  # the channels do not divide into the heads
                row = {"depth": depth}
        year = 2026 if (folder / "nanochat" / "optim.py").is_file() else 2025
        print(json.dumps({"year": year, **row}))


if __name__ == "__main__":
    main()
