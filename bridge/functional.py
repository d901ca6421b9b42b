"""`export(module)`: the module as a pure function of its parameters, its buffers, its inputs and a key."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from bridge._compat.torch import is_composite
from bridge.context import Options
from bridge.dispatch.random import RANDOM, Rng, check_key
from bridge.dispatch.replacements import check_name
from bridge.dispatch.schemas import kind_of
from bridge.dispatch.values import Survey
from bridge.errors import BridgeError
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.module.arguments import parameters_of
from bridge.module.call import Exported, Request, Result, refuse_gradient_hooks, run_call
from bridge.module.state import second_names, state_of, trained_in
from bridge.symbolic.constants import check_expression, with_known
from bridge.symbolic.ranges import Int64, check_integers, check_policy
from bridge.tensor.arrays import alias_roots, array_of, check_kinds, jax_dtype, move_to_meta


@dataclasses.dataclass(frozen=True, eq=False)
class Functional(Exported):
    """A module as a pure function. It composes with `jit`, `grad`, `vmap`, `pmap`, `scan`, `checkpoint`.

    Made by `export`. Hashable, and equal only to itself: a function given to `jax.jit`, a static argument or a static
    field is traced again only for another export. `params` and `buffers` are the state at that time, keyed by qualified
    names; a tied weight is there once, under its first name.
    """

    def __call__(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        *args: Any,
        rng: Rng | None = None,
        train: bool | None = None,
        method: str = "forward",
        overrides: Mapping[str, Any] | None = None,
        module_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Runs `method` with this state; returns its outputs and the buffers with every in-place write.

        `rng` is a JAX key (or a `ShardedKey`), needed only where the module draws random numbers. `train`
        sets the mode of every submodule for this call; `None` keeps each one's own. `overrides` gives numbers that the
        module keeps in attributes by their dotted path (`{"layers.0.dropout.p": 0.2}`), traced like any input: another
        value needs no compilation. Everything in the module that shares the object sees the change. `module_kwargs` are
        keyword arguments of the method, like `kwargs`, which may have names of options such as `train`.

        Raises `BridgeError` for a missing or surplus name, a wrong shape, randomness without a key, an option that is
        an argument of the method, too, unless `module_kwargs` is given, and whatever cannot be translated.
        """
        request = Request(params, buffers, args, kwargs, rng, train, method, overrides, module_kwargs)
        result, written = self._run(request)
        if written:
            raise BridgeError(
                f"the call writes the parameter {written[0]}: use `fn.run(…)`, which returns parameters too"
            )
        return result.outputs, result.buffers

    def run(
        self,
        params: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        *args: Any,
        rng: Rng | None = None,
        train: bool | None = None,
        method: str = "forward",
        overrides: Mapping[str, Any] | None = None,
        module_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Result:
        """Calls it, and also returns the parameters with what the module wrote into them."""
        return self._run(Request(params, buffers, args, kwargs, rng, train, method, overrides, module_kwargs))[0]

    def survey(
        self,
        *args: Any,
        rng: Rng | None = None,
        train: bool | None = None,
        method: str = "forward",
        module_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Survey:
        """Returns the operations that a call makes, computing nothing; unsupported ones are listed, not raised."""
        found = Survey()
        leaves, structure = jax.tree.flatten((args, kwargs, module_kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

        def call(params, buffers, arrays):
            args, kwargs, own = jax.tree.unflatten(structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            return self._run(Request(params, buffers, args, kwargs, rng, train, method, None, own, found))[0].outputs

        jax.eval_shape(call, self.params, self.buffers, arrays)
        return found

    def _run(self, request: Request) -> tuple[Result, list[str]]:
        """Returns everything that the call leaves behind, and the parameters that it has written."""
        if self.options.int64 == "exact":
            check_policy(self.options.int64)
        check_method(self.module, request.method, Functional.__call__, vars(request))
        if request.module_kwargs:
            request = dataclasses.replace(request, kwargs=request.kwargs | {**request.module_kwargs})
        if request.rng is not None:
            check_key(request.rng)
        _check_names_and_shapes(request.params, self.params, "parameter")
        _check_names_and_shapes(request.buffers, self.buffers, "buffer")
        refuse_gradient_hooks(self.module)
        new = state_of(self.module).keys() ^ (self.params.keys() | self.buffers.keys() | self.options.static.keys())
        if new:
            names = ", ".join(sorted(new)[:5])
            what = "the module has other parameters or buffers than when it was exported"
            raise BridgeError(f"{what}: {names}; export it again")
        if self.options.known_inputs and request.survey is None:
            args, kwargs = with_known(self.options.known_inputs, request.args, request.kwargs)
            request = dataclasses.replace(request, args=args, kwargs=kwargs)
        return run_call(self, request)


def _check_names_and_shapes(given: Mapping[str, Any], expected: Mapping[str, jax.Array], what: str) -> None:
    if given.keys() != expected.keys():
        lists = {
            "missing": [name for name in expected if name not in given],
            "surplus": [name for name in given if name not in expected],
        }
        words = [f"{w} {what}s: {', '.join(n[:5])}{' …' if len(n) > 5 else ''}" for w, n in lists.items() if n]
        raise BridgeError(f"{'; '.join(words)}; pass exactly the names that export(module) gave")
    for name, array in expected.items():
        shape = jnp.shape(given[name])
        if shape != array.shape:
            remedy = "pass arrays shaped as in the exported module"
            if what == "buffer":
                remedy += (
                    "; a buffer keeps its shape from call to call: register it at its full size, or call the module "
                    "once before the export, if its first call gives it that"
                )
            raise BridgeError(f"{what} {name} has shape {tuple(shape)}, expected {array.shape}: {remedy}")
        if isinstance(given[name], jax.ShapeDtypeStruct):
            what = f"{what} {name} has no values: the module was exported from the meta device"
            raise BridgeError(f"{what}; pass the parameters and buffers that bridge.into(fn, weights) returns")


def export(
    module: nn.Module,
    *,
    lowerings: Mapping[Any, Callable | None] | None = None,
    functions: Mapping[str, Callable] | None = None,
    recompute: str = "",
    int64: Int64 = "refuse",
    name_scopes: bool = False,
    static: str = "",
    known_inputs: str = "",
    release: bool = False,
) -> Functional:
    """Returns the module as a `Functional`. Neither `export` nor a call changes the module: it stays usable.

    Every state tensor with `requires_grad` becomes a parameter; all others, frozen parameters, non-persistent
    buffers and what the module's own `named_parameters` hides from optimizers included, become buffers.
    `lowerings` has functions of arrays that take the place of the bridge's own lowerings or serve an operation without
    one, by the operation (`torch.ops.aten.special_airy_ai.default`) or its name, such as
    `{"aten::scaled_dot_product_attention": bridge.fused_attention}`; None switches one off. `functions` has
    replacements as for `bridge.register_function`, for the calls of this module only. `recompute` is a regular
    expression: calls of the submodules whose whole qualified name it matches are as if wrapped in
    `torch.utils.checkpoint`. `int64`: while JAX has 32-bit integers only, a call that is known to make others is
    refused and products of unknown ones warn ("refuse"), or integers wrap ("wrap"); "exact" insists on JAX's 64-bit
    types. `name_scopes`: calls of submodules run under a `jax.named_scope` such as `layers.0[Block]`, which profiles
    and compiled programs show.

    `static` is a regular expression: buffers whose whole qualified name it matches are constants with the values that
    they have now, and no part of `buffers`, so Python code may branch on them; a call that writes one is an error.

    `known_inputs` is a regular expression over names of inputs (`1`, `edge_index`, `0.edges` in a dict or an object)
    whose values Python code may read: a call gets them from outside of the arguments of `jax.jit`, as in
    `jax.jit(lambda p, x: fn(p, {}, x, edges))`.

    A parameter or buffer on the meta device is a `jax.ShapeDtypeStruct` in `params` and `buffers`; `bridge.into`
    returns both with values. `release` moves each parameter and buffer of the module to the meta device as soon as it
    is an array, so that no weight is held twice; tensors that share memory stay.

    Raises `BridgeError` for a name or expression that matches nothing, and for state that 32 bits do not hold.
    """
    state = state_of(module)
    check_kinds(state, meta=True)
    windows = alias_roots(state)  # raises for memory that two arrays cannot represent
    refuse_gradient_hooks(module)
    check_integers(state, int64)
    constant = _constants(state, windows, static) if static else {}
    names = _recomputed(module, recompute)
    chosen = _by_name(lowerings or {})
    replaced = _checked_names(functions or {})
    check_expression(known_inputs)
    options = Options(chosen, replaced, names, int64, name_scopes, constant, known_inputs)
    free = {name: tensor for name, tensor in state.items() if name not in constant}
    kept = {*windows, *windows.values()} if release else state.keys()
    params, buffers = _arrays(free, trained_in(module), kept)
    seconds = {name: first for name, first in second_names(module).items() if first in free}
    return Functional(module, params, buffers, options, seconds)


def _by_name(lowerings: Mapping[Any, Callable | None]) -> dict[str, Callable | None]:
    """Returns the lowerings by the names of their operations. Raises `BridgeError` for one that cannot be lowered."""
    known = {op.name() for op in (*LOWERINGS, *DECOMPOSITIONS)}
    chosen = {key.name() if hasattr(key, "name") else str(key): function for key, function in lowerings.items()}
    for name, function in chosen.items():
        if name not in known and (function is None or not _may_be_lowered(name)):
            close = ", ".join(difflib.get_close_matches(name, known)) or "see bridge.LOWERINGS"
            raise BridgeError(f"no lowering is called {name}, and no operation that could have one; there are: {close}")
    return chosen


def _checked_names(functions: Mapping[str, Callable]) -> dict[str, Callable]:
    for name in functions:
        check_name(name)
    return dict(functions)


def _recomputed(module: nn.Module, pattern: str) -> tuple[str, ...]:
    """Returns the names of the submodules that the pattern matches. Raises `BridgeError` for one of TorchScript."""
    names = []
    for name, submodule in module.named_modules():
        names.append(name)
        if isinstance(submodule, torch.jit.ScriptModule):
            who = name or "the module"
            raise BridgeError(
                f"{who} was compiled by TorchScript; export the module that it was made from. In a model of e3nn, call "
                "e3nn.set_optimization_defaults(jit_script_fx=False) before the model is made"
            )
    chosen = tuple(name for name in names if pattern and re.fullmatch(pattern, name))
    if pattern and not chosen:
        raise BridgeError(f"recompute {pattern!r} matches no submodule; names here are {', '.join(names[1:6])} …")
    return chosen


def _may_be_lowered(name: str) -> bool:
    """True for an operation that makes a tensor by itself: no view, write, draw or composite of PyTorch's."""
    namespace, _, path = name.partition("::")
    packet, _, overload = path.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return op is not None and kind_of(op) == "compute" and not is_composite(op) and op not in RANDOM


def _arrays(
    state: Mapping[str, torch.Tensor], trained: Container[str], keep: Container[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns parameters and buffers, and moves the tensors to the meta device, except those to `keep`."""
    params = {}
    buffers = {}
    for name, tensor in state.items():
        arrays = params if name in trained else buffers
        if tensor.is_meta:
            arrays[name] = jax.ShapeDtypeStruct(tensor.shape, jax_dtype(tensor.dtype))
        else:
            arrays[name] = array_of(tensor)
        if name not in keep:
            move_to_meta(tensor)
    return params, buffers


def _constants(state: Mapping[str, torch.Tensor], roots: Mapping[str, str], static: str) -> dict[str, torch.Tensor]:
    """Returns copies of the buffers that are constants. Raises `BridgeError` if none or only parts of others match."""
    constant = {n: t.detach().clone() for n, t in state.items() if not t.requires_grad and re.fullmatch(static, n)}
    if not constant:
        buffers = ", ".join([n for n, t in state.items() if not t.requires_grad][:6])
        raise BridgeError(f"static {static!r} matches no buffer; buffers here are {buffers or 'none'}")
    for name, root in roots.items():
        if (name in constant) != (root in constant):
            raise BridgeError(f"{name} and {root} share memory, and static {static!r} matches one of them; name both")
    check_kinds(constant)
    return constant


def check_method(module: nn.Module, name: str, call: Any, given: Mapping[str, Any]) -> None:
    """Raises `BridgeError` for a method that the module does not have, and for options of `call` that it takes, too."""
    method: Any = getattr(module, name, None)
    if not callable(method):
        near = ", ".join(difflib.get_close_matches(name, [n for n in dir(module) if n[0] != "_"]))
        raise BridgeError(f"the module has no method {name}; close to it: {near or 'none'}")
    for option, default in call.__kwdefaults__.items() if given["module_kwargs"] is None else ():
        if given[option] is not default and option in parameters_of(method):
            raise BridgeError(
                f"`{option}` is an option here and an argument of {type(module).__name__}.{name}; give the module's "
                f"own in module_kwargs={{'{option}': …}}, or the option beside module_kwargs={{}}"
            )
