"""What other services say: wandb's key, and the state of the TPU in Google Cloud."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.preflight.row import Row, row
from train_jax.run.config import RunConfig
from train_jax.run.tracking import wandb_mode

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_TIMEOUT_SECONDS = 60.0


def check_wandb(config: RunConfig) -> Row:
    """Whether metrics go online. Neither the key nor a part of it is shown."""
    mode, key = wandb_mode(config)
    if mode == "online":
        text = f"online, with the key of {key}" if key else "online, without a key"
        remedy = "set WANDB_API_KEY, run `wandb login`, or use --wandb offline"
        return row("wandb", text, warn=not key, limit="WARN: online without a key", remedy=remedy)
    why = {"offline": ": metrics stay in the run folder", "not installed": ": metrics are in metrics.jsonl"}
    return Row("wandb", "PASS", f"{mode}{why.get(mode, '')}")


def check_names(tpu: str, zone: str) -> None:
    """Raises `UserError` for names that Google Cloud does not have: one with a hyphen in front would be an option."""
    for option, name in (("--tpu", tpu), ("--zone", zone)):
        if name and not _NAME.fullmatch(name):
            raise UserError(f"{option} {name!r}: expected lower-case letters, digits and hyphens, such as my-tpu-1")
    if bool(tpu) != bool(zone):
        raise UserError("--tpu and --zone belong together; give both, such as --tpu my-tpu-1 --zone us-central2-b")


def check_tpu(tpu: str, zone: str) -> Row:
    """State and health of the TPU, by `gcloud compute tpus tpu-vm describe`."""
    command = ["gcloud", "compute", "tpus", "tpu-vm", "describe", tpu, "--zone", zone, "--format", "json"]
    limit = "READY and HEALTHY"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        described: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return Row("TPU", "FAIL", f"gcloud: {error}", limit, "install gcloud and run `gcloud auth login`")
    if done.returncode:
        reason = " ".join(done.stderr.split())[:300]
        return Row("TPU", "FAIL", f"gcloud: {reason}", limit, "are name, zone and project right?")
    state, health = described.get("state", "?"), described.get("health", "not told")
    kind = described.get("acceleratorType", "?")
    return row(
        "TPU",
        f"{tpu} ({kind}): {state}, {health}",
        fail=state != "READY" or health in ("UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE", "TIMEOUT", "UNHEALTHY"),
        warn=health != "HEALTHY",
        limit=limit,
        remedy="wait for READY; delete and create it again if it stays unhealthy",
    )
