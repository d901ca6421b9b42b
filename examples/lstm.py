"""An LSTM that forecasts a series: the sum of two waves and noise."""

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 48


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.lstm = nn.LSTM(1, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 1)

    def forward(self, series):
        hidden, _ = self.lstm(series[..., None])
        return self.head(hidden)[..., 0]


def model():
    torch.manual_seed(0)
    return Forecaster()


def waves(seed, size):
    """Returns series `[size, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    periods = 4 + 12 * torch.rand(2, size, 1, generator=generator)
    phases = 6.28 * torch.rand(2, size, 1, generator=generator)
    series = torch.sin(6.28 * torch.arange(LENGTH + 1.0) / periods + phases).sum(0)
    return series + 0.05 * torch.randn(series.shape, generator=generator)


def train_data():
    return waves(seed=1, size=1024)


def test_data():
    return waves(seed=2, size=128)


def loss(model, series):
    predicted = model(series[:, :-1])
    following = series[:, 1:]
    return F.mse_loss(predicted, following), {"absolute_error": (predicted - following).abs().mean()}


def optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)


def schedule(optimizer):
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=380)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[20])
