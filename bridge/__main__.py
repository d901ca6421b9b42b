"""`python -m bridge verify|inspect package.module:factory`: check a module before anybody trains it.

`python -m bridge doctor` checks the installation.

The factory takes nothing and returns `(module, inputs)`, or `(module, inputs, keywords)`: `inputs` a tuple of example
arguments, `keywords` a dict of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from typing import Any

import jax
import torch
import tyro
from tyro.conf import Positional

import bridge
from bridge.doctor import doctor
from bridge.errors import named_failure
from bridge.parity import Environment
from bridge.parity.sides import to_jax
from bridge.tensor.pytrees import convert


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare outputs, every gradient and every buffer with PyTorch; status 1 unless all are equal and proved."""

    factory: Positional[str]  # `package.module:function` that returns the module and example inputs.
    tolerance: float = 1e-4  # Largest allowed difference, relative to a leaf's largest entry.
    steps: int = 2  # Calls in a row, each with other numbers of the same shapes; buffers go from one to the next.
    train: bool | None = None  # Mode of every submodule; each one's own if not given.
    seed: int = 0  # Seeds PyTorch before the factory is called and before the first step.
    jitter: float = 0.0  # Relative size of the noise that is added to all parameters before the first step.
    method: str = "forward"  # Method of the module to call.
    input_gradients: bool = True  # Compare the gradients of floating inputs, too.
    static: str = ""  # Regular expression over names of buffers that are constants.
    json: bool = False  # Print the report as JSON.


@dataclasses.dataclass(frozen=True)
class Inspect:
    """List parameters, buffers, operations and their lowerings, what is not supported, FLOPs and bytes of a call."""

    factory: Positional[str]  # `package.module:function` that returns the module and example inputs.
    train: bool | None = None  # Mode of every submodule; each one's own if not given.
    seed: int = 0  # Seeds PyTorch before the factory is called.


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Print what is installed and which releases are tested, and compare small modules with PyTorch for a minute."""


def verify(config: Verify) -> int:
    options = dataclasses.asdict(config)
    factory, seed, as_json = (options.pop(name) for name in ("factory", "seed", "json"))
    module, args, kwargs = made_by(factory, seed)
    torch.manual_seed(seed)
    report = bridge.verify(module, *args, **options, module_kwargs=kwargs)
    print(report.to_json() if as_json else report)
    if report.ok:
        return 0
    return 1


def inspect(config: Inspect) -> int:
    module, args, kwargs = made_by(config.factory, config.seed)
    fn = bridge.export(module)
    print(Environment.here())
    args, kwargs = convert((args, kwargs), to_jax)
    for title, state in (("parameters", fn.params), ("buffers", fn.buffers)):
        size = sum(a.size for a in state.values())
        megabytes = sum(a.size * a.dtype.itemsize for a in state.values()) / 1e6
        print(f"{title}: {len(state)} arrays, {size:,} elements, {megabytes:.1f} MB")
        for name, array in state.items():
            print(f"  {name:<60} {array.dtype!s:<10} {list(array.shape)}")
    found = fn.survey(*args, rng=jax.random.key(0), train=config.train, module_kwargs=kwargs)
    print(f"operations: {sum(found.ops.values())} calls of {len(found.ops)} kinds")
    for (name, server), times in found.ops.most_common():
        print(f"  {times:>6} x {name:<45} {server}")
    print(f"not supported: {len(found.unsupported) or 'none'}")
    for name, why in found.unsupported.items():
        print(f"  {name}: {why}")
    if found.unsupported:
        return 1
    options = {"rng": jax.random.key(0), "train": config.train, "module_kwargs": kwargs}
    call = jax.jit(lambda p, b: fn(p, b, *args, **options)[0])
    cost: Any = call.lower(fn.params, fn.buffers).compile().cost_analysis() or {}
    if "flops" in cost and "bytes accessed" in cost:
        work = f"{cost['flops'] / 1e9:.3f} GFLOP, {cost['bytes accessed'] / 1e6:.1f} MB accessed"
        print(f"one call, as compiled for {jax.default_backend()}: {work}")
    return 0


def made_by(factory: str, seed: int) -> tuple[torch.nn.Module, tuple, dict[str, Any]]:
    """Returns module, arguments and keywords. Raises `BridgeError` if the factory is missing or its result is wrong."""
    path, _, name = factory.partition(":")
    if not name:
        raise bridge.BridgeError(f"{factory!r} names no function; write package.module:function")
    with named_failure(f"{factory} cannot be found", "; write package.module:function"):
        function = getattr(importlib.import_module(path), name)
    torch.manual_seed(seed)
    with named_failure(f"{factory} failed"):
        made = function()
    if isinstance(made, tuple) and len(made) in (2, 3):
        parts = made
    else:
        parts = (None, ())
    module, args, kwargs = (*parts, {})[:3]
    if not isinstance(module, torch.nn.Module) or not isinstance(kwargs, dict):
        wanted = "it must return (module, inputs) or (module, inputs, keywords)"
        raise bridge.BridgeError(f"{factory} returned {made!s:.60}; {wanted}")
    return module, tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs


def parse(argv: list[str] | None) -> Verify | Inspect | Doctor:
    """Parses the command line. Raises a `BridgeError` of one line where tyro would print a box."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(Verify | Inspect | Doctor, args=argv, prog="python -m bridge", description=__doc__)  # pyright: ignore[reportArgumentType]
    except SystemExit as stop:
        if not stop.code:
            raise
        words = re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", " ", shown.getvalue())
        raise bridge.BridgeError(" ".join(words.split())) from stop


def main(argv: list[str] | None = None) -> int:
    try:
        command = parse(argv)
        if isinstance(command, Doctor):
            return doctor()
        if isinstance(command, Verify):
            return verify(command)
        return inspect(command)
    except bridge.BridgeError as error:
        print(f"bridge: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
