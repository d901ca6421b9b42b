"""The potentials of `campaigns.potentials` in four ways: PyTorch's eager mode, `torch.compile`, tojax and this bridge.

    python -m campaigns.potentials_sides mace --rounds 0     # in the environment of MACE, with tojax: Python 3.12
    python -m campaigns.potentials_sides mace --repeat 2 --sides   # times, on a quiet machine
    python -m campaigns.potentials_sides --page docs/potentials.md

Each side computes energy, forces and stress in float32, evaluation mode. A record has the medians of interleaved
calls, wall time and CPU time of the process, with PyTorch on all cores and on one, JAX with XLA's defaults and with
`OPTIONS`; the bytes that a call needs beside weights and inputs; and for `torch.compile` and tojax the errors beside
eager or their own error.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The packages are in environments of their own.

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import between
from campaigns.potentials import LIBRARIES, SEED, TITLES, InJax, at, error, keep, mapped, structure, with_at

RESULTS = Path(__file__).with_suffix(".jsonl")
ROUNDS = 25
SETTLE = 0.05
"""Seconds before a call, in which the threads of the other framework stop waiting for work."""
OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""Options of `jax.jit` on a CPU: YNNPACK, whose sums over few elements are slow, computes products alone."""


def first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    text = f"{type(failure).__name__}: {lines[0] if lines else ''}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:200]


@contextlib.contextmanager
def in_training(module):
    """Packages compute forces that can be differentiated again in training mode alone."""
    module.train()
    try:
        yield
    finally:
        module.eval()


class Torch:
    """Calls of the module, as it is or compiled."""

    def __init__(self, case, module):
        self.case = case
        self.module = module

    def call(self, training=False):
        """Returns a function that calls with new tensors, so that making these is not measured."""
        args, kwargs = self.case.call()
        given = kwargs if training else {**kwargs, **self.case.inference}
        return lambda: self.module(*args, **given)


def force_gradients(case, outputs, params):
    """Returns PyTorch's gradients of the mean square of the forces, by all weights."""
    import torch

    loss = at(outputs, case.forces).square().mean()
    gradients = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
    return {
        name: np.zeros(p.shape, np.float32) if gradient is None else gradient.detach().numpy()
        for (name, p), gradient in zip(params.items(), gradients, strict=True)
    }


def weight_error(here, there):
    largest = max(np.abs(gradient).max() for gradient in there.values())
    return float(max(np.abs(np.asarray(here[name]) - there[name]).max() for name in there) / largest)


def values(case, outputs):
    return [np.asarray(at(outputs, path).detach()) for path in (case.energy, case.forces)]


def compiled_side(case, expected, params, gradients):
    """Returns the record of `torch.compile`, and its calls if they give forces."""
    import torch

    torch._dynamo.config.suppress_errors = False
    side = Torch(case, torch.compile(case.module))
    record = {}
    try:
        results = values(case, side.call()())
        record["energy"], record["forces"] = map(error, results, expected)
    except Exception as failure:
        return {"fails": first_line(failure)}, None
    try:
        with in_training(case.module):
            outputs = side.call(training=True)()
            record["weights"] = weight_error(force_gradients(case, outputs, params), gradients)
    except Exception as failure:
        record["weights_fail"] = first_line(failure)
    return record, side


class Tojax:
    """The module by tojax, with all tensors of a call and all weights as inputs of the function."""

    def __init__(self, case, known):
        from tojax import tojax
        from tojax.tojax import _convert_module

        self.case = case
        self.known = known
        self.module = _convert_module(case.module)
        self.holders = [
            (f"{prefix}.{name}".removeprefix("."), part._parameters, name)
            for prefix, part in self.module.named_modules(remove_duplicate=False)
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        self.by_tojax = tojax(self.outputs)
        self.tensors = []
        mapped(case.call()[0], lambda tensor, name: self.tensors.append(tensor.detach().numpy()) or tensor)
        self.positions = at(case.call()[0], case.positions).detach().numpy()

    def outputs(self, params, positions, tensors):
        for name, holder, key in self.holders:
            holder[key] = params[name]
        args, kwargs = self.case.call()
        arrays = iter(tensors)

        def array(tensor, name):
            given = next(arrays)
            return tensor.detach() if self.known(name) else given

        given = with_at(mapped(args, array), self.case.positions, positions)
        outputs = self.module(*given, **{**kwargs, **self.case.inference})
        return at(outputs, self.case.energy), at(outputs, self.case.forces)

    def energy(self, params, positions, tensors):
        return self.by_tojax(params, positions, tensors)[0].sum()

    def slopes(self, params, positions, tensors):
        """Returns the energy and its derivatives by the positions, which JAX computes."""
        import jax

        return jax.value_and_grad(self.energy, argnums=1)(params, positions, tensors)

    def loss(self, params, positions, tensors):
        return (self.slopes(params, positions, tensors)[1] ** 2).mean()


def slopes_in_pytorch(case, params):
    """Returns PyTorch's derivatives of the energy by the positions, and the gradients of their mean square."""
    import torch

    args, kwargs = case.call()
    leaf = at(args, case.positions).detach().clone().requires_grad_()
    outputs = case.module(*with_at(args, case.positions, leaf), **kwargs)
    (slope,) = torch.autograd.grad(at(outputs, case.energy).sum(), leaf, create_graph=True)
    gradients = torch.autograd.grad(slope.square().mean(), [*params.values()], allow_unused=True)
    found = zip(params.items(), gradients, strict=True)
    return slope.detach().numpy(), {n: np.zeros(p.shape) if g is None else g.numpy() for (n, p), g in found}


def tojax_side(case, ours, expected):
    """Returns the record of tojax, and a function for the forces by `jax.grad` of its energy if that works."""
    import jax
    import torch

    logging.disable(logging.WARNING)
    case.module.to(torch.float32).eval()
    params = {name: p for name, p in case.module.named_parameters() if p.requires_grad}
    record: dict[str, Any] = {"version": importlib.metadata.version("tojax")}
    for known in (lambda name: False, ours.is_known):
        try:
            side = Tojax(case, known)
            arguments = {n: p.detach().numpy() for n, p in case.module.named_parameters(remove_duplicate=False)}
            given = jax.tree.map(jax.numpy.asarray, (arguments, side.positions, side.tensors))
            results = jax.jit(side.by_tojax)(*given)
            record["energy"], record["forces"] = map(error, results, expected)
            break
        except Exception as failure:
            record.setdefault("fails", first_line(failure))
    if "energy" not in record:
        return record, None
    with in_training(case.module):
        slope, gradients = slopes_in_pytorch(case, params)
    compiled = jax.jit(side.slopes)
    try:
        record["slopes"] = error(compiled(*given)[1], slope)
        record["slope_weights"] = weight_error(jax.jit(jax.grad(side.loss))(*given), gradients)
    except Exception as failure:
        record["slopes_fail"] = first_line(failure)
    if "slopes" not in record:
        return record, None
    return record, (compiled, given)


def peak_of_torch(call):
    """Returns the largest number of bytes that PyTorch holds more in a call than at its start."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    del kept
    return int(held.max())


def peak_of_jax(compiled):
    memory = compiled.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)


def interleaved(calls, rounds):
    """Returns medians of wall time and of CPU time in milliseconds by side."""
    seconds = {name: ([], []) for name in calls}
    for number in range(rounds + 3):
        for name, prepare in calls.items():
            call = prepare()
            time.sleep(SETTLE)
            wall, processor = time.perf_counter(), time.process_time()
            call()
            used = time.perf_counter() - wall, time.process_time() - processor
            if number >= 3:
                for kind, one in zip(seconds[name], used, strict=True):
                    kind.append(1000 * one)
    record = {f"{name}_ms": statistics.median(wall) for name, (wall, _) in seconds.items()}
    return record | {f"{name}_cpu_ms": statistics.median(processor) for name, (_, processor) in seconds.items()}


def measure(library, repeat, rounds, sides):
    import jax
    import torch

    import bridge

    torch.manual_seed(SEED)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    case = LIBRARIES[library](torch.float32, structure(repeat))
    case.module.to(torch.float32).eval()
    torch.set_default_dtype(torch.float32)
    ours = InJax(case, bridge.export(case.module, static=case.static))
    eager = Torch(case, case.module)
    expected = values(case, eager.call()())
    record = {"library": library, "package": f"{case.package} {importlib.metadata.version(case.package)}"}
    record |= {"atoms": int(at(case.call()[0], case.positions).shape[0]), "cores": cores}

    def predicted(params, positions, graph):
        outputs = ours.outputs(params, positions, graph, train=False, **case.inference)
        return at(outputs, case.energy), at(outputs, case.forces), at(outputs, case.stress)

    given = ours.fn.params, jax.numpy.asarray(at(case.call()[0], case.positions).detach().numpy()), ours.graph

    def eager_on_one_core():
        torch.set_num_threads(1)
        return eager.call()

    def eager_on_all_cores():
        torch.set_num_threads(cores)
        return eager.call()

    calls = {"torch_1": eager_on_one_core, "torch": eager_on_all_cores}
    record["bytes"] = {"torch": peak_of_torch(eager.call())}
    lowered = jax.jit(predicted).lower(*given)
    ways: dict[str, Any] = {"jax": None, "jax_options": OPTIONS}
    for name, options in ways.items():
        program = lowered.compile(compiler_options=options)
        energy, forces, _ = program(*given)
        record[name] = {"energy": error(energy, expected[0]), "forces": error(forces, expected[1])}
        record["bytes"][name] = peak_of_jax(program)
        calls[name] = lambda program=program: lambda: jax.block_until_ready(program(*given))
    if "tojax" in sides:
        torch.manual_seed(SEED)
        fresh = LIBRARIES[library](torch.float32, structure(repeat))  # tojax copies it, which a call may have prevented
        torch.set_default_dtype(torch.float32)
        record["tojax"], found = tojax_side(fresh, ours, expected)
        if found is not None:
            slopes, arguments = found
            other = slopes.lower(*arguments).compile()
            calls["tojax"] = lambda: lambda: jax.block_until_ready(other(*arguments))
            record["bytes"]["tojax"] = peak_of_jax(other)
    if "compiled" in sides:
        params = {name: p for name, p in case.module.named_parameters() if p.requires_grad}
        with in_training(case.module):
            gradients = force_gradients(case, eager.call(training=True)(), params)
        record["compiled"], side = compiled_side(case, expected, params, gradients)
        if side is not None:
            side.call()()
            calls["compiled"] = side.call
    return record | (interleaved(calls, rounds) if rounds else {})


def last_records(results):
    """Returns the last values by library and size. Shares of eager's faster time are those within one run."""
    last = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        if "torch_ms" in record:
            faster = min(record["torch_1_ms"], record["torch_ms"])
            record["shares"] = {kind: record[kind] / faster for kind in record if kind.endswith("_ms")}
        merged = last.setdefault((TITLES[record["library"]], record["atoms"]), {})
        for name, value in record.items():
            merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    return last


def said(record, *names):
    """Returns the errors of a side, or its own error."""
    found = [f"{record[name]:.0e}" for name in names if name in record]
    failure = next((text for name, text in record.items() if name.endswith(("fail", "fails"))), "")
    return ", ".join(found) or f"`{failure[:40].replace('|', '/').replace('`', '')}`"


def write_tables(page, results):
    """Writes the tables of times and of the other two ways, from the last record of each library and size."""
    rows = [
        "| package | atoms | eager, ms | CPU / wall | two threads | JAX | option "
        "| `torch.compile` | tojax | KiB, eager | JAX | option |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    others = [
        "| package | tojax: energy, forces of `forward` | tojax: `jax.grad` of its energy, gradients of a loss on it "
        "| `torch.compile`: energy, forces | gradients |",
        "|---|---|---|---|---|",
    ]
    compared = set()
    for (title, atoms), record in sorted(last_records(results).items()):
        if "shares" in record:
            cells = [title, atoms, f"{record['torch_1_ms']:.1f}"]
            cells += [f"{record['torch_1_cpu_ms'] / record['torch_1_ms']:.2f}", f"{record['torch_ms']:.1f}"]
            kinds = ("jax_ms", "jax_options_ms", "compiled_ms", "tojax_ms")
            cells += [f"{record['shares'][kind]:.2f}" if kind in record["shares"] else "" for kind in kinds]
            cells += [f"{record['bytes'][side] / 1024:.0f}" for side in ("torch", "jax", "jax_options")]
            rows.append(f"| {' | '.join(map(str, cells))} |")
        tojax, compiled = record.get("tojax"), record.get("compiled")
        if (tojax or compiled) and title not in compared:  # of each package, the smallest structure
            compared.add(title)
            cells = [title]
            for side, further in ((tojax, ("slopes", "slope_weights")), (compiled, ("weights",))):
                if side is None:
                    cells += ["", ""]
                else:
                    cells += [said(side, "energy", "forces"), "" if "fails" in side else said(side, *further)]
            others.append(f"| {' | '.join(cells)} |")
    page.write_text(between(between(page.read_text(), "times", rows), "other ways", others))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES, nargs="?")
    parser.add_argument("--repeat", type=int, default=1, help="cells of 8 atoms along each axis")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved measurements of time")
    parser.add_argument("--sides", nargs="*", choices=("tojax", "compiled"), default=("tojax", "compiled"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="writes the tables of all results into this page")
    options = parser.parse_args(argv)
    if options.page:
        write_tables(options.page, options.output)
    if options.library:
        record = measure(options.library, options.repeat, options.rounds, options.sides)
        keep(record, options.output)


if __name__ == "__main__":
    main()
