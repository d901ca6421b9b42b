"""Whether all processes have the same code, versions, configuration and data, and clocks that agree. No devices."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from train_jax.pod.preflight.row import Row, row
from train_jax.run.config import RunConfig, to_json
from train_jax.run.machine import hash_of_all, source_hashes, versions_of_packages
from train_jax.run.resume import differences_of_fields
from train_jax.runtime.coordination import exchange
from train_jax.task import Task
from train_jax.version import DISTRIBUTION, commit, installed_version

CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 2.0, 30.0
"""`trm status` calls a run silent after a minute, by the clock of the machine that asks."""
_CLOCK_ROUNDS = 5


def check_code(config: RunConfig, hosts: Sequence[str]) -> Row:
    """Collective."""
    try:
        hashes = source_hashes(config)
    except OSError as error:  # the others wait for an answer
        hashes = {"unreadable": str(error)}
    whole = hash_of_all(hashes)
    others = exchange("preflight code", json.dumps([whole, commit(installed_version(DISTRIBUTION))]))
    named = [f"{one} at commit {at}" for one, at in map(json.loads, others)]
    result = _same("code", [json.loads(each)[0] for each in others], named, hosts, f"{len(hashes)} files")
    if not result.failed:
        return result
    files = [json.loads(each) for each in exchange("preflight files", json.dumps(hashes))]
    differing = [name for name in sorted(set().union(*files)) if len({each.get(name) for each in files}) > 1]
    remedy = f"copy the same code to every host; {len(differing)} files differ, such as {differing[0]}"
    return Row(result.name, "FAIL", result.measured, result.limit, remedy)


def check_versions(hosts: Sequence[str]) -> Row:
    """Collective."""
    versions = {"python": platform.python_version()} | versions_of_packages()
    texts = exchange("preflight versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "torch") if name in versions)
    remedy = "install with `pip install -c constraints.txt` on every host"
    return _same("versions", texts, texts, hosts, shown, remedy)


def check_configuration(config: RunConfig, hosts: Sequence[str]) -> Row:
    """Collective."""
    texts = exchange("preflight configuration", to_json(config))
    short = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]
    result = _same("configuration", texts, short, hosts, short[0])
    if not result.failed:
        return result
    usual = json.loads(Counter(texts).most_common(1)[0][0])
    fields = {name for text in texts for name, _ in differences_of_fields(usual, json.loads(text))}
    remedy = f"start every process with the same command line; other values of {', '.join(sorted(fields)[:5])}"
    return Row(result.name, "FAIL", result.measured, result.limit, remedy)


def check_data(task: Task | str, hosts: Sequence[str]) -> Row:
    """Reads a batch and compares the content of the data set. `task`: or why it cannot be opened. Collective."""
    begin = time.perf_counter()
    problem, fingerprint, description = _read(task)
    seconds = time.perf_counter() - begin
    fingerprints = exchange("preflight data", fingerprint)
    if problem:
        return Row("data", "FAIL", problem, "readable by every process")
    short = [hashlib.sha256(text.encode()).hexdigest()[:12] if text else "not readable" for text in fingerprints]
    shown = f"{description}; read a batch in {seconds:.2f} s"
    return _same("data", fingerprints, short, hosts, shown, "copy the same data set to every host, or use gs://")


def _read(task: Task | str) -> tuple[str, str, str]:
    """(what is wrong, fingerprint, description); nothing is raised, because the others wait for an answer."""
    if isinstance(task, str):
        return task, "", ""
    try:
        task.batch(0, (0, 1))
        return "", task.fingerprint, task.description
    except Exception as error:
        return f"a batch cannot be read: {' '.join(str(error).split())}", "", ""


def _same(
    name: str, values: Sequence[str], shown: Sequence[str], hosts: Sequence[str], measured: str, remedy: str = ""
) -> Row:
    """Whether the values of all processes are equal; if not, names the first one that differs from most."""
    limit = "the same in all processes"
    if len(set(values)) == 1:
        return Row(name, "PASS", measured, limit if len(values) > 1 else "")
    usual = Counter(values).most_common(1)[0][0]
    odd = next(index for index, value in enumerate(values) if value != usual)
    other = shown[list(values).index(usual)]
    return Row(name, "FAIL", f"process {odd} on {hosts[odd]} has {shown[odd]}, others have {other}", limit, remedy)


def check_clock(hosts: Sequence[str]) -> Row | None:
    """The difference to the median of all clocks. Collective.

    The processes read their clocks when they have all arrived; of several tries the one counts in which they differ
    least, because a process that is late in one is not in all.
    """
    if len(hosts) == 1:
        return None
    readings = []
    for _ in range(_CLOCK_ROUNDS):
        exchange("preflight clock", "")
        readings.append([float(text) for text in exchange("preflight time", repr(time.time()))])
    best = min(readings, key=lambda each: max(each) - min(each))
    middle = statistics.median_low(best)
    odd = max(range(len(best)), key=lambda index: abs(best[index] - middle))
    skew = max(best) - min(best)
    return row(
        "clock",
        f"clocks differ by up to {skew:.2f} s (process {odd} on {hosts[odd]})",
        fail=skew > CLOCK_FAIL_SECONDS,
        warn=skew > CLOCK_WARN_SECONDS,
        limit=f"WARN {CLOCK_WARN_SECONDS:g} s, FAIL {CLOCK_FAIL_SECONDS:g} s",
        remedy=f"start the time service on {hosts[odd]}: sudo systemctl restart chrony",
    )
