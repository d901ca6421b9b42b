"""The recipes of docs/jax.md print what the page says; those of packages that are not installed are skipped by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax_page_process import sections

pytestmark = pytest.mark.docs
PROCESS = Path(__file__).with_name("jax_page_process.py")
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
OPTIONAL = {"equinox", "flax", "peft", "transformers"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "printed.json"
    subprocess.run([sys.executable, str(PROCESS), str(out)], check=True, env=os.environ | ENVIRONMENT)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", sections())
def test_section(results, name):
    result = results[name]
    if result.get("lacks") in OPTIONAL:
        pytest.skip(f"{name}: {result['lacks']} is not installed")
    assert "printed" in result, result
    expected = [text for language, text in sections()[name] if language == "text"]
    assert expected and [text.strip() for text in result["printed"]] == [text.strip() for text in expected]
