"""The published language model of the checkout that NANOCHAT_DIR names, for scripts."""

import importlib
import os
import sys
from typing import Any

import torch


def published_gpt(dtype="float32") -> Any:
    """Imports `nanochat.gpt`; that of 2026 computes in `dtype`.

    torch.compile does not work in a process that has imported torchax.
    """
    os.environ["NANOCHAT_DTYPE"] = dtype
    sys.path.insert(0, os.environ["NANOCHAT_DIR"])
    torch.compile = lambda *args, **_: args[0] if args else lambda function: function  # pyright: ignore
    return importlib.import_module("nanochat.gpt")
