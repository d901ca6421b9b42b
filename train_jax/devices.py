"""The only file that knows `pmap` and `shard_map`: which devices there are, how a step runs on them, who gets what.

State that is the same on every device has no device axis (`in_axes=None`); what is split has a leading one. With
several processes every one of them runs this with its own devices, and a step spans those of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.errors import UserError
from train_jax.puzzles.batches import check_divides
from train_jax.step import AXIS, EvalStep, TrainStep

Runner = Literal["pmap", "shard_map"]


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
    def kind(self) -> str:
        return f"{self.count} x {self.local[0].device_kind}"

    def local_batch_size(self, global_batch_size: int) -> int:
        """Examples on one device. Raises `UserError` when the batch does not divide."""
        check_divides(global_batch_size, self.count, "devices")
        return global_batch_size // self.count

    def train(self, step: TrainStep) -> Any:
        """`(learner, carry, batch, key) -> (learner, carry, metrics)` on all devices; the old state is given up."""
        return self._run(step, (None, 0, 0, None), (None, 0, None), donate=(0, 1))

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
        sharding = NamedSharding(self._mesh, PartitionSpec())

        def place(x: Any) -> jax.Array:
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # of which device_put knows one process only
                return jax.random.wrap_key_data(jax.device_put(jax.random.key_data(x), sharding))
            return jax.device_put(x, sharding)

        return jax.tree.map(place, tree)

    def spread(self, tree: Any) -> Any:
        """This process's arrays with a leading device axis, each part on its device."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        if self._mesh.size == len(self.local):
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    def fetch(self, tree: Any) -> Any:
        """To the host: what is the same everywhere whole, what is spread as this process's part."""

        def local(x: Any) -> np.ndarray:
            if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
                return np.asarray(x)
            shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
            return np.concatenate([np.asarray(shard.data) for shard in shards])

        return jax.tree.map(local, jax.device_get(tree) if jax.process_count() == 1 else tree)

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
