"""The learner: one compiled update, which checks its results before it changes anything."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from impala.agents.distributions import EpsilonGreedy
from impala.agents.normaliser import Normaliser
from impala.algorithms import burn_in
from impala.algorithms.base import Algorithm, LossOutput, Played, Sums
from impala.config.schema import Config
from impala.environments.spaces import TASK
from impala.finite import is_finite
from impala.logdir.checkpoint import Checkpoint, Counters
from impala.parts import sections
from impala.schedule import tasks
from impala.schedule.phases import Phase
from impala.types import Array, Batch
from learner.data.bounds import limit_of
from learner.data.rows import Layout, Placed
from learner.update import devices, named_variables, optimisers
from learner.update.replicas import Replicas

T = TypeVar("T")

_START = Counters()
_ALONE = Replicas()

_CONTROLS = 4  # good unrolls to try the variables on before an unroll is blamed
_OUTPUT_CONTROLS = 16  # good unrolls to try the variables on when actors' outputs are refused


class Update(NamedTuple):
    """The results of an update; names begin with the algorithm's scope."""

    metrics: Mapping[str, float]
    histograms: Mapping[str, Array]  # [T, B], on the device until `np.asarray` reads them


class Refusal(NamedTuple):
    """Why a batch was refused; nothing has changed."""

    learning_rate: float
    phase_progress: float
    loss: np.float32
    not_finite: Sequence[str]  # the loss, gradients, new values; in the learner's order
    culprits: Sequence[int]  # unrolls that are bad by themselves, in ascending order


class Learner:
    """Owns algorithm, optimiser and counters, and updates them by one batch at a time."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: Config,
        phase: Phase,
        counters: Counters = _START,
        replicas: Replicas = _ALONE,
    ):
        """Makes a learner at the start of a phase, with a new optimiser.

        Args:
          algorithm: computes the loss.
          config: the run's configuration.
          phase: the phase in which it learns.
          counters: of the run so far.
          replicas: the devices of the algorithm's variables. There is a learner for those of each
            host, which has that part of the batch.
        """
        self.config = config
        self.phase = phase
        self._algorithm = algorithm
        self._replicas = replicas
        self._of_agent = tuple(algorithm.agent.variables)  # to collect them takes a while
        self.device: str = self._of_agent[0].device
        """Where the agent's variables are and updates are computed."""
        self._optimiser = optimisers.make(
            config.optimiser, algorithm.learned_variables, sections.found(config)
        )
        jit_compile = self._jit_compile = devices.uses_xla(config, self.device)
        compiled = functools.partial(tf.function, jit_compile=jit_compile, autograph=False)
        self._updates: dict[tuple[Layout, int], Sequence[Callable[..., Any]]] = {}  # to be tried
        self._of_part = replicas.compiled_part(self._loss_and_gradients, jit_compile=jit_compile)
        self._differentiate = compiled(lambda *batch: self._loss_and_gradients(*batch)[1:])
        self._judge = compiled(self._is_good)
        self._apply = compiled(algorithm.agent.unroll)
        self._metrics: Sequence[str] = ()  # their names, known once an update is traced
        self.last_good: Batch | None = None  # to try the variables on after a bad batch
        self.trained_by = phase.algorithm
        """The algorithm of this process's last update, before which it is the phase's."""
        self.counters = counters
        self._begin_exploration()

    @property
    def phase_progress(self) -> float:
        """Share of the phase done, 0 to 1."""
        return self.phase.progress(self.counters.frames)

    @property
    def from_demonstrations(self) -> bool:
        """Whether it learns from demonstrations, and not from what actors play."""
        return self._algorithm.demands.from_demonstrations

    @property
    def normaliser(self) -> Normaliser | None:
        """The agent's statistics of observations, if it has any."""
        return self._algorithm.agent.normaliser

    def update(
        self, batch: Batch, weights: np.ndarray | None = None, placed: Placed | None = None
    ) -> Update | Refusal:
        """Learns from a batch, or refuses it as a whole.

        Loss, gradients, their norm and the new variables are checked inside the compiled update. If
        one of them is not finite, no variable, slot, target network or counter changes.

        One small tensor leaves the device: whether the update is good, and the metrics.

        Args:
          batch: arrays [T + 1, B, ...].
          weights: [B] float32, of the unrolls' losses; None: all 1.
          placed: the same batch, already on the devices; None: it is copied now.
        """
        learning_rate = optimisers.learning_rate(self.config.optimiser, self.phase_progress)
        if weights is None:
            weights = np.ones(batch.is_replay.shape, np.float32)
        if placed is None:
            placed = self.place(batch)
        elif isinstance(placed.rows, np.ndarray):
            placed = self.place_rows(*placed)
        # As one array, because each that is copied to a device takes as long as a large one.
        numbers = np.empty([len(weights), 4], np.float32)
        numbers[:, 0], numbers[:, 1] = batch.is_replay, weights
        numbers[:, 2:] = learning_rate, self.phase_progress
        arguments = placed.rows, self._replicas.divide(numbers)
        kind = placed.layout, len(weights)
        if (updates := self._updates.get(kind)) is None:
            updates = self._updates[kind] = self._compiled(placed.layout)
        invalid: list[str] = []
        for update in updates:
            report, histograms, before = update(*arguments)
            is_good, *values = self._replicas.first(report).numpy().tolist()  # waits for the update
            metrics = dict(zip(self._metrics, values, strict=True))
            if is_good:
                break
            invalid = self._move_back(before)
            if invalid or not np.isfinite(metrics["loss/total"]):
                break
            # Gradients may be finite although the sum of their squares overflows float32.
        if not is_good:
            return self._refusal(batch, weights, learning_rate, invalid)
        self.last_good, self.trained_by = batch, self.phase.algorithm
        self.counters = self.counters._replace(updates=self.counters.updates + 1)
        metrics["learning_rate"] = learning_rate
        histograms = {name: self._replicas.of_host(x, axis=1) for name, x in histograms.items()}
        return Update(self._scoped(metrics), self._scoped(histograms))

    def place(self, batch: Batch) -> Placed:
        """Copies a batch to where updates are computed, and returns when it is there."""
        layout = Layout.of(batch.unroll)
        return self.place_rows(layout, layout.rows(batch.unroll))

    def place_rows(self, layout: Layout, rows: np.ndarray) -> Placed:
        """Does the same with a batch whose unrolls are rows, uint8 [B, row_bytes]."""
        return self._replicas.place(layout, rows, self.device)

    @property
    def reads_rows(self) -> bool:
        """Whether updates read rows in the memory of the host, so that none need be placed."""
        return self._replicas.has_one_device and devices.is_cpu(self.device)

    def norms(self) -> dict[str, float]:
        """Returns the global norm of the learned variables, as a metric."""
        norm = tf.linalg.global_norm(self._algorithm.learned_variables)
        return self._scoped({"parameter_norm": float(norm)})

    def count(
        self, *, unrolls: int, frames: int, steps: int, seconds: float, episodes: int = 0
    ) -> None:
        """Counts what an update learned from, or what was only added to replay.

        Args:
          unrolls: fresh ones.
          frames: environment frames in them.
          steps: agent decisions in them.
          seconds: wall-clock time since the last call, for the run's total.
          episodes: that ended in them.
        """
        before = self.counters
        self.counters = before._replace(
            unrolls=before.unrolls + unrolls,
            steps=before.steps + steps,
            frames=before.frames + frames,
            seconds=before.seconds + seconds,
            episodes=before.episodes + episodes,
        )
        self._algorithm.after_count(
            Played(before.frames, before.episodes),
            Played(self.counters.frames, self.counters.episodes),
        )

    def outputs_beyond_limits(self) -> float | None:
        """Returns how many of the network's outputs exceed the limits for actors' outputs.

        Returns:
          The share of unrolls of the last good batch with an output that exceeds them or is not
          finite, 0 to 1; None before the first good batch.
        """
        if self.last_good is None:
            return None
        size = len(self.last_good.is_replay)
        which = sorted({size * i // _OUTPUT_CONTROLS for i in range(_OUTPUT_CONTROLS)})
        unroll = devices.columns(self.last_good, which).unroll
        output, _ = self._apply(unroll.timestep, unroll.core_state)
        beyond = np.zeros(len(which), np.bool_)
        for name, tensor in output._asdict().items():
            values = tensor.numpy()
            limit = limit_of(f"output/{name}", values.dtype, self.config.limits)
            assert limit is not None  # these are floats
            beyond |= [limit.beyond(values[:, i]) is not None for i in range(len(which))]
        return float(beyond.mean())

    def agent_tensors(self) -> list[tf.Tensor]:
        """Returns the agent's variables on the device, in the order of published parameters."""
        return _tensors(map(self._replicas.first, self._of_agent))

    def agent_values(self) -> list[np.ndarray]:
        """Returns the same in the memory of the host."""
        return [np.asarray(tensor) for tensor in self.agent_tensors()]

    def variables(self) -> dict[str, np.ndarray]:
        """Returns everything that a checkpoint holds."""
        named = self._named_variables()
        held = _tensors(map(self._replicas.first, named.values()))
        return dict(zip(named, map(np.asarray, held), strict=True))  # no copy on a CPU

    def restore(self, saved: Checkpoint) -> None:
        """Restores a checkpoint; if another algorithm wrote it, only the agent.

        Raises:
          CheckpointError: it belongs to another network, algorithm or optimiser.
        """
        values, variables = saved.variables, self._named_variables()
        if saved.algorithm == self.phase.algorithm:
            named_variables.assign(values, variables)
        else:
            of_agent = named_variables.of_agent
            named_variables.assign(of_agent(values), of_agent(variables))
            self._begin_exploration()
        self.counters = saved.counters

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Assigns values as returned by `variables`.

        Raises:
          CheckpointError: they belong to another network, algorithm or optimiser.
        """
        named_variables.assign(values, self._named_variables())

    def roll_back(self, saved: Checkpoint) -> None:
        """Restores the variables of a checkpoint as the next version; counters are not reset.

        Raises:
          CheckpointError: as `restore`.
        """
        counters = self.counters
        self.restore(saved)
        self.counters = counters._replace(updates=counters.updates + 1)

    def _begin_exploration(self) -> None:
        """Lets an epsilon fall from 1: the agent's may be of another phase or run."""
        distribution = self._algorithm.agent.distribution
        if isinstance(distribution, EpsilonGreedy):
            distribution.progress.assign(0.0)

    def _scoped(self, named: Mapping[str, T]) -> dict[str, T]:
        return {self._algorithm.scope + name: value for name, value in named.items()}

    def _named_variables(self) -> dict[str, tf.Variable]:
        of_agent = {id(variable) for variable in self._of_agent}
        others = [v for v in self._algorithm.variables if id(v) not in of_agent]
        return {
            **named_variables.named("agent", self._of_agent),
            **named_variables.named("algorithm", others),
            **named_variables.named("optimiser", self._optimiser.variables),
        }

    def _compiled(self, layout: Layout) -> Sequence[Callable[..., Any]]:
        """Returns the update by batches of a kind, and the one to try if gradients are large."""
        return [
            self._replicas.compiled(
                functools.partial(self._update_once, layout, clip),
                jit_compile=self._jit_compile,
                waits=self.config.deterministic,
            )
            for clip in (optimisers.clip_by_global_norm, optimisers.clip_large_by_global_norm)
        ]

    def _update_once(
        self,
        layout: Layout,
        clip: optimisers.Clip,
        rows: tf.Tensor,
        numbers: tf.Tensor,
    ) -> tuple[tf.Tensor, Mapping[str, tf.Tensor], Sequence[tf.Tensor]]:
        is_replay, weights = tf.cast(numbers[:, 0], tf.bool), numbers[:, 1]
        learning_rate, progress = numbers[0, 2], numbers[0, 3]
        batch = Batch(devices.unpack(layout, rows, self.device), is_replay)
        output, loss, gradients = self._of_part(batch, weights, progress)
        terms = {f"loss/{name}": tf.reduce_sum(weights * x) for name, x in output.terms.items()}
        sums = {name: tf.reduce_sum(weights * x) for name, x in output.sums.items()}
        loss, terms, sums, gradients = self._replicas.total((loss, terms, sums, gradients))
        of_batch = self._of_batch(batch, output, weights)
        # Values from before, for `update` to restore. While these tensors exist, in-place kernels
        # copy a variable before they change it.
        before = [variable.read_value() for variable in self._named_variables().values()]
        clipped, norm = clip(gradients, self.config.optimiser.clip_global_norm)
        # The norm is finite only if all gradients are.
        is_good = tf.cond(
            tf.math.is_finite(loss) & tf.math.is_finite(norm),
            lambda: self._step(clipped, learning_rate, progress, sums, *of_batch),
            lambda: tf.constant(False),
        )
        metrics = {**output.metrics, **terms, "loss/total": loss, "gradient_norm": norm}
        if rows := self.config.replay.burn_in:
            metrics["replay/state_influence"] = burn_in.influence(
                self._algorithm.agent, batch, rows
            )
        if (popart := self._algorithm.agent.popart) is not None:
            played = tasks.make(self.config.environment, self.config.tasks)
            metrics |= popart.metrics([task.name for task in played])
        self._metrics = tuple(metrics)
        report = tf.stack([tf.cast(value, norm.dtype) for value in (is_good, *metrics.values())])
        report = self._replicas.combined(["is_good/min", *metrics], report)
        return report, output.histograms, before

    def _of_batch(
        self, batch: Batch, output: LossOutput, weights: tf.Tensor
    ) -> tuple[Batch, LossOutput, tf.Tensor]:
        """Returns what PopArt's statistics are updated by, of the whole batch."""
        popart = self._algorithm.agent.popart
        if self._replicas.count == 1 or popart is None or output.targets is None:
            return batch, output, weights
        timestep = batch.unroll.timestep
        task = {TASK: timestep.observation[TASK]} if popart.num_tasks > 1 else ()
        task, targets = self._replicas.joined((task, output.targets), axis=1)
        timestep = timestep._replace(observation=task)
        return (
            batch._replace(unroll=batch.unroll._replace(timestep=timestep)),
            output._replace(targets=targets),
            self._replicas.joined(weights, axis=0),
        )

    def _step(
        self,
        gradients: Sequence[tf.Tensor],
        learning_rate: tf.Tensor,
        progress: tf.Tensor,
        sums: Sums,
        batch: Batch,
        output: LossOutput,
        weights: tf.Tensor,
    ) -> tf.Tensor:
        """Applies the optimiser. Returns whether all new values and their sums are finite: []."""
        self._optimiser.apply(gradients, self._algorithm.learned_variables, learning_rate)
        self._algorithm.after_update(progress, sums)
        self._algorithm.renormalise(batch, output, weights)
        new = [variable.read_value() for variable in self._named_variables().values()]
        # A sum is one pass over the memory, and needs no array of booleans.
        sizes = [tf.reduce_sum(value) for value in new if value.dtype.is_floating]
        return tf.math.is_finite(tf.add_n(sizes))

    def _loss_and_gradients(
        self, batch: Batch, weights: tf.Tensor, progress: tf.Tensor
    ) -> tuple[LossOutput, tf.Tensor, Sequence[tf.Tensor]]:
        variables = self._algorithm.learned_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            output = self._algorithm.loss(batch, progress)
            loss = tf.reduce_sum(weights * output.loss)
        return output, loss, tape.gradient(loss, variables)

    def _is_good(self, unroll: Batch, limit: tf.Tensor, progress: tf.Tensor) -> tf.Tensor:
        """Returns whether the loss and gradients of one unroll [T + 1, 1, ...] are finite."""
        ones = tf.ones([1], tf.float32)
        output, loss, gradients = self._loss_and_gradients(unroll, ones, progress)
        terms = [output.loss, loss, *gradients]
        largest = [tf.reduce_max(tf.abs(term)) for term in terms]
        finite = [tf.reduce_all(tf.math.is_finite(term)) for term in terms]
        size = tf.reduce_sum(tf.abs(output.loss))
        return tf.reduce_all(finite) & tf.reduce_all([*largest, size] <= limit)

    def _move_back(self, before: Sequence[tf.Tensor]) -> list[str]:
        """Restores all variables. Returns the names of those whose new values were not finite."""
        invalid = []
        for (name, variable), value in zip(self._named_variables().items(), before, strict=True):
            if not is_finite(variable.numpy()):
                invalid.append(name)
            variable.assign(self._replicas.first(value))
        return invalid

    def _refusal(
        self,
        batch: Batch,
        weights: np.ndarray,
        learning_rate: float,
        invalid: Sequence[str],
    ) -> Refusal:
        placed = devices.place(batch, self.device)  # as a whole
        loss, gradients = self._differentiate(
            placed, weights, tf.constant(np.float32(self.phase_progress))
        )
        learned = self._algorithm.learned_variables
        by_name = {v.name: g.numpy() for v, g in zip(learned, gradients, strict=True)}
        values = {
            "the loss": loss.numpy(),
            **{f"the gradient of {name}": value for name, value in by_name.items()},
        }
        not_finite = [
            *(name for name, value in values.items() if not np.isfinite(value).all()),
            *(f"the new value of {name}" for name in invalid),
        ]
        return Refusal(
            learning_rate,
            self.phase_progress,
            loss.numpy(),
            not_finite or ["the sum of the new values"],
            self._culprits(batch, weights),
        )

    def _culprits(self, batch: Batch, weights: np.ndarray) -> list[int]:
        """Returns the unrolls that are bad by themselves; none if the variables are the cause.

        The variables are tried on unrolls of the last good batch, most of which must still be good.
        Without such a batch, the variables are presumed bad if every unroll is bad.
        """
        bad = [i for i, weight in enumerate(weights) if weight and not self._stands(batch, i)]
        last = self.last_good
        if not bad:
            return []
        if last is None:
            return bad if len(bad) < len(weights) else []
        size = len(last.is_replay)
        controls: set[int] = {size * i // _CONTROLS for i in range(_CONTROLS)}
        good = sum(self._stands(last, i) for i in controls)
        return bad if 2 * good > len(controls) else []

    def _stands(self, batch: Batch, unroll: int) -> bool:
        """Returns whether one unroll of a batch is good with the current variables."""
        limit = np.finfo(np.float32).max / len(batch.is_replay)
        return bool(
            self._judge(
                devices.columns(batch, [unroll]),
                tf.constant(np.float32(limit)),
                tf.constant(np.float32(self.phase_progress)),
            )
        )


def _tensors(variables: Iterable[tf.Variable]) -> list[tf.Tensor]:
    """Returns values of variables, which later updates leave as they are.

    Nothing is copied: while a tensor or an array holds the memory, in-place kernels copy a variable
    before they change it.
    """
    return [
        tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        for variable in variables
    ]
