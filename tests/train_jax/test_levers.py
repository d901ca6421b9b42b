"""The levers of the study, each beside a twin in plain PyTorch and in JAX with replayed draws; FLOPs, runs, kernels."""

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.presets import SMALL_RUN

import bridge
from models_torch import registry
from models_torch.flops import evaluation_flops_per_example, train_flops_per_example
from models_torch.outside import OutsideConfig
from models_torch.trm import TRMConfig
from train_jax.__main__ import main
from train_jax.research.levers import LeverTRM

pytestmark = pytest.mark.slow  # of the study, no part of the product

NAME = "train_jax.research.levers:LeverTRM"
MIXER = {
    "hidden_size": 16, "num_heads": 2, "mlp_multiple_of": 8, "puzzle_emb_ndim": 16, "puzzle_emb_len": 1, "L_layers": 1,
    "H_cycles": 2, "L_cycles": 2, "mlp_t": True, "pos_encodings": "none",
}  # fmt: skip
SIZES = {"batch_size": 4, "seq_len": 36, "vocab_size": 8, "num_puzzle_identifiers": 5, "halt_max_steps": 4}
ATTENTION = {"mlp_t": False, "pos_encodings": "rope"}
LEVERS: dict[str, dict] = {
    "none": {},
    "repair": {"repair": 0.3},
    "random_latents": {"random_latents": 0.7},
    "path_noise": {"path_noise": 0.2},
    "race": {"race": 3},
    "race of random latents": {"race": 2, "random_latents": 0.5, "path_noise": 0.1},
    "label_smoothing": {"label_smoothing": 0.2},
    "label_smoothing, stablemax": {"label_smoothing": 0.2, "loss_type": "stablemax_cross_entropy"},
    "act_step_weights": {"act_step_weights": [1.0, 0.5]},
    "qk_norm": {"qk_norm": True, **ATTENTION},
    "position_tables": {"position_tables": True},
    "looped_flow": {"looped_flow": 0.8},
    "halt_loss_weight": {"halt_loss_weight": 0.05},
    "several": {"repair": 0.2, "race": 2, "position_tables": True, "qk_norm": True, **ATTENTION},
}  # fmt: skip
EVERY_LEVER = pytest.mark.parametrize("name", LEVERS)


def values_of(name: str, dtype: str) -> dict:
    return {"loss_type": "softmax_cross_entropy", "forward_dtype": dtype, **SIZES, **MIXER, **LEVERS[name]}


def make(name: str, dtype: str = "float64") -> LeverTRM:
    """Returns the module with a halting head and puzzle rows that are not zero as initially."""
    torch.manual_seed(0)
    module = LeverTRM.from_config(values_of(name, dtype)).to(getattr(torch, dtype))
    torch.nn.init.normal_(module.model.inner.q_head.weight)
    torch.nn.init.zeros_(module.model.inner.q_head.bias)
    torch.nn.init.normal_(module.model.inner.puzzle_emb.weights)
    return module


def batch_of(seed: int) -> dict:
    return registry.example_batch(TRMConfig(**SIZES, **MIXER), SIZES["batch_size"], seed)


# ---- the twin


class Twin:
    """The same computation written with functions of PyTorch on a dict of weights, without classes of the project."""

    def __init__(self, module: LeverTRM, values: dict):
        named = dict(module.state_dict())
        self.w = {key.removeprefix("model.inner."): value.clone().requires_grad_() for key, value in named.items()}
        self.v = {"repair": 0, "random_latents": 0, "path_noise": 0, "race": 1, "label_smoothing": 0,
                  "act_step_weights": [], "qk_norm": False, "position_tables": False, "looped_flow": 0,
                  "halt_loss_weight": 0.5, **values}  # fmt: skip
        count = SIZES["batch_size"]
        shape = (count, self.v["race"], 37, 16)
        self.z_H = torch.zeros(shape, dtype=torch.float64)
        self.z_L = torch.zeros(shape, dtype=torch.float64)
        self.answer = torch.zeros(count, 36, dtype=torch.int32)
        self.steps = torch.zeros(count, dtype=torch.int32)
        self.halted = torch.ones(count, dtype=torch.bool)
        self.data = {key: torch.zeros_like(value) for key, value in batch_of(0).items()}

    def norm(self, x, dim=-1, epsilon=1e-5):
        return x / (x.pow(2).mean(dim=dim, keepdim=True) + epsilon).sqrt()

    def gated(self, x, name):
        gate, up = (x @ self.w[f"{name}.gate_up_proj.weight"].T).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up) @ self.w[f"{name}.down_proj.weight"].T

    def attention(self, x):
        query, key, value = (x @ self.w["L_level.layers.0.self_attn.qkv_proj.weight"].T).chunk(3, dim=-1)
        query, key, value = (each.view(len(x), 37, 2, 8).transpose(1, 2) for each in (query, key, value))
        angles = torch.arange(37.0)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        cos = angles.cos().double()
        sin = angles.sin().double()

        def turned(each):
            first, second = each.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        query = turned(query)
        key = turned(key)
        if self.v["qk_norm"]:
            query = self.norm(query, epsilon=1e-6)
            key = self.norm(key, epsilon=1e-6)
        weights = (query @ key.transpose(-1, -2) / math.sqrt(8)).softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(len(x), 37, 16)
        return mixed @ self.w["L_level.layers.0.self_attn.o_proj.weight"].T

    def block(self, x):
        if self.v["mlp_t"]:
            x = self.norm(x + self.gated(x.transpose(1, 2), "L_level.layers.0.mlp_t").transpose(1, 2), dim=1)
        else:
            x = self.norm(x + self.attention(x))
        return self.norm(x + self.gated(x, "L_level.layers.0.mlp"))

    def h_cycle(self, z_H, z_L, inputs):
        for _ in range(2):
            z_L = self.block(z_L + z_H + inputs)
        return self.block(z_H + z_L), z_L

    def inputs(self, training):
        scale = math.sqrt(16)
        cells = self.w["embed_tokens.embedding_weight"][self.data["inputs"].long()]
        if self.v["repair"]:
            fed = self.answer
            if training:
                hit = torch.rand(fed.shape) < self.v["repair"]
                fed = torch.where(hit, torch.randint_like(fed, 8), fed)
            shown = self.w["embed_answer.embedding_weight"][fed.long()]
            cells = cells + torch.where(self.steps[:, None, None] > 0, shown, 0.0)
        if self.v["looped_flow"]:
            truth = self.data["labels"] if training else self.answer
            share = (self.steps.double() / 3).clamp(max=1)[:, None, None]
            hot = torch.stack([truth == token for token in range(8)], dim=-1).double()
            noise = torch.randn(4, 36, 8, dtype=torch.float64) if training else self.w["flow_noise"].detach()
            state = share * hot + (1 - share) * self.v["looped_flow"] * noise
            cells = cells + state @ self.w["embed_answer.embedding_weight"]
        if self.v["position_tables"]:
            for row in range(6):
                for column in range(6):
                    box = 2 * (row // 2) + column // 3  # boxes of two rows and three columns
                    names = [f"places.tables.{number}.embedding_weight" for number in range(3)]
                    extra = sum(self.w[name][place] for name, place in zip(names, (row, column, box), strict=True))
                    one = F.one_hot(torch.tensor(6 * row + column), 36).double()[:, None]
                    cells = cells + one * extra
        puzzle = self.w["puzzle_emb.weights"][self.data["puzzle_identifiers"].long()]
        return scale * torch.cat((puzzle[:, None], cells), dim=1)

    def token_losses(self, logits, labels):
        if self.v["loss_type"] == "softmax_cross_entropy":
            logs = logits.log_softmax(dim=-1)
        else:
            scores = torch.where(logits < 0, 1 / (1 - logits.clamp(max=0)), logits + 1)
            logs = (scores / scores.sum(dim=-1, keepdim=True)).log()
        known = labels != -100
        right = -logs.gather(-1, labels.clamp(min=0).long()[..., None])[..., 0]
        return (right * known).sum(-1), (-logs.mean(-1) * known).sum(-1), known.sum(-1).clamp(min=1)

    def reset(self, training):
        first = [self.w["H_init"].detach(), self.w["L_init"].detach()]
        starts_H = torch.stack([first[0]] * self.v["race"])
        others = list(self.w["race_init"].detach()) if self.v["race"] > 1 else []
        starts_L = torch.stack([first[1], *others])
        for name, starts in (("z_H", starts_H), ("z_L", starts_L)):
            fresh = starts[None, :, None].expand(4, -1, 37, 16)
            if training and self.v["random_latents"]:
                drawn = torch.randn(fresh.shape if self.v["race"] > 1 else (4, 37, 16), dtype=torch.float64)
                fresh = fresh + self.v["random_latents"] * drawn.view(fresh.shape)
            setattr(self, name, torch.where(self.halted[:, None, None, None], fresh, getattr(self, name)))
        self.steps = torch.where(self.halted, 0, self.steps)

    def step(self, batch, training):
        for key, value in batch.items():
            self.data[key] = torch.where(self.halted.view(-1, *[1] * (value.ndim - 1)), value, self.data[key])
        self.reset(training)
        inputs = self.inputs(training)
        if training and self.v["path_noise"]:
            drawn = torch.randn(self.z_H.shape if self.v["race"] > 1 else (4, 37, 16), dtype=torch.float64)
            self.z_H = self.z_H + self.v["path_noise"] * drawn.view(self.z_H.shape)
        with torch.no_grad():
            found = [self.h_cycle(self.z_H[:, k], self.z_L[:, k], inputs) for k in range(self.v["race"])]
            best = [0] * 4
            for row in range(4):
                scores = []
                for z_H, _ in found:
                    loss, _, _ = self.token_losses(self.tokens(z_H)[row : row + 1], self.data["labels"][row : row + 1])
                    scores.append(loss.item() if training else -self.halting(z_H)[row].item())
                best[row] = min(range(len(scores)), key=scores.__getitem__)
        z_H = torch.stack([found[best[row]][0][row] for row in range(4)])
        z_L = torch.stack([found[best[row]][1][row] for row in range(4)])
        z_H, z_L = self.h_cycle(z_H, z_L, inputs)
        logits = self.tokens(z_H)
        self.z_H = torch.stack([each for each, _ in found], dim=1)
        self.z_L = torch.stack([each for _, each in found], dim=1)
        for row in range(4):
            self.z_H[row, best[row]] = z_H[row].detach()
            self.z_L[row, best[row]] = z_L[row].detach()
        self.answer = logits.argmax(-1).int()
        self.steps = self.steps + 1
        return self.loss(logits, self.halting(z_H), training), logits

    def tokens(self, z_H):
        return z_H[:, 1:] @ self.w["lm_head.weight"].T

    def halting(self, z_H):
        return z_H[:, 0] @ self.w["q_head.weight"][0] + self.w["q_head.bias"][0]

    def loss(self, logits, halting, training):
        labels = self.data["labels"]
        right, mean, counts = self.token_losses(logits, labels)
        if training:
            right = (1 - self.v["label_smoothing"]) * right + self.v["label_smoothing"] * mean
        if training and self.v["act_step_weights"]:
            right = right * torch.tensor([self.v["act_step_weights"][min(step, 2) - 1] for step in self.steps.tolist()])
        solved = ((logits.argmax(-1) == labels) | (labels == -100)).all(-1).double()
        stop = F.binary_cross_entropy_with_logits(halting, solved, reduction="sum")
        self.halted = self.steps >= 4
        if training:
            explores = torch.rand(4, dtype=torch.float64) < 0.1
            least = torch.randint(2, 5, (4,), dtype=torch.int32)
            self.halted = ((halting > 0) | self.halted) & (self.steps >= explores * least)
        return (right / counts).sum() + self.v["halt_loss_weight"] * stop


@EVERY_LEVER
@pytest.mark.parametrize("training", [True, False])
def test_a_lever_computes_what_its_twin_in_plain_pytorch_does(name, training):
    module = make(name).train(training)
    twin = Twin(module, values_of(name, "float64"))
    carry = module.initial_carry(batch_of(0))
    for step in range(5):
        batch = batch_of(step)
        torch.manual_seed(step)
        carry, loss, _, returned, _ = module(carry, batch, ("logits", "preds"))
        torch.manual_seed(step)
        expected, logits = twin.step(batch, training)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(returned["logits"], logits.detach(), rtol=1e-9, atol=1e-9)
        assert torch.equal(carry.halted, twin.halted) and torch.equal(carry.steps, twin.steps)
        named = {key.removeprefix("model.inner."): value for key, value in module.named_parameters()}
        gradients = torch.autograd.grad(loss, list(named.values()))
        others = torch.autograd.grad(expected, [twin.w[key] for key in named])
        for key, gradient, other in zip(named, gradients, others, strict=True):
            torch.testing.assert_close(
                gradient, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
            )


@EVERY_LEVER
def test_a_lever_in_jax_agrees_with_pytorch_with_replayed_draws(name):
    module = make(name, "float32").train()
    carry = module.initial_carry(batch_of(0))
    double = make(name).train()
    double.load_state_dict(module.state_dict())
    report = bridge.verify(module, carry, batch_of(0), jitter=0.02, double=double, input_gradients=False)
    assert report.ok, str(report)


def test_without_levers_the_weights_and_the_step_are_those_of_trm():
    torch.manual_seed(0)
    module = LeverTRM.from_config(values_of("none", "float32"))
    torch.manual_seed(0)
    published = registry.build("trm", TRMConfig(**values_of("none", "float32")))
    assert module.state_dict().keys() == published.state_dict().keys()
    carries = []
    heads: list[Any] = [module, published]
    for each in heads:
        torch.manual_seed(1)
        carry, loss, *_ = each(each.initial_carry(batch_of(0)), batch_of(0))
        loss.backward()
        carries.append((loss, carry.inner_carry.z_H, [p.grad for p in each.parameters()]))
    for left, right in zip(*carries, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    torch.manual_seed(0)
    with_all = LeverTRM.from_config({**values_of("several", "float32"), **MIXER, "qk_norm": False})
    for key, value in published.state_dict().items():
        assert torch.equal(with_all.state_dict()[key], value), f"{key}: a lever changes the weights of a seed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": True}, "qk_norm needs attention over all cells"),
        ({"race": 2, "H_cycles": 1}, "race 2 needs H-cycles without gradients"),
        ({"repair": 0.1, "looped_flow": 1.0}, "repair and looped_flow both feed an answer back"),
        ({"position_tables": True, "seq_len": 35}, "35 is not a square"),
        ({"repair": 2}, "repair is 2; use at most 1"),
        ({"repairs": 0.1}, "repairs"),
    ],
)  # fmt: skip
def test_a_lever_without_effect_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LeverTRM.from_config({**values_of("none", "float32"), **options})


def test_the_flops_of_levers_are_counted():
    fields: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "batch_size"}

    def counted(options):
        arch = OutsideConfig(**fields, forward_dtype="float32", options={**MIXER, **options})
        return train_flops_per_example(NAME, arch), evaluation_flops_per_example(NAME, arch)

    values: dict[str, Any] = {**fields, **MIXER, "forward_dtype": "float32"}
    trm = TRMConfig(**values)
    published = train_flops_per_example("trm", trm), evaluation_flops_per_example("trm", trm)
    assert counted({}) == counted({"repair": 0.3}) == published
    assert published[0] > 1.9 * published[1], "one of two H-cycles has gradients"
    block = 2 * 37 * 16 * (3 * 48) + 2 * 16 * 37 * (3 * 104)  # the widths are 8/3 of 16 and of 37, rounded up to 8
    train, evaluation = counted({"race": 2})
    assert train - published[0] == 3 * block + 2 * 2 * 37 * 16 * 8, "the tokens of two latents decide in training"
    assert evaluation - published[1] == 3 * block + 2 * 2 * 2 * 16, "their halting logits decide in evaluation"


def run_of(tmp_path, data_dir, options, *more) -> int:
    small = {**MIXER, "mlp_multiple_of": 16, **options}
    words = ["--model", NAME, "--arch.options", json.dumps(small), "--arch.halt-max-steps", "2"]
    common = [*SMALL_RUN[:-1], "--steps", "4", "--checkpoint-every-steps", "4", "--log-every-steps", "2"]
    return main(
        ["train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run"), *common, *words, *more]
    )


def test_a_run_with_levers_is_trained_and_evaluated_with_views(tmp_path, data_dir, capsys):
    options = {"repair": 0.2, "race": 2, "position_tables": True, "random_latents": 0.1, "label_smoothing": 0.1}
    assert run_of(tmp_path, data_dir, options) == 0
    assert "LeverTRM agrees with PyTorch" in capsys.readouterr().out
    run = str(tmp_path / "run")
    assert main(["evaluate", run]) == 0
    assert main(["evaluate", run, "--views", "4"]) == 0
    assert "exact_accuracy" in capsys.readouterr().out


def test_a_lever_that_a_kernel_does_not_serve_is_refused_with_it(tmp_path, data_dir, capsys):
    options = {"qk_norm": True, **ATTENTION}
    assert run_of(tmp_path, data_dir, options, "--compute.attention", "fused") == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "--compute.attention fused does not serve qk_norm; use --compute.attention plain" in error
