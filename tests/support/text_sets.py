"""Small text data sets, built from documents that are made here."""

import numpy as np

from train_jax.language.text_building import TextData


def text_set(folder, texts, name="set", **options):
    """Builds a data set in the folder, whose documents are in `source` beside it; returns its path."""
    (folder / "source").mkdir()
    for number, text in enumerate(texts):
        (folder / "source" / f"{number}.txt").write_text(text)
    return text_set_of(folder, name, **options)


def text_set_of(folder, name, **options):
    """Builds another data set from the same documents."""
    options = {"vocab_size": 290, "test_share": 0.2, "output_dir": folder / name} | options
    TextData(source=(str(folder / "source"),), **options).build(lambda *_: None)
    return folder / name


def sums(count, lines):
    """Documents of sums of two digits."""
    rng = np.random.default_rng(0)
    for number in range(count):
        of_digits = [f"{a} + {b} = {a + b}" for a, b in rng.integers(10, size=(lines, 2))]
        yield "\n".join([f"sums {number}", *of_digits])
