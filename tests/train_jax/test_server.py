"""`trm serve`: OpenAI's interface, its limits, many clients at once and clients that go away."""

import asyncio
import dataclasses
import json
import logging
import math
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from starlette.testclient import TestClient
from support.compilations import compilations
from support.scripted_model import BYTES
from support.served import LIMITS, SLOTS, alphabet, listening, model_of, until

from train_jax.language.chat.messages import read_messages, render_chat
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.language import TextService

HERE = "http://127.0.0.1"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def model():
    model = model_of(others={5: alphabet(), 7: None})
    model.thread.engine.warm_up(range(1, model.thread.engine.capacity + 1))
    return model


@pytest.fixture(scope="module")
def gate():
    return Gate(LIMITS)


@pytest.fixture(scope="module")
def client(gate, model):
    with TestClient(create_app(gate, [TextService(gate, [model, model_of("other")])]), base_url=HERE) as client:
        yield client


@pytest.fixture
def slow(model, monkeypatch):
    """A dispatch takes 20 ms, so that a test can do something before an answer is complete."""
    step = model.thread.engine.step
    monkeypatch.setattr(model.thread.engine, "step", lambda: (time.sleep(0.02), step())[1])


def limited(gate, monkeypatch, **fields):
    monkeypatch.setattr(gate, "limits", dataclasses.replace(gate.limits, **fields))


def events_of(response):
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---- the protocol


def test_a_message_is_answered_without_the_calls_of_its_tool(client):
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "n": None, "tools": [], "logit_bias": {}}
    ignored |= {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "guided_json": None,
        "tool_choice": "auto",
    }
    answer = client.post(CHAT, json=HELLO | GREEDY | ignored).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "toy" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "OK.", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    # <|python_start|> 6*7 <|python_end|> <|output_start|> 42 <|output_end|> OK. <|assistant_end|>
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 13, "total_tokens": 19}


def choices_of(client, path, fields):
    """The choices of an answer of one choice, by the pieces of its stream if it is streamed."""
    response = client.post(path, json=GREEDY | fields)
    return [each["choices"][0] for each in (events_of(response) if fields.get("stream") else [response.json()])]


def test_a_stream_has_the_same_text(client):
    fields = HELLO | GREEDY | {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True}
    *chunks, usage = events_of(client.post(CHAT, json=fields))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 26 and usage["usage"]["prompt_tokens"] == 6
    assert all(each["usage"] is None and each["object"] == "chat.completion.chunk" for each in chunks)
    for index in (0, 1):
        choices = [choice for each in chunks for choice in each["choices"] if choice["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "OK."
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        tokens = [token for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
        assert [token["token"] for token in tokens] == ["O", "K", "."]
        assert all(-3 < token["logprob"] < -2 and token["top_logprobs"] == [] for token in tokens)
    assert "usage" not in events_of(client.post(CHAT, json=HELLO | {"stream": True}))[0]


def test_parts_are_calls_of_tools_their_outputs_and_text(client):
    parts = [("python", "6*7"), ("python_output", "42"), ("text", "OK.")]
    (choice,) = client.post(CHAT, json=HELLO | GREEDY | {"parts": True}).json()["choices"]
    assert [tuple(part.values()) for part in choice["message"]["parts"]] == parts
    assert choice["message"]["content"] == "OK."
    chunks = events_of(client.post(CHAT, json=HELLO | GREEDY | {"parts": True, "stream": True}))
    deltas = [part for each in chunks for part in each["choices"][0]["delta"].get("parts", ())]
    assert [(part["type"], part["text"]) for part in deltas[:2]] == parts[:2]
    assert "".join(part["text"] for part in deltas[2:]) == "OK."


def test_texts_are_continued(client):
    answer = client.post(TEXT, json=GREEDY | {"prompt": "xa", "max_tokens": 5, "logprobs": 0}).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bcdef", "length")
    assert choice["logprobs"]["tokens"] == list("bcdef") and choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    for prompt in (["a", "m"], [list(b"a"), list(b"m")]):
        choices = client.post(TEXT, json=GREEDY | {"prompt": prompt, "n": 2, "max_tokens": 2}).json()["choices"]
        assert [(each["index"], each["text"]) for each in choices] == [(0, "bc"), (1, "bc"), (2, "no"), (3, "no")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_probable_tokens_beside_each(client, stream):
    """The next letter has the logit 3, and all others have 0."""
    likely, other = (value - math.log(math.exp(3) + BYTES.vocab_size - 1) for value in (3, 0))
    choices = choices_of(client, TEXT, {"prompt": "a", "max_tokens": 3, "logprobs": 2, "stream": stream})
    tops = [top for each in choices for top in (each["logprobs"] or {"top_logprobs": []})["top_logprobs"]]
    assert [max(top, key=top.get) for top in tops] == list("bcd")
    assert [sorted(top.values()) for top in tops] == [[pytest.approx(other), pytest.approx(likely)]] * 3
    choices = choices_of(client, CHAT, HELLO | {"logprobs": True, "top_logprobs": 20, "stream": stream})
    tokens = [token for each in choices for token in (each["logprobs"] or {"content": []})["content"]]
    assert [token["token"] for token in tokens] == ["O", "K", "."]
    for token in tokens:
        first, *others = token["top_logprobs"]
        assert first == {name: token[name] for name in ("token", "logprob", "bytes")} and len(others) == 19
        assert [each["logprob"] for each in others] == [pytest.approx(other)] * 19


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_a_stop_string(client, stream):
    fields = {"prompt": "a", "max_tokens": 90, "stop": ["mno", "nothing"], "logprobs": 0, "stream": stream}
    choices = choices_of(client, TEXT, fields)
    assert "".join(each["text"] for each in choices) == "bcdefghijkl"
    assert choices[-1]["finish_reason"] == "stop"
    assert sum(len((each["logprobs"] or {"tokens": []})["tokens"]) for each in choices) == 11


def test_a_seed_gives_the_same_text_and_samples_differ(client):
    fields = {"prompt": "a", "seed": -5, "n": 3, "max_tokens": 8}
    first, again = ([each["text"] for each in client.post(TEXT, json=fields).json()["choices"]] for _ in range(2))
    assert first == again and len(set(first)) == 3
    unseeded = {client.post(TEXT, json={"prompt": "a", "max_tokens": 8}).json()["choices"][0]["text"] for _ in "123"}
    assert len(unseeded) == 3


def test_roles_and_parts_of_messages(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    turn = {"role": "user", "content": "hi"}
    for tokens, messages in (
        (6, [{"role": "user", "content": parts}]),
        (9, [{"role": "system", "content": "S"}, turn]),
    ):
        answer = client.post(CHAT, json=GREEDY | {"messages": messages}).json()
        assert answer["usage"]["prompt_tokens"] == tokens, messages


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


SAME_PROMPTS = [
    (turns(("user", "a"), ("user", "b")), turns(("user", "a\n\nb"))),
    (turns(("system", "s"), ("system", "t"), ("user", "a")), turns(("user", "s\n\nt\n\na"))),
    (
        turns(("user", "a"), ("assistant", "b"), ("developer", "s"), ("user", "c")),
        turns(("user", "a"), ("assistant", "b"), ("user", "s\n\nc")),
    ),
    (turns(("user", "a"), ("system", "s")), turns(("user", "a\n\ns"))),
    (turns(("system", "s")), turns(("user", "s"))),
    (turns(("user", "a"), ("assistant", None), ("user", "c")), turns(("user", "a"), ("assistant", ""), ("user", "c"))),
    (turns(("user", "a"), ("assistant", "b"), ("assistant", "c")), turns(("user", "a"), ("assistant", "b\n\nc"))),
]


@pytest.mark.parametrize(("messages", "same"), SAME_PROMPTS, ids=range(len(SAME_PROMPTS)))
def test_roles_in_any_order(messages, same):
    prompts = [render_chat(BYTES, read_messages(each)) for each in (messages, same)]
    assert prompts[0] == prompts[1]


def test_an_assistant_s_message_may_be_the_first():
    prompt = BYTES.decode(render_chat(BYTES, read_messages(turns(("assistant", "a"), ("user", "b")))))
    expected = "<|bos|><|assistant_start|>a<|assistant_end|><|user_start|>b<|user_end|><|assistant_start|>"
    assert prompt == expected


def test_a_last_message_of_the_assistant_is_continued(client):
    messages = turns(("user", "hi"), ("assistant", "xyza"))
    for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        body = {"messages": messages, "max_tokens": 4} | fields
        answer = client.post(CHAT, json=GREEDY | body).json()
        assert answer["choices"][0]["message"]["content"] == "bcde"
        assert answer["usage"]["prompt_tokens"] == 10
    for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        response = client.post(CHAT, json={"messages": messages} | fields)
        assert response.status_code == 400 and "whose answer is continued" in response.json()["error"]["message"]
    response = client.post(CHAT, json=HELLO | {"continue_final_message": True})
    assert response.json()["error"]["param"] == "continue_final_message"


def test_the_other_paths(client):
    for path in ("/health", "/readyz", "/livez"):
        assert client.get(path).json() == {"status": "ok"}
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["toy", "other"]
    assert client.get("/v1/models/third").json()["error"]["code"] == "model_not_found"
    client.post(TEXT, json={"prompt": "a", "max_tokens": 3})
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert int(lines['trm_tokens_total{model="toy"}']) >= 3 and int(lines['trm_requests_total{status="200"}']) >= 1
    assert lines['trm_rows{model="toy"}'] == "0" and lines['trm_slots{model="toy"}'] == str(SLOTS)
    for response, status in ((client.get("/nowhere"), 404), (client.get(CHAT), 405)):
        assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


# ---- what is added to the logits, and the log-probabilities of a prompt


def test_biases_and_penalties(client):
    """The next letter has the logit 3, all other tokens have 0."""
    fields = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    for extra, text in (
        ({"logit_bias": {str(ord("b")): -100}, "max_tokens": 1}, chr(0)),
        ({"logit_bias": {str(ord("x")): 4}}, "xxxx"),
        ({"logit_bias": {str(ord("x")): 4}, "frequency_penalty": 2, "max_tokens": 2}, "xy"),
        ({"logit_bias": {str(ord("x")): 3.5}, "presence_penalty": 1}, "xyza"),
    ):
        answer = client.post(TEXT, json=fields | extra).json()
        assert answer["choices"][0]["text"] == text, extra
    plain = client.post(TEXT, json=fields | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    biased = client.post(TEXT, json=fields | {"logprobs": 0, "logit_bias": {str(ord("x")): 1}}).json()
    assert biased["choices"][0]["logprobs"] == plain, "log-probabilities are those of the model"


@pytest.mark.parametrize("value", [[1], {"x": 1}, {"999": 1}, {"5": "1"}, {"5": 101}, {"-1": 1}], ids=str)
def test_a_wrong_bias(client, value):
    error = client.post(TEXT, json={"prompt": "a", "logit_bias": value}).json()["error"]
    assert error["param"] == "logit_bias" and "use an object of tokens from 0 to 264 and numbers" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt(client, stream):
    likely, other = (value - math.log(math.exp(3) + BYTES.vocab_size - 1) for value in (3, 0))
    equal = -math.log(BYTES.vocab_size)
    fields = {"prompt": list(b"abX"), "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "stream": stream}
    choices = choices_of(client, TEXT, fields)
    joined = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for each in choices:
        for name, values in (each["logprobs"] or {}).items():
            joined[name] += values
    assert "".join(each["text"] for each in choices) == "abX" + chr(0) and joined["tokens"] == [*"abX", chr(0)]
    assert joined["token_logprobs"] == [None, *(pytest.approx(each) for each in (likely, other, equal))]
    assert joined["top_logprobs"][0] is None and list(joined["top_logprobs"][2]) == ["c"]
    assert joined["text_offset"] == [0, 1, 2, 3]


def test_an_echo_of_a_text(client):
    fields = {"prompt": "ab", "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = client.post(TEXT, json=fields).json()
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert None not in answer["choices"][0]["logprobs"]["token_logprobs"], "<|bos|> is before the first one"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    error = client.post(TEXT, json=fields | {"echo": False}).json()["error"]
    assert error["message"] == "max_tokens is 0 without echo; use at least 1"
    assert client.post(TEXT, json=fields | {"stop": "a"}).json()["error"]["param"] == "stop"


def test_tokens_of_a_text(client):
    answer = client.post("/tokenize", json={"prompt": "ab"}).json()
    assert answer == {"tokens": [BYTES.bos, *b"ab"], "count": 3, "max_model_len": 96}
    assert client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [*b"ab"]
    messages = client.post("/tokenize", json=HELLO).json()
    assert messages["count"] == 6
    assert client.post("/detokenize", json={"tokens": [*b"ab"]}).json()["prompt"] == "ab"
    assert client.get("/tokenizer_info").json()["eos_token"] == "<|bos|>"
    for path, body in (("/tokenize", {"prompt": 5}), ("/detokenize", {"tokens": [999]}), ("/tokenize", {})):
        assert client.post(path, json=body).status_code == 400


# ---- JSON of a schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def with_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}}


def is_person(value):
    return (
        list(value) == ["name", "kind", "ages"]
        and len(value["name"]) <= 8
        and value["kind"] in ("cat", "dog")
        and len(value["ages"]) <= 3
        and all(type(age) is int and 0 <= age <= 99 for age in value["ages"])
    )


def test_answers_are_json_of_a_schema_and_compile_nothing(client):
    pytest.importorskip("llguidance")
    client.post(CHAT, json=HELLO | with_schema({"type": "null"}))
    with compilations() as names:
        answers = client.post(CHAT, json=HELLO | with_schema(PERSON) | {"n": 4, "seed": 1}).json()["choices"]
        ended = [json.loads(each["message"]["content"]) for each in answers if each["finish_reason"] == "stop"]
        other = client.post(TEXT, json={"prompt": "a", "max_tokens": 8} | with_schema({"enum": [12, 34]})).json()
    assert not names
    assert len(ended) >= 2 and all(map(is_person, ended))
    assert other["choices"][0]["text"] in ("12", "34") and other["choices"][0]["finish_reason"] == "stop"
    plain = client.post(TEXT, json=GREEDY | {"prompt": "a", "max_tokens": 3}).json()
    assert plain["choices"][0]["text"] == "bcd", "a row without a schema has no bias of one before it"


@pytest.mark.slow
def test_500_answers_are_valid(client):
    pytest.importorskip("llguidance")
    ended = 0
    for seed in range(63):
        answers = client.post(CHAT, json=HELLO | with_schema(PERSON) | {"n": 8, "seed": seed}).json()["choices"]
        for each in answers:
            if each["finish_reason"] == "stop":
                ended += 1
                assert is_person(json.loads(each["message"]["content"]))
    assert ended >= 400


@pytest.mark.parametrize(
    "value",
    ["json", {"type": "xml"}, {"type": "json_schema"}, with_schema({"type": "nothing"})["response_format"]],
    ids=str,
)
def test_a_wrong_schema(client, value):
    pytest.importorskip("llguidance")
    response = client.post(CHAT, json=HELLO | {"response_format": value})
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


def test_a_schema_without_its_package(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = client.post(CHAT, json=HELLO | with_schema(PERSON))
    assert response.status_code == 400 and "[schema]" in response.json()["error"]["message"]


# ---- several models and checkpoints


def text_of(client, name, **fields):
    answer = client.post(CHAT, json=HELLO | GREEDY | {"model": name, "max_tokens": 24} | fields).json()
    assert answer["model"] == name
    return answer["choices"][0]["message"]["content"]


def test_models_and_checkpoints_by_their_names(client):
    served = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["steps"]) for each in served] == [("toy", [0, 5, 7]), ("other", [0])]
    letters = "abcdefghijklmnopqrstuvwx"
    assert [text_of(client, name) for name in ("toy", "toy@5", "toy@0", "toy")] == ["OK.", letters, "OK.", "OK."]
    names = ["toy", "toy@5", "toy@0", "toy@5"] * 2
    with ThreadPoolExecutor(8) as pool:  # they take turns
        texts = list(pool.map(lambda name: text_of(client, name), names))
    assert texts == [letters if name == "toy@5" else "OK." for name in names]
    for name in ("toy@6", "third", "third@5", "other@5"):
        error = client.post(CHAT, json=HELLO | {"model": name}).json()["error"]
        assert error["message"] == f"the model '{name}' is not here; use 'toy', 'other'"
    response = client.post(CHAT, json=HELLO | {"model": "toy@7"})
    assert response.status_code == 404 and response.json()["error"]["message"] == "run has no checkpoint of step 7"
    assert text_of(client, "toy") == "OK."


# ---- mistakes and limits

MISTAKES = [
    ("temperature", 3, "temperature is 3; use at most 2"),
    ("n", True, "use a whole number"),
    ("seed", 2**64, "seed is"),
    ("max_tokens", 1000, "max_tokens is 1000, and the prompt has 6 tokens; use at most 91"),
    ("stream", "yes", "stream is 'yes'; use True or False"),
    ("stop", ["a"] * 5, "use a text, or at most 4, each of 1 to 256 characters"),
    ("top_logprobs", 2, "top_logprobs is 2 without logprobs; set logprobs to true"),
    ("tools", [{"type": "function"}], "tools is not supported here; leave it out"),
    ("model", "gpt-4o", "the model 'gpt-4o' is not here; use 'toy', 'other'"),
    ("model", ["toy"], "'toy'"),
    ("messages", [], "messages: [] is no conversation"),
    ("messages", [{"role": "tool", "content": "a"}], "is no message that is served here"),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{}]}], "tool_calls of a message is not"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "of a message from user is not text"),
    ("messages", [{"role": "user", "content": "\ud800"}], "is not valid UTF-8"),
    ("messages", [{"role": "user", "content": "a" * 77}], "the prompt has 81 tokens; use at most 80"),
]


@pytest.mark.parametrize(("field", "value", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_wrong_field_is_named(client, field, value, message):
    response = client.post(CHAT, content=json.dumps(HELLO | {field: value}))
    error = response.json()["error"]
    assert response.status_code == (404 if field == "model" else 400)
    assert message in error["message"] and error["param"] == field and error["type"] == "invalid_request_error"


UNSUPPORTED = {
    "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [5], "guided_json": {"type": "object"}, "suffix": "a",
    "guided_regex": "a*", "ignore_eos": True, "min_tokens": 3, "bad_words": ["a"], "chat_template": "{{ messages }}",
    "structured_outputs": {}, "tool_choice": "required", "reasoning_effort": "low", "mirostat": 2, "temprature": 0,
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "a"})], ids=["chat", "text"])
def test_fields_that_would_change_the_answer_are_refused(client, path, body):
    for name, value in UNSUPPORTED.items():
        response = client.post(path, json=body | {name: value})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == name, name
        assert error["message"] == f"{name} is not supported here; leave it out"
    response = client.post(path, json=body | {"top_a": 1, "max_tokens": 5, "user": "me", "min_p": 0.5})
    assert response.json()["error"]["message"] == "top_a and min_p are not supported here; leave them out"


@pytest.mark.parametrize("prompt", [5, [], [[]], ["a", 5], [300], [-1], [True], {"a": 1}, [["a"]]], ids=str)
def test_a_wrong_prompt(client, prompt):
    response = client.post(TEXT, json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


BODIES = [b"", b"[1]", b"\xff", b'{"n": NaN}', b"[" * 10**5]


@pytest.mark.parametrize("content", BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_no_object(client, content):
    response = client.post(CHAT, content=content)
    assert response.status_code == 400 and "the body is" in response.json()["error"]["message"]


def test_a_body_that_is_too_long_or_does_not_arrive(client, gate, monkeypatch):
    limited(gate, monkeypatch, body_bytes=1000)
    response = client.post(TEXT, json={"prompt": "a" * 1000})
    assert response.status_code == 413 and "longer than 1000 bytes" in response.json()["error"]["message"]
    limited(gate, monkeypatch, body_seconds=0.05)
    one = Client(client.app, TEXT, {}, reads=2, whole=False)
    asyncio.run(one.run())
    assert one.received[0]["status"] == 408


@pytest.fixture
def clock(gate, monkeypatch):
    """The time that the gate reads, in a list."""
    now = [1000.0]
    gate._times.clear()
    gate._failures.clear()
    monkeypatch.setattr(gate, "_clock", lambda: now[0])
    return now


def test_requests_a_minute(client, gate, monkeypatch, clock):
    limited(gate, monkeypatch, requests_per_minute=2)
    fields = {"prompt": "a", "max_tokens": 1}
    responses = []
    # The last two requests are 59.9 s and 60.1 s after the first one.
    for seconds in (0, 10.5, 20.0, 29.4, 0.2):
        clock[0] += seconds
        responses.append(client.post(TEXT, json=fields))
    assert [each.status_code for each in responses] == [200, 200, 429, 429, 200]
    assert responses[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert [each.headers.get("retry-after") for each in responses] == [None, None, "30", "1", None]
    assert client.get("/health").status_code == 200


def test_without_the_option_only_other_machines_are_limited(client, gate, monkeypatch, clock):
    """All addresses of a network of IPv6 are one client, since one machine has them all."""
    limited(gate, monkeypatch, requests_per_minute=None)
    for addresses, statuses in (
        (["127.0.0.1"], [400] * 62),  # a wrong prompt, which costs nothing
        (["::1", "::ffff:127.0.0.1"], [400] * 62),
        (["192.0.2.1"], [400] * 60 + [429] * 2),
        (["2001:db8::1", "2001:db8::ffff:2"], [400] * 60 + [429] * 2),
        (["::ffff:192.0.2.7"], [400] * 60 + [429] * 2),
    ):
        clients = [TestClient(client.app, base_url=HERE, client=(address, 1)) for address in addresses]
        answers = [clients[n % len(clients)].post(TEXT, json={"prompt": 5}) for n in range(62)]
        assert [each.status_code for each in answers] == statuses, addresses


def test_wrong_tokens_wait_longer_and_longer(client, gate, monkeypatch, clock):
    monkeypatch.setattr(gate, "token", "secret-token")
    limited(gate, monkeypatch, requests_per_minute=10**6)
    guess, right = ({"Authorization": f"Bearer {token}"} for token in ("guess", "secret-token"))
    here, there = (TestClient(client.app, base_url=HERE, client=(each, 1)) for each in ("192.0.2.1", "192.0.2.2"))
    tried = 0
    for _ in range(300):  # in 3 s
        tried += here.get("/v1/models", headers=guess).status_code == 401
        clock[0] += 0.01
    assert tried <= 7
    refused = here.post(TEXT, json={"prompt": "a"}, headers=right)
    assert refused.status_code == 429 and "wrong tokens" in refused.json()["error"]["message"]
    wait = int(refused.headers["retry-after"])
    assert there.get("/v1/models", headers=right).status_code == 200, "another client does not wait"
    assert here.get("/health").status_code == 200
    clock[0] += wait - 1.01
    assert here.get("/v1/models", headers=right).status_code == 429, "the right one is no sign while others are guessed"
    clock[0] += 1.01
    assert here.get("/v1/models", headers=right).status_code == 200
    assert [here.get("/v1/models").status_code for _ in range(20)] == [401] * 20, "no token is no guess"
    assert [here.get("/v1/models", headers=guess).status_code for _ in range(6)] == [401] * 5 + [429]
    waits = []
    for _ in range(12):
        response = here.get("/v1/models", headers=guess)
        waits.append(int(response.headers["retry-after"]))
        clock[0] += waits[-1]
        assert here.get("/v1/models", headers=guess).status_code == 401
    assert waits == [1, 2, 4, 8, 16, 32, *[60] * 6]


def test_more_answers_than_wait(client, model, slow, monkeypatch):
    monkeypatch.setattr(model.thread, "_most_rows", SLOTS + 2)
    fields = {"prompt": "a", "max_tokens": 40}
    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(lambda _: client.post(TEXT, json=fields), range(10)))
    statuses = [each.status_code for each in responses]
    assert set(statuses) == {200, 429} and statuses.count(200) >= SLOTS + 2
    assert {each.json()["error"]["code"] for each in responses if each.status_code == 429} == {"queue_full"}
    assert model.thread.rows == 0


def test_more_answers_than_ever_fit_are_no_matter_of_time(client, model, monkeypatch):
    monkeypatch.setattr(model.thread, "_most_rows", 5)
    response = client.post(TEXT, json={"prompt": ["a", "b"], "n": 3})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "n")
    assert error["message"] == "the request asks for 6 answers; use at most 5"


def test_pages_of_other_sites_with_a_token():
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
    with TestClient(create_app(Gate(LIMITS, "secret"), []), base_url="http://any.host") as client:
        allowed = client.options(CHAT, headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "*"
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        answer = client.get("/metrics", headers={"Origin": "https://chat.example", "Authorization": "bearer secret"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert client.get("/metrics", headers={"Origin": "https://chat.example"}).status_code == 401
        assert client.get("/metrics", headers={"Authorization": "basic secret"}).status_code == 401


def test_pages_of_other_sites(client):
    statuses = {403: [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "[::1"}]}
    statuses[200] = [{}, {"Origin": HERE}, {"Host": "[::1]:80"}]
    for status, headers in ((status, each) for status, all_headers in statuses.items() for each in all_headers):
        response = client.post(TEXT, headers=headers, json={"prompt": "a", "max_tokens": 1})
        assert response.status_code == status, headers


def test_a_token(gate, client, monkeypatch):
    monkeypatch.setattr(gate, "token", "secret-ü")
    right = {"Authorization": "Bearer secret-ü".encode()}
    for headers in ({}, {"Authorization": b"Bearer x"}, right):
        responses = [client.get(path, headers=headers) for path in ("/v1/models", "/metrics")]
        responses.append(client.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers=headers))
        assert [each.status_code for each in responses] == [200 if headers == right else 401] * 3
        assert not any("secret" in each.text for each in responses)
    assert client.get("/health").status_code == 200


# ---- many clients


def test_no_request_compiles(client):
    with compilations() as names:
        for n in range(1, 9):
            body = {"prompt": "a" * 9 * n, "temperature": n / 4, "top_k": n, "top_p": 1 / n, "stop": "x" * n, "n": n}
            assert client.post(TEXT, json=body | {"max_tokens": n}).status_code == 200
    assert not names


class Client:
    """Calls the application itself, to go away or to stop reading in the middle."""

    def __init__(self, app, path, body, *, reads, whole=True):
        self.app = app
        self.content = json.dumps(body).encode()
        self.reads = reads
        self.whole = whole
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.gone = asyncio.Event()
        self.received = []

    async def _receive(self):
        if self.content is not None:
            content = self.content
            self.content = None
            return {"type": "http.request", "body": content, "more_body": not self.whole}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if len(self.received) >= self.reads:
            await asyncio.Event().wait()
        self.received.append(message)

    async def run(self):
        await self.app(self.scope, self._receive, self._send)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(client, model, slow, stream):
    body = {"prompt": "a", "max_tokens": 90, "n": 3, "stream": stream}

    async def go():
        one = Client(client.app, TEXT, body, reads=2)
        running = asyncio.create_task(one.run())
        await until(lambda: model.thread.engine.counts.decodes > before + 1)
        assert model.thread.rows == 3
        one.gone.set()
        await until(lambda: model.thread.rows == 0)
        await running

    before = model.thread.engine.counts.decodes
    asyncio.run(go())
    assert model.thread.engine.counts.decodes < before + 11, "of the 12 dispatches of a whole answer"
    assert model.thread.engine.idle


def test_a_client_that_never_reads_holds_no_other_up(client, model, monkeypatch):
    monkeypatch.setattr(model.thread, "_unread", 4)
    body = GREEDY | {"prompt": "a", "max_tokens": 90, "stream": True}

    async def go():
        one = Client(client.app, TEXT, body, reads=1)
        running = asyncio.create_task(one.run())
        await until(lambda: one.received)
        answer = await asyncio.to_thread(client.post, TEXT, json=body | {"max_tokens": 8, "stream": False})
        assert answer.json()["choices"][0]["text"] == "bcdefghi"
        await until(lambda: model.thread.rows == 0)
        assert not running.done()
        one.gone.set()
        await running

    before = model.thread.engine.counts.tokens
    asyncio.run(go())
    assert model.thread.engine.counts.tokens < before + 90, "the answer was cancelled"


def test_an_engine_that_fails_is_logged_and_answered_with_503(monkeypatch, caplog):
    model = model_of()
    with TestClient(create_app(Gate(LIMITS), [TextService(Gate(LIMITS), [model])]), base_url=HERE) as client:
        monkeypatch.setattr(model.thread.engine, "step", lambda: 1 / 0)
        for _ in range(2):
            response = client.post(TEXT, json={"prompt": "a"})
            assert response.status_code == 503 and response.json()["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 503
    assert "ZeroDivisionError" in caplog.text


def received(sock):
    return b"".join(iter(lambda: sock.recv(4096), b""))


def test_a_request_that_does_not_begin_in_time_is_ended(client, slow, monkeypatch):
    """An answer that takes longer is not ended. Nothing is logged."""
    logged = []
    monkeypatch.setattr(logging.StreamHandler, "emit", lambda self, record: logged.append(record))
    get = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    body = json.dumps(GREEDY | {"prompt": "a", "max_tokens": 90, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: "
    with listening(client.app, dataclasses.replace(LIMITS, body_seconds=0.2)) as port:
        connect = partial(socket.create_connection, ("127.0.0.1", port), timeout=10)
        for parts in ([], [get], [get + b"\r\n", get], [b"\0" * 99]):
            with connect() as waits:
                for part in parts:
                    waits.sendall(part)
                    time.sleep(0.02)
                begun = time.monotonic()
                received(waits)
                assert time.monotonic() - begun < 2
        with connect() as answered:
            answered.sendall(head + f"{len(body)}\r\n\r\n".encode() + body)
            text = received(answered)
    assert text.count(b"data: ") > 10 and b"[DONE]" in text and not logged


@pytest.fixture
def port(client):
    with listening(client.app) as port:
        yield port


@pytest.mark.slow
def test_the_official_client(model, port):
    openai = pytest.importorskip("openai")
    official = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    fields = {"model": "toy", "messages": HELLO["messages"], "temperature": 0}
    answer = official.chat.completions.create(**fields, logprobs=True)
    assert answer.choices[0].message.content == "OK." and answer.usage.total_tokens == 19
    assert [each.token for each in answer.choices[0].logprobs.content] == ["O", "K", "."]
    stream = list(official.chat.completions.create(**fields, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in stream) == "OK."
    assert [each.id for each in official.models.list()] == ["toy", "other"]
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        official.chat.completions.create(**fields | {"temperature": 3})
    with official.completions.create(model="toy", prompt="a", max_tokens=90, stream=True) as stream:
        next(iter(stream))
    asyncio.run(until(lambda: model.thread.rows == 0))
