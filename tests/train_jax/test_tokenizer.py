"""Tokenizers: three libraries agree on hostile text, text comes back, special tokens cannot be written, files are data.

`NANOCHAT_DIR=/path/to/nanochat` compares with the tokenizer of a checkout at 4a87a0d, too.
"""

import base64
import json
import os
import random
import re
import sys

import pytest

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.tasks.language.documents import is_test
from train_jax.tasks.language.tokenizer import (
    JSON_NAME,
    RANKS_NAME,
    SAMPLES,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    Tokenizer,
    text_package,
    train_tokenizer,
)

VOCAB_SIZE = 700


def training_texts():
    return [open(module.__file__).read() for module in (json, json.decoder, random, re, os)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(training_texts(), VOCAB_SIZE)


ALPHABETS = (
    "abcdefgh self.return def \n\t  ",
    "0123456789,.  -e",
    " \t\r\n\v\f\x00\x1f\x7f\x85\xa0\u2028\u3000",
    "äßñçéАбвγδ漢字かな한글עבר",
    "e\u0301\u200d\ufe0f\u202e👩👧🏽🇩🇪\U0010ffff\ufffd\ufffe",
    "'sS'llLL'VEve'mMdDtT ",
    "<|>_bosusertand[]{}()!?",
)


def hostile_strings(count):
    rng = random.Random(0)
    for number in range(count):
        alphabet = "".join(rng.sample(ALPHABETS, rng.randint(1, 3)))
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        if number % 5 == 0:
            special = rng.choice(SPECIAL_TOKENS)
            text = text[: len(text) // 2] + special + text[len(text) // 2 :]
        yield text


def test_three_libraries_agree_on_hostile_strings_and_text_comes_back(tokenizer):
    trained = text_package("rustbpe").Tokenizer()
    trained.train_from_iterator(iter(training_texts()), VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    from_json = text_package("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    from_json.encode_special_tokens = True
    texts = [*hostile_strings(10_000), "", "a" * 5000, " " * 5000, "\n" * 999]
    encoded = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < len(tokenizer.ranks), "a special token"
        assert trained.encode(text) == ids, repr(text)
        assert from_json.encode(text, add_special_tokens=False).ids == ids, repr(text)


def test_ids_bytes_and_sizes(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert sorted(tokenizer.specials.values()) == list(range(VOCAB_SIZE - 9, VOCAB_SIZE))
    text = "déjà vu: 12345"
    assert sum(tokenizer.token_bytes[tokenizer.encode(text)]) == len(text.encode())
    assert not any(re.search("[0-9]{3}", tokenizer.decode([number])) for number in tokenizer.ranks.values())
    for name, number in tokenizer.specials.items():
        assert tokenizer.decode([number]) == name and tokenizer.token_bytes[number] == 0
        ids = tokenizer.encode(f"a{name}b")
        assert max(ids) < len(tokenizer.ranks) and tokenizer.decode(ids) == f"a{name}b", "its name is ordinary text"
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_files_hold_the_same_tokenizer_without_pickle(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON_NAME, RANKS_NAME]
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.ranks, loaded.specials, loaded.pattern) == (tokenizer.ranks, tokenizer.specials, tokenizer.pattern)
    assert loaded.sha256 == tokenizer.sha256
    lines = (line.split() for line in (tmp_path / RANKS_NAME).read_text().splitlines())
    assert {base64.b64decode(token): int(rank) for token, rank in lines} == tokenizer.ranks


def drop(content, *path):
    *outer, last = path
    for key in outer:
        content = content[key]
    del content[last]


DAMAGE = {
    "no byte": lambda c: drop(c, "model", "vocab", "!"),
    "an id twice": lambda c: c["model"]["vocab"].update({"!": 1}),
    "a number that is no integer": lambda c: c["model"]["vocab"].update({"!": True}),
    "a special token as text": lambda c: c["added_tokens"][0].update(special=False),
    "another kind": lambda c: c["model"].update(type="Unigram"),
    "no model": lambda c: drop(c, "model"),
    "a character outside the alphabet": lambda c: c["model"]["vocab"].update({"漢": 5}),
}


@pytest.mark.parametrize("damage", [*DAMAGE, b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_one_line(tokenizer, tmp_path, damage):
    content = json.loads(tokenizer.to_json())
    if damage in DAMAGE:
        DAMAGE[damage](content)
    (tmp_path / JSON_NAME).write_bytes(json.dumps(content).encode() if damage in DAMAGE else damage)
    with pytest.raises(UserError, match=r"is not a byte-level BPE tokenizer of `trm tokenizer train` \(.+\); write it"):
        Tokenizer.load(tmp_path)


def test_too_little_text_for_the_vocabulary():
    with pytest.raises(UserError, match="the texts give only 269 tokens, --vocab-size is 1000; use more text or at"):
        train_tokenizer(["abcd ab"], 1000)


@pytest.fixture
def source(tmp_path):
    """The options of a folder with the training texts, of which two fifths are held out."""
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(training_texts()):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    return ["--source", str(tmp_path / "texts"), "--test-share", "0.4"]


def test_commands(source, tmp_path, capsys):
    folder = str(tmp_path / "tokenizer")
    assert main(["tokenizer", "train", *source, "--vocab-size", "300", "--output-dir", folder]) == 0
    assert main(["tokenizer", "evaluate", folder, *source]) == 0
    shown = capsys.readouterr().out
    assert "300 tokens, 9 of them special" in shown and "0 documents differ from their decoded tokens" in shown
    assert "0 documents have other tokens by tokenizer.json" in shown
    assert f"documents of {tmp_path / 'texts'}, and short texts; 300 tokens" in shown
    assert main(["tokenizer", "inspect", folder, "--text", "<|bos|>", "--longest", "2"]) == 0
    assert "7 bytes, 7 tokens" in capsys.readouterr().out
    assert main(["tokenizer", "inspect", folder, "--text", "\U0001f642", "--longest", "0"]) == 0
    emoji = capsys.readouterr().out
    assert all(f"'<0x{byte:02X}>'" in emoji for byte in "\U0001f642".encode()) and "\ufffd" not in emoji
    assert main(["tokenizer", "weigh"]) == 2
    assert "use one of train, evaluate, inspect" in capsys.readouterr().err


def test_the_tokenizer_of_a_data_set_is_measured_on_its_held_out_text(source, tmp_path, capsys):
    folder = str(tmp_path / "set")
    assert main(["build-data", "text", *source, "--vocab-size", "300", "--output-dir", folder]) == 0
    capsys.readouterr()
    assert main(["tokenizer", "evaluate", folder]) == 0
    heading, _, figures, *texts = capsys.readouterr().out.splitlines()
    assert heading.startswith(f"held-out text of {folder}, and short texts; 300 tokens")
    assert [line.split()[0] for line in texts[:4]] == list(SAMPLES)
    held_out = [text for text in training_texts() if is_test(text, 0, 0.4)]
    size = sum(len(text.encode()) for text in held_out)
    assert figures.split()[:3] == ["test", str(len(held_out)), f"{size:,}"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(
        UserError, match=r"needs the package tiktoken; install it with `pip install 'trm-bridge\[text\]'`"
    ):
        text_package("tiktoken")


@pytest.mark.usefixtures("nanochat")
def test_the_published_tokenizer_gives_the_same_ids(tokenizer):
    from nanochat.tokenizer import RustBPETokenizer

    published = RustBPETokenizer.train_from_iterator(iter(training_texts()), VOCAB_SIZE)
    texts = list(hostile_strings(500))
    assert [published.encode(text) for text in texts] == tokenizer.encode_batch(texts)
    assert [published.encode_special(name) for name in SPECIAL_TOKENS] == list(tokenizer.specials.values())
