"""A script: runs the tests of nanochat's sandbox on the one here, through an adapter with its names.

NANOCHAT_DIR=/path/to/nanochat python -m support.nanochat_execution
"""

import sys
from typing import NamedTuple

from support.published_tests import run_published
from train_jax.language.chat.execution import execute


class Result(NamedTuple):
    success: bool
    stdout: str
    error: str
    timeout: bool
    memory_exceeded: bool


def execute_code(code, timeout=5.0):
    done = execute(code, round(timeout))
    return Result(not done.error, done.output, done.error, done.timed_out, "MemoryError" in done.error)


if __name__ == "__main__":
    sys.exit(run_published("test_execution", {"nanochat.execution": {"execute_code": execute_code}}))
