"""One thread that owns an engine: requests reach it, and their texts leave it, by queues.

The thread never waits for a client: an answer whose queue is full, since nobody reads it, is cancelled. The engine has
the weights of one checkpoint at a time. Answers begin in the order of their requests; one with another checkpoint waits
until the answers before it have ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from train_jax.core.state import Arrays
from train_jax.errors import UserError
from train_jax.language.chat.text_stream import Piece, joined
from train_jax.language.engine import Engine, Generation
from train_jax.serve.limits import ApiError
from train_jax.serve.protocol import Call

_LOG = logging.getLogger(__name__)


class Part(NamedTuple):
    """A piece by which a choice of an answer grows."""

    choice: int
    piece: Piece
    finish: str | None


class Answer:
    """The texts computed so far for a request; made in the event loop that reads them."""

    def __init__(self, call: Call, step: int, unread: int):
        """`step` is the step of the checkpoint that answers."""
        self.call = call
        self.step = step
        self.texts = [call.new_text() for _ in call.requests]
        self.rows: list[Generation] = []
        self.taken = [0] * len(call.requests)
        """The number of tokens in the text of each choice."""
        self.finishes: list[str | None] = [None] * len(call.requests)
        self._parts: deque[Part] = deque()
        self._unread = unread
        self._error = None
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of the prompts and of all choices."""
        requests = self.call.requests
        prompt = sum(len(request.prompt) + len(request.given) for request in requests if request.sample == 0)
        written = sum(max(0, len(row.tokens) - len(row.request.given)) for row in self.rows)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    async def parts(self) -> AsyncIterator[Part]:
        """Yields the parts as they come. Raises `ApiError` if the answer ended without being complete."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            ended = self._ended  # before the last look at the queue
            while self._parts:
                yield self._parts.popleft()
            if ended:
                if self._error is not None:
                    raise self._error
                return

    def put(self, part: Part) -> bool:
        """Returns false if too many parts were not read."""
        if len(self._parts) >= self._unread:
            return False
        self._parts.append(part)
        return self._wake()

    def end(self, error: ApiError | None = None) -> None:
        self._error = error
        self._ended = True
        self._wake()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop was closed
            return False
        return True


class EngineThread:
    """Submits, steps and cancels in a thread of its own; it starts with the object."""

    def __init__(
        self, engine: Engine, *, most_rows: int, unread: int, step: int, weights: Callable[[int], tuple[Arrays, Arrays]]
    ):
        """Sets the limits: `most_rows` rows are computed or wait; an answer may have `unread` unread parts.

        The engine has the weights of checkpoint `step`; `weights` returns those of another checkpoint.
        """
        self.engine = engine
        self._most_rows = most_rows
        self._unread = unread
        self.step = step
        self._weights = weights
        self._changed = threading.Condition()
        self._new: list[Answer] = []
        self._cancelled: list[Answer] = []
        self._waiting: deque[Answer] = deque()
        """Answers that have not begun."""
        self._open: list[Answer] = []
        self.rows = 0
        """Rows that are computed or wait."""
        self.failed = self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- called by the event loop

    def submit(self, call: Call, step: int) -> Answer:
        """Raises `ApiError` if too many rows wait, or if the request has more than can ever wait."""
        rows = len(call.requests)
        if rows > self._most_rows:
            raise ApiError(400, f"the request asks for {rows} answers; use at most {self._most_rows}", "n")
        with self._changed:
            if self.failed or self._closed:
                raise ApiError(503, "the engine has stopped; start the server again")
            if self.rows + rows > self._most_rows:
                raise ApiError(
                    429, f"{self.rows} answers are computed or wait; try again later", code="queue_full", retry_after=1
                )
            self.rows += rows
            answer = Answer(call, step, self._unread)
            self._new.append(answer)
            self._changed.notify()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Frees the slots of an answer that nobody needs any more, unless it has ended."""
        with self._changed:
            self._cancelled.append(answer)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; answers that are not complete get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._obey():
                self.engine.step()
                for answer in list(self._open):
                    self._deliver(answer)
        except BaseException:
            _LOG.exception("the engine failed")
            self.failed = True
        with self._changed:
            self._closed = True
        for answer in self._open + self._new:
            answer.end(ApiError(503, "the engine has stopped; start the server again"))

    def _obey(self) -> bool:
        """Waits until there is work, submits and cancels; returns false after `close`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._new or self._cancelled or self._closed or self._waiting or not self.engine.idle
            )
            if self._closed:
                return False
            new = self._new
            cancelled = self._cancelled
            self._new = []
            self._cancelled = []
        self._open += new
        self._waiting += new
        for answer in cancelled:
            self._end(answer)
        self._begin()
        return True

    def _begin(self) -> None:
        """Submits the rows of answers, up to one that needs other weights while rows are computed."""
        while self._waiting:
            answer = self._waiting[0]
            if answer.step != self.step:
                if not self.engine.idle:
                    return
                try:
                    self.engine.load(*self._weights(answer.step))
                except UserError as error:  # such as a checkpoint that was deleted
                    self._end(answer, ApiError(404, str(error), "model", "model_not_found"))
                    continue
                self.step = answer.step
            self._waiting.popleft()
            answer.rows = [self.engine.submit(request) for request in answer.call.requests]

    def _deliver(self, answer: Answer) -> None:
        for number, row in enumerate(answer.rows):
            if answer.finishes[number] is None and not self._deliver_choice(answer, number, row):
                self._end(answer, ApiError(408, "the answer was not read"))
                return
        if None not in answer.finishes:
            self._end(answer)

    def _deliver_choice(self, answer: Answer, number: int, row: Generation) -> bool:
        """Passes the new text of a choice on; returns false if nobody reads it."""
        text = answer.texts[number]
        content = row.content
        new = slice(answer.taken[number], len(content))
        first = answer.call.first_tokens[number] if answer.call.echo and new.start == 0 else None
        answer.taken[number] = len(content)
        pieces = [] if first is None or not content else [text.feed([first], [None])]
        pieces.append(text.feed(content[new], row.log_probs[new], row.most_probable[new]))
        piece = joined(pieces)
        finish = None
        if text.stopped:
            self.engine.cancel(row)
        if row.finish is not None:
            if answer.call.echo and row.finish == "stop" and not text.stopped:
                text.end_token(row.log_probs[-1], row.most_probable[-1])
            rest = text.finish()
            piece = joined([piece, rest])
            finish = answer.finishes[number] = "length" if row.finish == "length" and not text.stopped else "stop"
        return not (piece.parts or piece.tokens or finish) or answer.put(Part(number, piece, finish))

    def _end(self, answer: Answer, error: ApiError | None = None) -> None:
        if answer in self._open:
            self._open.remove(answer)
            if answer in self._waiting:
                self._waiting.remove(answer)
            for row in answer.rows:
                self.engine.cancel(row)
            with self._changed:
                self.rows -= len(answer.call.requests)
            answer.end(error)
