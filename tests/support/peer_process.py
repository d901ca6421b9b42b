"""A script: one of several processes with `Peers`, whose rendezvous is a folder instead of JAX.

python -m support.peer_process FOLDER INDEX COUNT SILENCE_SECONDS DOING

DOING is `wait` for a minute, `late` to end, `end` at once, or `fail` with an OSError. A file `INDEX.ready` says that it
is connected, and `INDEX.last` contains the reason that `exit_now` gives.
"""

import sys
import time
import types
from pathlib import Path

folder = Path(sys.argv[1])
index = int(sys.argv[2])
count = int(sys.argv[3])


def publish(name, value):
    (folder / f"{name}.part").write_text(value)
    (folder / f"{name}.part").rename(folder / name)


def read(name, timeout_seconds):
    while not (folder / name).exists():
        time.sleep(0.01)
    return (folder / name).read_text()


coordination = types.ModuleType("train_jax.runtime.coordination")  # the real one imports JAX
coordination.__dict__.update(publish=publish, read=read)
sys.modules[coordination.__name__] = coordination

from train_jax.runtime import exits, peers  # noqa: E402

peers.SILENCE_SECONDS = float(sys.argv[4])
peers.BEAT_SECONDS = 0.2
peers.GRACE_SECONDS = 1.0
exits.LAST_SECONDS = 0.3


def fail():
    raise OSError("no space left")


DOING = {"wait": lambda: time.sleep(60), "late": lambda: time.sleep(0.6), "end": lambda: None, "fail": fail}
with (
    peers.Peers(index, count, "127.0.0.1"),
    exits.before_exit(lambda reason: time.sleep(60)),  # called last, and not waited for
    exits.before_exit(lambda reason: (folder / f"{index}.last").write_text(reason)),
):
    (folder / f"{index}.ready").touch()
    DOING[sys.argv[5]]()
