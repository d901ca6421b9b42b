"""A model from outside the project: imported, constructed by the stated rules, wrapped; each error is one line."""

import collections.abc

import pytest
import torch
from torch import nn

from models_torch import outside, registry
from models_torch.losses import ACTLossHead
from models_torch.outside import OutsideConfig

SIZES = {"batch_size": 4, "seq_len": 16, "vocab_size": 6, "num_puzzle_identifiers": 5, "forward_dtype": "float32"}


def make(name: str, **fields):
    config = OutsideConfig(**(SIZES | fields))
    torch.manual_seed(0)
    return registry.build(f"support.outside_models:{name}", config), config


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


def test_a_model_with_a_carry_is_wrapped_in_the_act_loss_head():
    head, config = make("Thinker", halt_max_steps=3, options={"width": 8})
    assert isinstance(head, ACTLossHead) and type(head.model).__name__ == "Thinker" and head.training
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, *_ = head(head.initial_carry(batch), batch)
    assert type(carry).__name__ == "ThinkerCarry" and loss.requires_grad


def test_a_loss_head_is_not_wrapped():
    head, config = make("ThinkerWithLoss", halt_max_steps=3, options={"width": 8})
    assert type(head).__name__ == "ThinkerWithLoss"
    batch = registry.example_batch(config, 4, seed=0)
    batch["labels"] = batch["inputs"]
    assert len(head(carry=head.initial_carry(batch), batch=batch, return_keys=())) == 5


def test_a_dict_has_all_values_and_options_repeat_no_field():
    head, _ = make("Thinker", halt_max_steps=7, options={"width": 8, "more": None})
    fields = {"halt_max_steps": 7, "loss_type": "stablemax_cross_entropy", "width": 8, "more": None}
    assert head.model.config == SIZES | fields
    with pytest.raises(ValueError, match="options name halt_max_steps, which is a separate field"):
        OutsideConfig(options={"halt_max_steps": 2})


# ---- signatures of the constructor


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


class FromConfigIsNoClassmethod(Keeps):
    def __init__(self, vocab_size: int):
        super().__init__({"vocab_size": vocab_size})

    def from_config(self, values):
        raise AssertionError("an instance method cannot construct")


class OpenEnded(Keeps):
    def __init__(self, vocab_size, **others):
        super().__init__({"vocab_size": vocab_size} | others)


class TwoDicts(Keeps):
    """Two required parameters are keyword arguments, whatever their annotations."""

    def __init__(self, sizes: dict, vocab_size: int):
        super().__init__({"vocab_size": vocab_size} | sizes)


ALL_VALUES = SIZES | {"halt_max_steps": 16, "loss_type": "stablemax_cross_entropy"}


def test_from_config_gets_one_dict_of_all_values():
    assert construct("FromConfig", width=8).values == ALL_VALUES | {"width": 8}


@pytest.mark.parametrize(
    "annotation",
    [dict, dict[str, object], collections.abc.Mapping, "dict", "typing.Dict[str, object]", "abc.Mapping[str, int]"],
)
def test_the_only_parameter_annotated_as_a_mapping_gets_all_values(monkeypatch, annotation):
    class Annotated(Keeps):
        def __init__(self, settings: annotation, *, bias=True):
            super().__init__(settings)

    monkeypatch.setattr(outside, "find", lambda name: Annotated)
    assert construct("Annotated", width=8).values == ALL_VALUES | {"width": 8}


def test_keyword_arguments_are_the_fields_in_the_signature_and_all_options():
    assert construct("FromConfigIsNoClassmethod").values == {"vocab_size": 6}
    assert construct("OpenEnded", width=8).values == {"vocab_size": 6, "width": 8}
    assert construct("TwoDicts", sizes={"width": 8}).values == {"vocab_size": 6, "width": 8}


def test_a_parameter_without_annotation_is_a_keyword_argument():
    message = r"Keeps requires values; give it in --arch.options, .* annotate the only parameter as dict"
    with pytest.raises(ValueError, match=message):
        construct("Keeps")
    assert construct("Keeps", values={"vocab_size": 3}).values == {"vocab_size": 3}


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "in_this_folder.py").write_text("import torch\nclass Net(torch.nn.Identity): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p not in ("", str(tmp_path))])
    assert outside.find("in_this_folder:Net").__name__ == "Net"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nowhere:Net", {}, r"'nowhere' cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\); add"),
        ("Net", {}, "support.outside_models has no nn.Module class 'Net'; use one of: CellNet, Thinker, "),
        ("a_function", {}, "has no nn.Module class 'a_function'"),
        ("ThinkerCarry", {}, "has no nn.Module class 'ThinkerCarry'"),
        (":Net", {}, "'' cannot be imported"),
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


def test_the_message_has_the_line_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\nraise RuntimeError('not\\ntoday')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be imported \(RuntimeError: not today, broken_module.py:2\)"):
        outside.find("broken_module:Net")
