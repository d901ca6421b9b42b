"""These tests compile hundreds of small programs once each: LLVM's expensive passes would double their time."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick(quick_compilation):
    pass
