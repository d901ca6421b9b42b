"""Language models of the user, named `package.module:Class`, such as a published GPT or one of Hugging Face.

The class is not changed. It is used by the following rules; docs/language.md shows examples.

Construction. If a configuration class is found, it is called with the options and the sizes as keyword arguments, and
the model with its result. It is `config_class` of the model class, as in Hugging Face, or the class `<Class>Config` in
the module of the model class, as in nanochat. Otherwise the rules of `outside.py` apply. A method `init_weights`
that the class itself defines is called afterwards.

Interface. `forward(tokens, targets, loss_reduction="none")`, recognized by the parameter `loss_reduction`, returns
the loss of each target, 0 for -1, as in nanochat. Any other `forward(tokens)` returns logits of shape
(batch, seq, vocab), or an object with the attribute `logits`; the loss is then the cross entropy in float32.
"""

import inspect
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models_torch import outside
from models_torch.config import ModelConfig
from models_torch.gpt import IGNORED_TARGET
from models_torch.ranges import Choices

SIZES = {
    "seq_len": ("seq_len", "sequence_len", "max_position_embeddings", "n_positions", "block_size", "max_seq_len"),
    "vocab_size": ("vocab_size",),
}
"""Names of the sizes in configuration classes."""


@dataclass(frozen=True, kw_only=True)
class OutsideLanguageConfig(ModelConfig):
    """The configuration of a language model of the user."""

    forward_dtype: Annotated[str, Choices(("float32", "bfloat16"))] = "bfloat16"  # float32, or bfloat16 by autocast
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class, as a JSON object

    def __post_init__(self):
        super().__post_init__()
        for name in ("vocab_size", "seq_len"):
            for published in SIZES[name]:
                if published in self.options:
                    raise ValueError(f"options name {published}, which is a separate field; set arch.{name} instead")


def build_model(name: str, config: OutsideLanguageConfig) -> nn.Module:
    """Constructs the module by the rules above; its `forward` returns the loss of each target.

    Raises ValueError if the class cannot be imported, raises an error, or has another interface.
    """
    model_class = outside.find(name)
    config_class = _config_class(model_class)
    if config_class is None:
        module = outside.build_model(name, config)
    else:
        arguments = _arguments(name, config_class, config)
        module = outside.constructed(name, lambda: model_class(config_class(**arguments)), arguments)
    if "init_weights" in vars(model_class):
        module.init_weights()  # pyright: ignore[reportCallIssue]
    module.__class__ = _with_losses(type(module), config)
    _try(name, module, config)
    return module


def _config_class(model_class: type[nn.Module]) -> type | None:
    beside = getattr(sys.modules[model_class.__module__], f"{model_class.__name__}Config", None)
    found = getattr(model_class, "config_class", None) or beside
    return found if isinstance(found, type) else None


def _arguments(name: str, config_class: type, config: OutsideLanguageConfig) -> dict[str, Any]:
    """Returns the keyword arguments of the configuration class. Raises ValueError for unknown options."""
    parameters = inspect.signature(config_class).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())  # Hugging Face takes any word
    default = config_class() if open_ended else None

    def known(option: str) -> bool:
        return option in parameters or (open_ended and hasattr(default, option))

    if surplus := [option for option in config.options if not known(option)]:
        names = ", ".join(p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD)
        raise ValueError(f"{config_class.__name__} of {name} takes no {', '.join(surplus)}; use its fields: {names}")
    arguments = dict(config.options)
    for size, names in SIZES.items():
        published = next((each for each in names if known(each)), None)
        if published is not None:
            arguments[published] = getattr(config, size)
    return arguments


def _with_losses(model_class: type[nn.Module], config: OutsideLanguageConfig) -> type[nn.Module]:
    """Returns a subclass whose `forward(tokens, targets, loss_reduction)` has the losses of the targets.

    A subclass keeps the names of the parameters, which a module around the model would change.
    """
    own = inspect.signature(model_class.forward).parameters
    if "loss_reduction" in own and config.forward_dtype == "float32":
        return model_class
    options = {"use_cache": False} if "use_cache" in own else {}

    class WithLosses(model_class):
        def forward(self, tokens: Tensor, targets: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            mixed = config.torch_dtype != torch.float32
            with torch.autocast(tokens.device.type, config.torch_dtype if mixed else None, enabled=mixed):
                if "loss_reduction" in own:
                    return super().forward(tokens, targets, *args, **kwargs)
                return losses(super().forward(tokens, **options), targets, **kwargs)

    return outside.renamed(WithLosses, model_class)


def losses(outputs: Any, targets: Tensor | None, loss_reduction: str = "mean") -> Tensor:
    """Returns the cross entropy of logits in float32, flat for `"none"`; without targets, the logits."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    if targets is None:
        return logits
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten().long(), ignore_index=IGNORED_TARGET, reduction=loss_reduction)


def _try(name: str, module: nn.Module, config: OutsideLanguageConfig) -> None:
    """Runs the module on two sequences that differ in the last token, so that its errors occur before tracing."""
    length = config.seq_len
    tokens = torch.zeros(2, length, dtype=torch.int32)
    tokens[1, -1] = 1
    module.eval()
    try:
        with torch.no_grad():
            losses = module(tokens, torch.zeros(2, length, dtype=torch.int64), loss_reduction="none")
        shape = tuple(losses.shape)
    except Exception as error:
        raise ValueError(
            f"{name} does not run on tokens of shape (2, {length}) ({outside.one_line(error)}); docs/language.md has "
            "the interface of a module"
        ) from error
    module.train()
    if shape not in ((2 * length,), (2, length)):
        raise ValueError(f"{name} returns losses of shape {shape}, expected ({2 * length},), one for each target")
    first, second = losses.reshape(2, length)[:, :-1].float()
    if not torch.allclose(first, second, rtol=1e-2, atol=1e-3):
        raise ValueError(f"{name} is not causal: the loss of a target depends on later tokens; mask its attention")
