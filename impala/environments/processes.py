"""Environments in processes of their own: one that crashes, hangs or leaks does not end the others.

Observations, rewards and actions lie in memory that all processes share. A socket to each of them
carries a command, which starts a step, and the answer, which ends it. An environment that raises,
whose process ends, or that does not answer in time is given a new process; its episode ends as if
by a time limit.
"""

import contextlib
import faulthandler
import fcntl
import json
import logging
import math
import multiprocessing
import multiprocessing.sharedctypes
import os
import pathlib
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper

from impala.environments import base
from impala.environments.failure import EnvironmentFailed, close, failure_of
from impala.environments.gymnasium import converted, merged, number, numbers
from impala.runtime.backoff import Backoff
from impala.types import EnvironmentFault, EnvironmentStep, Nest, TimeStep

_log = logging.getLogger(__name__)

_STARTING = 5.0  # times as long as a step an environment may take to start: many start at once
_CLOSE_SECONDS = 2.0  # that a step under way has to finish when its environment is closed
_REST_SECONDS = 1.0  # after the deadline, until more comes of an answer that has begun
_KILL_SECONDS = 1.0  # until a killed process is left to the kernel
_MAX_FAILURES = 10  # in a row, without one step between them
_HEALTHY_SECONDS = 60.0  # a process that has lived for this long is restarted at once again
_BACKOFF = Backoff(0.1, 5.0)  # from the second restart on
_MAX_DETAIL = 400  # characters
_MAX_ANSWER = 1 << 20  # bytes
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "impala"  # any value is a yes; this one was not the user's
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

_COMMAND = struct.Struct("<cBq")  # what, the half of the observations to write to, seed
_ANSWER = struct.Struct("<cI")  # what, the length of the JSON after it
_ALIGNMENT = 64  # bytes

Kind = Literal["crashed", "hung"]


class Processes(base.Environment):
    """E copies of an environment, each in a process of its own, started afresh.

    An environment that fails is reported once in `EnvironmentStep.faults`. If it fails within an
    episode, that step is LAST with its previous observation, reward 0, discount 1 and one frame;
    the next one is FIRST, from a new process with a new seed. One that fails where FIRST is due is
    replaced before the step ends. The first restart is immediate; the pause before others
    doubles, up to 5 s, unless the process had lived for a minute. The other environments wait
    meanwhile, and are not touched.

    Args:
      make: makes one environment; it is pickled, also if it was defined in a notebook.
      num_envs: E.
      name: of the environment, for messages.
      seconds: that a step may take, resets at the end of an episode included; the start of a
        process and its first reset may take five times as long.
      max_bytes: resident memory of a process with which it is replaced at the end of an episode; 0
        is no limit.
      first: index of environment 0 among the actor's, for messages and faults.

    Raises:
      Exception: whatever `make` raises.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env],
        num_envs: int,
        *,
        name: str,
        seconds: float = 60.0,
        max_bytes: int = 0,
        first: int = 0,
    ) -> None:
        example = make()
        self.observation_space: gym.Space = example.observation_space
        self.action_space: gym.Space = example.action_space
        close(example, name)
        self.num_envs = num_envs
        self._name = name
        self._first = first
        spaces = self.observation_space, self.action_space, num_envs
        buffer = multiprocessing.sharedctypes.RawArray("B", _Memory(*spaces, None).num_bytes)
        self._memory = _Memory(*spaces, buffer)
        self._half = 0  # of the memory, that the step under way is written to
        self._faults: list[EnvironmentFault] = []
        self._workers = [
            _Worker(_Task(CloudpickleWrapper(make), name, i, *spaces, max_bytes), buffer, seconds)
            for i in range(num_envs)
        ]

    def reset(self, seed: int) -> TimeStep:
        """As `Environment.reset`; the processes are started here.

        Raises:
          EnvironmentFailed: if one of them fails ten times in a row.
        """
        self._seed = seed
        self._is_first = np.ones(self.num_envs, np.bool_)  # where the step under way begins one
        for worker, first_seed in zip(self._workers, base.seeds(seed, self.num_envs), strict=True):
            worker.start(self._half, int(first_seed))
        self._collect()
        self._is_first[:] = False
        return base.first_timestep(self._observation(self._half), self.num_envs)

    def send(self, action: Nest) -> None:
        def put(name: str, space: gym.Space, to: np.ndarray, value: np.ndarray) -> None:
            np.copyto(to, value)

        base.map_leaves(put, "action", self.action_space, self._memory.action, action)
        self._half = 1 - self._half
        for worker in self._workers:
            worker.step(self._half)

    def recv(self) -> EnvironmentStep:
        """As `Environment.recv`.

        Raises:
          EnvironmentFailed: if one of them fails ten times in a row.
        """
        infos = self._collect()
        memory, first = self._memory, self._is_first
        terminated, truncated = memory.ended[self._half].T
        self._is_first = terminated | truncated
        step = base.environment_step(
            self._observation(self._half),
            memory.reward[self._half],
            terminated,
            truncated,
            first,
            merged(infos),
        )
        faults, self._faults = self._faults, []
        return step._replace(faults=faults)

    def render(self) -> np.ndarray:
        raise ValueError("nothing to render: environments in processes of their own have no window")

    def close(self) -> None:
        for worker in self._workers:
            worker.disconnect()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
        for worker in self._workers:
            worker.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def _collect(self) -> list[dict[str, float]]:
        """Waits for every environment; the infos, none of one whose episode a failure has cut."""
        infos: list[dict[str, float]] = [{} for _ in self._workers]
        due = list(range(self.num_envs))
        while due:
            for i in due:
                self._workers[i].start_pending()
            again = []
            for i in due:
                try:
                    infos[i] = self._workers[i].collect()
                except _Failed as failure:
                    self._report(i, failure)
                    if self._is_first[i]:  # the step under way begins its episode
                        self._restart(i, self._half)
                        again.append(i)
                    else:
                        self._cut(i)
                        self._restart(i, 1 - self._half)
            due = again
        return infos

    def _cut(self, i: int) -> None:
        """Ends an episode where it was before this step."""

        def keep(name: str, space: gym.Space, halves: np.ndarray) -> None:
            halves[self._half, i] = halves[1 - self._half, i]

        base.map_leaves(keep, "observation", self.observation_space, self._memory.observation)
        self._memory.reward[self._half, i] = 0.0
        self._memory.ended[self._half, i] = False, True

    def _restart(self, i: int, half: int) -> None:
        worker = self._workers[i]
        entropy = np.random.SeedSequence([self._seed, i, worker.starts])
        worker.restart(half, int(entropy.generate_state(1)[0] >> 1))

    def _report(self, i: int, failure: "_Failed") -> None:
        """Logs a failure and notes it for the next step; raises one if there are too many."""
        index, worker = self._first + i, self._workers[i]
        more = f"\n{failure.traceback}" if failure.traceback else ""
        detail = f"fault {worker.faults}, {failure.detail}"
        what = f"environment {index} of {self._name} {failure.kind}: {detail}"
        _log.warning("%s; starting it again%s", what, more)
        self._faults.append(
            EnvironmentFault(
                *(index, failure.kind, detail[:_MAX_DETAIL], failure.where),
                cuts=not self._is_first[i],
            )
        )
        if worker.failures >= _MAX_FAILURES:
            raise EnvironmentFailed(
                f"{what}. It failed {worker.failures} times in a row without a step between them.",
                f"{failure.detail}, {worker.failures} times in a row",
                failure.where,
            )

    def _observation(self, half: int) -> Nest:
        def of_half(name: str, space: gym.Space, halves: np.ndarray) -> np.ndarray:
            return halves[half]

        return base.map_leaves(
            of_half, "observation", self.observation_space, self._memory.observation
        )


class _Memory:
    """Arrays in memory that the processes share.

    What environments give is there twice, in halves that are written in turns: when one is lost in
    the middle of a step, its step before is whole; and the next one that starts can write already.

    Args:
      observation_space: of one environment.
      action_space: of one environment.
      num_envs: E.
      buffer: where they lie; None only computes `num_bytes`.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        num_envs: int,
        buffer: Any,
    ) -> None:
        self.num_bytes = 0
        self._buffer = buffer

        def leaf(name: str, space: gym.Space, *leading: int) -> np.ndarray | None:
            assert space.dtype is not None
            return self._array((*leading, num_envs, *(space.shape or ())), space.dtype)

        def halves(name: str, space: gym.Space) -> np.ndarray | None:
            return leaf(name, space, 2)

        self.observation = base.map_leaves(halves, "observation", observation_space)
        self.action = base.map_leaves(leaf, "action", action_space)
        self.reward: Any = self._array((2, num_envs), np.dtype(np.float64))
        # Whether it has terminated, and whether it was truncated.
        self.ended: Any = self._array((2, num_envs, 2), np.dtype(np.bool_))

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        start = self.num_bytes
        self.num_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None:
            return None
        return np.ndarray(shape, dtype, self._buffer, start)


class _Failed(Exception):
    """An environment does not go on."""

    def __init__(self, kind: Kind, detail: str, traceback: str = "", where: str = "") -> None:
        super().__init__(detail)
        self.kind, self.detail, self.traceback, self.where = kind, detail, traceback, where


class _Task(NamedTuple):
    """What a process is to do."""

    make: Callable[[], gym.Env]
    name: str  # of the environment, for messages
    place: int  # in the memory
    observation_space: gym.Space
    action_space: gym.Space
    num_envs: int
    max_bytes: int


class _Worker:
    """The process of one environment, and those after it."""

    def __init__(self, task: _Task, buffer: Any, seconds: float) -> None:
        self._task, self._buffer, self._seconds = task, buffer, seconds
        self._process: Any = None
        self._channel: socket.socket | None = None
        self._pending: tuple[int, int] | None = None  # half and seed of a start that is due
        self._start_at = 0.0
        self._started_at = 0.0
        self._told_at = 0.0  # when the command under way was given
        self._is_starting = False  # the answer under way is that to a start
        self._quick_failures = 0  # in a row, each of a process that did not live for long
        self.starts = 0
        self.faults = 0
        self.failures = 0  # in a row, without a step between them

    def start(self, half: int, seed: int) -> None:
        """Starts the process and its environment, which writes its first observation to a half."""
        # A fork of a process that has threads (gRPC's, TensorFlow's) may hang. The server forks
        # from one without, in which what a process needs has been imported already.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self._channel, theirs = socket.socketpair()
        with theirs:
            process = context.Process(
                target=_serve, args=(self._task, self._buffer, theirs), daemon=True
            )
            with _safe_path():
                process.start()
        self._process = process
        self.starts += 1
        self._started_at = time.monotonic()
        self._is_starting = True
        self._request(b"r", half, seed)

    def restart(self, half: int, seed: int) -> None:
        """Starts another process: at once, or in `start_pending` after a pause."""
        now = time.monotonic()
        if now - self._started_at >= _HEALTHY_SECONDS:
            self._quick_failures = 0
        self._quick_failures += 1
        if self._quick_failures == 1:
            self.start(half, seed)
            return
        self._start_at = now + _BACKOFF.pause(self._quick_failures - 1)
        self._pending = half, seed

    def step(self, half: int) -> None:
        """Starts a step, unless a start is under way."""
        if not self._is_starting and self._pending is None:
            self._request(b"s", half, 0)

    def start_pending(self) -> None:
        """Starts the process that is due after a pause, if one is, and waits for the pause."""
        if self._pending is not None:
            time.sleep(max(0.0, self._start_at - time.monotonic()))
            pending, self._pending = self._pending, None
            self.start(*pending)

    def collect(self) -> dict[str, float]:
        """Waits for the answer: the environment's info; `_Failed` if there is none in time.

        The process of one that has failed is ended, so that it writes no more. The time runs from
        the command on, so that those that hang together cost it once.
        """
        seconds = self._seconds * (_STARTING if self._is_starting else 1.0)
        try:
            info = self._answer(self._told_at + seconds, seconds)
        except _Failed:
            self.faults += 1
            self.failures += 1
            self.disconnect()
            self.kill()
            self.wait(_KILL_SECONDS)
            raise
        if self._is_starting:
            self._is_starting = False
        else:
            self.failures = 0
        return info

    def disconnect(self) -> None:
        """Lets the process end by itself."""
        self._pending = None
        if self._channel is not None:
            self._channel.close()

    def wait(self, seconds: float) -> None:
        """Waits for the end of the process."""
        if self._process is not None:
            self._process.join(max(0.0, seconds))

    def kill(self) -> None:
        """Kills the process and those that it has started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not have had a group of its own yet

    def _request(self, what: bytes, half: int, seed: int) -> None:
        assert self._channel is not None
        self._told_at = time.monotonic()
        with contextlib.suppress(OSError):  # it is gone, and the answer will say so
            self._channel.send(_COMMAND.pack(what, half, seed))

    def _answer(self, deadline: float, seconds: float) -> dict[str, float]:
        assert self._channel is not None
        data = b""
        size = _ANSWER.size
        try:
            while len(data) < size:
                least = _REST_SECONDS if data else 1e-3  # an answer has often come long ago
                self._channel.settimeout(max(deadline - time.monotonic(), least))
                part = self._channel.recv(1 << 16)
                if not part:
                    raise self._ended()
                data += part
                if len(data) >= _ANSWER.size:
                    what, length = _ANSWER.unpack_from(data)
                    if length > _MAX_ANSWER:
                        raise _Failed("crashed", f"its answer has {length} bytes")
                    size = _ANSWER.size + length
        except TimeoutError:
            if self._process.exitcode is not None:  # a child of it keeps the socket open
                raise self._ended() from None
            self._say_where_it_hangs()
            raise _Failed("hung", f"no answer within {seconds:g} s") from None
        except OSError:
            raise self._ended() from None
        try:
            said = json.loads(data[_ANSWER.size :]) if length else {}
        except ValueError:
            raise _Failed("crashed", "its answer is not JSON") from None
        if what != b"k":
            raise _Failed("crashed", said["detail"], said["traceback"], said["where"])
        info: dict[str, float] = said
        return info

    def _ended(self) -> _Failed:
        """How the process ended."""
        self._process.join(_KILL_SECONDS)
        code = self._process.exitcode
        if code is None:
            return _Failed("crashed", "its process has closed its connection")
        if code >= 0:
            return _Failed("crashed", f"its process ended with status {code}")
        with contextlib.suppress(ValueError):
            return _Failed("crashed", f"its process was killed by {signal.Signals(-code).name}")
        return _Failed("crashed", f"its process was killed by signal {-code}")

    def _say_where_it_hangs(self) -> None:
        """Makes the process print its stack."""
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.1)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Lets the fork server, if it is started in here, take no modules from the working directory.

    It runs `python -c`, which looks there first. Its children get the path of this process.
    """
    if sys.flags.safe_path:
        yield
        return
    os.environ[_SAFE_PATH] = _OURS
    try:
        yield
    finally:
        del os.environ[_SAFE_PATH]


# What happens in a process of its own.


def _serve(task: _Task, buffer: Any, channel: socket.socket) -> None:
    """Plays one environment until the channel closes."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]  # what the environment starts is its own affair
    os.setsid()  # so that it can be killed together with what it starts
    _die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    environment, method = None, "step"
    try:
        with contextlib.ExitStack() as stack:
            environment = task.make()
            stack.callback(close, environment, task.name)  # whose error would hide the first one
            player = _Player(task, environment, buffer)
            while command := channel.recv(_COMMAND.size, socket.MSG_WAITALL):
                what, half, seed = _COMMAND.unpack(command)
                method = "reset" if what == b"r" else "step"
                info = player.reset(half, seed) if what == b"r" else player.step(half)
                said = json.dumps(info).encode() if info else b""
                channel.sendall(_ANSWER.pack(b"k", len(said)) + said)
    except BaseException as error:
        detail, where = failure_of(error, task.name, environment, method)
        said = json.dumps(
            {
                "detail": detail[:_MAX_DETAIL],
                "traceback": traceback.format_exc()[-20_000:],
                "where": where[-_MAX_DETAIL:],
            }
        ).encode()
        with contextlib.suppress(OSError):
            channel.sendall(_ANSWER.pack(b"e", len(said)) + said)
    finally:
        channel.close()
        os.killpg(0, signal.SIGKILL)  # whatever it has started, and itself


def _die_with_parent() -> None:
    """Asks the kernel to kill this process and what it starts when the actor's ends.

    It needs no code to run here, where the environment may hang with the interpreter's lock held.
    The pipe whose end `sentinel` is says nothing until the actor ends, and its signal, SIGKILL,
    goes to the process group.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


class _Player:
    """One environment, whose steps go to the shared memory."""

    def __init__(self, task: _Task, environment: gym.Env, buffer: Any) -> None:
        spaces = task.observation_space, task.action_space
        self._task, self._environment = task, environment
        if (environment.observation_space, environment.action_space) != spaces:
            raise ValueError("its spaces are not those of the others")
        self._memory = _Memory(*spaces, task.num_envs, buffer)
        self._ended = False

    def reset(self, half: int, seed: int | None = None) -> dict[str, float]:
        observation, info = self._environment.reset(seed=seed)
        self._check_memory()
        return self._write(half, observation, 0.0, False, False, info)

    def step(self, half: int) -> dict[str, float]:
        if self._ended:
            self._check_memory()
            return self.reset(half)
        action = base.map_leaves(
            lambda name, space, leaf: leaf[self._task.place].copy(),
            "action",
            self._task.action_space,
            self._memory.action,
        )
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return self._write(half, observation, number(reward), terminated, truncated, info)

    def _write(
        self,
        half: int,
        observation: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: dict[str, Any],
    ) -> dict[str, float]:
        place = self._task.place

        def put(name: str, space: gym.Space, value: Any, halves: np.ndarray) -> None:
            array = converted(name, space, value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} is not finite: {array}")
            halves[half, place] = array

        base.map_leaves(
            put, "observation", self._task.observation_space, observation, self._memory.observation
        )
        if not abs(reward) <= _LARGEST_FLOAT32:
            raise ValueError(f"the reward is {reward}")
        self._memory.reward[half, place] = reward
        self._memory.ended[half, place] = terminated, truncated
        self._ended = bool(terminated or truncated)
        return numbers(info)

    def _check_memory(self) -> None:
        limit = self._task.max_bytes
        if limit and (held := _resident_bytes()) > limit:
            raise MemoryError(
                f"its process holds {held:,} bytes, actor.max_environment_bytes is {limit:,}"
            )


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
