"""The network that every architecture applies: a stack of blocks, each mixing positions and then channels."""

from torch import nn

from models_torch.config import ArchitectureConfig
from models_torch.grid_convolution import GridConvolution
from models_torch.layers import Attention, CosSin, Latent, SwiGLU, rms_norm
from models_torch.local_attention import LocalAttention


class Block(nn.Module):
    """Mixes positions (by attention, an MLP over positions, or a convolution), then channels; with post-norm."""

    def __init__(self, config: ArchitectureConfig):
        super().__init__()
        self.config = config
        if config.mlp_t:
            self.mlp_t = SwiGLU(config.positions, config.expansion, config.mlp_multiple_of)
        elif config.convolution_window:
            self.conv = convolution(config)
        else:
            self.self_attn = attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.mlp_multiple_of)

    def forward(self, x: Latent, cos_sin: CosSin | None) -> Latent:
        epsilon = self.config.rms_norm_eps
        if self.config.mlp_t:
            # In the published code, this norm is also over positions, not over channels.
            return normed_mlp(mix_positions(x, self.mlp_t), self.mlp, epsilon, dim=1)
        if self.config.convolution_window:
            return normed_mlp(x + self.conv(x, cos_sin), self.mlp, epsilon)
        return normed_mlp(mix_by_attention(x, self.self_attn, cos_sin), self.mlp, epsilon)


def mix_positions(x: Latent, mlp: SwiGLU) -> Latent:
    """Returns the first half of a block without attention, before its norm: `x` plus its MLP over positions."""
    return x + mlp.along_positions(x)


def mix_by_attention(x: Latent, attention: Attention, cos_sin: CosSin | None) -> Latent:
    """Returns the first half of a block with attention, before its norm: `x` plus its attention."""
    return x + attention(x, cos_sin)


def normed_mlp(x: Latent, mlp: SwiGLU, epsilon: float, dim: int = -1) -> Latent:
    """Returns the second half of a block: `x` is normed over `dim`; its MLP is added, and the sum is normed."""
    x = rms_norm(x, epsilon, dim)
    return rms_norm(x + mlp(x), epsilon)


def attention(config: ArchitectureConfig) -> Attention:
    """Returns attention over all positions, or within `attention_window` if it is set."""
    sizes = config.hidden_size, config.head_dim, config.num_heads
    if not config.attention_window:
        return Attention(*sizes, config.num_heads)
    return LocalAttention(
        *sizes, window=config.attention_window, side=config.side, puzzle_positions=config.puzzle_positions
    )


def convolution(config: ArchitectureConfig) -> GridConvolution:
    """Returns the convolution over the cells of a square grid with windows of `convolution_window`."""
    return GridConvolution(
        config.hidden_size,
        window=config.convolution_window,
        side=config.side,
        puzzle_positions=config.puzzle_positions,
    )


class ReasoningModule(nn.Module):
    """A stack of blocks that computes the update of a latent."""

    def __init__(self, config: ArchitectureConfig, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(num_layers))

    def forward(self, x: Latent, cos_sin: CosSin | None) -> Latent:
        for layer in self.layers:
            x = layer(x, cos_sin)
        return x
