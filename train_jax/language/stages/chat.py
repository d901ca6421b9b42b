"""`trm chat RUN_DIR`: a conversation with a language model in the terminal."""

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError, brief
from train_jax.language.chat.calculator import answer_ends
from train_jax.language.chat.conversations import render_prompt, special_tokens, user
from train_jax.language.chat.text_stream import TextStream
from train_jax.language.engine import Engine, Request
from train_jax.language.generation import TextModel, with_cycles
from train_jax.language.sampling import Sampling
from train_jax.run.restore import restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices

_SHOWN_AS = {"<|python_start|>": "[", "<|python_end|>": "]", "<|output_start|>": "[= ", "<|output_end|>": "]"}
_NO_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {*map(ord, "\n\t")}, "\ufffd")
"""Replaces the control characters, which could change the state of a terminal."""
_COMMANDS = "/clear begins a new conversation, /exit ends"


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk to a language model that was trained on conversations or instructions. Each line is a message.

    The calls of the calculator and their outputs appear as `[12*3][= 36]`. A model of conversations reads the whole
    conversation, a model of instructions reads each message alone. /clear begins a new conversation, Ctrl-C stops an
    answer, and /exit or Ctrl-D ends the program. The messages may come from a pipe.
    """

    run_dir: Annotated[str, tyro.conf.Positional]
    """Folder of a run of `trm train`, also gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    max_tokens: Annotated[int, Range(1, 10**6)] = 256
    """Maximum number of tokens of an answer."""
    temperature: Annotated[float, Range(0, 100)] = 0.6
    """Divides the logits; 0 chooses the most probable token (greedy)."""
    top_k: Annotated[int, Range(0, 2**24)] = 50
    """Draw from this many of the most probable tokens; 0 for all."""
    top_p: Annotated[float, Range(0, 1, low_excluded=True)] = 1.0
    """Draw from the most probable tokens that together have this probability."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the random numbers."""
    cycles: Annotated[int, Range(0, 1024)] = 0
    """Number of cycles of HRM-Text; 0 for the number used in training."""
    data_dir: str | None = None
    """Folder with tokenizer.json; by default the data set of the run."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


class Session:
    """A conversation as tokens, which the engine caches from turn to turn; a model of instructions keeps none."""

    def __init__(self, model: TextModel, config: Chat):
        self._tokenizer = model.tokenizer
        self._config = config
        self._capacity = model.positions
        asked_alone = model.tokenizer.instructions is not None
        self._end = () if asked_alone else (special_tokens(model.tokenizer)["<|assistant_end|>"],)
        self._shown_as = {number: _SHOWN_AS.get(name, "") for name, number in model.tokenizer.specials.items()}
        self._engine: Engine = model.engine_of(1, self._capacity)
        self._sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        self.clear()

    def clear(self) -> None:
        self.tokens: tuple[int, ...] = ()

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yields the answer to a message as it comes; closing the iterator ends the answer.

        Raises `UserError` for a text that is not valid UTF-8, and if the conversation is too long.
        """
        turn = render_prompt(self._tokenizer, (user(text),))
        prompt = (*self.tokens, *turn[1:]) if self.tokens else turn
        room = self._capacity + 1 - len(prompt)
        if room < 1:
            remedy = "begin another by /clear" if self.tokens else "use a shorter message"
            raise UserError(f"the conversation has {len(prompt)} tokens, the model reads {self._capacity}; {remedy}")
        row = self._engine.submit(
            Request(
                prompt=prompt,
                max_tokens=min(self._config.max_tokens, room),
                sampling=self._sampling,
                seed=self._config.seed,
                **answer_ends(self._tokenizer),
            )
        )
        stream = TextStream(self._tokenizer, shown_as=self._shown_as)
        taken = 0
        try:
            while row.finish is None:
                self._engine.step()
                new = slice(taken, len(row.content))
                taken = len(row.content)
                yield stream.feed(row.content[new], row.log_probs[new]).text
            yield stream.finish().text
        finally:
            self._engine.cancel(row)
            self.tokens = (*prompt, *row.content, *self._end) if self._end else ()


def main(config: Chat) -> None:
    use_on_one_host(config.platform)
    run = with_cycles(restore(config.run_dir, step=config.step), config.cycles)
    session = Session(TextModel(run, config.data_dir, Devices(1)), config)
    if sys.stdin.isatty():
        print(f"{config.run_dir}: {_COMMANDS}")
    for text in _messages():
        if text == "/clear":
            session.clear()
        elif text == "/exit":
            return
        elif text.startswith("/"):
            print(f"trm: unknown command {brief(text)}; {_COMMANDS}", file=sys.stderr)
        elif text:
            try:
                _print_answer(session, text)
            except UserError as error:
                print(f"trm: {error}", file=sys.stderr)


def _messages() -> Iterator[str]:
    """Yields the lines of the terminal, which can be edited, or of a pipe."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (`input` uses it from now on)
    while True:
        try:
            yield input("> " if terminal else "").strip()
        except EOFError:
            print(end="\n" if terminal else "")
            return
        except UnicodeDecodeError:
            raise UserError("a message is not valid UTF-8; correct it") from None


def _print_answer(session: Session, text: str) -> None:
    """Prints an answer as it comes. Ctrl-C ends it between two dispatches, never in the middle of one."""
    interrupted = threading.Event()
    terminal = sys.stdout.isatty()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        with contextlib.closing(session.answer(text)) as pieces:
            for piece in pieces:
                print(piece.translate(_NO_CONTROL) if terminal else piece, end="", flush=True)
                if interrupted.is_set():
                    break
        print(flush=True)
    finally:
        signal.signal(signal.SIGINT, before)
