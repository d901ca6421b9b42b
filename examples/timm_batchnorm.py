"""A CNN of timm with BatchNorm: stripes in four directions, under noise. Needs timm."""

import math

import timm
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

DIRECTIONS = 4


def model():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=DIRECTIONS, act_layer=torch.nn.SiLU)


def stripes(seed, size):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(DIRECTIONS, (size,), generator=generator)
    angles = labels * math.pi / DIRECTIONS
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    waves = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
    images = torch.sin(waves)[:, None].repeat(1, 3, 1, 1)
    return TensorDataset(images + 4 * torch.randn(images.shape, generator=generator), labels)


def train_data():
    return stripes(seed=1, size=1024)


def test_data():
    return stripes(seed=2, size=256)


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), {"accuracy": (logits.argmax(1) == labels).float().mean()}


def optimizer(model):
    """Biases and the scales of BatchNorm do not decay."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
