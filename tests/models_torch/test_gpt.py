"""The two language models: causality, windows, cached positions, initialization, and equality with published modules.

`NANOCHAT_DIR=/path/to/nanochat pytest tests/models_torch/test_gpt.py` compares `gpt` with a checkout at 4a87a0d and
`gpt_2026` with one at 92d63d4.
"""

import copy
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from support.markers import slow_unless
from support.scripts import run_script
from support.small_gpt import cached_logits, small_gpt, uncached_logits

import bridge
from models_torch.cached_attention import attention_with_cache, windowed_attention
from models_torch.gpt import GPT, rotary_tables
from models_torch.gpt_2026 import GPT2026, has_value_embedding, windows
from models_torch.registry import LANGUAGE_MODELS

TINY = LANGUAGE_MODELS["gpt"].tiny_config
EITHER = pytest.mark.parametrize("name", ["gpt", "gpt_2026"])
HEADS = pytest.mark.parametrize("n_kv_head", [1, 2, 4])


def model(name="gpt_2026", **changes):
    """Three of five layers of the model of 2026 have windows of 128 tokens."""
    sizes = {"seq_len": 200, "n_layer": 5} if name == "gpt_2026" else {}
    return small_gpt(name, **(sizes | changes))


def tokens(name="gpt", low=0):
    shape = (3, 16) if name == "gpt" else (2, 150)
    return torch.randint(low, 61, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("n_kv_head", slow_unless((2).__eq__, [2, 4]))  # 4 query heads: shared keys and own ones
@EITHER
def test_verify_in_float32(name, n_kv_head):
    module = model(name, n_kv_head=n_kv_head, **({"n_layer": 2} if n_kv_head == 2 else {}))
    double = None
    if name == "gpt_2026":  # some of its gradients are one number, a sum that may nearly cancel
        double = copy.deepcopy(module).double()
        double.dtype = torch.float64
    report = bridge.verify(module, tokens(name), tokens(name, low=-1), tolerance=1e-5, double=double)
    assert report.ok, f"\n{report}"
    assert len(report.rows) >= 17 and all(row.scale > 0 for row in report.rows)


@EITHER
def test_a_logit_depends_on_its_own_and_earlier_tokens_only(name):
    module = small_gpt(name)
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before = module(inputs)
    after = module(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert ((before[:, 9:] - after[:, 9:]).abs().amax(-1) > 0).all()


@EITHER
def test_loss_is_float32_and_leaves_ignored_targets_out(name):
    module = small_gpt(name, forward_dtype="bfloat16")
    targets = tokens(low=-1)
    losses = module(tokens(), targets, loss_reduction="none")
    logits = module(tokens())
    ignored = targets.flatten() == -1
    assert losses.dtype == torch.float32 and ignored.any()
    assert (losses[ignored] == 0).all() and (losses[~ignored] > 0).all()
    assert logits.dtype == (torch.bfloat16 if name == "gpt" else torch.float32)
    assert logits.shape == (3, 16, 61) and logits.abs().max() <= 15
    assert module.lm_head.weight.shape[0] == (61 if name == "gpt" else 64), "the vocabulary of 2026 is padded"


def test_initialization():
    module = GPT(TINY)
    module(tokens(), tokens()).backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()] == ["lm_head.weight"]
    assert module.transformer["wte"].weight.std().item() == pytest.approx(1, abs=0.05)
    assert module.transformer["h"][0].mlp.c_fc.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)

    module = GPT2026(LANGUAGE_MODELS["gpt_2026"].tiny_config)
    assert module.resid_lambdas.tolist() == pytest.approx([1.15, 1.10, 1.05])
    assert module.x0_lambdas.tolist() == pytest.approx([0.20, 0.125, 0.05])
    zero = [name for name, p in module.named_parameters() if not p.any()]
    last_of_branches = [f"transformer.h.{n}.{branch}.c_proj.weight" for n in range(3) for branch in ("attn", "mlp")]
    assert zero == ["smear_lambda", *last_of_branches]
    assert module.transformer["wte"].weight.std().item() == pytest.approx(0.8, abs=0.05)
    assert module.transformer["h"][0].attn.c_q.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


@EITHER
def test_positions_beyond_the_tables_are_refused(name):
    with pytest.raises(ValueError, match="position 161 is beyond the 160 positions"):
        small_gpt(name)(torch.zeros(1, 161, dtype=torch.int32))


def test_rotary_tables_are_angles():
    cos, sin = rotary_tables(4, 8)
    assert cos.shape == (1, 4, 1, 4) and cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos[0, :, 0, 0].float(), torch.arange(4.0).cos(), rtol=0, atol=4e-3)
    torch.testing.assert_close(sin[0, :, 0, 2].float(), (torch.arange(4.0) / 100).sin(), rtol=0, atol=1e-3)


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


# ---- a cache of fixed size


def test_attention_with_a_cache_is_that_of_the_whole_rows():
    """Each row is at its own position; tokens beyond it are not used."""
    query, key, value = torch.randn(3, 2, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    buffers = [torch.full((2, 12, 2, 4), 1e4) for _ in range(2)]
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    for buffer, x in zip(buffers, (key, value), strict=True):
        for row, length in enumerate(lengths):
            buffer[row, :length] = x[row, :length]
    new = [torch.stack([x[row, n : n + 4] for row, n in enumerate(lengths)]) for x in (query, key, value)]
    options = {"cache_seqlens": lengths, "causal": True}
    for window in (-1, 3):
        attended = attention_with_cache(new[0], *buffers, *new[1:], window_size=(window, 0), **options)
        whole = windowed_attention(query, key, value, window)
        torch.testing.assert_close(attended, torch.stack([whole[r, n : n + 4] for r, n in enumerate(lengths)]))
    with pytest.raises(ValueError, match="causal False; use causal=True"):
        attention_with_cache(new[0], *buffers, *new[1:], cache_seqlens=lengths)


@EITHER
def test_cached_logits_are_those_of_the_whole_sequence(name):
    module = model(name)
    row = tokens("gpt_2026")[0].tolist()
    prompt, generated = (row[:5], row[5:12]) if name == "gpt" else (row[:130], row[130:140])
    expected = uncached_logits(module, prompt, generated)
    torch.testing.assert_close(cached_logits(module, prompt, generated), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1, "the logits differ from token to token"


# ---- bfloat16


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_pytorch_s():
    """Compares each gradient and the loss over sixteen batches; for gradients, the norm of the difference.

    A gradient of one number has one rounding error a batch, so that equal arithmetic differs by up to a factor of two.
    """
    wide = model(n_layer=3)
    narrow = model(n_layer=3, forward_dtype="bfloat16")
    narrow.load_state_dict(wide.state_dict())
    data = torch.randint(-1, 61, (16, 2, 4, 150), generator=torch.Generator().manual_seed(1))
    data[:, 0].clamp_(min=0)
    fn = bridge.export(narrow)
    value_and_grad = jax.jit(jax.value_and_grad(lambda params, batch: fn(params, fn.buffers, *batch)[0]))

    def in_pytorch(module, batch):
        module.zero_grad()
        loss = module(*batch)
        loss.backward()
        return {name: p.grad for name, p in module.named_parameters()} | {"loss": loss.detach()}

    def in_jax(batch):
        loss, gradients = value_and_grad(fn.params, batch.numpy())
        return gradients | {"loss": loss}

    batches = [(in_pytorch(wide, batch), in_jax(batch), in_pytorch(narrow, batch)) for batch in data]
    numbers = {name for name, p in wide.named_parameters() if p.numel() == 1} | {"loss"}
    distances = []
    for name in batches[0][0]:
        sides = zip(*batches, strict=True)
        truth, ours, theirs = (np.stack([np.asarray(each[name], np.float32) for each in side]) for side in sides)
        distances.append([np.linalg.norm(each - truth) / np.linalg.norm(truth) for each in (ours, theirs)])
        far, allowed = distances[-1]
        assert far <= (2 if name in numbers else 1.25) * allowed + 1e-4, (name, far, allowed)
    ours, theirs = np.mean(distances, axis=0)
    assert ours <= 1.05 * theirs


# ---- beside the published modules

IS_2026 = (Path(os.environ.get("NANOCHAT_DIR", "")) / "nanochat/flash_attention.py").is_file()
published_2026 = pytest.mark.skipif(not IS_2026, reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4")
"""Each test runs in a process of its own, because the dtype of the published module is that of its import."""


@pytest.fixture
def published(nanochat):
    """Builds the published module with the sizes of `small_gpt`."""
    if IS_2026:
        pytest.skip("set NANOCHAT_DIR to a checkout of nanochat at 4a87a0d")
    from nanochat import gpt

    def build(**changes):
        names = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
        fields = {name: getattr(TINY, name) for name in names} | {"n_embd": 32} | changes
        return gpt.GPT(gpt.GPTConfig(**fields))

    return build


@HEADS
def test_published_weights_outputs_and_gradients_bit_for_bit(published, n_kv_head):
    """State dicts load in both directions; in float32 and under bfloat16 autocast."""
    ours = small_gpt(n_kv_head=n_kv_head)
    theirs = published(n_kv_head=n_kv_head)
    theirs.load_state_dict(ours.state_dict())
    other = small_gpt(seed=3, n_kv_head=n_kv_head, forward_dtype="bfloat16")
    other.load_state_dict(theirs.state_dict())
    inputs = tokens().long()
    targets = tokens(low=-1).long()
    assert torch.equal(ours(inputs), theirs(inputs))
    for mine in (ours, other):
        for module in (mine, theirs):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mine is other):
                module(inputs, targets, loss_reduction="sum").backward()
        for (name, a), (their_name, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == their_name and torch.equal(a.grad, b.grad), name


def test_published_initialization_bit_for_bit(published):
    torch.manual_seed(5)
    theirs = published()
    theirs.init_weights()
    torch.manual_seed(5)
    ours = GPT(theirs.config)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    assert torch.equal(ours.cos, theirs.cos) and torch.equal(ours.sin, theirs.sin)


@published_2026
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_equals_the_published_one(dtype, monkeypatch):
    monkeypatch.setenv("NANOCHAT_DTYPE", dtype)
    print(run_script("published_gpt_2026"))


@published_2026
@pytest.mark.slow
def test_the_optimizer_of_the_presets_equals_the_published_one():
    """The gradients are those of the published training, in all phases of the schedules."""
    print(run_script("published_training_2026", 16))
