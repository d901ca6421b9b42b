"""`trm serve`: the command and its mistakes."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from support.untrained_run import write_language_run

from train_jax.__main__ import main as trm


@pytest.fixture(scope="module")
def run_dir(made_once):
    return str(made_once("generate", write_language_run) / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 is reached by others, and TRM_TOKEN is not set; set it to a secret token",
        ),
        (["--host", "no.such.host.invalid", "--token-variable", "HOME"], "use another address or port"),
        (["--step", "8", "--port", "0"], "no checkpoint of step 8"),
        (["--queue", "-1"], "--queue is -1; use at least 0"),
    ],
)
def test_a_mistake_is_one_line(run_dir, capsys, arguments, message):
    assert trm(["serve", run_dir, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error


def test_a_port_in_use(run_dir, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert trm(["serve", run_dir, "--port", str(other.getsockname()[1])]) == 2
    assert "use another address or port" in capsys.readouterr().err


def test_without_the_packages(run_dir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert trm(["serve", run_dir]) == 2
    line = "trm: this command needs the package uvicorn; install it with `pip install 'trm-bridge[serve]'`\n"
    assert capsys.readouterr().err == line


@pytest.mark.slow
def test_a_run_is_served_until_it_is_told_to_end(run_dir, tmp_path):
    command = [sys.executable, "-m", "train_jax", "serve", run_dir, "--port", "0", "--context-tokens", "32"]
    environment = os.environ | {"TRM_TOKEN": "secret-token", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        try:
            assert server.stdout.readline() == "run at step 3: 8 answers at a time, 32 tokens each; compiling\n"
            assert server.stdout.readline().startswith("page: http://127.0.0.1:")
            line = server.stdout.readline()
            base = line.split()[-1]
            assert line == f"serving at {base}\n" and base.startswith("http://127.0.0.1:") and base.endswith("/v1"), (
                line
            )
            headers = {"Authorization": "Bearer secret-token"}
            request = urllib.request.Request(f"{base}/completions", b'{"prompt": "1", "temperature": 0}', headers)
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
            assert answer["model"] == "run" and answer["choices"][0]["text"] == "\0" * 16
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{base}/models")
        finally:
            server.terminate()
            rest = server.stdout.read()
        assert server.wait(timeout=20) == -signal.SIGTERM and rest == ""
