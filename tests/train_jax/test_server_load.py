"""`trm serve` under load: fifty clients at once, beside some that never read."""

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import time

import httpx2
import numpy as np
import pytest
from support.scripts import ENVIRONMENT, script

CLIENTS = 50
SILENT = 3
TEXT = "/v1/completions"
ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 5


@pytest.fixture(scope="module")
def port():
    environment = os.environ | ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(script("serve_scripted"), env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def silent_client(port):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", port))
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True, "logprobs": 0})
    one.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return one


async def ask(client, rng, statuses, gaps):
    """Asks once; the text is whole, or the answer is 429. Adds the times between parts of a stream to `gaps`."""
    most = rng.randrange(1, 90)
    stream = rng.random() < 0.7
    body = {"prompt": "a", "temperature": 0, "max_tokens": most, "stream": stream}
    async with client.stream("POST", TEXT, json=body) as response:
        statuses.append(response.status_code)
        if response.status_code != 200 or not stream:
            content = json.loads(await response.aread())
            if response.status_code == 429:
                assert content["error"]["code"] == "queue_full"
                await asyncio.sleep(0.05)
            else:
                assert content["choices"][0]["text"] == ALPHABET[1 : most + 1]
            return
        texts = []
        before = None
        ended = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        assert ended and "".join(texts) == ALPHABET[1 : most + 1]


async def fifty_clients(port, seconds, statuses):
    """Returns the times between parts of streams."""
    gaps = []
    ends = time.monotonic() + seconds

    async def one(client, seed):
        rng = random.Random(seed)
        while time.monotonic() < ends:
            await ask(client, rng, statuses, gaps)

    limits = httpx2.Limits(max_connections=CLIENTS)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, seed) for seed in range(CLIENTS)))
    return gaps


@pytest.mark.campaign  # it measures times
def test_clients_that_never_read_delay_no_other(port):
    """The times between parts of a stream, in rounds without such clients and with some, as a ratio."""
    seconds = 120
    rounds = 6
    gaps = ([], [])
    statuses = []
    for number in range(2 * rounds):
        with contextlib.ExitStack() as stack:
            for _ in range(SILENT if number % 2 else 0):
                stack.enter_context(silent_client(port))
            gaps[number % 2].extend(asyncio.run(fifty_clients(port, seconds / (2 * rounds), statuses)))
    without, beside = (1000 * np.percentile(each, 95) for each in gaps)
    answered = statuses.count(200)
    refused = statuses.count(429)
    print(f"{answered} answers, {refused} refused; p95 {without:.1f} ms, {beside:.1f} ms beside silent ones")
    assert {*statuses} == {200, 429} and answered > 10 * seconds and beside / without <= 1.2
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
        ends = time.monotonic() + 40
        while 'trm_rows{model="toy"} 0\n' not in client.get("/metrics").text:
            assert time.monotonic() < ends, "rows of clients that went away are still computed"
            time.sleep(0.1)
