"""The player: a checkpoint's agent and its environments, for `evaluate`, `record` and others."""

from impala.environments import Environment
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build, sections
from impala.parts.components import Allowed
from impala.schedule import tasks

_NOTHING = Allowed()
_WITHOUT_VALUE = {"sac"}


def has_value(algorithm: str) -> bool:
    """Returns whether an algorithm trains the agent's baseline or its Q-values."""
    return algorithm not in _WITHOUT_VALUE


class Player:
    """An agent with frozen weights, which can make the environments that it was trained in.

    Args:
      saved: has the agent; `checkpoint.choose` reads it.
      task: the task to play, counted from 0.
      allow: what may be imported if the checkpoint names it, besides installed entry points.

    Raises:
      ValueError: there is no such task, or a custom part that the checkpoint names may not be
        imported.
    """

    def __init__(self, saved: Checkpoint, task: int = 0, allow: Allowed = _NOTHING) -> None:
        self.config = sections.restore(saved.config, saved.own, saved.needs, allow)
        self._own = sections.found(self.config)
        self.counters, self.algorithm = saved.counters, saved.algorithm
        self.number = task
        self._task = tasks.choose(saved.config, task)
        self.task = self._task.name
        assert saved.spaces is not None
        self.spaces = saved.spaces
        self.agent = build.agent(saved.config.agent, *self.spaces, own=self._own)
        for variable, value in zip(self.agent.variables, saved.agent_values, strict=True):
            variable.assign(value)

    @property
    def is_external(self) -> bool:
        """Whether the task is played elsewhere, by its own loop."""
        return self._task.environment.id == "External"

    def environment(self, num_envs: int = 1, render_mode: str | None = None) -> Environment:
        """Returns environments of the task, with the agent's wrappers; the caller closes them.

        The run's settings of `actor`, such as `hang_seconds`, hold for them.

        Args:
          num_envs: environments that step together.
          render_mode: of environment 0.

        Raises:
          ValueError: they cannot be made, for instance because a package is missing, are played
            elsewhere, or have other spaces than when the agent was trained.
        """
        if self.is_external:
            raise ValueError(
                "External is played by its own loop: evaluate the agent there, with impala.load "
                "(docs/external.md)."
            )
        return build.environment(
            self._task.environment,
            num_envs,
            actor=self.config.actor,
            render_mode=render_mode,
            joint=self.spaces,
            exactly=len(self.config.tasks.environments) <= 1,
            task=self.number,
            own=self._own,
        )
