"""`source ./environment.sh`, with a program that stands for Python and pip: nothing is installed."""

import re
import shutil
import subprocess

import pytest
from support.scripts import ROOT

PYTHON = """#!/bin/sh
# Stands for Python of the version in the file `version`; pip fails while the file `offline` exists.
case "$1 $2" in
-V*) echo "Python 3.$(cat version)" ;;
-c*) [ "$(cat version)" -ge 11 ] ;;
"-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo 'export ACTIVATED=1' > "$3/bin/activate" ;;
"-m pip")
    case "$*" in *--version*) exit 0 ;; esac
    if [ -e offline ] && case "$*" in *"$(cat offline)"*) true ;; *) false ;; esac; then
        echo "ERROR: Could not find a version" >&2
        exit 1
    fi
    echo "$*" >> installed ;;
esac
"""
SHELLS = [shell for shell in ("bash", "zsh") if shutil.which(shell)]


class Folder:
    """A copy of the project's folder, as far as the script reads it."""

    def __init__(self, path, shell):
        self.path = path
        self.shell = shell
        for name in ("environment.sh", "pyproject.toml", "constraints.txt", "constraints-newest.txt"):
            shutil.copy(ROOT / name, path)
        (path / "python").write_text(PYTHON)
        (path / "python").chmod(0o755)
        (path / "version").write_text("11")

    def source(self, extras, *, before="", variables=(("PYTHON", "./python"),)):
        """Sources the script and prints `STATUS ACTIVATED`, if the shell goes on; returns status, output and errors."""
        text = f'{before}\nsource ./environment.sh {extras}\necho "$? ${{ACTIVATED:-0}}"'
        environment = {"PATH": "/usr/bin:/bin"} | dict(variables)
        command = [shutil.which(self.shell), "-c", text]
        done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True)
        return done.returncode, re.findall(r"^\d+ [01]$", done.stdout, re.MULTILINE), done.stderr

    @property
    def installed(self):
        """Returns the arguments of each `pip install` that succeeded."""
        path = self.path / "installed"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def recorded(self):
        records = list((self.path / ".venv").glob("installed.*"))
        return [line for record in records for line in record.read_text().splitlines()]


@pytest.fixture(params=SHELLS)
def folder(tmp_path, request):
    return Folder(tmp_path, request.param)


def test_extras_are_installed_once_and_recorded(folder):
    for extras, recorded, count in (("gcs text", ["base", "gcs", "text"], 2), ("text gcs", ["base", "gcs", "text"], 2)):
        assert folder.source(extras)[1] == ["0 1"]
        assert folder.recorded == recorded
        assert len(folder.installed) == count, "torch, then the project"
    assert folder.source("pod gcs")[1] == ["0 1"]
    assert folder.recorded == ["base", "gcs", "text", "pod"]
    assert folder.installed[1].endswith("-e .[train,gcs,text]") and folder.installed[3].endswith("-e .[train,gcs]")
    assert folder.installed[4].endswith("--target .venv/pod libtpu")
    assert folder.source("gpu-aot")[1] == ["0 1"]
    assert "--no-deps --upgrade --target .venv/gpu-aot jax-cuda13-plugin jax-cuda13-pjrt" in folder.installed[-1]


def test_the_newest_releases_have_an_environment_of_their_own(folder):
    assert folder.source("gcs")[1] == folder.source("newest gcs")[1] == ["0 1"]
    for venv, pins in ((".venv", "constraints.txt"), (".venv-newest", "constraints-newest.txt")):
        (record,) = (folder.path / venv).glob("installed.*")
        assert "gcs" in record.read_text().split()
        assert f"install --quiet --disable-pip-version-check -c {pins} -e .[train,gcs]" in "\n".join(folder.installed)


def test_the_newest_python_is_found_behind_a_shim_that_runs_nothing(folder):
    shim = folder.path / "shims/python3.13"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    path = f"{shim.parent}:/usr/bin:/bin"
    variables = {"PATH": path, "PYENV_ROOT": str(folder.path / "pyenv")}
    status, shown, errors = folder.source("newest", variables=variables.items())
    assert (status, shown) == (0, ["3 0"]), "tests/newest.sh knows that there is none by the status"
    assert errors.strip() == "there is no Python 3.13 here: install it, or set PYTHON"
    program = folder.path / "pyenv/versions/3.13.0/bin/python3.13"
    program.parent.mkdir(parents=True)
    shutil.copy(folder.path / "python", program)
    (folder.path / "version").write_text("13")
    assert folder.source("newest", variables=variables.items())[1:] == (["0 1"], "")


@pytest.mark.parametrize("package", ["torch", "-e .", "libtpu"])
def test_an_extra_that_pip_could_not_install_is_not_recorded(folder, package):
    (folder.path / "offline").write_text(package)
    status, shown, errors = folder.source("gcs pod")
    assert (status, shown) == (0, ["1 0"]) and folder.recorded == []
    assert "Could not find a version" in errors and "not complete for: base gcs pod" in errors
    status, shown, errors = folder.source("gcs pod", before="set -euo pipefail")
    assert (status, shown) == (1, []) and folder.recorded == [], "a script that asks for it ends"
    (folder.path / "offline").unlink()
    for before in ("", "set -euo pipefail"):
        assert folder.source("gcs pod", before=before)[1] == ["0 1"]
    assert folder.recorded == ["base", "gcs", "pod"]


def test_a_mistake_does_not_end_the_shell(folder):
    (folder.path / "version").write_text("10")
    status, shown, errors = folder.source("gcs")
    assert (status, shown) == (0, ["2 0"])
    assert "./python is Python 3.10; Python 3.11 to 3.13 is needed: set PYTHON=python3.11" in errors
    (folder.path / "version").write_text("11")
    status, shown, errors = folder.source("gsc")
    assert (status, shown) == (0, ["2 0"])
    assert "gsc is no extra of pyproject.toml" in errors and not folder.installed
    (folder.path / "pyproject.toml").unlink()
    status, shown, errors = folder.source("gcs")
    assert (status, shown) == (0, ["2 0"]) and "source it in the folder of the project" in errors
