"""The only file that knows `pmap` and `shard_map`: which devices there are, how a step runs on them, who gets what.

State that is the same on every device has no device axis (`in_axes=None`); what is split has a leading one. With
several processes every one of them runs this with its own devices, and a step spans those of all.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.core.step import AXIS, EvalStep, TrainStep
from train_jax.errors import UserError
from train_jax.tasks.puzzles.batches import check_divides

Runner = Literal["pmap", "shard_map"]

JOIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables that make a process one of several: where the first one listens, how many, which one."""


def join_processes() -> None:
    """Joins the other processes of the run where the environment says that there are any.

    Comes before anything else asks JAX for devices. Raises `UserError` for variables that are not all there.
    """
    address, count, number = (os.environ.get(name, "") for name in JOIN)
    if not (address or count or number):
        return
    if not (address and count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise UserError(
            f"{', '.join(f'{name}={os.environ.get(name)}' for name in JOIN)}: expected host:port, a number of "
            "processes and one from 0 below it; set all three, or none"
        )
    jax.distributed.initialize(address, int(count), int(number), cluster_detection_method="deactivate")


class Devices:
    """The devices of this process, in order, and how steps run on them."""

    def __init__(self, count: int = 0, runner: Runner = "pmap"):
        """`count`: how many of this process's devices to use; 0 takes all. `runner`: what spreads a step over them."""
        available = jax.local_devices()
        if count > len(available):
            raise UserError(f"{count} devices asked for, {len(available)} are there; use at most {len(available)}")
        if jax.process_count() > 1 and count not in (0, len(available)):
            raise UserError(f"{count} devices asked for; with several processes use all {len(available)} of each")
        self.local = available[: count or None]
        self._runner = runner
        self._everywhere = jax.devices() if jax.process_count() > 1 else self.local
        # Arrays of `pmap` belong to a process; those of `shard_map` span all of them.
        self._mesh = Mesh(np.array(self.local if runner == "pmap" else self._everywhere), (AXIS,))

    @property
    def count(self) -> int:
        """Of all processes together."""
        return len(self._everywhere)

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes the run's files."""
        return jax.process_index() == 0

    @property
    def kind(self) -> str:
        return f"{self.count} x {self.local[0].device_kind}"

    def local_batch_size(self, global_batch_size: int) -> int:
        """Examples on one device. Raises `UserError` when the batch does not divide."""
        check_divides(global_batch_size, self.count, "devices")
        return global_batch_size // self.count

    def train(self, step: TrainStep) -> Any:
        """`(learner, carry, batch, key) -> (learner, carry, metrics)` on all devices; the old state is given up.

        `key`: as `key` gives it.
        """

        def with_key(learner: Any, carry: Any, batch: Any, key_data: jax.Array) -> Any:
            return step(learner, carry, batch, jax.random.wrap_key_data(key_data))

        return self._run(with_key, (None, 0, 0, None), (None, 0, None), donate=(0, 1))

    def evaluate(self, step: EvalStep) -> Any:
        """`(learner, batch) -> (metrics, outputs)`; outputs keep their device axis."""
        return self._run(step, (None, 0), (None, 0))

    def for_each(self, function: Callable[..., Any]) -> Any:
        """`function(params, buffers, batch)` on each device's share of the batch; the result keeps the device axis."""
        return self._run(function, (None, None, 0), 0)

    def _run(self, function: Callable, ins: tuple, outs: Any, donate: tuple[int, ...] = ()) -> Any:
        if self._runner == "pmap":
            return jax.pmap(
                function,
                axis_name=AXIS,
                devices=self._everywhere,
                in_axes=ins,
                out_axes=outs,
                donate_argnums=donate,
            )

        def on_one_device(*args: Any) -> Any:
            found = function(*(_first(a) if axis == 0 else a for a, axis in zip(args, ins, strict=True)))
            if not isinstance(outs, tuple):
                return _alone(found)
            return tuple(_alone(f) if axis == 0 else f for f, axis in zip(found, outs, strict=True))

        specs = jax.tree.map(_spec, (ins, outs), is_leaf=lambda axis: axis is None)
        everywhere = jax.shard_map(
            on_one_device, mesh=self._mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )
        return jax.jit(everywhere, donate_argnums=donate)

    def compiled(self, program: Any, shapes: Any) -> Any:
        """A program of `train` or `evaluate` compiled for arguments of these shapes, ready to be called."""
        if self._runner == "pmap" and jax.process_count() > 1:
            return program  # there `pmap` compiles at the first call and not before
        return program.lower(*shapes).compile()

    def replicate(self, tree: Any) -> Any:
        """The same arrays on every device, placed as the steps return them, so that no step compiles twice."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def key(self, seed: int) -> jax.Array:
        """A run's random key, on every device; as plain numbers, since `pmap` of several processes fetches others."""
        return self.replicate(jax.random.key_data(jax.random.key(seed)))

    def spread(self, tree: Any) -> Any:
        """This process's arrays with a leading device axis, each part on its device."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        if self._mesh.size == len(self.local):
            return jax.device_put(tree, sharding)

        def place(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x  # a step made it, and it lies where it should
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(place, tree)

    def fetch(self, tree: Any) -> Any:
        """To the host: what is the same everywhere whole, what is spread as this process's part."""

        def local(x: Any) -> np.ndarray:
            if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
                return np.asarray(x)
            shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
            return np.concatenate([np.asarray(shard.data) for shard in shards])

        return jax.tree.map(local, jax.device_get(tree) if jax.process_count() == 1 else tree)

    def own_part(self, tree: Any) -> Any:
        """This process's share of host arrays that have a leading axis for the devices of all."""
        if jax.process_count() == 1:
            return tree
        here = len(self.local)
        return jax.tree.map(lambda x: x[jax.process_index() * here :][:here], tree)

    def spanning(self, tree: Any, axis: int | None) -> Any:
        """What each process holds as arrays over all of them, to be saved together; alone, a copy on the host.

        `axis`: None for what is the same on every device, 0 for what has a leading device axis.
        """
        if jax.process_count() == 1:  # a copy, because the next step may take the memory while it is being written
            return jax.tree.map(np.asarray, tree)
        mesh = Mesh(np.array(self._everywhere), (AXIS,))
        sharding = NamedSharding(mesh, _spec(axis))

        def spanned(x: jax.Array) -> jax.Array:
            if not x.is_fully_addressable:
                return x
            shape = x.shape if axis is None else (self.count, *x.shape[1:])
            parts = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return jax.tree.map(spanned, tree)

    def gathered(self, arrays: dict[str, np.ndarray], axis: int) -> dict[str, np.ndarray]:
        """The host arrays of all processes, in their order along `axis`; every process has the same shapes."""
        if jax.process_count() == 1:
            return arrays
        found = multihost_utils.process_allgather(arrays)
        return {name: np.concatenate(list(array), axis=axis) for name, array in found.items()}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes go on, or none: a `UserError` inside in one of them is one in every one."""
        mistake = None
        try:
            yield
        except UserError as error:
            mistake = error
        failed = self.gathered({"failed": np.array([mistake is not None])}, axis=0)["failed"]
        if mistake is not None:
            raise mistake
        if failed.any():
            raise UserError(
                f"process {int(failed.argmax())} of {len(failed)} could not go on; what it printed says why"
            )

    def agree(self, text: str, what: str) -> None:
        """Raises `UserError` in every process where `text`, which says `what`, is not the same in all."""
        found = self.gathered({"text": np.array([zlib.crc32(text.encode())])}, axis=0)["text"]
        if len(set(found.tolist())) > 1:
            raise UserError(f"the {len(found)} processes were started with different {what}; start all with the same")

    def keep_pace(self, under_way: list[Any]) -> None:
        """Wait until only a few of the steps are under way whose results these are.

        Further ahead the host gains nothing. Virtual devices share one pool of threads: there a second step would take
        those that the first one's collective waits for.
        """
        ahead = 0 if self.local[0].platform == "cpu" else 2
        if len(under_way) > ahead:
            jax.block_until_ready(under_way[-1 - ahead])

    def split(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This process's examples with a leading axis for its devices."""
        return jax.tree.map(lambda x: x.reshape(len(self.local), -1, *x.shape[1:]), batch)

    def shard(self) -> tuple[int, int]:
        """(which process this is, how many there are): whose examples to read."""
        return jax.process_index(), jax.process_count()


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(AXIS)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _alone(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
