"""Builders of the models of the work list: small, with random weights, of the packages' own modules."""

# pyright: reportMissingImports=false, reportCallIssue=false
# The packages are in an environment of their own.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from campaigns.new_kinds_agents import AGENTS
from campaigns.new_kinds_calls import Function, Model
from campaigns.new_kinds_science import SCIENCE, targets_in_rows
from campaigns.new_kinds_speech import SPEECH


def accuracy_and_f1() -> Model:
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    def step(layer: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = layer(x)
        return {
            "loss": F.cross_entropy(scores, target),
            "accuracy": multiclass_accuracy(scores, target, num_classes=5),
            "f1": multiclass_f1_score(scores, target, num_classes=5),
        }

    return Model(Function(nn.Linear(8, 5), step), (torch.randn(12, 8), torch.arange(12) % 5))


def psnr_and_ssim() -> Model:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    def step(layer: nn.Module, x: torch.Tensor) -> tuple:
        y = layer(x)
        return peak_signal_noise_ratio(y, x, data_range=1.0), structural_similarity_index_measure(y, x, data_range=1.0)

    return Model(Function(nn.Conv2d(1, 1, 3, padding=1), step), (torch.rand(2, 1, 24, 24),))


def tabm() -> Model:
    from tabm import TabM

    return Model(
        TabM.make(n_num_features=6, cat_cardinalities=[], d_out=2, k=4, n_blocks=2, d_block=16), (torch.randn(5, 6),)
    )


def _segment_anything() -> Any:
    from segment_anything import modeling

    return modeling


class SamHead(nn.Module):
    """The prompt encoder and the mask decoder."""

    def __init__(self, multimask: bool):
        super().__init__()
        sam = _segment_anything()
        transformer = sam.TwoWayTransformer(depth=1, embedding_dim=16, mlp_dim=16, num_heads=2)
        self.decoder = sam.MaskDecoder(transformer_dim=16, transformer=transformer, iou_head_hidden_dim=16)
        self.prompts = sam.PromptEncoder(16, (4, 4), (64, 64), 4)
        self.multimask = multimask

    def forward(self, image: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> Any:
        sparse, dense = self.prompts(points=(points, labels), boxes=None, masks=None)
        return self.decoder(image, self.prompts.get_dense_pe(), sparse, dense, self.multimask)


def sam_mask_decoder() -> Model:
    points = torch.rand(1, 3, 2) * 60
    return Model(SamHead(True), (torch.randn(1, 16, 4, 4), points, torch.tensor([[1, 0, -1]])))


def automatic_mask_scoring() -> Model:
    _segment_anything()
    from segment_anything.utils.amg import batched_mask_to_box, calculate_stability_score

    def scored(layer: nn.Module, x: torch.Tensor) -> tuple:
        masks = layer(x)
        return calculate_stability_score(masks, 0.0, 0.5), batched_mask_to_box(masks > 0), masks.mean()

    return Model(Function(nn.Conv2d(3, 4, 3, padding=1), scored), (torch.randn(1, 3, 16, 16),))


def _radius_graph(positions: torch.Tensor, r: float, **_settings: Any) -> torch.Tensor:
    """The edges within a radius; the package's own function is a compiled one."""
    near = torch.cdist(positions, positions) < r
    return (near & ~torch.eye(len(positions), dtype=torch.bool)).nonzero().t()


def _triplets(edges: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, ...]:
    """The pairs of edges k -> j -> i; the package's own function needs a compiled one."""
    source, target = edges
    follows = (target[None] == source[:, None]) & (source[None] != target[:, None])
    after, before = follows.nonzero(as_tuple=True)
    return target, source, target[after], source[after], source[before], before, after


def dimenet() -> Model:
    from torch_geometric.nn.models import dimenet as package

    package.radius_graph = _radius_graph
    package.triplets = _triplets
    net = package.DimeNet(8, 1, 1, 2, num_spherical=2, num_radial=2)
    return Model(net, (torch.randint(1, 5, (6,)), torch.randn(6, 3)), {"steps": 1})


class TemporalGraph(nn.Module):
    """A batch of events: the memory of their nodes, a loss on it, and the update by the events."""

    def __init__(self, memory: Any):
        super().__init__()
        self.memory = memory

    def forward(self, source: torch.Tensor, target: torch.Tensor, time: torch.Tensor, message: torch.Tensor) -> Any:
        nodes = torch.cat([source, target])
        memory, last = self.memory(nodes)
        self.memory.update_state(source, target, time, message)
        return memory.square().mean(), last


def temporal_graph_network() -> Model:
    from torch_geometric.nn import TGNMemory
    from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator

    memory = TGNMemory(5, 4, 6, 3, IdentityMessage(4, 6, 3), LastAggregator())
    events = (torch.tensor([0, 2]), torch.tensor([3, 4]), torch.tensor([5, 6]), torch.randn(2, 4))
    return Model(TemporalGraph(memory), events, {"train": True})


def transe() -> Model:
    from torch_geometric.nn import TransE

    heads, relations, tails = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), torch.tensor([3, 4, 5])
    return Model(TransE(6, 2, 8), (heads, relations, tails))


def loftr() -> Model:
    from kornia.feature import LoFTR

    module = LoFTR(pretrained=None).eval()
    image = torch.rand(1, 1, 64, 64)
    return Model(module, ({"image0": image, "image1": image.flip(-1)},), {"input_gradients": False, "steps": 1})


def leaky_neuron() -> Model:
    import snntorch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6)
            self.neuron = snntorch.Leaky(beta=0.9)

        def forward(self, x):
            state = self.neuron.init_leaky()
            spikes = []
            for step in x:
                spike, state = self.neuron(self.inner(step), state)
                spikes.append(spike)
            return torch.stack(spikes), state

    return Model(Net(), (torch.randn(5, 3, 4),))


def poincare_embeddings() -> Model:
    import geoopt

    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.ball = geoopt.PoincareBall()
            self.points = geoopt.ManifoldParameter(torch.randn(6, 3) * 0.1, manifold=self.ball)
            self.move = nn.Parameter(torch.randn(3) * 0.1)

        def forward(self, i, j):
            moved = self.ball.mobius_add(self.points[i], self.ball.expmap0(self.move))
            return self.ball.dist(moved, self.points[j])

    return Model(Embeddings(), (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])))


def neural_ode() -> Model:
    from torchdiffeq import odeint

    def solved(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return odeint(lambda t, y: torch.tanh(layer(y)) * t, x, torch.linspace(0, 1, 3))[-1]

    return Model(Function(nn.Linear(3, 3), solved), (torch.randn(2, 3),))


def facenet_mtcnn() -> Model:
    from facenet_pytorch.models.mtcnn import PNet
    from facenet_pytorch.models.utils.detect_face import generateBoundingBox

    def candidates(layer: nn.Module, x: torch.Tensor) -> Any:
        regression, scores = layer(x)
        boxes, images = generateBoundingBox(regression, scores[:, 1], 0.5, 0.6)
        return boxes.sum(0), images.sum()

    return Model(Function(PNet(pretrained=False), candidates), (torch.randn(1, 3, 32, 32),))


def cross_batch_memory() -> Model:
    from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory

    loss = CrossBatchMemory(ContrastiveLoss(), embedding_size=4, memory_size=16)
    parts = nn.ModuleList([nn.Linear(6, 4), loss])
    module = Function(parts, lambda parts, x, y: parts[1](parts[0](x), y))
    return Model(module, (torch.randn(8, 6), torch.arange(8) % 3))


def dino_loss() -> Model:
    from lightly.loss import DINOLoss

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 8)
            self.loss = DINOLoss(output_dim=8)

        def forward(self, a, b):
            teacher = [self.head(x).detach() for x in (a, b)]
            return self.loss(teacher, [self.head(x) for x in (a, b)], epoch=2)

    return Model(Step(), (torch.randn(4, 6), torch.randn(4, 6)))


def fourier_operator() -> Model:
    from neuralop.models import FNO

    net = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=1)
    return Model(net, (torch.randn(1, 1, 16, 16),))


def d_fine_decoder() -> Model:
    from transformers import DFineConfig, HGNetV2Config
    from transformers.models.d_fine.modeling_d_fine import DFineForObjectDetection

    backbone = HGNetV2Config(
        embedding_size=8, stem_channels=[3, 8, 8], hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1],
        stage_in_channels=[8, 16, 16, 32], stage_mid_channels=[8, 8, 8, 8], stage_out_channels=[16, 16, 32, 32],
        stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2], out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = DFineConfig(
        backbone_config=backbone, encoder_in_channels=[16, 32, 32], decoder_in_channels=[32, 32, 32], d_model=32,
        encoder_hidden_dim=32, encoder_ffn_dim=32, decoder_ffn_dim=32,
        decoder_layers=2, num_queries=8, encoder_attention_heads=2, decoder_attention_heads=2, num_denoising=0,
    )  # fmt: skip
    return Model(DFineForObjectDetection(config).eval(), (torch.randn(1, 3, 64, 64),), {"steps": 1})


class AdaptiveTime(nn.Module):
    """Adaptive computation time: steps until all have halted."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.halt = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple:
        state = x.new_zeros(len(x), 6)
        halted = x.new_zeros(len(x))
        out = torch.zeros_like(state)
        steps = 0
        while steps < 4 and not (halted >= 0.99).all():
            state = self.cell(x, state)
            share = torch.minimum(torch.sigmoid(self.halt(state)).squeeze(-1), 1 - halted)
            out = out + share.unsqueeze(-1) * state
            halted = halted + share
            steps += 1
        return out, halted


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if self.training and torch.rand(1) < 0.2 * (i + 1):
                continue
            x = x + F.relu(block(x))
        return x


class GuardedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.net(x), y)
        if torch.isnan(loss):
            loss = torch.zeros_like(loss)
        return loss


class RunningBest(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_buffer("best", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        if loss < self.best:
            self.get_buffer("best").copy_(loss.detach())
        return loss


class FakeQuantized(nn.Module):
    """Learned step size quantization, whose scale the first batch sets."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initialized == 0:
            self.scale.data.copy_(2 * x.detach().abs().mean() / 127**0.5)
            self.get_buffer("initialized").fill_(1)
        levels = (x / self.scale).clamp(-128, 127)
        return self.net((levels.round() - levels).detach() * self.scale + levels * self.scale)


class LateInteraction(nn.Module):
    """ColBERT's score: the largest similarity for each word of the query, without punctuation."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.skipped = {3, 7}

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        mask = [[word not in self.skipped and word != 0 for word in row] for row in document.cpu().tolist()]
        words = F.normalize(self.embedding(document), dim=-1) * torch.tensor(mask).unsqueeze(-1).float()
        return (F.normalize(self.embedding(query), dim=-1) @ words.mT).max(-1).values.sum(-1)


class RingAttention(nn.Module):
    """Attention in blocks of keys, by running maxima and sums."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        top = q.new_full((*q.shape[:-1], 1), -torch.finfo(q.dtype).max)
        total = torch.zeros_like(top)
        out = torch.zeros_like(q)
        for keys, values in zip(k.split(4, 1), v.split(4, 1), strict=True):
            scores = q @ keys.mT * 8**-0.5
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = (scores - new).exp()
            change = (top - new).exp()
            total = total * change + weights.sum(-1, keepdim=True)
            out = out * change + weights @ values
            top = new
        return out / total


def _plain(make: Callable[[], nn.Module], *shapes: tuple, train: bool | None = None) -> Model:
    settings = {} if train is None else {"train": train}
    return Model(make(), tuple(torch.randn(shape) for shape in shapes), settings)


MODELS: dict[str, Callable[[], Model]] = (
    AGENTS
    | SCIENCE
    | SPEECH
    | {
        "Accuracy and F1": accuracy_and_f1,
        "PSNR and SSIM": psnr_and_ssim,
        "TabM": tabm,
        "Segment Anything mask decoder": sam_mask_decoder,
        "Automatic mask scoring": automatic_mask_scoring,
        "DimeNet": dimenet,
        "Temporal graph network": temporal_graph_network,
        "TransE": transe,
        "Kornia LoFTR": loftr,
        "Leaky spiking neuron": leaky_neuron,
        "Poincare embeddings": poincare_embeddings,
        "Neural ODE adaptive": neural_ode,
        "Facenet MTCNN": facenet_mtcnn,
        "Cross-batch memory": cross_batch_memory,
        "DINO loss": dino_loss,
        "FNO2d": fourier_operator,
        "D-FINE decoder": d_fine_decoder,
        "Adaptive computation time": functools.partial(_plain, AdaptiveTime, (3, 4)),
        "Stochastic depth ResNet": functools.partial(_plain, StochasticDepth, (2, 4, 6, 6), train=True),
        "Loss with NaN guard": functools.partial(_plain, GuardedLoss, (3, 4), (3, 2)),
        "Running best in a buffer": functools.partial(_plain, RunningBest, (3, 4)),
        "LSQ fake quantization": functools.partial(_plain, FakeQuantized, (3, 4)),
        "ColBERT scoring": lambda: Model(
            LateInteraction(), (torch.randint(1, 20, (2, 4)), torch.randint(0, 20, (2, 6)))
        ),
        "Ring attention block": functools.partial(_plain, RingAttention, (2, 8, 8)),
    }
)
"""Name in the list -> the function that builds it."""

HELP: dict[str, dict[str, Any]] = {
    "Conformer encoder": {"known_inputs": "1"},
    "DimeNet": {"known_inputs": ".*"},
    "ECAPA-TDNN": {"known_inputs": "1"},
    "Emformer": {"known_inputs": "1"},
    "FastSpeech 2": {"known_inputs": ".*(lengths|durations)|[134579]"},
    "ColBERT scoring": {"known_inputs": "document|1"},
    "Pyro-style VAE": {"functions": {"pyro.util:warn_if_nan": lambda value, *args, **kwargs: value}},
    "RNN-T loss model": {"known_inputs": "1|3"},
    "Real-time chunking": {"known_inputs": "2"},
    "SiamRPN tracker": {"known_inputs": "2"},
    "Tacotron 2": {"known_inputs": "lengths|1"},
    "Temporal graph network": {"known_inputs": ".*", "static": ".*assoc"},
    "Wav2vec pretraining": {"known_inputs": "1|2"},
    "YOLOv8 task-aligned loss": {"functions": {"ultralytics.utils.loss:v8DetectionLoss.preprocess": targets_in_rows}},
}
"""Name -> arguments of `verify` that the message of a refusal names."""


def one_call_before(model: Model) -> Model:
    """The first call gives lazy buffers their sizes."""
    model.module(*model.args)
    return model


def plain_parameters(model: Model) -> Model:
    """Parameters of a class of their own become PyTorch's."""
    for module in model.module.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.data))
    return model


def no_early_stopping(model: Model) -> Model:
    """The decoder runs to its limit."""
    decoder: Any = model.module.get_submodule("decoder")
    decoder.decoder_early_stopping = False
    return model


EDITS: dict[str, Callable[[Model], Model]] = {
    "Leaky spiking neuron": one_call_before,
    "Poincare embeddings": plain_parameters,
    "Tacotron 2": no_early_stopping,
}
"""Name -> the change of the module that the message of a refusal names."""
