"""Replicas: several devices, of one host or of several, that compute one update together.

Each has the same variables and a part of the batch. Losses and gradients are summed over all parts
before anything is judged, clipped or applied, so that N replicas with B / N unrolls each are one
learner with B. TensorFlow's own collectives carry what is summed: `tf.distribute`.
"""

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
import tree

from impala.agents.compiled import Flat
from impala.config.schema import Config
from impala.config.values import OptionError
from learner.data.rows import Layout, Placed
from learner.update import devices

T = TypeVar("T")


class Replicas:
    """The devices that learn from one batch. Without a strategy it is one, and nothing is shared.

    What shares something must be called by every replica, as often and in the same order.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None):
        """Takes devices as they are.

        Args:
          strategy: MirroredStrategy, or MultiWorkerMirroredStrategy; None: there is one device.
        """
        self._strategy = strategy
        self.count: int = 1 if strategy is None else strategy.num_replicas_in_sync
        """Number of replicas on all hosts."""
        self._local = () if strategy is None else strategy.extended.worker_devices
        self.has_one_device: bool = len(self._local) < 2
        """Whether this host learns on one."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which variables are made on each device."""
        return contextlib.nullcontext() if self._strategy is None else self._strategy.scope()

    def compiled(
        self, function: Callable[..., Any], *, jit_compile: bool, waits: bool = True
    ) -> Callable[..., Any]:
        """Returns a compiled function that runs on each device of this host.

        Its arguments are tensors, or what `place` and `divide` return, and have the same shapes in
        all calls. Of its results, `first` and `of_host` return tensors. Unless it `waits`, a single
        device does not wait for XLA.
        """
        if (strategy := self._strategy) is None:
            return Flat(function, jit_compile=jit_compile, waits=waits, always_alike=True)
        return _compiled(lambda *arguments: strategy.run(function, arguments), jit_compile=False)

    def compiled_part(
        self, function: Callable[..., Any], *, jit_compile: bool
    ) -> Callable[..., Any]:
        """Returns a part of a function for `compiled` that shares nothing.

        XLA compiles all of the function of a single device, but not what devices share.
        """
        if self._strategy is None or not jit_compile:
            return function
        return _compiled(function, jit_compile)

    def place(self, layout: Layout, rows: np.ndarray, device: str) -> Placed:
        """Copies a batch to the devices of this host, and returns when it is there.

        Args:
          layout: of the rows.
          rows: uint8 [B, row_bytes]; each device gets an equal share.
          device: of a host that has a single one.
        """
        if self.has_one_device:
            tensor = devices.shared(rows)
            is_there = devices.is_cpu(device)
            return Placed(layout, tensor if is_there else devices.place(tensor, device))
        parts = np.split(rows, len(self._local))
        placed = [devices.place(part, at) for part, at in zip(parts, self._local, strict=True)]
        return Placed(layout, self._distributed(placed))

    def divide(self, values: np.ndarray) -> Any:
        """Returns values [B, ...] of the unrolls of a batch, divided as `place` divides it."""
        if self.has_one_device:
            return values
        return self._distributed([tf.constant(part) for part in np.split(values, len(self._local))])

    def first(self, value: T) -> T:
        """Returns what the first device of this host has of a value."""
        if self._strategy is None:
            return value
        local: tuple[T, ...] = self._strategy.experimental_local_results(value)
        return local[0]

    def of_host(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns what all devices of this host have of a value, one after the other."""
        if self._strategy is None:
            return value
        return tf.concat(self._strategy.experimental_local_results(value), axis)

    def of_first(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what the first replica has of arrays that have the same shapes everywhere."""

        def only_first() -> list[tf.Tensor]:
            own = tf.distribute.get_replica_context().replica_id_in_sync_group
            is_first = tf.equal(own, 0)
            return self.total([tf.where(is_first, x, tf.zeros_like(x)) for x in values])

        found = self.compiled(only_first, jit_compile=False)()
        return [np.asarray(self.first(x)) for x in found]

    # Within a function that is compiled:

    def total(self, nest: T) -> T:
        """Returns the sum over all replicas of each tensor of a nest; None stays None."""
        if self.count == 1:
            return nest
        flat = tree.flatten(nest)
        summed = iter(_all_reduce([tf.convert_to_tensor(x) for x in flat if x is not None]))
        whole: T = tree.unflatten_as(nest, [None if x is None else next(summed) for x in flat])
        return whole

    def joined(self, nest: T, axis: int) -> T:
        """Returns tensors of the whole batch, where each replica has those of its unrolls.

        Args:
          nest: tensors that have B unrolls along `axis`.
          axis: 0 or 1.
        """
        if self.count == 1:
            return nest
        gather = tf.distribute.get_replica_context().all_gather
        whole: T = tree.map_structure(lambda x: gather(tf.identity(x), axis), nest)
        return whole

    def combined(self, names: Sequence[str], values: tf.Tensor) -> tf.Tensor:
        """Returns metrics of the whole batch, from those of each replica's part.

        Args:
          names: of NAME/max and loss_max/NAME the largest is taken, of NAME/min the smallest, of
            others the mean.
          values: [n].
        """
        if self.count == 1:
            return values
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_own = tf.equal(tf.range(self.count), own)[:, tf.newaxis]
        each = self.total(tf.where(is_own, values, tf.zeros_like(values)))  # [replicas, n]
        largest = [name.endswith("/max") or name.startswith("loss_max/") for name in names]
        smallest = [name.endswith("/min") for name in names]
        values = tf.where(largest, tf.reduce_max(each, axis=0), tf.reduce_mean(each, axis=0))
        return tf.where(smallest, tf.reduce_min(each, axis=0), values)

    def _distributed(self, parts: Sequence[T]) -> T:
        """Returns a value of which each device of this host has its own part."""
        assert self._strategy is not None
        whole: T = self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group % len(parts)]
        )
        return whole


def replicas_of(config: Config) -> Replicas:
    """Returns the devices of this host that a configuration names.

    Raises:
      OptionError: there are fewer, or they do not divide the batch.
    """
    wanted, kind = config.learner.devices, "CPU"
    if wanted == 1:
        return Replicas()
    if tf.config.list_physical_devices("GPU"):
        kind = "GPU"
    found = [device.name for device in tf.config.list_logical_devices(kind)]
    count = len(found) if wanted == "all" else wanted
    if count > len(found):
        raise OptionError(
            f"learner.devices is {count}, but TensorFlow finds {len(found)} {kind}s here: lower "
            "it, or say all."
        )
    if config.mix.batch_size % count:
        raise OptionError(
            f"A batch has {config.mix.batch_size} unrolls (mix.fresh and mix.replayed), which "
            f"{count} devices cannot share evenly: use a multiple of {count}, or another number "
            "of learner.devices."
        )
    return Replicas(tf.distribute.MirroredStrategy(found[:count]) if count > 1 else None)


def _compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
    compiled: Callable[..., Any] = tf.function(function, jit_compile=jit_compile, autograph=False)
    return compiled


def _all_reduce(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns sums over all replicas, by one collective operation for each dtype."""
    summed: dict[int, tf.Tensor] = {}
    of_dtype = collections.defaultdict(list)
    for i, tensor in enumerate(tensors):
        of_dtype[tensor.dtype].append(i)
    for which in of_dtype.values():
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in which], axis=0)
        flat = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, flat)
        parts = tf.split(flat, [tensors[i].shape.num_elements() for i in which])
        for i, part in zip(which, parts, strict=True):
            summed[i] = tf.reshape(part, tensors[i].shape)
    return [summed[i] for i in range(len(tensors))]
