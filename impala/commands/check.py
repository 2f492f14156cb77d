"""`impala check`: looks at an environment before training, and says what it found."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

from tyro.conf import Positional, arg

from impala.commands.flags import SettingsFlags
from impala.config import layers, values
from impala.config.presets import PRESETS
from impala.config.schema import Config, Range
from impala.parts import sections
from impala.parts.components import ENVIRONMENT
from impala.runtime import process
from impala.runtime.failures import Failure, note
from impala.runtime.logs import log_to_stderr
from impala.runtime.printable import duration
from impala.schedule import tasks
from impala.schedule.tasks import Task

if TYPE_CHECKING:
    import gymnasium as gym

    from impala.environments import Environment
    from impala.environments.look import Look

_MOST_SECONDS = 5.0  # of play
_HANG_SECONDS = 60.0  # until a look is given up
_LONG_SECONDS = 10.0  # of making and playing one, after which no other one is made
_SLOW_SECONDS = 2e-3  # of a step: more than an actor does besides
# What ids begin with, and the preset for such environments.
_PRESETS = {
    "ALE": "atari",
    "MinAtar": "minatar",
    **dict.fromkeys(("MiniGrid", "BabyAI"), "minigrid"),
    **dict.fromkeys(("Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d"), "mujoco"),
}
_MANY_STEPS = 100  # from which on it says something that none was rewarded or the last
_LARGE = 100.0  # numbers that a network learns badly from
_MOST_NOTES = 3  # lines
_WIDTH = 100  # characters of a space


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(SettingsFlags):
    """Plays an environment at random for a few seconds before training, and says what it found.

    Exit status: 0 if training can begin, 2 if the environment or the command line is wrong, 1 if
    the environment has not answered for a minute.
    """

    preset: Positional[Annotated[str, arg(metavar="ENVIRONMENT|PRESET")]]
    """A preset; or an environment's id, with the settings of atari, minatar, minigrid or mujoco if
    it is one of theirs, of the preset that has this id, or else of cartpole."""
    steps: Annotated[int, Range(1, 100_000)] = 200
    """Random steps to play, for 5 seconds at most."""
    network: bool = True
    """Make the network too, to see whether it fits; this loads TensorFlow."""
    failures: pathlib.Path | None = None
    """File to which what is wrong or odd is appended too, for impala train, which shows it."""

    @classmethod
    def words(cls, argv: list[str]) -> list[str]:
        """Returns a command line that begins with a preset, also where an environment's id was."""
        if not argv or argv[0].startswith("-"):
            return argv
        # A module that it is in may import TensorFlow.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        process.prefer_onednn()
        with contextlib.suppress(values.OptionError):
            layers.find_preset(argv[0])
            return argv
        own = (name for name, (_, made) in PRESETS.items() if made.environment.id == argv[0])
        preset = _PRESETS.get(re.split("[/-]", argv[0])[0]) or next(own, "cartpole")
        return [preset, "--environment.id", *argv]


def check(command: Check) -> int:
    """Looks at the environment of each task. Returns the exit status."""
    from impala.environments import EnvironmentFailed

    log_to_stderr()
    settings = command.settings
    try:
        looks = [_seen(command, task) for task in tasks.make(settings.environment, settings.tasks)]
        network, unfit = _network(command) if command.network else ([], [])
    except EnvironmentFailed as error:
        failure = Failure(error.error, error.where)
        if command.failures is not None:
            may_pass = f"An environment failed before training, and may do so again: {failure}."
            note(command.failures, failure if error.is_mistake else may_pass)
        raise values.OptionError(f"An environment has failed: {failure}.") from error
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    for seen in looks:
        notes = [*seen.odd, *_odd(seen.look, seen.task, settings), *unfit]
        for line in (*_lines(seen, network, settings), *_fitted(notes)):
            print(line, flush=True)
        if command.failures is not None:
            for each in notes:
                note(command.failures, f"{seen.task.name}: {each}.")
    return 0


class _Seen(NamedTuple):
    """What a task's environment has shown."""

    task: Task
    look: "Look"
    repeats: bool  # whether the seed determines the first observation
    odd: list[str]  # what went wrong


def _seen(command: Check, task: Task) -> _Seen:
    """Plays a task's environment at random.

    Raises:
      EnvironmentFailed: it fails twice, so it would again.
      ValueError: it cannot be made.
    """
    from impala import environments
    from impala.environments.look import begins_alike, look
    from impala.runtime.hang import HangWatch

    environments.check(task.environment.id)
    make = functools.partial(_make, command.settings, task)
    odd: list[str] = []
    repeats, began = False, time.monotonic()
    with HangWatch(_HANG_SECONDS, "end of play", "the limit") as hang, hang.watched():
        try:
            seen = look(make, command.steps, _MOST_SECONDS, seed := 0)
        except environments.EnvironmentFailed as error:
            odd.append(f"it failed in the first of two plays: {Failure(error.error, error.where)}")
            seen = look(make, command.steps, _MOST_SECONDS, seed := 1)
        if time.monotonic() - began > _LONG_SECONDS:
            return _Seen(task, seen, False, odd)
        try:
            if not (repeats := begins_alike(make, seen, seed)):
                odd.append(
                    "two resets with the same seed differ, so no run can be repeated: take all "
                    "random numbers from self.np_random"
                )
        except (environments.EnvironmentFailed, ValueError) as error:
            odd.append(f"a second environment in the same process fails: {error}")
    return _Seen(task, seen, repeats, odd)


def _make(settings: Config, task: Task) -> "Environment":
    """Makes one environment in this process, as it is in training."""
    from impala import environments

    own = sections.found(settings).get((ENVIRONMENT, task.environment.id))
    config = task.environment
    if config.vectorization == "async":  # else its failures would be mended
        config = dataclasses.replace(config, vectorization="sync")
    component, part = own or (None, None)
    return environments.make(config, 1, component=component, settings=part, actor=settings.actor)


def _network(command: Check) -> tuple[list[str], list[str]]:
    """Makes the network. Returns what it is and learns from, and what is odd about it.

    Raises:
      ValueError: it does not fit the environments, or teachers or demonstrations do not fit it.
    """
    process.load_tensorflow(use_gpus=False)
    from impala.agents.observation import fitting, has_channels_first
    from impala.environments import demonstrations
    from impala.environments.spaces import main_space
    from impala.parts import build
    from impala.play import teachers

    settings = command.settings
    own, config = sections.found(settings), settings.agent
    played = tasks.make(settings.environment, settings.tasks)
    spaces = build.spaces(played, own, numbered=config.popart)
    agent = build.agent(config, *spaces, own=own)
    taught = teachers.make(settings, teachers.read(settings), played, spaces)
    odd: list[str] = []
    data = [f"  teachers  {len(taught)}, which fit"] if taught else []
    if name := settings.demonstrations.source:
        memory = process.replay_memory(settings.replay.memory)
        stream = demonstrations.stream(name, *demonstrations.load(name), spaces, memory)
        what = f"{stream.num_episodes:,} episodes of {name}, {stream.num_steps:,} steps"
        data.append(f"  clones    {what}, which fit")
    observation = main_space(spaces[0])
    torso, best = fitting(config.torso, observation), fitting("auto", observation)
    if torso != "mlp" and has_channels_first(observation):
        odd.append(f"images of {list(observation.shape)} are taken to have their channels first")
    if torso == "mlp" != best:
        odd.append("torso mlp flattens images: --agent.torso auto has convolutions")
    sizes = f" {config.hidden_sizes}" if torso == "mlp" else ""
    weights = sum(math.prod(variable.shape) for variable in agent.variables)
    core = f"core {config.core}, {weights:,} weights, by the preset {command.preset}"
    return [f"  network   torso {torso}{sizes}, {core}", *data], odd


def _lines(played: _Seen, network: list[str], settings: Config) -> Iterator[str]:
    """Yields what was found, as lines."""
    seen = played.look
    (observation, action), lengths = seen.spaces, seen.lengths
    masked = f"; a mask forbids {seen.forbidden:.0%} of the choices" if seen.forbidden else ""
    ends = "no episode ended"
    if lengths:
        cut_off = len(lengths) - seen.terminated
        ends = (
            f"{len(lengths)} episodes of {min(lengths)} to {max(lengths)} steps ended, "
            f"{seen.terminated} by termination, {cut_off} cut off"
        )
    learned = settings.objective
    clipped = f", learned from as {learned.reward_clipping}" * (learned.reward_clipping != "none")
    scaled = f", learned from times {learned.reward_scale:g}" * (learned.reward_scale != 1.0)
    rewards = seen.rewards
    yield f"{played.task.name}: {seen.steps} random steps, {ends}"
    yield f"  observes  {_shortened(observation)}"
    yield f"  acts      {_shortened(action)}{masked}"
    yield from network
    yield (
        f"  rewards   {rewards.min():.4g} to {rewards.max():.4g}, mean {rewards.mean():.4g}"
        f"{scaled}{clipped}"
    )
    if played.repeats:
        yield "  seeds     two resets with the same seed give the same observation"
    yield (
        f"  times     a step {duration(seen.step_seconds)}, a reset {duration(seen.reset_seconds)}"
    )


def _odd(seen: "Look", task: Task, settings: Config) -> Iterator[str]:
    """Yields what is slow or odd."""
    from impala.environments import pace

    if seen.seconds > _SLOW_SECONDS:
        yield (
            f"slow, {1 / seen.seconds:,.0f} steps/s in one process (a step takes "
            f"{duration(seen.step_seconds)}, a reset {duration(seen.reset_seconds)}): "
            f"{pace.advice(task.environment, settings.actor.num_envs)}"
        )
    if seen.largest > _LARGE and not settings.agent.normalise_observations:
        yield (
            f"observed numbers reach {seen.largest:.3g}, and networks learn best from numbers "
            "around 1: --agent.normalise-observations"
        )
    if seen.lengths and seen.steps >= _MANY_STEPS and not seen.rewards.any():
        yield "all rewards were 0: random play finds none, so learning may not begin"
    if seen.steps >= _MANY_STEPS and max(seen.lengths, default=0) == 1:
        yield "all episodes ended after one step"


def _fitted(notes: list[str]) -> Iterator[str]:
    """Yields notes as lines, of which there are few."""
    first, rest = notes[: _MOST_NOTES - 1], notes[_MOST_NOTES - 1 :]
    for line in (*first, *(["; ".join(rest)] if rest else [])):
        yield f"  note      {line}"


def _shortened(space: "gym.Space") -> str:
    from impala.environments import spaces

    text = spaces.written(space)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
