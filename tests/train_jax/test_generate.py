"""`trm generate`: text as it comes, JSON lines, files of prompts; `trm bench-generate`."""

import json

import pytest

from train_jax import load_run
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.tasks.language.generation import read_prompts
from train_jax.tasks.language.tokenizer import Tokenizer

POSITIONS = 160


def records_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_prompts_are_continued_as_json_lines_and_as_text(language_run, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("1 + 1 =\n\n9 + ü\n")
    options = ["--max-tokens", "5", "--seed", "7", "--top-k", "200"]
    files = ["--prompts-file", str(tmp_path / "prompts.txt")]
    assert trm(["generate", language_run, "--prompt", "", *files, "--num-samples", "2", "--json", *options]) == 0
    records = records_of(capsys.readouterr().out)
    assert [(r["prompt"], r["sample"]) for r in records] == [(p, n) for p in ("", "1 + 1 =", "9 + ü") for n in (0, 1)]
    assert all(len(r["tokens"]) == 5 and r["finish"] == "length" for r in records)
    assert len({tuple(r["tokens"]) for r in records}) == 6
    assert trm(["generate", language_run, "--prompt", "1 + 1 =", *options]) == 0
    assert capsys.readouterr().out == f"1 + 1 ={records[2]['text']}\n", "one sample is printed as it comes"


@pytest.mark.slow
def test_python_and_the_command_generate_the_same(language_run, capsys):
    model = load_run(language_run)
    texts = model.generate(["1 + 1", "2 +"], max_tokens=4, num_samples=2, seed=3)
    prompts = ["--prompt", "1 + 1", "--prompt", "2 +", "--num-samples", "2", "--max-tokens", "4", "--seed", "3"]
    assert trm(["generate", language_run, *prompts, "--json"]) == 0
    said = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert [text for each in texts for text in each] == said
    with pytest.raises(UserError, match="positions, the model has"):
        model.generate(["1"], max_tokens=10**4)


def test_samples_are_printed_as_text(language_run, capsys):
    """All logits are 0, so the token is 0, which is the byte 0."""
    greedy = ["--temperature", "0", "--max-tokens", "3"]
    assert trm(["generate", language_run, "--prompt", "a", "--prompt", "b", "--batch-size", "1", *greedy]) == 0
    assert capsys.readouterr().out == "--- prompt 1, sample 1\na\0\0\0\n--- prompt 2, sample 1\nb\0\0\0\n"


FILES = {
    "p.jsonl": ('{"prompt": "a"}\n\n{"prompt": "b", "more": 1}\n', ["a", "b"]),
    "p.txt": ("a\n b \n\n", ["a", " b "]),
    "list.jsonl": ("[1]\n", 'list.jsonl line 1 is \'[1]\'; expected an object such as {"prompt": "text"}'),
    "number.jsonl": ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2 has the prompt 3; expected text"),
    "broken.jsonl": ("{\n", "broken.jsonl line 1 is '{'; expected an object"),
}


@pytest.mark.parametrize("name", FILES)
def test_prompts_are_read_from_a_file(tmp_path, name):
    content, expected = FILES[name]
    (tmp_path / name).write_text(content)
    if isinstance(expected, list):
        assert read_prompts(str(tmp_path / name)) == expected
        return
    with pytest.raises(UserError) as error:
        read_prompts(str(tmp_path / name))
    assert expected in str(error.value)


def test_an_engine_serves_all_requests(language_run):
    model = load_run(language_run)
    requests = model.requests(["a", "abcdefghijklmnopqrstuvwxyz"], num_samples=3, max_tokens=POSITIONS - 27)
    assert [request.sample for request in requests] == [0, 1, 2, 0, 1, 2]
    assert all(request.prompt[0] == model.tokenizer.bos == request.stop[0] for request in requests)
    model.engine(requests).submit(requests[-1])


def test_a_character_appears_with_its_last_byte(language_run):
    tokenizer = Tokenizer.load(language_run.removesuffix("run") + "set")
    ids = [*tokenizer.encode("aü€"), tokenizer.ranks[b"\xe2"]]
    pieces = list(tokenizer.decode_stream(iter(ids)))
    assert "".join(pieces) == tokenizer.decode(ids) == "aü€\ufffd"
    assert pieces[-1] == "\ufffd" and not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.slow
def test_bench_generate_measures_bytes_and_tokens(capsys):
    sizes = ["--rows", "1", "4", "--prompt-tokens", "20", "--tokens", "9", "--rounds", "1"]
    assert trm(["bench-generate", "chat-tiny", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["rows"] for each in figures["rows"]] == [1, 4]
    cache = 4 * 2 * 2 * 64 * 4 * 24.5  # layers, keys and values, heads, channels, bytes, tokens on average
    for each in figures["rows"]:
        assert each["bytes_per_token_step"] == int(4 * 2**20 + each["rows"] * cache)
        assert each["tokens_per_second"] == pytest.approx(each["rows"] / each["seconds_per_token"])
        assert each["seconds_to_first_token"] > 0 and each["share_of_peak_bandwidth"] is None
