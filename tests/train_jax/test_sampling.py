"""The choice of a token: distributions, log-probabilities, and rows with settings of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_jax.tasks.language.sampling import GREEDY, Sampling, Settings, choose_tokens, stream_key

SHARES = [0.15, 0.5, 0.1, 0.25]
LOGITS = jnp.log(jnp.array(SHARES))
DRAWS = 4000
KEPT = {
    "all": (Sampling(), SHARES),
    "temperature 0.5": (Sampling(temperature=0.5), [0.0225, 0.25, 0.01, 0.0625]),
    "top_k 3": (Sampling(top_k=3), [0.15, 0.5, 0, 0.25]),
    "top_p 0.7": (Sampling(top_p=0.7), [0, 0.5, 0, 0.25]),
    "top_p 0.1": (Sampling(top_p=0.1), [0, 1, 0, 0]),
    "top_p of what top_k left": (Sampling(top_k=2, top_p=0.6), [0, 1, 0, 0]),
    "top_k beyond the vocabulary": (Sampling(top_k=9), SHARES),
    "greedy": (GREEDY, [0, 1, 0, 0]),
}
choose = jax.jit(choose_tokens)


def settings_of(samplings, stream=(0, 0)):
    return Settings(
        jnp.array([each.temperature for each in samplings], jnp.float32),
        jnp.array([each.top_k for each in samplings]),
        jnp.array([each.top_p for each in samplings], jnp.float32),
        jnp.tile(jnp.array(stream, jnp.uint32), (len(samplings), 1)),
    )


def drawn(sampling, forced=-1):
    stream = stream_key(0, (1, 2), 0)
    settings = settings_of([sampling] * DRAWS, stream)
    return choose(jnp.tile(LOGITS, (DRAWS, 1)), settings, jnp.arange(DRAWS), jnp.full(DRAWS, forced))


@pytest.mark.parametrize("name", KEPT)
def test_draws_have_the_probabilities_within_the_limits(name):
    sampling, weights = KEPT[name]
    choice, shares = drawn(sampling), np.array(weights) / sum(weights)
    counts, expected = np.bincount(choice.token, minlength=4), DRAWS * shares
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected)).all(), counts
    assert not counts[expected == 0].any()
    np.testing.assert_allclose(choice.sampling_log_prob, np.log(shares[choice.token]), atol=1e-5)
    np.testing.assert_allclose(choice.log_prob, np.log(SHARES)[choice.token], atol=1e-6)


def test_a_forced_token_has_the_log_probabilities_of_the_model():
    choice = drawn(Sampling(temperature=0.5), forced=2)
    assert set(choice.token.tolist()) == {2}
    np.testing.assert_allclose(choice.log_prob, np.log(0.1), atol=1e-6)
    np.testing.assert_allclose(choice.sampling_log_prob, np.log(0.01 / 0.345), atol=1e-5)
    assert np.isneginf(drawn(Sampling(top_k=1), forced=2).sampling_log_prob).all()


def test_a_row_is_the_same_beside_rows_with_other_settings():
    samplings = [sampling for sampling, _ in KEPT.values()]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(len(samplings), 300)), jnp.float32)
    positions, forced = jnp.arange(len(samplings)), jnp.full(len(samplings), -1)
    at_once = choose(logits, settings_of(samplings), positions, forced)
    for row, sampling in enumerate(samplings):
        alone = choose(logits[row : row + 1], settings_of([sampling]), positions[row : row + 1], forced[:1])
        for mine, all_rows in zip(alone, at_once, strict=True):
            np.testing.assert_allclose(mine[0], all_rows[row], atol=1e-5)


def test_limits_are_those_of_a_sort():
    """Equal logits are all kept; some are negative, some are zeros of either sign."""
    generator = np.random.default_rng(1)
    for top_k, top_p in [(1, 1.0), (7, 1.0), (0, 0.5), (20, 0.8), (0, 0.999)]:
        logits = np.round(generator.normal(size=(40, 50)), 1).astype(np.float32)
        order = np.sort(logits, axis=1)[:, ::-1]
        kept = logits >= (order[:, top_k - 1 : top_k] if top_k else -np.inf)
        shares = np.exp(logits) * kept / (np.exp(logits) * kept).sum(1, keepdims=True)
        more = [(shares[row] * (logits[row] > each)).sum() for row in range(40) for each in logits[row]]
        kept &= np.reshape(more, logits.shape) < top_p
        choice = choose(
            jnp.repeat(jnp.asarray(logits), 50, axis=0),
            settings_of([Sampling(top_k=top_k, top_p=top_p)] * 2000),
            jnp.arange(2000),
            jnp.tile(jnp.arange(50), 40),
        )
        assert (np.isfinite(choice.sampling_log_prob).reshape(40, 50) == kept).all(), (top_k, top_p)


def test_a_stream_belongs_to_seed_prompt_and_sample():
    streams = [stream_key(*each).tolist() for each in [(0, (1, 2), 0), (1, (1, 2), 0), (0, (1, 3), 0), (0, (1, 2), 1)]]
    assert all(streams.count(each) == 1 for each in streams)
    assert stream_key(0, (1, 2), 0).tolist() == stream_key(0, [1, 2], 0).tolist() == streams[0]
