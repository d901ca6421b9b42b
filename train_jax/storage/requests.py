"""Requests to a storage service: repeats them after transient errors, and converts errors to messages for the user."""

from __future__ import annotations

import errno
import logging
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from train_jax.errors import StorageError, UserError

PATIENCE_SECONDS = 120.0
"""Seconds for which a request is repeated; the last attempt may take half a minute longer."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 16.0
_MISSING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_LOCAL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_CLIENT_PACKAGES = {"gcsfs", "aiohttp", "requests", "urllib3", "google", "fsspec"}
"""Packages of storage clients; their exceptions have no common class."""

_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED)\b"
)
"""Pattern of the status in TensorStore's messages."""

T = TypeVar("T")


def retried(call: Callable[[], T], what: str) -> T:
    """Returns the result of the call, repeated while it fails for a transient reason."""
    end = time.monotonic() + PATIENCE_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return call()
        except _MISSING:
            raise
        except Exception as error:
            _raise_final(error, what)
            if time.monotonic() + pause > end:
                raise StorageError(
                    f"{what} cannot be reached ({reason(error)}), tried for {PATIENCE_SECONDS:.0f} s; the same "
                    "command continues when the storage answers again"
                ) from error
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _raise_final(error: Exception, what: str) -> None:
    """Raises the error for the user, unless the error is transient."""
    if isinstance(error, StorageError | UserError):
        raise error
    kind = type(error).__name__
    text = str(error)
    code = getattr(error, "code", None)
    bucket = "/".join(what.split("/")[:3])
    if kind == "DefaultCredentialsError" or code == 401:
        raise UserError(
            f"{what}: there are no credentials; run `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to a key file"
        ) from error
    if "Project was not passed" in text:
        raise UserError(f"{what}: there is no project; set GOOGLE_CLOUD_PROJECT to the project of {bucket}") from error
    if code == 403 or text.startswith("Forbidden"):
        raise UserError(
            f"{what}: no permission ({reason(error)}); the account needs the roles Storage Object Admin and Storage "
            f"Legacy Bucket Reader on {bucket}"
        ) from error
    if kind == "NotFound" and what == bucket:
        raise UserError(
            f"the bucket {bucket} does not exist; create it with `gcloud storage buckets create {bucket}`, or correct "
            "its name"
        ) from error
    if isinstance(error, OSError) and error.errno in _LOCAL_DISK:
        raise StorageError(f"{what}: {error.strerror} ({error.filename or 'local disk'})") from error
    refused = isinstance(code, int) and 400 <= code < 500 and code not in (408, 429)
    if refused or text.startswith("Bad Request"):
        raise StorageError(f"{what}: the storage refuses the request ({reason(error)})") from error
    if not (isinstance(error, OSError | TimeoutError) or type(error).__module__.split(".")[0] in _CLIENT_PACKAGES):
        raise error


def is_outage(error: BaseException | None) -> bool:
    """Returns True if the disk, the service or the permission kept a file from being read, not its content.

    Looks at the causes, too, because Orbax and TensorStore wrap errors.
    """
    while error is not None:
        code = getattr(error, "code", None)
        if isinstance(error, StorageError | TimeoutError | ConnectionError | PermissionError):
            return True
        if isinstance(error, OSError) and (error.errno in _LOCAL_DISK or str(error).startswith("Forbidden")):
            return True
        if code in (401, 403, 408, 429) or (isinstance(code, int) and code >= 500):
            return True
        if type(error).__module__.split(".")[0] in ("aiohttp", "requests", "urllib3"):
            return True
        if _OUTAGE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException | None) -> str:
    """Returns the error in one line; for a long chain, such as TensorStore's, its two ends: what failed and why."""
    if error is None:
        return "another process failed"
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 200 else f"{line[:60]} … {line[-120:]}"


def silence_raised_errors() -> None:
    """Silences Orbax and gcsfs, which print the traceback of every error that they raise, and of every attempt."""
    for name in ("absl", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class _WithoutAbandonedWrites:
    """A hook for exceptions that nothing can catch, without those of writes that Orbax abandons."""

    def __init__(self, before: Callable[[Any], object]):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._before(unraisable)


def silence_abandoned_writes() -> None:
    """Silences the tracebacks of writes that Orbax abandons after one of them has failed, whenever they come."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _WithoutAbandonedWrites):
        sys.unraisablehook = _WithoutAbandonedWrites(sys.unraisablehook)
