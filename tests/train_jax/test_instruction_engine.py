"""HRM-Text in the engine: a slot for each application of a layer, instructions read both ways; as in transformers."""

import dataclasses
import io
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from support.made_wordnet import make_wordnet
from support.presets import with_fields
from support.scripted_model import BYTES
from support.untrained_run import write_run_of

from models_torch.gpt import GPTConfig
from models_torch.hrm_text import HRMText, HRMTextConfig
from models_torch.kv_cache import CachedModel
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.run.model import build_module
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.serving.app import create_app
from train_jax.serving.gate import Gate
from train_jax.stages.chat import _SHOWN_AS
from train_jax.stages.serve import Serve, open_services
from train_jax.tasks.language.chat.evaluation import logits_of
from train_jax.tasks.language.chat.text_stream import TextStream, answer_stream
from train_jax.tasks.language.core_evaluation import DeviceScorer
from train_jax.tasks.language.generation import TextModel, with_cycles
from train_jax.tasks.language.huggingface import write_folder
from train_jax.tasks.language.sampling import Sampling
from train_jax.tasks.language.tokenizer import Tokenizer

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
    row, log_probs = list(prompt), []
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
    module, tokens = HRMText(config).eval(), torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
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
    other = dataclasses.replace(run, config=with_fields(run.config, {"design": "transformer"}))
    with pytest.raises(UserError, match="--cycles 3: a transformer has no cycles; omit the option"):
        with_cycles(other, 3)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, model="gpt", arch=GPTConfig()))
    with pytest.raises(UserError, match="--cycles 3 is an option of HRM-Text, not of --model gpt; omit it"):
        with_cycles(other, 3)


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


def test_a_published_data_set_takes_its_tokenizer_from_another_folder(run, published, tmp_path):
    data_dir, tokenizer_dir = published
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, data_dir=data_dir))
    tokenizer = TextModel(run, tokenizer_dir).tokenizer
    names = [tokenizer.decode([token]) for token in (*tokenizer.instructions.begin, tokenizer.instructions.end)]
    assert names == ["<|im_start|>", "<|object_ref_start|>", "<|im_end|>"]
    assert tokenizer.decode([tokenizer.stop]) == "<|box_end|>" and tokenizer.vocab_size == 512
    assert text_of(answer_stream(tokenizer), [*b"12", tokenizer.vocab_size - 1, tokenizer.stop]) == "12"
    with pytest.raises(UserError, match=r"set/tokenizer\.json does not exist"):
        TextModel(run)
    Tokenizer(Tokenizer.load(tokenizer_dir).ranks).save(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"names a token that is not special in .*tokenizer/tokenizer\.json"):
        TextModel(run, str(tmp_path / "tokenizer"))


@pytest.mark.slow
def test_letters_are_scored_after_an_instruction_that_is_read_both_ways(run, model):
    prompts = [list(request.prompt) for request in asked_of(model, ["1", "12 + 30 = ? A or B", "7 + 1 ="])]
    letters = [*b"ABCD"]
    options = {"positions": 48, "tokens_at_once": 96, "outputs": logits_of(letters)}
    scorer = DeviceScorer(run.objective, run.state, Devices(1), **options, both_ways=True)
    module, differences = module_of(run), []
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
    module, tokenizer, texts = module_of(run), model.tokenizer, [f"{n} + 1 =" for n in range(8)]
    shown_as = {number: _SHOWN_AS.get(name, "") for name, number in tokenizer.specials.items()}
    expected = []
    for request in asked_of(model, texts):
        tokens, _ = greedy(module, request.prompt)
        expected.append(tokens[: tokens.index(tokenizer.stop)] if tokenizer.stop in tokens else tokens)
    options, prompts = ["--temperature", "0", "--max-tokens", str(TOKENS)], [f"--prompt={text}" for text in texts]
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
    texts = [f"{n} + {3 * n} =" for n in range(8)]
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
