"""A script: renders made conversations with nanochat's tokenizer and here, then runs its tests on an adapter.

NANOCHAT_DIR=/path/to/nanochat python -m support.nanochat_tokenizer
"""

import os
import sys

sys.path.insert(0, os.environ["NANOCHAT_DIR"])

import tiktoken
from nanochat.tokenizer import RustBPETokenizer

from support.made_conversations import made_conversations
from support.published_tests import run_published
from train_jax.language.chat.conversations import parse_conversation, render, render_prompt
from train_jax.language.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, train_tokenizer


class Adapted:
    """The tokenizer here with the names of the published class."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def train_from_iterator(cls, texts, vocab_size):
        return cls(train_tokenizer(texts, vocab_size))

    def get_vocab_size(self):
        return self._tokenizer.vocab_size

    def get_bos_token_id(self):
        return self._tokenizer.bos

    def encode_special(self, name):
        return self._tokenizer.specials[name]

    def encode(self, text, prepend=None, append=None):
        if isinstance(text, list):
            return self._tokenizer.encode_batch(text)
        ends = [[] if each is None else [self.encode_special(each)] for each in (prepend, append)]
        return [*ends[0], *self._tokenizer.encode(text), *ends[1]]

    def decode(self, ids):
        return self._tokenizer.decode(ids)

    def render_conversation(self, record, max_tokens=2048):
        tokens, weights = render(self._tokenizer, parse_conversation(record))
        return tokens[:max_tokens], weights[:max_tokens]

    def render_for_completion(self, record):
        return list(render_prompt(self._tokenizer, parse_conversation(record["messages"][:-1])))


if __name__ == "__main__":
    tokenizer = train_tokenizer(["hello there, what is this? 12 + 34 = 46. " * 9], 256 + len(SPECIAL_TOKENS) + 20)
    specials = dict(tokenizer.specials)
    enc = tiktoken.Encoding("x", pat_str=SPLIT_PATTERN, mergeable_ranks=tokenizer.ranks, special_tokens=specials)
    published = RustBPETokenizer(enc, "<|bos|>")
    ours = Adapted(tokenizer)
    records = made_conversations(2000)
    completed = 0
    for record in records:
        assert ours.render_conversation(record) == tuple(published.render_conversation(record))
        if record["messages"][-1]["role"] == "assistant":
            completed += 1
            assert ours.render_for_completion(record) == published.render_for_completion(record)
    print(f"{len(records)} conversations, {completed} prompts")
    names = {"RustBPETokenizer": Adapted, "SPECIAL_TOKENS": SPECIAL_TOKENS}
    sys.exit(run_published("test_tokenizer", {"nanochat.tokenizer": names}))
