"""What the agent plays: ALE, MinAtar, any Gymnasium environment, Catch, bandits.

No TensorFlow in here.
"""

from impala.configs import EnvironmentConfig, RepeatConfig
from impala.environments import bandit, catch, gymnasium, minatar
from impala.environments.base import Environment
from impala.environments.joint import Joint, join
from impala.environments.wrappers import Checked, WithHistory

bandit.register()
minatar.register()

__all__ = ["Environment", "Joint", "join", "make"]


def make(
    config: EnvironmentConfig, num_envs: int, *, threads: int = 1, render_mode: str | None = None
) -> Environment:
    """E environments, with the wrappers that the configuration asks for.

    Args:
      config: what is played.
      num_envs: E, at least 1.
      threads: emulator threads, for ALE.
      render_mode: None; rgb_array, for `render`; or human, for a window. Of environment 0.

    Raises:
      ValueError: if there is no such environment, or it cannot be made that way.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
    environment: Environment = Checked(_make(config, num_envs, threads, render_mode), config.id)
    if config.last_action or config.last_reward or config.time_in_episode:
        environment = WithHistory(
            environment,
            last_action=config.last_action,
            last_reward=config.last_reward,
            time_in_episode=config.time_in_episode,
        )
    return environment


def _make(
    config: EnvironmentConfig, num_envs: int, threads: int, render_mode: str | None
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
        return Atari(config.id, config.atari, num_envs, threads=threads, render_mode=render_mode)
    return gymnasium.Gymnasium(
        config.id,
        kwargs,
        num_envs,
        vectorization=config.vectorization,
        repeat=config.repeat,
        render_mode=render_mode,
    )
