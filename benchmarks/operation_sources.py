"""Counts who serves the operations that models use: torchax, the bridge, or PyTorch's decompositions. Prints Markdown.

    python -m benchmarks.operation_sources [--zoo FOLDER] [--without-transformers]

Every model is traced once, in training mode, without computing anything. The text below the table lists what would be
needed without torchax.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
import tyro
from torch import nn

import bridge
from bridge._compat.torchax import decomposition, pytorch_decomposition
from bridge.dispatch import computation
from bridge.tensor.arrays import array_of
from bridge.tensor.pytrees import convert
from models_torch import registry

Model = tuple[nn.Module, tuple, dict[str, Any]]
"""A module, and the arguments and keywords of a call."""

SERVERS = {
    "ours": "bridge",
    "torchax": "torchax",
    "torchax, composed": "a decomposition of torchax's",
    "PyTorch, composed": "a decomposition of PyTorch's",
    "view": "view",
    "random": "random",
    "unsupported": "nothing",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Count which library serves the operations of models."""

    zoo: Path | None = None
    """Folder with `build.py`, whose `builders()` maps names to (family, function that makes a `Model`)."""
    transformers: bool = True
    """Trace a few models of Hugging Face, too."""


def models(options: Options) -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yields the models by name."""
    for name in registry.ARCHITECTURES:
        yield name, lambda name=name: puzzle_model(name)
    for name in registry.LANGUAGE_MODELS:
        yield name, lambda name=name: language_model(name)
    for name in TORCH:
        yield name, lambda name=name: TORCH[name]()
    if options.transformers:
        for name, (fields, inputs) in TRANSFORMERS.items():
            yield name, lambda n=name, f=fields, i=inputs: of_transformers(n, f, i)
    if options.zoo is not None:
        sys.path.insert(0, str(options.zoo))
        for name, (_, build) in importlib.import_module("build").builders().items():
            yield name, build


def puzzle_model(name: str) -> Model:
    config = registry.architecture(name).tiny_config
    module: Any = registry.build(name, config)
    batch = registry.example_batch(config, config.batch_size, seed=0)
    return module, (), {"carry": module.initial_carry(batch), "batch": batch}


def language_model(name: str) -> Model:
    config = registry.LANGUAGE_MODELS[name].tiny_config
    return registry.build_model(name, config), (tokens(config.vocab_size), tokens(config.vocab_size)), {}


def tokens(count: int, length: int = 16) -> torch.Tensor:
    return torch.randint(1, count, (2, length))


TORCH: dict[str, Callable[[], Model]] = {
    "nn.Transformer": lambda: (
        nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        (torch.randn(2, 5, 16), torch.randn(2, 4, 16)),
        {},
    ),
    "nn.LSTM": lambda: (nn.LSTM(8, 16, 2, bidirectional=True), (torch.randn(5, 2, 8),), {}),
    "nn.GRU": lambda: (nn.GRU(8, 16), (torch.randn(5, 2, 8),), {}),
    "convolutional network": lambda: (
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5)),
        ),
        (torch.randn(2, 3, 16, 16),),
        {},
    ),
    "autoencoder": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.GELU(), nn.Upsample(scale_factor=2), nn.ConvTranspose2d(8, 3, 3)),
        (torch.randn(2, 3, 16, 16),),
        {},
    ),
}
"""Modules of PyTorch."""

_TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGE = {"image_size": 32, "patch_size": 8} | {k: v for k, v in _TEXT.items() if k != "vocab_size"}
TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2LMHeadModel": ({"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, "labels"),
    "LlamaForCausalLM": (_TEXT | {"num_key_value_heads": 2}, "labels"),
    "MistralForCausalLM": (_TEXT | {"num_key_value_heads": 2, "sliding_window": 4}, "labels"),
    "MixtralForCausalLM": (_TEXT | {"num_key_value_heads": 2, "num_local_experts": 4}, "labels"),
    "GemmaForCausalLM": (_TEXT | {"num_key_value_heads": 2, "head_dim": 8}, "labels"),
    "GPTNeoXForCausalLM": (_TEXT, "labels"),
    "BertForMaskedLM": (_TEXT, "labels"),
    "DistilBertModel": ({"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}, "ids"),
    "ElectraModel": (_TEXT, "ids"),
    "T5ForConditionalGeneration": (
        {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        "labels",
    ),
    "BartForConditionalGeneration": (
        {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
        | {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "labels",
    ),
    "MambaForCausalLM": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "labels"),
    "ViTModel": (_IMAGE, "image"),
    "DeiTModel": (_IMAGE, "image"),
    "ResNetModel": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "image"),
    "ConvNextModel": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image"),
}
"""Maps a class of Hugging Face to the fields of its configuration and the name of its input."""


def of_transformers(name: str, fields: dict[str, Any], inputs: str) -> Model:
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, name)
    module = kind(kind.config_class(**fields))
    module.set_experts_implementation("batched_mm")
    for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
        config.use_cache = False
    if inputs == "image":
        return module, (torch.randn(2, 3, 32, 32),), {}
    ids = tokens(60, 8)
    return module, (), {"input_ids": ids} | ({"labels": ids.clone()} if inputs == "labels" else {})


def servers_of(model: Model) -> set[tuple[str, str]]:
    """Returns pairs of an operation of one call and what serves it."""
    module, args, kwargs = model
    composed: set[tuple[str, str]] = set()

    def noted(op: Any) -> Any:
        made_of = decomposition(op)
        if made_of is not None:
            composed.add((op.name(), "PyTorch, composed" if is_of_pytorch(op, made_of) else "torchax, composed"))
        return made_of

    fn = bridge.export(module, int64="wrap")
    args, kwargs = convert((args, kwargs), lambda v: array_of(v) if torch.is_tensor(v) else v)
    with mock.patch.object(computation, "decomposition", noted):
        survey = fn.survey(*args, rng=jax.random.key(0), train=True, **kwargs)
    return set(survey.ops) | composed | {(name, "unsupported") for name in survey.unsupported}


def is_of_pytorch(op: Any, made_of: Callable) -> bool:
    try:
        return pytorch_decomposition(op).__module__.startswith("torch.") and made_of.__module__.startswith("torch.")
    except KeyError:
        return False


def used(options: Options) -> tuple[dict[tuple[str, str], set[str]], list[str], dict[str, str]]:
    """Returns a map from (operation, what serves it) to models, the traced models, and the others with the reason."""
    users: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    traced = []
    failed = {}
    for name, build in models(options):
        torch.manual_seed(0)
        try:
            sources = servers_of(build())
        except Exception as error:  # a model of others, or a refusal
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            continue
        traced.append(name)
        for each in sources:
            users[each].add(name)
    return users, traced, failed


def by_name(name: str) -> Any:
    """Returns the overload with a name such as `aten::add.Tensor`."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def substitute(name: str) -> str:
    """Returns what could serve the operation without torchax; no decompositions into `prims`, which need lowerings."""
    plain = name.removeprefix("aten::").partition(".")[0].strip("_").removeprefix("special_")
    owners = {"jax.numpy": jnp, "jax.lax": jax.lax, "jax.nn": jax.nn, "jax.scipy.special": jax.scipy.special}
    for module, owner in (owners | {"jax.numpy.linalg": jnp.linalg}).items():
        if callable(getattr(owner, plain.removeprefix("linalg_"), None)):
            return f"`{module}.{plain.removeprefix('linalg_')}`"
    try:
        made_of = pytorch_decomposition(by_name(name))
    except (KeyError, AttributeError):
        return "a lowering to be written"
    composed = made_of.__module__.startswith("torch._decomp")
    return "a decomposition of PyTorch's" if composed else "a lowering to be written (PyTorch's ends in `prims`)"


def markdown(users: dict[tuple[str, str], set[str]], traced: list[str], failed: dict[str, str]) -> str:
    rows: dict[str, dict[str, set[str]]] = collections.defaultdict(dict)
    for (name, server), names in users.items():
        rows[name][server] = names
    lines = [
        f"{len(traced)} models, {len(rows)} operations.",
        "",
        "| operation | served by | models |",
        "|---|---|---|",
    ]
    for name, servers in sorted(rows.items(), key=lambda row: (-len(set().union(*row[1].values())), row[0])):
        who = ", ".join(SERVERS.get(server, server) for server in servers)
        lines.append(f"| `{name.removeprefix('aten::')}` | {who} | {len(set().union(*servers.values()))} |")
    counts = collections.Counter(server for servers in rows.values() for server in servers)
    lines += ["", "| served by | operations |", "|---|---|"]
    lines += [f"| {SERVERS.get(server, server)} | {count} |" for server, count in counts.most_common()]
    alone = sorted(name for name, servers in rows.items() if set(servers) & {"torchax", "torchax, composed"})
    ways = collections.Counter(substitute(name).partition(" (")[0].partition("`")[0] for name in alone)
    lines += [
        "",
        f"Without torchax, {len(alone)} of these operations need another source: "
        + ", ".join(f"{count} {way or 'a function of JAX with the same name'}" for way, count in ways.most_common())
        + ".",
        "",
        "| operation that torchax serves | models | instead |",
        "|---|---|---|",
    ]
    for name in alone:
        count = len(set().union(*rows[name].values()))
        lines.append(f"| `{name.removeprefix('aten::')}` | {count} | {substitute(name)} |")
    if failed:
        lines += ["", "Not traced: " + "; ".join(f"{name} ({why})" for name, why in failed.items()) + "."]
    return "\n".join(lines)


def main(options: Options) -> int:
    warnings.simplefilter("ignore")
    print(markdown(*used(options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
