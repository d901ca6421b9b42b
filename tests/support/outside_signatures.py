"""Models of a user with different signatures of the constructor; each stores its arguments."""

from __future__ import annotations

import collections.abc
import typing

from torch import nn


class Embedder(nn.Module):
    """A plain module: one embedding of size (vocab_size, vocab_size)."""

    def keep(self, values):
        self.values = dict(values)
        self.embed = nn.Embedding(values["vocab_size"], values["vocab_size"])

    def forward(self, inputs):
        return self.embed(inputs)


class AnnotatedDict(Embedder):
    def __init__(self, settings: dict):
        super().__init__()
        self.keep(settings)


class AnnotatedDictOfStrings(Embedder):
    def __init__(self, settings: typing.Dict[str, object], *, bias=True):  # noqa: UP006 (as in older code)
        super().__init__()
        self.keep(settings)


class AnnotatedMapping(Embedder):
    def __init__(self, settings: collections.abc.Mapping[str, object]):
        super().__init__()
        self.keep(settings)


class FromConfig(Embedder):
    """The configuration is an object, which the classmethod creates."""

    def __init__(self, config):
        super().__init__()
        self.keep(config.values)

    @classmethod
    def from_config(cls, values):
        return cls(type("Config", (), {"values": values}))


class NotAnnotated(Embedder):
    def __init__(self, config_dict):
        super().__init__()
        self.keep(config_dict)


class FromConfigIsNoClassmethod(Embedder):
    def __init__(self, vocab_size: int):
        super().__init__()
        self.keep({"vocab_size": vocab_size})

    def from_config(self, values):
        raise AssertionError("an instance method cannot construct")


class OpenEnded(Embedder):
    def __init__(self, vocab_size, **others):
        super().__init__()
        self.keep({"vocab_size": vocab_size} | others)


class TwoDicts(Embedder):
    """Two required parameters are keyword arguments, whatever their annotations."""

    def __init__(self, sizes: dict, vocab_size: int):
        super().__init__()
        self.keep({"vocab_size": vocab_size} | sizes)
