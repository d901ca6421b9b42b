"""How a run ends, by its exit status, and whether it is started again after that.

A supervisor (`trm train --restarts`) starts the process of one machine again, a launch (`trm launch`) those of all
hosts, on new machines if the old ones are gone.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from train_jax.errors import LostProcessError, PreemptedError, StorageError, UserError

TIME_OUT = 124
"""Exit status of a run that was stopped at `--max-hours`, as `timeout` has it."""


class Ending(NamedTuple):
    text: str
    supervisor_restarts: bool
    launch_restarts: bool


_OTHER = Ending("", supervisor_restarts=True, launch_restarts=True)
"""Of other statuses, such as those of a process that a signal killed."""
_ENDINGS = {
    0: Ending("finished", False, False),
    1: Ending("", True, False),  # an error in one process may be that of its machine, one in all of them repeats
    UserError.STATUS: Ending("", False, False),
    LostProcessError.STATUS: Ending("lost another host", True, True),
    StorageError.STATUS: Ending("", True, False),  # a supervisor waits longer each time
    PreemptedError.STATUS: Ending("preempted", False, True),  # the machine goes away
    TIME_OUT: Ending("stopped at --max-hours", False, False),
    130: Ending("", False, False),  # Ctrl-C
    141: Ending("", False, False),  # nobody reads its output
}


def ending(status: int) -> Ending:
    """Returns the ending of a process with this exit status, 128 and more for signals."""
    known = _ENDINGS.get(status, _OTHER)
    return known._replace(text=known.text or _described(status))


def _described(status: int) -> str:
    if status > 128 and status - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
