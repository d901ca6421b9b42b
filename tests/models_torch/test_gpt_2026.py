"""The language model of 2026: windows, cached positions, initialization, and equality with the published module.

`NANOCHAT_DIR=/path/to/nanochat pytest tests/models_torch/test_gpt_2026.py` compares with a checkout at 92d63d4.
"""

import copy
import os
from pathlib import Path

import pytest
import torch
from support.markers import slow_unless
from support.scripts import run_script
from support.small_gpt import cached_logits, small_gpt, uncached_logits

import bridge
from models_torch.cached_attention import attention_with_cache, windowed_attention
from models_torch.gpt_2026 import GPT2026, has_value_embedding, windows
from models_torch.registry import LANGUAGE_MODELS

TINY = LANGUAGE_MODELS["gpt_2026"].tiny_config
SIZES = {"seq_len": 200, "vocab_size": 61, "n_layer": 5, "n_head": 4, "n_embd": 32}
"""Three of five layers have windows of 128 tokens."""
SEQ = 150
HEADS = pytest.mark.parametrize("n_kv_head", slow_unless((2).__eq__, [1, 2, 4]))


def model(seed=0, **changes):
    return small_gpt("gpt_2026", seed=seed, **(SIZES | changes))


def in_float64(module):
    """Returns a copy in float64, for gradients of one number, which are sums that may nearly cancel."""
    wide = copy.deepcopy(module).double()
    wide.dtype = torch.float64
    return wide


def tokens(low=0, seq=SEQ, rows=2):
    return torch.randint(low, 61, (rows, seq), generator=torch.Generator().manual_seed(1))


@HEADS
def test_verify_in_float32(n_kv_head):
    n_layer = 2 if n_kv_head == 2 else 5
    module = model(n_kv_head=n_kv_head, n_layer=n_layer)
    report = bridge.verify(module, tokens(), tokens(low=-1), tolerance=1e-5, double=in_float64(module))
    assert report.ok, f"\n{report}"
    assert len(report.rows) >= 9 + 7 * n_layer and all(row.scale > 0 for row in report.rows)


def test_windows_and_value_embeddings_of_a_layer():
    assert windows("SSSL", 2048, 6) == [512, 512, 512, 2048, 512, 2048]
    assert windows("sl", 520, 3) == [256, 520, 520]
    assert [has_value_embedding(layer, 4) for layer in range(4)] == [False, True, False, True]
    assert [has_value_embedding(layer, 3) for layer in range(3)] == [True, False, True]


def test_a_window_is_a_distance():
    query, key, value = torch.randn(3, 1, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    attended = windowed_attention(query, key, value, 3)
    for last in range(9):
        part = slice(max(last - 3, 0), last + 1)
        scores = torch.einsum("bhd,bkhd->bhk", query[:, last], key[:, part]) / 2
        expected = torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), value[:, part])
        torch.testing.assert_close(attended[:, last], expected)


def test_attention_with_a_cache_is_that_of_the_whole_rows():
    """Each row is at its own position; tokens beyond it are not used."""
    query, key, value = torch.randn(3, 2, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    buffers = [torch.full((2, 12, 2, 4), 1e4) for _ in range(2)]
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    for buffer, x in zip(buffers, (key, value), strict=True):
        for row, length in enumerate(lengths):
            buffer[row, :length] = x[row, :length]
    new = [torch.stack([x[row, n : n + 4] for row, n in enumerate(lengths)]) for x in (query, key, value)]
    for window in (-1, 3):
        attended = attention_with_cache(
            new[0], *buffers, *new[1:], cache_seqlens=lengths, causal=True, window_size=(window, 0)
        )
        whole = windowed_attention(query, key, value, window)
        torch.testing.assert_close(attended, torch.stack([whole[r, n : n + 4] for r, n in enumerate(lengths)]))
    with pytest.raises(ValueError, match="causal False; use causal=True"):
        attention_with_cache(new[0], *buffers, *new[1:], cache_seqlens=lengths)


@HEADS
def test_cached_logits_are_those_of_the_whole_sequence(n_kv_head):
    module = model(n_kv_head=n_kv_head)
    prompt = tokens(seq=140)[0].tolist()
    expected = uncached_logits(module, prompt[:130], prompt[130:])
    torch.testing.assert_close(cached_logits(module, prompt[:130], prompt[130:]), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1, "the logits differ from token to token"


def test_logits_and_loss_are_float32_without_the_padded_vocabulary():
    module = model(forward_dtype="bfloat16")
    logits = module(tokens(seq=9))
    assert logits.shape == (2, 9, 61) and logits.dtype == torch.float32 and logits.abs().max() <= 15
    assert module.lm_head.weight.shape == (64, 32) and module.cos.dtype == torch.bfloat16
    targets = tokens(seq=9).index_fill(1, torch.tensor([3]), -1)
    losses = module(tokens(seq=9), targets, loss_reduction="none")
    assert torch.equal(losses == 0, targets.flatten() == -1)


def test_initialization():
    module = GPT2026(TINY)
    assert module.resid_lambdas.tolist() == pytest.approx([1.15, 1.10, 1.05])
    assert module.x0_lambdas.tolist() == pytest.approx([0.20, 0.125, 0.05])
    zero = [name for name, p in module.named_parameters() if not p.any()]
    last_of_branches = [f"transformer.h.{n}.{branch}.c_proj.weight" for n in range(3) for branch in ("attn", "mlp")]
    assert zero == ["smear_lambda", *last_of_branches]
    assert module.transformer["wte"].weight.std().item() == pytest.approx(0.8, abs=0.05)
    assert module.transformer["h"][0].attn.c_q.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_positions_beyond_the_tables_are_refused():
    with pytest.raises(ValueError, match="position 161 is beyond the 160 positions"):
        GPT2026(TINY)(torch.zeros(1, 161, dtype=torch.int32))


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_pytorch_s():
    """Compares each gradient and the loss over sixteen batches; for gradients, the norm of the difference.

    A gradient of one number has one rounding error a batch, so that equal arithmetic differs by up to a factor of two.
    """
    wide, narrow = model(n_kv_head=2), model(n_kv_head=2, forward_dtype="bfloat16")
    narrow.load_state_dict(wide.state_dict())
    distances = bfloat16_distances(wide, narrow, batches=16)
    print(*(f"{name}: {ours:.4f} {theirs:.4f}" for name, (ours, theirs) in distances.items()), sep="\n")
    numbers = {name for name, p in wide.named_parameters() if p.numel() == 1} | {"loss"}
    for name, (ours, theirs) in distances.items():
        assert ours <= (2 if name in numbers else 1.25) * theirs + 1e-4, (name, ours, theirs)
    ours, theirs = (sum(side) / len(distances) for side in zip(*distances.values(), strict=True))
    assert ours <= 1.05 * theirs


def bfloat16_distances(wide, narrow, batches):
    """Returns the distances of the bridge's and PyTorch's bfloat16 from PyTorch's float32, relative to it, by name."""
    import jax
    import numpy as np

    data = torch.randint(-1, 61, (batches, 2, 4, SEQ), generator=torch.Generator().manual_seed(1))
    data[:, 0].clamp_(min=0)

    def of_pytorch(module):
        gradients = []
        for inputs, targets in data:
            module.zero_grad()
            loss = module(inputs, targets)
            loss.backward()
            by_name = {name: p.grad.float().numpy().copy() for name, p in module.named_parameters()}
            gradients.append(by_name | {"loss": loss.detach().numpy()})
        return {name: np.stack([each[name] for each in gradients]) for name in gradients[0]}

    fn = bridge.export(narrow)
    loss = lambda params, batch: fn(params, fn.buffers, *batch)[0]  # noqa: E731
    values, gradients = jax.jit(lambda params, data: jax.lax.map(lambda b: jax.value_and_grad(loss)(params, b), data))(
        fn.params, data.numpy()
    )
    ours = {name: np.asarray(array, np.float32) for name, array in (gradients | {"loss": values}).items()}
    expected, theirs = of_pytorch(wide), of_pytorch(narrow)
    far = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))  # noqa: E731
    return {name: (far(ours[name], array), far(theirs[name], array)) for name, array in expected.items()}


# ---- beside the published module


published = pytest.mark.skipif(
    not (Path(os.environ.get("NANOCHAT_DIR", "")) / "nanochat/flash_attention.py").is_file(),
    reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4",
)
"""Each test runs in a process of its own, because the dtype of the published module is that of its import."""


@published
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_equals_the_published_one(dtype, monkeypatch):
    monkeypatch.setenv("NANOCHAT_DTYPE", dtype)
    print(run_script("published_gpt_2026"))


@published
@pytest.mark.slow
def test_the_optimizer_of_the_presets_equals_the_published_one():
    """The gradients are those of the published training, in all phases of the schedules."""
    print(run_script("published_training_2026", 16))
