"""A relay between one process of a run and JAX's coordination service, which runs inside process 0.

When the connection to the service breaks, because process 0 died, JAX aborts the process at once, with a stack trace
that does not name process 0. The relay keeps the process's side of the connection open, so that `Peers` can end it with
a message. It is a process of its own, because JAX may hold the interpreter's lock while it waits for the service.

`python relay.py HOST PORT`, without anything else of this package, prints the port on which it listens. It ends when
the process that started it closes its standard input, as it does when it ends in any way.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading


def start_relay(host: str, port: int) -> int:
    """Starts a relay to `host:port` and returns its port on 127.0.0.1."""
    command = [sys.executable, "-I", "-S", __file__, host, str(port)]
    # The relay has its own session, so that signals to the process's group do not end it first.
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert relay.stdout is not None
    _RELAYS.append(relay)
    return int(relay.stdout.readline())


_RELAYS: list[subprocess.Popen[bytes]] = []
"""Relay processes, whose standard input stays open for as long as this process lives."""


def _send_on(near: socket.socket, far: socket.socket) -> None:
    """Forwards data to the service. Ends when the process closes its side, not when the service does."""
    while data := _received(near):
        with contextlib.suppress(OSError):
            far.sendall(data)
    near.close()
    far.close()


def _send_back(far: socket.socket, near: socket.socket) -> None:
    """Forwards data to the process, which does not see the service close its side once it has answered."""
    answered = False
    with contextlib.suppress(OSError):
        while data := _received(far):
            near.sendall(data)
            answered = True
        if not answered:
            near.shutdown(socket.SHUT_RDWR)


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


def _connect(near: socket.socket, host: str, port: int) -> None:
    try:
        far = socket.create_connection((host, port), timeout=20)
    except OSError:  # the service is not there yet: JAX connects again
        near.close()
        return
    far.settimeout(None)
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_send_on, args=(near, far), daemon=True).start()
    _send_back(far, near)


def _accept(server: socket.socket, host: str, port: int) -> None:
    while True:
        near, _ = server.accept()
        threading.Thread(target=_connect, args=(near, host, port), daemon=True).start()


def _main(host: str, port: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, host, int(port)), daemon=True).start()
    sys.stdout.write(f"{server.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _main(*sys.argv[1:])
