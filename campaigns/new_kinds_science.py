"""Builders of the models of the work list for images, atoms, graphs, tables and equations."""

# pyright: reportMissingImports=false, reportCallIssue=false
# The packages are in an environment of their own.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from campaigns.new_kinds_calls import Function, Model, without


def tabpfn() -> Model:
    from tabpfn.architectures.tabpfn_v2 import TabPFNV2, TabPFNV2Config

    config = TabPFNV2Config(emsize=16, nlayers=2, nhead=2, max_num_classes=3, num_buckets=4, seed=1)
    x = torch.randn(9, 1, 4)
    x[2, 0, 1] = float("nan")
    y = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]).view(6, 1)
    return Model(TabPFNV2(config=config, n_out=3), (x, y), {"steps": 1})


def sam2_memory() -> Model:
    from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
    from sam2.modeling.sam.transformer import RoPEAttention

    size = {"embedding_dim": 16, "num_heads": 1, "downsample_rate": 1, "dropout": 0.0, "feat_sizes": (4, 4)}
    layer = MemoryAttentionLayer(
        activation="relu", dim_feedforward=16, dropout=0.0, pos_enc_at_attn=False, d_model=16,
        pos_enc_at_cross_attn_keys=True, pos_enc_at_cross_attn_queries=False, self_attention=RoPEAttention(**size),
        cross_attention=RoPEAttention(**size, rope_k_repeat=True, kv_in_dim=8),
    )  # fmt: skip

    class Track(nn.Module):
        """Frames, each with the memories of those before; an object below the threshold leaves no memory."""

        def __init__(self):
            super().__init__()
            self.attention = MemoryAttention(16, True, layer, 1)
            self.encode = nn.Linear(16, 8)
            self.pointer = nn.Linear(16, 8)
            self.score = nn.Linear(16, 1)
            self.no_object = nn.Parameter(torch.randn(8) * 0.02)

        def forward(self, frames: torch.Tensor, places: torch.Tensor) -> Any:
            bank = [self.encode(frames[0])]
            pointers = [self.pointer(frames[0].mean(0, keepdim=True))]
            scores = []
            for frame in frames[1:]:
                memory = torch.cat([*bank[-2:], *pointers], 0)
                place = torch.cat([places] * len(bank[-2:]) + [torch.zeros_like(p) for p in pointers], 0)
                frame = self.attention(frame, memory, torch.zeros_like(frame), place, num_obj_ptr_tokens=len(pointers))
                score = self.score(frame.mean(0))
                appears = score > 0
                scores.append(score)
                bank.append(self.encode(frame))
                pointers.append(torch.where(appears, self.pointer(frame.mean(0)), self.no_object)[None])
            return bank[-1], torch.stack(scores)

    return Model(Track(), (torch.randn(3, 16, 2, 16), torch.randn(16, 2, 8)), {"steps": 1})


def _yolo() -> Any:
    from ultralytics.nn.modules import Detect

    head = Detect(nc=3, reg_max=4, ch=(8, 8))
    head.stride = torch.tensor([8.0, 16.0])
    return head


def yolo_head() -> Model:
    return Model(_yolo(), ([torch.randn(1, 8, 4, 4), torch.randn(1, 8, 2, 2)],), {"train": False, "steps": 1})


def yolo_loss() -> Model:
    from ultralytics.utils.loss import v8DetectionLoss

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.ModuleList([_yolo()])
            self.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
            self.criterion = v8DetectionLoss(self)

        def forward(self, features: list, batch: dict) -> Any:
            return self.criterion(self.model[0](features), batch)

    batch = {
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
        "cls": torch.tensor([[0.0], [2.0], [1.0]]),
        "bboxes": torch.tensor([[0.4, 0.4, 0.6, 0.6], [0.7, 0.6, 0.4, 0.5], [0.5, 0.5, 0.7, 0.7]]),
    }
    features = [torch.randn(2, 8, 4, 4), torch.randn(2, 8, 2, 2)]
    return Model(Detector(), (features, batch), {"train": True, "steps": 1})


def targets_in_rows(_loss: Any, targets: torch.Tensor, batch_size: int, scale_tensor: torch.Tensor) -> torch.Tensor:
    """Gives each image a row for every target, with zeros for those of other images; the package counts them."""
    from ultralytics.utils.ops import xywh2xyxy

    own = targets[:, 0] == torch.arange(batch_size)[:, None]
    rows = torch.where(own.unsqueeze(-1), targets[:, 1:], 0)
    return torch.cat([rows[..., :1], xywh2xyxy(rows[..., 1:5] * scale_tensor)], -1)


def retinanet_loss() -> Model:
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.retinanet import RetinaNet

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    anchors = AnchorGenerator(((16, 24),), ((0.5, 1.0),))
    net = RetinaNet(backbone, 3, min_size=32, max_size=32, anchor_generator=anchors)
    boxes = torch.tensor([[2.0, 3.0, 20.0, 24.0], [10.0, 8.0, 28.0, 30.0]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([1, 2])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)},
    ]
    images = [torch.rand(3, 32, 32), torch.rand(3, 32, 32)]
    return Model(net, (images, targets), {"train": True, "steps": 1})


class SparseUNet(nn.Module):
    """Voxels of points: coordinates by `unique` with inverse, means of points, a coarser level, and back."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.down = nn.Linear(8, 8)
        self.up = nn.Linear(16, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        voxels, inverse = torch.unique((points * 4).floor().long(), dim=0, return_inverse=True)
        features = torch.zeros(len(voxels), 8).index_add(0, inverse, self.enter(points))
        counts = torch.zeros(len(voxels)).index_add(0, inverse, torch.ones(len(points)))
        features = F.relu(features / counts.unsqueeze(1))
        coarse, parents = torch.unique(voxels // 2, dim=0, return_inverse=True)
        pooled = torch.zeros(len(coarse), 8).index_add(0, parents, self.down(features))
        return self.up(torch.cat([features, F.relu(pooled)[parents]], 1))[inverse]


def sparse_unet() -> Model:
    return Model(SparseUNet(), (torch.rand(12, 3),), {"steps": 1})


class Splats(nn.Module):
    """Gaussians on a plane, their loss with SSIM, and the decisions of densification."""

    grad_norm: torch.Tensor
    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.means = nn.Parameter(torch.rand(6, 2) * 16)
        self.scales = nn.Parameter(torch.zeros(6))
        self.colors = nn.Parameter(torch.rand(6, 3))
        self.opacities = nn.Parameter(torch.randn(6))
        self.register_buffer("grad_norm", torch.zeros(6))
        self.register_buffer("seen", torch.ones(6))

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        from torchmetrics.functional.image import structural_similarity_index_measure

        place = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="xy"), -1)
        far = (place[:, :, None] - self.means).square().sum(-1)
        alpha = torch.sigmoid(self.opacities) * torch.exp(-far / (2 * self.scales.exp() ** 2))
        through = torch.cumprod(F.pad(1 - alpha[..., :-1], (1, 0), value=1.0), -1)
        image = ((alpha * through).unsqueeze(-1) * self.colors).sum(2).permute(2, 0, 1)[None]
        ssim = structural_similarity_index_measure(image, target, data_range=1.0, kernel_size=5, sigma=1.0)
        loss = 0.8 * (image - target).abs().mean() + 0.2 * (1 - ssim)
        with torch.no_grad():
            visible = alpha.amax((0, 1)) > 1 / 255
            self.seen[visible] += 1
            grown = (self.grad_norm / self.seen > 0.0002) & (self.scales.exp() > 1.0)
            if grown.sum() > 0:
                loss = loss + 0.0 * grown.sum()
        return {"loss": loss, "grown": grown.sum(), "pruned": (torch.sigmoid(self.opacities) < 0.1).sum()}


def splats() -> Model:
    return Model(Splats(), (torch.rand(1, 3, 16, 16),), {"steps": 1})


def wide_and_deep() -> Model:
    with without("spacy", "spacy.symbols", "gensim", "gensim.utils"):
        from pytorch_widedeep.losses import FocalLoss
        from pytorch_widedeep.models import TabMlp, Wide, WideDeep

    wide = Wide(6, 1)
    deep = TabMlp(
        column_idx={"a": 0, "b": 1, "c": 2}, cat_embed_input=[("a", 4, 3), ("b", 5, 3)], continuous_cols=["c"],
        mlp_hidden_dims=[8, 4],
    )  # fmt: skip
    loss = FocalLoss()

    def step(net: nn.Module, wide: torch.Tensor, table: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(torch.sigmoid(net({"wide": wide, "deeptabular": table})), target)

    table = torch.stack([torch.arange(4.0) % 4 + 1, torch.arange(4.0) % 5 + 1, torch.randn(4)], 1)
    args = (torch.tensor([[1, 4], [2, 5], [3, 6], [1, 5]]), table, (torch.arange(4) % 2).float().unsqueeze(1))
    return Model(Function(WideDeep(wide, deep), step), args)


def _atoms() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.1, 0.0], [-0.2, 0.95, 0.1], [0.4, -0.3, 1.1]])
    i, j = torch.where(~torch.eye(4, dtype=torch.bool))
    return torch.tensor([8, 1, 1, 6]), positions, i, j


def schnet() -> Model:
    with without("matscipy", "matscipy.neighbours", "dirsync", "fasteners"):
        import schnetpack
        from schnetpack import properties

    radial = schnetpack.nn.GaussianRBF(n_rbf=6, cutoff=3.0)
    representation = schnetpack.representation.SchNet(8, 2, radial, schnetpack.nn.CosineCutoff(3.0))
    net = schnetpack.model.NeuralNetworkPotential(
        representation,
        input_modules=[schnetpack.atomistic.PairwiseDistances()],
        output_modules=[schnetpack.atomistic.Atomwise(n_in=8, output_key="energy"), schnetpack.atomistic.Forces()],
    )
    numbers, positions, i, j = _atoms()
    inputs = {
        properties.Z: numbers, properties.R: positions, properties.idx_i: i, properties.idx_j: j,
        properties.offsets: torch.zeros(len(i), 3), properties.idx_m: torch.zeros(4, dtype=torch.long),
        properties.n_atoms: torch.tensor([4]), properties.cell: torch.zeros(1, 3, 3),
        properties.pbc: torch.zeros(3, dtype=torch.bool),
    }  # fmt: skip
    return Model(net, (inputs,), {"steps": 1})


def nequip() -> Model:
    from e3nn import nn as e3nn_nn
    from e3nn import o3

    class Potential(nn.Module):
        def __init__(self):
            super().__init__()
            self.sh = o3.Irreps.spherical_harmonics(1)
            middle = o3.Irreps("4x0e+2x1o")
            self.embedding = nn.Embedding(10, 4)
            self.product = o3.FullyConnectedTensorProduct("4x0e", self.sh, middle, shared_weights=False)
            self.radial = e3nn_nn.FullyConnectedNet([4, 8, self.product.weight_numel], torch.nn.functional.silu)
            self.gate = o3.Linear(middle, "4x0e")
            self.out = nn.Linear(4, 1)

        def forward(self, numbers, positions, i, j):
            positions = positions.requires_grad_(True)
            edges = positions[i] - positions[j]
            basis = torch.exp(-((edges.norm(dim=-1, keepdim=True) - torch.linspace(0, 3, 4)) ** 2))
            harmonics = o3.spherical_harmonics(self.sh, edges, True, "component")
            messages = self.product(self.embedding(numbers)[j], harmonics, self.radial(basis))
            nodes = torch.zeros(len(numbers), messages.shape[1]).index_add(0, i, messages)
            energy = self.out(torch.tanh(self.gate(nodes))).sum()
            forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
            return energy, forces

    return Model(Potential(), _atoms(), {"steps": 1})


def crnn() -> Model:
    from doctr.models.recognition.crnn.pytorch import CRNN

    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d((8, 2)), nn.MaxPool2d((2, 2)))
    net = CRNN(features, "abcde", rnn_units=8, input_shape=(3, 16, 64))
    return Model(net, (torch.rand(2, 3, 16, 64), ["abca", "de"]), {"train": True, "steps": 1})


class Tracker(nn.Module):
    """SiamRPN: a template correlated with a search image, and the loss on anchors that are marked."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
        self.kernel = nn.Conv2d(8, 8, 3)
        self.search = nn.Conv2d(8, 8, 3)
        self.head = nn.Conv2d(8, 2 * 3, 1)
        self.boxes = nn.Conv2d(8, 4 * 3, 1)

    def _depthwise(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        batch, channels = kernel.shape[:2]
        out = F.conv2d(
            x.reshape(1, -1, *x.shape[2:]), kernel.reshape(-1, 1, *kernel.shape[2:]), groups=batch * channels
        )
        return out.reshape(batch, channels, *out.shape[2:])

    @staticmethod
    def _cross_entropy(scores: torch.Tensor, label: torch.Tensor, select: torch.Tensor) -> torch.Tensor | int:
        if len(select.size()) == 0 or select.size() == torch.Size([0]):
            return 0
        return F.nll_loss(torch.index_select(scores, 0, select), torch.index_select(label, 0, select))

    def forward(self, template: torch.Tensor, image: torch.Tensor, label: torch.Tensor, offsets: torch.Tensor) -> Any:
        x = self._depthwise(self.search(self.backbone(image)), self.kernel(self.backbone(template)))
        scores = F.log_softmax(self.head(x).unflatten(1, (2, 3)), 1).movedim(1, -1).reshape(-1, 2)
        flat = label.reshape(-1)
        positive = flat.eq(1).nonzero().squeeze(1)
        negative = flat.eq(0).nonzero().squeeze(1)
        loss = self._cross_entropy(scores, flat, positive) * 0.5 + self._cross_entropy(scores, flat, negative) * 0.5
        boxes = (self.boxes(x).unflatten(1, (4, 3)) - offsets).abs().sum(1)
        if positive.numel() == 0:
            return loss, boxes.sum() * 0
        return loss, (boxes * (label == 1)).sum() / len(positive)


def siam_rpn() -> Model:
    label = torch.randint(-1, 2, (2, 3, 5, 5))
    args = (torch.rand(2, 3, 13, 13), torch.rand(2, 3, 21, 21), label, torch.randn(2, 4, 3, 5, 5))
    return Model(Tracker(), args, {"steps": 1})


def pyro_vae() -> Model:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 2 * 3)
            self.decoder = nn.Linear(3, 6)

        def model(self, x: torch.Tensor) -> None:
            pyro.module("decoder", self.decoder)
            with pyro.plate("data", len(x)):
                z = pyro.sample("latent", dist.Normal(torch.zeros(len(x), 3), 1.0).to_event(1))
                pyro.sample("obs", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

        def guide(self, x: torch.Tensor) -> None:
            pyro.module("encoder", self.encoder)
            with pyro.plate("data", len(x)):
                mean, scale = self.encoder(x).chunk(2, -1)
                pyro.sample("latent", dist.Normal(mean, scale.exp()).to_event(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Trace_ELBO().differentiable_loss(self.model, self.guide, x)

    return Model(VAE(), ((torch.rand(4, 6) > 0.5).float(),), {"train": True})


def pinn() -> Model:
    with mock.patch.dict("os.environ", {"DDE_BACKEND": "pytorch"}):
        import deepxde

    net = deepxde.nn.FNN([2, 8, 8, 1], "tanh", "Glorot normal")

    def step(net: nn.Module, points: torch.Tensor, candidates: torch.Tensor) -> tuple:
        def residual(x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_(True)
            u = net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            du_x, du_t = du[:, :1], du[:, 1:]
            du_xx = torch.autograd.grad(du_x.sum(), x, create_graph=True)[0][:, :1]
            return du_t + u * du_x - 0.01 * du_xx

        worst = residual(candidates).detach().abs().squeeze(1).topk(3).indices
        points = torch.cat([points, candidates[worst].detach()])
        error = residual(points)
        weight = error.detach().abs() / error.detach().abs().mean()
        return (weight * error.square()).mean(), worst

    return Model(Function(net, step), (torch.rand(6, 2), torch.rand(8, 2)), {"steps": 1})


SCIENCE = {
    "TabPFN v2": tabpfn,
    "SAM 2 memory attention": sam2_memory,
    "YOLOv8 detect head": yolo_head,
    "YOLOv8 task-aligned loss": yolo_loss,
    "RetinaNet loss": retinanet_loss,
    "Minkowski-free sparse U-Net": sparse_unet,
    "Gaussian splat losses": splats,
    "Wide and deep": wide_and_deep,
    "SchNetPack atomwise": schnet,
    "NequIP": nequip,
    "CRNN OCR": crnn,
    "SiamRPN tracker": siam_rpn,
    "Pyro-style VAE": pyro_vae,
    "PINN with residual sampling": pinn,
}
"""Name in the list -> the function that builds it."""
