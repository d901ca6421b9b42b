"""A script: compares the language model of 2026 with the published module, in the dtype of NANOCHAT_DTYPE.

NANOCHAT_DIR=/path/to/nanochat NANOCHAT_DTYPE=bfloat16 python -m support.published_gpt_2026
"""

import os

import torch

import bridge
from models_torch.gpt_2026 import GPT2026
from support.published_gpt import published_gpt
from support.small_gpt import small_gpt

DTYPE = os.environ["NANOCHAT_DTYPE"]
SIZES = {"vocab_size": 61, "n_layer": 5, "n_head": 4, "n_embd": 64}


GPT = published_gpt(DTYPE)


def published(n_kv_head=2):
    return GPT.GPT(GPT.GPTConfig(sequence_len=200, n_kv_head=n_kv_head, **SIZES))


def check_initialization():
    torch.manual_seed(5)
    theirs = published()
    theirs.init_weights()
    torch.manual_seed(5)
    ours = GPT2026(theirs.config).state_dict()
    state = theirs.state_dict()
    assert list(ours) == list(state)
    assert all(torch.equal(ours[name].to(tensor.dtype), tensor) for name, tensor in state.items())


def check_outputs_and_gradients(n_kv_head):
    """State dicts load in both directions; logits, losses and gradients are equal bit for bit."""
    ours = small_gpt("gpt_2026", n_kv_head=n_kv_head, seq_len=200, forward_dtype=DTYPE, **SIZES)
    theirs = published(n_kv_head=n_kv_head)
    theirs.load_state_dict(ours.state_dict())
    copy = small_gpt("gpt_2026", seed=3, n_kv_head=n_kv_head, seq_len=200, forward_dtype=DTYPE, **SIZES)
    copy.load_state_dict(theirs.state_dict())
    # With seed 1, the sum that is the gradient of backout_lambda nearly cancels: PyTorch's own float32 is 2e-5 off.
    generator = torch.Generator().manual_seed(2)
    inputs, targets = (torch.randint(low, 61, (2, 150), generator=generator) for low in (0, -1))
    assert torch.equal(copy(inputs), theirs(inputs)) and torch.equal(copy.cos, theirs.cos)
    for module in (copy, theirs):
        module(inputs, targets, loss_reduction="sum").backward()
    for (name, a), (other, b) in zip(copy.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(a.grad, b.grad), name
    if DTYPE == "float32":
        for arguments in ((inputs,), (inputs, targets)):
            report = bridge.verify(theirs, *arguments, tolerance=1e-5)
            print(f"n_kv_head {n_kv_head}: {len(report.rows)} leaves, worst {report.worst.error:.1e}")
            assert report.ok and all(row.scale > 0 for row in report.rows), f"\n{report}"


if __name__ == "__main__":
    check_initialization()
    for heads in (1, 2, 4):
        check_outputs_and_gradients(heads)
