"""Counts who serves PyTorch's ATen operations: the bridge, PyTorch's own compositions, or torchax. Prints Markdown.

    python -m benchmarks.torchax_table [--names]

Counts overloads without `out=` arguments. What torchax alone serves is refused by name with a torchax that does not
follow PyTorch and JAX any more, and with `BRIDGE_WITHOUT_TORCHAX=1`, which leaves torchax's tables unused.
`benchmarks.operation_sources` lists which of them models use.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from bridge._compat.torch import is_composite
from bridge._compat.torchax import decomposition, installed, pytorch_decomposition, torchax_lowering
from bridge.dispatch.random import RANDOM
from bridge.dispatch.schemas import functional_op, kind_of
from bridge.lowerings import BY_LAYOUT, DECOMPOSITIONS, LOWERINGS
from bridge.lowerings.plain import PLAIN

SERVERS = ("bridge", "PyTorch's composition", "torchax alone", "torchax's composition alone", "nothing")


def overloads() -> Iterator[Any]:
    """Yields the ATen overloads without `out=`."""
    known = set(torch._C._dispatch_get_all_op_names())
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if "out" not in overload and op.name() in known:  # not those of TorchScript alone
                yield op


def server(op: Any) -> str:
    """Returns one of `SERVERS`; what writes in place is served by its functional form."""
    kind = kind_of(op)
    if kind == "write":
        try:
            op = functional_op(op)
        except NotImplementedError:
            return "nothing"
    elif kind != "compute":
        return "bridge"
    if any(op in table for table in (LOWERINGS, DECOMPOSITIONS, BY_LAYOUT, RANDOM, PLAIN)):
        return "bridge"
    if is_composite(op):
        return "PyTorch's composition"
    try:
        composed = pytorch_decomposition(op).__module__.startswith("torch.")
    except KeyError:
        composed = False
    if torchax_lowering(op) is not None:
        return "PyTorch's composition" if composed else "torchax alone"
    if composed:
        return "PyTorch's composition"
    return "torchax's composition alone" if decomposition(op) is not None else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list the operations that torchax alone serves")
    options = parser.parse_args()
    names: dict[str, list[str]] = {each: [] for each in SERVERS}
    for op in overloads():
        names[server(op)].append(op.name().removeprefix("aten::"))
    print(", ".join(f"{name} {version}" for name, version in installed().items()))
    print("\n| served by | overloads |\n|---|---|")
    for each, served in names.items():
        print(f"| {each} | {len(served)} |")
    print(f"| all | {sum(map(len, names.values()))} |")
    if options.names:
        print("\n" + ", ".join(f"`{name}`" for each in SERVERS[2:4] for name in names[each]))


if __name__ == "__main__":
    main()
