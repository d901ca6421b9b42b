"""Errors that name the new place of public modules that have moved."""

import sys

MOVED = {
    "train_jax.hooks": "train_jax.trainer.hooks",
    "train_jax.loop": "train_jax.trainer.loop",
    "train_jax.optim": "train_jax.core.optim",
    "train_jax.session": "train_jax.trainer.session",
    "train_jax.tasks.language": "train_jax.language",
    "train_jax.tasks.puzzles": "train_jax.puzzles",
    "train_jax.tasks": "train_jax.puzzles or train_jax.language",
}
"""Modules that the documentation named before."""


class _Finder:
    """The last of Python's finders: asked for a module that no other one has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        for old, new in MOVED.items():
            # A folder that is left with nothing but compiled files is found as an empty package, so names in it count.
            if f"{name}.".startswith(f"{old}."):
                raise ModuleNotFoundError(f"{name} has moved; import {new}{name.removeprefix(old)}", name=name)


def explain_moved_modules() -> None:
    """Makes an import of a module that has moved say where it is now."""
    sys.meta_path.append(_Finder)
