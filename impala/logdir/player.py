"""The agent and an environment of a log directory's newest checkpoint: who can be watched."""

import pathlib

from impala import build
from impala.logdir import checkpoint
from impala.runtime import process
from impala.schedule import tasks


class Player:
    """An agent with frozen weights, and environments to play in.

    Args:
      logdir: of a run that has written a checkpoint.
      task: which of its tasks, counted from 0.
      num_envs: environments that step together.
      render_mode: of environment 0.

    Raises:
      ValueError: there is no checkpoint, or no such task.
    """

    def __init__(
        self, logdir: pathlib.Path, task: int = 0, num_envs: int = 1, render_mode: str | None = None
    ) -> None:
        saved = checkpoint.load(logdir)
        process.hide_gpus()  # a learner may be using them
        self.config = saved.config
        self.counters = saved.counters
        of_run = tasks.make(saved.config.environment, saved.config.tasks)
        if not 0 <= task < len(of_run):
            names = ", ".join(f"{i} is {each.name}" for i, each in enumerate(of_run))
            raise ValueError(f"task is {task}; of this run's tasks {names}.")
        self.task = of_run[task].name
        spaces = build.spaces(of_run)
        self.environment = build.environment(
            of_run[task].environment, num_envs, render_mode=render_mode, joint=spaces
        )
        self.agent = build.agent(saved.config.agent, *spaces)
        for variable, value in zip(self.agent.variables, saved.agent_values, strict=True):
            variable.assign(value)

    def close(self) -> None:
        """Closes the environments."""
        self.environment.close()
