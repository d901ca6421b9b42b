"""Fixtures for every test: one thread for PyTorch, and costly objects made once for all processes of a test run.

The checkout of nanochat that the variable NANOCHAT_DIR names is imported anew by each test beside it.
"""

import fcntl
import functools
import gc
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile

import pytest

ALONE = {"campaign", "docs"}
QUICK_COMPILATION = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

gc.disable()  # until all tests are collected: collections of garbage would scan what is imported again and again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A process keeps one core busy, but for when it waits for others: three for two cores take 13 % less time."""
    return max(1, 3 * (os.cpu_count() or 1) // 2)


def pytest_configure(config):
    """Tests compile hundreds of small programs once each: LLVM's expensive passes would double their time, and the
    newer of XLA's two ways to emit fused loops takes as long as all else of a small program. Dividing such a program
    among threads costs more than it saves.

    JAX and the processes that tests start read the variables. Slow tests of the numbers of many steps, and campaigns,
    run what users run, see `full_compilation`. Processes of one session share a cache of programs, so that the same run
    is not compiled fifty times; that of the slow tests has the larger programs of the tests themselves, too.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that tests start would compile all sources
    is_slow = config.option.markexpr == "slow"
    if is_slow or config.option.markexpr == "not slow":
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # later releases have no such flag
            os.environ.setdefault("XLA_FLAGS", QUICK_COMPILATION)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the variable of the process that started it
        programs = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="programs-")
        config.add_cleanup(functools.partial(shutil.rmtree, programs, ignore_errors=True))
    if config.getoption("numprocesses", None):
        return  # this process only starts the workers, which would wait for its imports
    import jax  # reads the variables
    import torch

    jax.config.update("jax_enable_compilation_cache", is_slow)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    torch.set_num_threads(1)  # its tensors are tiny, and threads that wait for a busy core cost tenfold


def pytest_collection_modifyitems(config, items):
    """A test with a mark of ALONE, slow or not, is run only by an expression that names the mark."""
    for mark in ALONE - set(re.findall(r"\w+", config.option.markexpr)):
        left_out = [item for item in items if item.get_closest_marker(mark)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Collections of garbage leave out imported modules and collected tests, which stay until the process ends.

    They are rarer than usual, since a trace makes many objects and JAX keeps most of them in its caches.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture
def nanochat(monkeypatch):
    """The folder that NANOCHAT_DIR names. The test can import the package `nanochat`, and leaves none behind: its
    modules depend on `torch.compile` and NANOCHAT_DTYPE at their import."""
    folder = os.environ.get("NANOCHAT_DIR")
    if folder is None:
        pytest.skip("set NANOCHAT_DIR to a checkout of nanochat")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanochat"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def quick_compilation():
    """Also in campaigns, without LLVM's expensive passes: for tests that compile programs only to compare once."""
    yield from with_optimizations_disabled(True)


@pytest.fixture(scope="module")
def full_compilation():
    """Also in slow tests, and in the processes that they start, what users run: for the numbers of many steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        if os.environ.get("XLA_FLAGS") == QUICK_COMPILATION:
            patch.delenv("XLA_FLAGS")
        yield from with_optimizations_disabled(False)


def with_optimizations_disabled(are_disabled):
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", are_disabled)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: the folder that `make(folder)` filled, by whichever process came first.

    Tests of a module may run in several processes, and each would set up a fixture of the module for itself.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, make):
        folder = shared / name
        done = shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # removes the rest of a failed attempt
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of
