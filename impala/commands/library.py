"""Implements what `import impala` exports: training a run, its curve, and acting with its agent."""

import collections
import contextlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from impala.commands import foreign
from impala.commands.evaluate import Evaluate, play
from impala.commands.flags import STOPPED
from impala.commands.train import GRACE_SECONDS, Train, run
from impala.config import layers, rules, values
from impala.config.schema import Config
from impala.logdir import rows
from impala.parts import components
from impala.parts.components import Allowed
from impala.runtime import process
from impala.runtime.signals import EndRequest
from impala.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from impala.analysis.learning_curve import Curve
    from impala.play.player import Player
    from impala.play.policy import Policy

_LAST_LINES = 20  # of the learner's output, in an error


_ANY_PRESET = "catch"  # all of its settings are overridden


class TrainingError(RuntimeError):
    """Training failed; the message has the reason and the learner's last output."""


class Trained(NamedTuple):
    """The result of a run that did not fail."""

    status: Literal["finished", "stopped"]  # stopped: the same call resumes the run
    logdir: pathlib.Path
    frames: int  # environment frames learned from in the whole run
    updates: int  # learner steps
    returns: Mapping[str, float]  # mean of each task's last 100 training episodes, by its name


def preset(name: str) -> Config:
    """Returns the settings of a preset.

    Raises:
      ValueError: there is none of this name.
    """
    return layers.layered(name, None, {})


def train(
    config: str | Config,
    logdir: str | pathlib.Path | None = None,
    *,
    num_actors: int | Literal["auto"] = "auto",
    evaluate: Literal["auto", "yes", "no"] = "auto",
    fresh: bool = False,
    change_settings: bool = False,
    empty_replay: bool = False,
    init_from: str | pathlib.Path | None = None,
    serial: bool = False,
    progress: bool = True,
    stop: threading.Event | None = None,
    **settings: Any,
) -> Trained:
    """Trains on this host, as `impala train` does: a learner and actors in their own processes.

        impala.train("catch", "runs/catch", seed=1, optimiser={"learning_rate": 3e-4})
        impala.train("cartpole", "runs/walk", environment=Walk)

    After Ctrl-C the run stops with a checkpoint, and then KeyboardInterrupt is raised; after
    SIGTERM or SIGHUP too, and then the signal takes effect. The same call resumes a run that was
    stopped or killed.

    Args:
      config: the name of a preset, or a configuration.
      logdir: directory of checkpoints and telemetry; None: the default of `impala train` for a
        preset.
      num_actors: number of actor processes; auto: 1, but for Atari games on a host with a GPU one
        for each core but three.
      evaluate: whether to run an evaluator; auto: if there are several tasks,
        evaluator.every_frames or every_seconds is set, or learner.snapshots is always, and
        never if learner.snapshots is never.
      fresh: start over; an earlier run in `logdir` is moved aside.
      change_settings: resume the run in `logdir` although it was another experiment.
      empty_replay: begin with an empty replay; the earlier one is moved aside.
      init_from: log directory of another run, with whose agent a new run starts.
      serial: train in this thread instead of other processes, with one actor and no evaluator, as
        `impala train --serial` does. TensorFlow's operations are deterministic from then on.
      progress: print the learner's output line by line.
      stop: stops the run when set, for instance by another thread.
      **settings: override `config`: numbers and texts by name, sections as a dict or an object such
        as `impala.OptimiserConfig(...)`; dotted names work too, as in
        `**{"optimiser.learning_rate": 3e-4}`. Where a setting names a custom part, such as
        `environment={"id": Walk}` or `algorithm=Mine`, it may be the class itself, and an
        environment a function that makes one. `environment=Walk` is short for the former.

    Returns:
      The status and counters of the run.

    Raises:
      ValueError: a setting has an unknown name or no effect, it or an argument has an invalid
        value, or `logdir` cannot be used.
      TrainingError: the learner or the actors failed.
      Exception: in a serial run, what an environment, network or algorithm has raised.
    """
    if logdir is None and not isinstance(config, str):
        raise ValueError("A configuration that is not a preset has no name: give its run a logdir.")
    # Custom parts may import TensorFlow, whose messages are not wanted.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    base = preset(config) if isinstance(config, str) else config
    _check_names(settings)
    composed = rules.validate(layers.composed_over(base, _nested(settings)))
    objects = {k: v for k, v in settings.items() if is_dataclass(v) and not isinstance(v, type)}
    given = values.flatten(_nested({k: v for k, v in settings.items() if k not in objects}))
    for name, section in objects.items():  # which has all settings of its section, given or not
        given |= {name: section, **{f"{name}.{k}": v for k, v in values.changed(section).items()}}
    rules.check_overridden(given, composed)
    rules.check_read(given, composed)
    command = Train(
        preset=config if isinstance(config, str) else _ANY_PRESET,
        logdir=None if logdir is None else pathlib.Path(logdir),
        settings=composed,
        init_from=None if init_from is None else pathlib.Path(init_from),
    )
    flags = {
        "serial": serial,
        "num_actors": num_actors,
        "evaluate": evaluate,
        "fresh": fresh,
        "change_settings": change_settings,
        "empty_replay": empty_replay,
    }
    command = values.overlay(command, flags)
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)

    def output(line: str) -> None:
        last.append(line)
        if progress:
            print(line, flush=True)

    with _logged(progress):
        if serial:
            from impala.commands import serial as here

            ended = here.run(command, is_guest=True, asked=stop)
        else:
            request = EndRequest(passes_on=True, asked=stop)
            supervisor = Supervisor(grace_seconds=GRACE_SECONDS, request=request)
            ended = run(command, supervisor, output)
    if ended.status not in (0, STOPPED):
        said = "".join(f"\n  {line}" for line in last) if "learner" in ended.why else ""
        raise TrainingError(f"Training in {ended.logdir} failed: {ended.why}.{said}")
    told = rows.read(ended.logdir)
    newest = told[-1] if told else {}
    returns: dict[str, float] = {}
    for row in told:  # the newest one that has a task: one without training has no returns
        returns |= rows.recent_returns(row)
    return Trained(
        "finished" if ended.status == 0 else "stopped",
        ended.logdir,
        frames=int(newest.get("frames", 0)),
        updates=int(newest.get("updates", 0)),
        returns=returns,
    )


def load(
    logdir: str | pathlib.Path,
    *,
    checkpoint: str | int = "newest",
    task: int = 0,
    greedy: bool = False,
    seed: int = 0,
    gpu: bool = False,
    allow: str | Sequence[str] = (),
) -> "Policy":
    """Loads the agent of a run, to act in a custom loop: see `Policy`.

    Args:
      logdir: of a run that has written a checkpoint.
      checkpoint: which one: newest, best, a number of updates, or a path.
      task: the task whose environment `Policy.environment` makes, counted from 0.
      greedy: use the most likely action instead of a sampled one.
      seed: of the sampled actions.
      gpu: whether to compute on a GPU. If not, GPUs are hidden from TensorFlow in this process,
        unless it uses them already.
      allow: code that may be imported if the checkpoint names it, besides installed entry points of
        the group impala.components: MODULE, for what it defines, MODULE:ATTRIBUTE, or a list.

    Raises:
      ValueError: there is no such checkpoint or task, the checkpoint is damaged or needs another
        version of impala, or it names a part that may not be imported.
    """
    with _device(gpu) as device:
        from impala.play.policy import Policy

        return Policy(_player(logdir, checkpoint, task, allow), greedy, seed, device)


def evaluate(
    logdir: str | pathlib.Path,
    *,
    episodes: int = 100,
    greedy: bool = False,
    num_envs: int = 32,
    checkpoint: str | int = "newest",
    task: int = 0,
    max_steps: int = 0,
    seed: int = 0,
    gpu: bool = False,
    allow: str | Sequence[str] = (),
) -> np.ndarray:
    """Plays episodes with the agent of a run, as `impala evaluate` does.

        returns = impala.evaluate("runs/catch", episodes=20, greedy=True)
        returns.mean(), returns.std()

    Args:
      logdir: of a run that has written a checkpoint.
      episodes: that are played, at least 1.
      greedy: as for `load`.
      num_envs: environments that step together, at most `episodes`.
      checkpoint: as for `load`.
      task: as for `load`.
      max_steps: agent steps after which an episode is cut off; 0: as in the evaluations of the run
        (`evaluator.max_steps`).
      seed: of the environments and the sampled actions.
      gpu: as for `load`.
      allow: as for `load`.

    Returns:
      The return of each episode, float64 [episodes]: the sum of its rewards as the environment
      gives them, ordered by environment.

    Raises:
      ValueError: as `load`, the environment cannot be made, or a number is out of range.
    """
    flags = {
        "episodes": episodes,
        "greedy": greedy,
        "num_envs": num_envs,
        "max_steps": max_steps,
        "seed": seed,
    }
    command = values.overlay(Evaluate(logdir=pathlib.Path(logdir)), flags)
    with _device(gpu):
        episodes_played = play(command, _player(logdir, checkpoint, task, allow))
    return np.array([episode.episode_return for episode in episodes_played])


def curve(logdir: str | pathlib.Path, *, task: int = 0) -> "Curve":
    """Returns the learning curve of a run, that `impala plot` draws.

        frames, returns, measure = impala.curve("runs/catch")

    If the run was evaluated in this task, a point is the mean return of an evaluation's episodes.
    Otherwise it is the mean return of the last 100 training episodes, or, if no episode has ended
    in the run, the mean reward of a step; `measure` says which. Frames that a resumed
    run repeated count once, as repeated.

    Args:
      logdir: of a run, which may still be going on.
      task: counted from 0.

    Raises:
      ValueError: there is no such run or task, or it has no episode and no reward yet.
    """
    from impala.analysis import learning_curve

    return learning_curve.read(pathlib.Path(logdir), task)


@contextlib.contextmanager
def _device(gpu: bool) -> Iterator[str | None]:
    """Loads TensorFlow, and places what the body computes; yields where."""
    process.load_tensorflow(use_gpus=gpu, is_guest=True)
    import tensorflow as tf

    device = None if gpu else "/CPU:0"
    with tf.device(device):
        yield device


def _player(
    logdir: str | pathlib.Path, checkpoint: str | int, task: int, allow: str | Sequence[str]
) -> "Player":
    from impala.logdir import checkpoint as stored
    from impala.play.player import Player

    saved = stored.choose(pathlib.Path(logdir), str(checkpoint))
    return Player(saved, task, Allowed.of(allow))


def _check_names(settings: Mapping[str, Any]) -> None:
    """Refuses names that other libraries have for a setting, with ours."""
    known = foreign.known("train")
    for name in settings:
        ours = known.get(name.replace("_", "-"), "")
        if ours.startswith("--") and not hasattr(Config, name.split(".")[0]):
            ours = ours.removeprefix("--").replace("-", "_")
            raise values.OptionError(f"There is no setting {name!r}; ours is {ours}.")


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as nested plain data.

    Dotted names and dataclasses become dicts; classes and functions, which are parts, names.
    """
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *outer, last = name.split(".")
        place = nested
        for section in outer:
            place = place.setdefault(section, {})
        plain = _plain(value)
        if outer == [] and last == "environment" and isinstance(plain, str):
            plain = {"id": plain}
        _put(place, last, plain)
    return nested


def _put(place: dict[str, Any], name: str, plain: Any) -> None:
    """Sets an entry of nested plain data; of a dict that is there already, the entries given."""
    if isinstance(plain, dict) and isinstance(there := place.get(name), dict):
        for inner, each in plain.items():
            _put(there, inner, each)
    else:
        place[name] = plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    try:
        return components.give(value) if callable(value) else values.plain(value)
    except components.ComponentError as error:
        raise values.OptionError(str(error)) from error


@contextlib.contextmanager
def _logged(shown: bool) -> Iterator[None]:
    """Prints what a run logs, unless the program has set up logging itself."""
    logs = [logging.getLogger(name) for name in ("impala", "actors", "learner")]
    if not shown or logs[0].hasHandlers():
        yield
        return
    handler, levels = logging.StreamHandler(sys.stdout), [log.level for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
