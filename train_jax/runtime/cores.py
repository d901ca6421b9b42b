"""The number of processor cores that this process may use."""

import os


def cores() -> int:
    """Counts the cores in the CPU affinity mask if the system has one, otherwise all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
