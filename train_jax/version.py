"""The version of this package, the commit it was built from, and the packages that it is pinned together with.

Reads package metadata only: neither torch nor jax is imported.
"""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "trm-bridge"
PINNED_TOGETHER = ("torch", "torchax", "jax", "jaxlib")
CHECKOUT = Path(__file__).parents[1]


def version_text() -> str:
    """What `trm --version` prints: one line for each of version, commit, Python and the pinned packages."""
    recorded = installed_version(DISTRIBUTION)
    lines = {"trm": recorded or "not installed (run from a checkout)", "commit": commit(recorded)}
    lines["python"] = platform.python_version()
    lines |= {name: installed_version(name) or "not installed" for name in PINNED_TOGETHER}
    return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def installed_version(distribution: str) -> str | None:
    """The version that was recorded when `distribution` was installed; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit(recorded: str | None, checkout: Path = CHECKOUT) -> str:
    """`git describe` of the checkout, else the commit recorded in the version (`0.1.0.dev7+g1a2b3c4`)."""
    described = _git_describe(checkout)
    if described is not None:
        return f"{described} (checkout)"
    local = (recorded or "").partition("+")[2]
    name = local.split(".")[0]
    if not name.startswith("g"):
        return "not recorded"
    # setuptools-scm adds the day of the build after a dot where the tree had changes that were not committed.
    return f"{name[1:]}{'-dirty' * ('.' in local)} (recorded at build)"


def _git_describe(checkout: Path) -> str | None:
    # An installed package may lie inside somebody else's repository, so only a .git beside it counts.
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
