"""A model from outside the project, named `package.module:Class`: found, constructed, given what the trainer asks.

The class is used as it is. It is called with one dict if its constructor has a single required argument with `config`
(or `cfg`) in its name, otherwise with those keyword arguments that its signature names: the fields of `ModelConfig`
(`batch_size`, `seq_len`, `vocab_size`, `num_puzzle_identifiers`, `halt_max_steps`, `forward_dtype`, `loss_type`) and
all of `options`.

What the module has decides what it is:

- without `initial_carry` it is a plain `forward(inputs) -> logits`, (batch, seq_len) to (batch, seq_len, vocab_size);
  it is trained as a model of one ACT step;
- with `initial_carry(batch) -> carry` it is a model with adaptive computation time,
  `forward(carry, batch) -> (carry, outputs)`, as `ACTLossHead` wants it, and gets that loss head;
- with `initial_carry` and a `forward` that takes `return_keys` it is a loss head already:
  `forward(carry, batch, return_keys) -> (carry, loss, metrics, returned, all_halted)`, everything as in `ACTLossHead`.

In evaluation all sequences halt at `halt_max_steps` and none before. A carry is made of tensors in dicts, tuples, lists
and dataclasses.
"""

import importlib
import inspect
import os
import sys
import textwrap
import traceback
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from models_torch.act import ACTCarry
from models_torch.config import ModelConfig
from models_torch.losses import ACTLossHead

METRICS = ("count", "accuracy", "exact_accuracy", "lm_loss")


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(ModelConfig):
    """What is known of a module from outside the project, and what it is to be called with."""

    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class, as a JSON object

    def __post_init__(self):
        super().__post_init__()
        for name in known_of_every_model(self):
            if name in self.options:
                # The trainer would go by one of the two and the module by the other.
                raise ValueError(f"options name {name}, which is a field of its own; the class is given arch.{name}")


def known_of_every_model(config: ModelConfig) -> dict[str, Any]:
    """The fields of `ModelConfig` with their values."""
    return {each.name: getattr(config, each.name) for each in fields(ModelConfig)}


class OneStep(nn.Module):
    """A plain module as a model of one ACT step, that halts every sequence and has no opinion on its answer."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def initial_carry(self, batch: dict[str, Tensor]) -> ACTCarry:
        """All halted."""
        count, device = batch["inputs"].shape[0], batch["inputs"].device
        ones = torch.ones(count, dtype=torch.int32, device=device)
        return ACTCarry((), ones, ones.bool(), {key: torch.zeros_like(value) for key, value in batch.items()})

    def forward(self, carry: ACTCarry, batch: dict[str, Tensor]) -> tuple[ACTCarry, dict[str, Tensor]]:
        """The answer; halting logits of 0, whose loss is a constant."""
        logits = self.inner(batch["inputs"])
        q_halt = torch.zeros(logits.shape[0], device=logits.device)
        return ACTCarry((), carry.steps, carry.halted, batch), {"logits": logits, "q_halt_logits": q_halt}


def is_outside(name: str) -> bool:
    """Whether `name` means a module from outside."""
    return ":" in name


def find(name: str) -> type[nn.Module]:
    """The class that `package.module:Class` names, from PYTHONPATH or the current folder.

    Raises ValueError where there is none.
    """
    module_name, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing installed is shadowed
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"model {name!r}: {module_name!r} cannot be imported ({_told(error)}); "
            "put its folder on PYTHONPATH, or start in it"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        modules = [n for n in classes if issubclass(vars(module)[n], nn.Module)]
        has = ", ".join(modules) or "none"
        raise ValueError(f"model {name!r}: {module_name} has no nn.Module class {class_name!r}; it has {has}")
    return found


def is_plain(found: type[nn.Module]) -> bool:
    """Whether a class is a plain `forward(inputs) -> logits`, which takes one ACT step."""
    return not hasattr(found, "initial_carry")


def build(name: str, config: OutsideConfig) -> nn.Module:
    """The module with a loss head, tried on a small batch.

    Raises ValueError where the class is not there, refuses its arguments, or does not keep the contract above.
    """
    found = find(name)
    if is_plain(found) and config.halt_max_steps != 1:
        raise ValueError(
            f"halt_max_steps is {config.halt_max_steps}, and {name} has no initial_carry to go on from; use 1"
        )
    module = _construct(name, found, config)
    if is_plain(found):
        head = ACTLossHead(OneStep(module), config.loss_type)
    elif "return_keys" in inspect.signature(found.forward).parameters:
        head = module
    else:
        head = ACTLossHead(module, config.loss_type)
    _try(name, head, config)
    return head


def _construct(name: str, found: type[nn.Module], config: OutsideConfig) -> nn.Module:
    arguments = known_of_every_model(config) | config.options
    parameters = inspect.signature(found).parameters
    required = [
        key
        for key, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_dict = len(required) == 1 and any(word in required[0].lower() for word in ("config", "cfg"))
    if not takes_dict:
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        surplus = [key for key in config.options if key not in parameters]
        if surplus and not open_ended:
            raise ValueError(
                f"{name} takes no {', '.join(surplus)}; its arguments are {', '.join(parameters) or 'none'}"
            )
        arguments = {key: value for key, value in arguments.items() if key in parameters or key in config.options}
    try:
        return found(arguments) if takes_dict else found(**arguments)
    except Exception as error:
        raise ValueError(
            f"{name} refused {arguments} ({_told(error)}); give what it wants in --arch.options, a JSON object"
        ) from error


def _try(name: str, head: nn.Module, config: OutsideConfig) -> None:
    """One ACT step in evaluation mode on two sequences of zeros: a broken contract shows here, not while tracing."""
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
            f"{name} does not run on inputs of shape (2, {config.seq_len}) ({_told(error)}); "
            "docs/architectures.md says what a module has to offer"
        ) from error
    head.train()
    *answers, classes = shapes.pop("logits", (2, config.seq_len, config.vocab_size))
    expected = {"loss": (), "preds": (2, config.seq_len), "q_halt_logits": (2,)}
    if tuple(answers) != (2, config.seq_len) or classes < config.vocab_size:
        found = (*answers, classes)
        raise ValueError(f"{name} gives logits of shape {found}, expected (2, {config.seq_len}, {config.vocab_size})")
    if shapes != expected:
        raise ValueError(f"{name} gives outputs of shapes {shapes}, expected {expected}")
    if missing := [key for key in METRICS if key not in metrics]:
        raise ValueError(
            f"{name} gives no metric {', '.join(missing)}; `ACTLossHead` in models_torch/losses.py has them"
        )
    if halted and config.halt_max_steps > 1:
        raise ValueError(
            f"{name} halts after one step of evaluation, expected to go on to halt_max_steps, which is "
            f"{config.halt_max_steps}; change it, or use halt_max_steps 1"
        )


def _told(error: Exception) -> str:
    """An error in one line, with the line of the user's code that it came from."""
    passed = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, importlib.__file__)]
    theirs = [f for f in passed if not f.filename.startswith("<") and "site-packages" not in f.filename]
    where = f", {os.path.basename(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' …')}{where}"
