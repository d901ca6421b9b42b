"""`trm evaluate`, `export`, `report`, `summary`, `status` and `generate` for runs of language models."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.documents import Balanced, words
from support.made_conversations import made_conversations

from models_torch.gpt import _ROTARY_BASE
from models_torch.gpt_2026 import GPT2026Config
from train_jax import load_run
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.language.chat import conversations
from train_jax.language.chat.conversations import parse_conversation, render
from train_jax.language.commands import ExportCheck, Sample, write_samples
from train_jax.language.generation import read_prompts
from train_jax.language.huggingface import write_folder
from train_jax.language.tokenizer import Tokenizer
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.model import build_module
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.run.status import read_status

# ---- results

HOSTILE = "<script>\x1b[2Jü"


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.evaluation("test").parent.mkdir(parents=True)
    config = dataclasses.replace(preset("chat-tiny"), data_dir=str(tmp_path / "text"), run_dir=str(folder.path))
    folder.config.write_text(to_json(config))
    records = []
    for step in range(10, 60, 10):
        train = {"loss": 6 / step, "bits_per_byte": 4 / step, "lr": 1e-3, "grad_norm": 0.5}
        record = {"step": step, "train_seconds": step / 10, "step_seconds": 0.5}
        records.append(record | {f"train/{name}": value for name, value in train.items()})
    records.append({"step": 50, "train_seconds": 5.0, "eval/bits_per_byte": 2.25, "eval/loss": 4.0})
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    test = {"loss": 2.0, "bits_per_byte": 1.9012, "tokens": 5000.0, "count": 20.0}
    folder.evaluation("test").write_text(json.dumps(test | {"compressed": {"gzip -9": 1.934, "xz -9e": 1.6208}}))
    finished = {"train_seconds": 125.4, "train_steps": 50, "summary": "1.9012 bits per byte, loss 2.0000"}
    folder.finished.write_text(json.dumps(test | finished))
    core = {"tasks": {"copa": {"items": 100, "accuracy": 0.55, "centered": 0.1}}, "core": 0.1, "step": 50}
    folder.evaluation("core").write_text(json.dumps(core))
    folder.export_check.write_text(json.dumps(dataclasses.asdict(ExportCheck(4096, 2.0, 2.000001, 3e-6))))
    write_samples(folder.samples, 50, [Sample("test document 3", f"import {HOSTILE}", f"os\n{HOSTILE}")])
    return folder


def test_the_report_of_a_language_run(folder):
    assert trm(["report", str(folder.path)]) == 0
    document = folder.report.read_text(encoding="utf-8")
    text = words(document)
    for figure in (
        "bits per byte, held out 1.9012 the whole held-out text",
        "perplexity, held out 7.39 of a token",
        "CORE 0.1000",
        "50 of 4,096 tokens",
        "xz -9e 1.6208 this model 1.9012 gzip -9 1.9340",
        "copa 100 0.5500 0.1000",
        "PyTorch agrees : the exported weights",
        "import <script>\ufffd[2Jü",
    ):
        assert figure in text, figure
    of_puzzles = ("puzzle", "ACT ", "halt", "exact", "cell", "Sudoku", "maze", "trajector")
    assert not [word for word in of_puzzles if word in text]
    assert "script" not in Balanced(document).tags


def test_summary_and_status_of_a_language_run(folder, finished_run, capsys):
    assert trm(["summary", str(folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.9012 bits per byte, loss 2.0000, raw weights" and "perplexity 7.39" in lines[1]
    assert lines[2] == "CORE 0.1000" and "training time 2:05" in lines[3]
    assert "PyTorch agrees: loss 2.000000" in lines[4]
    assert read_status(folder).figure == 2.25
    assert trm(["status", str(folder.path), str(finished_run)]) == 0
    head, ours, theirs = capsys.readouterr().out.splitlines()[:3]
    assert head.split()[3:5] == ["bits/byte", "exact"]
    assert ours.split()[3:5] == ["2.2500", "-"] and theirs.split()[3] == "-"


def test_damaged_results_are_one_line(folder, capsys):
    for path, command in ((folder.samples, "report"), (folder.evaluation("core"), "summary")):
        path.write_text('{"samples": [{"name": 1}], "core": "x"}')
        assert trm([command, str(folder.path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_export_check_agrees_up_to_rounding():
    assert ExportCheck(10, 2.0, 2.00001, 1e-3).agrees and not ExportCheck(10, 2.0, 2.01, 1e-3).agrees
    assert "DISAGREES" in str(ExportCheck(10, 2.0, 2.01, 1e-3))


@pytest.mark.slow
def test_a_language_run_is_evaluated_exported_and_reported(language_run, tmp_path, capsys):
    run_dir = str(shutil.copytree(language_run, tmp_path / "run"))  # gives every token the same probability
    assert trm(["evaluate", run_dir]) == 0
    output = capsys.readouterr().out
    assert "bits_per_byte" in output and "gzip -9" in output
    assert float(re.search(r"perplexity +(\S+)", output)[1]) == pytest.approx(280, rel=1e-5)
    assert output.count("--- test document") == 4 and output.count("--- without a prompt\n|") == 2
    assert trm(["export", run_dir]) == 0
    assert "PyTorch agrees: loss 5.6347" in capsys.readouterr().out  # ln 280
    assert trm(["report", run_dir]) == 0


# ---- generated texts


@pytest.mark.slow
def test_prompts_are_continued_as_json_lines_as_text_and_in_python(language_run, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("1 + 1 =\n\n9 + ü\n")
    options = ["--max-tokens", "5", "--seed", "7", "--top-k", "200"]
    files = ["--prompts-file", str(tmp_path / "prompts.txt")]
    assert trm(["generate", language_run, "--prompt", "", *files, "--num-samples", "2", "--json", *options]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompts = ["", "1 + 1 =", "9 + ü"]
    assert [(r["prompt"], r["sample"]) for r in records] == [(p, n) for p in prompts for n in (0, 1)]
    assert all(len(r["tokens"]) == 5 and r["finish"] == "length" for r in records)
    assert len({tuple(r["tokens"]) for r in records}) == 6
    assert trm(["generate", language_run, "--prompt", "1 + 1 =", *options]) == 0
    assert capsys.readouterr().out == f"1 + 1 ={records[2]['text']}\n", "one sample is printed as it comes"
    model = load_run(language_run)
    texts = model.generate(prompts, max_tokens=5, num_samples=2, seed=7, top_k=200)
    assert [text for each in texts for text in each] == [record["text"] for record in records]
    with pytest.raises(UserError, match="positions, the model has"):
        model.generate(["1"], max_tokens=10**4)


def test_prompts_are_read_from_a_file(tmp_path):
    files = {"a.jsonl": '{"prompt": "a"}\n\n{"prompt": "b", "more": 1}\n', "b.txt": "a\n b \n\n"}
    for (name, content), expected in zip(files.items(), (["a", "b"], ["a", " b "]), strict=True):
        (tmp_path / name).write_text(content)
        assert read_prompts(str(tmp_path / name)) == expected
    (tmp_path / "c.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    with pytest.raises(UserError, match="line 2 has the prompt 3; expected text"):
        read_prompts(str(tmp_path / "c.jsonl"))


def test_a_character_appears_with_its_last_byte(language_run):
    tokenizer = Tokenizer.load(language_run.removesuffix("run") + "set")
    ids = [*tokenizer.encode("aü€"), tokenizer.ranks[b"\xe2"]]
    pieces = list(tokenizer.decode_stream(iter(ids)))
    assert "".join(pieces) == tokenizer.decode(ids) == "aü€\ufffd"
    assert pieces[-1] == "\ufffd" and not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.campaign
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


@pytest.fixture(scope="module")
def drawn(language_run):
    """Two query heads share a key/value head; all weights are drawn, so that no branch is zero."""
    run = restore(language_run)
    generator = torch.Generator().manual_seed(0)
    weights = run.state_dict()
    return run.with_weights(
        {name: torch.randn(each.shape, generator=generator) * each.shape[-1] ** -0.5 for name, each in weights.items()},
        "drawn weights",
    )


@pytest.fixture(scope="module")
def exported(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "huggingface"
    assert len([*write_folder(drawn, folder)]) == 6
    return folder


@pytest.mark.slow
def test_logits_and_greedy_tokens_are_those_of_transformers(drawn, exported):
    transformers = pytest.importorskip("transformers", minversion="4.57")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "NanoChatForCausalLM"
    ours = build_module(drawn.in_float32().config, drawn.task, 1)
    ours.load_state_dict(drawn.state_dict(), strict=True)
    ours.eval()
    tokens = torch.randint(280, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stored = (theirs(tokens).logits - ours(tokens)).abs().max()
        ours.cos, ours.sin = tables = exact_tables(ours)
        assert tables[0].shape == (1, ours.max_positions, 1, 4)
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    assert 1e-4 < stored < 0.05, "the rotary tables of the module are stored in bfloat16, theirs are float32"
    continued = theirs.generate(tokens[:1, :5], do_sample=False, max_new_tokens=12, eos_token_id=None)[0]
    row = tokens[0, :5].tolist()
    for _ in range(12):
        row.append(int(ours(torch.tensor([row]))[0, -1].argmax()))
    assert continued.tolist() == row


def exact_tables(module):
    """Returns the rotary tables of a module, not rounded to bfloat16."""
    half = module.cos.shape[-1]
    frequencies = _ROTARY_BASE ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(module.max_positions, dtype=torch.float32), frequencies)[None, :, None]
    return angles.cos(), angles.sin()


def test_texts_and_conversations_have_the_same_tokens(drawn, exported):
    transformers = pytest.importorskip("transformers", minversion="4.57")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = Tokenizer.load(drawn.config.data_dir)
    for text in ("12 + 12 = 24\n", "ünï 언", ""):
        assert theirs(text).input_ids == [ours.bos, *ours.encode(text)]
    assert theirs.eos_token == "<|assistant_end|>"
    for record in made_conversations(50):
        # A special token that is written in a text becomes one there.
        conversation = parse_conversation(json.loads(json.dumps(record).replace("<|", "<")))
        messages = conversations.to_json(conversation)["messages"]
        assert theirs.apply_chat_template(messages)["input_ids"] == render(ours, conversation).tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rendered = [*render(ours, parse_conversation(messages)).tokens, ours.specials["<|assistant_start|>"]]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == rendered


def test_the_command_writes_the_folder_and_refuses_other_models(drawn, tmp_path, capsys):
    assert trm(["export", str(drawn.folder.path), "--format", "huggingface", "--output", str(tmp_path / "folder")]) == 0
    assert f"{tmp_path}/folder/config.json: 0.0 MB" in capsys.readouterr().out
    names = {re.sub(r"layers\.\d+", "layers.N", name) for name in load_file(tmp_path / "folder" / "model.safetensors")}
    layer = {f"model.layers.N.self_attn.{part}_proj.weight" for part in "qkvo"}
    layer |= {"model.layers.N.mlp.fc1.weight", "model.layers.N.mlp.fc2.weight"}
    assert names == layer | {"model.embed_tokens.weight", "lm_head.weight"}
    other = dataclasses.replace(drawn, config=dataclasses.replace(drawn.config, model="gpt_2026", arch=GPT2026Config()))
    with pytest.raises(UserError, match="gpt_2026: its NanoChatForCausalLM is --model gpt, its HrmText"):
        next(write_folder(other, tmp_path / "other"))
    assert not (tmp_path / "other").exists()
