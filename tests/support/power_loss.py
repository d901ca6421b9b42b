"""What survives a loss of power: files whose content was synced, under names whose folder was synced after that."""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

Tree = dict[str, bytes | None]
"""Content by relative path; None for a folder."""


class Disk:
    """Records, at every sync and every rename of this process, what a loss of power would leave of a folder.

    Two disks are recorded: one that keeps no name until its folder is synced, and one that keeps names at once and
    content, as another system may, only when it is synced. A file that was never synced is empty.
    """

    def __init__(self, root: Path):
        self.root = root
        self.states: list[tuple[list[str], Tree]] = []
        """What had been reported so far, and what would be left; each pair once."""
        self._reported: list[str] = []
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._handles: list[int] = []
        """They keep the numbers of removed files from being used again."""
        self._lock = threading.RLock()

    def report(self, text: str) -> None:
        """Records what the process has told its user."""
        with self._lock:
            self._reported.append(text)
            self._record()

    @contextlib.contextmanager
    def recorded(self, monkeypatch) -> Iterator[None]:
        """Records during the block."""
        fsync = os.fsync

        def synced(handle):
            number = handle if isinstance(handle, int) else handle.fileno()
            with self._lock:
                fsync(number)
                self._synced(number)
                self._record()

        def recording(rename):
            def call(*args, **kwargs):
                with self._lock:
                    rename(*args, **kwargs)
                    self._record()

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", synced)
            for name in ("rename", "replace"):
                patch.setattr(os, name, recording(getattr(os, name)))
            try:
                yield
            finally:
                for handle in self._handles:
                    os.close(handle)

    def _synced(self, handle: int) -> None:
        status = os.fstat(handle)
        path = f"/proc/self/fd/{handle}"
        self._handles.append(os.dup(handle))
        if stat.S_ISDIR(status.st_mode):
            entries = list(os.scandir(path))
            self._names[status.st_ino] = {each.name: (each.inode(), each.is_dir()) for each in entries}
        else:
            self._content[status.st_ino] = Path(path).read_bytes()

    def _record(self) -> None:
        for tree in (self._as_named(), self._as_synced(os.stat(self.root).st_ino)):
            if (self._reported, tree) not in self.states[-4:]:
                self.states.append(([*self._reported], tree))

    def _as_synced(self, folder: int, at: str = "") -> Tree:
        tree: Tree = {}
        for name, (number, is_folder) in self._names.get(folder, {}).items():
            tree[at + name] = None if is_folder else self._content.get(number, b"")
            if is_folder:
                tree |= self._as_synced(number, f"{at}{name}/")
        return tree

    def _as_named(self) -> Tree:
        tree: Tree = {}
        for path in sorted(self.root.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # TensorStore removes its locks meanwhile
                name = str(path.relative_to(self.root))
                synced = self._content.get(path.stat().st_ino, b"")
                is_appended = path.is_file() and path.read_bytes().startswith(synced)
                tree[name] = None if path.is_dir() else synced if is_appended else b""  # one that is written anew
        return tree


def write_tree(tree: Tree, folder: Path) -> None:
    """Writes what a loss of power left."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in tree.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
