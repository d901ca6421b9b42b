"""Serves runs, sends them requests, and prints the answers' statuses and which files and processes the server touched.

`python -m support.serve_audited RUN…`: a thousand requests that are wrong in some way, and some that are right.
"""

import http.client
import json
import os
import random
import sys
from collections import Counter

from support.served import listening
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.stage import Serve, open_services

WRONG = 1000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = (
    "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system", "pty.", "shutil.", "tempfile.",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
)  # fmt: skip
TEXTS = ("/v1/chat/completions", "/v1/completions")
PUZZLES = ("/v1/puzzles/solve", "/v1/puzzles/examples")
HELLO = [{"role": "user", "content": "hi"}]
ODD = (
    None, True, -1, 2**70, 1.5, "", "../../etc/passwd", "\0", "\ud800", "file:///etc/passwd", "$(touch x)", "a" * 5000,
    [], {}, [[]], {"a": [1]}, "run@3/../..", "__import__('os').system('touch x')", 'sudoku("1")', "|sh", "\x1b[31m",
)  # fmt: skip


def right_requests(text, puzzle):
    """Method, path and body of requests that are answered."""
    for model in (text, f"{text}@3"):
        yield "POST", TEXTS[0], {"model": model, "messages": HELLO, "max_tokens": 4}
        yield "POST", TEXTS[1], {"model": model, "prompt": "1", "max_tokens": 4, "stream": True, "logprobs": 0}
    for fields in ({}, {"trajectories": 4}):
        yield "POST", PUZZLES[0], {"model": puzzle, "puzzle": "12.. ..12 2... ....", **fields}
    yield "POST", PUZZLES[1], {"model": puzzle, "index": 1}
    page = ("/", "/page.js", "/page.css")
    for path in (*page, "/health", "/metrics", "/v1/models", f"/v1/models/{text}", "/v1/puzzles"):
        yield "GET", path, None


def wrong_requests(rng):
    """Wrong values of fields, damaged bodies, other paths and methods."""
    fields = ("model", "messages", "prompt", "stop", "seed", "n", "stream", "logprobs", "puzzle", "index", "act_steps")
    for number in range(WRONG):
        path = rng.choice(TEXTS + PUZZLES)
        body = {"messages": HELLO, "prompt": "1", "max_tokens": 1, "puzzle": "1" * 16, "index": 0}
        body |= {name: rng.choice(ODD) for name in rng.sample(fields, 3)} | {rng.choice(fields): {"odd": 1}}
        content = json.dumps(body).encode()
        if number % 4 == 1:
            content = content[: rng.randrange(len(content))]
        elif number % 4 == 2:
            content = rng.randbytes(rng.randrange(200))
        elif number % 4 == 3:
            path = rng.choice(("/..%2f..%2fetc/passwd", "/v1/models/..", "/page/../x", "/v1/files", path))
            content = b"{"
        yield rng.choice(("POST", "POST", "POST", "PUT", "DELETE", "GET")), path, content


def send(port, method, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def main(run_dirs):
    config = Serve(run_dirs=tuple(run_dirs), slots=2, context_tokens=64, requests_per_minute=10**6)
    gate = Gate(config)
    touched = []
    services = open_services(config, gate)

    def watch(event, arguments):
        if event.startswith(FORBIDDEN) or (event == "open" and arguments[2] and arguments[2] & WRITES):
            touched.append(f"{event} {arguments}")

    with listening(create_app(gate, services), config) as port:
        sys.addaudithook(watch)
        right = [send(port, *each) for each in right_requests(*run_dirs)]
        wrong = Counter(send(port, *each) for each in wrong_requests(random.Random(0)))
        right += [send(port, *each) for each in right_requests(*run_dirs)]
        seen = touched
        touched = []
    print(json.dumps({"right": right, "wrong": wrong, "touched": seen}))


if __name__ == "__main__":
    main(sys.argv[1:])
