"""The second design of the bridge, as a prototype: PyTorch's own autograd decides the gradient.

    fn = JointFunctional(module)          # `params`, `buffers` and `run` as of `bridge.export(module)`

AOTAutograd traces the module on fake tensors and writes the operations of its forward and backward pass into one graph.
The bridge's lowerings run that graph on JAX arrays in two parts, which one `jax.custom_vjp` joins. `docs/log.md` has
what was measured and why this is not the design of the bridge. To run the table of meanings with it, put
`JointFunctional` in the place of `bridge.parity.export`, or of `bridge.export` for `tests/bridge/side_by_side.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge.arrays import array_of, jax_dtype, torch_dtype
from bridge.dispatch import Dispatch
from bridge.errors import BridgeError
from bridge.export import Result, _fill, _state
from bridge.internals import mark_as_parameter, storage_id
from bridge.pytrees import convert, is_array
from bridge.shadow import shadow
from bridge.tensors import BridgeTensor, fresh
from bridge.tracing import tracing


@dataclasses.dataclass(frozen=True)
class Captured:
    """One module called with arguments of certain shapes, as a graph of forward and backward."""

    graph: Any
    forward: list[fx.Node]
    """In order; the rest is the backward pass."""
    outputs: dict[int, Any]
    """Position of a forward output -> its node."""
    gradients: dict[int, Any]
    """Position of an input -> the node of its gradient."""
    tangents: dict[int, fx.Node]
    """Position of a forward output -> the placeholder of its cotangent."""
    inputs: dict[int, fx.Node]
    rebuild: Callable[[list], tuple[Any, dict[str, Any]]]
    """Forward outputs -> what the module returned, and its state after the call."""


_RUN = ("call_function", "get_attr")


class _Call(nn.Module):
    """A call of the module as a function of a flat list of tensors: its state first, then its inputs."""

    def __init__(self, run: Callable):
        super().__init__()
        self._run = run

    def forward(self, *flat: torch.Tensor) -> Any:
        return self._run(flat)


def capture(
    module: nn.Module, arrays: list, fill: Callable[[list], tuple], train: bool | None, method: str
) -> Captured:
    """Trace forward and backward. `fill` puts the input tensors into `(args, kwargs)`."""
    reals = _state(module)
    notes: dict[str, Any] = {}

    def run(flat: tuple) -> tuple:
        twin, copies = shadow(module)  # AOTAutograd calls this more than once
        state = dict(zip(reals, flat, strict=False))
        for name, real in reals.items():
            mark_as_parameter(state[name], isinstance(real, nn.Parameter))
        slots = _fill(module, copies, {id(real): state[name] for name, real in reals.items()})
        for m in copies.values():
            m.training = m.training if train is None else train
        inputs = [t.clone() if t.requires_grad else t for t in flat[len(reals) :]]  # may be written in place
        args, kwargs = fill(inputs)
        outputs = getattr(twin, method)(*args, **kwargs)
        final = {name: getattr(owner, slot) for name, (owner, slot) in slots.items()}
        leaves, notes["structure"] = jax.tree.flatten(convert((outputs, final), lambda v: v))
        notes["fixed"] = [None if torch.is_tensor(v) else v for v in leaves]
        notes["places"] = [i for i, v in enumerate(leaves) if torch.is_tensor(v)]
        return tuple(v.clone() for v in leaves if torch.is_tensor(v))

    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        examples = [_example(array, real) for array, real in zip(arrays, reals.values(), strict=False)]
        examples += [_example(array, None) for array in arrays[len(reals) :]]
        graph = aot_export_joint_with_descriptors(stack, _Call(run), tuple(examples)).graph_module
    _refuse_baked_state(graph, reals)

    def rebuild(values: list) -> tuple:
        leaves = list(notes["fixed"])
        for place, value in zip(notes["places"], values, strict=True):
            leaves[place] = value
        return notes["structure"].unflatten(leaves)

    return _split(graph, rebuild)


def _example(array: jax.Array, real: torch.Tensor | None) -> torch.Tensor:
    if real is None:
        dtype = torch_dtype(array.dtype)
        return torch.empty(array.shape, dtype=dtype, requires_grad=dtype.is_floating_point)
    dtype = real.dtype if array.dtype == jax_dtype(real.dtype) else torch_dtype(array.dtype)
    tensor = torch.empty_strided(real.shape, real.stride(), dtype=dtype)
    return tensor.requires_grad_(real.requires_grad)


def _refuse_baked_state(graph: Any, reals: Mapping[str, torch.Tensor]) -> None:
    """Code that reaches a parameter past its slot got the real tensor, which the graph holds as a constant."""
    owners = {storage_id(t): name for name, t in reals.items()}
    for node in graph.graph.nodes:
        value = getattr(graph, node.target) if node.op == "get_attr" else None
        if torch.is_tensor(value) and storage_id(value) in owners:
            raise BridgeError(f"{owners[storage_id(value)]} is reached by another way than its attribute")


def _split(graph: Any, rebuild: Callable) -> Captured:
    backward: set[fx.Node] = set()
    tangents, inputs = {}, {}
    for node in graph.graph.nodes:
        desc = node.meta.get("desc")
        if isinstance(desc, TangentAOTInput):
            backward.add(node)
            if isinstance(desc.output, PlainAOTOutput):
                tangents[desc.output.idx] = node
        elif isinstance(desc, PlainAOTInput):
            inputs[desc.idx] = node
        elif node.meta.get("partitioner_tag") == "is_backward" or backward.intersection(node.all_input_nodes):
            backward.add(node)  # by the tag: what PyTorch's checkpoint computes again
    end = graph.graph.output_node()
    listed: dict[Any, Any] = dict(zip(end.meta["desc"], end.args[0], strict=True))
    return Captured(
        graph,
        [n for n in graph.graph.nodes if n not in backward and n.op in _RUN],
        {d.idx: n for d, n in listed.items() if isinstance(d, PlainAOTOutput)},
        {d.grad_of.idx: n for d, n in listed.items() if isinstance(d, GradAOTOutput)},
        tangents,
        inputs,
        rebuild,
    )


def _interpret(captured: Captured, nodes: list[fx.Node], known: dict[fx.Node, Any], dispatch: Dispatch) -> None:
    """Run the nodes on `known`, and put the results there."""
    with tracing(dispatch):
        for node in nodes:
            if node.op == "get_attr":
                known[node] = dispatch.adopt(getattr(captured.graph, node.target))
                continue
            args, kwargs = _arguments(node.args, known), {k: _arguments(v, known) for k, v in node.kwargs.items()}
            if node.target is operator.getitem:
                known[node] = args[0][args[1]]
            elif node.target is torch.ops.aten.detach.default:
                # AOTAutograd writes it for what PyTorch saves; `stop_gradient` would be wrong for a second derivative.
                known[node] = args[0]
            else:
                known[node] = dispatch.__torch_dispatch__(node.target, (), args, kwargs)


def _arguments(value: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Plain lists and tuples of values for fx's own kinds of them."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_arguments(v, known) for v in value)
    return known[value] if isinstance(value, fx.Node) else value


def as_custom_vjp(captured: Captured, names: Mapping[int, str]) -> Callable:
    """(arrays, rng) -> the forward outputs, with PyTorch's gradient."""
    started = {*captured.forward, *captured.inputs.values(), *captured.tangents.values()}
    end = captured.graph.graph.output_node()
    later = [n for n in captured.graph.graph.nodes if n not in started and n is not end and n.op != "placeholder"]
    needed = {n for node in later for n in node.all_input_nodes} | set(captured.gradients.values())
    kept = [n for n in (*captured.inputs.values(), *captured.forward) if n in needed]
    spare = [n for n in captured.graph.graph.nodes if n.op == "placeholder" and n not in started]
    metas: dict[fx.Node, Any] = {}

    def forward(arrays: list, rng: Any) -> tuple[list, list]:
        known = {captured.inputs[i]: fresh(a, _meta(captured.inputs[i])) for i, a in enumerate(arrays)}
        _interpret(captured, captured.forward, known, Dispatch(rng, names))
        outputs = [_array(known[captured.outputs[i]]) for i in sorted(captured.outputs)]
        metas.update({n: known[n]._meta for n in kept if isinstance(known[n], BridgeTensor)})
        return outputs, [_array(known[n]) for n in kept]

    def backward(saved: tuple, cotangents: list) -> tuple:
        known = {n: fresh(a, metas[n]) if n in metas else a for n, a in zip(kept, saved, strict=True)}
        for node in spare:
            known[node] = fresh(jnp.zeros(node.meta["val"].shape, jax_dtype(node.meta["val"].dtype)), _meta(node))
        for place, node in captured.tangents.items():
            known[node] = fresh(cotangents[place], _meta(node))
        _interpret(captured, later, known, Dispatch(None, names))
        grads = {i: n if n is None else _array(known[n]) for i, n in captured.gradients.items()}
        return [grads.get(i) for i in captured.inputs], None

    call = jax.custom_vjp(lambda arrays, rng: forward(arrays, rng)[0])
    call.defvjp(forward, backward)
    return call


def _meta(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _array(value: Any) -> Any:
    return value.value if isinstance(value, BridgeTensor) else value


class JointFunctional:
    """A module as a JAX function whose gradient PyTorch's autograd decided. One reverse derivative, nothing else."""

    def __init__(self, module: nn.Module, **_settings: Any):
        self.module = module
        state = _state(module)
        self.params = {n: array_of(t) for n, t in state.items() if t.requires_grad}
        self.buffers = {n: array_of(t) for n, t in state.items() if not t.requires_grad}
        self._names = {id(m): name for name, m in module.named_modules()}

    def run(self, params, buffers, *args, rng=None, train=None, method="forward", overrides=None, **kwargs) -> Result:
        assert not overrides
        leaves, structure = jax.tree.flatten(convert((args, kwargs), lambda v: v))
        places = [i for i, v in enumerate(leaves) if is_array(v)]
        state = [params[n] if n in self.params else buffers[n] for n in _state(self.module)]
        arrays = [jnp.asarray(a) for a in (*state, *(leaves[i] for i in places))]

        def fill(inputs: list) -> tuple:
            filled = list(leaves)
            for place, tensor in zip(places, inputs, strict=True):
                filled[place] = tensor
            return structure.unflatten(filled)

        captured = capture(self.module, arrays, fill, train, method)
        outputs, final = captured.rebuild(as_custom_vjp(captured, self._names)(arrays, rng))
        return Result(outputs, {n: final[n] for n in self.buffers}, {n: final[n] for n in self.params})

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        result = self.run(*args, **kwargs)
        return result.outputs, result.buffers
