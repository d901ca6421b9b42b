"""A GAN: two networks, two optimizers. The generator learns a ring of eight Gaussians.

The losses are applied in their order: the discriminator first, then the generator against the new discriminator.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

NOISE = 16


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def model():
    torch.manual_seed(0)
    return {"discriminator": network(2, 1), "generator": network(NOISE, 2)}


def train_data():
    generator = torch.Generator().manual_seed(1)
    angles = torch.randint(8, (2048,), generator=generator) * math.pi / 4
    centers = torch.stack([angles.cos(), angles.sin()], 1)
    return centers + 0.05 * torch.randn(centers.shape, generator=generator)


def loss(models, real):
    fake = models["generator"](torch.randn(len(real), NOISE))
    on_real = models["discriminator"](real)
    on_fake = models["discriminator"](fake.detach())
    discriminator = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
    generator = F.softplus(-models["discriminator"](fake)).mean()
    accuracy = ((on_real > 0).float().mean() + (on_fake < 0).float().mean()) / 2
    return {"discriminator": (discriminator, {"accuracy": accuracy}), "generator": generator}


def optimizer(models):
    return {name: torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, net in models.items()}
