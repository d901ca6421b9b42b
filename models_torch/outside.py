"""Models of the user, named `package.module:Class`: imports, constructs and wraps them for training.

The class is not changed. It is used by the following rules; docs/architectures.md shows examples.

Construction. The *values* are the fields of the configuration (`batch_size`, `seq_len`, `vocab_size`, `forward_dtype`,
`num_puzzle_identifiers`, `halt_max_steps`, `loss_type`) and everything in `options`. The first rule that
applies decides:

1. the class has a classmethod `from_config`: it is called with one dict of all values and returns the module;
2. the constructor has exactly one required parameter and annotates it as `dict` or `Mapping`: it is called with one
   dict of all values, as the published TRM and HRM are;
3. otherwise the constructor is called with keyword arguments: all of `options`, and the fields that its signature
   names.

Interface. The attributes of the class decide:

- without `initial_carry` it is a plain module, `forward(inputs) -> logits`, from (batch, seq_len) to
  (batch, seq_len, vocab_size), trained as a model of one ACT step;
- with `initial_carry(batch) -> carry` it is a model with adaptive computation time,
  `forward(carry, batch) -> (carry, outputs)` as `ACTLossHead` expects it, and is wrapped in that loss head;
- with `initial_carry` and a `forward` with a parameter `return_keys` it is a loss head,
  `forward(carry, batch, return_keys) -> (carry, loss, metrics, returned, all_halted)` as in `ACTLossHead`.

In evaluation all sequences halt at `halt_max_steps` and none before. A carry consists of tensors in dicts, tuples,
lists and dataclasses.

Dtype. A module that computes nothing in a `forward_dtype` of 16 bits runs under `torch.autocast`; its carry keeps the
dtypes that it has.
"""

import functools
import importlib
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_origin

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models_torch.act import ACTCarry
from models_torch.config import ACTConfig, ModelConfig
from models_torch.losses import ACTLossHead

METRICS = ("count", "accuracy", "exact_accuracy", "lm_loss")


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(ACTConfig):
    """The configuration of a model of the user."""

    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class, as a JSON object

    def __post_init__(self):
        super().__post_init__()
        for name in constructor_values(self).keys() & self.options.keys():
            # The trainer would use one of the two values and the module the other.
            raise ValueError(f"options name {name}, which is a separate field; set arch.{name} instead")


def constructor_values(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that can be passed to the class, without `options`."""
    return {each.name: getattr(config, each.name) for each in fields(config) if each.name != "options"}


class OneStep(nn.Module):
    """A plain module as a model of one ACT step, after which every sequence halts."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def initial_carry(self, batch: dict[str, Tensor]) -> ACTCarry:
        """Returns a carry with every sequence halted and no latents."""
        count = batch["inputs"].shape[0]
        device = batch["inputs"].device
        ones = torch.ones(count, dtype=torch.int32, device=device)
        return ACTCarry((), ones, ones.bool(), {key: torch.zeros_like(value) for key, value in batch.items()})

    def forward(self, carry: ACTCarry, batch: dict[str, Tensor]) -> tuple[ACTCarry, dict[str, Tensor]]:
        """Returns the logits of the module, and halting logits of 0, whose loss is constant."""
        logits = self.inner(batch["inputs"])
        q_halt = torch.zeros(logits.shape[0], device=logits.device)
        return ACTCarry((), carry.steps, carry.halted, batch), {"logits": logits, "q_halt_logits": q_halt}


def is_outside(name: str) -> bool:
    """Returns True if `name` has the form `package.module:Class`."""
    return ":" in name


def find(name: str) -> type[nn.Module]:
    """Imports the class `package.module:Class` from PYTHONPATH or the current folder.

    Raises ValueError if it cannot be imported or is not an `nn.Module` class.
    """
    module_name, _, class_name = name.partition(":")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace("/", ".")
        raise ValueError(f"model {name!r} has a file in place of a module; use --model {module_name}:{class_name}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no installed package is shadowed
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"model {name!r}: {module_name!r} cannot be imported ({one_line(error)}); "
            "add its folder to PYTHONPATH, or run in this folder"
        ) from error
    model_class = getattr(module, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        modules = [n for n in classes if issubclass(vars(module)[n], nn.Module)]
        available = ", ".join(modules) or "none"
        raise ValueError(
            f"model {name!r}: {module_name} has no nn.Module class {class_name!r}; use one of: {available}"
        )
    return model_class


def is_plain(model_class: type[nn.Module]) -> bool:
    """Returns True if a class is a plain `forward(inputs) -> logits`, trained as one ACT step."""
    return not hasattr(model_class, "initial_carry")


def is_loss_head(model_class: type[nn.Module]) -> bool:
    """Returns True if a class computes its own loss and metrics."""
    return not is_plain(model_class) and "return_keys" in inspect.signature(model_class.forward).parameters


def has_from_config(model_class: type[nn.Module]) -> bool:
    """Returns True if a class has a classmethod `from_config` (rule 1)."""
    return inspect.ismethod(getattr(model_class, "from_config", None))


def takes_one_dict(model_class: type[nn.Module]) -> bool:
    """Returns True if the only required parameter of a constructor is annotated as `dict` or `Mapping` (rule 2)."""
    required = _required_parameters(model_class)
    return len(required) == 1 and _is_mapping(required[0].annotation)


def build_model(name: str, config: ModelConfig) -> nn.Module:
    """Constructs the module by the rules above.

    Raises ValueError if the class cannot be imported or raises an error.
    """
    model_class = find(name)
    values = constructor_values(config) | getattr(config, "options", {})
    construct = model_class
    keywords = False
    if has_from_config(model_class):
        construct = model_class.from_config  # pyright: ignore[reportAttributeAccessIssue]
    elif not takes_one_dict(model_class):
        values = _keyword_arguments(name, model_class, config)
        keywords = True
    return constructed(name, lambda: construct(**values) if keywords else construct(values), values)


def constructed(name: str, construct: Callable[[], nn.Module], values: Mapping[str, Any]) -> nn.Module:
    """Calls a constructor. Raises ValueError with the values that it gets if it raises an error."""
    try:
        return construct()
    except Exception as error:
        raise ValueError(
            f"{name} cannot be constructed with {dict(values)} ({one_line(error)}); set its arguments in "
            "--arch.options, a JSON object"
        ) from error


def loss_head(model: nn.Module, config: ACTConfig) -> nn.Module:
    """Returns the result of `build_model` with a loss head, without a check of its interface."""
    if is_plain(type(model)):
        model = OneStep(model)
    return model if is_loss_head(type(model)) else ACTLossHead(model, config.loss_type)


def with_loss_head(name: str, model: nn.Module, config: ACTConfig) -> nn.Module:
    """Adds a loss head to the result of `build_model`, and runs it on a small batch, perhaps under autocast.

    Raises ValueError if the module does not have the interface above.
    """
    own = model
    if is_plain(type(model)) and config.halt_max_steps != 1:
        raise ValueError(
            f"halt_max_steps is {config.halt_max_steps}, but {name} has no initial_carry for further steps; use 1"
        )
    head = loss_head(model, config)
    with _ComputedDtypes() as computed:
        _try(name, head, config)
    if config.torch_dtype in (torch.bfloat16, torch.float16) and config.torch_dtype not in computed.dtypes:
        own.__class__ = _under_autocast(type(own), config.torch_dtype)
        try:
            _try(name, head, config)
        except ValueError as error:
            dtype = config.forward_dtype
            raise ValueError(f"under autocast to {dtype}, {error}; use --arch.forward-dtype float32") from error
    return head


class _ComputedDtypes(TorchDispatchMode):
    """Collects the dtypes of the results of all operations."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        listed = results if isinstance(results, tuple | list) else (results,)
        self.dtypes.update(each.dtype for each in listed if isinstance(each, Tensor))
        return results


def _under_autocast(model_class: type[nn.Module], dtype: torch.dtype) -> type[nn.Module]:
    """Returns a subclass whose `forward` runs under autocast and returns a carry with the dtypes of the one it gets.

    A subclass keeps the names of the parameters, which a module around the model would change.
    """

    class UnderAutocast(model_class):
        @functools.wraps(model_class.forward)  # with its signature, which decides the interface
        def forward(self, *args: Any, **keywords: Any) -> Any:
            device = next((each.device.type for each in self.parameters()), "cpu")
            with torch.autocast(device, dtype):
                results = super().forward(*args, **keywords)
            if is_plain(model_class):
                return results
            before = keywords["carry"] if "carry" in keywords else args[0]
            return (_in_dtypes_of(before, results[0]), *results[1:])

    return renamed(UnderAutocast, model_class)


def renamed(subclass: type[nn.Module], model_class: type[nn.Module]) -> type[nn.Module]:
    """Gives a subclass the names of the class, which messages show."""
    subclass.__name__ = model_class.__name__
    subclass.__qualname__ = model_class.__qualname__
    subclass.__module__ = model_class.__module__
    return subclass


def _in_dtypes_of(before: Any, carry: Any) -> Any:
    """Returns the carry with the dtypes that its tensors of floating point have in `before`."""
    if isinstance(carry, Tensor):
        return carry.to(before.dtype) if carry.is_floating_point() else carry
    if is_dataclass(carry):
        values = {
            each.name: _in_dtypes_of(getattr(before, each.name), getattr(carry, each.name)) for each in fields(carry)
        }
        return replace(carry, **values)  # pyright: ignore[reportArgumentType]
    if isinstance(carry, Mapping):
        return {key: _in_dtypes_of(before[key], value) for key, value in carry.items()}
    if isinstance(carry, tuple | list):
        values = [_in_dtypes_of(*pair) for pair in zip(before, carry, strict=True)]
        return type(carry)(*values) if hasattr(carry, "_fields") else type(carry)(values)
    return carry


def _required_parameters(model_class: type[nn.Module]) -> list[inspect.Parameter]:
    parameters = inspect.signature(model_class).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        return annotation.partition("[")[0].rpartition(".")[2] in ("dict", "Dict", "Mapping", "MutableMapping")
    annotated = get_origin(annotation) or annotation
    return isinstance(annotated, type) and annotated is not inspect.Parameter.empty and issubclass(annotated, Mapping)


def _keyword_arguments(name: str, model_class: type[nn.Module], config: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of rule 3. Raises ValueError for unknown options and missing arguments."""
    parameters = inspect.signature(model_class).parameters
    options = getattr(config, "options", {})
    surplus = [key for key in options if key not in parameters]
    if surplus and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(f"{name} takes no {', '.join(surplus)}; use its arguments: {', '.join(parameters) or 'none'}")
    fields_named = {key: value for key, value in constructor_values(config).items() if key in parameters}
    arguments = fields_named | options
    if missing := [p.name for p in _required_parameters(model_class) if p.name not in arguments]:
        raise ValueError(
            f"{name} requires {', '.join(missing)}; give it in --arch.options, a JSON object, or annotate the only "
            "parameter as dict to get all values in one"
        )
    return arguments


def _try(name: str, head: nn.Module, config: ACTConfig) -> None:
    """Runs one ACT step in evaluation mode on two sequences of zeros, so that interface errors occur before tracing."""
    batch = {
        "inputs": torch.zeros(2, config.seq_len, dtype=torch.int32),
        "labels": torch.zeros(2, config.seq_len, dtype=torch.int32),
        "puzzle_identifiers": torch.zeros(2, dtype=torch.int32),
    }
    head.eval()
    try:
        with torch.no_grad():
            carry = head.initial_carry(batch)  # pyright: ignore[reportCallIssue]
            outputs = head(carry=carry, batch=batch, return_keys=("logits", "preds", "q_halt_logits"))
            _, loss, metrics, returned, all_halted = outputs
        shapes = {key: tuple(value.shape) for key, value in ({"loss": loss} | returned).items()}
        halted = bool(all_halted)
    except Exception as error:
        raise ValueError(
            f"{name} does not run on inputs of shape (2, {config.seq_len}) ({one_line(error)}); "
            "docs/architectures.md has the interface of a module"
        ) from error
    head.train()
    *leading, classes = shapes.pop("logits", (2, config.seq_len, config.vocab_size))
    expected = {"loss": (), "preds": (2, config.seq_len), "q_halt_logits": (2,)}
    if tuple(leading) != (2, config.seq_len) or classes < config.vocab_size:
        shape = (*leading, classes)
        raise ValueError(f"{name} returns logits of shape {shape}, expected (2, {config.seq_len}, {config.vocab_size})")
    if shapes != expected:
        raise ValueError(f"{name} returns outputs of shapes {shapes}, expected {expected}")
    if missing := [key for key in METRICS if key not in metrics]:
        raise ValueError(
            f"{name} returns no metric {', '.join(missing)}; add the metrics of `ACTLossHead` in models_torch/losses.py"
        )
    if halted and config.halt_max_steps > 1:
        raise ValueError(
            f"{name} halts after one step of evaluation, expected to run to halt_max_steps, which is "
            f"{config.halt_max_steps}; change it, or use halt_max_steps 1"
        )


def one_line(error: Exception) -> str:
    """Formats an error in one line, with the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, importlib.__file__)]
    own = [f for f in frames if not f.filename.startswith("<") and "site-packages" not in f.filename]
    where = f", {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' …')}{where}"
