"""Hugging Face's RT-DETR: every gradient leaf, with weights that make activations large and attention saturated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", [0.05, 0.5])
def test_every_gradient_of_the_score_head(perturbation):
    """At 0.05 activations are of size 1; at 0.5 the encoder's are 1e7 and its attention has scores of 1e12.

    Against float64: where attention is saturated, PyTorch's kernels round in float32, differently on each machine.
    There a gradient of 1e-10 of the largest one is an attention weight that float32 rounds to 0.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
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
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
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
