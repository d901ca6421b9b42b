"""Models from outside the project: imported, constructed by the stated rules, wrapped; each error is one line."""

import sys

import pytest
import torch
import torch.nn.functional as F
from support.outside_models import Thinker, ThinkerCarry
from torch import nn

from models_torch import outside, registry
from models_torch.losses import ACTLossHead
from models_torch.outside import OutsideConfig
from models_torch.outside_language import OutsideLanguageConfig

SIZES = {"batch_size": 4, "seq_len": 16, "vocab_size": 6, "num_puzzle_identifiers": 5, "forward_dtype": "float32"}


def make(name: str, **fields):
    config = OutsideConfig(**(SIZES | fields))
    torch.manual_seed(0)
    name = name if ":" in name else f"support.outside_models:{name}"
    return registry.build(name, config), config


def construct(name: str, **options):
    return registry.build_model(f"{__name__}:{name}", OutsideConfig(**SIZES, options=options))


def test_a_plain_module_takes_one_act_step():
    head, config = make("CellNet", halt_max_steps=1, options={"hidden": 8})
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, metrics, _, all_halted = head(head.initial_carry(batch), batch)
    assert all_halted and metrics["count"] == 4 and metrics["steps"] == 4
    torch.testing.assert_close(loss.detach(), metrics["lm_loss"] + 0.5 * 4 * torch.tensor(2.0).log())
    head.model.inner.eval(), head.eval()
    answer = head(carry, batch, ["logits"])[3]["logits"]
    torch.testing.assert_close(answer, head.model.inner(batch["inputs"]))
    assert head.state_dict()["model.inner.embed.weight"].shape == (6, 8)


def test_a_model_with_a_carry_is_wrapped_in_the_act_loss_head_and_its_dict_has_all_values():
    head, config = make("Thinker", halt_max_steps=3, options={"width": 8, "more": None})
    assert isinstance(head, ACTLossHead) and type(head.model).__name__ == "Thinker" and head.training
    fields = {"halt_max_steps": 3, "loss_type": "stablemax_cross_entropy", "width": 8, "more": None}
    assert head.model.config == SIZES | fields
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, *_ = head(head.initial_carry(batch), batch)
    assert type(carry).__name__ == "ThinkerCarry" and loss.requires_grad
    with pytest.raises(ValueError, match="options name halt_max_steps, which is a separate field"):
        OutsideConfig(options={"halt_max_steps": 2})


def test_a_loss_head_is_not_wrapped():
    head, config = make("ThinkerWithLoss", halt_max_steps=3, options={"width": 8})
    assert type(head).__name__ == "ThinkerWithLoss"
    batch = registry.example_batch(config, 4, seed=0)
    batch["labels"] = batch["inputs"]
    assert len(head(carry=head.initial_carry(batch), batch=batch, return_keys=())) == 5


class Linears(Thinker):
    """A carry of the outputs of a linear layer, which autocast changes to 16 bits."""

    def __init__(self, config_dict: dict):
        super().__init__(config_dict)
        self.cell = nn.Linear(self.width, self.width)

    def forward(self, carry, batch):
        memory = self.cell(carry.memory + self.embed(batch["inputs"]))
        steps = carry.steps % self.max_steps + 1
        outputs = {"logits": self.head(memory), "q_halt_logits": self.halt(memory.mean(1)).squeeze(-1)}
        return ThinkerCarry(memory.detach(), steps, steps == self.max_steps, batch), outputs


class CastsItself(nn.Module):
    """A plain module that reads `forward_dtype`, and computes its logits in float32 nevertheless."""

    def __init__(self, vocab_size, forward_dtype):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)
        self.dtype = getattr(torch, forward_dtype)

    def forward(self, inputs):
        return self.head(self.embed(inputs).to(self.dtype).float())


class NotUnderAutocast(CastsItself):
    """Writes the output of a layer into a buffer of float32, which PyTorch refuses in 16 bits."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size, "float32")

    def forward(self, inputs):
        logits = torch.zeros(*inputs.shape, self.head.out_features)
        logits[inputs >= 0] = super().forward(inputs).flatten(0, 1)
        return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["CellNet", "Thinker", "ThinkerWithLoss", f"{__name__}:Linears"])
def test_a_module_that_knows_no_forward_dtype_runs_under_autocast(name, dtype):
    """It is the same module in `torch.autocast`, and the carry keeps its dtypes, as a compiled step needs."""
    steps, options = (1, {"dropout": 0}) if name == "CellNet" else (3, {"width": 8})
    heads = [make(name, halt_max_steps=steps, options=options, forward_dtype=each)[0] for each in (dtype, "float32")]
    assert heads[0].state_dict().keys() == heads[1].state_dict().keys()
    batch = registry.example_batch(OutsideConfig(**SIZES), 4, seed=0)
    batch["labels"] = batch["inputs"]
    carries = [head.initial_carry(batch) for head in heads]
    for _ in range(2):
        mixed, *_ = ours = heads[0](carry=carries[0], batch=batch, return_keys=("logits",))
        with torch.autocast("cpu", getattr(torch, dtype)):
            theirs = heads[1](carry=carries[1], batch=batch, return_keys=("logits",))
        assert ours[3]["logits"].dtype == theirs[3]["logits"].dtype == getattr(torch, dtype)
        torch.testing.assert_close(ours[3]["logits"], theirs[3]["logits"])
        carries = [mixed, theirs[0]]
    if name != "CellNet":
        assert mixed.memory.dtype == torch.float32


def test_a_module_that_computes_in_the_forward_dtype_is_left_alone():
    head, config = make(f"{__name__}:CastsItself", halt_max_steps=1, forward_dtype="bfloat16")
    batch = registry.example_batch(config, 4, seed=0)
    *_, returned, _ = head(head.initial_carry(batch), batch, ("logits",))
    assert returned["logits"].dtype == torch.float32
    assert type(head.model.inner) is CastsItself
    with pytest.raises(ValueError, match=r"under autocast to bfloat16, .*; use --arch.forward-dtype float32"):
        make(f"{__name__}:NotUnderAutocast", halt_max_steps=1, forward_dtype="bfloat16")
    make(f"{__name__}:NotUnderAutocast", halt_max_steps=1)


class Keeps(nn.Module):
    """A plain module that keeps the values that it was constructed with."""

    def __init__(self, values):
        super().__init__()
        self.values = dict(values)


class FromConfig(Keeps):
    """The configuration is an object, which the classmethod creates."""

    def __init__(self, config):
        super().__init__(config.values)

    @classmethod
    def from_config(cls, values):
        return cls(type("Config", (), {"values": values}))


class OpenEnded(Keeps):
    def __init__(self, vocab_size, **others):
        super().__init__({"vocab_size": vocab_size} | others)


ALL_VALUES = SIZES | {"halt_max_steps": 16, "loss_type": "stablemax_cross_entropy"}


def test_arguments_are_the_fields_in_the_signature_and_all_options_or_one_dict_for_from_config():
    assert construct("FromConfig", width=8).values == ALL_VALUES | {"width": 8}
    assert construct("OpenEnded", width=8).values == {"vocab_size": 6, "width": 8}
    assert construct("Keeps", values={"vocab_size": 3}).values == {"vocab_size": 3}
    with pytest.raises(ValueError, match=r"Keeps requires values; give .* annotate the only parameter as dict"):
        construct("Keeps")


def test_a_module_in_the_current_folder_is_found_or_the_line_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "in_this_folder.py").write_text("import torch\nclass Net(torch.nn.Identity): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert outside.find("in_this_folder:Net").__name__ == "Net"
    (tmp_path / "broken_module.py").write_text("x = 1\nraise RuntimeError('not\\ntoday')\n")
    with pytest.raises(ValueError, match=r"cannot be imported \(RuntimeError: not today, broken_module.py:2\)"):
        outside.find("broken_module:Net")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nowhere:Net", {}, r"'nowhere' cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\); add"),
        ("Net", {}, "support.outside_models has no nn.Module class 'Net'; use one of: CellNet, Thinker, "),
        ("CellNet", {"options": {"depth": 3}}, "takes no depth; use its arguments: vocab_size, seq_len"),
        ("Thinker", {}, r"cannot be constructed with {.*} \(KeyError: 'width', outside_models.py:\d+\); set .*options"),
        ("CellNet", {"halt_max_steps": 4}, "halt_max_steps is 4, but .* has no initial_carry .*; use 1"),
        ("TooFewLogits", {}, r"returns logits of shape \(2, 16, 5\), expected \(2, 16, 6\)"),
        ("Fails", {}, r"not run on inputs of shape \(2, 16\) \(RuntimeError: .*outside_models.py:\d+\)"),
        ("Hasty", {"halt_max_steps": 3, "options": {"width": 8}}, "halts after one step of evaluation"),
    ],
)  # fmt: skip
def test_a_model_with_a_mistake_is_an_error_of_one_line(name, fields, message):
    name = name if ":" in name else f"support.outside_models:{name}"
    with pytest.raises(ValueError, match=message):
        registry.build(name, OutsideConfig(**(SIZES | {"halt_max_steps": 1} | fields)))


# ---- language models

LANGUAGE_SIZES = {"seq_len": 12, "vocab_size": 10, "forward_dtype": "float32"}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


def build(name, options=None, **fields):
    torch.manual_seed(0)
    return registry.build_model(name, OutsideLanguageConfig(**(LANGUAGE_SIZES | fields), options=options or {}))


@pytest.mark.parametrize("name", ["Average", "Outputs"])
def test_a_language_model_with_a_configuration_class(name):
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
    flat = logits.float().flatten(0, 1), targets.flatten().long()
    expected = F.cross_entropy(*flat, reduction="none", ignore_index=-1)
    torch.testing.assert_close(model(tokens, targets, loss_reduction="none").float(), expected)
    assert not expected[:4].any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Words", {}, "is not causal: the loss of a target depends on later tokens"),
        ("Average", {"wide": 2}, "AverageConfig of .* takes no wide; use its fields: sequence_len"),
        ("Words", {"seq_len": 2}, "options name seq_len, which is a separate field"),
        ("torch.nn:Identity", {}, "does not run on tokens of shape"),
    ],
)
def test_errors_of_a_language_model_are_one_line(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build(name if ":" in name else f"support.outside_gpts:{name}", options)
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
def test_the_published_language_model():
    model = build("nanochat.gpt:GPT", {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32})
    assert model.config.n_embd == 32 and "transformer.h.0.attn.c_q.weight" in model.state_dict()
    assert not model.state_dict()["transformer.h.0.attn.c_proj.weight"].any(), "init_weights was not called"
