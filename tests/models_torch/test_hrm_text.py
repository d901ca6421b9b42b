"""HRM-Text beside transformers and beside the published modules: weights in both layouts, outputs and gradients."""

import os

import pytest
import torch
from support.published_hrm_text import build_published

import bridge
from models_torch.gpt import IGNORED_TARGET
from models_torch.hrm_text import HRMText, HRMTextConfig, from_transformers, to_transformers

pytestmark = pytest.mark.usefixtures("quick_compilation")
TINY = {"seq_len": 12, "vocab_size": 37, "n_layers": 2, "hidden_size": 32, "num_heads": 2, "forward_dtype": "float32"}
LENGTHS = ((3, 5), (1, 1), (2, 0))
"""Instruction and response of the samples of a row of 12 positions."""
DESIGNS = {
    "hrm": {},
    "trm": {"L_cycles": 1, "bp_steps": 2},
    "ut": {"L_cycles": 3, "bp_steps": 2},
    "rins": {"L_cycles": 4, "bp_steps": 2},
    "transformer": {},
}


def built(seed=0, **fields):
    torch.manual_seed(seed)
    return HRMText(HRMTextConfig(**TINY, **fields))


def packed(seed=0):
    """Two equal rows of three samples: tokens, targets, and what `forward` takes of them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(37, (12,), generator=generator)
    targets = torch.randint(37, (12,), generator=generator)
    ranges = [(number, place, place < asked) for number, (asked, answered) in enumerate(LENGTHS)
              for place in range(asked + answered)]  # fmt: skip
    samples, positions, instruction = map(torch.tensor, zip(*ranges, strict=True))
    asks_more = instruction & instruction.roll(-1)  # the last position has an answer, or ends the row
    asks_more[-1] = False
    targets = torch.where(asks_more, IGNORED_TARGET, targets)
    parts = {"positions": positions.int(), "samples": samples.int(), "instruction": instruction}
    return (
        tokens.int().expand(2, -1),
        targets.int().expand(2, -1),
        {name: each.expand(2, -1) for name, each in parts.items()},
    )


def attends_of(parts):
    """Returns the positions (last axis) that each position of the first row attends to, for a fake FlashAttention."""
    samples = parts["samples"][0]
    instruction = parts["instruction"][0]
    place = torch.arange(12)
    seen = (place[:, None] >= place) | (instruction[:, None] & instruction)
    return seen & (samples[:, None] == samples)


def of_transformers(ours, **options):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "HrmTextConfig"):
        pytest.skip("transformers without HRM-Text")
    config = transformers.HrmTextConfig(
        vocab_size=37, hidden_size=32, num_attention_heads=2, head_dim=16, embedding_scale=32**0.5,
        intermediate_size=ours.model.L_level.core.layers[0].mlp.down_proj.weight.shape[1],
        num_hidden_layers=ours.config.layers_per_stack, max_position_embeddings=12,
        H_cycles=ours.config.H_cycles, L_cycles=ours.config.L_cycles, **options,
    )  # fmt: skip
    theirs = transformers.HrmTextForCausalLM(config)
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    return theirs


def close(mine, expected, tolerance=1e-5):
    scale = max(float(expected.abs().max()), 1e-6)
    assert float((mine - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("bp_steps", [3, 4, 5])
def test_weights_logits_and_gradients_are_those_of_transformers(bp_steps):
    ours = built(bp_steps=bp_steps)
    theirs = of_transformers(ours, prefix_lm=True, L_bp_cycles=[0, bp_steps - 2])
    state = ours.state_dict()
    back = from_transformers(theirs.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state)
    tokens = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    asked = torch.arange(12).expand(2, -1) < 5
    direction = torch.randn(2, 12, 37, generator=torch.Generator().manual_seed(2))
    logits = ours(tokens, instruction=asked)
    expected = theirs(tokens, token_type_ids=asked.long(), use_cache=False).logits
    close(logits, expected)
    close(ours(tokens), theirs(tokens, use_cache=False).logits)
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    mine = to_transformers({name: parameter.grad for name, parameter in ours.named_parameters()})
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(mine[name], gradient)


def test_samples_of_a_row_are_computed_as_if_alone():
    ours = built()
    tokens, targets, parts = packed()
    losses = ours(tokens, targets, **parts, loss_reduction="none").unflatten(0, (2, 12))
    first = 0
    for asked, answered in LENGTHS:
        own = slice(first, first + asked + answered)
        instruction = (torch.arange(asked + answered) < asked)[None]
        alone = ours(tokens[:1, own], targets[:1, own], instruction=instruction, loss_reduction="none")
        torch.testing.assert_close(losses[0, own], alone, rtol=1e-5, atol=1e-5)
        gradient = torch.autograd.grad(losses[0, own].sum(), ours.lm_head.weight, retain_graph=True)[0]
        close(gradient, torch.autograd.grad(alone.sum(), ours.lm_head.weight)[0])
        first += asked + answered


@pytest.mark.slow
@pytest.mark.parametrize(("design", "fields"), [*DESIGNS.items(), ("hrm", {"bp_steps": 2})], ids=str)
def test_the_bridge_keeps_the_gradients_of_each_design(design, fields):
    tokens, targets, parts = packed()
    report = bridge.verify(built(design=design, **fields), tokens, targets, **parts, tolerance=1e-5)
    assert report.ok, report


@pytest.fixture
def published(monkeypatch):
    if "HRM_TEXT_DIR" not in os.environ:
        pytest.skip("set HRM_TEXT_DIR to a checkout of HRM-Text")
    return lambda config: build_published(monkeypatch, config)


@pytest.mark.parametrize(
    ("design", "fields"), [*DESIGNS.items(), *(("hrm", {"bp_steps": n}) for n in (2, 3, 4))], ids=str
)
def test_the_published_modules_and_ours_are_the_same_model(published, design, fields):
    ours = built(design=design, **fields)
    theirs = published(ours.config)
    theirs.load_state_dict(ours.state_dict())
    assert all(torch.equal(theirs.state_dict()[name], array) for name, array in ours.state_dict().items())
    tokens, _, parts = packed()
    options = {"bp_steps": ours.config.bp_steps} if design == "hrm" else {}
    x = theirs.embed_tokens(tokens[0])

    def logits_of(x):
        _, hidden = theirs.model(None, x, position_ids=parts["positions"][0], attends=attends_of(parts), **options)
        return theirs.lm_head(hidden)

    found = ours(tokens, **parts)
    expected = logits_of(x)
    close(found[0], expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (found[0] * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(name).grad
        assert (mine is None) == (parameter.grad is None)  # None for the embedding with two steps: all is under no_grad
        if mine is not None:
            close(mine, parameter.grad)
