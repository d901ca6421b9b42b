"""The version of this package, the commit that it was built from, and the versions of its pinned dependencies.

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
    """Returns the text of `trm --version`: one line for version, commit, Python and every pinned package."""
    recorded = installed_version(DISTRIBUTION)
    lines = {"trm": recorded or "not installed (run from a checkout)", "commit": commit(recorded)}
    lines["python"] = platform.python_version()
    lines |= {name: installed_version(name) or "not installed" for name in PINNED_TOGETHER}
    return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


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
