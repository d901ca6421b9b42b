"""The checks by part, the most valuable first: those of hosts and devices, of kernels, and of the step."""

from __future__ import annotations

from typing import NamedTuple

from train_jax.pods.check import devices, hosts
from train_jax.pods.check.foreign import foreign_rows
from train_jax.pods.check.kernels import choose_rows, pallas_rows
from train_jax.pods.check.runner import Check
from train_jax.pods.check.steps import input_rows, step_rows

EQUAL = ("code", "versions", "configuration", "data")
"""Processes that differ in these would run different programs, and wait for each other for ever."""
_TRAINS = "configuration trains"
_MODEL = Check("model beside PyTorch", devices.check_model, (_TRAINS,), needs_data=True, compiles=True, may_last=True)

PREFLIGHT = (
    Check("processes", devices.check_processes),
    Check("code", hosts.check_code),
    Check("versions", hosts.check_versions),
    Check("configuration", hosts.check_configuration),
    Check("data", hosts.check_data, needs_data=True, may_last=True),  # reads all of a large data set the first time
    Check("clock", hosts.check_clock),
    Check("run folder", hosts.check_folder),
    Check("device held by", hosts.check_holders),
    Check("wandb", hosts.check_wandb, may_last=True),
    Check("devices", devices.check_devices, ("processes", "code", "versions")),
    Check("collective", devices.check_collective, ("devices",)),
    Check("matrix product", devices.check_products, ("devices",)),
    Check(_TRAINS, devices.check_training, ("devices", *EQUAL), needs_data=True, may_last=True),
    Check("disk", hosts.check_disk, (_TRAINS,), needs_data=True, may_last=True),
    _MODEL,
    Check("memory", devices.check_memory, (_TRAINS,), needs_data=True, compiles=True, may_last=True),
)
"""First those that need no devices, then the devices, then the model."""


class Part(NamedTuple):
    """Checks whose rows `prove.json` gets together; a part that ends the process is not repeated."""

    name: str
    checks: tuple[Check, ...]


def _part(name: str, *checks: Check) -> Part:
    """Returns a part whose time is limited as a whole."""
    return Part(name, tuple(check._replace(may_last=True) for check in checks))


CHOOSE = "kernels at the run's shapes"
_CHOOSE = _part(CHOOSE, Check(CHOOSE, choose_rows))
_PALLAS = _part("Pallas kernels", Check("Pallas kernels", pallas_rows))
_STEPS = _part("steps", Check("steps", step_rows))
_FOREIGN = _part("foreign modules", Check("foreign modules", foreign_rows))
_INPUT = _part("input", Check("input wait", input_rows, needs_data=True))

PARTS = (Part("preflight", PREFLIGHT), _CHOOSE, _STEPS, _FOREIGN, _INPUT, _PALLAS)
"""The parts of `trm prove`, in their order."""
KERNELS = (_CHOOSE, _PALLAS)
"""The parts of `trm check kernels`."""
STEP = (_part("model", _MODEL._replace(needs=())), _STEPS, _FOREIGN)
"""The parts of `trm check step`."""
