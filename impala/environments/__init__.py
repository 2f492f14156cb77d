"""What the agent plays: ALE, MinAtar, any Gymnasium environment, Catch, bandits, and your own.

No TensorFlow in here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from impala.config.schema import ActorConfig, EnvironmentConfig, RepeatConfig
from impala.environments import bandit, catch, gymnasium, minatar, sources
from impala.environments.base import Environment
from impala.environments.failure import EnvironmentFailed
from impala.environments.joint import Joint, check_fits, join
from impala.environments.processes import Processes
from impala.environments.spaces import SEEN
from impala.environments.wrappers import Checked, WithHistory
from impala.parts.components import is_own

_ACTOR = ActorConfig()

bandit.register()
minatar.register()

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "Joint",
    "check",
    "check_fits",
    "check_joint",
    "join",
    "make",
]


def check(id: str) -> None:
    """Checks that an environment is known, without making one: fast, and without foreign code.

    An id with a colon is taken for known: its module is imported only where it is played.

    Raises:
      ValueError: there is no such environment; names the nearest.
    """
    if id == "Catch" or is_own(id):
        return
    if id.startswith("ALE/"):
        from impala.environments import atari  # Here, so that others load no emulator.

        atari.game(id)
    else:
        sources.check_registered(id)


def check_joint(tasks: Sequence[tuple[str, EnvironmentConfig]]) -> None:
    """Checks that an action has the same meaning in all ALE games that are tasks of one run.

    Args:
      tasks: name and environment of each.

    Raises:
      ValueError: an action of one game is another one in another game.
    """
    games = [(name, each.id, each.atari) for name, each in tasks if each.id.startswith("ALE/")]
    if len(games) > 1:
        from impala.environments import atari  # Here, so that others load no emulator.

        atari.check_joint(games)


def make(
    config: EnvironmentConfig,
    num_envs: int,
    *,
    component: Any = None,
    settings: Any = None,
    actor: ActorConfig = _ACTOR,
    first: int = 0,
    render_mode: str | None = None,
) -> Environment:
    """Returns E environments, with the wrappers that the configuration asks for.

    What `config.id` names is imported unless it is passed, so the id must be one that a person
    wrote, or that has been found allowed (`impala.parts.build.environment` sees to that).

    Args:
      config: what is played.
      num_envs: E, at least 1.
      component: what a custom id names, if it has been imported already.
      settings: of a custom environment that has a class `Settings`; None: its defaults.
      actor: whose they are: threads, and what is expected of environments in own processes.
      first: index of environment 0 among the actor's, for messages.
      render_mode: None; rgb_array, for `render`; or human, for a window. Of environment 0.

    Raises:
      ValueError: if there is no such environment, or it cannot be made that way.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
    environment: Environment = Checked(
        _make(config, num_envs, component, settings, actor, first, render_mode), config.id, first
    )
    parts = [name for name in SEEN if getattr(config, name)]
    return WithHistory(environment, parts) if parts else environment


def _make(
    config: EnvironmentConfig,
    num_envs: int,
    component: Any,
    settings: Any,
    actor: ActorConfig,
    first: int,
    render_mode: str | None,
) -> Environment:
    kwargs = config.keyword_arguments()
    if config.repeat != RepeatConfig() and (config.id == "Catch" or config.id.startswith("ALE/")):
        raise ValueError(
            f"environment.repeat is for Gymnasium environments, not {config.id}. ALE games skip "
            "frames with environment.atari.frame_skip."
        )
    if config.id == "Catch":
        if render_mode == "human":
            raise ValueError("Catch has no window; use render_mode rgb_array.")
        return catch.make(kwargs, num_envs)
    if config.id.startswith("ALE/"):
        from impala.environments.atari import Atari, RandomSkip  # Others load no emulator.

        if kwargs:
            raise ValueError(
                f"environment.kwargs is {kwargs}; ALE games are set with environment.atari instead."
            )
        if config.atari.frame_skip_most:
            return RandomSkip(config.id, config.atari, num_envs, render_mode=render_mode)
        threads = actor.env_threads
        return Atari(config.id, config.atari, num_envs, threads=threads, render_mode=render_mode)
    # What is shown or repeated is an environment by itself.
    is_plain = render_mode is None and config.repeat == RepeatConfig()
    takes_vector = config.vectorization == "own" and is_plain
    source = sources.find(config.id, kwargs, component, settings, takes_vector=takes_vector)
    if source.kind is gym.Env:
        return _make_single(source, config, num_envs, actor, first, render_mode)
    if config.repeat != RepeatConfig() or config.vectorization == "async":
        reason = "be repeated" if config.repeat != RepeatConfig() else "have a process each"
        raise ValueError(
            f"The environments of {config.id} step together, so they cannot {reason}: leave out "
            "environment.repeat, and set environment.vectorization to sync or own."
        )
    make_several = functools.partial(source.made, render_mode)
    if source.kind is VectorEnv:
        return gymnasium.vector(make_several, num_envs, config.id)
    environment: Environment = make_several(num_envs)
    return environment


def _make_single(
    source: sources.Source,
    config: EnvironmentConfig,
    num_envs: int,
    actor: ActorConfig,
    first: int,
    render_mode: str | None,
) -> Environment:
    make_one = functools.partial(source.single, config.repeat, config.text_characters)
    if config.vectorization == "async" and render_mode is None:
        return Processes(
            make_one,
            num_envs,
            name=config.id,
            seconds=actor.hang_seconds / 10.0,
            max_bytes=actor.max_environment_bytes,
            first=first,
        )
    return gymnasium.in_turn(
        lambda is_first: make_one(render_mode if is_first else None), num_envs, config.id, first
    )
