"""The connections between the processes of a run: messages, and errors for a process that died or hangs.

Every process has a TCP connection to process 0, which passes messages on, and a thread that sends a sign of life every
second. It does so while the process compiles or waits for others, but not once it is killed or frozen. Then all others
end with a message that names it, whatever they are doing: they could wait in a collective for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import platform
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from train_jax.errors import LostProcessError, PreemptedError, UserError
from train_jax.runtime import coordination
from train_jax.runtime.exits import exit_now

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 18.0
"""Seconds without a message after which a process is lost; longer than any call that holds the interpreter's lock."""
JOIN_SECONDS = 300.0
"""Seconds for which the processes wait for each other at the start."""
GRACE_SECONDS = 8.0
"""Seconds in which the others may end by themselves after one of them failed."""

Handler = Callable[[int, Any], None]


class Peers:
    """The other processes of a run. As a context, it ends when all of them have ended theirs."""

    def __init__(self, index: int, count: int, coordinator: str):
        """Connects to all processes; blocks until all are connected. `coordinator` is the host of process 0."""
        self.index = index
        self.count = count
        self._hosts: dict[int, str] = {index: platform.node()}
        self._links: dict[int, _Link] = {}
        self._handlers: dict[str, Handler] = {"left": self._on_left, "lost": self._on_lost, "failed": self._on_failed}
        self._waiting: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        self._routing = threading.RLock()
        self._ending = threading.Lock()
        self._left: set[int] = set()
        self._failed: set[int] = set()
        self._all_left = threading.Event()
        self._status = 0
        self.agreed_to_stop = False
        """True if all processes are about to end because of SIGTERM."""
        self._accept() if index == 0 else self._connect(coordinator)
        for number in self._links:
            threading.Thread(target=self._receive, args=(number,), name=f"peer {number}", daemon=True).start()
        threading.Thread(target=self._beat, name="peers", daemon=True).start()

    # ---- connecting

    def _accept(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
            token = secrets.token_hex(16)
            coordination.publish("peers", json.dumps([server.getsockname()[1], token]))
            deadline = time.monotonic() + JOIN_SECONDS
            while len(self._links) < self.count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    link = _Link(server.accept()[0])
                    link.patience(SILENCE_SECONDS)
                    index, host, given = link.receive()
                except TimeoutError:
                    if time.monotonic() < deadline:
                        continue
                    missing = next(n for n in range(1, self.count) if n not in self._links)
                    raise LostProcessError(missing, "", "did not connect") from None
                except (OSError, ValueError, TypeError):
                    continue
                if given == token:
                    self._links[index], self._hosts[index] = link, host
        for link in self._links.values():
            link.send([[each, host] for each, host in self._hosts.items()])

    def _connect(self, coordinator: str) -> None:
        port, token = json.loads(coordination.read("peers", JOIN_SECONDS))
        try:
            link = _Link(socket.create_connection((coordinator, port), timeout=SILENCE_SECONDS))
            link.send([self.index, platform.node(), token])
            link.patience(JOIN_SECONDS)
            self._hosts = {index: host for index, host in link.receive()}
        except (OSError, ValueError) as error:
            raise LostProcessError(0, coordinator, f"could not be reached ({error})") from None
        self._links[0] = link

    # ---- messages

    def listen(self, kind: str, handler: Handler) -> None:
        """Calls `handler(sender, value)` in another thread for every message of this kind, earlier ones included."""
        with self._routing:
            self._handlers[kind] = handler
            for sender, value in self._waiting.pop(kind, []):
                handler(sender, value)

    def send(self, kind: str, value: Any = None) -> None:
        """Sends a value that fits into JSON to every process, this one included."""
        if self.index == 0:
            self._route(0, kind, value)
        else:
            self._links[0].send([self.index, kind, value])

    def _route(self, sender: int, kind: str, value: Any) -> None:
        """Process 0 passes every message on to all, so that all receive all messages in the same order."""
        with self._routing:
            if self.index == 0:
                for link in self._links.values():
                    link.send([sender, kind, value])
            if kind in self._handlers:
                self._handlers[kind](sender, value)
            else:
                self._waiting[kind].append((sender, value))

    def _beat(self) -> None:
        while True:
            for link in self._links.values():
                link.send([])
            time.sleep(BEAT_SECONDS)

    def _receive(self, number: int) -> None:
        link = self._links[number]
        link.patience(SILENCE_SECONDS)
        while True:
            try:
                message = link.receive()
            except TimeoutError:
                return self._lose(number, f"sent no sign of life for {SILENCE_SECONDS:.0f} s")
            except (OSError, ValueError):
                return self._closed(number)
            if message:
                self._route(*message)

    # ---- endings

    def _closed(self, number: int) -> None:
        if number not in self._left and number not in self._failed:
            self._lose(number, "died")

    def _lose(self, number: int, reason: str) -> None:
        if self.index == 0:
            self._route(0, "lost", [number, reason])
        else:
            self._on_lost(0, [number, reason])

    def _on_lost(self, _sender: int, value: Any) -> None:
        threading.Thread(target=self._end, args=(*value,), daemon=True).start()

    def _end(self, number: int, reason: str) -> None:
        """Ends this process because of another one, also inside a collective or a compilation."""
        self._ending.acquire()  # the first reason counts; never released
        if self.index in self._failed:
            exit_now(self._status)
        error = LostProcessError(number, self._hosts.get(number, ""), reason)
        if number == self.index:
            error = LostProcessError(number, self._hosts[number], f"{reason} (this process, as reported by process 0)")
        sys.stderr.write(f"trm: {error}\n")
        exit_now(error.STATUS, f"error: {error}")

    def _on_failed(self, sender: int, reason: Any) -> None:
        self._failed.add(sender)
        if sender != self.index:  # others may be about to end with the same error
            timer = threading.Timer(GRACE_SECONDS, self._end, (sender, f"ended with an error ({reason})"))
            timer.daemon = True
            timer.start()

    def _on_left(self, sender: int, _value: Any) -> None:
        self._left.add(sender)
        if len(self._left) == self.count:
            self._all_left.set()

    def leave(self, timeout_seconds: float | None = None) -> None:
        """Reports that this process no longer needs the others, and blocks until all have reported that."""
        self.send("left")
        self._all_left.wait(timeout_seconds)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.leave()
            return
        self._status = exit_status(error)
        atexit.register(exit_now, self._status)  # JAX would wait at exit for processes that do not come
        if isinstance(error, PreemptedError) and self.agreed_to_stop:
            self.leave(GRACE_SECONDS)
            return
        if self._status == 1:
            time.sleep(2 * BEAT_SECONDS)  # if the error is a broken connection, `_end` knows the process
        self._failed.add(self.index)
        self.send("failed", f"{type(error).__name__}: {error}"[:300])


def exit_status(error: BaseException) -> int:
    """Returns the exit status of a command that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "STATUS", 2 if isinstance(error, UserError) else 1)


class _Link:
    """A connection that carries one JSON value in a line."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._rest = b""
        self._sending = threading.Lock()

    def patience(self, seconds: float) -> None:
        """Sets the seconds that `receive` waits before it raises TimeoutError."""
        self._socket.settimeout(seconds)

    def send(self, value: Any) -> None:
        """Sends a value; only `receive` notices a failure."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """Returns the next value. Raises TimeoutError, or OSError for a closed connection."""
        while b"\n" not in self._rest:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)
