"""The tokenizer of a data set of instructions, which puts a prompt in the form that samples have in training."""

from __future__ import annotations

from train_jax.errors import UserError
from train_jax.language.instructions.data import InstructionSet
from train_jax.language.tokenizer import InstructionForm, Tokenizer

_CONDITION = "direct"


def instruction_tokenizer(directory: str, tokenizer_dir: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a data set; the tokens that pad its vocabulary are special ones.

    Its `tokenizer.json` is in `tokenizer_dir`, by default in the folder of the data set; a published one may have none.
    Prompts have the condition `direct`, or the first one without it. Raises `UserError` for damaged data.
    """
    tokenizer_dir = tokenizer_dir or directory
    data = InstructionSet(directory)
    tokenizer = Tokenizer.load(tokenizer_dir)
    unused = (f"<|unused_{number}|>" for number in range(tokenizer.vocab_size, data.vocab_size))
    tokenizer = Tokenizer(tokenizer.ranks, tokenizer.pattern, (*tokenizer.specials, *unused))
    info = data.metadata["tokenizer_info"]
    try:
        conditions = info["condition_mapping"]
        condition = conditions.get(_CONDITION) or next(iter(conditions.values()))
        begin, end, stop = ([tokenizer.specials[info[name]]] for name in ("boq", "eoq", "eoa"))
        tokenizer.instructions = InstructionForm((*begin, tokenizer.specials[condition]), *end, *stop)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{directory}/metadata.json names a token that is not special in {tokenizer_dir}/tokenizer.json ({error}); "
            "give the tokenizer of the data set, or build it with `trm build-data instructions`"
        ) from None
    return tokenizer
