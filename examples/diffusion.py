"""A diffusion UNet: it predicts the noise in pictures of discs, drawn in the loss. Needs diffusers."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel

NOISE = DDPMScheduler(num_train_timesteps=100)


def model():
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
    )


def train_data():
    generator = torch.Generator().manual_seed(1)
    centers = 4 + 8 * torch.rand(1024, 2, 1, 1, generator=generator)
    radii = 2 + 2 * torch.rand(1024, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distances = torch.hypot(x - centers[:, 0], y - centers[:, 1])
    return torch.where(distances < radii, 1.0, -1.0)[:, None]


def loss(model, images):
    noise = torch.randn_like(images)
    steps = torch.randint(NOISE.config.num_train_timesteps, (len(images),))
    predicted = model(NOISE.add_noise(images, noise, steps), steps).sample
    return F.mse_loss(predicted, noise)


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
