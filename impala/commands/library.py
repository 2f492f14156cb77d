"""What `import impala` offers: training a run, and acting with what it learned."""

import collections
import contextlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from impala.commands.flags import STOPPED
from impala.commands.train import GRACE_SECONDS, Train, run
from impala.components import Allowed
from impala.config import layers, parts, rules, values
from impala.config.schema import Config
from impala.logdir import rows
from impala.runtime import process
from impala.runtime.signals import EndRequest
from impala.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from impala.logdir.policy import Policy

Output = Callable[[str], None]
_LAST_LINES = 20  # of what the learner wrote, in an error


_ANY_PRESET = "catch"  # under a configuration that sets everything


class TrainingError(RuntimeError):
    """Training failed; says why, with what the learner wrote last."""


class Trained(NamedTuple):
    """How a run ended that did not fail."""

    status: Literal["finished", "stopped"]  # stopped: the same call goes on with the run
    logdir: pathlib.Path
    frames: int  # environment frames learned from, in all of the run
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
    num_actors: int = 1,
    evaluate: Literal["auto", "yes", "no"] = "auto",
    fresh: bool = False,
    change_settings: bool = False,
    init_from: str | pathlib.Path | None = None,
    progress: bool = True,
    stop: threading.Event | None = None,
    **settings: Any,
) -> Trained:
    """Trains on this host, as `impala train` does: a learner and actors in their own processes.

        impala.train("catch", "runs/catch", seed=1, optimiser={"learning_rate": 3e-4})

    What a signal such as Ctrl-C does is put off until the run has stopped with a checkpoint: then
    KeyboardInterrupt is raised. A run that was stopped or killed is gone on with by the same call.

    Args:
      config: the name of a preset, or a configuration.
      logdir: where checkpoints and telemetry go; None: where `impala train` puts a preset's.
      num_actors: processes that act.
      evaluate: whether an evaluator plays beside the actors; auto: if there are several tasks.
      fresh: start over: an earlier run in `logdir` is moved aside.
      change_settings: go on with the run in `logdir` although it was another experiment.
      init_from: start a new run with the agent of another one, whose log directory this is.
      progress: print what the learner says, line by line.
      stop: stops the run if it is set, for instance by another thread.
      **settings: put over `config`: numbers and texts by name, sections as a dict or an object such
        as `impala.OptimiserConfig(...)`; dotted names work too, as in
        `**{"optimiser.learning_rate": 3e-4}`.

    Returns:
      How far the run is.

    Raises:
      ValueError: a setting has a name or a value that it cannot have, or `logdir` cannot be used.
      TrainingError: the learner or the actors failed.
    """
    if logdir is None and not isinstance(config, str):
        raise ValueError("A configuration that is no preset has no name: give its run a logdir.")
    # Parts of one's own may import TensorFlow, which is to say little of what it finds.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    base = preset(config) if isinstance(config, str) else config
    command = Train(
        preset=config if isinstance(config, str) else _ANY_PRESET,
        logdir=None if logdir is None else pathlib.Path(logdir),
        settings=rules.validate(_put_over(base, _nested(settings))),
        num_actors=num_actors,
        evaluate=evaluate,
        fresh=fresh,
        change_settings=change_settings,
        init_from=None if init_from is None else pathlib.Path(init_from),
    )
    values.check_ranges(command)
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)

    def output(line: str) -> None:
        last.append(line)
        if progress:
            print(line, flush=True)

    supervisor = Supervisor(
        grace_seconds=GRACE_SECONDS, request=EndRequest(passes_on=True), asked=stop
    )
    with _logged(progress):
        ended = run(command, supervisor, output)
    if ended.status not in (0, STOPPED):
        said = "".join(f"\n  {line}" for line in last) if "learner" in ended.why else ""
        raise TrainingError(f"Training in {ended.logdir} failed: {ended.why}.{said}")
    told = rows.read(ended.logdir)
    newest = told[-1] if told else {}
    return Trained(
        "finished" if ended.status == 0 else "stopped",
        ended.logdir,
        frames=int(newest.get("frames", 0)),
        updates=int(newest.get("updates", 0)),
        returns=rows.recent_returns(newest),
    )


def load(
    logdir: str | pathlib.Path,
    *,
    checkpoint: str | int = "newest",
    task: int = 0,
    greedy: bool = False,
    seed: int = 0,
    gpu: bool = False,
    allow: Sequence[str] = (),
) -> "Policy":
    """Loads the agent of a run, to act in a loop of one's own: see `Policy`.

    Args:
      logdir: of a run that has written a checkpoint.
      checkpoint: which one: newest, best, a number of updates, or a path.
      task: which of the run's tasks `Policy.environment` makes, counted from 0.
      greedy: the most likely action instead of a sampled one.
      seed: of the sampled actions.
      gpu: whether to compute on a GPU. If not, GPUs are hidden from TensorFlow in this process,
        unless it uses them already.
      allow: what may be imported if the checkpoint names it, beside installed entry points of the
        group impala.components: each MODULE, for what it defines, or MODULE:ATTRIBUTE.

    Raises:
      ValueError: there is no such checkpoint, or no such task.
    """
    process.load_tensorflow(use_gpus=gpu, is_guest=True)
    import tensorflow as tf

    from impala.logdir import checkpoint as stored
    from impala.logdir.player import Player
    from impala.logdir.policy import Policy

    device = None if gpu else "/CPU:0"
    with tf.device(device):
        saved = stored.choose(pathlib.Path(logdir), str(checkpoint))
        player = Player(saved, task, Allowed(tuple(allow)))
        return Policy(player, greedy, seed, device)


def _put_over(config: Config, data: Mapping[str, Any]) -> Config:
    """Returns a configuration with settings put over it, which may be those of one's own parts."""
    named = values.overlay(config, parts.naming(data))
    composed = values.overlay(parts.class_of(config, named)(), values.to_dict(config))
    return parts.compose(values.overlay(composed, data))


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested data of settings: dotted names and configuration objects become dicts."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        plain = values.plain(value)
        place[last] = place.get(last, {}) | plain if isinstance(plain, dict) else plain
    return nested


@contextlib.contextmanager
def _logged(shown: bool) -> Iterator[None]:
    """Shows what is logged of a run, unless the program has set up logging itself."""
    log = logging.getLogger("impala")
    if not shown or log.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(sys.stdout), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
