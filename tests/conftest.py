"""For every test: one thread for PyTorch, and what is costly to make is made once, however many processes test."""

import fcntl
import os
import shutil

import pytest
import torch


def pytest_configure(config):
    """Tests compile hundreds of small programs once each: LLVM's expensive passes would double their time.

    JAX and the processes that tests start read the variable. The slow tests run what users run.
    """
    if config.option.markexpr == "not slow":
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what the tests run does not depend on what they ran before


def pytest_collection_modifyitems(config, items):
    """A campaign takes hours, so that only `-m campaign` runs one."""
    if "campaign" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


torch.set_num_threads(1)  # its tensors are tiny, and threads that wait for a busy core cost tenfold


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: the folder that `make(folder)` filled, by whichever process came first.

    Tests of a module may run in several processes, and each would set up a fixture of the module for itself.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, make):
        folder, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what another one began and failed at
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of
