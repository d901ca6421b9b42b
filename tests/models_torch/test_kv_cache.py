"""A cache of fixed size gives the logits of the whole sequence, token by token and in chunks."""

import pytest
import torch
from support.small_gpt import VOCAB_SIZE, cached_logits, small_gpt, uncached_logits

from models_torch.kv_cache import CachedModel, StaticCache, positions_of

TOKENS = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(2)).tolist()


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
