"""Phases of a language model after the base: what a run inherits, gradients of both losses, reinforcement learning."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.markers import slow_unless
from support.presets import with_fields
from support.processes import run_processes
from support.scripted_model import BYTES
from support.scripts import run_script, script
from support.small_gpt import small_gpt
from support.toy_language import ToyConfig, ToyLanguage, write_tokens
from support.untrained_run import write_run_of

import train_jax
from models_torch.gpt import IGNORED_TARGET
from models_torch.outside import OutsideConfig
from train_jax.__main__ import main as trm
from train_jax.core.optim.config import OptimConfig
from train_jax.core.state import new_state
from train_jax.errors import UserError
from train_jax.language.chat.conversations import Part, assistant, render, user
from train_jax.language.text_building import write_documents
from train_jax.run.arguments import parse_run
from train_jax.run.config import ComputeConfig, RunConfig, with_task
from train_jax.run.folder import RunFolder
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.run.tracking import read_metrics
from train_jax.task import Evaluation, Periodic
from train_jax.trainer.loop import train
from train_jax.trainer.start import start

# ---- the run of a phase

SIZES = {"seq_len": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "global_batch_size": 8, "steps": 50}


@pytest.fixture(scope="module")
def base(made_once):
    """The folder with a data set and a run whose optimizer's state is not that of a new one."""

    def make(folder):
        documents = [(np.array([BYTES.bos, *b"1 + 1 = 2"]), np.ones(10, np.uint8))] * 100
        write_documents(folder / "set", BYTES, {}, {"train": documents, "test": documents})
        config = dataclasses.replace(preset("chat-tiny"), data_dir=str(folder / "set"), run_dir=str(folder / "run"))
        write_run_of(with_fields(config, SIZES), step=7, change=used)

    return made_once("phases", make)


def used(state):
    return state._replace(opt_state=jax.tree.map(lambda x: x + 3, state.opt_state))


def phase(base, name, *more):
    argv = ["d4", "--phase", name, "--init-from", f"{base}/run", "--data-dir", f"{base}/set", *more]
    return parse_run(argv, prog="trm train", description="")[1]


@pytest.mark.parametrize(("name", "rate", "share"), [("mid", 1.0, 0.2), ("sft", 0.8, 0.5), ("rl", 0.05, 1.0)])
def test_a_phase_inherits_sizes_batch_and_rates(base, name, rate, share):
    config = phase(base, name)
    run = restore(f"{base}/run").config
    assert (config.arch, config.global_batch_size) == (run.arch, 8)
    assert config.run_dir == f"runs/d4-{name}" and config.steps == 0 and config.epochs == 1
    assert config.task == ("rollouts" if name == "rl" else "chat")
    for mine, theirs in zip(config.optim.groups, run.optim.groups, strict=True):
        assert (mine.lr, mine.optimizer) == (pytest.approx(theirs.lr * rate), theirs.optimizer)
        assert (mine.warmup_steps, mine.decay_share, mine.lr_min_ratio, mine.weight_decay) == (0, share, 0, 0)
    assert phase(base, name, "--arch.n-layer", "2").arch.n_layer == 2, "fields can be given as always"


def test_the_optimizer_s_state_goes_on_and_its_schedules_begin_anew(base):
    training = start(phase(base, "sft"))
    fresh = start(dataclasses.replace(phase(base, "sft"), init_optimizer=False)).initial_state().opt_state
    warm = training.initial_state().opt_state
    theirs = restore(f"{base}/run", whole_state=True).state.opt_state
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(warm)]
    from_run = set()
    new = set()
    for name, mine, run, start_value in zip(names, *map(jax.tree.leaves, (warm, theirs, fresh)), strict=True):
        (from_run if np.array_equal(mine, run) else new).add(name)
        assert np.array_equal(mine, run) or np.array_equal(mine, start_value), name
    assert any("mu" in name for name in from_run) and any("nu" in name for name in from_run)
    assert new and all("count" in name or "hyperparams" in name for name in new), new
    with pytest.raises(UserError, match="has another state; use its --optim fields, or --no-init-optimizer"):
        start(phase(base, "sft", "--optim.groups", "[]")).initial_state()


SFT = ["d4", "--phase", "sft", "--init-from", "BASE/run", "--data-dir", "BASE/set", "--run-dir", "BASE/sft"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chat-tiny", "--phase", "fine"], "--phase is 'fine'; use one of base, mid, sft, rl"),
        (["chat-tiny", "--phase", "sft"], "--phase sft starts from a run; give --init-from RUN"),
        (["chat-tiny-2026", "--phase", "sft", "--init-from", "BASE/run"], "is a run of the model gpt, the preset has"),
        ([*SFT, "--eval-problems", "humaneval"], "humaneval runs programs that the model writes and is not asked"),
        (["chat-tiny", "--init-optimizer", "--data-dir", "BASE/set"], "init_optimizer needs a run in init_from"),
    ],
)
def test_mistakes_are_one_line(base, capsys, argv, message):
    assert trm(["train", *(word.replace("BASE", str(base)) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error


# ---- the gradient of supervised fine-tuning


@pytest.fixture(scope="module")
def conversations(made_once):
    """A data set of conversations with calls of the calculator, of 27 to 31 tokens each."""

    def make(folder):
        talks = [
            (user(f"{n}+1?"), assistant(Part("python", f"{n}+1"), Part("python_output", f"{n + 1}"), f"It is {n + 1}."))
            for n in range(5, 40)
        ]
        rendered = (render(BYTES, talk) for talk in talks)
        documents = [(np.array(tokens), np.array(weights, np.uint8)) for tokens, weights in rendered]
        write_documents(folder / "set", BYTES, {}, {"train": documents, "test": documents})

    return made_once("conversations", make) / "set"


def written_by_the_assistant(row):
    """1 for each token of the assistant, with the end of its message, without the outputs of the calculator."""
    special = BYTES.specials
    weights = []
    writes = 0
    output = 0
    for token in row:
        output = 1 if token == special["<|output_start|>"] else output
        weights.append(writes * (1 - output))
        if token in (special["<|assistant_start|>"], special["<|assistant_end|>"]):
            writes = int(token == special["<|assistant_start|>"])
        output = 0 if token == special["<|output_end|>"] else output
    return weights


def test_the_gradient_of_sft_is_pytorch_s(conversations):
    """The loss is the mean over the assistant's tokens; all others and the padding have no weight."""
    sizes = {name: SIZES[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd")} | {"seq_len": 40}
    config = dataclasses.replace(with_task(preset("chat-tiny"), "chat"), data_dir=str(conversations))
    config = with_fields(config, SIZES | sizes | {"packing": "bestfit-pad"})
    training = start(config)
    objective = build_objective(config, training.task, 8)
    module = small_gpt(**sizes, vocab_size=BYTES.vocab_size)
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    batch = training.task.batch(1, (0, 1))

    def loss(params):
        sums = objective(params, {}, objective.buffers, (), jax.tree.map(jnp.asarray, batch), None)
        return sums.loss / sums.weight

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    # Each row has one conversation, so that its last target is padding.
    rows = np.concatenate([batch["inputs"], np.full((8, 1), BYTES.bos)], axis=1)
    weights = torch.tensor([written_by_the_assistant(row)[1:] for row in rows.tolist()])
    following = torch.tensor(rows)[:, 1:]
    log_probs = module(torch.tensor(batch["inputs"])).log_softmax(-1)
    losses = -log_probs.gather(-1, following[..., None])[..., 0]
    expected = (weights * losses).sum() / weights.sum()
    expected.backward()
    assert 8 * 12 < weights.sum() < 8 * 20 and float(value) == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        theirs = parameter.grad.numpy()
        np.testing.assert_allclose(gradients[name], theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max(), err_msg=name)
        assert np.abs(theirs).max() > 1e-4, name


# ---- reinforcement learning

ROLLOUTS = {
    "seq_len": 48, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 16, "samples": 8,
    "eval_batch_size": 2, "max_tokens": 8, "problems": "arithmetic,digits=1", "problems_limit": 4, "pass_samples": 4,
    "problems_samples": 2, "problems_every_steps": 2, "eval_every_steps": 0, "log_every_steps": 1, "wandb": "disabled",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(base):
    config = dataclasses.replace(with_task(preset("chat-tiny"), "rollouts"), data_dir=f"{base}/set")
    return with_fields(config, ROLLOUTS)


@pytest.fixture(scope="module")
def training(config):
    return start(config)


def rewarded(task, monkeypatch):
    """Rewards that differ, since an untrained model is never right."""
    monkeypatch.setattr(type(task.problems), "is_right", lambda self, index, text: len(text) % 2 == 0)


@pytest.mark.parametrize("normalization", slow_unless("published".__eq__, ["global", "published"]))
def test_the_gradient_is_pytorch_s_on_the_same_answers(training, monkeypatch, normalization):
    """The reference is the published loop, with a pass for each question, or one mean over all tokens."""
    task = training.task
    objective = training.objective
    options = {"normalization": normalization, "train_end": normalization == "global"}
    monkeypatch.setattr(task, "fields", dataclasses.replace(task.fields, **options))
    rewarded(task, monkeypatch)
    module = small_gpt(**{name: ROLLOUTS[name] for name in ("seq_len", "n_layer", "n_head", "n_kv_head", "n_embd")},
                       vocab_size=BYTES.vocab_size)  # fmt: skip
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    state = new_state(params, objective.buffers, training.optimizer)
    batch = task.batch(3, (0, 1), state)
    assert len(set(batch["reward"])) == 2 and (batch["targets"] != IGNORED_TARGET).any(axis=1).all()

    def loss(params):
        sums = task.loss(objective.call(params, objective.buffers, train=True), (), jax.tree.map(jnp.asarray, batch))
        return sums.loss / sums.weight, sums.metrics

    gradients, metrics = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert float(metrics["log_prob_difference"].max()) <= 1e-5
    expected = torch_gradients(module, batch, normalization)
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, atol=1e-5 * max(1e-2, np.abs(value).max()), rtol=1e-4)
    assert max(np.abs(value).max() for value in expected.values()) > 1e-3


def torch_gradients(module, batch, normalization):
    inputs, targets = (torch.tensor(batch[name]) for name in ("inputs", "targets"))
    rewards = torch.tensor(batch["reward"]).reshape(-1, 8)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    size = 4 if normalization == "published" else 16
    passes = [slice(first, first + size) for first in range(0, 16, size)]
    for part in passes:
        losses = module(inputs[part], targets[part], loss_reduction="none").view(size, -1)
        counted = (targets[part] != IGNORED_TARGET).sum().clamp(min=1)
        ((losses * advantages[part, None]).sum() / (counted * len(passes))).backward()
    return {name: value.grad.numpy() for name, value in module.named_parameters()}


def test_the_sampled_tokens_of_an_answer_are_trained(training):
    task = training.task
    state = training.initial_state()
    batch = task.batch(0, (0, 1), state)
    halves = [task.batch(0, (number, 2), state) for number in (0, 1)]
    for name, values in batch.items():
        np.testing.assert_array_equal(values, np.concatenate([half[name] for half in halves]))
    trained = batch["targets"] != IGNORED_TARGET
    following = np.roll(batch["inputs"], -1, axis=1)
    for row in np.arange(16):  # the last token of an answer is no input
        np.testing.assert_array_equal(batch["targets"][row][trained[row]][:-1], following[row][trained[row]][:-1])
    assert not (batch["weights"] != 0).any() and not batch["reward"].any(), "every answer is wrong, none is better"
    assert set(trained.sum(axis=1)) <= set(range(1, 9))


@pytest.mark.campaign
def test_a_run_continues_bit_for_bit_and_reports(config, tmp_path, monkeypatch, capsys):
    weights = dataclasses.replace(with_task(config, "language"), run_dir=str(tmp_path / "base"))
    write_run_of(weights, step=3)
    common = {"steps": 4, "checkpoint_every_steps": 1, "keep_checkpoints": 9, "init_from": str(tmp_path / "base")}
    whole = dataclasses.replace(with_fields(config, common), run_dir=str(tmp_path / "whole"))
    rewarded(start(whole).task, monkeypatch)
    train(whole)
    assert "problems: accuracy" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "train/reward" in record]
    assert len(logged) == 4 and all(record["train/log_prob_difference"] <= 1e-5 for record in logged)
    assert [record["step"] for record in records if "eval/problems/accuracy" in record] == [2, 4]
    part = dataclasses.replace(whole, run_dir=str(tmp_path / "part"), steps=2)
    train(part)
    train(dataclasses.replace(part, steps=4))
    one, other = (restore(str(tmp_path / name), whole_state=True).state for name in ("whole", "part"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_a_step_is_the_same_on_eight_devices_and_two_processes_and_compiles_once(config, tmp_path):
    """The questions of the second step are longer than those of the first one."""
    run_script("rollouts_on_devices", config.data_dir, tmp_path, 8)
    statuses, texts = run_processes([script("rollouts_on_devices", config.data_dir, tmp_path, 4)] * 2)
    assert statuses == [0, 0], texts
    one, *others = (np.load(tmp_path / f"{name}.npz") for name in ("1", "8", "process 0", "process 1"))
    answers = [name for name in one if name.startswith("answers ")]
    gradients = [name for name in one if name.endswith(".weight")]
    largest = max(np.abs(one[name]).max() for name in gradients)
    assert len(answers) == 4 and len(gradients) == 8 and largest > 1e-3 and set(one["answers reward"]) == {0, 1}
    for other in others:
        for name in ("answers inputs", "answers targets", "answers reward"):
            np.testing.assert_array_equal(other[name], one[name])
        np.testing.assert_allclose(other["answers log_probs"], one["answers log_probs"], atol=1e-5)
        for name in gradients:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-5 * largest)
    assert all(each["difference"] <= 1e-5 and not len(each["compiled"]) for each in (one, *others))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 5}, "samples 5 does not divide global_batch_size 16; use a divisor of it"),
        ({"normalization": "published", "pass_samples": 3}, "pass_samples 3 does not divide samples 8"),
    ],
    ids=str,
)
def test_impossible_fields_are_refused_before_a_folder_is_made(config, tmp_path, fields, message):
    wrong = dataclasses.replace(with_fields(config, fields), run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=message):
        train(wrong)
    assert not (tmp_path / "run").exists()


def test_another_model_than_the_one_that_answered_is_noticed(training):
    sums = {"log_prob_difference": np.array([0.0, 1e-3]), "loss": 1.0, "divisor": 1.0, "reward": 0, "answer_tokens": 1}
    with pytest.raises(UserError, match=r"differs by 1.0e-03 between generation and training, the limit of float32"):
        training.task.figures(sums, 16)


# ---- a task whose batches depend on the model, with two evaluations at cadences of their own

STEPS = 17
CALLS = []


class Rollouts(ToyLanguage):
    """The weight of each token is drawn with a share that depends on the model."""

    needs_state = True
    evaluated = ("loss", "share/mean")

    def batch(self, step, shard, state=None):
        CALLS.append(step)
        share = self.share(state)
        batch = super().batch(step, shard)
        rng = np.random.Generator(np.random.Philox(key=[self.config.seed + 1, step]))
        return batch | {"weights": (rng.random(batch["weights"].shape) < share).astype(np.float32)}

    def share(self, state):
        head = np.asarray(jax.device_get(state.params["model.head.weight"]))
        assert head.shape == (11, 16)
        return 0.5 + 0.5 * np.tanh(np.abs(head).mean())

    def evaluations(self, objective, devices):
        def shares(state, *, limit=0, metrics_only=False):
            return Evaluation({"mean": float(self.share(state)), "count": 1.0})

        return [Periodic(self.evaluator(objective, devices), 3), Periodic(shares, 7, name="share")]


@pytest.fixture
def toy(tmp_path):
    write_tokens(tmp_path)
    return RunConfig(
        data_dir=str(tmp_path), run_dir=str(tmp_path / "run"), task=f"{__name__}:Rollouts", task_config=ToyConfig(),
        model="support.toy_language:TokenModel", arch=OutsideConfig(forward_dtype="float32"),
        optim=OptimConfig(warmup_steps=0), steps=STEPS, global_batch_size=8, eval_batch_size=8, wandb="disabled",
        checkpoint_every_steps=5, keep_checkpoints=9, log_every_steps=2,
    )  # fmt: skip


def test_it_trains_and_reports_both_and_continues_bit_for_bit(toy, tmp_path, capsys):
    CALLS.clear()
    figures = train_jax.train(toy)
    assert list(range(STEPS)) == CALLS, "each batch once, also the first one"
    folder = RunFolder(tmp_path / "run")
    for name, steps in (("eval/loss", [3, 6, 9, 12, 15, STEPS]), ("eval/share/mean", [7, 14, STEPS])):
        assert [record["step"] for record in read_metrics(folder) if name in record] == steps
    assert {"loss", "share/mean"} <= figures.keys() and "share: mean" in capsys.readouterr().out

    again = dataclasses.replace(toy, run_dir=str(tmp_path / "again"), steps=10)
    train(again)
    CALLS.clear()
    train(dataclasses.replace(again, steps=STEPS))
    assert list(range(10, STEPS)) == CALLS
    one, other = (restore(str(tmp_path / name), whole_state=True).state for name in ("run", "again"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_several_steps_in_a_dispatch_are_refused(toy):
    several = dataclasses.replace(toy, compute=ComputeConfig(steps_per_dispatch=5), log_every_steps=5)
    with pytest.raises(UserError, match=r"depend on the model after every step, and compute\.steps_per_dispatch is 5"):
        train(several)
