"""Serves puzzle models: the ACT steps of a puzzle, drawn as they are computed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.puzzles.boards import board_at, caption
from train_jax.puzzles.format import load_split
from train_jax.puzzles.kind import PuzzleInput
from train_jax.puzzles.kinds import Trace, halting_probability, trace_of
from train_jax.puzzles.solving import from_test_set, known_kind
from train_jax.puzzles.stepping import StepAnswers, Stepper, stacked
from train_jax.puzzles.terminal import verdict
from train_jax.run.mixing import data_dirs
from train_jax.run.restore import Restored
from train_jax.serve.app import Metric
from train_jax.serve.gate import Gate, event_stream
from train_jax.serve.limits import ApiError, find_model, read_fields, read_json, refuse_others

TRAJECTORIES = 4
"""Number of trajectories side by side; the programs for this number and for 1 are compiled before any request."""
_SIDE = 252
_SEARCHED = 1000
_SOLVED = 4
"""Test puzzles among which a hard one is searched, and of these the number that the model solves for that."""
_KINDS = ("sudoku", "maze")


@dataclass(frozen=True, kw_only=True)
class SolveFields:
    """The fields of a request to solve a puzzle, besides `model` and `puzzle`."""

    trajectories: Annotated[int, Range(1, TRAJECTORIES)] = 1
    """Number of trajectories: 1, or all that are computed at the same time."""
    views: Annotated[int, Range(1, TRAJECTORIES)] = 1
    """Number of views of the puzzle (the puzzle itself and symmetric images of it) that the trajectories take in turn;
    answers are those to the puzzle itself."""
    noise: Annotated[float, Range(0, 100)] = 0.5
    """Standard deviation of the noise on the latents of all trajectories but the first."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    act_steps: Annotated[int | None, Range(1, 1024)] = None
    """Number of ACT steps; by default the halt limit of the training."""
    cycles: bool = False
    """Also return the answers after the H-cycles within each step."""


class Player:
    """A puzzle model that is served."""

    def __init__(self, name: str, run: Restored):
        """Raises `UserError` unless the run was trained on Sudokus or mazes."""
        self.name = name
        self._run = run
        self._stepper = Stepper(run)
        self.act_steps: int = self._stepper.task.halt_max_steps
        self.kind = known_kind(self._stepper.task.metadata, f"{name} was trained on")
        if self.kind.key.partition("-")[0] not in _KINDS:
            raise UserError(f"{name} was trained on {self.kind.name}s; serve runs of Sudokus or mazes")

    def warm_up(self) -> None:
        """Compiles the programs."""
        tokens = np.ones(self.kind.seq_len, np.int32)
        for trajectories in (1, TRAJECTORIES):
            steps = self._stepper.steps(tokens, trajectories=trajectories)
            for _ in range(2):
                next(steps)

    def steps(self, puzzle: PuzzleInput, fields: SolveFields) -> Iterator[StepAnswers]:
        rows = 1 if fields.trajectories == 1 else TRAJECTORIES
        return self._stepper.steps(
            puzzle.tokens,
            trajectories=rows,
            views=min(fields.views, rows),
            noise=fields.noise,
            seed=fields.seed,
            cycles=fields.cycles,
        )

    def solution(self, text: str) -> str | None:
        """Returns the answer to a puzzle after the last ACT step, its lines separated by `|`; None for another text."""
        try:
            puzzle = self.kind.parse(text)
        except UserError:
            return None
        steps = self._stepper.steps(puzzle.tokens)
        answers = next(itertools.islice(steps, self.act_steps - 1, None))
        return "|".join(self._lines(answers.tokens[0]))

    def describe(self) -> dict[str, Any]:
        drawing = self.kind.drawing
        return {
            "id": self.name,
            "kind": self.kind.name,
            "rows": drawing.rows,
            "cols": drawing.cols,
            "box": drawing.box,
            "act_steps": self.act_steps,
            "trajectories": TRAJECTORIES,
            "step": self._run.step,
        }

    def example(self, index: int) -> str:
        """Returns a puzzle of the test set as text. Raises `UserError` if the data set is not there."""
        puzzle = from_test_set(data_dirs(self._run.config.data_dir)[0], index)
        return "\n".join(self._lines(puzzle.tokens))

    @cached_property
    def hard_example(self) -> int:
        """The number of a test puzzle that takes the model many ACT steps.

        Of the first puzzles, those with the most cells to fill are solved; the last one to be solved is taken.
        """
        data_dir = data_dirs(self._run.config.data_dir)[0]
        split = load_split(data_dir, "test")
        inputs = split.inputs[:_SEARCHED]
        labels = split.labels[:_SEARCHED]
        candidates = np.argsort(-(inputs != labels).sum(axis=1), kind="stable")[:_SOLVED]
        return max(map(int, candidates), key=lambda index: self._steps_until_solved(from_test_set(data_dir, index)))

    def _steps_until_solved(self, puzzle: PuzzleInput) -> int:
        for number, answers in enumerate(itertools.islice(self._stepper.steps(puzzle.tokens), self.act_steps)):
            if _trace(puzzle, [answers], 0).mistakes(1) == []:
                return number
        return self.act_steps

    def _lines(self, tokens: np.ndarray) -> list[str]:
        drawing = self.kind.drawing
        values = self.kind.values(tokens)
        characters = [drawing.character(value).replace(" ", ".") for value in values.tolist()]
        rows = range(0, len(characters), drawing.cols)
        return ["".join(characters[first : first + drawing.cols]) for first in rows]


def first_solution(players: Iterable[Player], text: str) -> str | None:
    """Returns the answer of the first player that reads the puzzle, which depends on its size; None if none does."""
    return next((answer for player in players if (answer := player.solution(text)) is not None), None)


class PuzzleService:
    """Puzzle models by their names; the first one solves for requests that name none."""

    failed = False

    def __init__(self, gate: Gate, players: Iterable[Player]):
        self.players = {player.name: player for player in players}
        self._gate = gate
        self._open = 0
        self._steps = 0
        self._device = asyncio.Lock()

    @property
    def routes(self) -> Sequence[Route]:
        gate = self._gate
        return [
            Route("/v1/puzzles", gate.open(self._list)),
            Route("/v1/puzzles/examples", gate.counted(self._example), methods=["POST"]),
            Route("/v1/puzzles/solve", gate.counted(self._solve), methods=["POST"]),
        ]

    @property
    def metrics(self) -> dict[str, Metric]:
        return {
            "trm_puzzles": ("gauge", "puzzles that are solved", {"": self._open}),
            "trm_act_steps_total": ("counter", "ACT steps of puzzles", {"": self._steps}),
        }

    def close(self) -> None:
        """Does nothing: steps are computed for requests only."""

    def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [player.describe() for player in self.players.values()]})

    async def _example(self, request: Request, content: bytes) -> Response:
        body = read_json(content)
        refuse_others(body, ("model", "index", "hard"), {})
        player = find_model(self.players, body.get("model"))
        index = body.get("index", 0)
        if body.get("hard") is True:
            async with self._device:
                index = await _or_refusal(lambda: player.hard_example, "hard")
        if type(index) is not int:
            raise ApiError(400, "index is not a whole number; use the number of a test puzzle, from 0", "index")
        return JSONResponse({"puzzle": await _or_refusal(partial(player.example, index), "index"), "index": index})

    async def _solve(self, request: Request, content: bytes) -> Response:
        body = read_json(content)
        refuse_others(body, ("model", "puzzle", *(each.name for each in dataclasses.fields(SolveFields))), {})
        player = find_model(self.players, body.get("model"))
        fields = read_fields(SolveFields, body)
        text = body.get("puzzle")
        if not isinstance(text, str):
            raise ApiError(400, "puzzle is not a text; write one character for each cell", "puzzle")
        puzzle = await _or_refusal(partial(player.kind.parse, text), "puzzle")
        if self._open >= max(1, self._gate.limits.queue):
            raise ApiError(429, f"{self._open} puzzles are solved; try again later", code="queue_full", retry_after=1)
        return event_stream(self._events(player, puzzle, fields))

    async def _events(self, player: Player, puzzle: PuzzleInput, fields: SolveFields) -> AsyncGenerator[str]:
        self._open += 1
        try:
            answers: list[StepAnswers] = []
            steps = player.steps(puzzle, fields)
            for _ in range(fields.act_steps or player.act_steps):
                async with self._device:  # requests take turns
                    answers.append(await asyncio.to_thread(next, steps))
                self._steps += 1
                traces = [_trace(puzzle, answers, row) for row in range(len(answers[0].tokens))]
                if len(answers) == 1:
                    drawing = str(board_at(traces[0], 0, label="input", side=_SIDE))
                    yield json.dumps({"name": puzzle.name, "input": drawing})
                drawn = [_drawn(trace) | {"cycles": _cycles(puzzle, answers, row)} for row, trace in enumerate(traces)]
                yield json.dumps({"step": len(answers), "trajectories": drawn})
            verdicts = [verdict(trace, unique=puzzle.unique) for trace in traces]
            yield json.dumps({"verdicts": verdicts})
            yield "[DONE]"
        finally:
            self._open -= 1


async def _or_refusal(compute: Any, field: str) -> Any:
    """Returns what is computed in a thread; a `UserError` becomes an `ApiError` about the field."""
    try:
        return await asyncio.to_thread(compute)
    except UserError as error:
        raise ApiError(400, f"{field}: {error}", field) from None


def _trace(puzzle: PuzzleInput, answers: Sequence[StepAnswers], row: int) -> Trace:
    tokens, logits = (each[:, row] for each in stacked(answers))
    return trace_of(puzzle.kind, puzzle.tokens, tokens, logits, puzzle.solution)


def _cycles(puzzle: PuzzleInput, answers: Sequence[StepAnswers], row: int) -> list[dict[str, Any]]:
    """Returns the drawings within the last step."""
    *before, last = answers
    made = []
    for number, tokens in enumerate(() if last.cycles is None else last.cycles, start=1):
        trace = _trace(puzzle, [*before, last._replace(tokens=tokens)], row)
        wrong = int(trace.wrong(trace.act_steps).sum())
        text = f"ACT step {trace.act_steps}, H-cycle {number}" + (f", {wrong} wrong" if wrong else "")
        made.append({"board": str(board_at(trace, trace.act_steps, label=text, side=_SIDE)), "caption": text})
    return made


def _drawn(trace: Trace) -> dict[str, Any]:
    step = trace.act_steps
    text = caption(trace, trace.act_steps)
    return {
        "board": str(board_at(trace, step, label=text, side=_SIDE)),
        "caption": text,
        "halting_probability": halting_probability(trace.q_halt_logits[-1]),
        "wrong": None if trace.solution is None else int(trace.wrong(step).sum()),
        "solved": trace.mistakes(step) == [],
    }
