"""What a package adds to `train_jax`: a `Plugin` names its parts as text, and a part is imported when it is used.

The plugins of this package are those that `use` names. A user's plugin is an entry point of an installed package, in
the group `train_jax.plugins`, or a file, `--plugin mine.py`. A file is imported only if it was given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from train_jax.errors import UserError

GROUP = "train_jax.plugins"
"""Group of the entry points of installed plugins."""
ATTRIBUTE = "PLUGIN"
"""Name of the `Plugin` in a file of `--plugin`."""
SCRIPT = "loss"
"""Name of the function by which a file without a plugin is a training script."""
SCRIPT_TASK = "script"
"""The task of all training scripts, whose configuration is read without their files."""
OPTION = "--plugin"
RECORD = "plugins"
"""Key in config.json of the plugins of the user that a run was trained with; it is no field of the configuration."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command `trm NAME`."""

    target: str
    """A dataclass of options in a module with a function `main(options)`, or a function of the list of arguments."""
    group: str
    """Heading in `trm --help`."""
    text: str
    """What it does, in one line of `trm --help`."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A kind of data."""

    builder: str
    """A dataclass of the options of `trm build-data NAME`, with `check`, `build` and `summary`."""
    kind: str = ""
    """The `Kind` of puzzles, whose keys begin with the name; empty for other data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plugin:
    """The parts that a package adds, by name. Each is named as text, `package.module:Object`."""

    name: str
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Subclasses of `Task`."""
    reports: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Subclasses of `Commands` by the name of their task: summary, evaluation and page of its runs.

    Their modules import neither JAX nor PyTorch."""
    presets: Sequence[str] = ()
    """Mappings of names to `RunConfig`, or functions that return one."""
    stages: Mapping[str, Stage] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Data] = dataclasses.field(default_factory=dict)
    derivations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Options of `trm train` that are read before the fields, such as `--phase`: functions
    `(name, config, value, arguments) -> config`."""
    recipes: str = ""
    """A function that returns kind and number of puzzles of data sets that need not exist, by the name of a folder."""


# ---- objects by name


def names_object(name: str) -> bool:
    """Returns whether `name` has the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def load_object(name: str, what: str) -> Any:
    """Imports `package.module:name` from PYTHONPATH or the current folder; `what` describes it in error messages.

    Raises `UserError` if the module cannot be imported or has no such object.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace("/", ".")
        raise UserError(f"{what} {name!r} has a file in place of a module; use {module_name}:{attribute}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it shadows no installed package
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{what} {name!r}: {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "add its folder to PYTHONPATH, or run in this folder"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:10])
        raise UserError(f"{what} {name!r}: {module_name!r} has no {attribute!r}; use one of {public}") from None


# ---- plugins


class _Given(NamedTuple):
    """A file of `--plugin`."""

    path: str
    sha256: str
    plugin: Plugin
    is_script: bool = False
    """True for a training script, which has no plugin."""

    @property
    def record(self) -> dict[str, str]:
        return {"name": os.path.basename(self.path), "sha256": self.sha256}


class _Known:
    """The plugins of this process."""

    def __init__(self):
        self.targets: list[str] = []
        """Those of this package, not imported yet."""
        self.plugins: list[Plugin] = []
        self.files: list[_Given] = []
        self.script = ""
        """The plugin of training scripts, by its name, until it is in use."""
        self.installed: dict[str, Plugin] | None = None
        """Those of entry points, by name; None before they are looked for."""


_known = _Known()


def use(targets: Sequence[str], script: str = "") -> None:
    """Adds plugins by their names, `package.module:PLUGIN`; they are imported when a part is looked for.

    `script` is the plugin of training scripts, which is imported with the first script.
    """
    _known.targets.extend(targets)
    _known.script = script


def use_scripts() -> None:
    """Adds the plugin of training scripts."""
    if _known.script:
        _known.targets.append(_known.script)
        _known.script = ""


def own_plugins() -> list[Plugin]:
    """Returns the plugins of this package."""
    while _known.targets:
        target = _known.targets.pop(0)
        module, _, attribute = target.partition(":")
        _known.plugins.append(getattr(importlib.import_module(module), attribute))
    return _known.plugins


def users_plugins() -> list[Plugin]:
    """Returns the plugins of files and of installed packages. Raises `UserError` for one that cannot be imported."""
    return [*(each.plugin for each in _known.files), *_installed().values()]


def _installed() -> dict[str, Plugin]:
    if _known.installed is None:
        found = {each.name: _plugin_of(load_object(each.value, "plugin"), each.value) for each in _entry_points()}
        _known.installed = found
    return _known.installed


def _entry_points() -> Any:
    from importlib.metadata import entry_points  # most commands need no plugin of the user

    return entry_points(group=GROUP)


def _plugin_of(found: Any, where: str) -> Plugin:
    if not isinstance(found, Plugin):
        raise UserError(f"{OPTION} {where}: expected a train_jax.Plugin in {ATTRIBUTE}, found {type(found).__name__}")
    return found


def find(table: str, name: str) -> Any:
    """Returns the entry `name` of a table of the plugins, such as `tasks`; None if no plugin has it.

    The plugins of this package come first, and those of installed packages are looked for last.
    """
    for plugins in (own_plugins, users_plugins):
        for plugin in plugins():
            if name in getattr(plugin, table):
                return getattr(plugin, table)[name]
    return None


def entries(table: str, *, installed: bool = True) -> dict[str, Any]:
    """Returns a table of all plugins; without `installed`, only of this package and of files."""
    plugins = [*own_plugins(), *(users_plugins() if installed else [each.plugin for each in _known.files])]
    merged: dict[str, Any] = {}
    for plugin in plugins:
        for name, entry in getattr(plugin, table).items():
            merged.setdefault(name, entry)  # a plugin of the user replaces nothing
    return merged


def recipes() -> dict[str, tuple[str, int]]:
    """Returns kind and number of puzzles of data sets that need not exist, by the name of the folder."""
    targets = [plugin.recipes for plugin in (*own_plugins(), *users_plugins()) if plugin.recipes]
    return {name: facts for target in targets for name, facts in load_object(target, "recipes")().items()}


# ---- files of the user


def take_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the files of `trm STAGE mine.py … --plugin FILE`, or of `trm check step mine.py`, and the arguments with
    the name of a script in its place and without the others.

    Words after `--` are those of another command. Raises `UserError` for an option without a value.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = iter(argv[:end])
    rest = []
    files = []
    for word in words:
        option, equals, value = word.partition("=")
        if word.endswith(".py") and rest and not any(each.startswith("-") for each in [*rest, word]):
            files.append(word)
            rest.append(os.path.splitext(os.path.basename(word))[0])
        elif option != OPTION:
            rest.append(word)
        else:
            value = value if equals else next(words, "")
            if not value:
                raise UserError(f"{OPTION} without a file; give a Python file such as mine.py")
            files.append(value)
    return files, [*rest, *argv[end:]]


def use_file(path: str) -> Plugin:
    """Imports a file of the user under the name that it has, and adds its `PLUGIN`; a file that was added is kept.

    Raises `UserError` if it cannot be imported, has no plugin, or has the name of another module.
    """
    path = os.path.abspath(path)
    for given in _known.files:
        if given.path == path:
            return given.plugin
    name, extension = os.path.splitext(os.path.basename(path))
    if extension != ".py" or not name.isidentifier():
        raise UserError(f"{path}: expected a Python file whose name is an identifier, such as mine.py")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give an existing file") from None
    other = sys.modules.get(name)
    found = importlib.util.find_spec(name) if other is None else other.__spec__
    if found is not None and found.origin != path:
        raise UserError(f"{path}: there is another module {name}; rename the file")
    spec: Any = importlib.util.spec_from_file_location(name, path)  # for a file of this extension there is one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, so that its parts are found as `name:Object`
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # for the modules beside it; last, so that it shadows no package
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error}); correct it") from error
    is_script = not hasattr(module, ATTRIBUTE) and hasattr(module, SCRIPT)
    if is_script:
        use_scripts()
    plugin = Plugin(name=name) if is_script else _plugin_of(getattr(module, ATTRIBUTE, None), path)
    _known.files.append(_Given(path, hashlib.sha256(content).hexdigest(), plugin, is_script))
    return plugin


def scripts() -> list[str]:
    """Returns the names of the modules of the training scripts in use."""
    return [os.path.splitext(os.path.basename(given.path))[0] for given in _known.files if given.is_script]


def file_options() -> list[str]:
    """Returns the options with which another process of `trm` uses the same files."""
    return [word for each in _known.files for word in (OPTION, each.path)]


def record(task: str) -> list[dict[str, str]]:
    """Returns name and SHA-256 of the plugins of a run: files in use, and the installed plugin that has its task."""
    records = [each.record for each in _known.files]
    if any(task in plugin.tasks for plugin in own_plugins()):
        return records
    for name, plugin in _installed().items():
        if task in plugin.tasks:
            records.append({"name": name, "sha256": _hash_of_module(plugin.tasks[task].partition(":")[0])})
    return records


def _hash_of_module(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return ""
    with open(spec.origin, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def require(recorded: object, where: str) -> None:
    """Checks that the plugins that a run was trained with are in use; never imports a file that was not given.

    `recorded`: what `record` returned when the run was trained. Raises `UserError` for a missing plugin. A file with
    another content is used, and a line on stderr says so.
    """
    given = {each.record["name"]: each.record["sha256"] for each in _known.files}
    for name, sha256 in _recorded(recorded):
        if not name.endswith(".py"):
            if name not in _installed():
                raise UserError(f"{where} was trained with the plugin {name}, which is not installed; install it")
        elif name not in given:
            raise UserError(
                f"{where} was trained with the plugin {name} (SHA-256 {sha256[:12]}…), which is not imported unasked; "
                f"give {OPTION} and its path if you trust it, or a different run folder"
            )
        elif given[name] != sha256:
            sys.stderr.write(f"trm: {name} has another content than when {where} was trained\n")


def _recorded(recorded: object) -> Iterator[tuple[str, str]]:
    for each in recorded if isinstance(recorded, list) else ():
        if isinstance(each, dict):
            yield os.path.basename(str(each.get("name"))), str(each.get("sha256"))
