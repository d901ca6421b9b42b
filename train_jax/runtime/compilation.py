"""Compiled programs on disk: JAX's persistent cache, its entries for other machines, and files of programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import platform
import re
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from train_jax.errors import UserError
from train_jax.runtime import backend
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_whole
from train_jax.version import installed_version

VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def use_compile_cache(wanted: bool, shared: Path | None = None) -> str:
    """Switches the cache on or off for this process; returns the reason if it is off although it is wanted.

    It is in the folder that the environment variable names. Without one it is in that of the user's caches or, for
    several processes, in `shared`, which all of them can read: JAX lets process 0 alone write.
    """
    config: Any = jax.config
    if not wanted or not config.jax_enable_compilation_cache:
        config.update("jax_enable_compilation_cache", False)
        return ""
    if not config.jax_compilation_cache_dir:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trm" / "compiled"
        folder = (shared or own) / _processor()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            config.update("jax_enable_compilation_cache", False)
            return f"compiled programs are not kept: {folder} cannot be written ({error.strerror}); set {VARIABLE}"
        config.update("jax_compilation_cache_dir", str(folder))
    for name, value in _options().items():
        if name.upper() not in os.environ:
            config.update(name, value)
    return ""


def _options() -> dict[str, Any]:
    """Small programs are stored, too: a start has dozens of them. The key of a program does not depend on the folder,
    except on a GPU, whose compiler keeps measurements there."""
    options: dict[str, Any] = {"jax_persistent_cache_min_compile_time_secs": 0.0}
    platform = backend.chosen()
    if platform is None or platform.platform != "gpu":
        options["jax_persistent_cache_enable_xla_caches"] = "none"
    return options


def _processor() -> str:
    """Returns a hash of the processor: a program may use instructions that another machine with this folder lacks."""
    try:
        with open("/proc/cpuinfo") as file:
            facts = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        facts = {platform.processor()}
    return f"{platform.machine()}-{zlib.crc32(''.join(sorted(facts)).encode()):08x}"


class CacheUse:
    """Hits and misses of the cache, in one thread."""

    def __init__(self):
        self.hits = self.misses = 0

    def __str__(self) -> str:
        if self.hits and not self.misses:
            return "from the compilation cache"
        return "into the compilation cache" if self.misses else "without the compilation cache"


@contextlib.contextmanager
def counted_cache_use() -> Iterator[CacheUse]:
    """Counts what this thread compiles inside the context."""
    use = _USES.setdefault(threading.get_ident(), CacheUse())
    if not _LISTENING:
        _LISTENING.append(True)
        jax.monitoring.register_event_listener(_count)
    try:
        yield use
    finally:
        _USES.pop(threading.get_ident(), None)


_USES: dict[int, CacheUse] = {}
_LISTENING: list[bool] = []


def _count(event: str, **_: object) -> None:
    use = _USES.get(threading.get_ident())
    if use is not None:
        use.hits += event == "/jax/compilation_cache/cache_hits"
        use.misses += event == "/jax/compilation_cache/cache_misses"


def compile_lowered(lowered: Any, devices: Sequence[Any]) -> tuple[Any, str]:
    """Returns `lowered.compile()`, and in words whether that was in the cache or why what was shipped was not it."""
    with counted_cache_use() as use:
        compiled = lowered.compile()
    return compiled, f"{use}{_unlike_shipped(lowered, devices) if use.misses else ''}"


# ---- entries of the cache for another machine

SHIPPED = "shipped.json"
"""The file beside cache entries that were compiled elsewhere, with the `ProgramKey` of each."""


@contextlib.contextmanager
def entries_apart() -> Iterator[Path]:
    """Makes JAX keep what is compiled inside the context in an empty folder, which is removed."""
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        options = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": folder} | _options()
        before = {name: getattr(jax.config, name) for name in options}
        try:
            _use_cache(options)
            yield Path(folder)
        finally:
            _use_cache(before)


def _use_cache(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the options when it compiles for the first time


def ship(entries: Path, folder: Path, lowered: Any, devices: Sequence[Any]) -> str:
    """Copies the entry of a program from the folder of `entries_apart`; returns its name.

    A run whose cache is `folder` finds the program if its key in JAX is the same. Raises `UserError` if JAX wrote none.
    """
    (module,) = re.findall(r"^module @(\S+)", lowered.as_text(), re.MULTILINE)
    written = list(entries.glob(f"{module}-*-cache"))
    if not written:
        raise UserError("JAX wrote no entry of its compilation cache for this program; leave out --fill-cache")
    folder.mkdir(parents=True, exist_ok=True)
    key = dataclasses.asdict(ProgramKey.of(lowered, devices))
    for path in written:
        (folder / path.name).write_bytes(path.read_bytes())
    shipped = shipped_programs(folder) | {path.name: key for path in written}
    (folder / SHIPPED).write_text(json.dumps(shipped, indent=1))
    return written[0].name


def shipped_programs(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the `ProgramKey` of each entry that `ship` wrote into a folder, by its file."""
    try:
        return json.loads((folder / SHIPPED).read_text())
    except (OSError, ValueError):
        return {}


def _unlike_shipped(lowered: Any, devices: Sequence[Any]) -> str:
    """Returns in words how the most similar program that was shipped differs from one that JAX did not find."""
    config: Any = jax.config
    shipped = shipped_programs(path_of(config.jax_compilation_cache_dir))
    if not shipped:
        return ""
    key = dataclasses.asdict(ProgramKey.of(lowered, devices))
    others = ([name for name, value in key.items() if each.get(name) != value] for each in shipped.values())
    names = ["code, fields or sizes of the data" if name == "program" else name for name in min(others, key=len)]
    what = ", ".join(names) or "XLA flags, numbers of devices or topology, which are in JAX's key"
    return f"; the shipped program differs in {what}"


# ---- files of a program

_FIRST_LINE = "trm-program-1"
_LARGEST_BYTES = 2**36
_CLASSES = {
    "jax": {"P"},
    "jax._src.core": {"ManualAxisType", "MemorySpace", "ShapedArray"},
    "jax._src.interpreters.pxla": {"AllArgsInfo", "UnloadedMeshExecutable"},
    "jax._src.layout": {"AutoLayoutSingleton", "Format", "Layout"},
    "jax._src.linear_util": {"DebugInfo"},
    "jax._src.mesh": {"AbstractDevice", "AbstractMesh", "AxisType", "Mesh"},
    "jax._src.named_sharding": {"_unpickle_named_sharding"},
    "jax._src.sharding_impls": {"_unpickle_gspmd_sharding"},
    "jax._src.stages": {"ArgInfo"},
    "jaxlib._hlo": {"OpSharding"},
    "jaxlib._jax": {"DeviceList"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct"},
}
"""Classes that JAX writes beside the machine code: shapes, shardings and the mesh."""


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """The inputs of a compilation; a program with another value of any field is another program."""

    jax: str
    jaxlib: str
    compiler: str
    """Version of libtpu; empty for other platforms, whose compiler is part of jaxlib."""
    device: str
    devices: int
    processes: int
    program: str
    """Hash of the lowered program, which holds the code, the fields and the sizes of the run."""

    @classmethod
    def of(cls, lowered: Any, devices: Sequence[Any]) -> ProgramKey:
        """Returns the key of a program; without a hash if it is not lowered yet (None)."""
        return cls(
            installed_version("jax") or "",
            installed_version("jaxlib") or "",
            _libtpu() if devices[0].platform == "tpu" else "",
            devices[0].device_kind,
            len(devices),
            len({device.process_index for device in devices}),
            "" if lowered is None else hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        )


def save_program(path: Path, lowered: Any, compiled: Any, devices: Sequence[Any]) -> None:
    """Writes a program that was lowered and compiled for `devices`. Raises `UserError` if JAX cannot serialize it."""
    try:
        content, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise UserError(f"the program cannot be saved: {str(error).splitlines()[0]}") from error
    header = dataclasses.asdict(ProgramKey.of(lowered, devices)) | {"sha256": hashlib.sha256(content).hexdigest()}
    path.write_bytes(f"{_FIRST_LINE}\n{json.dumps(header)}\n".encode() + content)


def load_program(path: Path, lowered: Any, devices: Sequence[Any]) -> Any:
    """Returns the program in a file as a `jax.stages.Compiled` for `devices`, in place of `lowered.compile()`.

    Raises `UserError` if it is another one than `lowered`, or was compiled for other devices or versions.
    """
    content = check_program(path, lowered, devices)
    try:
        unloaded, _, no_kwargs = _Unpickler(io.BytesIO(content), devices[0].client, devices).load()
        executable = unloaded.load()
    except (pickle.UnpicklingError, jax.errors.JaxRuntimeError, TypeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be loaded ({reason}); leave out --compute.load") from error
    return jax.stages.Compiled(executable, [], lowered.args_info, lowered.out_tree, no_kwargs=no_kwargs)


def check_program(path: Path, lowered: Any, devices: Sequence[Any]) -> bytes:
    """Returns the machine code in a file. Raises `UserError` as `load_program`; without `lowered`, for any program."""
    header, content = _read(path)
    for name, value in dataclasses.asdict(ProgramKey.of(lowered, devices)).items():
        if header.get(name) != value and (name != "program" or lowered is not None):
            what = "another train step: other code, fields or sizes of the data" if name == "program" else None
            what = what or f"{name} {header.get(name)!r}, not {value!r}"
            raise UserError(f"{path} was compiled for {what}; save it again, or leave out --compute.load")
    if hashlib.sha256(content).hexdigest() != header.get("sha256"):
        raise UserError(f"{path} is damaged; save it again, or leave out --compute.load")
    return content


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        first, header, content = read_whole(path, largest_bytes=_LARGEST_BYTES).split(b"\n", 2)
        fields = json.loads(header)
        if first.decode() == _FIRST_LINE and isinstance(fields, dict):
            return fields, content
    except (OSError, DamagedError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read ({reason}); write it with trm compile-pod") from error
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{path} is no program that `trm compile-pod --save` wrote")


def _libtpu() -> str:
    """Returns the version of the compiler: of the library that is named, otherwise of the installed package."""
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library is None:
        return installed_version("libtpu") or ""
    beside = metadata.distributions(name="libtpu", path=[str(Path(library).parents[1])])
    return next((each.version for each in beside), "")
