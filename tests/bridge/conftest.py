"""These tests compile hundreds of small programs once each: LLVM's expensive passes would double their time."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
