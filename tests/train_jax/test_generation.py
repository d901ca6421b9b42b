"""Generation: greedy tokens are PyTorch's, samples belong to seed, prompt and position, and `trm generate`."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_or_campaign, slow_unless
from support.scripts import run_script
from support.small_gpt import GREEDY, generator_of, greedy_ties, rows_of, small_gpt

from train_jax.runtime.devices import Devices
from train_jax.tasks.language import generation
from train_jax.tasks.language.generation import PromptSample, Sampling, choose_token, stream_key

NANOCHAT_DIR = os.environ.get("NANOCHAT_DIR")
LOGITS = jnp.log(jnp.array([0.15, 0.5, 0.1, 0.25]))
DRAWS = 4000
KEPT = {
    "all": (Sampling(), [0.15, 0.5, 0.1, 0.25]),
    "temperature 0.5": (Sampling(temperature=0.5), [0.0225, 0.25, 0.01, 0.0625]),
    "top_k 3": (Sampling(top_k=3), [0.15, 0.5, 0, 0.25]),
    "top_p 0.7": (Sampling(top_p=0.7), [0, 0.5, 0, 0.25]),
    "top_p 0.1": (Sampling(top_p=0.1), [0, 1, 0, 0]),
    "top_p of what top_k left": (Sampling(top_k=2, top_p=0.6), [0, 1, 0, 0]),
    "top_k beyond the vocabulary": (Sampling(top_k=9), [0.15, 0.5, 0.1, 0.25]),
}


@pytest.mark.parametrize("name", slow_unless("top_p of what top_k left".__eq__, KEPT))
def test_draws_have_the_probabilities_that_the_limits_leave(name):
    sampling, weights = KEPT[name]
    stream = stream_key(0, (1, 2), 0)
    draw = jax.jit(jax.vmap(lambda position: choose_token(LOGITS, stream, position, sampling)))
    counts = np.bincount(draw(jnp.arange(DRAWS)), minlength=4)
    expected = DRAWS * np.array(weights) / sum(weights)
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected)).all(), counts
    assert not counts[expected == 0].any()


def test_greedy_is_the_most_probable_token():
    assert choose_token(LOGITS, stream_key(0, (), 0), jnp.asarray(3), GREEDY) == 1


def test_a_stream_belongs_to_seed_prompt_and_sample():
    streams = [stream_key(*each).tolist() for each in [(0, (1, 2), 0), (1, (1, 2), 0), (0, (1, 3), 0), (0, (1, 2), 1)]]
    assert all(streams.count(each) == 1 for each in streams)
    assert stream_key(0, (1, 2), 0).tolist() == stream_key(0, [1, 2], 0).tolist() == streams[0]


@pytest.fixture(scope="module")
def small():
    module, rows = small_gpt(), rows_of([1, 6, 3])
    return module, rows, generator_of(module, Devices(1), rows=3, prompt_tokens=8, new_tokens=7)


def counted(monkeypatch):
    """A list that grows by one for each program that is traced."""
    traced = []
    monkeypatch.setattr(generation, "choose_token", lambda *args: traced.append(1) or choose_token(*args))
    return traced


def test_greedy_tokens_are_pytorch_s_with_and_without_a_cache(small, monkeypatch):
    module, rows, generator = small
    traced = counted(monkeypatch)
    completions = list(generator.complete(rows))
    assert [len(tokens) for tokens in completions] == [7, 7, 7]
    assert {greedy_ties(module, row.prompt, tokens) for row, tokens in zip(rows, completions, strict=True)} == {(0, 0)}
    assert [int(each) for each in generator.stream(rows[1])] == completions[1], "the other rows change nothing"
    assert len(traced) == 2, "one program for prompts, one for further tokens"


def test_a_row_ends_before_the_token_that_stops_it(small, monkeypatch):
    _, rows, generator = small
    columns = np.array([[5, 9, 1], [9, 7, 2], [6, 9, 3], [9, 9, 9], [4, 4, 4]])
    monkeypatch.setattr(generator, "_stop", 9)
    monkeypatch.setattr(generator, "tokens", lambda part: iter(columns[:, : len(part)]))
    assert list(generator.complete(rows)) == [[5], [], [1, 2, 3]]
    assert list(generator.complete(rows + rows[:1])) == [[5], [], [1, 2, 3], [5]]
    assert list(generator.stream(rows[0])) == [5]


@pytest.mark.parametrize("name", slow_or_campaign(["gpt"], ["gpt_2026"]))
def test_a_sample_is_the_same_alone_in_a_batch_and_on_eight_devices(name):
    results = json.loads(run_script("generate_on_devices", name))
    assert len(results) == 5
    for name, result in results.items():
        assert result["tokens"] == results["one device"]["tokens"], name
        assert result["programs"] == 2 and not result["compiled for other prompts"], name
    assert len({tuple(tokens) for tokens in result["tokens"]}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt_2026"])
def test_many_prompts_of_many_lengths_are_pytorch_s(name):
    """With the windows of 128 tokens that `gpt_2026` has, which the rows leave."""
    module, rows = small_gpt(name, seq_len=160, n_layer=3), rows_of([1, 2, 3, 17, 40, 112, 125, 128])
    generator = generator_of(module, Devices(1), rows=8, prompt_tokens=128, new_tokens=24)
    for row, tokens in zip(rows, generator.complete(rows), strict=True):
        assert len(tokens) == 24
        greedy_ties(module, row.prompt, tokens)


@pytest.mark.slow
def test_a_model_in_bfloat16():
    """Logits are at most 15 and have 8 bits: the same sums in another order may choose a token that is 2**-4 away."""
    module, rows = small_gpt(forward_dtype="bfloat16"), rows_of([1, 7])
    generator = generator_of(module, Devices(1), rows=2, prompt_tokens=8, new_tokens=6)
    for row, tokens in zip(rows, generator.complete(rows), strict=True):
        greedy_ties(module, row.prompt, tokens, tie=2**-4)


@pytest.mark.campaign  # models of the size of chat-tiny, 32 prompts of 1 to 200 tokens, 128 tokens after each
@pytest.mark.parametrize("n_kv_head", [1, 3])
@pytest.mark.parametrize("name", ["gpt", "gpt_2026"])
def test_greedy_tokens_of_a_larger_model(name, n_kv_head, monkeypatch, capsys):
    traced = counted(monkeypatch)
    lengths = [1, 200, *np.random.default_rng(0).integers(1, 201, size=30).tolist()]
    module = small_gpt(name, seq_len=256, vocab_size=1024, n_layer=3, n_head=3, n_kv_head=n_kv_head, n_embd=192)
    rows = rows_of(lengths, vocab_size=1024)
    generator = generator_of(module, Devices(1), rows=32, prompt_tokens=200, new_tokens=128)
    completions = list(generator.complete(rows))
    ties = [greedy_ties(module, row.prompt, tokens) for row, tokens in zip(rows, completions, strict=True)]
    assert {len(tokens) for tokens in completions} == {128}
    assert len(traced) == 2
    with capsys.disabled():
        print(f"\nties without and with a cache: {np.sum(ties, axis=0).tolist()} of {32 * 128} tokens")


@pytest.mark.skipif(NANOCHAT_DIR is None, reason="set NANOCHAT_DIR to a checkout of nanochat at 4a87a0d or at 92d63d4")
@pytest.mark.parametrize("n_kv_head", slow_or_campaign([3], [1]))
def test_greedy_tokens_of_the_published_module(n_kv_head, capsys):
    """Unchanged, 32 prompts of 1 to 200 tokens, 128 tokens after each."""
    with capsys.disabled():
        print(run_script("published_generation", n_kv_head))


def test_rows_beyond_the_sizes_are_refused(small):
    _, rows, generator = small
    for wrong in ([PromptSample((1,) * 9)], [*rows, rows[0]]):
        with pytest.raises(ValueError, match="use at most 3 of 8"):
            next(generator.tokens(wrong))
