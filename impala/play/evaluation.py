"""Plays whole episodes with frozen weights, for `impala evaluate` and similar commands.

A fixed quota of episodes per environment keeps the sample fair: the first N episodes to finish
among environments that step together would be the short ones.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.agents.compiled import Flat
from impala.environments.base import Environment
from impala.environments.episodes import EpisodeStatistics
from impala.environments.failure import EnvironmentFailed
from impala.types import AgentOutput, EnvironmentStep, Episode, Nest, StepType, TimeStep

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0

_Watched = Callable[[], contextlib.AbstractContextManager[None]]


class Summary(NamedTuple):
    """Statistics of a number of episodes. Standard deviations are of the population."""

    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float  # agent steps
    length_std: float
    length_min: int
    length_max: int
    frames: int  # environment frames of all episodes together
    info: dict[str, float]  # means of the environment's numeric info at episode ends
    reward_per_step: float  # of all episodes together


class Acting:
    """Acts with frozen weights, and keeps the agent's core state between steps.

    Args:
      agent: its weights are read at each step and never written.
      greedy: use the mode of the policy instead of a sample.
      seed: of the sampled actions.
      num_envs: E.
    """

    def __init__(self, agent: Agent, greedy: bool, seed: int, num_envs: int) -> None:
        self._act = _compiled(agent, greedy)
        self._state = agent.acting(agent.initial_state(num_envs))
        self._seed = seed % 2**31
        self._count = 0  # number of samples drawn

    def __call__(self, timestep: TimeStep) -> Nest:
        """Returns the actions [E, ...] at a time step [E, ...], which is copied."""
        output, self._state = self._act(*self._copied(timestep))
        self.skip()
        return tree.map_structure(lambda x: x.numpy(), output.action)

    def output(self, timestep: TimeStep) -> AgentOutput:
        """Returns what the next call would act by: tensors [E, ...]. Changes nothing."""
        output, _ = self._act(*self._copied(timestep))
        return output

    def _copied(self, timestep: TimeStep) -> tuple[TimeStep, Nest, tf.Tensor]:
        # Copied, as TensorFlow may still use the memory when the environment overwrites it.
        copy = tree.map_structure(lambda x: tf.constant(np.array(x)), timestep)
        seed = tf.constant([self._seed, self._count], tf.int32)
        return copy, self._state, seed

    def skip(self) -> None:
        """Skips one sample, as if it had acted."""
        self._count = (self._count + 1) % 2**31


def play(
    environment: Environment,
    agent: Agent,
    greedy: bool,
    seed: int,
    watched: _Watched = contextlib.nullcontext,
) -> Iterator[EnvironmentStep]:
    """Yields time steps for ever, starting with the reset (all FIRST, no frames).

    Args:
      environment: E environments, not reset yet; their arrays are valid for one step.
      agent: as for `Acting`.
      greedy: as for `Acting`.
      seed: of the environments and the sampled actions.
      watched: makes a context for the reset and for each step of the environment.
    """
    act = Acting(agent, greedy, seed, environment.num_envs)
    with watched():
        timestep = environment.reset(seed)
    yield EnvironmentStep(timestep, np.zeros(environment.num_envs, np.int32), {})
    while True:
        action = act(timestep)
        with watched():
            environment.send(action)
            step = environment.recv()
        timestep = step.timestep
        yield step


class FirstEpisodes:
    """Keeps reward and infos of each step of the first episode of some environments.

    Args:
      number: of environments, counted from the first.
    """

    def __init__(self, number: int) -> None:
        self.steps: list[dict[str, list[float | None]]] = [{"reward": []} for _ in range(number)]
        """For each environment: name -> a number for each step, or None; `reward` and the infos."""
        self._ended = np.zeros(number, np.bool_)

    def add(self, step: EnvironmentStep) -> None:
        """Adds a step of all environments; the reset is none."""
        failed = {fault.environment for fault in step.faults if fault.cuts}
        for e, steps in enumerate(self.steps):
            step_type = step.timestep.step_type[e]
            if self._ended[e] or step_type == StepType.FIRST:
                continue
            if step_type == StepType.LAST and e in failed:  # it does not count
                self.steps[e] = {"reward": []}
                continue
            given = {**step.info, "reward": step.timestep.reward}
            before = len(steps["reward"])
            for name in {**steps, **given}:
                number = float(given[name][e]) if name in given else math.nan
                numbers = steps.setdefault(name, [None] * before)
                numbers.append(number if math.isfinite(number) else None)
            self._ended[e] = step_type == StepType.LAST


def play_episodes(
    environment: Environment,
    agent: Agent,
    num_episodes: int,
    greedy: bool,
    seed: int,
    first: FirstEpisodes | None = None,
    max_steps: int | None = None,
    watched: _Watched = contextlib.nullcontext,
) -> list[Episode]:
    """Plays an equal number of episodes in each of E environments (one more in the first ones).

    Logs the progress every ten seconds.

    Args:
      environment: E environments, not reset yet.
      agent: acts with frozen weights.
      num_episodes: total number of episodes, at least 1. Episodes beyond an environment's share are
        discarded.
      greedy: use the mode of the policy instead of a sample.
      seed: of the environments and the sampled actions.
      first: keeps the steps of first episodes, of at most E environments; None: nothing is kept.
      max_steps: agent steps after which an episode counts as ended, at least 1: what bounds tasks
        that never end. None: nothing does.
      watched: as for `play`.

    Returns:
      `num_episodes` episodes with raw returns, ordered by environment; of those that the failure of
      an environment has cut off, none.

    Raises:
      EnvironmentFailed: more than `num_episodes` were cut off.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}; it must be at least 1.")
    num_envs = environment.num_envs
    quota = [num_episodes // num_envs + (e < num_episodes % num_envs) for e in range(num_envs)]
    finished: list[list[Episode]] = [[] for _ in range(num_envs)]
    cut_off = 0  # episodes
    statistics = EpisodeStatistics(num_envs)
    logged = time.monotonic()
    steps = _cut_off(play(environment, agent, greedy, seed, watched), num_envs, max_steps)
    for count, step in enumerate(steps):
        if first is not None:
            first.add(step)
        faults = {fault.environment: fault for fault in step.faults if fault.cuts}
        for e, episode in statistics.update(step):
            if len(finished[e]) == quota[e]:
                continue
            if e not in faults:
                finished[e].append(episode)
                continue
            cut_off += 1
            if cut_off > num_episodes:
                says = f"{faults[e].error}, the end of more than {num_episodes} episodes"
                message = f"environment {e} {faults[e].kind}: {says}"
                raise EnvironmentFailed(message, says, faults[e].where)
        played = sum(map(len, finished))
        if played == num_episodes:
            break
        if time.monotonic() >= logged + _LOG_SECONDS:
            logged = time.monotonic()
            _log.info(
                "Played %d of %d episodes in %s steps of each environment.",
                *(played, num_episodes, f"{count:,}"),
            )
    return [episode for done in finished for episode in done]


def _cut_off(
    steps: Iterator[EnvironmentStep], num_envs: int, max_steps: int | None
) -> Iterator[EnvironmentStep]:
    """Yields steps, of which those are LAST that end an episode or are its step `max_steps`."""
    lengths = np.zeros(num_envs, np.int64)
    for step in steps:
        lengths += step.timestep.step_type != StepType.FIRST
        if max_steps is not None and (is_cut := lengths >= max_steps).any():
            step_type = np.where(is_cut, np.int8(StepType.LAST), step.timestep.step_type)
            step = step._replace(timestep=step.timestep._replace(step_type=step_type))
        lengths[step.timestep.step_type == StepType.LAST] = 0
        yield step


def summary(episodes: Sequence[Episode]) -> Summary:
    """Returns statistics of at least one episode."""
    returns = np.array([episode.episode_return for episode in episodes])
    lengths = np.array([episode.length for episode in episodes])
    infos = dict.fromkeys(name for episode in episodes for name in episode.info)
    return Summary(
        episodes=len(episodes),
        return_mean=float(returns.mean()),
        return_std=float(returns.std()),
        return_min=float(returns.min()),
        return_max=float(returns.max()),
        length_mean=float(lengths.mean()),
        length_std=float(lengths.std()),
        length_min=int(lengths.min()),
        length_max=int(lengths.max()),
        frames=sum(episode.frames for episode in episodes),
        reward_per_step=float(returns.sum() / max(1, lengths.sum())),
        info={
            name: float(np.mean([e.info[name] for e in episodes if name in e.info]))
            for name in infos
        },
    )


# (time step, state for acting, seed) -> (output, next state)
_Act = Callable[[TimeStep, Nest, tf.Tensor], tuple[AgentOutput, Nest]]


@functools.lru_cache(maxsize=4)  # an evaluator uses the same agent repeatedly
def _compiled(agent: Agent, greedy: bool) -> _Act:
    def act(timestep: TimeStep, acting: Nest, seed: tf.Tensor) -> tuple[AgentOutput, Nest]:
        return agent.act(timestep, acting, None if greedy else seed)

    return Flat(act)
