"""The storage service on loopback, for tests: an emulator that also honours preconditions and injects faults.

The emulator of the package `gcp-storage-emulator` ignores `ifGenerationMatch`, on which the lease of a run and
TensorStore depend, does not tell the generation of what it sends, drops a carriage return at the end of an upload, and
forgets a resumable upload once it is finished, although a client may repeat its last request.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server as service
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "tests"
for _name in ("gcp_storage_emulator", "api"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
_read_data = service._read_data


def _read_upload(handler, query):
    """Returns the parts of an upload. The package reads them as an e-mail, which ends its text before "\\r\\n"."""
    if not (handler.headers.get("Content-Type") or "").startswith("multipart/related"):
        return _read_data(handler, query)
    raw = service._decode_raw_data(service._read_raw_data(handler), handler)
    first = raw.split(b"\n", 1)[0]
    end_of_line = b"\n"
    if first.endswith(b"\r"):
        first = first[:-1]
        end_of_line = b"\r\n"
    parts = raw.removeprefix(first).split(end_of_line + first)
    headers, content = parts[1].split(2 * end_of_line, 1)
    meta = parts[0].split(2 * end_of_line, 1)[1]
    kind = next(line for line in headers.splitlines() if line.lower().startswith(b"content-type:"))
    return {"meta": json.loads(meta), "content": content, "content-type": kind.partition(b":")[2].strip().decode()}


service._read_data = _read_upload


class _Storage(Storage):
    """Writes and removes an object only if its newest version is the one that the request names."""

    expected = threading.local()

    def delete_resumable_file_obj(self, file_id):
        self.finished = getattr(self, "finished", {}) | {file_id: self.resumable[file_id]}
        super().delete_resumable_file_obj(file_id)

    def finished_upload(self, file_id):
        """Returns the object that a resumable upload has become; None if the upload is not finished."""
        upload = getattr(self, "finished", {}).get(file_id)
        return upload and self.objects.get(upload["bucket"], {}).get(upload["name"])

    def create_file(self, bucket, name, *args, **kwargs):
        self._check(bucket, name)
        super().create_file(bucket, name, *args, **kwargs)

    def delete_file(self, bucket, name):
        self._check(bucket, name)
        super().delete_file(bucket, name)

    def get_file(self, bucket, name, show_error=True):
        self._check(bucket, name)
        return super().get_file(bucket, name, show_error)

    def _check(self, bucket, name):
        expected = getattr(self.expected, "generation", None)
        if expected not in (None, int(self.objects.get(bucket, {}).get(name, {}).get("generation", 0))):
            raise PreconditionError


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Clients cancel requests whose answer they no longer need."""


class PreconditionError(Exception):
    """The service answers 412."""


class Emulator:
    """One storage service with the bucket `tests`; `gs://tests/…` is reached with `environment`."""

    def __init__(self):
        self._storage = _Storage(use_memory_fs=True)
        self._storage.create_bucket(BUCKET, {"name": BUCKET, "kind": "storage#bucket"})
        self.lock = threading.Lock()
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        """Returns what happens to a request: "" for nothing, a status such as "503", "reset" before it has an effect,
        "lost" if it has its effect but no answer."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self, self._storage))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # gcsfs would ask another service for the kind of the bucket.
        fixed = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return fixed | {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_CLOUD_PROJECT": "tests"}

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all objects of the bucket."""
        with self.lock:
            return sorted(name for name in self._storage.objects.get(BUCKET, {}) if name.startswith(prefix))

    def generation(self, name: str) -> int:
        """Number of the newest version of an object; 0 if there is none."""
        return int(self._storage.objects.get(BUCKET, {}).get(name, {}).get("generation", 0))

    def read(self, name: str) -> bytes:
        return self._storage.get_file(BUCKET, name)

    @contextlib.contextmanager
    def failing(self, fault: Callable[[str, str], str]) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda method, path: ""

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(RequestHandler):
    def __init__(self, emulator: Emulator, *args):
        self._emulator = emulator
        super().__init__(*args)

    def _handle(self, method: str, answer: Callable[[], None]) -> None:
        emulator = self._emulator
        emulator.requests.append((method, self.path))
        fault = emulator.fault(method, self.path)
        if fault == "reset" or fault.isdecimal():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "reset":
            return self._reset()
        if fault.isdecimal():
            return self._refuse(int(fault))
        if fault == "lost":
            self.wfile = open(os.devnull, "wb")  # noqa: SIM115
        query = parse_qs(urlsplit(self.path).query)
        with emulator.lock:
            _Storage.expected.generation = int(query["ifGenerationMatch"][0]) if "ifGenerationMatch" in query else None
            finished = emulator._storage.finished_upload(query["upload_id"][0]) if "upload_id" in query else None
            try:
                self._answer_again(finished) if finished else answer()
            except PreconditionError:
                self._refuse(412)
        if fault == "lost":
            self._reset()

    def _answer_again(self, finished: dict) -> None:
        """Returns the service's answer to a repeated request of a finished upload."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = json.dumps(finished).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self):
        """TensorStore needs the generation of what it read to write again after a precondition has failed."""
        name = unquote(urlsplit(self.path).path.rpartition("/o/")[2])
        if self.command == "GET" and (generation := self._emulator.generation(name)):
            self.send_header("x-goog-generation", str(generation))
        super().end_headers()

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.close()

    def do_GET(self):  # noqa: N802
        self._handle("GET", super().do_GET)

    def do_POST(self):  # noqa: N802
        self._handle("POST", super().do_POST)

    def do_PUT(self):  # noqa: N802
        self._handle("PUT", super().do_PUT)

    def do_DELETE(self):  # noqa: N802
        self._handle("DELETE", super().do_DELETE)

    def do_PATCH(self):  # noqa: N802
        self._handle("PATCH", super().do_PATCH)
