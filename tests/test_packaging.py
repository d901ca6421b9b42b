"""`trm --version` and `trm --help` without torch or jax, errors of one line; the contents of a wheel and an sdist."""

import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import jax
import pytest

from bridge.doctor import other_owners
from train_jax import __main__, errors, version
from train_jax.__main__ import main
from train_jax.plugin import entries

ROOT = Path(__file__).parents[1]
PACKAGES = ("bridge", "models_torch", "train_jax")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_neither_torch_nor_jax_is_loaded(argument):
    code = (
        "import sys; from train_jax.__main__ import main; status = main([sys.argv[1]]); "
        "print(sorted({'torch', 'torchax', 'jax', 'numpy'} & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    shown = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "[]\n")
    if argument == "--help":
        assert sorted(re.findall(r"^  (\S+)", shown.stdout, re.MULTILINE)) == sorted(entries("stages"))


@pytest.mark.parametrize("argument", ["--help", "nonsense"])
def test_a_closed_pipe_is_no_traceback(argument):
    command = [sys.executable, "-u", "-m", "train_jax", argument]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        shown = stderr.read()
    assert process.wait(60) == (2 if argument == "nonsense" else 141)
    assert len(shown.splitlines()) == (argument == "nonsense")


def test_a_missing_package_names_its_extra(monkeypatch, capsys, tmp_path):
    for package, extra in {"optax": "train", "orbax.checkpoint": "train", "uvicorn": "serve", "yaml": "text"}.items():
        name = package.partition(".")[0]
        monkeypatch.setattr(__main__, "_load", lambda _, package=package: importlib.import_module(package))
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["status"]) == 2
        command = f"`pip install -c constraints.txt -e '.[{extra}]'`"
        assert capsys.readouterr().err == f"trm: this command needs the package {name}; install it with {command}\n"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "train_jax" / "errors.py"))
    assert errors.pip_install("train") == "`pip install 'trm-bridge[train]'`", "without a checkout"


def test_the_extras_have_the_packages_that_errors_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()
    for extra, packages in errors.EXTRAS.items():
        wanted = {re.match(r"[\w-]+", text)[0].lower().replace("_", "-") for text in project[extra]}
        for package in packages:
            installed = {name.lower().replace("_", "-") for name in distributions.get(package, wanted)}
            assert package in ("google", "aiohttp") or installed & wanted, f"{package} is not in {extra}"


def test_another_distribution_that_installs_a_package_bridge_is_named(monkeypatch, capsys):
    error = ImportError(
        "cannot import name 'export' from 'bridge'", name="bridge", path="/elsewhere/bridge/__init__.py"
    )
    monkeypatch.setattr(__main__, "_load", lambda _: (_ for _ in ()).throw(error))
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"bridge": ["trm-bridge", "cards"]})
    assert main(["status"]) == 2
    assert "`bridge` in /elsewhere/bridge/__init__.py is not that of this project but of cards; install each" in (
        capsys.readouterr().err
    )
    assert other_owners() == ["cards"]


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, RuntimeError])
def test_a_device_out_of_memory_is_one_line(monkeypatch, capsys, kind):
    def fail(argv):
        raise kind("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")

    monkeypatch.setattr(__main__, "_run", fail)
    if kind is RuntimeError:  # an error of another kind is a mistake in the code
        with pytest.raises(RuntimeError):
            main(["train"])
        return
    assert main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "a device is out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.); use" in line


def test_version_names_the_pinned_packages(capsys):
    assert main(["--version"]) == 0
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(shown) == ["trm", "commit", "python", *version.COMPUTE_WITH, "tested as"]
    assert shown["torch"] == metadata.version("torch") and shown["jax"] == metadata.version("jax")


def test_the_tested_sets_are_those_of_the_constraint_files(monkeypatch):
    for name, versions in version.TESTED_SETS.items():
        pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))
        assert versions == tuple(pins[package] for package in ("torch", "torchax", "jax", "jaxlib"))
        monkeypatch.setattr(version, "installed_version", lambda package, pins=pins: f"{pins[package]}+cpu")
        assert version.tested_set() == name
    monkeypatch.setattr(version, "installed_version", lambda package: None)
    assert version.tested_set() == "no tested set"


def test_commit_outside_a_checkout(tmp_path):
    commits = {
        "0.1.0.dev117+g6fa496561": "6fa496561 (recorded at build)",
        "0.1.0.dev117+g6fa496561.d20261121": "6fa496561-dirty (recorded at build)",
        "0.1.0": "not recorded",
        None: "not recorded",
    }
    assert {recorded: version.commit(recorded, tmp_path) for recorded in commits} == commits


def test_commit_in_a_checkout(tmp_path):
    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v9.8.7")
    assert version.commit("0.1.0", tmp_path) == "v9.8.7 (checkout)"
    (tmp_path / "file").write_text("b")
    assert version.commit("0.1.0", tmp_path) == "v9.8.7-dirty (checkout)"


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("hashes", "constraints"),
    [
        ("base", "constraints"),
        ("base-newest", "constraints-newest"),
        ("train", "constraints"),
        ("train", "constraints-newest"),
    ],
)
def test_the_hashes_are_of_the_pinned_releases(hashes, constraints):
    """Hashes of other releases than those that the metadata and the constraints name would install nothing."""
    lines = (ROOT / f"{constraints}.txt").read_text().splitlines()
    pins = {normalized(name): release for name, _, release in (line.partition("==") for line in lines)}
    text = (ROOT / f"hashes/{hashes}.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+)( ;.*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    assert len(entries) == text.count("==") - text.count(" == 'win32'"), "every release has hashes"
    hashed = {name: release for name, release, marker, _ in entries if "== 'win32'" not in marker}
    assert hashed == {name: pins[name] for name in hashed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["train"] if hashes == "train" else project["dependencies"]
    names = {normalized(re.match(r"[\w.-]+", line)[0]) for line in wanted}
    assert names - {"torch"} <= hashed.keys()


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_packages_and_what_they_are_built_and_tested_with(tmp_path):
    """Both are built without network from a copy of the files that an archive of the project has."""
    source = tmp_path / "source"
    out = tmp_path / "dist"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "docs", "tests", "benchmarks", "campaigns", "hashes"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = out.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "README.md LICENSE SECURITY.md CITATION.cff CONTRIBUTING.md CHANGELOG.md pyproject.toml constraints.txt "
    wanted += (
        "constraints-newest.txt environment.sh speedrun_tpu.sh mkdocs.yml tests/run.sh docs/bridge.md hashes/base.txt"
    )
    assert set(wanted.split()) <= names
    assert not [name for name in names if name.startswith(("runs/", "data/", ".venv/", ".git/"))]
