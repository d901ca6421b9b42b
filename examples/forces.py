"""An interatomic potential trained on energies and forces: forces are the gradient of the network's energy."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

ATOMS = 6


class Potential(nn.Module):
    """The energy of a pair is a network of Gaussians of the distance."""

    def __init__(self, width=64):
        super().__init__()
        self.centers = nn.Buffer(torch.linspace(0.8, 4.0, 24))
        self.pair_energy = nn.Sequential(
            nn.Linear(24, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, positions):
        i, j = torch.triu_indices(ATOMS, ATOMS, offset=1)
        distances = (positions[:, i] - positions[:, j]).norm(dim=-1)
        features = torch.exp(-10 * (distances[..., None] - self.centers) ** 2)
        return self.pair_energy(features).sum((1, 2))


def model():
    torch.manual_seed(0)
    return Potential()


def morse_energy(positions):
    i, j = torch.triu_indices(ATOMS, ATOMS, offset=1)
    distances = (positions[:, i] - positions[:, j]).norm(dim=-1)
    return ((1 - torch.exp(-1.5 * (distances - 1.3))) ** 2 - 1).sum(1)


def clusters(seed, size):
    """Returns octahedra whose atoms are displaced, with their energies and forces."""
    generator = torch.Generator().manual_seed(seed)
    octahedron = torch.cat([torch.eye(3), -torch.eye(3)])
    positions = octahedron + 0.15 * torch.randn(size, ATOMS, 3, generator=generator)
    positions.requires_grad_()
    energies = morse_energy(positions)
    forces = -torch.autograd.grad(energies.sum(), positions)[0]
    return TensorDataset(positions.detach(), energies.detach(), forces)


def train_data():
    return clusters(seed=1, size=1024)


def test_data():
    return clusters(seed=2, size=128)


def loss(model, batch):
    positions, energies, forces = batch
    positions = positions.detach().requires_grad_()
    predicted = model(positions)
    predicted_forces = -torch.autograd.grad(predicted.sum(), positions, create_graph=True)[0]
    force_error = (predicted_forces - forces).square().sum((1, 2))
    energy_error = (predicted - energies).square()
    metrics = {"force_mae": ((predicted_forces - forces).abs().mean((1, 2)).sum(), len(energies))}
    return (0.1 * energy_error + force_error).sum(), len(energies), metrics


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3, amsgrad=True)


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
