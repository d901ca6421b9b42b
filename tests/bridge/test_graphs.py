"""Neighbour lists of changing length, padded to a few shapes: the same energies and forces, and few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge

CUTOFF = 2.5
AXES = {
    "positions": ("atoms", None),
    "kinds": ("atoms",),
    "batch": ("atoms",),
    "edges": (None, "edges"),
    "shifts": ("edges", None),
    "cell": ("graphs", None),
}
FILLS = {"edges": "atoms", "batch": "graphs", "shifts": 2 * CUTOFF}


class Potential(nn.Module):
    """Two rounds of messages within a cutoff, with energies of graphs and forces from inside."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(2, width)
        self.message = nn.Linear(width + 4, width)
        self.energy = nn.Linear(width, 1)

    def forward(self, positions, kinds, batch, edges, shifts, graphs):
        positions.requires_grad_()
        vectors = positions[edges[1]] - positions[edges[0]] + shifts
        distances = vectors.norm(dim=-1, keepdim=True)
        envelope = torch.where(distances < CUTOFF, (1 - distances / CUTOFF) ** 2, 0)
        radial = torch.exp(-((distances - torch.arange(4) / 2) ** 2)) * envelope
        h = self.embedding(kinds)
        for _ in range(2):
            messages = self.message(torch.cat([h[edges[0]], radial], -1)) * envelope
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, edges[1], messages))
        energies = torch.zeros(len(graphs)).index_add(0, batch, self.energy(h)[:, 0])
        return energies, -torch.autograd.grad(energies.sum(), positions)[0]


def crystal(seed, atoms=6):
    """Returns two periodic structures as one graph."""
    generator = np.random.default_rng(seed)
    parts = []
    for number in range(2):
        cell = 3 + generator.random(3)
        positions = generator.random((atoms - number, 3)) * cell
        steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3)
        vectors = positions[None, :, None] + steps * cell - positions[:, None, None]
        distances = np.linalg.norm(vectors, axis=-1)
        i, j, s = np.nonzero((distances < CUTOFF) & (distances > 0))
        parts.append((positions, cell, np.stack([i, j]) + atoms * number, steps[s] * cell))
    positions, cells, edges, shifts = zip(*parts, strict=True)
    return {
        "positions": np.concatenate(positions).astype(np.float32),
        "kinds": np.arange(2 * atoms - 1) % 2,
        "batch": np.repeat([0, 1], [atoms, atoms - 1]),
        "edges": np.concatenate(edges, 1),
        "shifts": np.concatenate(shifts).astype(np.float32),
        "cell": np.stack(cells).astype(np.float32),
    }


def test_padded_graphs_have_the_energies_and_forces_of_unpadded_ones_in_few_programs():
    torch.manual_seed(0)
    module = Potential()
    fn = bridge.export(module)
    graphs = [crystal(seed) for seed in range(50)]
    padding = bridge.GraphPadding(AXES, (), FILLS)
    shapes = bridge.shapes_of(map(padding.counts, graphs), number=3)
    padding = bridge.GraphPadding(AXES, shapes, FILLS)
    assert len({graph["edges"].shape for graph in graphs}) > 10

    @jax.jit
    def predicted(params, arrays):
        names = ("positions", "kinds", "batch", "edges", "shifts", "cell")
        return fn(params, {}, *(arrays[name] for name in names))[0]

    for graph in graphs:
        padded, masks = padding(graph)
        energies, forces = predicted(fn.params, padded)
        there = module(*(torch.from_numpy(array) for array in graph.values()))
        np.testing.assert_allclose(energies[masks["graphs"]], there[0].detach(), rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(forces[masks["atoms"]], there[1], rtol=1e-5, atol=1e-5)
        assert not forces[~masks["atoms"]].any()
    assert predicted._cache_size() == len(shapes) <= 3


def test_padding_of_several_entries_for_an_element():
    axes = {"n": ("graphs",), "cell": ("graphs", None), "edges": (None, "edges")}
    padding = bridge.GraphPadding(axes, ({"graphs": 4, "edges": 5},), {"cell": 1.5})
    padded, masks = padding(
        {"n": np.array([3, 2]), "cell": np.zeros((6, 3)), "edges": np.zeros((2, 0)), "name": "salt"}
    )
    np.testing.assert_array_equal(padded["cell"], np.repeat([0, 1.5], 6)[:, None].repeat(3, 1))
    np.testing.assert_array_equal(masks["graphs"], [True, True, False, False])
    assert padded["edges"].shape == (2, 5) and not masks["edges"].any()
    assert padded["n"].tolist() == [3, 2, 0, 0] and padded["name"] == "salt"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 3)), "y": np.zeros(4)}, "more than the largest shape, {'atoms': 4}; add a larger one"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, "x has shape .3,., and 2 axes"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(3)}, "y has shape .3,., which is not a multiple of 2 atoms"),
    ],
)
def test_what_cannot_be_padded_is_refused(arrays, message):
    padding = bridge.GraphPadding({"x": ("atoms", None), "y": ("atoms",)}, ({"atoms": 4},))
    with pytest.raises(bridge.BridgeError, match=message):
        padding(arrays)
    assert padding({"x": jnp.ones((2, 3)), "y": np.ones(2)})[0]["x"].shape == (4, 3)
