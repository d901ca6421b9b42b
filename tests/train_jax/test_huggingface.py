"""`trm export --format huggingface`: transformers loads the folder, with the same logits, tokens and rendering."""

import dataclasses
import json

import pytest
import torch
from support.made_conversations import made_conversations

from models_torch.gpt import _ROTARY_BASE
from models_torch.gpt_2026 import GPT2026Config
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.run.model import build_module
from train_jax.run.restore import restore
from train_jax.tasks.language.chat.conversations import parse_conversation, render, to_json
from train_jax.tasks.language.huggingface import write_folder
from train_jax.tasks.language.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def run(language_run):
    """Two query heads share a key/value head; all weights are drawn, so that no branch is zero."""
    run = restore(language_run)
    generator = torch.Generator().manual_seed(0)
    weights = run.state_dict()
    return run.with_weights(
        {name: torch.randn(each.shape, generator=generator) * each.shape[-1] ** -0.5 for name, each in weights.items()},
        "drawn weights",
    )


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "huggingface"
    assert len([*write_folder(run, folder)]) == 6
    return folder


@pytest.mark.slow
def test_logits_and_greedy_tokens_are_the_same(run, folder):
    transformers = pytest.importorskip("transformers", minversion="4.57")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "NanoChatForCausalLM"
    ours = build_module(run.in_float32().config, run.task, 1)
    ours.load_state_dict(run.state_dict(), strict=True)
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


def test_texts_and_conversations_have_the_same_tokens(run, folder):
    transformers = pytest.importorskip("transformers", minversion="4.57")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(run.config.data_dir)
    for text in ("12 + 12 = 24\n", "ünï 언", ""):
        assert theirs(text).input_ids == [ours.bos, *ours.encode(text)]
    assert theirs.eos_token == "<|assistant_end|>"
    for record in made_conversations(50):
        # A special token that is written in a text becomes one there.
        conversation = parse_conversation(json.loads(json.dumps(record).replace("<|", "<")))
        messages = to_json(conversation)["messages"]
        assert theirs.apply_chat_template(messages)["input_ids"] == render(ours, conversation).tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rendered = [*render(ours, parse_conversation(messages)).tokens, ours.specials["<|assistant_start|>"]]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == rendered


def test_the_command_writes_the_folder_and_refuses_other_models(run, tmp_path, capsys):
    assert trm(["export", str(run.folder.path), "--format", "huggingface", "--output", str(tmp_path / "folder")]) == 0
    assert f"{tmp_path}/folder/config.json: 0.0 MB" in capsys.readouterr().out
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, model="gpt_2026", arch=GPT2026Config()))
    with pytest.raises(UserError, match="gpt_2026: its NanoChatForCausalLM is --model gpt, its HrmText"):
        next(write_folder(other, tmp_path / "other"))
    assert not (tmp_path / "other").exists()
