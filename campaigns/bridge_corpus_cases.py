"""The cases of `campaigns.bridge_corpus`, by name."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from campaigns.bridge_corpus_sides import Case, Inputs
from models_torch import registry

LADDER = {
    "attention": ("trm", {"H_cycles": 3}),
    "mixer": ("trm", {"H_cycles": 3, "mlp_t": True, "pos_encodings": "none"}),
    "continue": ("trm", {"no_ACT_continue": False}),
    "window": ("trm", {"attention_window": 3, "cycle_penalty": 0.3}),
    "convolution": ("trm", {"convolution_window": 3}),
    "trm_singlez": ("trm_singlez", {"pos_encodings": "learned"}),
    "trm_hier6": ("trm_hier6", {"pos_encodings": "none"}),
    "hrm": ("hrm", {}),
    "transformer": ("transformer", {"pos_encodings": "learned"}),
}
"""The variants of `tests/bridge/test_trm_ladder.py`."""

Cases = dict[str, Callable[[], Any]]
"""Maps names to functions, which are called in the process that runs the case."""


def all_cases(zoo: Path | None) -> Cases:
    """Returns the cases of the project or, if a folder is given, those of the zoo in it."""
    if zoo:
        return zoo_cases(zoo)
    from campaigns.bridge_corpus_steps import steps  # its imports are not needed for the zoo

    return rows() | ladder() | language_models() | steps()


def rows() -> Cases:
    """Returns the rows of semantics of `tests/bridge`, in both modes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bridge"))
    table = importlib.import_module("rows").ROWS

    def case(row: Any, train: bool) -> Case:
        return Case(
            row.build,
            lambda call: row.example(call + 1),
            train,
            row.method,
            input_gradients=row.input_gradients,
            spans_calls=row.spans_calls,
            tolerance=max(row.tolerance, 1e-4),
        )

    return {
        f"row/{name}/{'train' if train else 'eval'}": lambda row=row, train=train: case(row, train)
        for name, row in table.items()
        for train in (True, False)
    }


def ladder() -> Cases:
    """Returns a tiny case of every puzzle architecture, with exploration and halting; calls pass on their carry."""

    def case(model: str, fields: dict[str, Any], train: bool) -> Case:
        tiny = registry.architecture(model).tiny_config
        config = dataclasses.replace(tiny, **({"halt_exploration_prob": 0.5} | fields))

        def build(dtype: str = "float32") -> nn.Module:
            torch.manual_seed(0)
            module: Any = registry.build(model, dataclasses.replace(config, forward_dtype=dtype))
            with torch.no_grad():
                module.model.inner.puzzle_emb.weights.normal_(generator=torch.Generator().manual_seed(0))
                module.model.inner.q_head.weight.normal_(std=0.3)
                module.model.inner.q_head.bias.zero_()
            return module

        def double() -> nn.Module:
            wide = build("float64").double()
            wide.load_state_dict(build().state_dict())
            return wide

        def inputs(call: int) -> Inputs:
            batch = registry.example_batch(config, config.batch_size, seed=call + 1)
            carry = start.initial_carry(batch)
            return (), {"carry": carry, "batch": batch, "return_keys": ("logits", "q_halt_logits", "preds")}

        start: Any = build()
        return Case(build, inputs, train, loss=lambda out: out[1], advance=with_carry, double=double)

    return {
        f"ladder/{name}/{'train' if train else 'eval'}": lambda m=model, f=fields, t=train: case(m, f, t)
        for name, (model, fields) in LADDER.items()
        for train in (True, False)
    }


def with_carry(outputs: Any, inputs: Inputs) -> Inputs:
    """Returns the inputs of the next call: its batch, and the carry that the previous call returned."""
    return inputs[0], inputs[1] | {"carry": outputs[0]}


def language_models() -> Cases:
    """Returns the cases of the two language models, tiny: loss and logits."""

    def case(model: str, with_targets: bool) -> Case:
        config = registry.LANGUAGE_MODELS[model].tiny_config

        def build() -> nn.Module:
            torch.manual_seed(0)
            module = registry.build_model(model, config)
            with torch.no_grad():  # some weights are zero at the start, which would hide gradients
                for parameter in module.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            return module

        def double() -> nn.Module:
            wide = registry.build_model(model, dataclasses.replace(config, forward_dtype="float64")).double()
            wide.load_state_dict(build().state_dict())
            return wide

        def inputs(call: int) -> Inputs:
            draws = torch.Generator().manual_seed(call)
            ids = [torch.randint(config.vocab_size, (2, config.seq_len), generator=draws) for _ in range(2)]
            return tuple(ids if with_targets else ids[:1]), {}

        return Case(build, inputs, True, double=double)

    return {
        f"language/{model}/{'loss' if targets else 'logits'}": lambda m=model, t=targets: case(m, t)
        for model in registry.LANGUAGE_MODELS
        for targets in (True, False)
    }


# ---- the zoo


def zoo_cases(folder: Path) -> Cases:
    """Returns the cases of published models, in evaluation mode: as called, and with `use_cache=False`.

    If the folder has `results*.tsv`, only the models that are named there.
    """
    sys.path.insert(0, str(folder))
    _import_torchvision()
    builders = importlib.import_module("build").builders()
    chosen = {line.split("\t")[0] for file in folder.glob("results*.tsv") for line in file.read_text().splitlines()}

    def case(builder: Callable, helped: bool) -> Case:
        def built(seed: int) -> tuple[nn.Module, tuple, dict]:
            torch.manual_seed(seed)
            module, args, kwargs = builder()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            if helped:
                _without_cache(module)
            return module, args, kwargs

        return Case(lambda: built(0)[0], lambda call: built(call)[1:], False)

    return {
        f"zoo/{name}/{'with help' if helped else 'as called'}": lambda b=builder, h=helped: case(b, h)
        for helped in (False, True)
        for name, (_, builder) in builders.items()
        if not chosen or name in chosen
    }


def _without_cache(module: nn.Module) -> None:
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        parts = [getattr(config, name) for name in vars(config) if name.endswith("_config")] if config else []
        for part in (config, *parts):
            if getattr(part, "use_cache", False):
                part.use_cache = False


def _import_torchvision() -> None:
    """Imports torchvision beside a build of PyTorch that its compiled operators do not fit.

    It looks two operators up while it is imported; their names are defined, and nothing calls them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")


_KEPT: list[Any] = []
"""Libraries with definitions of operators, kept alive because the definitions last only as long as they do."""
