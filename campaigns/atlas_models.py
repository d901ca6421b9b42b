"""Models for the atlas: tiny ones of transformers, timm and diffusers by the names in their registries."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from campaigns import atlas_settings as settings

Model = tuple[nn.Module, tuple, dict[str, Any]]
"""A module, and the arguments and keywords of a call."""


class Entry(NamedTuple):
    family: str
    build: Callable[[], Model]


def entries(every: int, seed: int, zoo: Path | None) -> dict[str, Entry]:
    """Every n-th model of each registry, from a place that the seed decides, and those of a folder, by name."""
    entries: dict[str, Entry] = {}
    for registry in (_transformers, _timm, _diffusers) if every else ():
        names = sorted(registry().items())
        entries |= dict(names[random.Random(seed).randrange(every) :: every])
    if zoo is not None:
        sys.path.insert(0, str(zoo))
        for name, (family, build) in importlib.import_module("build").builders().items():
            entries[name] = Entry(f"zoo, {family}", build)
    return entries


def import_torchvision() -> None:
    """Import torchvision also where its library of operators does not load: its models need none of them."""
    register = torch.library.register_fake

    def lenient(op: Any, *args: Any, **kwargs: Any) -> Any:
        return (lambda f: f) if str(op).startswith("torchvision::") else register(op, *args, **kwargs)

    torch.library.register_fake = lenient  # pyright: ignore[reportAttributeAccessIssue]
    try:
        importlib.import_module("torchvision")
    finally:
        torch.library.register_fake = register


_LARGEST = 100_000_000
_LARGEST_OF_TIMM = 30_000_000
"""Parameters of a model that is tried. Those of timm keep their widths: larger ones get fewer blocks."""


def _count(make: Callable[[], nn.Module]) -> int:
    """The parameters of a model, without memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


def _checked(make: Callable[[], nn.Module]) -> Any:
    """A model, unless it is too large."""
    if (count := _count(make)) > _LARGEST:
        raise _too_large(count, _LARGEST)
    return make()


def _too_large(count: int, limit: int) -> ValueError:
    return ValueError(f"{count / 1e6:.0f} million parameters, more than {limit / 1e6:.0f} million")


# ---- transformers

_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text",
}


def _transformers() -> dict[str, Entry]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    entries: dict[str, Entry] = {}
    for mapping, task in _TASKS.items():
        for model in getattr(auto, mapping).values():
            name = model if isinstance(model, str) else model[0]
            entries[f"transformers/{name}"] = Entry(
                f"transformers, {task}", lambda name=name, task=task: _of_transformers(name, task)
            )
    return entries


def _of_transformers(name: str, task: str) -> Model:
    import transformers

    kind = getattr(transformers, name)
    config = _config(kind.config_class)
    module = _checked(lambda: kind(config))
    if task == "image":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        inputs = {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), size, size)}
        if config.model_type in settings.TRANSFORMERS_INPUTS:
            inputs = settings.TRANSFORMERS_INPUTS[config.model_type]()
        return module, (), inputs | {"labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 60, (2, 8))
    labels = torch.tensor([0, 1]) if task == "text" else ids.clone()
    if task == "text":
        ids[:, -1] = 2  # the end, by which some models find the place to classify
    return module, (), {"input_ids": ids, "labels": labels}


def _config(kind: Any) -> Any:
    """A small configuration, and small ones of its parts."""
    if kind.model_type in settings.LEFT_OUT:
        raise ValueError(f"left out: {settings.LEFT_OUT[kind.model_type]}")
    default = kind()
    by_type = settings.TRANSFORMERS_BY_TYPE.get(kind.model_type, {})
    small = {key: value for key, value in settings.TRANSFORMERS.items() if _is_size(default, key)}
    if "kv_lora_rank" in small:  # latent attention, whose keys have as many heads as its queries
        small["num_key_value_heads"] = small["num_attention_heads"]
    parts = {key: _config(type(getattr(default, key))) for key in kind.sub_configs if getattr(default, key, None)}
    return kind(**small | parts | by_type)


def _is_size(default: Any, key: str) -> bool:
    """Whether a setting takes a number: a list or a table is none, and a token can be a list of them."""
    try:
        value = getattr(default, key)
    except Exception:  # absent, or an error of its own: it differs by layer
        return False
    fixed = getattr(getattr(type(default), key, None), "fset", key) is None
    return not fixed and (value is None or (type(value) is int and value > 0) or key.endswith("token_id"))


# ---- timm


_DEPTHS = ("depth", "depths", "layers", "num_layers", "serial_depths", "parallel_depth", "block_config", "k_sec", "d")
"""Names of numbers of blocks in constructors and configurations."""
_NESTED = ("blocks", "stages", "block_args")
"""Names of settings that hold such configurations, or a list of blocks for each stage."""


def _timm() -> dict[str, Entry]:
    timm = importlib.import_module("timm")
    return {f"timm/{name}": Entry("timm", lambda n=name: _of_timm(n)) for name in timm.list_models()}


def _of_timm(name: str) -> Model:
    models = importlib.import_module("timm").models
    size = models.get_pretrained_cfg(name).input_size if models.is_model_pretrained(name) else (3, 224, 224)
    deepest = _deepest(name)
    sides = [side for side in (64, 128, size[-1] // 2) if side < size[-1]] + [size[-1]]
    failure: Exception | None = None
    for side, by_size in itertools.product(sides, (True, False)):
        options = {"img_size": side} if by_size else {}
        try:
            with torch.device("meta"), torch.no_grad():
                _create(name, deepest, **options)(torch.empty(2, size[0], side, side))
        except (TypeError, RuntimeError, AssertionError, ValueError, IndexError) as error:
            failure = error
            continue
        return _create(name, deepest, **options), (torch.randn(2, size[0], side, side),), {}
    raise ValueError(f"no size of image suits it: {failure}")


def _deepest(name: str) -> int | None:
    """The largest number of blocks in each stage with which a model is small enough: None where it is as it is."""
    count = _count(lambda: _create(name, None))
    if count <= _LARGEST_OF_TIMM:
        return None
    for blocks in (2, 1):
        with contextlib.suppress(AssertionError, ValueError, RuntimeError, IndexError):  # too few blocks for its family
            count = _count(lambda blocks=blocks: _create(name, blocks))
        if count <= _LARGEST_OF_TIMM:
            return blocks
    raise _too_large(count, _LARGEST_OF_TIMM)


def _create(name: str, deepest: int | None, **options: Any) -> nn.Module:
    """A model of timm, of at most so many blocks in each stage: in the arguments that its family gives the builder."""
    timm = importlib.import_module("timm")
    if deepest is None:
        return timm.create_model(name, num_classes=10, **options)
    build = timm.models.build_model_with_cfg

    def shallow(kind: Any, *args: Any, **kwargs: Any) -> nn.Module:
        known = inspect.signature(kind).parameters
        for key in (*_DEPTHS, *_NESTED):
            value = kwargs.get(key, known[key].default if key in known else None)
            if isinstance(value, (int, list, tuple)):
                kwargs[key] = _cut(value, deepest, key)
        for key in ("model_cfg", "cfg"):
            if dataclasses.is_dataclass(kwargs.get(key)):
                kwargs[key] = _cut(kwargs[key], deepest, key)
        return build(kind, *args, **kwargs)

    modules = [module for path, module in sys.modules.items() if path.startswith("timm.models.")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "build_model_with_cfg"):
                stack.enter_context(mock.patch.object(module, "build_model_with_cfg", shallow))
        return timm.create_model(name, num_classes=10, **options)


def _cut(value: Any, deepest: int, key: str) -> Any:
    """The value of a setting, with numbers of blocks no larger than `deepest`."""
    if type(value) is int:
        return min(value, deepest) if key in _DEPTHS else value
    if isinstance(value, (list, tuple)):
        parts = value[:deepest] if value and isinstance(value[0], dict) else value
        return type(value)(_cut(part, deepest, key) for part in parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {name: getattr(value, name) for name in (*_DEPTHS, *_NESTED) if hasattr(value, name)}
        return dataclasses.replace(value, **{name: _cut(part, deepest, name) for name, part in inner.items()})
    return value


# ---- diffusers


def _diffusers() -> dict[str, Entry]:
    models: Any = importlib.import_module("diffusers.models")
    names = [name for group in models._import_structure.values() for name in group]
    kinds = {name: kind for name, kind in ((n, getattr(models, n)) for n in names) if inspect.isclass(kind)}
    return {
        f"diffusers/{name}": Entry("diffusers", lambda kind=kind: _of_diffusers(kind))
        for name, kind in kinds.items()
        if issubclass(kind, nn.Module) and "Flax" not in name
    }


def _of_diffusers(kind: Any) -> Model:
    known = inspect.signature(kind.__init__).parameters
    special = settings.DIFFUSERS_BY_CLASS.get(kind.__name__, settings.Special())
    small = {
        key: value
        for key, value in settings.DIFFUSERS.items()
        if key in known and (known[key].default is None or type(known[key].default) is int)
    }
    blocks = known["block_out_channels"].default if "block_out_channels" in known else None
    if isinstance(blocks, tuple):
        small["block_out_channels"] = tuple(16 * (i + 1) for i in range(len(blocks)))
    codes = kind.__name__.startswith(("Autoencoder", "AsymmetricAutoencoder", "VQ"))
    if codes:  # of images, which have the channels that they have
        small = {key: value for key, value in small.items() if key not in ("in_channels", "out_channels")}
    module = _checked(lambda: kind(**small | dict(special.settings)))
    channels = getattr(module.config, "in_channels", 4)
    side = 32 if codes else 8
    frames = (5 if codes else 2,) if "3D" in kind.__name__ or "Video" in kind.__name__ else ()
    wanted = inspect.signature(module.forward).parameters
    shape = (2, channels, *frames, side, side)
    inputs: dict[str, Any] = {name: torch.randn(shape) for name in ("sample", "hidden_states") if name in wanted}
    inputs |= {name: make() for name, make in settings.DIFFUSERS_INPUTS.items() if name in wanted}
    return module, (), inputs | special.inputs()


def names_of(chosen: dict[str, Entry], done: set[str]) -> Iterator[str]:
    """The models that were not tried yet, the families in turn, so that a run that ends early has something of all."""
    families: dict[str, list[str]] = {}
    for name, entry in chosen.items():
        if name not in done:
            families.setdefault(entry.family.partition(",")[0], []).append(name)
    while any(families.values()):
        yield from (names.pop(0) for names in families.values() if names)
