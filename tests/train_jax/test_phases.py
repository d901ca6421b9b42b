"""Phases of a language model: what a run inherits from the one it starts from, and its optimizer's state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.presets import with_fields
from support.small_gpt import small_gpt
from support.untrained_run import write_run_of

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.run.config import with_task
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.run_arguments import parse_run
from train_jax.start import start
from train_jax.tasks.language.chat.conversations import Part, assistant, render, user
from train_jax.tasks.language.text_building import write_documents
from train_jax.tasks.language.tokenizer import Tokenizer

TOKENIZER = Tokenizer({bytes([number]): number for number in range(256)})
SIZES = {"seq_len": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "global_batch_size": 8, "steps": 50}


@pytest.fixture(scope="module")
def base(made_once):
    """The folder with a data set and a run whose optimizer's state is not that of a new one."""

    def make(folder):
        documents = [(np.array([TOKENIZER.bos, *b"1 + 1 = 2"]), np.ones(10, np.uint8))] * 50
        write_documents(folder / "set", TOKENIZER, {}, {"train": documents, "test": documents})
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
    config, run = phase(base, name), restore(f"{base}/run").config
    assert (config.arch, config.global_batch_size) == (run.arch, 8)
    assert config.run_dir == f"runs/d4-{name}" and config.steps == 0 and config.epochs == 1
    assert config.task == ("rollouts" if name == "rl" else "chat")
    for mine, theirs in zip(config.optim.groups, run.optim.groups, strict=True):
        assert (mine.lr, mine.optimizer) == (pytest.approx(theirs.lr * rate), theirs.optimizer)
        assert (mine.warmup_steps, mine.decay_share, mine.lr_min_ratio, mine.weight_decay) == (0, share, 0, 0)
    assert phase(base, name, "--arch.n-layer", "2").arch.n_layer == 2, "fields can be given as always"


def test_small_presets_have_an_rl_of_their_own(base):
    argv = ["chat-tiny", "--phase", "rl", "--init-from", f"{base}/run", "--data-dir", f"{base}/set"]
    config = parse_run(argv, prog="trm train", description="")[1]
    assert (config.optim.optimizer, config.optim.groups, config.global_batch_size) == ("adamw", (), 128)
    assert config.steps == 300 and config.task_config.samples == 8 and config.arch == phase(base, "rl").arch


def test_the_optimizer_s_state_goes_on_and_its_schedules_begin_anew(base):
    training = start(phase(base, "sft"))
    fresh = start(dataclasses.replace(phase(base, "sft"), init_optimizer=False)).initial_state().opt_state
    warm = training.initial_state().opt_state
    theirs = restore(f"{base}/run", whole_state=True).state.opt_state
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(warm)]
    from_run, new = set(), set()
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
        (["chat-tiny", "--phase", "rl", "--init-from", "nowhere"], "nowhere"),
        ([*SFT, "--eval-problems", "smalltalk"], "smalltalk has no right answers and is not asked during training"),
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
        rendered = (render(TOKENIZER, talk) for talk in talks)
        documents = [(np.array(tokens), np.array(weights, np.uint8)) for tokens, weights in rendered]
        write_documents(folder / "set", TOKENIZER, {}, {"train": documents, "test": documents})

    return made_once("conversations", make) / "set"


def written_by_the_assistant(row):
    """1 for each token of the assistant, with the end of its message, without the outputs of the calculator."""
    special, weights, writes, output = TOKENIZER.specials, [], 0, 0
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
    module = small_gpt(**sizes, vocab_size=TOKENIZER.vocab_size)
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    batch = training.task.batch(1, (0, 1))

    def loss(params):
        sums = objective(params, {}, objective.buffers, (), jax.tree.map(jnp.asarray, batch), None)
        return sums.loss / sums.weight

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    # Each row has one conversation, so that its last target is padding.
    rows = np.concatenate([batch["inputs"], np.full((8, 1), TOKENIZER.bos)], axis=1)
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
