"""Everything that the bridge uses of torchax, and the releases of PyTorch and JAX that the bridge runs with."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch._decomp import decomposition_table

from bridge.errors import BridgeWarning

_CLIENT_OPTIONS = "jax_pjrt_client_create_options"
_TORCHAX: dict[str, types.ModuleType] = {}
"""The modules of the bridge's own copy of torchax."""


@contextlib.contextmanager
def _torch_unchanged() -> Iterator[None]:
    """Imports torchax without its changes to PyTorch for everybody; the bridge needs its functions of arrays only.

    torchax names a device that no build of PyTorch knows, so that `torch.compile` fails, turns off the fast path of
    attention and registers decompositions. If somebody has imported torchax before, these changes are theirs and
    stay. Otherwise the bridge keeps a private copy of torchax: a later `import torchax` runs torchax anew, with
    its device.
    """
    if "torchax" in sys.modules:
        yield
        return
    own = dict(decomposition_table)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    rename = torch.utils.rename_privateuse1_backend
    register = torch._register_device_module
    options = getattr(jax.config, _CLIENT_OPTIONS)
    environment = dict(os.environ)
    torch.utils.rename_privateuse1_backend = torch._register_device_module = lambda *_args: None  # pyright: ignore
    try:
        yield
    finally:
        torch.utils.rename_privateuse1_backend = rename
        torch._register_device_module = register
        torch.backends.mha.set_fastpath_enabled(fast_path)
        jax.config.update(_CLIENT_OPTIONS, options)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        decomposition_table.clear()
        decomposition_table.update(own)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchax"]:
            _TORCHAX[name] = sys.modules.pop(name)


TESTED = {
    "python": ((3, 11), (3, 13)),
    "torch": ((2, 13), (2, 15)),
    "jax": ((0, 10), (0, 12)),
    "torchax": ((0, 0, 13), (0, 0, 14)),
}
"""Name -> the oldest and the newest release that the tests of the bridge are run with; pyproject.toml says the same."""


def installed() -> dict[str, str]:
    """Returns name -> version of all that is in `TESTED`."""
    versions = {package.__name__: package.__version__ for package in (torch, jax, torchax)}
    return {"python": platform.python_version()} | versions


def is_tested(name: str, version: str) -> bool:
    oldest, newest = TESTED[name]
    release = tuple(int(n) for n in re.findall(r"\d+", version)[: len(oldest)])
    return oldest <= release <= newest


def tested_releases(name: str) -> str:
    """Returns the tested releases in words."""
    return " to ".join(".".join(map(str, release)) for release in TESTED[name])


class MissingOperation:
    """A stand-in for an operation, or an overload of one, that the installed PyTorch does not have."""

    def __getattr__(self, name: str) -> MissingOperation:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def overloads(self) -> tuple[str, ...]:
        return ()

    def name(self) -> str:
        return ""


GONE = {"aten.cholesky": "deprecated; PyTorch 2.15 has linalg_cholesky_ex alone"}
"""Operations in the bridge's own tables that not every tested release of PyTorch has, and why."""
MISSING: set[str] = set()
"""Operations in the bridge's own tables that the installed PyTorch does not have; a test compares them with `GONE`."""


@contextlib.contextmanager
def missing_operations_tolerated(names: set[str]) -> Iterator[None]:
    """Lets tables that name operations be imported although PyTorch lacks some of them; adds these to `names`."""
    owners: Any = (torch._ops._OpNamespace, torch._ops.OpOverloadPacket)
    originals = [owner.__getattr__ for owner in owners]
    for owner, original in zip(owners, originals, strict=True):
        owner.__getattr__ = _or_missing(original, names)
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.__getattr__ = original


def _or_missing(look_up: Callable[[Any, str], Any], names: set[str]) -> Callable[[Any, str], Any]:
    def call(owner: Any, name: str) -> Any:
        try:
            return look_up(owner, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            names.add(f"{owner.name if isinstance(owner, torch._ops._OpNamespace) else owner}.{name}")
            return MissingOperation()

    return call


with _torch_unchanged(), missing_operations_tolerated(set()):  # torchax 0.0.13 names operations that PyTorch 2.13 lacks
    import torchax
    import torchax.decompositions
    from torchax.ops import jaten, jtorch, jtorchvision_nms, mappings  # noqa: F401

    if torch.distributed.is_available():
        from torchax.ops import jc10d  # noqa: F401

    _DECOMPOSITIONS: dict[Any, Callable] = dict(decomposition_table)
    """The decompositions of PyTorch and of torchax."""


def torchax_is_off() -> bool:
    """True if the environment variable `BRIDGE_WITHOUT_TORCHAX` asks to leave torchax's tables of operations unused.

    For tests: so they show what a release of PyTorch or JAX that torchax does not follow would leave.
    """
    return os.environ.get("BRIDGE_WITHOUT_TORCHAX", "") not in ("", "0")


@functools.cache
def _torchax() -> Any:
    """Returns the library of lowerings. It is made late, because making it claims the devices, and never in a trace.

    Imports inside torchax's functions find the bridge's copy.
    """
    others = {name: sys.modules[name] for name in _TORCHAX if name in sys.modules}
    sys.modules.update(_TORCHAX)
    try:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return torchax.default_env()
    finally:
        for name in _TORCHAX:
            del sys.modules[name]
        sys.modules.update(others)


@functools.cache
def torchax_lowering(op: Any) -> Callable | None:
    """Returns torchax's function of arrays for the operation, if there is one that needs nothing else."""
    if torchax_is_off():
        return None
    for key in (op, op.overloadpacket):
        known = _torchax()._ops.get(key)
        if known is not None and known.is_jax_function and not known.needs_env:
            return known.func
    return None


@functools.cache
def decomposition(op: Any) -> Callable | None:
    """The decomposition of an operation by torchax or PyTorch."""
    if torchax_is_off():
        return decomposition_table.get(op)
    known = _torchax()._decomps.get(op) or _torchax()._decomps.get(op.overloadpacket)
    if known is not None:
        return known.func
    return _DECOMPOSITIONS.get(op)


def pytorch_decomposition(op: Any) -> Callable:
    """Returns PyTorch's own decomposition of the operation, even if torchax has another one."""
    return _DECOMPOSITIONS[op]


torchax_index_put: Callable[..., jax.Array] = jaten._aten_index_put
torchax_embedding: Callable[..., jax.Array] = jaten._aten_embedding
jax_dtype_of: Callable[[torch.dtype], Any] = mappings.t2j_dtype
torch_dtype_of: Callable[[Any], torch.dtype] = mappings.j2t_dtype


def check_releases() -> None:
    """Warns about each release that the tests have not been run with."""
    for name, version in installed().items():
        if not is_tested(name, version):
            message = f"{name} {version} is untested: the bridge is tested with {tested_releases(name)}"
            warnings.warn(BridgeWarning(message), stacklevel=2)
