"""LoRA on a Llama: adapters of rank 8 learn to count, in sequences of several lengths. Needs transformers and peft."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

VOCABULARY = 32


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    llama = LlamaForCausalLM(config)
    return get_peft_model(llama, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "lm_head"]))


def counting(seed, size):
    """Returns sequences such as 5, 8, 11, …, with 8 to 24 tokens."""
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.randint(0, VOCABULARY, (size,), generator=generator)
    differences = torch.randint(1, 8, (size,), generator=generator)
    lengths = torch.randint(8, 25, (size,), generator=generator).tolist()
    return [
        (first + difference * torch.arange(length)) % VOCABULARY
        for first, difference, length in zip(firsts, differences, lengths, strict=True)
    ]


def train_data():
    return counting(seed=1, size=1024)


def test_data():
    return counting(seed=2, size=128)


def collate(examples):
    return {
        "input_ids": pad_sequence(examples, batch_first=True),
        "mask": pad_sequence([torch.ones_like(tokens) for tokens in examples], batch_first=True),
    }


def loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["mask"]).logits[:, :-1]
    targets = batch["input_ids"][:, 1:]
    counted = batch["mask"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    right = (logits.argmax(-1) == targets) * counted
    return (losses * counted).sum(), counted.sum(), {"accuracy": right.sum() / counted.sum()}


def optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01)


def schedule(optimizer):
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=400)
