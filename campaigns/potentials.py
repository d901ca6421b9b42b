"""Interatomic potentials of published packages: energy, forces, stress and their derivatives in JAX beside PyTorch.

Each package needs an environment of its own, because their pins conflict, and each dtype a process of its own,
because JAX chooses 64 bits at its start:

    python -m campaigns.potentials mace --dtype float64 --output campaigns/potentials.jsonl
    python -m campaigns.potentials --page docs/potentials.md  # the table of all results so far

The models are small, with random weights (CHGNet: its published ones), on eight atoms of distorted rock salt.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The packages are in environments of their own.

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import between

SEED = 0
STEP = 1e-4
"""Length of a finite difference, in the units of positions and of weights."""
RESULTS = Path(__file__).with_suffix(".jsonl")


@dataclasses.dataclass(frozen=True)
class Case:
    """A potential as its package has it, and a call of it.

    A path has keys of dicts, names of attributes and numbers of elements, from arguments or outputs to a tensor.
    """

    module: Any
    package: str
    call: Callable[[], tuple[tuple, dict]]
    """Returns the arguments of a call, new tensors each time."""
    positions: tuple
    energy: tuple
    forces: tuple
    stress: tuple
    inference: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of a call that needs no second derivative."""
    known: str = ""
    """Arrays that the program has to know, a regular expression of names as in `verify`; all others may be traced."""
    static: str = ""
    """Buffers that the program has to know, as in `export`."""
    derived: bool = True
    """True if forces are the derivatives of the energy in the outputs by the positions of the call."""
    double: bool = True
    """False if the package itself does not run in float64."""


def structure(repeat=1):
    """Returns a distorted periodic crystal of two kinds of atoms: 8 in each of `repeat` ** 3 cells."""
    import ase.build

    atoms = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(repeat)
    atoms.rattle(0.15, seed=SEED)
    return atoms


def mace(dtype, atoms):
    import e3nn
    import torch

    e3nn.set_optimization_defaults(jit_script_fx=False)
    torch.serialization.add_safe_globals([slice])  # e3nn 0.4 reads its constants with torch.load
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools import torch_geometric

    numbers = tools.AtomicNumberTable([11, 17])
    module = modules.ScaleShiftMACE(
        r_max=4.5,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=14.0,
        atomic_numbers=numbers.zs,
        correlation=3,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.3,
        atomic_inter_shift=0.1,
    )

    def call():
        config = data.config_from_atoms(atoms)
        graph = data.AtomicData.from_config(config, z_table=numbers, cutoff=4.5)
        batch = next(iter(torch_geometric.dataloader.DataLoader([graph, graph], batch_size=2))).to_dict()
        names = ["positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch", "ptr", "head"]
        return ({name: batch[name] for name in names},), {"training": True, "compute_stress": True}

    outputs = ("energy",), ("forces",), ("stress",)
    return Case(module, "mace-torch", call, (0, "positions"), *outputs, inference={"training": False})


def painn(dtype, atoms):
    import torch
    from torch.utils.data import dataloader

    dataloader.T_co = getattr(dataloader, "T_co", None)  # SchNetPack 2.1 imports a name that torch 2.13 no longer has
    import schnetpack.atomistic as atomistic
    import schnetpack.nn as layers
    import schnetpack.representation as representation
    from ase.neighborlist import neighbor_list
    from schnetpack.model import NeuralNetworkPotential

    cutoff = 4.5
    torch.set_default_dtype(torch.float32)  # its radial functions are made with torch.FloatTensor
    module = NeuralNetworkPotential(
        representation=representation.PaiNN(
            n_atom_basis=64,
            n_interactions=3,
            radial_basis=layers.GaussianRBF(n_rbf=20, cutoff=cutoff),
            cutoff_fn=layers.CosineCutoff(cutoff),
        ),
        input_modules=[atomistic.Strain(), atomistic.PairwiseDistances()],
        output_modules=[atomistic.Atomwise(n_in=64, output_key="energy"), atomistic.Forces(calc_stress=True)],
    )

    def call():
        i, j, shifts = neighbor_list("ijS", atoms, cutoff)
        inputs = {
            "_idx": torch.arange(1),
            "_n_atoms": torch.tensor([len(atoms)]),
            "_atomic_numbers": torch.tensor(atoms.numbers),
            "_positions": torch.tensor(atoms.positions, dtype=dtype),
            "_cell": torch.tensor(np.array(atoms.cell)[None], dtype=dtype),
            "_idx_m": torch.zeros(len(atoms), dtype=torch.int64),
            "_idx_i": torch.tensor(i),
            "_idx_j": torch.tensor(j),
            "_offsets": torch.tensor(shifts @ np.array(atoms.cell), dtype=dtype),
        }
        return (inputs,), {}

    outputs = ("energy",), ("forces",), ("stress",)
    return Case(module, "schnetpack", call, (0, "_positions"), *outputs, known=r".*_idx_m")


def nequip(dtype, atoms):
    import torch
    from nequip.data import compute_neighborlist_, from_ase
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    set_global_state()
    module = NequIPGNNModel(
        seed=SEED,
        model_dtype=str(dtype).removeprefix("torch."),
        type_names=["Na", "Cl"],
        r_max=4.5,
        num_layers=3,
        l_max=2,
        num_features=16,
        avg_num_neighbors=14.0,
        radial_mlp_width=32,
        per_type_energy_scales={"Na": 1.0, "Cl": 1.5},
        per_type_energy_shifts={"Na": 0.1, "Cl": -0.2},
    )

    def call():
        data = compute_neighborlist_(from_ase(atoms), 4.5)
        data["atom_types"] = torch.tensor((atoms.numbers == 17).astype(np.int64))
        names = ["pos", "cell", "edge_index", "edge_cell_shift", "atom_types"]
        chosen = {name: data[name] for name in names}
        return ({name: x.to(dtype) if x.is_floating_point() else x for name, x in chosen.items()},), {}

    return Case(module, "nequip", call, (0, "pos"), ("total_energy",), ("forces",), ("stress",))


def tensornet(dtype, atoms):
    import types

    import matgl
    import torch

    matgl.set_default_dtype("float", 64 if dtype == torch.float64 else 32)
    from ase.neighborlist import neighbor_list
    from matgl.apps.pes import Potential
    from matgl.models import TensorNet

    model = TensorNet(element_types=("Na", "Cl"), units=32, nblocks=2, num_rbf=16, cutoff=4.5, is_intensive=False)
    module = Potential(model, data_mean=0.3, data_std=1.2, element_refs=[-1.0, -2.0])

    def call():
        i, j, shifts = neighbor_list("ijS", atoms, 4.5)
        graph = types.SimpleNamespace(
            node_type=torch.tensor((atoms.numbers == 17).astype(np.int64)),
            frac_coords=torch.tensor(atoms.get_scaled_positions(wrap=False), dtype=dtype),
            edge_index=torch.tensor(np.stack([i, j])),
            pbc_offset=torch.tensor(shifts, dtype=dtype),
            num_nodes=len(atoms),
            num_graphs=1,
        )
        return (graph, torch.tensor(np.array(atoms.cell), dtype=dtype)), {}

    return Case(module, "matgl", call, (0, "frac_coords"), (0,), (1,), (2,), derived=False)


def orb(dtype, atoms):
    import torch
    from orb_models.forcefield import atomic_system, pretrained

    config = atomic_system.SystemConfig(radius=4.5, max_num_neighbors=60)
    module = pretrained.orb_v3_conservative_architecture(
        latent_dim=32,
        base_mlp_hidden_dim=64,
        head_mlp_hidden_dim=32,
        num_message_passing_steps=3,
        device="cpu",
        system_config=config,
    )

    def call():
        graph = atomic_system.ase_atoms_to_atom_graphs(
            atoms, config, wrap=False, device=torch.device("cpu"), output_dtype=dtype
        )
        return (graph,), {}

    positions = 0, "node_features", "positions"
    outputs = ("energy",), ("grad_forces",), ("grad_stress",)
    known = r".*\.n_(node|edge)"
    static = r"pair_repulsion_fn\.p"
    # The energy among its outputs is normalised, unlike the one that it differentiates.
    return Case(module, "orb-models", call, positions, *outputs, known=known, static=static, derived=False)


def chgnet(dtype, atoms):
    from chgnet.graph import CrystalGraphConverter
    from chgnet.model import CHGNet
    from pymatgen.io.ase import AseAtomsAdaptor

    module = CHGNet.load(use_device="cpu", verbose=False)
    converter = CrystalGraphConverter(atom_graph_cutoff=6, bond_graph_cutoff=3)

    def call():
        graph = converter(AseAtomsAdaptor.get_structure(atoms))
        graph.atom_frac_coord = graph.atom_frac_coord.detach().to(dtype)
        graph.lattice = graph.lattice.detach().to(dtype)
        return ([graph],), {"task": "efs"}

    graph = r".*(number|graph|directed|undirected)"
    outputs = ("e",), ("f", 0), ("s", 0)
    return Case(module, "chgnet", call, (0, 0, "atom_frac_coord"), *outputs, known=graph, derived=False, double=False)


LIBRARIES: dict[str, Callable[[Any, Any], Case]] = {
    "mace": mace,
    "painn": painn,
    "nequip": nequip,
    "tensornet": tensornet,
    "orb": orb,
    "chgnet": chgnet,
}


TITLES = {
    "mace": "MACE",
    "painn": "PaiNN",
    "nequip": "NequIP",
    "tensornet": "TensorNet",
    "orb": "Orb v3, conservative",
    "chgnet": "CHGNet",
}


def at(tree, path):
    for key in path:
        tree = getattr(tree, key) if isinstance(key, str) and not isinstance(tree, dict) else tree[key]
    return tree


def with_at(tree, path, value):
    """Returns a copy of nested containers and objects with another value at the path."""
    if not path:
        return value
    key = path[0]
    below = with_at(at(tree, path[:1]), path[1:], value)
    if isinstance(tree, dict):
        return {**tree, key: below}
    if isinstance(key, str):
        if isinstance(tree, tuple):
            return tree._replace(**{key: below})
        changed = copy.copy(tree)
        setattr(changed, key, below)
        return changed
    return type(tree)([*tree[:key], below, *tree[key + 1 :]])


def mapped(tree, function, name=""):
    """Returns a copy of nested containers and objects with a function of each tensor and of its name."""
    import torch

    def below(key, value):
        return mapped(value, function, f"{name}.{key}".removeprefix("."))

    if isinstance(tree, torch.Tensor):
        return function(tree, name)
    if isinstance(tree, dict):
        return {key: below(key, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(below(key, value) for key, value in tree._asdict().items()))
    if isinstance(tree, list | tuple):
        return type(tree)(below(number, value) for number, value in enumerate(tree))
    if hasattr(tree, "__dict__"):
        changed = copy.copy(tree)
        for key, value in vars(tree).items():
            setattr(changed, key, below(key, value))
        return changed
    return tree


def error(here, there):
    """Returns the largest difference relative to the largest entry of PyTorch's value."""
    here = np.asarray(here, np.float64)
    there = np.asarray(there, np.float64)
    return float(np.abs(here - there).max() / max(np.abs(there).max(), 1e-30))


class InPyTorch:
    """Energy, forces and their derivatives by PyTorch's eager mode."""

    def __init__(self, case):
        self.case = case
        self.params = {name: p for name, p in case.module.named_parameters() if p.requires_grad}

    def outputs(self, positions, **kwargs):
        args, given = self.case.call()
        return self.case.module(*with_at(args, self.case.positions, positions), **{**given, **kwargs})

    def values(self, positions, target, direction):
        """Returns everything that is compared; `target` are the forces of the loss, `direction` that of the product."""
        import torch

        leaf = positions.clone().requires_grad_()
        outputs = self.outputs(leaf)
        forces = at(outputs, self.case.forces)
        (product,) = torch.autograd.grad((forces * direction).sum(), leaf, retain_graph=True)
        loss = (forces - target).square().mean()
        gradients = torch.autograd.grad(loss, [*self.params.values()], allow_unused=True)
        weights = {
            name: np.zeros(p.shape) if gradient is None else gradient.numpy()
            for (name, p), gradient in zip(self.params.items(), gradients, strict=True)
        }
        return outputs, product, weights

    def energy(self, positions):
        return at(self.outputs(positions), self.case.energy).sum().item()

    def loss(self, positions, target):
        return (at(self.outputs(positions), self.case.forces) - target).square().mean().item()


class InJax:
    """The same by the exported module."""

    def __init__(self, case, fn):
        import jax

        self.case = case
        self.fn = fn
        self.args, self.kwargs = case.call()
        self.graph = []
        """All traced arrays of the arguments; positions are replaced."""

        def collect(tensor, name):
            if not self.is_known(name):
                self.graph.append(jax.numpy.asarray(tensor.detach().numpy()))

        mapped(self.args, collect)

    def is_known(self, name):
        return bool(self.case.known) and re.fullmatch(self.case.known, name) is not None

    def outputs(self, params, positions, graph, train=True, **kwargs):
        arrays = iter(graph)

        def array(tensor, name):
            return tensor.detach().numpy() if self.is_known(name) else next(arrays)

        given = with_at(mapped(self.args, array), self.case.positions, positions)
        return self.fn(params, self.fn.buffers, *given, train=train, module_kwargs={**self.kwargs, **kwargs})[0]

    def values(self, params, positions, target, direction, graph):
        import jax

        def forces(positions, params=params):
            return at(self.outputs(params, positions, graph), self.case.forces)

        def loss(params):
            return jax.numpy.square(forces(positions, params) - target).mean()

        reverse = jax.grad(lambda positions: (forces(positions) * direction).sum())(positions)
        forward = jax.jvp(forces, (positions,), (direction,))[1]
        return self.outputs(params, positions, graph), reverse, forward, jax.grad(loss)(params)


def verify(library, dtype_name):
    """Returns a record of what `verify` says of energy, forces, stress and the gradients of a loss on forces."""
    import torch

    import bridge

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    case = LIBRARIES[library](dtype, structure())
    module = case.module.to(dtype)
    torch.set_default_dtype(dtype)

    def loss(outputs):
        return (at(outputs, case.forces) ** 2).mean()

    args, kwargs = case.call()
    options = {"module_kwargs": kwargs, "known_inputs": case.known, "static": case.static}
    report = bridge.verify(module, *args, steps=1, loss=loss, train=True, **options)
    beyond = str(report).splitlines()[2:5]
    return {"library": library, "dtype": dtype_name, "verify": "ok" if report.ok else beyond}


def measure(library, dtype_name):
    import jax
    import torch

    import bridge

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    case = LIBRARIES[library](dtype, structure())
    record = {"library": library, "package": f"{case.package} {importlib.metadata.version(case.package)}"}
    record["dtype"] = dtype_name
    if dtype == torch.float64 and not case.double:
        return record | {"refused": "the package has constants in float32"}
    module = case.module.to(dtype).train()
    torch.set_default_dtype(dtype)
    there = InPyTorch(case)
    positions = at(case.call()[0], case.positions).detach()
    target = torch.randn(positions.shape, dtype=dtype)
    direction = torch.randn(positions.shape, dtype=dtype)
    outputs, product, weights = there.values(positions, target, direction)

    ours = InJax(case, bridge.export(module, static=case.static))
    vectors = [jax.numpy.asarray(tensor.numpy()) for tensor in (positions, target, direction)]
    record["known"] = case.known
    results = jax.jit(ours.values)(ours.fn.params, *vectors, ours.graph)
    predicted, reverse, forward, gradients = results
    for name in ("energy", "forces", "stress"):
        path = getattr(case, name)
        record[name] = error(at(predicted, path), at(outputs, path).detach())
    record["hvp"] = max(error(reverse, product), error(forward, product))
    largest = max(np.abs(gradient).max() for gradient in weights.values())
    record["weights"] = float(max(np.abs(np.asarray(gradients[n]) - g).max() for n, g in weights.items()) / largest)
    if dtype == torch.float64:
        record |= finite_differences(there, positions, target, direction, results)
    return record


def finite_differences(there, positions, target, direction, results):
    """Returns errors of our derivatives beside differences of PyTorch's values in float64."""
    import torch

    predicted, reverse, _, gradients = results
    case = there.case
    ahead = positions + STEP * direction
    behind = positions - STEP * direction
    slope = (there.energy(ahead) - there.energy(behind)) / (2 * STEP)
    record = {}
    if case.derived:
        along = -float((np.asarray(at(predicted, case.forces)) * direction.numpy()).sum())
        record["fd_forces"] = abs(along - slope) / abs(slope)
    forces = [(at(there.outputs(place), case.forces).detach() * direction) for place in (ahead, behind)]
    change = float((forces[0] - forces[1]).sum()) / (2 * STEP)
    record["fd_hvp"] = abs(float((np.asarray(reverse) * direction.numpy()).sum()) - change) / abs(change)
    generator = torch.Generator().manual_seed(SEED)
    steps = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in there.params.items()}
    along = sum(float((np.asarray(gradients[name]) * step.numpy()).sum()) for name, step in steps.items())
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, step in steps.items():
                there.params[name].add_(sign * STEP * step)
            with torch.enable_grad():
                losses.append(there.loss(positions, target))
        for name, step in steps.items():
            there.params[name].add_(STEP * step)
    slope = (losses[0] - losses[1]) / (2 * STEP)
    record["fd_weights"] = abs(along - slope) / abs(slope)
    return record


COLUMNS = ("energy", "forces", "stress", "weights", "hvp")


def last_records(results):
    """Returns the last value of each field by library and dtype."""
    last = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        last.setdefault((record["library"], record["dtype"]), {}).update(record)
    return last


def atlas_rows(results=RESULTS):
    """Returns the rows of the atlas on potentials: energy, forces and what differentiates these again, in float32."""
    columns = ("energy", "forces", "stress", "weights", "hvp")
    rows = []
    for (name, dtype), record in sorted(last_records(results).items()):
        if dtype == "float32":
            errors = [f"{record[column]:.0e}" if record[column] else "0" for column in columns]
            rows.append([f"{TITLES[name]} ({record['package']})", *errors, record.get("verify", "")])
    return rows


def write_table(page, results):
    """Writes the last record of each library and dtype into the page, between its two comments."""
    last = last_records(results)
    rows = [
        "| package | dtype | known | energy | forces | stress | gradients | Hessian | finite differences | `verify` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in LIBRARIES:
        for dtype in ("float32", "float64"):
            record = last.get((name, dtype))
            if record is None:
                continue
            cells = [f"{TITLES[name]} ({record['package']})", dtype]
            if "refused" in record:
                cells += [record["refused"], *[""] * 7]
            else:
                differences = [value for key, value in record.items() if key.startswith("fd_")]
                names = record["known"].replace("|", r"\|")
                cells.append(f"`{names}`" if names else "nothing")
                cells += [f"{record[column]:.0e}" if record[column] else "0" for column in COLUMNS]
                cells += [f"{max(differences):.0e}" if differences else "", record.get("verify", "")]
            rows.append("| " + " | ".join(cells) + " |")
    page.write_text(between(page.read_text(), "table", rows))


def keep(record, output):
    """Prints a record, and appends it to the file of all results."""
    line = json.dumps(record)
    print(line)
    with output.open("a") as lines:
        lines.write(line + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES, nargs="?")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--verify", action="store_true", help="run bridge.verify instead of the measurements")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="writes the table of all results into this page")
    options = parser.parse_args(argv)
    if options.page:
        write_table(options.page, options.output)
    if options.library:
        os.environ["JAX_ENABLE_X64"] = str(int(options.dtype == "float64"))
        if options.verify:
            record = verify(options.library, options.dtype)
        else:
            record = measure(options.library, options.dtype)
        keep(record, options.output)


if __name__ == "__main__":
    main()
