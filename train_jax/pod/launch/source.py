"""The code that a launch copies: what git knows of this checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from train_jax.errors import UserError

WORKER_SCRIPT = "train_jax/pod/launch/worker.sh"


class Source(NamedTuple):
    """A state of a checkout."""

    root: Path
    tree: str
    """A commit of all tracked files as they are now."""
    name: str
    """Commit, and `-dirty` if files differ from it."""
    untracked: int
    """Files that git neither knows nor ignores."""

    @staticmethod
    def here() -> Source:
        """The checkout around the working folder. Raises `UserError` if there is none."""
        try:
            root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        except UserError:
            raise UserError(
                f"{Path.cwd()} is in no git checkout; start trm launch in one of this project: it copies the code"
            ) from None
        if not (root / WORKER_SCRIPT).is_file() or not (root / "environment.sh").is_file():
            raise UserError(
                f"{root} is no checkout of this project; start trm launch in one, because it copies the code"
            )
        author = ["-c", "user.name=trm", "-c", "user.email=trm@localhost"]
        commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, *author, "stash", "create")
        untracked = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
        return Source(root, changed or commit, f"{commit[:12]}{'-dirty' * bool(changed)}", len(untracked))

    def archive(self, path: Path) -> None:
        """Writes the tracked files as a .tar.gz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _git(self.root, "archive", "--format=tar.gz", f"--output={path.absolute()}", self.tree)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise UserError("git is not installed; trm launch copies the files that git knows") from None
    if done.returncode:
        raise UserError(f"git {arguments[0]} in {folder}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
