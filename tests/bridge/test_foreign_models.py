"""Modules that nobody here wrote, unchanged: outputs, their own loss, every gradient and buffer against PyTorch."""

import importlib.util
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import randn, verified
from support.markers import slow_or_campaign, slow_unless
from torch import nn

import bridge

TOLERANCE = 1e-4
"""Whole models, float32."""


def assert_parity(module, *args, **kwargs):
    torch.manual_seed(7)
    verified(module, *args, tolerance=TOLERANCE, **kwargs)


def both_modes(function):
    modes = [pytest.param(True, id="train"), pytest.param(False, id="eval", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("train", modes)(function)


# ---- Hugging Face


def hugging_face():
    return pytest.importorskip("transformers", reason="transformers is in the test extra: pip install .[test]")


def tokens(vocabulary, shape=(2, 9)):
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def padding(shape=(2, 9)):
    mask = torch.ones(shape, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WORDS = SIZES | {"vocab_size": 61, "max_position_embeddings": 16}
IMAGES = SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 5}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


GPT2 = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
LANGUAGE_MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", WORDS | {"num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", WORDS),
}


def built(model, config, settings, attention):
    transformers = hugging_face()
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings, attn_implementation=attention))


@both_modes
@pytest.mark.parametrize("attention", slow_unless("sdpa".__eq__, ["sdpa", "eager"]))
@pytest.mark.parametrize("name", slow_unless("gpt2".__eq__, LANGUAGE_MODELS))
def test_language_model_with_its_own_loss(name, attention, train):
    """A padded batch with labels; tied embeddings, dropout in training; the gradient is that of the model's loss."""
    module = built(*LANGUAGE_MODELS[name], attention)
    labels = tokens(61).masked_fill(padding() == 0, -100)
    inputs = {"input_ids": tokens(61), "attention_mask": padding(), "labels": labels}
    if name != "bert":  # a cache of keys and values is no result of a training step
        inputs["use_cache"] = False
    assert_parity(module, train=train, loss=lambda out: out["loss"], **inputs)


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_vit_with_its_own_loss(attention, train):
    module = built("ViTForImageClassification", "ViTConfig", IMAGES | DROPOUT, attention)
    inputs = {"pixel_values": randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}
    assert_parity(module, train=train, loss=lambda out: out["loss"], **inputs)


# ---- the `tiny-recursive-model` package


def tiny_recursive_model():
    """Imports only the model and the mixer: the package's `__init__` would import a trainer and four more packages."""
    pytest.importorskip("einops", reason="einops is in the test extra: pip install .[test]")
    name = "tiny_recursive_model"
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            pytest.skip("tiny-recursive-model is not installed: pip install --no-deps tiny-recursive-model")
        package = types.ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules[name] = package
    from tiny_recursive_model.mlp_mixer_1d import MLPMixer1D
    from tiny_recursive_model.trm import TinyRecursiveModel

    return TinyRecursiveModel, MLPMixer1D


@both_modes
@pytest.mark.parametrize("registers", slow_unless(lambda n: not n, [0, 2]))
def test_tiny_recursive_model_over_two_calls(registers, train):
    """All rounds but the last run under `no_grad`; outputs and latents pass detached to the next call."""
    model_class, mixer_class = tiny_recursive_model()
    torch.manual_seed(0)
    network = mixer_class(dim=16, depth=1, seq_len=8 + registers)
    rounds = {"num_refinement_blocks": 2, "num_latent_refinements": 2}
    module = model_class(dim=16, num_tokens=11, network=network, num_register_tokens=registers, **rounds)
    nn.init.normal_(module.to_halt_pred[1].weight, std=0.3)
    state = [t.detach().expand(2, 8 + registers, 16).clone() for t in module.get_initial()]
    assert_parity(
        module,
        tokens(11, (2, 8)),
        *state,
        labels=tokens(11, (2, 8)),
        train=train,
        loss=lambda out: out[0],
        steps=2,
        advance=lambda out, args, kwargs: ((args[0], out[2], out[3]), kwargs),
    )


# ---- torch.nn


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout2d(0.2)),
        *(nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1), nn.GroupNorm(2, 4), nn.GELU()),
        *(nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)),
    )


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def late(rows, length):
    """True where a key is padding."""
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[-1, -2:] = True
    return mask


MODULES = {
    "encoder": lambda: (encoder(), (randn(2, 6, 16),), {"src_key_padding_mask": late(2, 6)}),
    "encoder, norm first, causal": lambda: (
        encoder(norm_first=True, activation="gelu"),
        (randn(2, 6, 16),),
        {"mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True},
    ),
    "transformer": lambda: (nn.Transformer(16, 4, 1, 1, 24, batch_first=True), (randn(2, 6, 16), randn(2, 5, 16)), {}),
    "attention": lambda: (
        nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True),
        (randn(2, 6, 16), randn(2, 5, 16), randn(2, 5, 16)),
        {"key_padding_mask": late(2, 5)},
    ),
    "attention without weights": lambda: (
        nn.MultiheadAttention(16, 4, kdim=8, vdim=12, add_bias_kv=True),
        (randn(6, 2, 16), randn(5, 2, 8), randn(5, 2, 12)),
        {"need_weights": False},
    ),
    "convolutions": lambda: (convolutions(), (randn(2, 3, 12, 12),), {}),
    "gru": lambda: (nn.GRU(5, 7, num_layers=2, bidirectional=True, dropout=0.1), (randn(3, 2, 5),), {}),
    "gru, state given": lambda: (nn.GRU(5, 7, batch_first=True), (randn(2, 4, 5), randn(1, 2, 7)), {}),
    "lstm": lambda: (nn.LSTM(5, 7, num_layers=2, bidirectional=True, dropout=0.1), (randn(6, 2, 5),), {}),
    "lstm, projected": lambda: (nn.LSTM(5, 7, proj_size=3), (randn(6, 2, 5),), {}),
    "rnn": lambda: (nn.RNN(5, 7, nonlinearity="relu"), (randn(4, 2, 5),), {}),
}


OTHERS = [name for name in MODULES if name not in ("attention", "lstm")]


@both_modes
@pytest.mark.parametrize("name", ["attention", "lstm", *slow_or_campaign([], OTHERS)])
def test_torch_module(name, train):
    torch.manual_seed(0)
    module, args, kwargs = MODULES[name]()
    assert_parity(module, *args, train=train, steps=2, **kwargs)


# ---- Hugging Face's RT-DETR: every gradient leaf, with weights that make activations large and attention saturated


@pytest.mark.parametrize("perturbation", slow_or_campaign([0.05], [0.5]))
def test_every_gradient_of_the_score_head(perturbation):
    """At 0.05 activations are of size 1; at 0.5 the encoder's are 1e7 and its attention has scores of 1e12.

    The reference is float64: where attention is saturated, PyTorch's float32 kernels round differently on each machine.
    There a gradient of 1e-10 of the largest one is an attention weight that float32 rounds to 0.
    """
    transformers = hugging_face()
    torch.manual_seed(0)
    widths = [8, 12, 16, 24]
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=widths[1:],
        encoder_layers=1,
        encoder_ffn_dim=24,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=6,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=24,
        decoder_n_points=2,
        decoder_layers=1,
        decoder_attention_heads=2,
        num_denoising=0,
        num_labels=5,
    )
    module = transformers.RTDetrModel(config)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(perturbation * torch.randn_like(p))
    images = randn(2, 3, 64, 64)
    fn = bridge.export(module.eval())

    def loss(params):
        return jnp.sum(fn(params, fn.buffers, pixel_values=images.numpy())[0]["enc_outputs_class"] ** 2)

    gradients = jax.jit(jax.grad(loss))(fn.params)
    exact = module.double()
    (exact(pixel_values=images.double())["enc_outputs_class"] ** 2).sum().backward()
    expected = {n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in exact.named_parameters()}
    assert len(expected) > 190
    largest = max(np.abs(g).max() for g in expected.values())
    for name, wanted in expected.items():
        scale = max(np.abs(wanted).max(), 1e-5 * largest)
        np.testing.assert_allclose(gradients[name], wanted, rtol=0, atol=1e-4 * scale, err_msg=name)
