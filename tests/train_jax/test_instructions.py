"""Instructions: the published layout and sampler, rows, a hundred steps beside PyTorch; HRM-Text in the engine."""

import dataclasses
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from starlette.testclient import TestClient
from support.made_wordnet import make_wordnet
from support.presets import with_fields
from support.published_hrm_text import import_published
from support.scripted_model import BYTES
from support.untrained_run import write_run_of

import bridge
from models_torch.gpt import IGNORED_TARGET
from models_torch.hrm_text import HRMText, HRMTextConfig
from models_torch.kv_cache import CachedModel
from train_jax.__main__ import main as trm
from train_jax.core.optim.chain import dense_optimizer
from train_jax.errors import UserError
from train_jax.language.chat.evaluation import logits_of
from train_jax.language.chat.text_stream import TextStream, answer_stream
from train_jax.language.core_evaluation import DeviceScorer
from train_jax.language.generation import TextModel, with_cycles
from train_jax.language.huggingface import write_folder
from train_jax.language.instructions.data import InstructionSet, PackedSteps, assign, count_fitting
from train_jax.language.instructions.presets import _optimizer
from train_jax.language.instructions.task import BackpropSchedule, InstructionTask, response_sums
from train_jax.language.sampling import Sampling
from train_jax.language.stages.chat import _SHOWN_AS
from train_jax.language.tokenizer import Tokenizer
from train_jax.run.model import build_module
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.run.resume import check_data
from train_jax.runtime.devices import Devices
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.stage import Serve, open_services

# ---- data and training

VOCAB = 37


def write_set(folder, count):
    """Writes samples of random tokens in the published layout."""
    rng = np.random.default_rng(0)
    asked, answered = rng.integers(1, 12, size=(2, count))
    starts = np.concatenate([[0], np.cumsum(asked + answered)[:-1]])
    total = int((asked + answered).sum())
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", rng.integers(VOCAB, size=total, dtype=np.int32))
    columns = {"inst_start": starts, "inst_len": asked, "resp_start": starts + asked, "resp_len": answered}
    for epoch in range(2):
        order = rng.permutation(count)
        (folder / f"epoch_{epoch}").mkdir()
        for name, column in columns.items():
            np.save(folder / f"epoch_{epoch}" / f"{name}.npy", column[order].astype(np.int64))
    metadata = {"tokenizer_info": {"vocab_size": VOCAB}, "vocab_size": None, "max_seq_len": 24, "total_length": total}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def assigned(count, rows, capacity, seed):
    lengths = np.random.default_rng(seed).geometric(0.02, size=40_000).clip(1, capacity)
    first = 0
    steps = []
    for _ in range(count):
        fitting = count_fitting(lengths[first : first + rows * capacity], rows, capacity)
        steps.append([[first + n for n in row] for row in assign(lengths[first : first + fitting], rows)])
        first += fitting
    return lengths, steps


def test_a_step_has_as_many_samples_as_fit():
    lengths, steps = assigned(20, 8, 1024, seed=0)
    loads = np.array([[lengths[row].sum() for row in step] for step in steps])
    assert loads.max() <= 1024 and loads.mean() > 0.97 * 1024
    taken = [number for step in steps for number in sorted(number for row in step for number in row)]
    assert taken == list(range(len(taken)))
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
    assert digest[:16] == "a547a527705ddc1b", "as when they were compared with the published sampler"


def test_two_hundred_steps_are_those_of_the_published_sampler(monkeypatch):
    if "HRM_TEXT_DIR" not in os.environ:
        pytest.skip("set HRM_TEXT_DIR to a checkout of HRM-Text")
    compiler = ModuleType("numba")
    compiler.njit = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "numba", compiler)
    monkeypatch.syspath_prepend(os.environ["HRM_TEXT_DIR"])
    monkeypatch.delitem(sys.modules, "multipack_sampler", raising=False)
    published = importlib.import_module("multipack_sampler")
    lengths, steps = assigned(200, 8, 1024, seed=0)
    for rank in range(8):
        sampler = published.MultipackDistributedBatchSampler(1024, lengths, num_replicas=8, rank=rank)
        for step, batch in zip(steps, sampler.iter(), strict=False):
            assert step[rank] == batch.tolist()


def test_rows_have_the_samples_with_their_positions_and_targets(tmp_path):
    data = InstructionSet(str(write_set(tmp_path, 60)))
    steps = PackedSteps(data, 4, 32)
    batch = steps.batch(0, (0, 1))
    seen = 0
    for row in range(4):
        for number in range(batch["samples"][row].max() + 1):
            own = batch["samples"][row] == number
            size = own.sum()
            asked = (batch["instruction"][row] & own).sum()
            assert batch["positions"][row][own].tolist() == list(range(size))
            targets = batch["targets"][row][own]
            assert (targets[: asked - 1] == IGNORED_TARGET).all() and (targets[asked - 1 :] >= 0).all()
            assert batch["inputs"][row][own][asked:].tolist() == targets[asked - 1 : -1].tolist()
            seen += 1
        assert (batch["targets"][row][batch["samples"][row] < 0] == IGNORED_TARGET).all()
    assert seen == steps.at(0).count and data.vocab_size == 256
    halves = [steps.batch(0, (index, 2)) for index in (0, 1)]
    for name, array in batch.items():
        np.testing.assert_array_equal(array, np.concatenate([half[name] for half in halves]))
    everything = steps.batch(0, (0, 1), target_only=False)
    assert (everything["targets"] == IGNORED_TARGET).sum() == (batch["samples"] < 0).sum()


def test_data_that_changed_in_place_are_other_data_and_a_run_of_an_earlier_version_continues(tmp_path):
    """Its fingerprint was a hash of some tokens and of the first epoch, which is where it still begins."""
    write_set(tmp_path / "test", 4)
    config = dataclasses.replace(preset("hrm-text-tiny"), data_dir=str(write_set(tmp_path, 60)))
    before = InstructionTask(config).fingerprint
    second = tmp_path / "epoch_1" / "inst_start.npy"
    np.save(second, np.load(second)[::-1])
    after = InstructionTask(config).fingerprint
    check_data(config, after[:32], before, 8)
    with pytest.raises(UserError, match="holds other data than the run was trained on up to step 8"):
        check_data(config, before, after, 8)


def test_every_held_out_sample_is_evaluated_once(tmp_path):
    data = InstructionSet(str(write_set(tmp_path, 33)))
    steps = PackedSteps(data, 4, 32, drop_last=False)
    done = 0
    number = 0
    while (step := steps.at(number)).epoch == 0:
        done = done + int((steps.batch(number, (0, 1))["samples"].max(axis=1) + 1).sum())
        number = number + 1
        assert step.first + step.count == done
    assert done == 33


def test_responses_are_exact_if_every_token_is():
    logits = jnp.asarray(np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1]])[None]
    batch = {
        "targets": jnp.array([[IGNORED_TARGET, 1, 2, 3, 1, IGNORED_TARGET]]),
        "samples": jnp.array([[0, 0, 0, 1, 1, -1]]),
    }
    sums = {name: float(value) for name, value in response_sums(logits, batch).items()}
    assert (sums["tokens"], sums["correct"], sums["responses"], sums["exact"]) == (4, 3, 2, 1)


def test_the_number_of_updates_with_gradients_increases_as_published():
    schedule = BackpropSchedule(2, 5, 20.0)
    published = [2 + int(min(1.0, step / 20.0) * 3) for step in range(1, 41)]
    assert [schedule.at(step) for step in range(40)] == published
    assert [schedule.after(step) for step in (0, 6, 13, 30)] == [3, 4, 5, None]
    assert BackpropSchedule(2, 5, 0.0).at(0) == 5


def test_a_data_set_that_cannot_be_trained_on_is_refused(tmp_path):
    config = dataclasses.replace(preset("hrm-text-tiny"), data_dir=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"metadata.json is missing\); build them with `trm build-data instructions"):
        InstructionTask(config)
    write_set(tmp_path / "set", 60)
    (tmp_path / "set/epoch_0/inst_len.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"inst_len.npy cannot be read"):
        InstructionSet(str(tmp_path / "set")).epoch(0)


def test_samples_of_a_file_are_built_into_the_published_layout(tmp_path, capsys):
    rows = [{"instruction": f"{n} + 1 =", "response": f"{n + 1}"} for n in range(40)]
    rows += [{"instruction": "empty", "response": ""}, {"instruction": "slow", "response": "1", "condition": "cot"}]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    BYTES.save(tmp_path / "text")
    options = ["--source", str(tmp_path / "sums.jsonl"), "--test-share", "0.2", "--tokenizer", str(tmp_path / "text")]
    build = ["build-data", "instructions", *options, "--output-dir", str(tmp_path / "set")]
    assert trm(build) == 0 and "built in" in capsys.readouterr().out
    train = InstructionSet(str(tmp_path / "set"))
    test = InstructionSet(str(tmp_path / "set/test"))
    assert train.epochs == 4 and len(train.epoch(0).inst_len) + len(test.epoch(0).inst_len) == 41
    assert sorted(train.epoch(0).inst_start) == sorted(train.epoch(3).inst_start)


def published_adam(parameters, config):
    """Returns one step of the published optimizer, which corrects the mean outside of the arc tangent."""
    state = {name: (0, torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}

    @torch.no_grad()
    def step(lr):
        for name, p in parameters.items():
            if p.grad is None:
                continue
            count, mu, nu = state[name]
            count = count + 1
            mu = torch.lerp(mu, p.grad, 1 - config.beta1)
            nu = config.beta2 * nu + (1 - config.beta2) * p.grad**2
            p.mul_(1 - lr * config.weight_decay)
            quotient = torch.atan2(mu, nu.sqrt() / (1 - config.beta2**count) ** 0.5)
            p.sub_(lr / (1 - config.beta1**count) * quotient)
            state[name] = count, mu, nu

    return step


@pytest.mark.slow
def test_a_hundred_steps_are_those_of_pytorch_across_the_changes_of_gradients(tmp_path, monkeypatch):
    arch = HRMTextConfig(
        seq_len=32, vocab_size=256, n_layers=2, hidden_size=16, num_heads=2, mlp_multiple_of=16, forward_dtype="float64"
    )
    steps = PackedSteps(InstructionSet(str(write_set(tmp_path, 400))), 2, 32)
    optim = dataclasses.replace(_optimizer(3e-3, 10), ema_decay=0.99)
    total = 100
    schedule = BackpropSchedule(2, 5, 0.2 * total)
    torch.manual_seed(0)
    modules = {n: HRMText(dataclasses.replace(arch, bp_steps=n)).double() for n in (2, 3, 4, 5)}
    start = modules[5].state_dict()
    for module in modules.values():
        module.load_state_dict(start)
        for name, parameter in modules[5].named_parameters():
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, parameter)  # one set of weights
    parts = ("positions", "samples", "instruction")
    with jax.enable_x64(True):
        fns = {n: bridge.export(module) for n, module in modules.items()}
        params = fns[5].params
        buffers = fns[5].buffers
        optimizer = dense_optimizer(optim, total)
        opt_state = optimizer.init(params)
        gradients = {}
        for n, fn in fns.items():

            def loss(params, batch, fn=fn):
                logits, _ = fn(params, buffers, batch["inputs"], **{k: batch[k] for k in parts}, train=True)
                counts = batch["targets"] != IGNORED_TARGET
                targets = jnp.where(counts, batch["targets"], 0)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
                return jnp.where(counts, losses, 0).sum() / counts.sum()

            gradients[n] = jax.jit(jax.grad(loss))
        apply = jax.jit(optimizer.update)
        theirs = dict(modules[5].named_parameters())
        torch_step = published_adam(theirs, optim)
        for number in range(total):
            batch = steps.batch(number, (0, 1))
            stage = schedule.at(number)
            updates, opt_state = apply(gradients[stage](params, batch), opt_state, params)
            params = optax.apply_updates(params, updates)
            tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
            logits = modules[stage](tensors["inputs"], **{name: tensors[name] for name in parts})
            targets = tensors["targets"].flatten().long()
            value = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED_TARGET)
            for parameter in theirs.values():
                parameter.grad = None
            value.backward()
            torch_step(min(1.0, (number + 1) / 10) * optim.lr)
        largest = max(float(np.abs(params[name] - p.detach().numpy()).max()) for name, p in theirs.items())
    assert largest < 1e-9, largest
    if "HRM_TEXT_DIR" in os.environ:
        published = import_published(monkeypatch)("adam_atan2").AdamATan2
        weight = torch.randn(3, 4, dtype=torch.float64)
        one, two = (torch.nn.Parameter(weight.clone()) for _ in range(2))
        ours = published_adam({"w": one}, optim)
        other = published([two], lr=0.01, betas=(optim.beta1, optim.beta2), weight_decay=0.1, ema=0.99)
        for _ in range(20):
            one.grad = two.grad = torch.randn(3, 4, dtype=torch.float64)
            ours(0.01)
            other.step()
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)  # its corrections are float32


# ---- the engine: a slot for each application of a layer, instructions read both ways, as in transformers


SIZES = {"seq_len": 48, "n_layers": 2, "hidden_size": 32, "num_heads": 2, "mlp_multiple_of": 16}
TOKENS = 12


def write_hrm_text_run(folder):
    BYTES.save(folder / "tokenizer")
    rows = [{"instruction": f"{n} + 1 =", "response": f"{n + 1}"} for n in range(60)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = ["--source", str(folder / "sums.jsonl"), "--test-share", "0.2", "--tokenizer", str(folder / "tokenizer")]
    assert trm(["build-data", "instructions", *given, "--output-dir", str(folder / "set")]) == 0
    config = dataclasses.replace(preset("hrm-text-tiny"), data_dir=str(folder / "set"), run_dir=str(folder / "run"))
    write_run_of(with_fields(config, SIZES | {"global_batch_size": 2, "eval_batch_size": 2}), step=3)


@pytest.fixture(scope="module")
def run_dir(made_once):
    return str(made_once("hrm_text", write_hrm_text_run) / "run")


@pytest.fixture(scope="module")
def run(run_dir):
    return restore(run_dir)


@pytest.fixture(scope="module")
def model(run):
    return TextModel(run)


def greedy(module, prompt):
    """The most probable tokens after an instruction and their log-probabilities, by passes over the whole row."""
    row = list(prompt)
    log_probs = []
    for _ in range(TOKENS):
        instruction = (torch.arange(len(row)) < len(prompt))[None]
        with torch.no_grad():
            log_prob, token = module(torch.tensor([row]), instruction=instruction)[0, -1].log_softmax(-1).max(-1)
        row.append(int(token))
        log_probs.append(float(log_prob))
    return row[len(prompt) :], log_probs


def module_of(run):
    module = build_module(run.config, run.task, 1)
    module.load_state_dict(run.state_dict())
    return module.eval()


CALLS = {"hrm": 2 * 2 * (3 + 1), "trm": 4 * 2 * (3 + 1), "ut": 4 * 3, "rins": 2 * (3 + 1), "transformer": 4}
"""Applications of a layer, of 4 layers with 2 H-cycles and 3 L-cycles."""


@pytest.mark.parametrize("design", CALLS)
def test_every_application_of_a_layer_has_a_slot(design):
    config = HRMTextConfig(**SIZES | {"n_layers": 4}, vocab_size=37, design=design, forward_dtype="float32")
    torch.manual_seed(0)
    module = HRMText(config).eval()
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    asked = torch.arange(9).expand(2, -1) < 6
    cached = CachedModel(module)
    logits, buffers = cached.prefill(tokens[:, :6], tokens[:, 5:6], 16, asked[:, :6])
    assert len(buffers.keys) == CALLS[design]
    found = [logits]
    for place in range(6, 9):
        logits, buffers = cached.decode(tokens[:, place : place + 1], buffers, torch.tensor(place), 16)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), module(tokens, instruction=asked), rtol=1e-5, atol=1e-5)


def asked_of(model, texts):
    return model.requests(texts, num_samples=1, max_tokens=TOKENS, sampling=Sampling(temperature=0))


@pytest.mark.slow
def test_the_engine_reads_an_instruction_both_ways(run, model):
    """The last one begins with a prompt and what followed it, whose keys and values are not those of an instruction."""
    first = asked_of(model, ["1 + 1 ="])
    longer = dataclasses.replace(first[0], prompt=(*first[0].prompt, *greedy(module_of(run), first[0].prompt)[0]))
    requests = [*first, *asked_of(model, ["12 + 1 ="]), *first, longer]
    module = module_of(run)
    for request, row in zip(requests, model.complete(requests, batch_size=1), strict=True):
        tokens, log_probs = greedy(module, request.prompt)
        assert row.tokens == tokens[: len(row.tokens)]
        np.testing.assert_allclose(row.log_probs, log_probs[: len(row.tokens)], atol=1e-5)
        assert len(row.tokens) == TOKENS or row.finish == "stop"


@pytest.mark.slow
def test_more_cycles_have_the_same_weights(run, model):
    longer = with_cycles(run, 4)
    arch: Any = longer.config.arch
    assert arch.H_cycles == 4 and with_cycles(run, 0) is run
    (request,) = asked_of(model, ["7 + 1 ="])
    (row,) = TextModel(longer).complete([request])
    assert row.tokens == greedy(module_of(longer), request.prompt)[0][: len(row.tokens)]


PUBLISHED = {"boq": "<|im_start|>", "eoq": "<|im_end|>", "eoa": "<|box_end|>"}
"""The published special tokens, none of which is one of conversations."""


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    """The folders of a data set as published, without tokenizer.json, and of its tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    own = Tokenizer.load(run.config.data_dir)
    Tokenizer(own.ranks, own.pattern, (*PUBLISHED.values(), "<|object_ref_start|>")).save(folder / "tokenizer")
    shutil.copytree(run.config.data_dir, folder / "set", ignore=shutil.ignore_patterns("tokenizer.*", "recipe.json"))
    metadata = json.loads((folder / "set" / "metadata.json").read_text())
    metadata["tokenizer_info"] |= PUBLISHED | {"condition_mapping": {"direct": "<|object_ref_start|>"}}
    (folder / "set" / "metadata.json").write_text(json.dumps(metadata))
    return str(folder / "set"), str(folder / "tokenizer")


def test_a_published_data_set_takes_its_tokenizer_from_another_folder(run, published):
    data_dir, tokenizer_dir = published
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, data_dir=data_dir))
    tokenizer = TextModel(run, tokenizer_dir).tokenizer
    names = [tokenizer.decode([token]) for token in (*tokenizer.instructions.begin, tokenizer.instructions.end)]
    assert names == ["<|im_start|>", "<|object_ref_start|>", "<|im_end|>"]
    assert tokenizer.decode([tokenizer.stop]) == "<|box_end|>" and tokenizer.vocab_size == 512
    assert text_of(answer_stream(tokenizer), [*b"12", tokenizer.vocab_size - 1, tokenizer.stop]) == "12"
    with pytest.raises(UserError, match=r"set/tokenizer\.json does not exist"):
        TextModel(run)


@pytest.mark.slow
def test_letters_are_scored_after_an_instruction_that_is_read_both_ways(run, model):
    prompts = [list(request.prompt) for request in asked_of(model, ["1", "12 + 30 = ? A or B", "7 + 1 ="])]
    letters = [*b"ABCD"]
    options = {"positions": 48, "tokens_at_once": 96, "outputs": logits_of(letters)}
    scorer = DeviceScorer(run.objective, run.state, Devices(1), **options, both_ways=True)
    module = module_of(run)
    differences = []
    for prompt, (logits,) in zip(prompts, scorer(prompts), strict=True):
        row = torch.tensor([prompt])
        with torch.no_grad():
            expected, one_way = (
                module(row, instruction=mask)[0, -1, letters].numpy() for mask in (torch.ones_like(row).bool(), None)
            )
        np.testing.assert_allclose(logits[-1], expected, atol=1e-5)
        differences.append(np.abs(one_way - expected).max())
    assert max(differences) > 1e-3


def text_of(stream, tokens):
    return stream.feed(tokens, [0.0] * len(tokens)).text + stream.finish().text


@pytest.mark.slow
def test_all_commands_answer_an_instruction_alike(run_dir, run, model, capsys, monkeypatch, tmp_path):
    module = module_of(run)
    tokenizer = model.tokenizer
    texts = [f"{n} + 1 =" for n in range(32)]
    shown_as = {number: _SHOWN_AS.get(name, "") for name, number in tokenizer.specials.items()}
    expected = []
    for request in asked_of(model, texts):
        tokens, _ = greedy(module, request.prompt)
        expected.append(tokens[: tokens.index(tokenizer.stop)] if tokenizer.stop in tokens else tokens)
    options = ["--temperature", "0", "--max-tokens", str(TOKENS)]
    prompts = [f"--prompt={text}" for text in texts]
    capsys.readouterr()
    assert trm(["generate", run_dir, *prompts, "--json", *options]) == 0
    assert [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert trm(["chat", run_dir, *options]) == 0
    said = capsys.readouterr().out
    tasks = ["arithmetic:4", f"glosses@{make_wordnet(tmp_path / 'dict')}"]
    assert trm(["chat-eval", run_dir, "--tasks", *tasks, "--max-tokens", "1", "--cycles", "1"]) == 0
    limits = Serve(run_dirs=(run_dir,), slots=2, context_tokens=48, requests_per_minute=100)
    gate = Gate(limits)
    with TestClient(create_app(gate, open_services(limits, gate)), base_url="http://127.0.0.1") as client:
        for text, tokens in zip(texts, expected, strict=True):
            body = {"max_tokens": TOKENS, "temperature": 0}
            messages = {"messages": [{"role": "user", "content": text}]}
            answer = client.post("/v1/chat/completions", json=body | messages).json()["choices"][0]
            plain = client.post("/v1/completions", json=body | {"prompt": text}).json()["choices"][0]
            assert answer["message"]["content"] == text_of(answer_stream(tokenizer, ()), tokens)
            assert plain["text"] == text_of(TextStream(tokenizer), tokens)
            assert text_of(TextStream(tokenizer, shown_as=shown_as), tokens) in said


@pytest.mark.slow
def test_transformers_loads_the_folder_and_generates_the_same_tokens(run, model, tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "HrmTextForCausalLM"):
        pytest.skip("transformers without HRM-Text")
    assert len([*write_folder(run, tmp_path / "folder")]) == 6
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    encode = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert type(theirs).__name__ == "HrmTextForCausalLM" and theirs.config.num_hidden_layers == 1 * 2 * 4
    texts = [f"{n} + {3 * n} =" for n in range(32)]
    requests = asked_of(model, texts)
    module = module_of(run)
    for text, request, row in zip(texts, requests, model.complete(requests), strict=True):
        given = encode(text, return_tensors="pt")
        assert given.input_ids[0].tolist() == list(request.prompt) and given.token_type_ids.all()
        with torch.no_grad():
            expected = theirs(**given, use_cache=False).logits
            mine = module(given.input_ids, instruction=given.token_type_ids.bool())
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        continued = theirs.generate(**given, do_sample=False, max_new_tokens=TOKENS)[0]
        assert row.tokens == continued[len(request.prompt) :].tolist()
    messages = [{"role": "user", "content": texts[1]}]
    rendered = encode.apply_chat_template(messages)
    assert rendered["input_ids"] == list(requests[1].prompt) and set(rendered["token_type_ids"]) == {1}
