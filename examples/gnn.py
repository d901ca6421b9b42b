"""A graph network: is a graph one ring or two? Needs torch-geometric."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

NODES = 12


class Network(nn.Module):
    def __init__(self, width=32, layers=4):
        super().__init__()
        sizes = [1] + [width] * layers
        self.layers = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(before, width), nn.ReLU(), nn.Linear(width, width)))
            for before in sizes[:-1]
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x, edges, graph, graphs):
        for layer in self.layers:
            x = layer(x, edges).relu()
        return self.head(global_add_pool(x, graph, size=graphs))


def model():
    torch.manual_seed(0)
    return Network()


def ring(nodes):
    return torch.stack([nodes, nodes.roll(1)])


def rings(seed, size):
    """Returns rings of 12 nodes, and pairs of rings with 3 and 9; one node of each graph is marked."""
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for label in torch.randint(2, (size,), generator=generator):
        nodes = torch.randperm(NODES, generator=generator)
        one_way = torch.cat([ring(nodes[:3]), ring(nodes[3:])], 1) if label else ring(nodes)
        edges = torch.cat([one_way, one_way.flip(0)], 1)
        marks = F.one_hot(nodes[0], NODES).float()[:, None]
        graphs.append(Data(x=marks, edge_index=edges, y=label))
    return graphs


def train_data():
    return rings(seed=1, size=1024)


def test_data():
    return rings(seed=2, size=256)


def collate(graphs):
    batch = Batch.from_data_list(graphs)
    return {"x": batch.x, "edges": batch.edge_index, "graph": batch.batch, "y": batch.y}


def loss(model, batch):
    logits = model(batch["x"], batch["edges"], batch["graph"], len(batch["y"]))
    return F.cross_entropy(logits, batch["y"]), {"accuracy": (logits.argmax(1) == batch["y"]).float().mean()}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
