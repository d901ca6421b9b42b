"""The five architectures as published, unchanged: `verify` over three ACT steps, every leaf.

Their repository is not part of this one. `TRM_PUBLISHED=/path/to/it pytest tests/bridge/test_published.py` runs these.
"""

import importlib
import os

import pytest
import torch

import bridge

PUBLISHED = os.environ.get("TRM_PUBLISHED")
pytestmark = pytest.mark.skipif(
    PUBLISHED is None, reason="set TRM_PUBLISHED to a checkout of the published TRM repository"
)

ARCHITECTURES = {
    "trm": ("trm", "TinyRecursiveReasoningModel_ACTV1", {}),
    "trm with the MLP mixer": ("trm", "TinyRecursiveReasoningModel_ACTV1", {"mlp_t": True, "pos_encodings": "none"}),
    "trm_singlez": ("trm_singlez", "TinyRecursiveReasoningModel_ACTV1", {}),
    "trm_hier6": ("trm_hier6", "TinyRecursiveReasoningModel_ACTV1", {"L_cycles": 6}),
    "hrm": ("hrm", "HierarchicalReasoningModel_ACTV1", {}),
    "transformers_baseline": ("transformers_baseline", "Model_ACTV2", {}),
}
DATA = {"batch_size": 4, "seq_len": 16, "vocab_size": 7, "num_puzzle_identifiers": 5}
EMBEDDING = {"puzzle_emb_ndim": 32, "puzzle_emb_len": 1, "hidden_size": 32, "expansion": 2, "num_heads": 2}
CYCLES = {"H_layers": 1, "L_layers": 1, "H_cycles": 2, "L_cycles": 2, "halt_max_steps": 3, "halt_exploration_prob": 0.5}
SHAPE = DATA | EMBEDDING | CYCLES | {"pos_encodings": "rope"}


def published(name, dtype):
    """Returns the model with its loss head, with weights at which puzzles and halting count."""
    file, cls, changes = ARCHITECTURES[name]
    model = getattr(importlib.import_module(f"models.recursive_reasoning.{file}"), cls)
    head = importlib.import_module("models.losses").ACTLossHead
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # a buffer that requires grad is no leaf after `.double()`
    try:
        module = head(model(SHAPE | changes | {"forward_dtype": str(dtype)[6:]}), "stablemax_cross_entropy")
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        module.model.puzzle_emb.weights.normal_()
        module.model.inner.q_head.weight.normal_(std=0.3)
        module.model.inner.q_head.bias.zero_()
    return module


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (2, 4, 16), generator=generator, dtype=torch.int32)
    tokens[1, :2, 10:] = -100  # labels that do not count
    return {
        "inputs": tokens[0],
        "labels": tokens[1],
        "puzzle_identifiers": torch.tensor([1, 2, 3, 3], dtype=torch.int32),
    }


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_as_published(name, train, monkeypatch):
    monkeypatch.syspath_prepend(PUBLISHED)
    module = published(name, torch.float32)
    wide = published(name, torch.float64).double()
    wide.load_state_dict(module.state_dict())
    torch.manual_seed(2)
    report = bridge.verify(
        module,
        carry=module.initial_carry(batch()),
        batch=batch(),
        return_keys=("logits", "q_halt_logits", "preds"),
        loss=lambda outputs: outputs[1],
        steps=3,
        advance=lambda outputs, args, kwargs: (args, kwargs | {"carry": outputs[0]}),
        train=train,
        double=wide,
        tolerance=2e-4,  # three ACT steps of a recursive model amplify rounding
    )
    print(f"{name}: worst leaf {report.worst}")
    assert report.ok, f"\n{report}"
    for step in range(3):
        scales = {row.name: row.scale for row in report.rows if row.kind == "gradient" and row.step == step}
        rows = scales["model.inner.puzzle_emb.local_weights"]
        largest = max(scales.values())
        assert (rows > 0.01 * largest) == train, "puzzle rows have a gradient in training, and only there"
