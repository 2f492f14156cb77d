"""What the agent plays: ALE, MinAtar, any Gymnasium environment, Catch, bandits.

No TensorFlow in here.
"""

import importlib.metadata

from impala.config.schema import ActorConfig, EnvironmentConfig, RepeatConfig
from impala.environments import bandit, catch, gymnasium, minatar
from impala.environments.base import Environment
from impala.environments.joint import Joint, join
from impala.environments.wrappers import Checked, WithHistory

_ACTOR = ActorConfig()

bandit.register()
minatar.register()

__all__ = ["Environment", "Joint", "check", "join", "make"]


def check(id: str) -> None:
    """Checks that an environment is known, without making one: fast, and without foreign code.

    An id with a colon is taken for known: its module is imported only where it is played.

    Raises:
      ValueError: there is no such environment; names the nearest.
    """
    parts = importlib.metadata.entry_points(group="impala.components")
    if id == "Catch" or ":" in id or id in parts.names:
        return
    if id.startswith("ALE/"):
        from impala.environments import atari  # Here, so that others load no emulator.

        atari.game(id)
    else:
        gymnasium.check_registered(id)


def make(
    config: EnvironmentConfig,
    num_envs: int,
    *,
    actor: ActorConfig = _ACTOR,
    first: int = 0,
    render_mode: str | None = None,
) -> Environment:
    """E environments, with the wrappers that the configuration asks for.

    Args:
      config: what is played.
      num_envs: E, at least 1.
      actor: whose they are: threads, and what is expected of environments in own processes.
      first: index of environment 0 among the actor's, for messages.
      render_mode: None; rgb_array, for `render`; or human, for a window. Of environment 0.

    Raises:
      ValueError: if there is no such environment, or it cannot be made that way.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
    environment: Environment = Checked(
        _make(config, num_envs, actor, first, render_mode), config.id, first
    )
    if config.last_action or config.last_reward or config.time_in_episode:
        environment = WithHistory(
            environment,
            last_action=config.last_action,
            last_reward=config.last_reward,
            time_in_episode=config.time_in_episode,
        )
    return environment


def _make(
    config: EnvironmentConfig,
    num_envs: int,
    actor: ActorConfig,
    first: int,
    render_mode: str | None,
) -> Environment:
    kwargs = gymnasium.parse_kwargs(config.kwargs)
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
        from impala.environments.atari import Atari  # Here, so that others load no emulator.

        if kwargs:
            raise ValueError(
                f"environment.kwargs is {kwargs}; ALE games are set with environment.atari instead."
            )
        threads = actor.env_threads
        return Atari(config.id, config.atari, num_envs, threads=threads, render_mode=render_mode)
    if config.vectorization == "async" and render_mode is None:
        return gymnasium.processes(
            config.id,
            kwargs,
            num_envs,
            repeat=config.repeat,
            seconds=actor.environment_seconds,
            max_bytes=actor.max_environment_bytes,
            first=first,
        )
    return gymnasium.Gymnasium(
        config.id,
        kwargs,
        num_envs,
        vectorization="own" if config.vectorization == "own" else "sync",
        repeat=config.repeat,
        render_mode=render_mode,
        first=first,
    )
