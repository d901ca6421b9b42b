"""`trm serve`: the command and its mistakes."""

import json
import os
import signal
import socket
import subprocess
import sys
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from support.scripts import run_script
from test_served_puzzles import write_sudokus

from train_jax.__main__ import main as trm
from train_jax.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is visible to others, and TRM_TOKEN is not set; set it to a secret"),
        (["--port", "USED"], "use another address or port"),
        (["--step", "8", "--port", "0"], "no checkpoint of step 8"),
        (["RUN", "--port", "0"], "is given twice; give each run once"),
    ],
)
def test_a_mistake_is_one_line(language_run, capsys, arguments, message):
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = {"RUN": language_run, "USED": str(other.getsockname()[1])}
        assert trm(["serve", language_run, *(words.get(each, each) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def answer_of(port, path, body=None):
    """Returns the status, the headers and the JSON of an answer, which has to begin within 5 s."""
    try:
        response = urlopen(Request(f"http://127.0.0.1:{port}{path}", body), timeout=5)
    except HTTPError as error:
        response = error
    return response.status, response.headers, json.load(response)


def test_requests_are_refused_until_the_programs_are_compiled(monkeypatch, capsys):
    port = free_port()
    answers = {}
    answers_of_live = []

    def compile(config, gate):
        answers_of_live.append(answer_of(port, "/livez")[::2])
        for path, body in {
            "/health": None,
            "/readyz": None,
            "/v1/models": None,
            "/": None,
            "/v1/chat/completions": b"{}",
        }.items():
            answers[path] = answer_of(port, path, body)
        raise UserError("a model is damaged")

    monkeypatch.setattr("train_jax.serve.stage.open_services", compile)
    assert trm(["serve", "run", "--port", str(port)]) == 2
    assert capsys.readouterr().err == "trm: a model is damaged\n"
    assert answers_of_live == [(200, {"status": "compiling"})], "it is alive, and not to be started again"
    for path, (status, headers, said) in answers.items():
        assert status == 503 and int(headers["Retry-After"]) > 0, path
        assert (
            said == {"status": "compiling"} if path in ("/health", "/readyz") else "compil" in said["error"]["message"]
        )
    with pytest.raises(URLError):
        answer_of(port, "/health")


@pytest.mark.slow
def test_no_request_writes_a_file_or_starts_a_process(language_run, made_once):
    """The right ones read a checkpoint, a puzzle of the test set, and the page."""
    *_, line = run_script("serve_audited", language_run, made_once("sudokus", write_sudokus) / "run").splitlines()
    said = json.loads(line)
    assert set(said["right"]) == {200} and said["touched"] == []
    assert sum(said["wrong"].values()) == 1000 and set(said["wrong"]) <= {"200", "400", "404", "405"}
    assert said["wrong"]["400"] > 300


@pytest.mark.slow
def test_two_runs_are_served_until_sigterm(language_run, made_once):
    puzzles = str(made_once("sudokus", write_sudokus) / "run")  # both folders have the name "run"
    port = free_port()
    options = ["--port", str(port), "--context-tokens", "32"]
    command = [sys.executable, "-m", "train_jax", "serve", language_run, puzzles, *options]
    environment = os.environ | {"TRM_TOKEN": "secret-token", "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as server:
        try:
            sizes = "8 answers at a time, 32 tokens each"
            assert server.stdout.readline() == f"{language_run} at step 3: {sizes}; compiling\n"
            assert answer_of(port, "/health")[0] == 503
            assert server.stdout.readline() == f"{puzzles} at step 7: 4x4 Sudokus; compiling\n"
            assert server.stdout.readline().startswith("page: http://127.0.0.1:")
            line = server.stdout.readline()
            base = line.split()[-1]
            assert line == f"serving at {base}\n" and base.startswith("http://127.0.0.1:") and base.endswith("/v1")
            assert answer_of(port, "/health")[0] == 200
            headers = {"Authorization": "Bearer secret-token"}
            for model in (language_run, f"{language_run}@3"):
                body = json.dumps({"prompt": "1", "temperature": 0, "model": model}).encode()
                answer = json.load(urlopen(Request(f"{base}/completions", body, headers)))
                assert answer["model"] == model and answer["choices"][0]["text"] == "\0" * 16
            solved = urlopen(Request(f"{base}/puzzles/solve", b'{"puzzle": "................"}', headers))
            assert solved.read().count(b"<svg") == 1 + 3
            with pytest.raises(HTTPError, match="401"):
                urlopen(f"{base}/models")
        finally:
            server.terminate()
            rest = server.stdout.read()
        assert server.wait(timeout=20) == -signal.SIGTERM and rest == ""
