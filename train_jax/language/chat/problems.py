"""Problems: questions with their right answers, to train a chat model with and to measure it by.

A problem is a function of the name of the problems, their split, its number and the seed. The content of an item, such
as a word to spell, decides its split by a hash, whatever the seed is, so that train and test never share one.
"""

from __future__ import annotations

import itertools
import platform
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

from train_jax.errors import UserError, pip_install
from train_jax.language.chat.calculator import Functions, calculate
from train_jax.language.chat.conversations import Conversation, Part, assistant, parse_conversation, user
from train_jax.language.documents import STANDARD_LIBRARY, is_test, list_files
from train_jax.language.tokenizer import text_package
from train_jax.language.wordnet import Gloss, common_glosses, package_folder, wordnet_folder
from train_jax.storage.storage import path_of

Split = Literal["train", "test"]
Kind = Literal["generative", "categorical", "dialogue"]
"""A generative problem is answered by a text, a categorical one by one of some letters. Dialogues have no right answer:
they are for training only."""

TEST_SHARE = 0.125
LETTERS = "ABCD"
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_TEXT = re.compile(r'"""(.*?)"""', re.DOTALL)
_WORD = re.compile(r"(?<![\w.'\"-])[a-z]{3,10}(?=[ ,;.\n])(?!\.\w)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Problem(NamedTuple):
    """A question and its answer."""

    conversation: Conversation
    """The last message is the right answer."""
    letters: tuple[str, ...] = ()
    """The possible answers of a categorical problem."""


class Problems(ABC):
    """The problems of a split."""

    name: ClassVar[str]
    kind: ClassVar[Kind] = "generative"
    baseline: ClassVar[float] = 0.0
    """The accuracy of a random answer."""
    license: ClassVar[str] = "generated"
    """The license of what the problems are made from."""
    has_tool: ClassVar[bool] = True
    """True if the calculator answers the calls of the model."""
    functions: ClassVar[Functions] = {}
    """Functions that the calculator knows besides arithmetic."""
    runs_code: ClassVar[bool] = False
    """True if `is_right` executes what the model wrote."""
    OPTIONS: ClassVar[dict[str, Any]] = {}
    """Names and default values."""
    takes_any_option: ClassVar[bool] = False
    """True if there are further options, whose values are True, False, numbers or texts."""

    def __init__(self, split: Split, *, seed: int = 0, count: int | None = None, folder: str = "", **options: Any):
        """Makes or reads the items.

        Args:
          count: problems; by default all that there are, or 1 000 where they have no end. If there are fewer, training
            items come again, perhaps in other words, and the test split is smaller.
          folder: of files that some problems are made from.
          options: some of `OPTIONS`.

        Raises `UserError` for an option out of range, or without data that the problems are made from.
        """
        self.split = split
        self.seed = seed
        self.folder = folder
        self.options = self.OPTIONS | options
        self._items = self.items(count)
        distinct = len(self._items)
        self._count = count if count is not None and split == "train" and distinct else min(count or distinct, distinct)

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def items(self, count: int | None) -> Sequence[Any]:
        """Returns the items of the split, if there is no end of them `count`."""

    @abstractmethod
    def make(self, item: Any, rng: Random) -> Problem:
        """Returns the problem of an item; `rng` chooses among equally good words."""

    def problem(self, index: int) -> Problem:
        if not 0 <= index < self._count:
            raise IndexError(index)
        rng = Random(f"{self.name} {self.split} {self.seed} {index}")
        return self.make(self._items[index % len(self._items)], rng)

    def conversation(self, index: int) -> Conversation:
        """Returns the question and the right answer."""
        return self.problem(index).conversation

    def is_right(self, index: int, answer_text: str) -> bool:
        """Returns whether a text, without the calls of a tool and their outputs, is a right answer."""
        return answer_text.strip() == self.conversation(index)[-1].text.strip()

    def _of_split(self, items: Iterable[tuple[str, Any]]) -> list[Any]:
        """Returns the items of the split, given with the content that decides, in a random order."""
        chosen = [item for content, item in items if split_of(content) == self.split]
        Random(f"{self.name} {self.seed}").shuffle(chosen)
        return chosen


def split_of(content: str) -> Split:
    """Returns the split of an item by its content."""
    return "test" if is_test(content, 0, TEST_SHARE) else "train"


def marked_number(text: str) -> str | None:
    """Returns the number after the first `####`, without commas, as the answers of GSM8K have it."""
    found = _MARKED.search(text)
    return found[1].replace(",", "") if found else None


def multiple_choice(asked: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """Returns the question as published: each choice before its letter, which is a token of its own."""
    lines = [f"- {choice}={letter}" for letter, choice in zip(letters, choices, strict=True)]
    parts = (f"Multiple Choice question: {asked}", *lines, "", "Respond only with the letter of the correct answer.")
    return "\n".join(parts)


def said(asked: str, *answer: str | Part) -> Problem:
    return Problem((user(asked), assistant(*answer)))


# ---- arithmetic


class Arithmetic(Problems):
    """Sums, differences and products of small numbers, without the calculator, which the question says because a model
    may learn both. With several operations, the answer has a step for each, in `steps` of 100 problems, and in the
    others it is the result alone."""

    name = "arithmetic"
    has_tool = False
    OPTIONS: ClassVar[dict[str, Any]] = {"operations": 1, "digits": 2, "operators": "+-*", "steps": 100}
    _QUESTIONS = (
        "What is {} in your head?", "Without the calculator: {}", "In your head: {} = ?", "Calculate {} in your head.",
        "How much is {}, without the calculator?",
    )  # fmt: skip

    def items(self, count: int | None) -> Sequence[str]:
        operators = self.options["operators"]
        for name, least, most in (("operations", 1, 8), ("digits", 1, 6), ("steps", 0, 100)):
            if not least <= self.options[name] <= most:
                raise UserError(
                    f"the task arithmetic has the option {name}={self.options[name]}; use {least} to {most}"
                )
        if not operators or set(operators) - set("+-*"):
            raise UserError(f"the task arithmetic has the option operators={operators}; use some of +-*")
        asked = sorted((name, value) for name, value in self.options.items() if name != "steps")
        rng = Random(f"arithmetic {asked} {self.split} {self.seed}")
        items: list[str] = []
        seen: set[str] = set()
        misses = 0
        while len(items) < (1000 if count is None else count):
            expression = self._expression(rng)
            content = _without_order(expression)
            if split_of(content) != self.split:
                continue
            misses = misses + 1 if content in seen else 0
            if misses and misses < 100:
                continue
            if misses:  # nearly all have been used
                if self.split == "test":
                    break
                seen.clear()
            seen.add(content)
            items.append(expression)
        return items

    def _expression(self, rng: Random) -> str:
        terms = [str(rng.randrange(10 ** self.options["digits"])) for _ in range(self.options["operations"] + 1)]
        return terms[0] + "".join(f" {rng.choice(self.options['operators'])} {term}" for term in terms[1:])

    def make(self, item: str, rng: Random) -> Problem:
        asked = rng.choice(self._QUESTIONS).format(item)
        steps = _steps(item)
        return said(asked, " = ".join(steps if rng.randrange(100) < self.options["steps"] else steps[-1:]))

    def is_right(self, index: int, answer_text: str) -> bool:
        """The last number of the text is the answer."""
        numbers = _NUMBER.findall(answer_text)
        return numbers[-1:] == [calculate(self._items[index % len(self._items)])]


class Calculator(Arithmetic):
    """Arithmetic answered with the calculator. A third of the questions have words in place of the operators."""

    name = "calculator"
    has_tool = True
    _QUESTIONS = ("What is {}?", "{}", "{} = ?", "Calculate {}.", "How much is {}?", "Compute {}", "what's {}")
    _WORDS = str.maketrans({"+": "plus", "-": "minus", "*": "times"})

    def make(self, item: str, rng: Random) -> Problem:
        value = str(calculate(item))
        answer = (Part("python", item), Part("python_output", value), value)
        expression = item if rng.randrange(3) else item.translate(self._WORDS)
        return said(rng.choice(self._QUESTIONS).format(expression), *answer)


def _without_order(expression: str) -> str:
    """Returns the same text for `a + b` and `b + a`."""
    match expression.split():
        case [a, ("+" | "*") as operator, b]:
            return f"{max(a, b)} {operator} {min(a, b)}"
    return expression


def _steps(expression: str) -> list[str]:
    """Returns what is left after each operation: products first, from left to right."""
    terms = expression.split()
    steps = []
    while len(terms) > 1:
        place = terms.index("*") if "*" in terms else 1
        terms[place - 1 : place + 2] = [str(calculate(" ".join(terms[place - 1 : place + 2])))]
        steps.append(" ".join(terms))
    return steps


# ---- words


@cache
def words() -> tuple[str, ...]:
    """Returns the words of 3 to 10 letters in the documentation of at least two modules of Python, sorted."""
    modules: Counter[str] = Counter()
    for file in list_files([STANDARD_LIBRARY]):
        texts = _TEXT.findall(file.path.read_text(encoding="utf-8", errors="ignore"))
        modules.update({word for text in texts for word in _WORD.findall(text)})
    return tuple(sorted(word for word, count in modules.items() if count > 1))


class Spelling(Problems):
    """A word is spelled."""

    name = "spelling"
    license = f"words of the documentation of Python {platform.python_version()} (PSF-2.0)"
    _QUESTIONS = ("Spell the word: {}", "Spell {}", "How do you spell {}?", "What are the letters of {}?")

    def items(self, count: int | None) -> Sequence[str]:
        return self._of_split((word, word) for word in words())

    def make(self, item: str, rng: Random) -> Problem:
        return said(rng.choice(self._QUESTIONS).format(item), f"{item}:{','.join(item)}")


class Counting(Spelling):
    """The letters of a word are counted, by hand and then with the calculator."""

    name = "counting"
    _QUESTIONS = (
        "How many {letter} are in {word}?",
        "How many times does the letter {letter} occur in {word}?",
        "Count the letter {letter} in the word {word}",
        "how often is there a '{letter}' in '{word}'",
        "In {word}, how many {letter} do you see?",
        "Number of {letter} in {word}?",
    )

    def make(self, item: str, rng: Random) -> Problem:
        letter = rng.choice(item if rng.random() < 0.9 else "abcdefghijklmnopqrstuvwxyz")
        lines = [f"{item}:{','.join(item)}"]
        count = 0
        for number, each in enumerate(item, 1):
            count += each == letter
            lines.append(f"{number}:{each}" + (f" {letter}={count}" if each == letter else ""))
        lines.append(f"I count {count}. The calculator says ")
        call = (Part("python", f"'{item}'.count('{letter}')"), Part("python_output", str(count)))
        asked = rng.choice(self._QUESTIONS).format(letter=letter, word=item)
        return said(asked, "\n".join(lines), *call, f"{count}.\n#### {count}")

    def is_right(self, index: int, answer_text: str) -> bool:
        return marked_number(answer_text) == marked_number(self.conversation(index)[-1].text)


class Glosses(Problems):
    """The word of a meaning is chosen from four."""

    name = "glosses"
    kind = "categorical"
    baseline = 0.25
    license = "WordNet (WordNet licence)"

    def items(self, count: int | None) -> Sequence[Gloss]:
        folder = wordnet_folder(self.folder)
        items = self._of_split((gloss.words[0], gloss) for gloss in common_glosses(folder))
        return items if len({gloss.words[0] for gloss in items}) >= len(LETTERS) else []

    def make(self, item: Gloss, rng: Random) -> Problem:
        choices = [item.words[0]]
        while len(choices) < len(LETTERS):
            other = rng.choice(self._items)
            if other.words[0] not in choices and (other.part == item.part or rng.random() < 0.05):
                choices.append(other.words[0])
        rng.shuffle(choices)
        asked = multiple_choice(f"Which word means: {item.meaning}?", LETTERS, choices)
        answer = LETTERS[choices.index(item.words[0])]
        return Problem((user(asked), assistant(answer)), tuple(LETTERS))


# ---- talk


class Identity(Problems):
    """The model says its name, also when it is greeted; held out are other questions and not other answers."""

    name = "identity"
    OPTIONS: ClassVar[dict[str, Any]] = {"name": "Tiny"}
    _BEGINNINGS = ("", "Hi! ", "Hello, ", "Good morning. ", "Excuse me, ", "Tell me: ", "One question: ", "Hey, ")
    _QUESTIONS = (
        "who are you?", "what is your name?", "what are you called?", "what should I call you?", "do you have a name?",
        "who am I talking to?", "which model are you?", "what are you?", "can you introduce yourself?", "your name?",
        "are you a person?", "are you ChatGPT?",
    )  # fmt: skip
    _GREETINGS = ("hi", "hello", "hey", "hi there", "hello there", "good morning", "good evening")
    _ANSWERS = (
        "I am {}, a small language model.",
        "My name is {}. I am a small language model.",
        "I'm {}, a language model that was trained from scratch.",
    )

    def items(self, count: int | None) -> Sequence[str]:
        questions = [beginning + asked for beginning in self._BEGINNINGS for asked in self._QUESTIONS]
        questions += [greeting + end for greeting in self._GREETINGS for end in ("", "!", ".")]
        return self._of_split((asked, asked[0].upper() + asked[1:]) for asked in questions)

    def make(self, item: str, rng: Random) -> Problem:
        asked = item if rng.randrange(3) else item.lower()
        return said(asked, rng.choice(self._ANSWERS).format(self.options["name"]))

    def is_right(self, index: int, answer_text: str) -> bool:
        return re.search(rf"\b{re.escape(self.options['name'])}\b", answer_text) is not None


class SmallTalk(Problems):
    """Dialogues of the package `chatterbot-corpus`, or of a folder with files of its kind."""

    name = "smalltalk"
    kind = "dialogue"
    license = "chatterbot-corpus (BSD-3-Clause)"

    def items(self, count: int | None) -> Sequence[Conversation]:
        where = self.folder
        installed = package_folder("chatterbot_corpus")
        if not where and installed is None:
            raise UserError(f"smalltalk needs the package chatterbot-corpus; run {pip_install('chat')}")
        folder = path_of(where) if where or installed is None else installed / "data" / "english"
        talks = [talk for path in sorted(folder.glob("*.yml")) for talk in _dialogues(path)]
        return self._of_split((talk[0].text.lower(), talk) for talk in talks)

    def make(self, item: Conversation, rng: Random) -> Problem:
        return Problem(item)


def _dialogues(path: Path) -> list[Conversation]:
    """Reads a file; a dialogue ends with the last answer. Raises `UserError` for another file."""
    yaml = text_package("yaml")
    try:
        talks = [[str(line).strip() for line in talk] for talk in yaml.safe_load(path.read_text())["conversations"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(f"{error}".split())[:100]
        raise UserError(f"{path} is not a file of chatterbot-corpus ({reason}); correct or remove it") from None
    return [_dialogue(talk[: len(talk) // 2 * 2]) for talk in talks if len(talk) > 1]


def _dialogue(lines: Sequence[str]) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    return parse_conversation([{"role": role, "content": line} for role, line in zip(roles, lines, strict=False)])
