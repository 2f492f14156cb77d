"""Ingest: checks the messages from actors and queues them for the mix.

Nothing is copied: the arrays of an `Arrival` are read-only views of the received bytes.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from impala.types import MOST_INFO, EnvironmentFault, Episode, Nest, StepType, Unroll
from learner.checks import numbers
from learner.checks.violations import Kind
from learner.data.bounds import MOST_NAMES, Bounds, MessageBounds, limit_of
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_MAX_FAULT_DETAIL = 200  # characters; longer details are cut
_MAX_LENGTH = 2**31 - 1  # agent steps of an episode
_MAX_SECONDS = 1e9  # between two messages
_MOST_STEP_INFO = 1024  # names in a message
_SLACK_SECONDS = 1.0  # by which an actor may have waited for longer than passed
_MORE_FRAMES = (
    "If steps play more, set the learner's frame skip, environment.repeat.most or "
    "limits.frames_per_step to what the environment does."
)
_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)  # NumPy compares with an enum slowly
_ROUNDING = 1e-4  # relative, of a return summed in float32


class Arrival(NamedTuple):
    """An accepted message: the unrolls of E environments."""

    unroll: Unroll  # views: [T + 1, E, ...]; core_state, frames and parameter_version [E, ...]
    actor: str
    incarnation: int  # of the actor
    sequence: int
    task: int
    offset: int  # environments before it are already accounted for; 0 except after a crash
    episodes: list[Episode]  # that ended in these unrolls
    elapsed_seconds: float  # since the actor made its previous message
    waited_seconds: float  # part of it spent waiting for the learner
    faults: Sequence[EnvironmentFault] = ()  # of its environments; details are printable
    due: int = 0  # in a paced run: the batch with which, or by which, it is to be learned from
    unpermitted: int = 0  # of its unrolls, from the end: those are dropped
    step_info: Mapping[str, np.ndarray] = {}  # name -> [N], numbers in the environments' info
    rewards: tuple[float, int] = (0.0, 0)  # the sum of the raw ones, and in how many steps
    pace: tuple[float, int] = (0.0, 0)  # seconds in environments, and of how many steps and resets
    queued: float = 0.0  # when, by the monotonic clock


class Rejection(NamedTuple):
    """Why a message is refused."""

    reason: "pb.Reason"
    detail: str  # names the value, the limit and the fix
    of_network: bool = False  # whether the actor's network computed the refused number
    violation: Kind | None = None  # that the actor's program makes, if the contents tell


class IngestClosed(Exception):
    """The ingest accepts no more messages."""


class Ingest:
    """A first-in-first-out queue of messages, bounded by their number of unrolls.

    Messages are put on one event loop; any thread may get them.
    """

    def __init__(self, capacity: int):
        """Makes an empty queue.

        Args:
          capacity: unrolls that may be queued. A larger message is accepted when the queue is
            empty, so that no message waits for ever.
        """
        self._capacity = capacity
        self._turn = asyncio.Lock()  # its holder is the next to get room
        self._entering = threading.Lock()  # held by a message that has room until it is put
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrivals: deque[Arrival] = deque()
        self._depth = 0
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._closed = False

    @property
    def capacity(self) -> int:
        """Returns how many unrolls may be queued."""
        return self._capacity

    @property
    def depth(self) -> int:
        """Returns how many unrolls are queued."""
        return self._depth

    @contextlib.asynccontextmanager
    async def room(self, unrolls: int) -> AsyncIterator[None]:
        """Waits, in the order of calls, until `put` may add `unrolls` (back-pressure).

        The body must not await anything: the room is reserved only until it yields control.

        Raises:
          IngestClosed: the ingest was closed before there was room.
        """
        async with self._turn:
            while True:
                with self._entering:
                    if (waiting := self._wait_for(unrolls)) is None:
                        yield
                        return
                try:
                    await waiting
                finally:
                    self._waiter = None

    def put(self, arrival: Arrival) -> None:
        """Adds a message. Call it inside `room`."""
        with self._changed:
            self._arrivals.append(arrival)
            self._depth += _unrolls(arrival)
            self._changed.notify()

    def get(self, timeout: float) -> Arrival | None:
        """Removes and returns the oldest message.

        Returns:
          None after `timeout` seconds without a message, or at once when the ingest is closed and
          empty.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._arrivals:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    return None
                self._changed.wait(left)
            arrival = self._arrivals.popleft()
            self._depth -= _unrolls(arrival)
            self._wake()
            return arrival

    def close(self) -> None:
        """Accepts no more messages and wakes all waiters. Queued messages can still be taken.

        A message that has got room is put before this returns.
        """
        with self._entering, self._changed:
            self._closed = True
            self._changed.notify_all()
            self._wake()

    def discard(self) -> None:
        """Removes what is queued."""
        with self._lock:
            self._arrivals.clear()
            self._depth = 0
            self._wake()

    def _wait_for(self, unrolls: int) -> asyncio.Future[None] | None:
        """Returns None if there is room now, else a future to await before checking again."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise IngestClosed
            if self._depth == 0 or self._depth + unrolls <= self._capacity:
                return None
            waiting = loop.create_future()
            self._waiter = (loop, waiting)
            return waiting

    def _wake(self) -> None:
        """Wakes the waiter for room. Called with the lock held."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, waiting = waiter
            with contextlib.suppress(RuntimeError):  # the loop has ended with all its waiters
                loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():  # the waiter may have been cancelled
        waiting.set_result(None)


def _unrolls(arrival: Arrival) -> int:
    """Returns the unrolls of a message that are not yet accounted for."""
    return int(arrival.unroll.frames.shape[0]) - arrival.offset


class Validator:
    """Checks messages against the learner's own spec and bounds, from which every size comes."""

    def __init__(
        self,
        unroll_spec: Unroll,
        fingerprint: str,
        max_envs: int,
        bounds: MessageBounds,
    ):
        """Makes a validator.

        Args:
          unroll_spec: a nest of ArraySpec of one environment: timestep and output [T + 1, ...],
            core_state [...]; frames and parameter_version are (), as they are separate fields.
          fingerprint: of the learner's specs.
          max_envs: largest number of environments in a message, E.
          bounds: of the numbers in a message.
        """
        self._bounds = bounds
        self._spec = unroll_spec
        self._fingerprint = fingerprint
        self._max_envs = max_envs
        self._unroll_length = int(unroll_spec.timestep.reward.shape[0]) - 1
        self._specs, self._num_core_state_specs = wire_specs(unroll_spec)
        self._specs_of: dict[int, list[pb.TensorSpec]] = {}  # E -> with E environments
        self._limits = [
            limit_of(spec.name, codec.numpy_dtype(spec.dtype), bounds.limits)
            for spec in self._specs
        ]
        num_actions = len(tree.flatten(unroll_spec.output.action))
        if len(bounds.actions) != num_actions:
            raise ValueError(
                f"There are bounds for {len(bounds.actions)} action leaves, but the action "
                f"has {num_actions}: give one (low, high) or None for each."
            )

    @property
    def max_message_bytes(self) -> int:
        """Returns an upper bound of the size of a valid message on the wire."""
        per_env = sum(
            math.prod(spec.shape) * codec.numpy_dtype(spec.dtype).itemsize for spec in self._specs
        )
        return self._max_envs * per_env + self.max_bytes_beside_tensors()

    def max_bytes_beside_tensors(self, num_envs: int | None = None) -> int:
        """Returns an upper bound of the size of what is not tensors in a valid message.

        Parsing and checking these takes far more time and memory than tensors of as many bytes.

        Args:
          num_envs: of the message; None: the most.
        """
        episodes = 4096 + 64 * self._unroll_length  # of one environment, a generous bound
        step_info = 4 * self._unroll_length * MOST_NAMES
        envs = self._max_envs if num_envs is None else num_envs
        return envs * (episodes + step_info) + 2**20

    def check(
        self,
        message: pb.Unrolls,
        newest_version: int | None,
        tensors: Sequence[memoryview] = (),
    ) -> Arrival | Rejection:
        """Checks everything but the sender and the sequence number.

        Args:
          message: as received.
          newest_version: the last parameter version that the learner incarnation in the message can
            have published; None if that was no learner of this run.
          tensors: from `codec.split`; those of the message come after them.

        Returns:
          An arrival with offset 0, or the reason for a rejection.
        """
        try:
            self._check_header(message, newest_version)
            self._check_size(message)
            arrays = self._decode(message.num_envs, [*tensors, *message.tensors])
            self._check_numbers(arrays)
            unroll = self._unroll(message, arrays)
            self._check_values(unroll)
            elapsed, waited, in_environments = _times(message)
            return Arrival(
                unroll=unroll,
                actor=message.actor,
                incarnation=message.incarnation,
                sequence=message.sequence,
                task=message.task,
                offset=0,
                episodes=self.episodes(
                    message.episodes, self._unroll_length * message.num_envs, message.task
                ),
                elapsed_seconds=elapsed,
                waited_seconds=waited,
                pace=(in_environments, unroll.timestep.reward[1:].size if in_environments else 0),
                faults=_faults(message.environment_faults, message.num_envs),
                step_info=_step_info(message.step_info, self._unroll_length * message.num_envs),
            )
        except Rejected as rejected:
            return rejected.rejection

    def episodes(self, messages: Sequence[pb.Episode], limit: int, task: int) -> list[Episode]:
        """Checks finished episodes and converts them from messages.

        Args:
          messages: as received.
          limit: largest possible number of episodes.
          task: the task played.

        Raises:
          Rejected: there are more episodes, or a number is not finite or out of range.
        """
        if len(messages) > limit:
            raise Rejected(
                pb.REASON_RANGE,
                f"There are {len(messages)} episodes, at most {limit} can have ended: send each "
                "once, with the unrolls in which it ended.",
            )
        of_info = sum(len(message.info) for message in messages)
        _check_count("numbers in the episodes' info", of_info, MOST_INFO)
        for message in messages:
            for name, value in message.info.items():
                _check_finite(name, value)
            self._check_episode(message, self._bounds.frames_per_step[task])
        return [
            Episode(message.episode_return, message.length, message.frames, dict(message.info))
            for message in messages
        ]

    def _check_episode(self, message: pb.Episode, frames_per_step: int) -> None:
        reward, length = self._bounds.limits.reward, message.length
        _check_finite("episode_return", message.episode_return)
        if not 1 <= length <= _MAX_LENGTH:
            raise Rejected(
                pb.REASON_RANGE,
                f"An episode's length is {length}: it must be 1 to {_MAX_LENGTH} agent steps, "
                "seams left out.",
            )
        if message.frames > frames_per_step * length:
            raise Rejected(
                pb.REASON_RANGE,
                f"An episode's frames are {message.frames} in {length} steps: a step plays at most "
                f"{frames_per_step}. Send one report for each episode; {_MORE_FRAMES}",
            )
        if abs(message.episode_return) > reward * length * (1.0 + _ROUNDING):
            raise Rejected(
                pb.REASON_RANGE,
                f"An episode's episode_return is {message.episode_return} in {length} steps: a "
                f"reward is at most {reward:g}. Raise limits.reward of the learner if the "
                "environment gives larger ones.",
            )

    def _check_header(self, message: pb.Unrolls, newest_version: int | None) -> None:
        if message.fingerprint != self._fingerprint:
            raise Rejected(
                pb.REASON_FINGERPRINT,
                f"fingerprint is {message.fingerprint[:80]!r}, the learner's is "
                f"{self._fingerprint!r}: join again for the spec that the learner has now.",
            )
        if not 1 <= message.num_envs <= self._max_envs:
            raise Rejected(
                pb.REASON_NUM_ENVS,
                f"num_envs is {message.num_envs}, it must be 1 to {self._max_envs}: send smaller "
                "messages or raise learner.max_envs_per_message.",
            )
        if len(message.frames) != message.num_envs:
            raise Rejected(
                pb.REASON_NUM_ENVS,
                f"frames has {len(message.frames)} numbers for num_envs {message.num_envs}: send "
                "one for each environment.",
            )
        num_tasks = len(self._bounds.frames_per_step)
        if message.task >= num_tasks:
            raise Rejected(
                pb.REASON_RANGE,
                f"task is {message.task}, the run has {num_tasks}: play the task that JoinReply or "
                "the last receipt said.",
            )
        version, incarnation = message.parameter_version, message.learner_incarnation
        if incarnation == 0:
            raise Rejected(
                pb.REASON_VERSION,
                "learner_incarnation is 0: name the learner whose parameters acted.",
            )
        if newest_version is None:
            raise Rejected(
                pb.REASON_VERSION,
                f"learner_incarnation is {incarnation}, which is none of this run's learners: act "
                "with parameters from GetParameters and name their incarnation and version.",
            )
        if version > newest_version:
            raise Rejected(
                pb.REASON_VERSION,
                f"parameter_version is {version}, the newest that was published is "
                f"{newest_version}: act "
                "with parameters from GetParameters and name their incarnation and version.",
            )

    def _decode(self, num_envs: int, tensors: Sequence[bytes | memoryview]) -> list[np.ndarray]:
        if len(tensors) != len(self._specs):
            raise Rejected(
                pb.REASON_TENSOR_COUNT,
                f"There are {len(tensors)} tensors, the spec has {len(self._specs)}: send one "
                "for each of JoinReply.unroll_specs, in that order.",
            )
        specs = self._specs_of.get(num_envs)
        if specs is None:
            specs = codec.with_environments(self._specs, self._num_core_state_specs, num_envs)
            self._specs_of[num_envs] = specs
        try:
            return codec.decode(tensors, specs)
        except codec.CodecError as error:
            raise Rejected(
                pb.REASON_TENSOR_SIZE,
                f"{error} Send it in C order with the shape and dtype of the spec.",
            ) from None

    def _unroll(self, message: pb.Unrolls, arrays: list[np.ndarray]) -> Unroll:
        frames = np.array(message.frames, np.int64)
        unroll: Unroll = tree.unflatten_as(self._spec, arrays)
        _check_step_types(unroll.timestep.step_type)
        self._check_frames(frames, unroll.timestep.step_type, message.task)
        return unroll._replace(
            frames=frames.astype(np.int32),
            parameter_version=np.full(message.num_envs, message.parameter_version, np.int64),
        )

    def _check_size(self, message: pb.Unrolls) -> None:
        size = message.ByteSize() - sum(map(len, message.tensors))
        if size > (most := self.max_bytes_beside_tensors(message.num_envs)):
            raise Rejected(
                pb.REASON_RANGE,
                f"What is not tensors has {size} bytes, at most {most} for {message.num_envs} "
                "environments: send fewer numbers of info.",
            )

    def _check_frames(self, frames: np.ndarray, step_type: np.ndarray, task: int) -> None:
        """Checks frames [E] against the steps in rows 1..T of step_type [T + 1, E]."""
        steps = (step_type[1:] != _FIRST).sum(axis=0)
        most = self._bounds.frames_per_step[task]
        wrong = (frames < steps) | (frames > most * steps)
        if wrong.any():
            env = int(np.flatnonzero(wrong)[0])
            violation = None
            if frames[env] < steps[env]:
                violation = Kind.MISSING_FRAMES
            elif steps[env] < len(step_type) - 1 and frames[env] <= most * (len(step_type) - 1):
                violation = Kind.SEAM_FRAMES
            raise Rejected(
                pb.REASON_RANGE,
                f"frames holds {frames[env]} for the {steps[env]} steps of environment {env}: a "
                f"step plays 1 to {most}, a seam none. {_MORE_FRAMES}",
                violation=violation,
            )

    def _check_numbers(self, arrays: list[np.ndarray]) -> None:
        """Checks that all numbers are finite and within the limits of their leaf."""
        for spec, limit, array in zip(self._specs, self._limits, arrays, strict=True):
            if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
                _check_range(f"{spec.name} (a bool, as a byte)", array.view(np.uint8), 0, 1)
            if limit is None or (number := limit.beyond(array)) is None:
                continue
            if numbers.is_swapped(array):
                violation = numbers.byte_order(spec.name)
                detail = f"{spec.name} holds {number}: {violation.detail}"
                raise Rejected(pb.REASON_RANGE, detail, violation=violation.kind)
            of_network = spec.name.startswith(("output", "core_state"))
            if not math.isfinite(number):
                raise Rejected(
                    pb.REASON_NOT_FINITE,
                    f"{spec.name} holds {number}: all its numbers must be finite. Look at the "
                    "environment and at the parameters it acted with.",
                    of_network,
                )
            raise Rejected(
                pb.REASON_RANGE,
                f"{spec.name} holds {number}: its absolute value may be {limit.value:g} at most. "
                f"{limit.advice}".rstrip(),
                of_network,
            )

    def _check_values(self, unroll: Unroll) -> None:
        _check_range("timestep/discount", unroll.timestep.discount, 0, 1)
        # Row 0 repeats a checked row or, in the first unroll, holds no action.
        actions = tree.map_structure(lambda action: action[1:], unroll.output.action)
        _check_within("output/action", actions, self._bounds.actions)
        if self._bounds.observations:
            seen = unroll.timestep.observation
            _check_within("timestep/observation", seen, self._bounds.observations)


class Rejected(Exception):
    """Carries a `Rejection` up to the caller of the validator."""

    def __init__(
        self,
        reason: "pb.Reason",
        detail: str,
        of_network: bool = False,
        violation: Kind | None = None,
    ):
        super().__init__(detail)
        self.rejection = Rejection(reason, detail, of_network, violation)


def _check_count(what: str, count: int, most: int) -> None:
    """Rejects so many entries that reading them would keep the learner from others."""
    if count > most:
        raise Rejected(
            pb.REASON_RANGE,
            f"There are {count} {what}, at most {most} are read in a message: send fewer. A run "
            f"records {MOST_NAMES} names.",
        )


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise Rejected(
            pb.REASON_RANGE,
            f"An episode's {ascii(name[:80])[1:-1]} is {value}: it must be finite. Look at the "
            "environment.",
        )


def _step_info(messages: Sequence[pb.StepInfo], limit: int) -> dict[str, np.ndarray]:
    """Converts the numbers of every step: name -> [N].

    Raises:
      Rejected: there are more than `limit` numbers of a name, one is not finite, or there are too
        many names.
    """
    _check_count("names in step_info", len(messages), _MOST_STEP_INFO)
    found = {message.name: np.array(message.values, np.float32) for message in messages}
    for name, values in found.items():
        shown = ascii(name[:80])[1:-1]
        if values.size > limit:
            raise Rejected(
                pb.REASON_RANGE,
                f"step_info has {values.size} numbers of {shown}, at most {limit} steps were "
                "played: send one for each step.",
            )
        if not np.isfinite(values).all():
            raise Rejected(
                pb.REASON_RANGE,
                f"step_info has a number of {shown} that is not finite: leave such out.",
            )
    return found


def _faults(messages: Sequence[pb.EnvironmentFault], num_envs: int) -> list[EnvironmentFault]:
    """Converts environment faults: the last E, without kinds that only a newer protocol knows."""
    return [
        EnvironmentFault(
            fault.environment,
            "hung" if fault.kind == pb.FAULT_KIND_HUNG else "crashed",
            "".join(c if c.isprintable() else "?" for c in fault.detail[:_MAX_FAULT_DETAIL]),
        )
        for fault in messages[-num_envs:]
        if fault.kind in (pb.FAULT_KIND_CRASHED, pb.FAULT_KIND_HUNG)
    ]


def _times(message: pb.Unrolls) -> tuple[float, float, float]:
    """Checks the times in a message, in seconds.

    Returns:
      How many passed since the message before, how many of them were waited, and how many the
      environments took.
    """
    elapsed, waited = message.elapsed_seconds, message.waited_seconds
    in_environments = message.environment_seconds
    for name, value in (
        ("elapsed_seconds", elapsed),
        ("waited_seconds", waited),
        ("environment_seconds", in_environments),
    ):
        if not 0.0 <= value <= _MAX_SECONDS:
            raise Rejected(
                pb.REASON_RANGE,
                f"{name} is {value}: it must be 0 to {_MAX_SECONDS:g}. Look at the actor's clock.",
            )
    if waited > elapsed + _SLACK_SECONDS:
        raise Rejected(
            pb.REASON_RANGE,
            f"waited_seconds is {waited:g} of elapsed_seconds {elapsed:g}: it may be "
            f"{_SLACK_SECONDS:g} more at most. Count both since the message before.",
        )
    return elapsed, waited, in_environments


def _check_within(name: str, nest: Nest, bounds: Sequence[Bounds | None]) -> None:
    """Checks the leaves of a nest against the bounds of each."""
    for (path, array), of_leaf in zip(tree.flatten_with_path(nest), bounds, strict=True):
        if of_leaf is not None:
            _check_range("/".join(map(str, (name, *path))), array, of_leaf.low, of_leaf.high)


def _check_range(name: str, array: np.ndarray, low: Any, high: Any) -> None:
    wrong = (array < low) | (array > high)
    if wrong.any():
        value, low, high = (
            np.broadcast_to(x, array.shape)[wrong].flat[0] for x in (array, low, high)
        )
        detail = f"{name} holds {value}: it must be {low} to {high}. "
        if numbers.is_swapped(array):
            violation = numbers.byte_order(name)
            raise Rejected(pb.REASON_RANGE, detail + violation.detail, violation=violation.kind)
        raise Rejected(pb.REASON_RANGE, f"{detail}Look at the environment and its spaces.")


def _check_step_types(step_type: np.ndarray) -> None:
    """Checks of rows [T + 1, E] that they are step types, with FIRST exactly after each LAST."""
    _check_range("timestep/step_type", step_type, _FIRST, _LAST)
    wrong = (step_type[:-1] == _LAST) != (step_type[1:] == _FIRST)
    if wrong.any():
        row, env = np.argwhere(wrong)[0]
        before, after = (StepType(step_type[row + i, env]).name for i in (0, 1))
        raise Rejected(
            pb.REASON_RANGE,
            f"timestep/step_type goes from {before} to {after} in rows {row} and {row + 1} of "
            f"environment {env}: LAST is followed by FIRST, and FIRST only follows LAST.",
        )


def wire_specs(unroll_spec: Unroll) -> tuple[list[pb.TensorSpec], int]:
    """Returns the specs of an unroll on the wire, and how many (the last) are core state."""
    core_state = codec.specs(
        unroll_spec._replace(timestep=(), output=())  # type: ignore[arg-type]
    )
    return [*codec.specs(unroll_spec._replace(core_state=())), *core_state], len(core_state)
