"""The learner acts for callers of `Act`: one call of the agent for all rows that wait.

A thread of its own computes. It waits a moment for as many callers as came the last time, and
computes the rows of each version of the parameters together. What a caller has to remember between
two rows, the core state, it sends again; only a version is held for it, from the first row of an
unroll to its last.
"""

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np

from impala.config.schema import Config
from impala.environments.spaces import Spaces
from impala.types import Parameters, StepType, Unroll
from learner.data.bounds import limit_of
from learner.data.ingest import wire_specs
from learner.fleet.refusals import InvalidRequest, NotOffered
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

MOST_VERSIONS = 16  # held for unrolls in progress
_WAIT_SECONDS = 0.001  # for rows of callers that came together the last time
_MOST_ROWS = 1024  # of one call of the agent
_STEP_TYPE = "timestep/step_type"


class Step(Protocol):
    """`impala.acting.CompiledStep`, of which this module needs no TensorFlow."""

    drawn: Mapping[str, tuple[int, ...]]

    def held(self, values: Sequence[np.ndarray]) -> Any: ...

    def __call__(self, held: Any, given: Sequence[np.ndarray]) -> list[np.ndarray]: ...


class Acted(NamedTuple):
    """What is answered to a row."""

    parameters: Parameters  # that acted
    arrays: list[np.ndarray]  # [E, ...], as ActReply has them


class _Version:
    """A version of the parameters, and how many unrolls in progress it acts in."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.pins = 0
        self.held: Any = None  # as the step takes them, once it has


class _Row(NamedTuple):
    """A request that waits."""

    caller: "Caller"
    version: _Version
    given: list[np.ndarray]  # [E, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[list[np.ndarray]]


class Inference:
    """Computes rows for any number of callers.

    Args:
      config: of the run.
      spaces: of one environment.
      unroll_spec: a nest of ArraySpec of one environment's unroll.
      step: makes the agent's step, in the thread that uses it, when somebody first calls.
      observe: is called with "batch_size" and the rows of each call of the agent, by any thread.
    """

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        unroll_spec: Unroll,
        step: Callable[[], Step],
        observe: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        self._config = config
        self._action_space = spaces[1]
        self._make, self._observe = step, observe
        specs, num_states = wire_specs(unroll_spec)
        rows, states = specs[: len(specs) - num_states], specs[len(specs) - num_states :]
        taken = [each for each in rows if each.name.startswith("timestep/observation")]
        taken += [each for each in rows if each.name == _STEP_TYPE]
        self._specs = [
            pb.TensorSpec(name=each.name, dtype=each.dtype, shape=each.shape[1:]) for each in taken
        ] + states
        self._limits = [
            limit_of(spec.name, codec.numpy_dtype(spec.dtype), config.limits)
            for spec in self._specs
        ]
        self._steps = rows[0].shape[0] - 1  # T
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: collections.deque[_Row] = collections.deque()
        self._newest: _Version | None = None
        self._pinned: list[_Version] = []  # oldest first
        self._callers = 0
        self._together = 1  # callers whose rows were taken the last time
        self._thread: threading.Thread | None = None
        self._unmade = ""  # why there is no step; an exception that is raised again would grow
        self._error: BaseException | None = None
        self._closed = False
        self.rows = 0
        """Rows computed."""

    @property
    def versions(self) -> int:
        """Returns how many versions are held for unrolls in progress."""
        return len(self._pinned)

    def publish(self, parameters: Parameters) -> None:
        """Uses these parameters for unrolls that begin from now on. Thread-safe."""
        with self._changed:
            self._newest = _Version(parameters)

    @contextlib.contextmanager
    def caller(self) -> Iterator["Caller"]:
        """Yields a caller; what it has pinned is released at the end."""
        caller = Caller(self)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="inference", daemon=True)
                thread.start()  # which the system may refuse
                self._thread = thread
            self._callers += 1
        try:
            yield caller
        finally:
            with self._changed:
                self._callers -= 1
                self._release(caller)

    def check(self) -> None:
        """Raises RuntimeError if the thread has died."""
        if self._error is not None:
            raise RuntimeError("Inference for callers of Act has died.") from self._error

    def close(self) -> None:
        """Ends the thread. Rows that wait are not computed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def decode(self, request: pb.ActRequest) -> list[np.ndarray]:
        """Returns the tensors of a request: [E, ...].

        Raises:
          InvalidRequest: they are not those of the specs, or a number is out of its range.
        """
        num_envs, most = request.num_envs, self._config.learner.max_envs_per_message
        if not 1 <= num_envs <= most:
            raise InvalidRequest(
                f"num_envs is {num_envs}, it must be 1 to {most}: open more streams, or raise "
                "learner.max_envs_per_message."
            )
        specs = [
            pb.TensorSpec(name=spec.name, dtype=spec.dtype, shape=[num_envs, *spec.shape])
            for spec in self._specs
        ]
        try:
            arrays = codec.decode(request.tensors, specs)
        except codec.CodecError as error:
            raise InvalidRequest(
                f"{error} Send the leaves of the observation, the step type and the core state."
            ) from None
        for spec, limit, array in zip(specs, self._limits, arrays, strict=True):
            if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
                raise InvalidRequest(f"{spec.name} has a bool that is neither 0 nor 1.")
            if spec.name == _STEP_TYPE and not (
                array.min() >= StepType.FIRST and array.max() <= StepType.LAST
            ):
                raise InvalidRequest(f"{_STEP_TYPE} is not 0, 1 or 2: {array[:8].tolist()} ...")
            if limit is not None and (wrong := limit.beyond(array)) is not None:
                raise InvalidRequest(
                    f"{spec.name} has the number {wrong}, which is not finite or beyond "
                    f"{limit.value:g}. {limit.advice}".rstrip()
                )
        return arrays

    async def act(self, caller: "Caller", request: pb.ActRequest) -> Acted:
        """Waits until a row is computed. See `Caller.act`."""
        given = self.decode(request)
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._unmade:
                raise NotOffered(self._unmade)
            if self._error is not None:
                raise RuntimeError(f"Inference for callers of Act has died: {self._error}")
            if self._closed:
                raise RuntimeError("Inference has ended.")
            version = self._version_for(caller, request.begins)
            caller.count(request, self._steps)
            row = _Row(caller, version, given, loop, loop.create_future())
            self._waiting.append(row)
            self._changed.notify_all()
        arrays = await row.done
        return Acted(version.parameters, arrays)

    def _version_for(self, caller: "Caller", begins: bool) -> _Version:
        """Returns the version that acts in a caller's row, which is pinned. With the lock held."""
        if not begins:
            if caller.pinned is None:
                raise InvalidRequest("The first request of a stream begins an unroll: set begins.")
            return caller.pinned
        self._release(caller)
        assert self._newest is not None
        version = self._newest
        if not version.pins and len(self._pinned) >= MOST_VERSIONS:
            version = self._pinned[-1]
        if not version.pins:
            self._pinned.append(version)
        version.pins += 1
        caller.pinned = version
        return version

    def _release(self, caller: "Caller") -> None:
        """Ends what a caller has pinned. With the lock held."""
        version, caller.pinned = caller.pinned, None
        if version is not None:
            version.pins -= 1
            if not version.pins:
                self._pinned.remove(version)

    def _run(self) -> None:
        rows: list[_Row] = []
        try:
            if (step := self._step()) is None:
                return
            while rows := self._next():
                of_versions: dict[int, list[_Row]] = {}
                for row in rows:
                    of_versions.setdefault(id(row.version), []).append(row)
                for together in of_versions.values():
                    self._compute(step, together)
        except BaseException as error:
            _log.exception("Inference for callers of Act has died.")
            with self._changed:
                self._error = error
                rows = [*rows, *self._waiting]
                self._waiting.clear()
            died = RuntimeError(f"Inference for callers of Act has died: {error}")
            self._answer((row, died) for row in rows)

    def _step(self) -> Step | None:
        """Returns the step; None if the agent has none, which whoever called is told."""
        try:
            return self._make()
        except Exception as error:  # of a custom torso or core
            _log.exception("This learner cannot act for callers of Act; training goes on.")
            unmade = f"This learner cannot act with its agent ({error}): act with parameters."
        with self._changed:
            self._unmade = unmade
            rows = [*self._waiting]
            self._waiting.clear()
        self._answer((row, NotOffered(unmade)) for row in rows)
        return None

    def _next(self) -> list[_Row]:
        """Waits for rows; returns those to compute now, none at the end."""
        rows: list[_Row] = []
        with self._changed:
            while not rows:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                end = time.monotonic() + _WAIT_SECONDS
                while not self._closed and len(self._waiting) < min(self._together, self._callers):
                    if (left := end - time.monotonic()) <= 0.0:
                        break
                    self._changed.wait(left)
                if self._closed:
                    return []
                count = 0
                while self._waiting and (
                    not rows or count + len(self._waiting[0].given[0]) <= _MOST_ROWS
                ):
                    row = self._waiting.popleft()
                    if not row.done.cancelled():  # else its caller has gone
                        rows.append(row)
                        count += len(row.given[0])
            self._together = len(rows)
        return rows

    def _compute(self, step: Step, rows: Sequence[_Row]) -> None:
        """Computes rows of one version, and answers them.

        If the network fails on them, each is computed alone, and refused if it still fails.
        """
        version = rows[0].version
        if version.held is None:
            version.held = step.held(version.parameters.values)
        sizes = [len(row.given[0]) for row in rows]
        parts = [
            [*row.given, *row.caller.draw(step.drawn, size)]
            for row, size in zip(rows, sizes, strict=True)
        ]
        # Few different sizes, for each of which XLA compiles. What is added is not looked at.
        total = sum(sizes)
        padding = (1 << (total - 1).bit_length()) - total
        given = [
            np.concatenate([*leaves, np.zeros((padding, *leaves[0].shape[1:]), leaves[0].dtype)])
            for leaves in zip(*parts, strict=True)
        ]
        try:
            results = step(version.held, given)
        except Exception as error:  # such as an index that a custom layer does not have
            if len(rows) == 1:
                refused = InvalidRequest(f"The network cannot compute this row: {error}")
                self._answer([(rows[0], refused)])
                return
            for row in rows:
                self._compute(step, [row])
            return
        self.rows += total
        self._observe("batch_size", total)
        ends = np.cumsum(sizes)
        answers: list[tuple[_Row, list[np.ndarray] | Exception]] = []
        for row, start, end in zip(rows, ends - sizes, ends, strict=True):
            arrays = [leaf[start:end] for leaf in results]
            if self._config.agent.random_warm_up and version.parameters.version == 0:
                arrays[0] = row.caller.uniform(self._action_space, end - start)
            answers.append((row, arrays))
        self._answer(answers)

    @staticmethod
    def _answer(answers: "Iterable[tuple[_Row, list[np.ndarray] | Exception]]") -> None:
        """Answers rows, on their loops. Nobody may be waiting any more."""
        of_loops: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for row, answer in answers:
            of_loops.setdefault(row.loop, []).append((row.done, answer))
        for loop, settled in of_loops.items():
            with contextlib.suppress(RuntimeError):  # it has ended with all that waited on it
                loop.call_soon_threadsafe(_settle, settled)


class Caller:
    """One stream of `Act`: E environments, whose unrolls begin together."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._config = inference._config.agent.epsilon
        self._random = np.random.default_rng()
        self._epsilons: np.ndarray | None = None  # [E]
        self._num_envs = 0
        self._rows = 0  # of this unroll
        self.pinned: _Version | None = None

    async def act(self, request: pb.ActRequest) -> Acted:
        """Acts in one row.

        Raises:
          InvalidRequest: the request is none that can be computed.
          NotOffered: nobody's is.
        """
        return await self._inference.act(self, request)

    def count(self, request: pb.ActRequest, steps: int) -> None:
        """Counts a row of an unroll of as many steps. Raises InvalidRequest if it has no more."""
        if self._num_envs and request.num_envs != self._num_envs:
            raise InvalidRequest(
                f"num_envs is {request.num_envs} after {self._num_envs}: a stream is of one group "
                "of environments."
            )
        self._num_envs = request.num_envs
        self._rows = 1 if request.begins else self._rows + 1
        if self._rows > steps:
            raise InvalidRequest(
                f"This is row {self._rows - 1} of an unroll of {steps} steps, in which rows 0 to "
                f"{steps - 1} are acted upon: set begins with row 0 of the next one."
            )

    def draw(self, drawn: Mapping[str, tuple[int, ...]], num_envs: int) -> list[np.ndarray]:
        """Returns the random numbers of a row, in the order in which they are taken."""
        numbers = []
        for name, shape in drawn.items():
            if name == "epsilon_final":
                if self._epsilons is None:  # once for each environment
                    weights = np.array(self._config.weights) / sum(self._config.weights)
                    chosen = self._random.choice(self._config.finals, num_envs, p=weights)
                    self._epsilons = chosen.astype(np.float32)
                numbers.append(self._epsilons)
            elif name == "uniform":
                numbers.append(self._random.random((num_envs, *shape), np.float32))
            else:
                numbers.append(self._random.standard_normal((num_envs, *shape), np.float32))
        return numbers

    def uniform(self, space: gym.Space, num_envs: int) -> np.ndarray:
        """Returns actions [E, ...] that are uniformly distributed in a box."""
        assert isinstance(space, gym.spaces.Box)
        drawn = self._random.uniform(space.low, space.high, (num_envs, *space.shape))
        return drawn.astype(space.dtype)


def _settle(answers: "Sequence[tuple[asyncio.Future[Any], Any]]") -> None:
    for done, answer in answers:
        if done.done():  # the caller has gone
            continue
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
