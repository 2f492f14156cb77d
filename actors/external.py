"""A client for loops that call the agent: an actor whose environments are played elsewhere.

A session is one environment of the actor, with a group and unrolls of its own: sessions of
different speed never wait for each other, and a loop that ends with the process loses what a killed
actor loses, the unroll that was not full yet. Where a session ends, the next one goes on with its
environment, so that short episodes fill unrolls too.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np
import tree

from actors.channel import NO_SECURITY
from actors.client import LearnerClient, actor_name, new_incarnation
from actors.connection import Stopped
from impala.config.schema import RepeatConfig
from impala.environments import base
from impala.environments.external import External
from impala.environments.spaces import Spaces, limits
from impala.parts.components import Allowed
from impala.runtime import process
from impala.runtime.security import ClientSecurity
from impala.types import EnvironmentFault, EnvironmentStep, Nest, StepType, TimeStep

if TYPE_CHECKING:  # heavy, and needed only once the learner has answered
    from actors.actor import Group
    from actors.policy import Policy
    from actors.run import ActorSetup

_MOST_SESSIONS = 4096  # at once: as many environments as the learner follows of an actor
_DRAIN_SECONDS = 5.0
_numbers = itertools.count()  # of the clients of this process


def connect(
    learner: str,
    *,
    observation_space: gym.Space | None = None,
    action_space: gym.Space | None = None,
    name: str | None = None,
    reconnect_timeout: float | None = None,
    allow: str | Sequence[str] = (),
    security: ClientSecurity = NO_SECURITY,
) -> "Client":
    """Connects to a learner, for which a custom loop then plays: see `Client`.

    Waits for the learner.

    Args:
      learner: host:port or unix:PATH.
      observation_space: what the loop shows, to be compared with what the learner expects; None: it
        is not.
      action_space: what the loop can do, likewise.
      name: unique in the fleet, 1 to 200 characters; None: host, process id and a number.
      reconnect_timeout: seconds without a learner after which to give up; None: never.
      allow: code that may be imported if the learner names it: MODULE, MODULE:ATTRIBUTE, or a list.
      security: the credentials to present, and how to verify the learner.

    Raises:
      ValueError: the spaces differ, or the run cannot be played from outside.
      LearnerError: the learner refuses, or does not come.
      RunFinished: training has ended.
      SecurityError: the files of `security` cannot be used.
    """
    security.check()
    incarnation = new_incarnation()
    wire = LearnerClient(
        learner,
        name=name or actor_name(next(_numbers)),
        incarnation=incarnation,
        reconnect_timeout=reconnect_timeout,
        security=security,
        gives_signs_of_life=True,
    )
    try:
        reply = wire.join()
        if reply.needs_permits:
            raise ValueError(
                f"The learner at {learner} bounds the policy lag by permits, which are for actors "
                "whose environments step together: start it without mix.lag_budget, mix.exact_lag "
                "and deterministic."
            )
        tasks = [task["name"] for task in json.loads(reply.settings or "{}").get("tasks", [])]
        if len(tasks) != 1:
            names = ", ".join(tasks)
            raise ValueError(
                f"The learner at {learner} has the tasks {names}; a loop plays one: start a "
                "learner for each."
            )
        process.load_tensorflow(use_gpus=False, is_guest=True)
        import tensorflow as tf

        from actors.run import ActorSetup

        with tf.device("/CPU:0"):
            setup = ActorSetup(reply, "actor", Allowed.of(allow))
            client = Client(wire, setup, reply.limits.reward or math.inf)
        for what, ours, theirs in (
            ("observation_space", observation_space, client.observation_space),
            ("action_space", action_space, client.action_space),
        ):
            if ours is not None and ours != theirs:
                raise ValueError(
                    f"{what} is {ours}, that of the learner at {learner} is {theirs}: start the "
                    "learner with this loop's spaces, or correct it here."
                )
    except BaseException:
        wire.close()
        raise
    return client


class Client:
    """Lets loops play for a learner, each through a session of its own.

        with impala.connect("learner-host:50051") as client:
            session = client.session()
            while True:  # an episode
                observation = game.start()
                while not game.is_over:
                    observation, reward = game.play(session.act(observation))
                    session.reward(reward)
                session.end(observation)

    Any thread may ask for sessions; each session is used by one thread at a time.

    Args:
      wire: has joined.
      setup: from its reply.
      most_reward: largest absolute value of a reward.
    """

    def __init__(self, wire: LearnerClient, setup: "ActorSetup", most_reward: float) -> None:
        self._wire, self._built, self._most_reward = wire, setup, most_reward
        self._config = setup.tasks[0].environment
        if self._config.repeat != RepeatConfig():
            raise ValueError(
                "The learner's environment.repeat holds actions for several frames, and these are "
                "played elsewhere: leave it out there, and repeat them in your loop."
            )
        self.observation_space, self.action_space = _spaces(setup)
        """What `Session.act` takes, and what it returns."""
        self._lock = threading.Lock()
        self._free: list[_Row] = []  # between sessions
        self._open = 0
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session(self) -> "Session":
        """Begins a session: one game, robot, user or other sequence of episodes.

        Raises:
          ValueError: 4096 sessions are open.
        """
        with self._lock:
            if self._open == _MOST_SESSIONS:
                raise ValueError(
                    f"{self._open} sessions are open, and a learner follows {_MOST_SESSIONS} of a "
                    "client: close those that are over, or connect once more."
                )
            row = self._free.pop() if self._free else self._new_row()
            self._open += 1
            self._wire.players = self._open
        return Session(self, row)

    def close(self) -> None:
        """Leaves the learner. Waits a few seconds for its last receipts.

        What sessions have played since their last full unroll is lost.
        """
        self._wire.stop()
        self._wire.drain(_DRAIN_SECONDS)
        self._wire.close()

    def _new_row(self) -> "_Row":
        import tensorflow as tf

        from actors import policy
        from impala.parts import build

        setup, number = self._built, self._made
        with tf.device("/CPU:0"):
            agent = setup.agent
            if number:  # each row keeps its parameters to the end of its unroll
                agent = build.agent(setup.config, *setup.spaces, own=setup.own)
            chosen = policy.make_policy(agent, setup.config, setup.spaces)
        own = self.observation_space, self.action_space
        external, environment = _environment(setup, own, number)
        self._made += 1
        return _Row(self._wire, setup, chosen, external, environment, number)

    def _check(self) -> None:
        """Raises what has ended the connection, if anything has."""
        with _closed():
            self._wire.await_turn(1)

    def _ended(self, row: "_Row") -> None:
        with self._lock:
            self._open -= 1
            self._wire.players = max(1, self._open)
            if row.error is None:
                self._free.append(row)


class Session:
    """Episodes that one loop plays, one after another; from `Client.session`.

    Calls raise `RunFinished` once training has ended, and `LearnerError` if the learner cannot be
    worked with any more. `act` and `end` wait while the learner takes no more experience.
    """

    def __init__(self, client: Client, row: "_Row") -> None:
        self._client, self._row = client, row
        self._observation_space = client.observation_space
        self._is_open = True
        self._acts = False  # in an episode
        self._reward = 0.0  # since the last action

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def act(self, observation: Nest) -> Nest:
        """Returns the action for an observation, an element of the client's `action_space`.

        The first call, and the first after `end`, begins an episode.

        Args:
          observation: an element of the client's `observation_space`, or what NumPy makes one of.

        Raises:
          ValueError: it is not in the space. Nothing has happened: call again with one that is.
        """
        seen = self._checked(observation)
        if not self._acts:
            action = self._row.begin(seen)
        else:
            action = self._row.go_on(seen, self._taken_reward(), StepType.MID)
        self._acts = True
        return tree.map_structure(lambda leaf: np.array(leaf[0])[()], action)

    def reward(self, reward: float) -> None:
        """Adds to the reward of the last action.

        Raises:
          ValueError: it is no finite number, or there was no action in this episode.
        """
        if not self._acts:
            raise ValueError("reward comes after act: there was no action in this episode yet.")
        added = _number("The reward", reward)
        total, most = self._reward + added, self._client._most_reward
        if not abs(total) <= most:
            raise ValueError(
                f"The reward of this action is {total:g} with {added:g}; the learner takes "
                f"-{most:g} to {most:g}: scale it, or raise its limits.reward."
            )
        self._reward = total

    def end(
        self,
        observation: Nest,
        *,
        truncated: bool = False,
        info: Mapping[str, float] | None = None,
    ) -> None:
        """Ends the episode.

        Args:
          observation: the last one, to which there is no action.
          truncated: whether something else than the game has ended it, such as a time limit: the
            future that it would have had is then estimated instead of taken as 0.
          info: numbers about the episode to be recorded, by name.

        Raises:
          ValueError: as `act`, an info is no number, or no episode has begun.
        """
        if not self._acts:
            raise ValueError("end comes after act: there was no action in this episode yet.")
        seen = self._checked(observation)
        infos = {
            name: np.array([_number(f"The info {name!r}", value)])
            for name, value in (info or {}).items()
        }
        self._row.go_on(
            seen, self._taken_reward(), StepType.LAST, discount=float(truncated), info=infos
        )
        self._acts = False

    def close(self) -> None:
        """Ends the session; a second call does nothing.

        An episode that has not ended counts as cut off, with the rewards that were given and a
        fault of its environment, once another session goes on.
        """
        if self._is_open:
            self._is_open = False
            if self._acts:  # else the row may hold that of the session before
                self._row.reward = self._taken_reward()
            self._client._ended(self._row)

    def _checked(self, observation: Nest) -> Nest:
        """Returns an observation as arrays [1, ...] of the space's dtypes."""
        if not self._is_open:
            raise RuntimeError("The session is closed: ask the client for another one.")
        self._client._check()
        return base.map_leaves(_leaf, "observation", self._observation_space, observation)

    def _taken_reward(self) -> float:
        reward, self._reward = self._reward, 0.0
        return reward


class _Row:
    """An environment of the actor, which sessions play one after another.

    Args:
      wire: takes the unrolls.
      setup: says how to act.
      policy: of this row alone.
      external: what is played.
      environment: the same, with the run's wrappers.
      number: of the row in the actor.
    """

    def __init__(
        self,
        wire: LearnerClient,
        setup: "ActorSetup",
        policy: "Policy",
        external: External,
        environment: base.Environment,
        number: int,
    ) -> None:
        self._wire, self._built, self._policy = wire, setup, policy
        self._external, self._environment, self._number = external, environment, number
        self._last, self._soon = setup.unroll_length, max(1, 3 * setup.unroll_length // 4)
        self._group: Group | None = None
        self._held = (0, 0)
        self._at = 0  # row of the unroll
        self._seen: Nest = None  # of the episode that has not ended; None: there is none
        self.reward = 0.0
        """Reward of the last action, where a session was closed before the end of an episode."""
        self.error: BaseException | None = None
        """What happened to the row, which cannot go on."""

    def begin(self, observation: Nest) -> Nest:
        """Begins an episode. Returns the action [1, ...] for an observation [1, ...]."""
        if self._seen is not None:  # a session was closed in it
            detail = "a session was closed before the end of its episode"
            fault = EnvironmentFault(self._number, "crashed", detail)
            self.go_on(self._seen, self.reward, StepType.LAST, faults=[fault])
        return self.go_on(observation, 0.0, StepType.FIRST)

    def go_on(
        self,
        observation: Nest,
        reward: float,
        step_type: StepType,
        discount: float = 1.0,
        info: Mapping[str, np.ndarray] | None = None,
        faults: Sequence[EnvironmentFault] = (),
    ) -> Nest:
        """Takes the result of the last action. Returns the next one, [1, ...].

        Args:
          observation: [1, ...].
          reward: of the last action.
          step_type: FIRST where `begin` calls it; the action after LAST is for nobody.
          discount: 0 where the episode has terminated.
          info: numbers to be recorded with the episode.
          faults: that have ended it.
        """
        if self.error is not None:
            raise RuntimeError(
                f"The session cannot go on after {type(self.error).__name__}: close it, and ask "
                "the client for another one."
            ) from self.error
        timestep = TimeStep(
            observation,
            np.array([reward], np.float32),
            np.array([discount], np.float32),
            np.array([step_type], np.int8),
        )
        frames = np.array([step_type != StepType.FIRST], np.int32)
        try:
            self._external.hand(EnvironmentStep(timestep, frames, info or {}, faults))
            with _closed():
                self._unroll()
        except BaseException as error:
            self.error = error
            raise
        self._seen = None if step_type == StepType.LAST else observation
        return self._external.action

    def _unroll(self) -> None:
        """Does for what was handed in what `Actor.run` does for a row of its groups."""
        from actors import actor

        if self._group is None:
            self._take()
            seeds = np.random.SeedSequence([self._built.seed, 0], spawn_key=(self._number,))
            self._group = actor.Group(
                *(0, self._number, self._environment, self._policy, self._last, seeds),
                random_warm_up=self._built.config.random_warm_up,
                step_info=frozenset(self._built.actor.step_info),
                stopwatch=actor.Stopwatch(),
            )
            self._group.begin(self._held)
        else:
            self._at += 1
            self._group.observe(self._at)
            if self._at == self._soon:
                self._wire.prefetch()
            if self._at == self._last:
                # The time of the caller's environment is not known here.
                self._wire.send(self._group.finish()._replace(environment_seconds=0.0))
                self._take()
                self._group.begin(self._held)
                self._at = 0
        self._group.act(self._at)

    def _take(self) -> None:
        from actors import actor

        self._held = actor.take(self._wire.parameters(), self._policy, self._held)


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Says what has happened where a wait ends since the client was closed, by another thread."""
    try:
        yield
    except Stopped:
        raise RuntimeError("The client is closed: connect again.") from None


def _spaces(setup: "ActorSetup") -> Spaces:
    """Returns the spaces of a loop's observations and actions, which no wrapper has changed."""
    from impala.parts import build

    config = dataclasses.replace(
        setup.tasks[0].environment,
        last_action=False,
        last_reward=False,
        time_in_episode=False,
    )
    probe = build.environment(config, 1, own=setup.own)
    probe.close()
    return probe.observation_space, probe.action_space


def _environment(
    setup: "ActorSetup", spaces: Spaces, number: int
) -> tuple[External, base.Environment]:
    """Returns an environment to hand steps to, and the same with the wrappers of the run."""
    from impala import environments

    made: list[External] = []

    class Row(External):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs, *spaces)
            made.append(self)

    config = dataclasses.replace(
        setup.tasks[0].environment, id="External", kwargs="{}", vectorization="sync"
    )
    environment = environments.make(config, 1, component=Row, first=number)
    return made[0], environment


def _number(name: str, value: Any) -> float:
    """Returns a value as a number; its name is for the error."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; it must be a number.") from None


def _leaf(name: str, space: gym.Space, value: Any) -> np.ndarray:
    """Returns a leaf of an observation as an array [1, ...] of its space's dtype.

    Raises:
      ValueError: it is not in the space; says where.
    """
    array = np.asarray(value)
    base.check_shape(name, space, array)
    kind, wanted = array.dtype.kind, np.dtype(space.dtype).kind
    if not (kind in "biu" and wanted in "biuf") and not kind == wanted == "f":
        raise ValueError(f"{name} is {array.dtype}, its space {space.dtype}: give such numbers.")
    if wanted == "f":  # of the space's precision are its limits too
        array = array.astype(space.dtype)
    low, high = (np.broadcast_to(limit, array.shape) for limit in limits(space))
    inside = (array >= low) & (array <= high)
    if wanted == "f":
        inside &= np.isfinite(array)
    if not inside.all():
        place = tuple(map(int, np.argwhere(~inside)[0]))
        at = f"[{', '.join(map(str, place))}]" if place else ""
        raise ValueError(
            f"{name}{at} is {array[place]}, outside of its space, {low[place]} to {high[place]}: "
            "clip or scale it, or start the learner with another space."
        )
    return array.astype(space.dtype)[np.newaxis]
