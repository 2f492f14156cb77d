"""The unroll loop: steps environments with an agent and yields unrolls. Knows nothing of gRPC.

An actor holds one or more groups of environments. While the agent infers one group's actions, the
environments of the others step. All groups go through the same rows together and take new
parameters between the last row of an unroll and the first of the next, so no unroll mixes two
versions. The task changes at the same boundary; each task has its own groups, which keep their
state while another task is played.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import tree

from actors.policy import Policy, Uniform
from impala.environments.base import Environment
from impala.environments.episodes import EpisodeStatistics
from impala.types import (
    ActorUnrolls,
    Array,
    EnvironmentFault,
    Episode,
    Nest,
    Parameters,
    StepType,
    Unroll,
)


class Stopwatch:
    """The time that an actor's environments take. Other threads may read it."""

    def __init__(self) -> None:
        self.steps = 0
        """Of all environments; a reset between episodes is one."""
        self._seconds = 0.0  # of finished calls
        self._since: float | None = None  # of the call under way

    @property
    def seconds(self) -> float:
        """The time so far, that of the call under way included."""
        since = self._since
        return self._seconds + (0.0 if since is None else time.perf_counter() - since)

    def start(self) -> None:
        """Notes that a call of the environments begins."""
        self._since = time.perf_counter()

    def stop(self, steps: int = 0) -> float:
        """Notes that it has ended, and how many steps it ended. Returns its seconds."""
        assert self._since is not None
        took = time.perf_counter() - self._since
        self._since = None
        self._seconds += took
        self.steps += steps
        return took


class Actor:
    """Unrolls an agent in groups of environments.

    Args:
      environments: makes the groups of a task, each of E environments, when it is first played;
        while actions of one are inferred the others step. The caller closes them. Every task has
        the same number of groups.
      policy: chooses the actions.
      unroll_length: T, in agent steps.
      seed: of environments and actions.
      random_warm_up: draw actions uniformly from their box as long as parameters have version 0.
      step_info: names in the environments' info whose numbers of every step are collected; "*": all
        names.
    """

    def __init__(
        self,
        environments: Callable[[int], Sequence[Environment]],
        policy: Policy,
        unroll_length: int,
        seed: int,
        random_warm_up: bool = False,
        step_info: Collection[str] = (),
    ):
        if unroll_length < 1:
            raise ValueError(f"unroll_length is {unroll_length}, it must be at least 1")
        self._environments = environments
        self._policy = policy
        self._unroll_length = unroll_length
        self._seed = seed
        self._random_warm_up = random_warm_up
        self._step_info = step_info
        self._held = (0, 0)  # incarnation and version of what the policy acts with; none yet
        self._groups: dict[int, list[Group]] = {}  # of each task that was played
        self.stopwatch = Stopwatch()

    def run(
        self,
        parameters: Callable[[], Parameters],
        task: Callable[[], int] = lambda: 0,
        prefetch: Callable[[], None] = lambda: None,
        whole_rounds: bool = False,
    ) -> Iterator[ActorUnrolls]:
        """Yields one `ActorUnrolls` per group and unroll, the groups in turn, for ever.

        The yielded arrays are the actor's own buffers: they are valid until the generator is asked
        for the next item.

        Args:
          parameters: returns the newest parameters without waiting. Called before each round of
            unrolls.
          task: returns the task to play; called just after `parameters`.
          prefetch: called when three quarters of a round are done, so that new parameters arrive
            in time for the next round without being a round old.
          whole_rounds: whether all groups yield a round before `parameters` is called for the next.
            Otherwise the first group goes on while the last steps of the others are under way.
        """
        last = self._unroll_length
        soon = max(1, 3 * last // 4)
        self._take(parameters())
        groups = self._groups_of(task())
        for group in groups:
            group.begin(self._held)
            group.act(0)
        while True:
            for row in range(1, last):
                if row == soon:
                    prefetch()
                for group in groups:
                    group.observe(row)
                    group.act(row)
            if soon == last:
                prefetch()
            next_groups: list[Group] = []
            for place, group in enumerate(groups):
                group.observe(last)
                yield group.finish()
                if whole_rounds and group is not groups[-1]:
                    continue
                if not next_groups:  # the other groups' row T is under way already
                    self._take(parameters())
                    next_groups = self._groups_of(task())
                for next_group in next_groups if whole_rounds else [next_groups[place]]:
                    next_group.begin(self._held)
                    next_group.act(0)
            groups = next_groups

    def _groups_of(self, task: int) -> list["Group"]:
        if task not in self._groups:
            self.stopwatch.start()
            environments = self._environments(task)
            self.stopwatch.stop()
            if not environments:
                raise ValueError("an actor needs at least one group of environments, got none")
            seeds = np.random.SeedSequence([self._seed, task]).spawn(len(environments))
            self._groups[task] = [
                Group(
                    *(task, place, environment, self._policy, self._unroll_length, seed),
                    random_warm_up=self._random_warm_up,
                    step_info=self._step_info,
                    stopwatch=self.stopwatch,
                )
                for place, (environment, seed) in enumerate(zip(environments, seeds, strict=True))
            ]
        return self._groups[task]

    def _take(self, parameters: Parameters) -> None:
        self._held = take(parameters, self._policy, self._held)


def take(parameters: Parameters, policy: Policy, held: tuple[int, int]) -> tuple[int, int]:
    """Gives a policy parameters, unless it holds them. Returns their incarnation and version.

    Args:
      parameters: for the next unroll.
      policy: acts with them.
      held: incarnation and version of what it acts with so far.
    """
    newest = parameters.incarnation, parameters.version
    if newest != held:
        policy.assign(parameters.values)
    return newest


class Group:
    """E environments, the unroll being written, and what acts for them.

    `begin` starts an unroll, and then `act` and `observe` take turns: `act(0)`, `observe(1)`,
    `act(1)`, ..., `observe(T)`, `finish`.

    Args:
      task: that is played.
      place: of the group in the actor, for messages.
      environment: E environments, which are reset here.
      policy: chooses the actions.
      unroll_length: T.
      seed: of environments and actions.
      random_warm_up: as for `Actor`.
      step_info: as for `Actor`.
      stopwatch: of the actor.
    """

    def __init__(
        self,
        task: int,
        place: int,
        environment: Environment,
        policy: Policy,
        unroll_length: int,
        seed: np.random.SeedSequence,
        random_warm_up: bool = False,
        step_info: Collection[str] = (),
        *,
        stopwatch: Stopwatch,
    ):
        self._task, self._place = task, place
        self._asked = step_info
        self._uniform: Uniform | None = None
        if random_warm_up:
            self._uniform = Uniform(environment.action_space, environment.num_envs, seed)
        environment_seed, *action_seed = (int(s) for s in seed.generate_state(3) >> 1)
        num_envs = environment.num_envs
        self._stopwatch = stopwatch
        stopwatch.start()
        first = environment.reset(environment_seed)
        self._took = stopwatch.stop()  # seconds in the environments since the last unroll
        self._environment = environment
        self._acting = policy.begin(first, action_seed)

        self._last = unroll_length
        self._timesteps = _Rows(unroll_length + 1, first)
        self._outputs = _Rows(unroll_length + 1, self._acting.output)
        # The first unroll begins with the reset, as if an unroll had ended there.
        self._timesteps.write(unroll_length, tree.flatten(first))

        self._held: tuple[int, int] = (0, 0)
        self._core_state: Nest = ()
        self._frames = np.zeros(num_envs, np.int32)
        self._statistics = EpisodeStatistics(num_envs)
        self._episodes: list[Episode] = []
        self._faults: list[EnvironmentFault] = []
        self._step_info: dict[str, list[np.ndarray]] = {}  # name -> [N] of each row

    def doing(self) -> str:
        """Returns which group this is, for the error about an actor that hangs."""
        return f"in group {self._place} of task {self._task}"

    def begin(self, held: tuple[int, int]) -> None:
        """Starts the next unroll at the last row of the previous one, with parameters `held`."""
        self._held = held
        self._timesteps.copy(self._last, 0)
        self._outputs.copy(self._last, 0)
        self._core_state = self._acting.core_state()
        self._frames[:] = 0
        self._episodes = []
        self._faults = []
        self._step_info = {}

    def act(self, row: int) -> None:
        """Infers from `row` the actions that lead to the next row, and starts the step."""
        leaves = self._acting.act(self._timesteps[row])
        if self._uniform is not None and self._held[1] == 0:
            leaves = [self._uniform.draw(), *leaves[1:]]  # the rest is the network's
        self._outputs.write(row + 1, leaves)
        self._stopwatch.start()
        self._environment.send(self._outputs[row + 1].action)
        self._took += self._stopwatch.stop()

    def observe(self, row: int) -> None:
        """Waits for the step that `act` started and writes the result to `row`."""
        self._stopwatch.start()
        step = self._environment.recv()
        self._took += self._stopwatch.stop(len(self._frames))
        self._timesteps.write(row, tree.flatten(step.timestep))
        self._frames += step.frames
        self._episodes += [episode for _, episode in self._statistics.update(step)]
        self._faults += step.faults
        if self._asked:
            is_step = step.timestep.step_type != StepType.FIRST
            for name in step.info if "*" in self._asked else step.info.keys() & self._asked:
                values = np.asarray(step.info[name], np.float32)[is_step]
                self._step_info.setdefault(name, []).append(values[np.isfinite(values)])

    def finish(self) -> ActorUnrolls:
        """Returns the finished unroll, once its last row has been observed."""
        incarnation, version = self._held
        unroll = Unroll(
            timestep=self._timesteps.nest,
            output=self._outputs.nest,
            core_state=self._core_state,
            frames=self._frames,
            parameter_version=version,
        )
        step_info = {name: np.concatenate(rows) for name, rows in self._step_info.items()}
        took, self._took = self._took, 0.0
        return ActorUnrolls(
            *(unroll, self._task, incarnation, self._episodes, self._faults, step_info),
            environment_seconds=took,
        )


class _Rows:
    """A nest of arrays [T + 1, E, ...], and views of its rows that are made once.

    Args:
      number: T + 1.
      like: a nest of what has a shape and a dtype: one row.
    """

    def __init__(self, number: int, like: Nest) -> None:
        self.nest: Nest = tree.map_structure(lambda x: np.zeros((number, *x.shape), x.dtype), like)
        self._rows: list[Nest] = [
            tree.map_structure(lambda x, row=row: x[row], self.nest) for row in range(number)
        ]
        self._leaves: list[list[np.ndarray]] = [tree.flatten(row) for row in self._rows]

    def __getitem__(self, row: int) -> Nest:
        return self._rows[row]

    def write(self, row: int, leaves: Sequence[Array]) -> None:
        for leaf, value in zip(self._leaves[row], leaves, strict=True):
            np.copyto(leaf, value)

    def copy(self, source: int, target: int) -> None:
        self.write(target, self._leaves[source])
