"""A stand-in for the package `reasoning_gym`: sums with a verifier."""

import dataclasses
import types


@dataclasses.dataclass
class Sums:
    """Questions are `1 + 0 = ?` to `limit + 0 = ?`, again and again."""

    seed: int
    size: int
    limit: int = 1000

    def __post_init__(self):
        assert self.limit > 0, "limit must be\npositive"

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        value = (self.seed + number) % self.limit + 1
        return {"question": f"{value} + 0 = ?", "answer": str(value), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == "fail":
            raise KeyError(answer)
        return 1.0 if answer.removesuffix(".0") == entry["answer"] else 0.5


def module(sets):
    """Returns the package with these data sets."""

    def create_dataset(name, **config):
        if name not in sets:
            raise ValueError(f"Dataset '{name}' not registered")
        return sets[name](**config)

    return types.SimpleNamespace(create_dataset=create_dataset)
