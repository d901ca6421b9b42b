"""Optimizers and schedules of a script, step by step against `torch.optim`."""

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support.markers import slow_unless
from torch import nn, optim
from torch.optim import lr_scheduler

import bridge
from train_jax.core.objective import LossSums, Objective
from train_jax.core.optim.chain import trainable
from train_jax.core.optim.config import OptimConfig
from train_jax.core.sharding import Replicated, Sharded
from train_jax.core.state import new_state
from train_jax.core.step import StepOptions, make_train_step
from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.runtime.placement import Placement, ShardedState
from train_jax.script import optimizers
from train_jax.script.optimizers import clip_grad_norm, clip_grad_value, translate
from train_jax.script.schedules import settings_by_step

STEPS = 30
WHERE = "mine.py:7"


class Model(nn.Module):
    """Parameters of several shapes, of which one is frozen, one tied and one in no group."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

        self.embed = new(6, 4)
        self.frozen = new(3)
        self.frozen.requires_grad_(False)
        self.left = new(2, 2)
        self.head = self.embed
        self.weight = new(4, 3)
        self.bias = new(3)


def groups(model):
    return [
        {"params": [model.weight, model.embed], "weight_decay": 0.1},
        {"params": [model.frozen, model.bias], "weight_decay": 0.0},
    ]


TRAINED = ("embed", "weight", "bias")

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.01),
    "SGD momentum": functools.partial(optim.SGD, lr=0.01, momentum=0.9),
    "SGD dampened": functools.partial(optim.SGD, lr=0.01, momentum=0.9, dampening=0.3),
    "SGD nesterov": functools.partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "SGD maximize": functools.partial(optim.SGD, lr=0.01, momentum=0.5, maximize=True),
    "Adam": functools.partial(optim.Adam, lr=0.01),
    "Adam amsgrad": functools.partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam decoupled": functools.partial(optim.Adam, lr=0.01, decoupled_weight_decay=True),
    "Adam far mean": functools.partial(optim.Adam, lr=0.01, betas=(0.3, 0.8)),
    "AdamW": functools.partial(optim.AdamW, lr=0.01),
    "AdamW amsgrad": functools.partial(optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    # In float32, PyTorch would compute with the learning rate in float32.
    "AdamW tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01, dtype=torch.float64)),
    "Adamax": functools.partial(optim.Adamax, lr=0.01),
    "NAdam": functools.partial(optim.NAdam, lr=0.01),
    "NAdam decoupled": functools.partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True),
    "RAdam": functools.partial(optim.RAdam, lr=0.01, betas=(0.9, 0.95)),
    "RAdam decoupled": functools.partial(optim.RAdam, lr=0.01, decoupled_weight_decay=True),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.01, lr_decay=0.05, initial_accumulator_value=0.1),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01),
    "RMSprop centered": functools.partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.8),
    "Adadelta": functools.partial(optim.Adadelta, lr=10.0),
    "Rprop": functools.partial(optim.Rprop, lr=0.01),
    "ASGD": functools.partial(optim.ASGD, lr=0.01, lambd=0.1),
}


def warm_up(step):
    return min(1.0, (step + 1) / 10)


class OwnSchedule:
    """A scheduler as people write them: it changes the weight decay, too."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] *= 1.1


def sequential(optimizer):
    rise = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7)
    fall = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 7)
    return lr_scheduler.SequentialLR(optimizer, [rise, fall], [7])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 5), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    )


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: None,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, warm_up),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=STEPS),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, 4, mode="exp_range", gamma=0.9),
    "own": OwnSchedule,
}
MOMENTUM_CYCLES = ("OneCycleLR", "CyclicLR")
"""Schedules that need a momentum or betas in the groups."""


def gradients_of(dtype, shapes, seed=1):
    rng = np.random.default_rng(seed)
    return [
        {name: torch.tensor(rng.normal(size=shape) * 10 ** -(step % 3)).to(dtype) for name, shape in shapes.items()}
        for step in range(STEPS)
    ]


def both(make_optimizer, make_schedule, dtype, model_of=Model, groups_of=groups, names=TRAINED):
    """Returns the parameters after the steps in PyTorch and in JAX, which has the user's objects unstepped."""
    model = model_of(dtype)
    optimizer = make_optimizer(groups_of(model))
    optimizer.param_groups[-1]["lr"] = optimizer.param_groups[-1]["lr"] * 2
    schedule = make_schedule(optimizer)
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    gradients = gradients_of(dtype, shapes)
    with jax.enable_x64(dtype in (torch.float64, torch.complex128)):
        translated = translate(optimizer, model, schedule, STEPS, where=WHERE)
        assert set(translated.trained) == set(names)
        ours = in_jax(translated, {name: model.get_parameter(name) for name in translated.trained}, gradients)
    return in_pytorch(model, optimizer, schedule, gradients), ours


def array(tensor):
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.detach().float().numpy(), jnp.bfloat16)
    return jnp.asarray(tensor.detach().numpy())


def in_jax(translated, parameters, gradients):
    @jax.jit
    def step(params, state, gradient):
        updates, state = translated.transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: array(parameter) for name, parameter in parameters.items()}
    before = {name: (p.shape, p.dtype) for name, p in params.items()}
    state = translated.transformation.init(params)
    for gradient in gradients:
        params, state = step(params, state, {name: jnp.conj(array(gradient[name])) for name in params})
    assert step._cache_size() == 1
    assert {name: (p.shape, p.dtype) for name, p in params.items()} == before
    return {name: np.asarray(p if p.dtype != jnp.bfloat16 else p.astype(jnp.float32)) for name, p in params.items()}


def in_pytorch(model, optimizer, schedule, gradients):
    for gradient in gradients:
        for name, value in gradient.items():
            model.get_parameter(name).grad = value.clone()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    tensors = {name: model.get_parameter(name).detach() for name in gradients[0]}
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}


def worst(theirs, ours):
    """Returns the largest difference of a parameter, relative to its largest element."""
    return max(np.abs(theirs[name] - ours[name]).max() / np.abs(theirs[name]).max() for name in theirs)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def supports(make_optimizer, schedule):
    group = make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]
    if schedule in MOMENTUM_CYCLES:
        return "betas" in group or group.get("momentum", 0) > 0
    return schedule != "own" or "weight_decay" in group


PAIRS = [
    (optimizer, schedule)
    for optimizer, make in OPTIMIZERS.items()
    for schedule in SCHEDULES
    if supports(make, schedule)
]
QUICK = {(name, "LambdaLR") for name in OPTIMIZERS} | {("AdamW", "OneCycleLR"), ("SGD nesterov", "CyclicLR")}


CASES = [(*pair, dtype) for dtype in TOLERANCES for pair in PAIRS]


@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: case[:2] in QUICK and case[2] == torch.float64, CASES),
    ids=[f"{optimizer}-{schedule}-{str(dtype)[6:]}" for optimizer, schedule, dtype in CASES],
)
def test_parameters_equal_pytorch(case):
    optimizer, schedule, dtype = case
    theirs, ours = both(OPTIMIZERS[optimizer], SCHEDULES[schedule], dtype)
    assert worst(theirs, ours) < TOLERANCES[dtype]
    start = {name: parameter.detach().numpy() for name, parameter in Model(dtype).named_parameters()}
    assert min(np.abs(theirs[name] - start[name]).max() for name in theirs) > 1e-3, "nothing was compared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", slow_unless("AdamW".__eq__, ["AdamW", "RAdam decoupled"]))
def test_results_are_rounded_in_16_bits_where_pytorch_rounds_them(name, dtype):
    theirs, ours = both(OPTIMIZERS[name], SCHEDULES["LambdaLR"], dtype)
    for parameter in theirs:
        np.testing.assert_array_equal(theirs[parameter], ours[parameter])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_are_two_real_ones(name):
    theirs, ours = both(OPTIMIZERS[name], SCHEDULES["LambdaLR"], torch.complex128)
    assert worst(theirs, ours) < 1e-12


def adamw(model, **options):
    return optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], **options)


def test_momentum_that_is_zero_at_some_steps():
    """PyTorch then uses the gradient alone, and leaves the buffer as it is."""

    class Rising:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.steps = 0

        def step(self):
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["momentum"] = 0.1 * (self.steps % 4)

    for make in (optim.SGD, functools.partial(optim.SGD, nesterov=True), optim.RMSprop):
        theirs, ours = both(functools.partial(make, lr=0.01, momentum=0.5), Rising, torch.float64)
        assert worst(theirs, ours) < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_settings_are_those_that_pytorch_has_at_each_step(schedule):
    names = ("lr", "betas", "weight_decay")
    optimizer = optim.AdamW(groups(Model()))
    scheduler = SCHEDULES[schedule](optimizer)
    ours = settings_by_step(optimizer, scheduler, STEPS, names, where=WHERE)
    for step in range(STEPS):
        for group, settings in zip(optimizer.param_groups, ours, strict=True):
            for name in names:
                values = settings[name] if name == "betas" else (settings[name],)
                now = [np.broadcast_to(each, STEPS)[step] for each in values]
                np.testing.assert_array_equal(now, np.ravel(group[name]), f"{name}, step {step}")
        optimizer.step()  # without gradients
        if scheduler is not None:
            scheduler.step()
    assert schedule == "constant" or np.ndim(ours[0]["lr"]) == 1


def test_the_objects_of_the_user_do_not_change():
    model = Model()
    optimizer = optim.AdamW(groups(model), lr=torch.tensor(0.01))
    schedule = sequential(optimizer)
    parameters = [parameter.clone() for parameter in model.parameters()]
    optimizer_before = copy.deepcopy(optimizer.state_dict())
    epochs = [schedule.last_epoch, *(each.last_epoch for each in schedule._schedulers)]
    translate(optimizer, model, schedule, STEPS, where=WHERE)
    assert str(optimizer.state_dict()) == str(optimizer_before)
    assert [schedule.last_epoch, *(each.last_epoch for each in schedule._schedulers)] == epochs
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))
    assert not optimizer.state


def test_rates_are_those_of_the_groups_at_every_step():
    model = Model()
    optimizer = optim.SGD(groups(model), lr=0.5)
    optimizer.param_groups[1] |= {"lr": 0.25, "name": "biases"}
    schedule = lr_scheduler.StepLR(optimizer, 3, 0.5)
    rates = translate(optimizer, model, schedule, 12, where=WHERE).rates
    assert list(rates) == ["group_0", "group_1"], "one group has no name"
    optimizer.param_groups[0]["name"] = "all others"
    rates = translate(optimizer, model, schedule, 12, where=WHERE).rates
    assert [float(rates["biases"](count)) for count in range(12)] == [0.25 * 0.5 ** (count // 3) for count in range(12)]
    assert [float(rates["all_others"](count)) for count in (0, 11, 12, 99)] == [0.5, 0.0625, 0.0625, 0.0625]
    alike = translate(optim.SGD(groups(model), lr=0.5), model, None, 12, where=WHERE).rates
    assert {label: float(rate(7)) for label, rate in alike.items()} == {"": 0.5}


def test_numbers_by_step_are_in_the_program_once():
    """Two groups with one learning rate have the same steps of Adam; corrections end where they are 1."""
    model = Model(torch.float32)
    optimizer = optim.Adam(groups(model), lr=0.01)
    translated = translate(optimizer, model, SCHEDULES["LambdaLR"](optimizer), 40_000, where=WHERE)
    params = {name: array(model.get_parameter(name)) for name in translated.trained}
    state = translated.transformation.init(params)
    tables = [x for x in jax.make_jaxpr(translated.transformation.update)(params, state, params).consts if x.ndim]
    steps, correction = sorted(len(table) for table in tables)
    assert steps < 400 and 30_000 < correction < 40_000


# ---- in the training step


class Linear(Model):
    """Its gradients are the sums of the arrays in the batch."""

    def forward(self, batch):
        return sum((self.get_parameter(name) * rows).sum() for name, rows in batch.items())


class LinearTask:
    keeps_unreached = True

    def initial_carry(self, call, batch):
        return ()

    def loss(self, call, carry, batch):
        loss, buffers = call(batch)
        return LossSums(loss, None, {}, carry, buffers)


@pytest.mark.parametrize("is_sharded", slow_unless(lambda is_sharded: not is_sharded, (False, True)))
def test_the_training_step_leaves_out_what_is_not_finite(is_sharded):
    """PyTorch then makes no step of the optimizer, nor of the schedule."""
    model = Linear(torch.float32)
    optimizer = optim.RMSprop(groups(model), lr=0.01, momentum=0.5)
    optimizer.param_groups[1]["momentum"] = 0.0  # so that one group has no buffer
    schedule = SCHEDULES["StepLR"](optimizer)
    translated = translate(optimizer, model, schedule, STEPS, where=WHERE)
    gradients = gradients_of(torch.float32, {name: tuple(model.get_parameter(name).shape) for name in TRAINED})
    devices = Devices(1)
    objective = Objective(bridge.export(model), LinearTask())
    params, buffers = jax.tree.map(jnp.copy, (objective.params, objective.buffers))
    config = OptimConfig(freeze="left")
    trained = trainable(params, config)
    assert set(trained) == set(translated.trained)
    sharding = Sharded(params, trained, (), 1) if is_sharded else Replicated()
    placement = ShardedState(devices, sharding) if is_sharded else Placement(devices, sharding)
    options = StepOptions(total_steps=STEPS, global_batch_size=1, device_count=1, sharding=sharding)
    train_step = make_train_step(objective, translated.transformation, config, options)
    step = devices.parallel_train_step(train_step, placement.axes)
    state = placement.place(new_state(params, buffers, translated.transformation, trainable=trained))
    for number, gradient in enumerate(gradients):
        batch = {name: value[None].numpy() for name, value in gradient.items()}
        if number in (0, 12):
            bad = batch | {"bias": np.full((1, 3), np.nan, np.float32)}
            state, _, _ = step(state, (), devices.split_batch(bad), devices.random_key(0))
        state, _, _ = step(state, (), devices.split_batch(batch), devices.random_key(0))
    ours = placement.to_checkpoint(state).params
    theirs = in_pytorch(model, optimizer, schedule, gradients)
    assert worst(theirs, ours) < 1e-6
    np.testing.assert_array_equal(ours["left"], model.left.detach().numpy())


# ---- mistakes


def refused(optimizer, model, schedule=None, steps=STEPS):
    with pytest.raises(UserError) as error:
        translate(optimizer, model, schedule, steps, where=WHERE)
    message = str(error.value)
    assert message.startswith(f"{WHERE}: ") and "\n" not in message
    return message


class OwnAdam(optim.Adam):
    pass


@pytest.mark.parametrize(
    "make",
    [OwnAdam, optim.LBFGS, optim.SparseAdam, optim.Adafactor, functools.partial(optim.Muon, lr=0.1), lambda _: "adam"],
)
def test_other_classes_are_refused_by_name(make):
    model = nn.Linear(2, 2, bias=False)
    optimizer = make(model.parameters())
    message = refused(optimizer, model)
    assert type(optimizer).__qualname__ in message
    assert "SGD, Adam, AdamW" in message and "--optim.optimizer" in message


def test_parameters_that_the_optimizer_should_not_have():
    model = Model()
    stranger = nn.Parameter(torch.zeros(5, 2))
    assert "a parameter of shape (5, 2) in parameter group 0" in refused(optim.SGD([model.bias, stranger]), model)
    twice = optim.SGD(groups(model))
    twice.param_groups[1]["params"].append(model.embed)
    assert "the parameter embed is in groups 0 and 1" in refused(twice, model)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        repeated = optim.SGD([model.bias, model.bias])
    assert "the parameter bias is in group 0 twice" in refused(repeated, model)
    assert "no parameter of the optimizer requires grad" in refused(optim.SGD([model.frozen]), model)


def test_an_optimizer_with_a_past_or_with_hooks():
    model = Model()
    for optimizer in (adamw(model), optim.SGD([model.bias], momentum=0.9)):
        model.bias.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
        assert "has made steps already" in refused(optimizer, model)
    hooked = adamw(model)
    hooked.register_step_pre_hook(lambda *_: None)
    assert "has hooks on its step" in refused(hooked, model)
    assert translate(optim.Adagrad([model.bias]), model, None, 1, where=WHERE), "it has a state from the beginning"


def test_schedules_that_cannot_be_evaluated():
    model = Model()
    optimizer = adamw(model)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    assert "ReduceLROnPlateau reads a metric" in refused(optimizer, model, plateau)
    nested = lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 1)])
    nested._schedulers[0] = plateau
    assert "ReduceLROnPlateau reads a metric" in refused(optimizer, model, nested)
    foreign = lr_scheduler.StepLR(adamw(model), 1)
    assert "the StepLR belongs to another optimizer" in refused(optimizer, model, foreign)
    short = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    message = refused(optimizer, model, short)
    assert "the OneCycleLR fails after 11 of 30 steps" in message and "as many steps as the run has" in message
    assert "the schedule is a float without a method `step`" in refused(optimizer, model, 0.1)
    overflow = lr_scheduler.LambdaLR(optimizer, lambda step: float("inf") if step == 7 else 1.0)
    assert "the setting lr of parameter group 0 is inf at step 8" in refused(optimizer, model, overflow)
    with open(__file__) as log:
        writing = lr_scheduler.StepLR(optimizer, 1)
        writing.log = log
        assert "the StepLR cannot be copied (TypeError" in refused(optimizer, model, writing)
    assert "at most 10000000" in refused(optimizer, model, lr_scheduler.StepLR(optimizer, 1), 10**8)


def test_constant_settings_have_no_longest_run():
    model = Model()
    with mock.patch.object(optimizers, "LONGEST", 10_000):
        assert translate(optim.Adam([model.bias], betas=(0.9, 0.99)), model, None, 10**9, where=WHERE)
        assert "at most 10000" in refused(optim.Adagrad([model.bias], lr_decay=0.1), model, None, 10**9)


# ---- clipping


NORMS = [(kind, dtype) for kind in (2.0, 1.0, float("inf"), 0.5) for dtype in (*TOLERANCES, torch.bfloat16)]


@pytest.mark.parametrize("case", slow_unless([(2.0, torch.float32), (float("inf"), torch.float64)].__contains__, NORMS))
def test_gradients_are_clipped_by_their_norm_as_in_pytorch(case):
    kind, dtype = case
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), ())]
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.01}[dtype]
    generator = torch.Generator().manual_seed(3)
    with jax.enable_x64(dtype == torch.float64):
        for scale in (1e-6, 0.1, 30.0):
            for parameter in parameters:
                parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(dtype)
            ours = clip_grad_norm(0.7, kind).update([array(p.grad) for p in parameters], optax.EmptyState())[0]
            nn.utils.clip_grad_norm_(parameters, 0.7, kind)
            for parameter, clipped in zip(parameters, ours, strict=True):
                np.testing.assert_allclose(clipped.astype(float), array(parameter.grad).astype(float), rtol=tolerance)


def test_gradients_are_clipped_by_value_as_in_pytorch():
    parameter = nn.Parameter(torch.zeros(6))
    parameter.grad = torch.tensor([-3.0, -0.5, 0.0, 0.2, 0.7, float("inf")])
    ours = clip_grad_value(0.5).update({"p": array(parameter.grad)}, optax.EmptyState())[0]
    nn.utils.clip_grad_value_([parameter], 0.5)
    np.testing.assert_array_equal(ours["p"], parameter.grad.numpy())
