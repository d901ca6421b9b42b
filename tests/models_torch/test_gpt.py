"""The language model: causality, cached positions, initialization, and equality with the published module.

`NANOCHAT_DIR=/path/to/nanochat pytest tests/models_torch/test_gpt.py` compares with a checkout at 4a87a0d.
"""

import pytest
import torch
from support.markers import slow_unless
from support.small_gpt import VOCAB_SIZE, cached_logits, small_gpt, uncached_logits

import bridge
from models_torch.gpt import GPT, rotary_tables
from models_torch.kv_cache import CachedModel, StaticCache, positions_of
from models_torch.registry import LANGUAGE_MODELS

TINY = LANGUAGE_MODELS["gpt"].tiny_config
HEADS = pytest.mark.parametrize("n_kv_head", [1, 2, 4])
TOKENS = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(2)).tolist()


def tokens(low=0):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(low, TINY.vocab_size, (3, TINY.seq_len), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("n_kv_head", slow_unless((2).__eq__, [1, 2, 4]))
def test_verify_in_float32(n_kv_head):
    report = bridge.verify(small_gpt(n_kv_head=n_kv_head), tokens(), tokens(low=-1), tolerance=1e-5)
    assert report.ok, f"\n{report}"
    assert len(report.rows) >= 17 and all(row.scale > 0 for row in report.rows)


def test_a_logit_depends_on_its_own_and_earlier_tokens_only():
    module, inputs = small_gpt(), tokens()
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocab_size
    before, after = module(inputs), module(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert ((before[:, 9:] - after[:, 9:]).abs().amax(-1) > 0).all()


def test_loss_is_float32_and_leaves_ignored_targets_out():
    module, targets = small_gpt(forward_dtype="bfloat16"), tokens(low=-1)
    losses = module(tokens(), targets, loss_reduction="none")
    ignored = targets.flatten() == -1
    assert losses.dtype == torch.float32 and ignored.any()
    assert (losses[ignored] == 0).all() and (losses[~ignored] > 0).all()
    assert module(tokens()).dtype == torch.bfloat16 and module(tokens()).abs().max() <= 15


def test_only_the_head_has_a_gradient_at_initialization():
    module = GPT(TINY)
    module(tokens(), tokens()).backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()] == ["lm_head.weight"]
    assert module.transformer["wte"].weight.std().item() == pytest.approx(1, abs=0.05)
    assert module.transformer["h"][0].mlp.c_fc.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_positions_beyond_the_tables_are_refused():
    with pytest.raises(ValueError, match="position 161 is beyond the 160 positions"):
        small_gpt()(torch.zeros(1, 161, dtype=torch.int32))


def test_rotary_tables_are_angles():
    cos, sin = rotary_tables(4, 8)
    assert cos.shape == (1, 4, 1, 4) and cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos[0, :, 0, 0].float(), torch.arange(4.0).cos(), rtol=0, atol=4e-3)
    torch.testing.assert_close(sin[0, :, 0, 2].float(), (torch.arange(4.0) / 100).sin(), rtol=0, atol=1e-3)


# ---- a cache of fixed size


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_cached_logits_are_those_of_the_whole_sequence(n_kv_head):
    module = small_gpt(n_kv_head=n_kv_head)
    expected = uncached_logits(module, TOKENS[:5], TOKENS[5:])
    torch.testing.assert_close(cached_logits(module, TOKENS[:5], TOKENS[5:]), expected, rtol=0, atol=1e-5)


def test_several_tokens_are_inserted_at_once():
    module, idx = small_gpt(), torch.tensor([TOKENS])
    with torch.no_grad():
        _, (keys, values, _) = CachedModel(module).prefill(idx[:, :5], idx[:, 4:5], 16)
        cache = StaticCache(keys, values, torch.tensor(5))
        logits = [module(part, kv_cache=cache) for part in (idx[:, 5:9], idx[:, 9:])]
        torch.testing.assert_close(torch.cat(logits, dim=1), module(idx)[:, 5:], rtol=0, atol=1e-5)
    assert cache.get_pos() == 12 and keys[0].shape == (1, 2, 16, 8) and not keys[1][:, :, 12:].any()


def test_a_full_cache_is_pytorch_s_error():
    cache = StaticCache([torch.zeros(1, 1, 3, 2)], [torch.zeros(1, 1, 3, 2)], torch.tensor(2))
    with pytest.raises(RuntimeError, match="expanded size of the tensor"):
        cache.insert_kv(0, torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))


def test_positions_of_a_model():
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Linear has no cache of keys and values; use a model with that of nanochat"):
        positions_of(module)
    module.register_buffer("cos", torch.zeros(1, 40, 1, 2))
    assert positions_of(module) == 40 and positions_of(small_gpt()) == 160


# ---- beside the published module


@pytest.fixture
def published(nanochat):
    """Builds the published module with the sizes of `small_gpt`."""
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
    copy = small_gpt(seed=3, n_kv_head=n_kv_head, forward_dtype="bfloat16")
    copy.load_state_dict(theirs.state_dict())
    inputs, targets = tokens().long(), tokens(low=-1).long()
    assert torch.equal(ours(inputs), theirs(inputs))
    for mine in (ours, copy):
        for module in (mine, theirs):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mine is copy):
                module(inputs, targets, loss_reduction="sum").backward()
        for (name, a), (other, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == other and torch.equal(a.grad, b.grad), name


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


@HEADS
def test_verify_on_the_published_module(published, n_kv_head):
    module = published(n_kv_head=n_kv_head)
    module.load_state_dict(small_gpt(n_kv_head=n_kv_head).state_dict())
    # The published forward casts no targets, and PyTorch's loss takes 64-bit ones only.
    logits = bridge.verify(module, tokens(), tolerance=1e-5)
    loss = bridge.verify(module, tokens().long(), tokens(low=-1).long(), tolerance=1e-5)
    for report in (logits, loss):
        assert report.ok, f"\n{report}"
