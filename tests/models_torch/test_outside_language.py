"""Language models from outside the project: constructed by the stated rules, with losses; each error is one line."""

import pytest
import torch
import torch.nn.functional as F

from models_torch import registry
from models_torch.outside_language import OutsideLanguageConfig

SIZES = {"seq_len": 12, "vocab_size": 10, "forward_dtype": "float32"}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32}


def build(name, options=None, **fields):
    torch.manual_seed(0)
    return registry.build_model(name, OutsideLanguageConfig(**(SIZES | fields), options=options or {}))


@pytest.mark.parametrize("name", ["Average", "Outputs"])
def test_a_model_with_a_configuration_class(name):
    model = build(f"support.outside_gpts:{name}", {"width": 6})
    assert (model.config.sequence_len, model.config.vocab_size, model.config.width) == (12, 10, 6)
    assert list(model.state_dict()) == ["embed.weight", "head.weight", "head.bias"] and model.training
    # `Outputs` inherits init_weights, which its constructor would call if it were needed.
    assert bool(model.embed.weight.any()) == (name == "Average")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "options"), [("Average", {}), ("Outputs", {}), ("Words", {"causal": True})])
def test_losses_are_those_of_the_logits(name, options, dtype):
    model = build(f"support.outside_gpts:{name}", options, forward_dtype=dtype)
    tokens, targets = torch.randint(10, (2, 3, 12), generator=torch.Generator().manual_seed(1)).int()
    targets[0, :4] = -1
    logits = model(tokens)
    assert (logits.dtype == torch.bfloat16) == (dtype == "bfloat16" and name != "Words")  # an embedding has no autocast
    expected = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten().long(), ignore_index=-1, reduction="none"
    )
    torch.testing.assert_close(model(tokens, targets, loss_reduction="none").float(), expected)
    assert not expected[:4].any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("support.outside_gpts:Words", {}, "is not causal: the loss of a target depends on later tokens"),
        (
            "support.outside_gpts:Average",
            {"wide": 2},
            "AverageConfig of .* takes no wide; use its fields: sequence_len",
        ),
        ("support.outside_gpts:Words", {"seq_len": 2}, "options name seq_len, which is a separate field"),
        ("support.outside_gpts:Average", {"width": "a"}, r"cannot be constructed with .*; set its arguments in --arch"),
        ("support.outside_models:Thinker", {"width": 4}, "cannot be constructed|does not run on tokens of shape"),
        ("torch.nn:Identity", {}, "does not run on tokens of shape"),
        ("support.outside_gpts:Nothing", {}, "has no nn.Module class 'Nothing'; use one of: Average"),
    ],
)
def test_errors_are_one_line(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build(name, options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("LlamaForCausalLM", LLAMA), ("Qwen3ForCausalLM", LLAMA), ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4})],
)
def test_models_of_hugging_face(name, options):
    pytest.importorskip("transformers")
    model = build(f"transformers:{name}", options)
    assert model.config.vocab_size == 10 and model.config.max_position_embeddings == 12
    tokens = torch.zeros(2, 12, dtype=torch.int32)
    assert model(tokens, tokens, loss_reduction="none").shape == (24,) and type(model).__name__ == name
    with pytest.raises(ValueError, match=r"takes no hiden_size; use its fields: .*vocab_size"):
        build(f"transformers:{name}", {"hiden_size": 2})


@pytest.mark.usefixtures("nanochat")
def test_the_published_module():
    model = build("nanochat.gpt:GPT", GPT)
    assert model.config.n_embd == 32 and "transformer.h.0.attn.c_q.weight" in model.state_dict()
    assert not model.state_dict()["transformer.h.0.attn.c_proj.weight"].any(), "init_weights was not called"
