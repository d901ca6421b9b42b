"""The version of this package, the commit that it was built from, and the versions of what it computes with.

Reads package metadata only: neither torch nor jax is imported.
"""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "trm-bridge"
COMPUTE_WITH = ("torch", "torchax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
"""Packages whose version can change the result of training."""
TESTED_SETS = {
    "constraints.txt": ("2.13.0", "0.0.14.dev20261026", "0.10.2", "0.10.2"),
    "constraints-newest.txt": ("2.15.0", "0.0.14.dev20261026", "0.12.0.1", "0.12.0.1"),
}
"""File -> its versions of torch, torchax, jax and jaxlib. The figures of the documentation are those of the first."""
CHECKOUT = Path(__file__).parents[1]


def version_text() -> str:
    """Returns the text of `trm --version`: one line for version, commit, Python and every pinned package."""
    recorded = installed_version(DISTRIBUTION)
    lines = {"trm": recorded or "not installed (run from a checkout)", "commit": commit(recorded)}
    lines["python"] = platform.python_version()
    lines |= {name: installed_version(name) or "not installed" for name in COMPUTE_WITH}
    lines["tested as"] = tested_set()
    return "\n".join(f"{name:<18} {value}" for name, value in lines.items())


def tested_set() -> str:
    """Returns the name of the constraints file whose torch, torchax, jax and jaxlib are installed."""
    found = tuple((installed_version(name) or "").partition("+")[0] for name in ("torch", "torchax", "jax", "jaxlib"))
    return next((name for name, versions in TESTED_SETS.items() if versions == found), "no tested set")


def installed_version(distribution: str) -> str | None:
    """Returns the version in the metadata of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit(recorded: str | None, checkout: Path = CHECKOUT) -> str:
    """Returns `git describe` of the checkout, otherwise the commit in the version (`0.1.0.dev7+g1a2b3c4`)."""
    described = _git_describe(checkout)
    if described is not None:
        return f"{described} (checkout)"
    local = (recorded or "").partition("+")[2]
    name = local.split(".")[0]
    if not name.startswith("g"):
        return "not recorded"
    # setuptools-scm appends the date of the build after a dot if the tree had uncommitted changes.
    return f"{name[1:]}{'-dirty' * ('.' in local)} (recorded at build)"


def _git_describe(checkout: Path) -> str | None:
    # An installed package may be inside another repository, so only the .git folder of the checkout itself counts.
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
