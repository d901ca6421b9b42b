"""Builders of the models of the work list for robots, and of training steps as their packages write them."""

# pyright: reportMissingImports=false, reportCallIssue=false
# The packages are in an environment of their own.

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from campaigns.new_kinds_calls import Function, Model, without_init


def _features(actions: int) -> dict[str, Any]:
    without_init("lerobot.policies")
    from lerobot.configs.types import FeatureType, PolicyFeature

    return {
        "input_features": {
            "observation.image": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
            "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (actions,))},
        "device": "cpu",
    }


def act_policy() -> Model:
    features = _features(2)
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    config = ACTConfig(
        **features, chunk_size=4, n_action_steps=4, pretrained_backbone_weights=None, dim_model=16, n_heads=2,
        dim_feedforward=16, n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=4,
    )  # fmt: skip
    batch = {
        "observation.image": torch.rand(2, 3, 64, 64),
        "observation.state": torch.randn(2, 3),
        "action": torch.randn(2, 4, 2),
        "action_is_pad": torch.tensor([[False] * 4, [False, False, True, True]]),
    }
    return Model(ACTPolicy(config), (batch,), {"train": True, "steps": 1})


def tdmpc() -> Model:
    features = _features(2)
    from lerobot.policies.tdmpc.configuration_tdmpc import TDMPCConfig
    from lerobot.policies.tdmpc.modeling_tdmpc import TDMPCPolicy

    config = TDMPCConfig(
        **features, horizon=3, latent_dim=8, mlp_dim=16, state_encoder_hidden_dim=16, image_encoder_hidden_dim=8
    )
    batch = {
        "observation.image": torch.rand(2, 4, 3, 64, 64),
        "observation.state": torch.randn(2, 4, 3),
        "action": torch.randn(2, 3, 2),
        "next.reward": torch.randn(2, 3),
        "index": torch.arange(2),
        "observation.state_is_pad": torch.zeros(2, 4, dtype=torch.bool),
        "action_is_pad": torch.zeros(2, 3, dtype=torch.bool),
        "next.reward_is_pad": torch.zeros(2, 3, dtype=torch.bool),
    }
    return Model(TDMPCPolicy(config), (batch,), {"train": True, "steps": 1})


def smolvla() -> Model:
    features = _features(2)
    from lerobot.policies.smolvla import modeling_smolvla, smolvlm_with_expert
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from transformers import SmolVLMConfig

    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40, "model_type": "llama", "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    vlm = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, image_token_id=39, pad_token_id=0)
    processor = mock.Mock()
    processor.tokenizer.fake_image_token_id = 38
    processor.tokenizer.global_image_token_id = 37
    config = SmolVLAConfig(
        **features, chunk_size=4, n_action_steps=4, max_state_dim=4, max_action_dim=4, num_vlm_layers=2
    )
    with (
        mock.patch.object(smolvlm_with_expert.AutoConfig, "from_pretrained", lambda _: vlm),
        mock.patch.object(smolvlm_with_expert.AutoProcessor, "from_pretrained", lambda _: processor),
    ):
        module = modeling_smolvla.VLAFlowMatching(config)
    words = torch.randint(1, 30, (2, 5))
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    images = [torch.rand(2, 3, 32, 32) * 2 - 1]
    args = (images, [torch.tensor([True, True])], words, mask, torch.randn(2, 4), torch.randn(2, 4, 4))
    return Model(module, args, {"train": True, "steps": 1})


def real_time_chunking() -> Model:
    _features(2)
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig
    from lerobot.policies.rtc.modeling_rtc import RTCProcessor

    config = RTCConfig(prefix_attention_schedule=RTCAttentionSchedule.ZEROS, execution_horizon=4)
    processor = RTCProcessor(config)

    def step(layer: nn.Module, x: torch.Tensor, previous: torch.Tensor, delay: torch.Tensor) -> torch.Tensor:
        return processor.denoise_step(x, previous, delay, torch.tensor(0.6), layer)

    inputs = (torch.randn(2, 6, 3), torch.randn(2, 5, 3), torch.tensor(2))
    return Model(Function(nn.Linear(3, 3), step), inputs)


def lightning_module() -> Model:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 3)
            self.seen = 0

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/scaled", loss.item() * 100)
            self.seen += len(x)
            return {"loss": loss, "accuracy": (self.net(x).argmax(-1) == y).float().mean()}

    batch = (torch.randn(4, 6), torch.arange(4) % 3)
    return Model(Classifier(), (batch, 0), {"method": "training_step"})


def maml() -> Model:
    without_init("learn2learn")
    without_init("learn2learn.algorithms")
    from learn2learn.algorithms.maml import MAML

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        learner = model.clone()
        learner.adapt(F.mse_loss(learner(x[:4]), y[:4]))
        learner.adapt(F.mse_loss(learner(x[:4]), y[:4]))
        return F.mse_loss(learner(x[4:]), y[4:])

    module = MAML(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), lr=0.1)
    return Model(Function(module, step), (torch.randn(8, 3), torch.randn(8, 1)))


def litgpt_moe() -> Model:
    from litgpt import GPT, Config

    config = Config(
        block_size=16, vocab_size=40, padded_vocab_size=40, n_layer=1, n_head=2, n_embd=16, mlp_class_name="LLaMAMoE",
        norm_class_name="RMSNorm", intermediate_size=16, moe_intermediate_size=16, n_expert=4, n_expert_per_token=2,
        rotary_percentage=1.0, bias=False,
    )  # fmt: skip
    return Model(GPT(config), (torch.randint(0, 40, (2, 8)),))


def megabyte() -> Model:
    from MEGABYTE_pytorch import MEGABYTE

    module = MEGABYTE(
        num_tokens=16, dim=(16, 8), depth=(1, 1), max_seq_len=(8, 4), dim_head=8, heads=2, flash_attn=False
    )
    return Model(module, (torch.randint(1, 16, (2, 30)),), {"module_kwargs": {"return_loss": True}})


def recurrent_memory() -> Model:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    module = RecurrentMemoryTransformer(
        dim=16,
        num_tokens=20,
        depth=2,
        num_memory_tokens=3,
        seq_len=8,
        causal=True,
        dim_head=8,
        heads=2,
        use_xl_memories=True,
    )

    def step(net: nn.Module, x: torch.Tensor) -> tuple:
        memories = None
        xl_memories = None
        loss = x.new_zeros((), dtype=torch.float32)
        for part in x.split(8, 1):
            logits, memories, xl_memories = net(part, memories, xl_memories=xl_memories)
            memories = memories.detach()
            loss = loss + F.cross_entropy(logits.mT, part)
        return loss, memories

    return Model(Function(module, step), (torch.randint(0, 20, (2, 16)),))


def k_diffusion_solver() -> Model:
    from k_diffusion.sampling import sample_dpm_adaptive

    def sampled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        denoiser = lambda x, sigma: x - torch.tanh(layer(x)) * sigma.view(-1, 1)  # noqa: E731
        return sample_dpm_adaptive(denoiser, x, 0.1, 2.0, disable=True, order=2, rtol=0.5, atol=0.5)

    return Model(Function(nn.Linear(3, 3), sampled), (torch.randn(2, 3),))


AGENTS = {
    "ACT policy": act_policy,
    "TDMPC": tdmpc,
    "SmolVLA action expert": smolvla,
    "Real-time chunking": real_time_chunking,
    "LightningModule training_step": lightning_module,
    "MAML inner loop": maml,
    "LitGPT MoE": litgpt_moe,
    "MEGABYTE": megabyte,
    "Recurrent memory transformer": recurrent_memory,
    "k-diffusion DPM solver": k_diffusion_solver,
}
"""Name in the list -> the function that builds it."""
