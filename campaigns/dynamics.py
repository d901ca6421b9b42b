"""Dynamics of a published potential in one JAX program: 1 000 steps in a `lax.scan`, neighbour lists rebuilt in it.

    python -m campaigns.dynamics       # in an environment with SchNetPack, and JAX MD for its comparison

Prints the errors of positions beside PyTorch in float64, the drift of the energy, and what JAX MD and the program
without PyTorch compute.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The packages are in environments of their own.

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import export, lax

import bridge
from campaigns.potentials import painn, structure

CUTOFF = 4.5
SKIN = 0.6
EVERY = 10
"""Steps between two neighbour lists, in which no atom may move by half of the skin."""
EDGES = 512
TIME_STEP = 0.02
VELOCITIES = 10
"""Initial velocities from which the drift of the energy is measured."""

PROGRAM = """
import sys
import numpy as np
from jax import export
program, state = sys.argv[1:]
run = export.deserialize(bytearray(open(program, "rb").read()))
arrays = dict(np.load(state))
positions, velocities = arrays.pop("positions"), arrays.pop("velocities")
np.save(state + ".out.npy", np.asarray(run.call(arrays, positions, velocities)[0]))
assert "torch" not in sys.modules
"""


class Simulation:
    """Velocity Verlet of a PaiNN with unit masses; atoms and edges have one padding atom, in a graph of its own."""

    def __init__(self, fn, atoms):
        self.fn = fn
        self.count = len(atoms)
        self.cell = np.array(atoms.cell).astype(np.float32)
        steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3)
        self.images = (steps @ self.cell).astype(np.float32)
        self.numbers = np.append(atoms.numbers, 1)
        self.graphs = np.append(np.zeros(self.count, int), 1)

    def neighbours(self, positions):
        """Returns senders, receivers and shifts of a fixed number of edges, and the number of real ones."""
        vectors = positions[None, :, None] + self.images - positions[:, None, None]
        squared = jnp.square(vectors).sum(-1)
        near = (squared < (CUTOFF + SKIN) ** 2) & (squared > 1e-6)
        i, j, image = jnp.nonzero(near, size=EDGES, fill_value=-1)
        real = i >= 0
        shifts = jnp.where(real[:, None], jnp.asarray(self.images)[image], 2 * CUTOFF)
        return jnp.where(real, i, self.count), jnp.where(real, j, self.count), shifts, near.sum()

    def outputs(self, params, positions, neighbours):
        i, j, shifts, _ = neighbours
        inputs = {
            "_idx": np.arange(2),
            "_n_atoms": np.array([self.count, 1]),
            "_atomic_numbers": self.numbers,
            "_positions": jnp.concatenate([positions, jnp.zeros((1, 3))]),
            "_cell": np.stack([self.cell, self.cell]),
            "_idx_m": self.graphs,
            "_idx_i": i,
            "_idx_j": j,
            "_offsets": shifts,
        }
        outputs = self.fn(params, self.fn.buffers, inputs, train=False)[0]
        return outputs["energy"][0], outputs["forces"][: self.count]

    def run(self, params, positions, velocities, steps):
        """Returns positions and velocities at the end, total energies of all steps, and the largest number of edges."""

        def step(state, number):
            positions, velocities, forces, neighbours = state
            velocities = velocities + TIME_STEP / 2 * forces
            positions = positions + TIME_STEP * velocities
            neighbours = lax.cond(number % EVERY == 0, self.neighbours, lambda _: neighbours, positions)
            energy, forces = self.outputs(params, positions, neighbours)
            velocities = velocities + TIME_STEP / 2 * forces
            total = energy + jnp.square(velocities).sum() / 2
            return (positions, velocities, forces, neighbours), (total, neighbours[-1])

        neighbours = self.neighbours(positions)
        state = positions, velocities, self.outputs(params, positions, neighbours)[1], neighbours
        (positions, velocities, *_), (energies, edges) = lax.scan(step, state, jnp.arange(1, steps + 1))
        return positions, velocities, energies, edges.max()


def in_pytorch(module, call, dtype, velocities, steps):
    """Returns the positions and the total energies after each step of PyTorch's eager mode."""
    from ase.neighborlist import neighbor_list

    module = module.to(dtype)
    torch.set_default_dtype(dtype)
    given = call()[0][0]
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    atoms = structure()
    positions = cast["_positions"]
    velocities = velocities.to(dtype)

    def outputs(positions):
        atoms.positions = positions.numpy()
        i, j, shifts = neighbor_list("ijS", atoms, CUTOFF)
        offsets = torch.tensor(shifts @ np.array(atoms.cell), dtype=dtype)
        edges = {"_idx_i": torch.tensor(i), "_idx_j": torch.tensor(j), "_offsets": offsets}
        values = module({**cast, **edges, "_positions": positions.clone()})
        return values["energy"].detach().sum(), values["forces"].detach()

    forces = outputs(positions)[1]
    places, energies = [], []
    for _ in range(steps):
        velocities = velocities + TIME_STEP / 2 * forces
        positions = positions + TIME_STEP * velocities
        energy, forces = outputs(positions)
        velocities = velocities + TIME_STEP / 2 * forces
        places.append(positions.double().numpy())
        energies.append(float(energy + velocities.square().sum() / 2))
    return places, np.array(energies)


def without_pytorch(run, params, positions, velocities):
    """Returns the positions that the exported program computes in a process that has not imported PyTorch."""
    exported = export.export(jax.jit(run))(params, positions, velocities)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "dynamics.program"
        state = Path(folder) / "state.npz"
        program.write_bytes(exported.serialize())
        np.savez(state, positions=positions, velocities=velocities, **params)
        subprocess.run([sys.executable, "-c", PROGRAM, str(program), str(state)], check=True)
        return np.load(str(state) + ".out.npy")


def by_jax_md(simulation, params, positions, velocities, steps):
    """Returns the positions after the same steps of JAX MD, with a fixed neighbour list."""
    from jax_md import simulate, space

    _, shift = space.free()
    neighbours = simulation.neighbours(positions)

    def energy(positions, **_):
        return simulation.outputs(params, positions, neighbours)[0]

    start, apply = simulate.nve(energy, shift, dt=TIME_STEP)
    state = start(jax.random.key(0), positions, kT=0.0, mass=1.0)
    state = state.set(momentum=velocities)
    return lax.fori_loop(0, steps, lambda _, state: apply(state), state).position


def drifts(module, case, run, params, positions, count):
    """Returns the largest change of the energy over 1 000 steps from several initial velocities, by side."""
    found = {"jax_float32": [], "torch_float32": [], "torch_float64": []}
    for seed in range(VELOCITIES):
        velocities = 0.05 * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
        _, _, energies, _ = run(params, positions, jnp.asarray(velocities.numpy()), steps=1000)
        totals = {"jax_float32": np.asarray(energies, np.float64)}
        for dtype in (torch.float32, torch.float64):
            totals[str(dtype).replace(".", "_")] = in_pytorch(module, case.call, dtype, velocities, 1000)[1]
        for side, energies in totals.items():
            found[side].append(float(np.abs(energies - energies[0]).max()))
    return {f"drift_{side}": sorted(values) for side, values in found.items()}


def main():
    torch.manual_seed(0)
    case = painn(torch.float32, structure())
    module = case.module.eval()
    simulation = Simulation(bridge.export(module), structure())
    velocities = 0.05 * torch.randn(simulation.count, 3)
    params = simulation.fn.params
    start = jnp.asarray(structure().positions, jnp.float32), jnp.asarray(velocities.numpy())

    run = jax.jit(simulation.run, static_argnames="steps")
    after, _, _, edges = run(params, *start, steps=100)
    ended, _, _, _ = run(params, *start, steps=1000)
    assert int(edges) <= EDGES, f"{edges} edges"
    record = {"edges": int(edges), "moved": float(np.abs(after - start[0]).max())}
    record["without_torch"] = float(
        np.abs(without_pytorch(lambda *state: simulation.run(*state, steps=100), params, *start) - after).max()
    )
    try:
        few = run(params, *start, steps=10)[0]
        record["jax_md"] = float(
            np.abs(jax.jit(by_jax_md, static_argnums=(0, 4))(simulation, params, *start, 10) - few).max()
        )
    except ImportError as missing:
        record["jax_md"] = str(missing)

    torch.set_num_threads(1)
    single, _ = in_pytorch(module, case.call, torch.float32, velocities, 100)
    double, _ = in_pytorch(module, case.call, torch.float64, velocities, 100)
    record["error_jax_float32"] = float(np.abs(np.asarray(after) - double[-1]).max())
    record["error_torch_float32"] = float(np.abs(single[-1] - double[-1]).max())
    record |= drifts(module, case, run, params, start[0], simulation.count)
    record["finite"] = bool(np.isfinite(ended).all())
    print(json.dumps(record))


if __name__ == "__main__":
    main()
