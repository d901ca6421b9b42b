"""DPO: a language model learns a preference, beside a frozen copy of itself. Needs transformers."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 32
PROMPT = 4
ANSWER = 8
BETA = 0.1


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=None)
    policy = GPT2LMHeadModel(config)
    return nn.ModuleDict({"policy": policy, "reference": copy.deepcopy(policy).requires_grad_(False)})


def preferences(seed, size):
    """Returns prompts with two answers each, of which the chosen one has even tokens, the other any."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(VOCABULARY, (size, PROMPT), generator=generator)
    answers = torch.randint(VOCABULARY, (2, size, ANSWER), generator=generator)
    chosen = answers[0] // 2 * 2
    return [
        {"chosen": torch.cat([prompt, good]), "rejected": torch.cat([prompt, bad])}
        for prompt, good, bad in zip(prompts, chosen, answers[1], strict=True)
    ]


def train_data():
    return preferences(seed=1, size=1024)


def test_data():
    return preferences(seed=2, size=128)


def answer_log_probability(language_model, tokens):
    log_probabilities = language_model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    of_tokens = log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    return of_tokens[:, PROMPT - 1 :].sum(1)


def loss(model, batch):
    rewards = {}
    for name, tokens in batch.items():
        with torch.no_grad():
            before = answer_log_probability(model["reference"], tokens)
        rewards[name] = BETA * (answer_log_probability(model["policy"], tokens) - before)
    margin = rewards["chosen"] - rewards["rejected"]
    return -F.logsigmoid(margin).mean(), {"accuracy": (margin > 0).float().mean(), "margin": margin.mean()}


def optimizer(model):
    return torch.optim.AdamW(model["policy"].parameters(), lr=1e-3, weight_decay=0.0)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
