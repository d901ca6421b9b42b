"""Every rule of the bridge, taken out: what each row of the table of meanings must not survive."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import torch
from torch import nn

import bridge
from bridge.dispatch import aten as dispatch
from bridge.dispatch import computation, random
from bridge.dispatch import constants as adoption
from bridge.lowerings import DECOMPOSITIONS
from bridge.tensor import arrays
from bridge.tensor import tensor as tensors

call_file, parity_file = (importlib.import_module(f"bridge.{name}") for name in ("module.call", "parity"))


def without_stop(monkeypatch):
    monkeypatch.setattr(computation, "stop_gradient", lambda array: array)


def without_own_cell(monkeypatch):
    monkeypatch.setattr(tensors.AutogradHandle, "detached", lambda self: self)


def with_own_memory(monkeypatch):
    """A detached tensor that is a copy."""
    monkeypatch.setattr(
        tensors.AutogradHandle,
        "detached",
        lambda self: tensors.AutogradHandle(tensors.Storage(self.read()), tensors.stop_gradient(self.read()), False),
    )


def without_visible_requires_grad(monkeypatch):
    monkeypatch.setattr(tensors.BridgeTensor, "requires_grad", property(lambda self: True, lambda self, wanted: None))


def without_regraft(monkeypatch):
    monkeypatch.setattr(tensors, "regraft", lambda value, path: value)


def with_stopped_writes(monkeypatch):
    """The other half-rule: a write without gradients cuts the path instead of keeping it."""
    monkeypatch.setattr(tensors, "regraft", lambda value, path: jax.lax.stop_gradient(value))


def with_writes_that_stop(monkeypatch):
    """Every write cuts the gradient, as if gradients were always off for it."""
    original = tensors.AutogradHandle.write

    def write(self, array, **settings):
        original(self, jax.lax.stop_gradient(array), **settings)

    monkeypatch.setattr(tensors.AutogradHandle, "write", write)


def without_writes(monkeypatch):
    monkeypatch.setattr(tensors.AutogradHandle, "write", lambda self, array, **settings: None)


def without_write_back(monkeypatch):
    def write(self, value, *, tracked, **_settings):
        self._views = ()
        self._handle = tensors.AutogradHandle(tensors.Storage(value), value, tracked)

    monkeypatch.setattr(tensors.BridgeTensor, "write", write)


def without_stand_ins(monkeypatch):
    monkeypatch.setattr(adoption.ConstantTable, "bind", lambda self, real, tensor: None)


def without_slots(monkeypatch):
    """The traced tensors are not put into the copied modules either."""
    without_stand_ins(monkeypatch)
    original = call_file.shadow

    def shadow(module, *args):
        twin, copies = original(module, *args)
        for m in module.modules():
            copies[id(m)]._parameters = dict(m._parameters)
        return twin, copies

    monkeypatch.setattr(call_file, "shadow", shadow)


def without_assigned_buffers(monkeypatch):
    """Returns the tensors that were put into the slots, whatever is there after the call."""
    original = call_file.slots_of

    def place(tensor):
        owner = nn.Module()
        owner._buffers["tensor"] = tensor
        return owner, "tensor"

    def slots(*args):
        return {name: place(getattr(owner, slot)) for name, (owner, slot) in original(*args).items()}

    monkeypatch.setattr(call_file, "slots_of", slots)


def without_ties(monkeypatch):
    """Gives each name a tensor of its own."""

    def state(module):
        every = {"remove_duplicate": False}
        return dict([*module.named_parameters(**every), *module.named_buffers(**every)])

    def slots(modules, names):
        return {name: call_file.slot_of(modules[""], name) for name in names}

    monkeypatch.setattr(call_file, "state_of", state)
    monkeypatch.setattr(call_file, "slots_of", slots)


def without_written_parameters(monkeypatch):
    original = bridge.Functional.run
    monkeypatch.setattr(bridge.Functional, "run", lambda self, *a, **k: original(self, *a, **k)._replace(params=a[0]))


def exporting(monkeypatch, belongs):
    """`belongs(name, tensor)` decides what is a parameter, instead of `requires_grad`."""

    original = bridge.export

    def export(module, **settings):
        fn = original(module, **settings)
        arrays = fn.params | fn.buffers
        trained = {n for n, t in call_file.state_of(module).items() if belongs(t)}
        return dataclasses.replace(
            fn,
            params={n: a for n, a in arrays.items() if n in trained},
            buffers={n: a for n, a in arrays.items() if n not in trained},
        )

    monkeypatch.setattr(parity_file, "export", export)


def with_frozen_among_the_parameters(monkeypatch):
    exporting(monkeypatch, lambda tensor: isinstance(tensor, nn.Parameter))


def without_promotion(monkeypatch):
    original = computation._results

    def results(context, func, values, outs, inputs):
        dtypes = [arrays.torch_dtype(jnp.asarray(value).dtype) for value in values]
        metas = [tensors.empty_meta(meta.shape, None, dtype) for meta, dtype in zip(outs, dtypes, strict=True)]
        return original(context, func, values, metas, inputs)

    monkeypatch.setattr(computation, "_results", results)


def without_autocast(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def without_visible_statistics(monkeypatch):
    for op, original in list(DECOMPOSITIONS.items()):
        if "batch_norm" in op.name():
            monkeypatch.setitem(
                DECOMPOSITIONS,
                op,
                lambda x, w, b, m, v, *rest, original=original: original(
                    x, w, b, m if m is None else m.clone(), v if v is None else v.clone(), *rest
                ),
            )


def ignoring(setting):
    """`Functional.run` without one of its keywords."""

    def rule(monkeypatch):
        original = bridge.Functional.run

        def run(self, *args, **kwargs):
            return original(self, *args, **{k: v for k, v in kwargs.items() if k != setting})

        monkeypatch.setattr(bridge.Functional, "run", run)

    rule.__name__ = f"without_{setting}"
    return rule


def with_one_draw_for_all(monkeypatch):
    monkeypatch.setattr(dispatch.Dispatch, "draws", property(lambda self: 0, lambda self, value: None), raising=False)


def without_generators(monkeypatch):
    """Every draw follows the call's key."""
    monkeypatch.setattr(random, "generator_of", lambda given: None)


RULES = {
    without_stop: ["NoGrad", "NoGradDecorator", "SetGradEnabled", "InferenceMode", "NestedEnableGrad"],
    without_own_cell: ["Detach", "DetachInPlace", "ParameterData", "ViewMadeWithoutGrad", "LeafMadeInside"],
    with_own_memory: ["DetachedViewSharesMemory", "LeafFilledThroughData"],
    without_visible_requires_grad: ["RequiresGradIsVisible"],
    without_regraft: [
        "SetItemWithoutGrad",
        "MaskedWithoutGrad",
        "InPlaceArithmeticWithoutGrad",
        "CopyIntoTracked",
        "LeafFilledWithoutGrad",
        "LeafFilledThroughData",
        "ParameterRenormalised",
    ],
    with_stopped_writes: ["SetItemWithoutGrad", "LeafFilledWithoutGrad", "LeafFilledThroughData", "DataAssigned"],
    with_writes_that_stop: ["InPlaceArithmetic", "MaskedIndexedScattered", "CopyFromOutside", "SetItem"],
    without_writes: ["InputWritten", "OutArgument", "CopyFromOutside", "Counters", "SpectralNorm"],
    without_write_back: ["SetItem", "WriteThroughChainOfViews", "ViewsSeeLaterWrites"],
    without_stand_ins: ["WeightKeptElsewhere"],
    without_slots: ["WeightNorm", "WeightNormByHook", "SpectralNorm"],
    without_assigned_buffers: ["Counters", "StateWithGraph"],
    without_ties: ["Tied"],
    without_written_parameters: ["ParameterRenormalised", "LeafFilledWithoutGrad"],
    with_frozen_among_the_parameters: ["Frozen", "LeafBuffer", "LeafFilledWithoutGrad"],
    without_promotion: ["ScalarsDoNotPromote", "MastersOfBfloat16", "MastersOfFloat16", "WholeModuleInBfloat16"],
    without_autocast: ["Autocast", "AutocastNested"],
    without_visible_statistics: ["BatchNorm", "BatchNormOfTheBatchAlone"],
    ignoring("train"): ["BatchNorm", "Dropout", "DropoutOfEveryKind"],
    ignoring("method"): ["OtherMethod"],
    without_generators: ["Generators"],
    with_one_draw_for_all: ["EveryDraw", "DropoutOfEveryKind", "DrawsInsideNoGrad"],
}
"""Rule taken out -> rows that must not pass then."""

SEEN = (bridge.BridgeError, AssertionError, IndexError)
"""Exceptions that may replace a wrong number; any other exception would be a defect of the rule here."""
