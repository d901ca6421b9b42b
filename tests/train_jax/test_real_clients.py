"""Programs of others talk to the server: openai's client, lm-eval on tasks in files, and the command `llm`.

`pip install lm_eval tenacity llm` installs those that the extra `test` does not have.
"""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.scripted_model import BYTES
from support.served import LIMITS, listening, model_of
from support.small_gpt import engine_of, small_gpt

from train_jax.language.engine import Request
from train_jax.language.sampling import GREEDY
from train_jax.runtime.devices import Devices
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.language import Model, TextService

pytestmark = pytest.mark.slow
CAPACITY = 192


@pytest.fixture(scope="module")
def engine():
    module = small_gpt(vocab_size=BYTES.vocab_size, seq_len=32)
    return engine_of(module, Devices(1), slots=4, capacity=CAPACITY)


@pytest.fixture(scope="module")
def address(engine):
    gate = Gate(LIMITS)
    service = TextService(gate, [model_of("toy", limits=LIMITS), Model("gpt", engine, BYTES, limits=LIMITS)])
    with listening(create_app(gate, [service])) as port:
        yield f"http://127.0.0.1:{port}"
    service.close()


def test_openai(address):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="toy", messages=messages, temperature=0, presence_penalty=0.1)
    assert answer.choices[0].message.content == "OK."
    begun = [*messages, {"role": "assistant", "content": "xa"}]
    answer = client.chat.completions.create(model="toy", messages=begun, temperature=0, max_completion_tokens=3)
    assert answer.choices[0].message.content == "bcd"
    with pytest.raises(openai.BadRequestError, match="tools is not supported here"):
        client.chat.completions.create(model="toy", messages=messages, tools=[{"type": "function", "function": {}}])
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model="toy", input="hi")


def test_openai_parses_a_schema(address):
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Pet(pydantic.BaseModel):
        is_cat: bool
        age: int = pydantic.Field(ge=0, le=99)

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.parse(model="toy", messages=messages, response_format=Pet, seed=0)
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_llm(address, tmp_path):
    if find_spec("llm") is None:
        pytest.skip("no llm; pip install llm")
    models = [{"model_id": "toy", "model_name": "toy", "api_base": f"{address}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
    for options in ([], ["--no-stream"], ["-s", "Be brief."]):
        command = [sys.executable, "-m", "llm", "-m", "toy", "hi", "-o", "temperature", "0", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.stdout.strip(), done.returncode) == ("OK.", 0), done.stderr


# ---- lm-eval

QUESTIONS = ["The cat sat on the", "Two and two are", "A dog is", "Rain falls from the"]
CHOICES = [[" mat", " moon and stars"], [" four", " five"], [" an animal", " a stone"], [" sky", " sea above"]]

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
"""
TASKS = {
    "choices_here": """
task: choices_here
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "continuations_here": """
task: continuations_here
output_type: loglikelihood
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "texts_here": """
task: texts_here
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 12, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def results(address, tmp_path, monkeypatch):
    if find_spec("lm_eval") is None:
        pytest.skip("no lm-eval; pip install lm_eval tenacity")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "items.jsonl"
    items = [{"text": text, "choices": choices, "gold": 0} for text, choices in zip(QUESTIONS, CHOICES, strict=True)]
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text + COMMON.format(data=data))
    arguments = {"model": "gpt", "base_url": f"{address}/v1/completions", "tokenizer_backend": "remote"}
    arguments |= {"num_concurrent": 1, "max_length": CAPACITY, "max_retries": 1}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in arguments.items()), "--tasks", ",".join(TASKS)]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (figures,) = (tmp_path / "out").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        lines = map(json.loads, path.read_text().splitlines())
        samples[name] = [each["resps"] for each in sorted(lines, key=lambda each: each["doc_id"])]
    return json.loads(figures.read_text())["results"], samples


def our_likelihood(engine, context, continuation):
    """Returns the log-probability of a continuation, and whether each of its tokens is the most probable one."""
    tokens = BYTES.encode(context) + BYTES.encode(continuation)
    first = len(BYTES.encode(context))
    request = Request(prompt=tuple(tokens[:1]), given=tuple(tokens[1:]), max_tokens=len(tokens) - 1, most_probable=1)
    (row,) = engine.complete([request])
    places = range(first - 1, len(tokens) - 1)
    return sum(row.log_probs[n] for n in places), all(row.most_probable[n][0][0] == row.tokens[n] for n in places)


def test_lm_eval_has_our_figures(results, engine, address):
    figures, samples = results
    fresh = engine_of(small_gpt(vocab_size=BYTES.vocab_size, seq_len=32), Devices(1), slots=4, capacity=CAPACITY)
    ours = [
        [our_likelihood(fresh, text, choice) for choice in choices]
        for text, choices in zip(QUESTIONS, CHOICES, strict=True)
    ]
    chosen = [max((0, 1), key=lambda n: scores[n][0]) for scores in ours]
    by_length = [
        max((0, 1), key=lambda n: scores[n][0] / len(choices[n])) for scores, choices in zip(ours, CHOICES, strict=True)
    ]
    assert figures["choices_here"]["acc,none"] == chosen.count(0) / 4
    assert figures["choices_here"]["acc_norm,none"] == by_length.count(0) / 4
    theirs = [[float(score) for ((score, _),) in each] for each in samples["choices_here"]]
    assert theirs == [[pytest.approx(score, abs=2e-5) for score, _ in scores] for scores in ours]
    mean = sum(scores[0][0] for scores in ours) / 4
    assert figures["continuations_here"]["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-5)
    assert figures["continuations_here"]["acc,none"] == sum(scores[0][1] for scores in ours) / 4
    texts = []
    for text in QUESTIONS:
        request = Request(prompt=tuple(BYTES.encode(text)), max_tokens=12, sampling=GREEDY, stop=(BYTES.bos,))
        texts.append(BYTES.decode(next(fresh.complete([request])).content).split("zz")[0])
    assert [each[0][0] for each in samples["texts_here"]] == texts
