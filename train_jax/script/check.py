"""The first steps of a script in PyTorch beside the same steps here: losses, and parameters and buffers after them.

PyTorch runs its own loop with the model, the loss, the optimizer and the schedule of the script. JAX runs the training
step of a run on the same batches and replays PyTorch's random draws. A leaf that differs in the script's own precision
is decided in float64, where both sides must agree to `WIDE_TOLERANCE`: what differs only in fewer bits is rounding.
A gradient that is rounding even in float64, such as that of the bias of keys in an attention, has the same value on
both sides there: Adam would make steps of any size out of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import bridge
from bridge.parity.sides import in_float64, watching, wide_casts
from bridge.tensor.arrays import array_of
from train_jax.core.objective import Objective
from train_jax.core.optim.chain import Optimizer, logged_learning_rates, trainable
from train_jax.core.state import new_state
from train_jax.core.step import StepOptions, step_of
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.model import build_module, build_optimizer
from train_jax.runtime.backend import host_device
from train_jax.runtime.devices import on_one_device
from train_jax.script.models import as_given
from train_jax.script.structure import is_array, mapped
from train_jax.script.task import COUNT, LOSS, LOSS_METHOD, ScriptTask, mean_loss, sums_of

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of a loss in float32."""
TOLERANCE = 1e-4
"""Largest difference of a leaf after the steps in float32, relative to its largest entry."""
WIDE_TOLERANCE = 1e-9
"""Largest relative difference of losses and leaves in float64."""
ROUNDING_OF_GRADIENTS = 1e-12
"""A gradient in float64 that is smaller, as a share of the largest one of all parameters, is rounding."""
ROUNDING_OF_LEAVES = 1e-5
"""A leaf in float64 whose entries are all smaller, as a share of those of the other leaves, may be rounding.

A BatchNorm whose input is a linear function of a BatchNorm's output has a running mean that is zero but for rounding.
"""
_INSTEAD_OF_ROUNDING = 1e-30
"""Not zero: a parameter whose gradients are all zero is one that the loss does not reach, and stays so."""
_REMEDY = "--no-verify trains without this check"


@dataclasses.dataclass(frozen=True)
class Steps:
    """What one side did."""

    losses: dict[str, float]
    """The losses by name, such as `loss of step 1`."""
    leaves: dict[str, np.ndarray]
    """Parameters and buffers after the steps, by qualified name."""
    rounding: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of entries whose gradient in float64 is rounding, for each such parameter, of PyTorch's side."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A difference of a loss or of a leaf, relative to PyTorch's largest entry."""

    name: str
    difference: float
    tolerance: float
    wide_difference: float | None = None
    """The same in float64, where it was computed."""
    entries_without_gradient: int = 0
    """Number of entries whose gradient in float64 is rounding."""

    @property
    def agrees(self) -> bool:
        if self.wide_difference is not None:
            return self.wide_difference <= WIDE_TOLERANCE
        return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """The result of a comparison."""

    steps: int
    leaves: list[Leaf]
    """Losses of the steps, parameters and buffers; the largest differences first."""
    seconds: float

    @property
    def ok(self) -> bool:
        return all(leaf.agrees for leaf in self.leaves)

    @property
    def rounded(self) -> list[Leaf]:
        """The leaves that differ by rounding."""
        return [leaf for leaf in self.leaves if leaf.agrees and leaf.difference > leaf.tolerance]

    def __str__(self) -> str:
        worst = self.leaves[0]
        if not self.ok:
            worst = next(leaf for leaf in self.leaves if not leaf.agrees)
            wide = "" if worst.wide_difference is None else f", in float64 by {worst.wide_difference:.0e}"
            return (
                f"{self.steps} steps differ from PyTorch, most in {worst.name}: by {worst.difference:.0e} of its "
                f"largest entry{wide}"
            )
        rounding = ""
        if self.rounded:
            names = ", ".join(leaf.name for leaf in self.rounded[:3])
            rounding = f", but for rounding in {names}{', …' * (len(self.rounded) > 3)}, as float64 shows"
        worst = next((leaf for leaf in self.leaves if leaf not in self.rounded), worst)
        return (
            f"{self.steps} steps agree with PyTorch: {len(self.leaves)} losses and leaves to "
            f"{worst.difference:.0e}{rounding} ({self.seconds:.1f} s)"
        )


def check_steps(
    config: RunConfig,
    steps: int,
    say: Callable[[str], None] = lambda _: None,
    task: ScriptTask | None = None,
    always_in_float64: bool = False,
) -> StepCheck:
    """Compares `steps` training steps with PyTorch's; `task` is that of the run, if it has read the data already.

    `always_in_float64`: compare in float64 also what agrees in float32. A script in 16 bits is always compared there.
    Raises `UserError` for a script that cannot be run.
    """
    begun = time.perf_counter()
    task = task or ScriptTask(config)
    _ = task.form  # reads the data before the default dtype is float64, which data without a dtype would have
    narrow = _is_narrow(config, task)
    with jax.default_device(host_device()):
        leaves = [] if narrow else _differences(*_both(config, task, steps, torch.float32, say))
        if narrow or always_in_float64 or not all(leaf.agrees for leaf in leaves):
            say("comparing in float64")
            theirs, ours = _both(config, task, steps, torch.float64, say)
            in_float32 = {leaf.name: leaf.difference for leaf in leaves}
            leaves = [
                dataclasses.replace(
                    leaf,
                    difference=in_float32.get(leaf.name, leaf.difference),
                    wide_difference=leaf.difference,
                    entries_without_gradient=theirs.rounding.get(leaf.name, 0),
                )
                for leaf in _differences(theirs, ours, ROUNDING_OF_LEAVES)
            ]
        if narrow:
            leaves += _narrow_leaves(config, task)
    leaves.sort(key=lambda leaf: -leaf.difference)
    return StepCheck(steps, leaves, time.perf_counter() - begun)


def verified(config: RunConfig, task: ScriptTask) -> str:
    """Compares the first two steps of a new run; returns a line for the log. Raises `UserError` where they differ."""
    script = task.script
    try:
        check = check_steps(config, 2, task=task)
    except bridge.BridgeError as error:
        text = " ".join(str(error).split())
        raise UserError(f"{script.file} cannot be compared with PyTorch: {text}; {_REMEDY}") from error
    if not check.ok:
        raise UserError(f"{script.file}: {check}; `trm check {script.file}` shows every leaf, and {_REMEDY}")
    return f"{script.file}: {check}"


def _is_narrow(config: RunConfig, task: ScriptTask) -> bool:
    """Returns whether a script computes in 16 bits."""
    dtypes = {config.arch.torch_dtype, *(each.dtype for each in build_module(config, task, 1).parameters())}
    return bool(dtypes & {torch.bfloat16, torch.float16})


def _both(
    config: RunConfig, task: ScriptTask, steps: int, dtype: torch.dtype, say: Callable[[str], None]
) -> tuple[Steps, Steps]:
    """Returns the steps of PyTorch and of JAX in a precision: float32, or float64."""
    config = dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype="float32"))
    total_steps = max(config.steps, steps)
    with _in_float64() if dtype == torch.float64 else contextlib.nullcontext():
        theirs = _TorchLoop(config, task, total_steps, dtype)
        ours = _JaxLoop(config, task, total_steps, dtype)
        for step in range(steps):
            batch = task.train_data.batch(step, config.global_batch_size, (0, 1), config.seed)
            batch = mapped(batch, lambda value, _: _widened(value, dtype))
            draws = theirs.step(batch)
            ours.step(task.form.arrays(batch, "collate()"), draws)
            for name in list(theirs.losses)[-len(theirs.names) :]:
                say(f"{name}: {theirs.losses[name]:.8g} in PyTorch, {ours.losses[name]:.8g} in JAX")
        return theirs.result(), ours.result()


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Both sides compute in float64."""
    with in_float64(), jax.enable_x64(True), wide_casts():
        yield


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """Returns numbers with a fraction at least in this precision, and anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.promote_types(value.dtype, dtype)) if value.is_floating_point() else value
    if is_array(value) and value.dtype.kind == "f":
        return value.astype(np.promote_types(value.dtype, str(dtype).removeprefix("torch.")))
    return value


def _module(config: RunConfig, task: ScriptTask, dtype: torch.dtype) -> torch.nn.Module:
    """Returns the module of a script, at least in this precision."""
    module = build_module(config, task, 1)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = _widened(tensor.data, dtype)
    return module


class _TorchLoop:
    """PyTorch's own loop over a script."""

    def __init__(self, config: RunConfig, task: ScriptTask, total_steps: int, dtype: torch.dtype):
        self._config = config
        self._task = task
        self._module = _module(config, task, dtype)
        parameters: dict[str, Any] = dict(self._module.named_parameters())
        for name in parameters.keys() - trainable(parameters, config.optim).keys():
            parameters[name].requires_grad_(False)
        optimizer: Any = task.torch_optimizer
        schedule = task.torch_schedule
        self._is_wide = dtype == torch.float64
        self._rate = None
        if optimizer is None:
            optimizer, self._rate = _adamw(config, self._module, total_steps)
        self._optimizers = optimizer if task.parts else {LOSS: optimizer}
        self._schedules = (schedule or {}) if task.parts else {LOSS: schedule}
        self.names = task.parts or (LOSS,)
        self.losses: dict[str, float] = {}
        self.rounding: dict[str, int] = {}
        self._steps = 0

    def step(self, batch: Any) -> Any:
        """Trains one step; returns what PyTorch drew, by part if the step has several."""
        self._steps += 1
        drawn = {name: [*self._train(name, batch)] for name in self.names}
        for schedule in filter(None, self._schedules.values()):
            schedule.step()
        return drawn if self._task.parts else drawn[LOSS]

    def _train(self, name: str, batch: Any) -> list[torch.Tensor]:
        """Trains a part by its loss."""
        script = self._task.script
        optimizer = self._optimizers[name]
        clip = self._config.optim.clip_norm
        if self._rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(self._rate(self._steps - 1))
        self._module.zero_grad()
        where = script.line_of("loss")
        with script.errors_of("loss()"), watching(None) as watch:
            sums = sums_of(script.loss(as_given(self._module), batch), where, self._task.parts)
            loss = mean_loss(sums, name)
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"{where}: {name} is a number of Python, which has no gradient; return the tensor")
        if not loss.requires_grad:
            raise UserError(f"{where}: {name} does not depend on the parameters of the model")
        if not bool(torch.isfinite(loss.detach()).all()):
            raise UserError(
                f"{where}: {name} is {float(loss.detach())} at step {self._steps} of PyTorch's own loop; correct it"
            )
        with script.errors_of("the gradient of loss()"):
            loss.backward()
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        if self._is_wide:
            self._replace_rounding({id(each) for each in trained})
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        self.losses[f"{name} of step {self._steps}"] = float(loss.detach())
        return watch.draws

    def _replace_rounding(self, trained: set[int]) -> None:
        """Replaces the gradients that are rounding, as `_replacing_rounding` does."""
        parameters = {name: each for name, each in self._module.named_parameters() if id(each) in trained}
        gradients = {name: each.grad.to_dense() for name, each in parameters.items() if each.grad is not None}
        largest = max((float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0)
        for name, gradient in gradients.items():
            size = gradient.abs()
            is_rounding = (size <= ROUNDING_OF_GRADIENTS * largest) & (size > 0).any()
            parameters[name].grad = gradient.masked_fill(is_rounding, _INSTEAD_OF_ROUNDING)
            if count := int((is_rounding & (size > 0)).sum()):
                self.rounding[name] = max(count, self.rounding.get(name, 0))

    def result(self) -> Steps:
        fn = bridge.export(self._module)
        leaves = {name: np.asarray(array) for name, array in (fn.params | fn.buffers).items()}
        return Steps(self.losses, leaves, self.rounding)


def _adamw(config: RunConfig, module: torch.nn.Module, total_steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """Returns PyTorch's AdamW with the values of `config.optim`, and its learning rate by step."""
    optim = config.optim
    if optim.optimizer != "adamw" or optim.groups:
        raise UserError(
            f"optim.optimizer {optim.optimizer} with groups has no counterpart in PyTorch to compare with; {_REMEDY}"
        )
    betas = optim.beta1, optim.beta2
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1.0, betas, optim.eps, optim.weight_decay)
    return optimizer, logged_learning_rates({"": None}, optim, total_steps)[""]


class _JaxLoop:
    """The training step of a run, on one device."""

    def __init__(self, config: RunConfig, task: ScriptTask, total_steps: int, dtype: torch.dtype):
        module = _module(config, task, dtype)
        self._objective = Objective(bridge.export(module), task)
        optimizer = build_optimizer(config, task, self._objective, total_steps)
        if dtype == torch.float64:
            parts = {name: _replacing_rounding(part) for name, part in optimizer.parts.items()}
            optimizer = Optimizer(_replacing_rounding(optimizer.transformation), optimizer.rates, parts)
        options = StepOptions(
            total_steps=total_steps,
            global_batch_size=config.global_batch_size,
            device_count=1,
            rates=optimizer.rates,
            replays_draws=True,
        )
        step = step_of(self._objective, optimizer, config.optim, options)
        self._names = task.parts or (LOSS,)
        self._steps = 0
        self._step = on_one_device(step, host_device())
        params = self._objective.params
        buffers = self._objective.buffers
        self._state = new_state(
            params, buffers, optimizer.transformation, trainable=trainable(params, config.optim), keeps_ema=False
        )
        self.losses: dict[str, float] = {}

    def step(self, arrays: Mapping[str, np.ndarray], draws: Any) -> None:
        self._state, _, metrics = self._step(self._state, (), dict(arrays), jax.tree.map(array_of, draws))
        self._steps += 1
        for name in self._names:
            self.losses[f"{name} of step {self._steps}"] = float(metrics[name]) / float(metrics[f"{name}{COUNT}"])

    def result(self) -> Steps:
        arrays = self._state.params | self._state.buffers
        return Steps(self.losses, {name: np.asarray(array) for name, array in arrays.items()})


def _replacing_rounding(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that reads a constant in place of gradients that are rounding."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        sizes = jax.tree.map(jnp.abs, updates)
        largest = jnp.stack([size.max(initial=0.0) for size in jax.tree.leaves(sizes)]).max()

        def replaced(gradient: jax.Array, size: jax.Array) -> jax.Array:
            is_rounding = (size <= ROUNDING_OF_GRADIENTS * largest) & (size > 0).any()
            return jnp.where(is_rounding, jnp.asarray(_INSTEAD_OF_ROUNDING, gradient.dtype), gradient)

        return optimizer.update(jax.tree.map(replaced, updates, sizes), state, params)

    return optax.GradientTransformation(optimizer.init, update)


def _differences(theirs: Steps, ours: Steps, rounding_of_leaves: float = 0.0) -> list[Leaf]:
    """Returns the differences of losses and leaves.

    `rounding_of_leaves`: a leaf whose entries are all smaller, as a share of those of the other leaves, is rounding. It
    is compared as if it had an entry of that size.
    """
    leaves = [
        Leaf(name, _difference(np.float64(loss), np.float64(ours.losses[name])), LOSS_TOLERANCE)
        for name, loss in theirs.losses.items()
    ]
    least = rounding_of_leaves * _usual_size(theirs.leaves.values()) if rounding_of_leaves else 0.0
    arrays = theirs.leaves.items()
    return leaves + [Leaf(name, _difference(array, ours.leaves[name], least), TOLERANCE) for name, array in arrays]


def _usual_size(arrays: Iterable[np.ndarray]) -> float:
    """Returns the median of the largest entries, because a mask may have one of 1e38; zeros do not count."""
    sizes = [_largest_finite(np.abs(array).astype(np.float64)) for array in arrays]
    return float(np.median([size for size in sizes if size > 0] or [0.0]))


def _largest_finite(sizes: np.ndarray) -> float:
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _difference(theirs: Any, ours: Any, least: float = 0.0) -> float:
    if not np.size(theirs):
        return 0.0
    kind = np.complex128 if np.iscomplexobj(theirs) else np.float64
    theirs = np.asarray(theirs).astype(kind)
    ours = np.asarray(ours).astype(kind)
    if not np.array_equal(np.isfinite(theirs), np.isfinite(ours)):
        return float("inf")
    finite = np.isfinite(theirs)
    largest = max(_largest_finite(np.abs(theirs)), least)
    error = np.abs(theirs - ours)[finite].max(initial=0.0)
    return float(error / largest) if largest else float(error)


def _narrow_leaves(config: RunConfig, task: ScriptTask) -> list[Leaf]:
    """Returns the leaves of the loss and its gradient that `bridge.verify` does not accept."""
    module = build_module(config, task, 1)
    batch = task.train_data.batch(0, config.global_batch_size, (0, 1), config.seed)
    tensors = task.form.leaves(batch)

    def summed(sums: Mapping[str, tuple[Any, Any]]) -> Any:
        return sum(mean_loss(sums, name) for name in task.parts or (LOSS,))

    report = bridge.verify(module, tensors, method=LOSS_METHOD, steps=1, loss=summed, train=True, input_gradients=False)
    return [
        Leaf(f"{row.kind} {row.name} in 16 bits", row.error / row.scale if row.scale else row.error, 0.0)
        for row in report.rows
        if row.verdict == "beyond tolerance"
    ]
