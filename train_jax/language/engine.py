"""Continues prompts with a language model: a fixed number of rows at the same time, each with its own settings.

Four kinds of programs run on the devices. `prefill` computes the keys and values of prompts, padded to one of a few
lengths, and writes them to the places of rows ("slots"); there is one program for each length. `decode` chooses some
tokens of every row and computes their keys and values. If a prompt begins like the tokens of a slot (`prefixes.py`),
`copy` takes the keys and values from there, and `extend` or `decode` computes the rest. The parameters are arguments of
all of them, so that other weights compile nothing.

The schedule is computed on the host from the tokens that `decode` returns: a row that ends makes room for the next
request. What `decode` returns is gathered from all devices, so that every process schedules alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import bridge
from models_torch.cached_attention import attention_with_cache
from models_torch.kv_cache import Buffers, cached_model, continues, positions_of
from train_jax.core.objective import Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import Arrays, TrainState
from train_jax.language.biases import Bias
from train_jax.language.engine_records import (
    MOST_STOP_TOKENS,
    Decoded,
    columns_of,
    control_fields,
    control_of,
    words_of,
)
from train_jax.language.prefixes import BLOCK, Beginning, Held, find_beginning
from train_jax.language.sampling import Sampling, choose_tokens, most_probable, stream_key
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices

# The published modules of 2026 call this function, which without FlashAttention reads the position from a tensor.
bridge.register_function("nanochat.flash_attention:flash_attn.flash_attn_with_kvcache", attention_with_cache)

_SHORTEST_PREFILL = 16
_PREFILL_TOKENS = 64
"""Most tokens of short prompts that are computed together: 16 prompts of 16 tokens take half of the time."""

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    max_tokens: int
    """Largest number of tokens after the prompt, with those that `respond` returns."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0
    """The random numbers belong to the seed, the prompt, the number of the sample and the position of a token."""
    most_probable: int = 0
    """The number of most probable tokens that are returned with each token, at most `sampling.MOST_PROBABLE`."""
    given: tuple[int, ...] = ()
    """Tokens of the row that follow the prompt whatever the model says; they have log-probabilities and end nothing."""
    stop: tuple[int, ...] = ()
    """Tokens that end the row."""
    bias: Bias | None = None
    """What is added to the logits by which a token is chosen. Its tokens are those after `given`."""
    respond: Callable[[Sequence[int]], Sequence[int] | None] | None = None
    """Maps the row's tokens, at one of `stop`, to the tokens that follow, such as the output of a tool, after which
    the model continues; None ends the row. With several processes, it must be a function of the tokens alone.
    """


@dataclass
class Generation:
    """The tokens after a prompt that are computed so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """Tokens after the prompt, with the token that ended the row."""
    log_probs: list[float] = field(default_factory=list)
    """The log-probability of each token under the softmax of the logits."""
    sampling_log_probs: list[float] = field(default_factory=list)
    """The log-probability of each token where it was drawn: after temperature, `top_k` and `top_p`."""
    most_probable: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most probable tokens at each token's place in descending order, as many as the request asks for, with their
    log-probabilities under the softmax of the logits."""
    forced: list[bool] = field(default_factory=list)
    """True if a token came from `respond` and not from the model."""
    finish: Finish | None = None
    """Reason for the end of the row; None before it."""

    @property
    def content(self) -> list[int]:
        """The tokens without the one that ended the row."""
        return self.tokens[:-1] if self.finish == "stop" else self.tokens


@dataclass
class Counts:
    """The work of an engine."""

    prefilled: int = 0
    """Number of computed prompts, without those that continued the tokens of a slot."""
    prefills: int = 0
    """Number of calls of `prefill`."""
    computed: int = 0
    """Number of tokens that `prefill` and `extend` computed, with padding."""
    reused: int = 0
    """Number of tokens of prompts whose keys and values were in a slot."""
    decodes: int = 0
    """Number of calls of `decode`."""
    tokens: int = 0
    """Number of tokens that were chosen or forced, in all rows."""
    places: int = 0
    """Number of tokens that could have been computed: slots times tokens of a dispatch, in calls of `decode`."""

    @property
    def occupancy(self) -> float:
        """The share of the slots' time in which a row was in them."""
        return self.tokens / max(1, self.places)


@dataclass
class _Slot:
    """A row's place on a device."""

    kept: list[int] = field(default_factory=list)
    """The tokens whose keys and values are in the cache."""
    has_logits: bool = True
    """True if the logits are those after the last of these tokens."""
    is_old: bool = False
    """True if some of them were computed with other weights."""
    pending: deque[int] = field(default_factory=deque)
    """Next tokens that do not depend on the model: from the prompt, or from `respond`."""
    unreported: int = 0
    """Number of the next tokens that belong to the prompt."""
    row: Generation | None = None
    bias: Any = None
    """The array that was passed to the device last for this row."""
    stream: Any = None
    """The key data of the row's random numbers."""
    used: int = 0
    """The number of the last dispatch with a row."""


class State(NamedTuple):
    """The rows of a device."""

    cache: Buffers
    logits: Float[Array, "slots vocab_size"]
    """The logits of the next token of each row."""


class Engine:
    """A language model that continues prompts, once it has weights; a program is compiled at its first use.

    With several processes, each one submits the same requests in the same order.
    """

    def __init__(
        self,
        module: Any,
        devices: Devices,
        *,
        slots: int,
        capacity: int,
        tokens_per_dispatch: int = 8,
        both_ways: bool = False,
    ):
        """`module` has a cache that `cached_model` supports.

        Args:
          slots: rows at the same time, on all devices together.
          capacity: tokens in a row's cache; a prompt and what follows it have at most one more.
          tokens_per_dispatch: tokens of a row between two checks whether it has ended.
          both_ways: the tokens of a prompt attend to each other in both directions, so that a longer one has nothing in
            common with it.

        Raises `UserError` if the slots do not divide over the devices.
        """
        self._devices = devices
        self._capacity = capacity
        self._dispatch = tokens_per_dispatch
        self._both_ways = both_ways
        self._local_slots = devices.local_batch_size(slots)
        self._module = module
        self._fn = bridge.export(cached_model(module))
        self._queue: deque[Generation] = deque()
        self._slots = [_Slot() for _ in range(slots)]
        self.counts = Counts()

    @classmethod
    def of_run(cls, run: Restored, devices: Devices, *, rows: int, capacity: int, both_ways: bool = False) -> Engine:
        """Returns the engine of a run with its averaged weights, for at least this many rows at the same time."""
        engine = cls.of_objective(run.objective, devices, rows=rows, capacity=capacity, both_ways=both_ways)
        engine.load_state(run.objective, run.state)
        return engine

    @classmethod
    def of_objective(
        cls, objective: Objective, devices: Devices, *, rows: int, capacity: int, both_ways: bool = False
    ) -> Engine:
        """Returns an engine without weights, for at least this many rows at the same time."""
        slots = -(-rows // devices.count) * devices.count
        return cls(objective.fn.module, devices, slots=slots, capacity=capacity, both_ways=both_ways)

    def load_state(self, objective: Objective, state: TrainState) -> None:
        """Uses the averaged weights of a state from now on; see `load`."""
        self.load(*weights_of(objective, state))

    def load(self, params: Arrays, buffers: Arrays) -> None:
        """Uses these weights, by the names of the module, from now on; forgets the tokens of free slots.

        Rows that have begun continue with the keys and values of the weights before.
        """
        self._weights = self._devices.replicate((_prefixed(params), _prefixed(buffers)))
        for slot in self._slots:
            slot.is_old = slot.row is not None
            if slot.row is None:
                slot.kept = []

    # ---- requests

    def submit(self, request: Request) -> Generation:
        """Starts a request; returns its tokens, which `step` computes.

        Raises `ValueError` for an empty prompt, for more tokens than the cache holds, or for too many stop tokens.
        """
        length = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1 or length > self._capacity + 1:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} after it; use at least one of each "
                f"and at most {self._capacity + 1} together"
            )
        if len(request.stop) > MOST_STOP_TOKENS:
            raise ValueError(f"{len(request.stop)} stop tokens; use at most {MOST_STOP_TOKENS}")
        row = Generation(request)
        self._queue.append(row)
        return row

    def cancel(self, row: Generation) -> None:
        """Ends a row, which has no further tokens."""
        if row.finish is None:
            row.finish = "cancelled"
            self._queue = deque(each for each in self._queue if each is not row)
            for slot in self._slots:
                if slot.row is row:
                    self._free(slot)

    @property
    def slots(self) -> int:
        """The number of rows at the same time, on all devices together."""
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """The number of tokens in a row's cache."""
        return self._capacity

    @property
    def cache_bytes(self) -> int:
        """The memory for keys and values."""
        return sum(array.nbytes for array in jax.tree.leaves(self._state.cache))

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Returns True if every request has ended."""
        return not self._queue and all(slot.row is None for slot in self._slots)

    def complete(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Yields the tokens after each prompt, in the order of the requests."""
        for row in [self.submit(request) for request in requests]:
            while row.finish is None:
                self.step()
            yield row

    def warm_up(self, lengths: Iterable[int]) -> None:
        """Compiles the programs for prompts of these lengths."""
        for number, length in enumerate(sorted(set(map(self._padded, lengths)))):
            prompt = (number,) * length  # prompts with equal beginnings would be continued, not prefilled
            list(self.complete([Request(prompt=prompt, max_tokens=1)]))
        if self._may_copy:
            self._copy_prefixes([])
        if self._may_extend:
            self._extend_rows([])

    def stream(self, request: Request) -> Iterator[int]:
        """Yields the tokens after a prompt as they are computed, without the one that ends the row."""
        row = self.submit(request)
        sent = 0
        while row.finish is None or sent < len(row.content):
            if sent == len(row.tokens):
                self.step()
            for token in row.content[sent:]:
                sent += 1
                yield token

    # ---- one dispatch

    def step(self) -> list[Generation]:
        """Gives free slots to requests and computes the next tokens of every row; returns the rows with new tokens."""
        self._admit()
        rows = [slot.row for slot in self._slots]
        if not any(rows):
            return []
        self.counts.decodes += 1
        self.counts.places += len(self._slots) * self._dispatch
        self._set_biases()
        control = self._own(self._control())
        self._state, words = self._decode(*self._weights, self._state, self._devices.shard(control), self._biases)
        decoded = columns_of(self._devices.to_host(words))
        new = [self._advance(slot, Decoded(*each)) for slot, *each in zip(self._slots, *decoded, strict=True)]
        return [row for row, has_new in zip(rows, new, strict=True) if row is not None and has_new]

    def _admit(self) -> None:
        """Gives free slots to requests: one that holds the beginning of a prompt, or that unused for longest."""
        started: list[tuple[int, tuple[int, ...]]] = []
        while self._queue:
            free = sorted(
                (n for n, slot in enumerate(self._slots) if slot.row is None), key=lambda n: self._slots[n].used
            )
            if not free:
                break
            row = self._queue.popleft()
            prompt = list(row.request.prompt)
            beginning = self._find_beginning(prompt, free, started)
            if beginning is None:
                slot = self._slots[free[0]]
                slot.kept = prompt
                slot.has_logits = True
                started.append((free[0], row.request.prompt))
            else:
                self._prefill_all(started)
                started = []
                slot = self._slots[beginning.target]
                self._begin_at(beginning, prompt)
            slot.row = row
            slot.is_old = False
            slot.pending = deque(prompt[len(slot.kept) :])
            request = row.request
            slot.stream = stream_key(request.seed, (*request.prompt, *request.given), request.sample)
            slot.unreported = len(slot.pending)
            slot.pending.extend(request.given)
            self._force(slot)
        self._prefill_all(started)

    def _find_beginning(
        self, prompt: list[int], free: Sequence[int], started: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Beginning | None:
        if any(list(other) == prompt for _, other in started):
            return None  # `prefill` computes both at once
        busy = [number for number, slot in enumerate(self._slots) if slot.row is not None and not slot.is_old]
        slots = [
            Held(number, number // self._local_slots, slot.kept, number in free, slot.has_logits)
            for number in (*free, *busy)
            for slot in [self._slots[number]]
        ]
        return find_beginning(prompt, slots, may_copy=self._may_copy, may_extend=self._may_extend)

    def _begin_at(self, beginning: Beginning, prompt: list[int]) -> None:
        """Copies the beginning of a prompt to its slot, and computes all but the last tokens if they are many."""
        slot = self._slots[beginning.target]
        self.counts.reused += beginning.length
        if not beginning.has_logits:
            self._copy_prefixes([(beginning, prompt[beginning.length - 1])])
        slot.kept = prompt[: beginning.length]
        slot.has_logits = beginning.has_logits
        if len(prompt) - beginning.length > BLOCK:
            for first in range(beginning.length, len(prompt), BLOCK):
                # The cache has to have places for a whole block: near its end, some tokens are computed again.
                start = min(first, self._capacity - BLOCK)
                self._extend_rows([(beginning.target, start, prompt)])
            slot.kept = prompt
            slot.has_logits = True

    @cached_property
    def _may_copy(self) -> bool:
        """Returns True if a beginning of a slot's tokens has the keys and values that it has alone."""
        return not self._both_ways

    @cached_property
    def _may_extend(self) -> bool:
        cache = self._state_shapes(*self._weights).cache
        return self._may_copy and self._capacity > BLOCK and continues(self._module, cache)

    def _copy_prefixes(self, copies: Sequence[tuple[Beginning, int]]) -> None:
        """Copies keys and values between slots of a device; the tokens are the last ones that are copied."""
        batch = np.zeros((self._devices.count, 4), np.int32)
        for beginning, last in copies:
            device, target = divmod(beginning.target, self._local_slots)
            batch[device] = target, beginning.source % self._local_slots, last, 1
        self._state = self._copy(*self._weights, self._state, self._devices.shard(self._own(batch)))

    def _extend_rows(self, rows: Sequence[tuple[int, int, list[int]]]) -> None:
        """Computes a block of tokens, from a position on, of at most one slot of each device."""
        batch = np.zeros((self._devices.count, 6 + BLOCK), np.int32)
        for number, start, prompt in rows:
            device, target = divmod(number, self._local_slots)
            part = prompt[start : start + BLOCK]
            batch[device, :6] = target, start, len(part), prompt[start - 1], part[-1], 1
            batch[device, 6 : 6 + len(part)] = part
            self.counts.computed += BLOCK
        self._state = self._extend(*self._weights, self._state, self._devices.shard(self._own(batch)))

    def _prefill_all(self, started: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Computes prompts and writes them to slots; a device computes a prompt of several of its slots once."""
        by_length: dict[int, list[dict[tuple[int, ...], list[int]]]] = {}
        for number, prompt in started:
            device, local = divmod(number, self._local_slots)
            of_devices = by_length.setdefault(self._padded(len(prompt)), [{} for _ in range(self._devices.count)])
            of_devices[device].setdefault(prompt, []).append(local)
        for length, of_devices in by_length.items():
            rows = self._prefill_rows(length)
            for first in range(0, max(map(len, of_devices)), rows):
                parts = [list(each.items())[first : first + rows] for each in of_devices]
                batch = self._own(_stacked([self._prompts(part, length) for part in parts]))
                self._state = self._prefill(*self._weights, self._state, self._devices.shard(batch))
                self.counts.prefills += 1
                self.counts.computed += rows * length * self._devices.count
                self.counts.prefilled += sum(len(slots) for part in parts for _, slots in part)

    def _padded(self, length: int) -> int:
        """Returns the length of the program for a prompt: a power of two, or the capacity."""
        padded = _SHORTEST_PREFILL
        while padded < length:
            padded *= 2
        return min(padded, self._capacity)

    def _prefill_rows(self, length: int) -> int:
        """Returns the number of prompts that a device computes at once."""
        return min(self._local_slots, max(1, _PREFILL_TOKENS // length))

    def _prompts(self, part: Sequence[tuple[tuple[int, ...], list[int]]], length: int) -> dict[str, np.ndarray]:
        """Returns the prompts of one device, padded on the right, and the slots to write them to."""
        rows = self._prefill_rows(length)
        tokens = np.zeros((rows, length), np.int32)
        lengths = np.ones(rows, np.int32)
        targets, sources = np.zeros((2, self._local_slots), np.int32)
        pairs = [(slot, source) for source, (_, slots) in enumerate(part) for slot in slots]
        for source, (prompt, _) in enumerate(part):
            tokens[source, : len(prompt)], lengths[source] = prompt, len(prompt)
        for number, (slot, source) in enumerate(pairs):
            targets[number], sources[number] = slot, source
        return {
            "tokens": tokens,
            "lengths": lengths,
            "targets": targets,
            "sources": sources,
            "count": np.array(len(pairs), np.int32),
        }

    def _control(self) -> np.ndarray:
        """Returns the input of `decode` as one array of words, with leading axes for devices and slots."""
        rows = np.zeros(len(self._slots), control_fields(self._dispatch))
        rows["top_p"] = 1.0
        for number, slot in enumerate(self._slots):
            position = rows["position"][number] = min(len(slot.kept), self._capacity)
            if slot.row is None:
                continue
            request = slot.row.request
            forced = list(islice(slot.pending, self._dispatch))
            remaining = len(request.prompt) + request.max_tokens - len(slot.kept)
            biased = request.bias is not None and len(forced) < self._dispatch
            if biased and request.bias is not None and request.bias.changes:
                remaining = min(remaining, len(forced) + 1)
            rows[number] = (
                position,
                remaining,
                request.most_probable,
                biased,
                request.sampling.temperature,
                request.sampling.top_k,
                request.sampling.top_p,
                slot.stream,
                _filled(request.stop, MOST_STOP_TOKENS),
                _filled(forced, self._dispatch),
            )
        return rows.view(np.int32).reshape(self._devices.count, self._local_slots, -1)

    def _set_biases(self) -> None:
        """Passes the biases of rows to the devices, for the tokens after those that are known."""
        changed = False
        for number, slot in enumerate(self._slots):
            row = slot.row
            if row is None or row.request.bias is None or len(slot.pending) >= self._dispatch:
                continue
            written = [*row.tokens, *list(slot.pending)[slot.unreported :]]
            new = row.request.bias.logits_after(written[len(row.request.given) :])
            if slot.bias is not new:
                slot.bias = new
                self._host_biases[divmod(number, self._local_slots)] = new
                changed = True
        if changed:
            self._biases = self._devices.shard(self._own(self._host_biases))

    @cached_property
    def _host_biases(self) -> np.ndarray:
        shape = self._devices.count, *self._state_shapes(*self._weights).logits.shape
        return np.zeros(shape, np.float32)

    @cached_property
    def _biases(self) -> Any:
        return self._devices.shard(self._own(self._host_biases))

    def _force(self, slot: _Slot) -> None:
        """Adds the tokens that the bias of a row forces to those that are known."""
        row = slot.row
        if row is None or row.request.bias is None:
            return
        written = [*row.tokens, *list(slot.pending)[slot.unreported :]]
        room = row.request.max_tokens - len(written)
        forced = row.request.bias.forced_after(written[len(row.request.given) :])
        slot.pending.extend(forced[: max(0, room)])

    def _advance(self, slot: _Slot, decoded: Decoded) -> bool:
        """Adds the new tokens to a row; returns whether there are any, apart from those of the prompt."""
        row = slot.row
        if row is None:
            return False
        request = row.request
        count = int(decoded.valid.sum())
        first = slot.unreported
        slot.used = self.counts.decodes
        self.counts.tokens += count
        forced = min(len(slot.pending), count)
        tokens = decoded.token[:count].tolist()
        for _ in range(forced):
            slot.pending.popleft()
        slot.unreported = max(0, first - count)
        slot.kept += tokens
        slot.has_logits = slot.has_logits or count > 0
        row.tokens += tokens[first:]
        row.log_probs += decoded.log_prob[first:count].tolist()
        row.sampling_log_probs += decoded.sampling_log_prob[first:count].tolist()
        top = (each[first:count, : request.most_probable].tolist() for each in decoded[-2:])
        row.most_probable += [list(zip(tokens, others, strict=True)) for tokens, others in zip(*top, strict=True)]
        row.forced += [column < forced for column in range(first, count)]
        if row.tokens and not row.forced[-1] and row.tokens[-1] in request.stop:
            answer = request.respond(row.tokens) if request.respond else None
            slot.pending.extend(answer or ())
            row.finish = "stop" if answer is None else None
        if row.finish is None and len(row.tokens) == request.max_tokens:
            row.finish = "length"
        if row.finish is None and not slot.pending:
            self._force(slot)
        if row.finish is not None:
            self._free(slot)
        return count > first

    def _free(self, slot: _Slot) -> None:
        """Keeps the tokens of a row for prompts that begin with them, if the cache has all and attention is causal."""
        slot.row = None
        slot.unreported = 0
        slot.bias = None
        slot.pending.clear()
        if self._both_ways or slot.is_old:
            slot.kept = []
        elif len(slot.kept) >= self._capacity:  # the last tokens had no place, and were written over the one before
            slot.kept = slot.kept[: self._capacity - 1]
            slot.has_logits = False

    def _own(self, tree: Any) -> Any:
        """Returns this process's part of arrays with a leading axis for all devices."""
        positions = self._devices.positions
        return tree if len(positions) == self._devices.count else jax.tree.map(lambda x: x[positions], tree)

    # ---- programs

    @cached_property
    def _prefill(self) -> Any:
        def prefill(params: Arrays, buffers: Arrays, state: State, batch: dict[str, Array]) -> State:
            computed = self._prefilled(params, buffers, batch["tokens"], batch["lengths"])

            def insert(number: Array, state: State) -> State:
                source = batch["sources"][number]
                target = batch["targets"][number]
                row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, source), computed)
                return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, target, 0), state, row)

            return jax.lax.fori_loop(0, batch["count"], insert, state)

        return self._devices.parallel(prefill, (None, None, 0, 0), 0, donate=(2,))

    @cached_property
    def _copy(self) -> Any:
        def copy(params: Arrays, buffers: Arrays, state: State, batch: Array) -> State:
            target, source, last, active = batch

            def copied(state: State) -> State:
                row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, source), state.cache)
                if row.previous is not None:
                    tokens = last[None, None]
                    row = row._replace(
                        previous=self._prefilled(params, buffers, tokens, jnp.ones(1, jnp.int32)).cache.previous
                    )
                return state._replace(cache=_with_row(state.cache, row, target))

            return jax.lax.cond(active > 0, copied, lambda state: state, state)

        return self._devices.parallel(copy, (None, None, 0, 0), 0, donate=(2,))

    @cached_property
    def _extend(self) -> Any:
        def extend(params: Arrays, buffers: Arrays, state: State, batch: Array) -> State:
            target, start, count, before, last, active = batch[:6]

            def extended(state: State) -> State:
                row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, target), state.cache)
                around = jnp.stack([before, last])[None]
                (logits, row), _ = self._fn(
                    params,
                    buffers,
                    batch[None, 6:],
                    around,
                    row,
                    start,
                    self._capacity,
                    method="extend",
                    train=False,
                )
                new = jax.lax.dynamic_index_in_dim(logits[0], count - 1).astype(jnp.float32)
                return State(_with_row(state.cache, row, target), _with_row(state.logits, new, target))

            return jax.lax.cond(active > 0, extended, lambda state: state, state)

        return self._devices.parallel(extend, (None, None, 0, 0), 0, donate=(2,))

    @cached_property
    def _decode(self) -> Any:
        def decode(params: Arrays, buffers: Arrays, state: State, words: Array, biases: Array) -> tuple[State, Array]:
            control = control_of(words, self._dispatch)
            is_biased = jnp.any(control.biased > 0)

            def with_biases(logits: Array) -> Array:
                return logits + jnp.where(control.biased[:, None] > 0, biases, 0.0)

            def step(carry: tuple[State, Array, Array], forced: Array) -> tuple[tuple[State, Array, Array], Array]:
                state, position, remaining = carry
                biased = jax.lax.cond(is_biased, with_biases, lambda logits: logits, state.logits)
                choice = choose_tokens(state.logits, control.settings, position, forced, biased)
                top = most_probable(state.logits, control.most_probable > 0)
                token = choice.token
                active = remaining > 0
                logits, cache = self._next(params, buffers, token, state.cache, position)
                # A row that has ended also writes to the cache, after its tokens; its next token overwrites that.
                previous = jax.tree.map(_where(active), cache.previous, state.cache.previous)
                state = State(cache._replace(previous=previous), _where(active)(logits, state.logits))
                ended = (forced < 0) & jnp.any(control.stop == token[:, None], axis=-1)
                remaining = jnp.where(ended, 0, jnp.maximum(remaining - 1, 0))
                return (state, position + active, remaining), words_of(Decoded(*choice, active, *top))

            carry = state, control.position, control.remaining
            (state, _, _), decoded = jax.lax.scan(step, carry, control.forced.T)
            return state, jax.lax.all_gather(decoded, AXIS)

        return self._devices.parallel(decode, (None, None, 0, 0, 0), (0, None), donate=(2,))

    def _prefilled(self, params: Arrays, buffers: Arrays, tokens: Array, lengths: Array) -> State:
        last = lengths[:, None] - 1
        instruction: dict[str, Any] = {"instruction": jnp.arange(tokens.shape[1]) <= last} if self._both_ways else {}
        (logits, cache), _ = self._fn(
            params,
            buffers,
            tokens,
            jnp.take_along_axis(tokens, last, axis=1),
            self._capacity,
            method="prefill",
            train=False,
            **instruction,
        )
        return State(cache, jnp.take_along_axis(logits, last[:, :, None], axis=1)[:, 0].astype(jnp.float32))

    def _next(
        self, params: Arrays, buffers: Arrays, tokens: Array, cache: Buffers, positions: Array
    ) -> tuple[Array, Buffers]:
        """Returns the logits after a token of each row, and the cache with it."""

        def row(token: Array, cache: Buffers, position: Array) -> tuple[Array, Buffers]:
            (logits, cache), _ = self._fn(
                params, buffers, token[None, None], cache, position, self._capacity, method="decode", train=False
            )
            return logits[0].astype(jnp.float32), cache

        if len(tokens) == 1:  # `vmap` would write by a scatter, which copies a cache of one row
            return row(tokens[0], cache, positions[0])
        logits, cache = jax.vmap(row)(tokens, jax.tree.map(lambda x: x[:, None], cache), positions)
        return logits[:, 0], jax.tree.map(lambda x: x[:, 0], cache)

    @cached_property
    def _state(self) -> State:
        """Returns the state of empty slots."""
        local = len(self._devices.local)
        shapes = self._state_shapes(*self._weights)
        return self._devices.shard(jax.tree.map(lambda x: np.zeros((local, *x.shape), x.dtype), shapes))

    def _state_shapes(self, params: Any, buffers: Any) -> State:
        """Returns the shapes of the rows of one device."""
        tokens = jax.ShapeDtypeStruct((self._local_slots, min(_SHORTEST_PREFILL, self._capacity)), jnp.int32)
        return jax.eval_shape(
            self._prefilled, params, buffers, tokens, jax.ShapeDtypeStruct(tokens.shape[:1], jnp.int32)
        )

    def decode_program(self, params: Arrays, buffers: Arrays) -> tuple[Any, tuple]:
        """Returns the program `decode` and the shapes of its arguments, to compile it for absent devices."""
        weights = self._devices.shapes((_prefixed(params), _prefixed(buffers)))
        count = self._devices.count
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), self._state_shapes(*weights))
        biases = jax.ShapeDtypeStruct(state.logits.shape, jnp.float32)
        sharded = [self._devices.shapes(tree, sharded=True) for tree in (state, self._control(), biases)]
        return self._decode, (*weights, *sharded)


def weights_of(objective: Objective, state: TrainState) -> tuple[Arrays, Arrays]:
    """Returns the averaged parameters and the buffers of a state, by the names of the module, for `Engine.load`."""
    return objective.params | state.eval_params, objective.buffers | state.buffers


def _filled(tokens: Sequence[int], size: int) -> list[int]:
    return [*tokens, *[-1] * (size - len(tokens))]


def _where(condition: Bool[Array, " rows"]) -> Callable[[Array, Array], Array]:
    """Returns a function that takes rows of its first argument where the condition holds."""
    return lambda new, old: jnp.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _with_row(state: Any, row: Any, number: Array) -> Any:
    """Returns arrays with the row of a slot replaced."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), number, 0), state, row)


def _stacked(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def _prefixed(arrays: Arrays) -> Arrays:
    """Returns the arrays by the names of a module inside a `CachedModel`."""
    return {f"model.{name}": array for name, array in arrays.items()}


def decode_program(training: Any, rows: int, capacity: int) -> tuple[Any, Any]:
    """Returns the program that writes a token in each of `rows` rows of `capacity` positions, and its arguments.

    `training`: the components of a run. Raises ValueError if the model has fewer positions.
    """
    objective = training.objective
    positions = positions_of(objective.fn.module)
    if capacity > positions:
        raise ValueError(f"--capacity is {capacity}, the model has {positions} positions")
    engine = Engine(objective.fn.module, training.devices, slots=rows, capacity=capacity, tokens_per_dispatch=1)
    return engine.decode_program(objective.params, objective.buffers)
