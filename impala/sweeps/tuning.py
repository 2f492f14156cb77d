"""Runs a sweep's trials, and resumes a sweep that was stopped or killed."""

import logging
import os
import pathlib
import signal
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import ray
from ray import tune
from ray.tune import schedulers
from ray.tune.experiment import Trial as Scheduled
from ray.tune.search.optuna import OptunaSearch

from impala.analysis import runs
from impala.config.values import OptionError
from impala.runtime.signals import EndRequest
from impala.sweeps import results
from impala.sweeps.description import RAY, Space, Sweep
from impala.sweeps.trial import Trial

os.environ |= {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # signals are ours; SIGUSR1 asks Ray to stop
    "RAY_AIR_NEW_OUTPUT": "0",  # which prints whatever `verbose` says
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # each with pages of Ray's own traceback
}

_FACTORS = (1.2, 1 / 1.2)  # as in IMPALA's section 5.3
_MOST_FAILURES = 2  # of a trial: it is started again, and resumes
# Of each trial. When a member begins to copy one, the other may have saved a newer one already.
_CHECKPOINTS_KEPT = 3
_SECONDS_BETWEEN_LINES = 10.0  # of a trial
_ANSWER_SECONDS = 5.0  # of a cluster; Ray itself would wait for a quarter of an hour


def run(
    sweep: Sweep, output: pathlib.Path, address: str | None, show: Callable[[str], None]
) -> tuple[list[results.Candidate], bool]:
    """Runs all trials, or those that an earlier call has left.

    Args:
      sweep: what to run.
      output: absolute path of the sweep's directory; all hosts of a cluster share it.
      address: of a Ray cluster; None: RAY_ADDRESS, or only this host.
      show: called with each line of progress.

    Returns:
      The candidates, the best first, and whether all trials have ended.

    Raises:
      OptionError: there is no such cluster, or no host of it can run a trial.
    """
    _connect(sweep, address)
    try:
        trainable = tune.with_resources(
            tune.with_parameters(
                Trial, sweep=sweep, output=str(output), directory=str(pathlib.Path.cwd())
            ),
            {"cpu": sweep.options.cpus, "gpu": sweep.options.gpus},
        )
        folder = str(output / RAY)
        if tune.Tuner.can_restore(folder):
            tuner = tune.Tuner.restore(
                folder,
                trainable,
                resume_unfinished=True,
                restart_errored=True,
                param_space=_param_space(sweep),
            )
            show("Going on with the sweep.")
        else:
            tuner = tune.Tuner(
                trainable,
                param_space=_param_space(sweep),
                tune_config=tune.TuneConfig(
                    num_samples=sweep.options.trials,
                    search_alg=_search_algorithm(sweep),
                    scheduler=_scheduler(sweep),
                    metric="score",
                    mode="max",
                ),
                run_config=tune.RunConfig(
                    name=RAY,
                    storage_path=str(output),
                    failure_config=tune.FailureConfig(max_failures=_MOST_FAILURES),
                    checkpoint_config=tune.CheckpointConfig(
                        num_to_keep=_CHECKPOINTS_KEPT,
                        checkpoint_at_end=False,  # no other trial copies one that has ended
                    ),
                    callbacks=[_Progress(show)],
                    verbose=0,
                ),
            )
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until Ray has its handler
        with (
            warnings.catch_warnings(action="ignore"),  # of Ray, on how it might be faster
            EndRequest(on_first=lambda: signal.raise_signal(signal.SIGUSR1)) as request,
        ):
            _Progress.request = request
            grid = tuner.fit()
    finally:
        ray.shutdown()
    found, lost = results.of(grid, output)
    if lost:
        show(f"{lost} of {len(grid)} trials failed without a score: no row of the table has them.")
    return found, not request.is_set()


def _connect(sweep: Sweep, address: str | None) -> None:
    """Connects to a Ray cluster, or starts Ray on this host."""
    source, given = "--address", address
    if given in (None, "auto") and os.environ.get("RAY_ADDRESS"):  # as Ray does
        source, given = "RAY_ADDRESS", os.environ["RAY_ADDRESS"]
    if given is not None and given not in ("auto", "local"):
        _check_address(source, given)
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        raise OptionError(f"There is no Ray cluster at {given} ({source}): {error}") from None
    options = sweep.options
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(
        host.get("CPU", 0) >= options.cpus and host.get("GPU", 0) >= options.gpus for host in hosts
    ):
        most: dict[str, float] = max(
            hosts, key=lambda host: (host.get("GPU", 0), host.get("CPU", 0)), default={}
        )
        ray.shutdown()
        raise OptionError(
            f"A trial takes {options.cpus:g} cores and {options.gpus:g} GPUs (cpus, gpus), but no "
            f"host has them; the largest has {most.get('CPU', 0):g} and {most.get('GPU', 0):g}."
        )


def _check_address(source: str, address: str) -> None:
    """Checks that somebody listens at the address of a Ray cluster.

    Raises:
      OptionError: nobody does, or it is no address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise OptionError(
            f"{source} is {address!r}; it must be auto, or HOST:PORT of a Ray cluster's head, such "
            "as 10.0.0.1:6379."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{source} is {address!r}, where no Ray cluster answers ({error}): start one there "
            f"with ray start --head --port {port}, or leave it out to run on this host alone."
        ) from None


def _param_space(sweep: Sweep) -> dict[str, Any]:
    return {name: _domain(space) for name, space in sweep.search.items()}


def _domain(space: Space) -> Any:
    """Returns a setting's values in Ray's words."""
    if space.kind == "grid":
        return tune.grid_search(list(space.values))
    if space.kind == "choice":
        return tune.choice(list(space.values))
    low, high = space.values
    if space.is_whole:
        whole = {"uniform": tune.randint, "log_uniform": tune.lograndint}[space.kind]
        return whole(low, high + 1)
    return {"uniform": tune.uniform, "log_uniform": tune.loguniform}[space.kind](low, high)


def _search_algorithm(sweep: Sweep) -> Any:
    options = sweep.options
    if options.sampler == "optuna":
        return OptunaSearch(seed=options.seed)
    return tune.search.BasicVariantGenerator(
        random_state=options.seed,
        constant_grid_search=True,  # a sample is tried with every seed of a grid
    )


def _scheduler(sweep: Sweep) -> Any:
    options = sweep.options
    if options.scheduler == "asha":
        return schedulers.AsyncHyperBandScheduler(
            time_attr="frames",
            max_t=sweep.total_frames,
            grace_period=options.asha.grace_frames,
            reduction_factor=options.asha.reduction,
        )
    if options.scheduler == "pbt":
        return schedulers.PopulationBasedTraining(
            time_attr="frames",
            perturbation_interval=options.pbt.every_frames,
            quantile_fraction=options.pbt.share,
            resample_probability=options.pbt.resample,
            perturbation_factors=_FACTORS,
            hyperparam_mutations={
                name: list(space.values) if space.kind == "choice" else _domain(space)
                for name, space in sweep.search.items()
            },
            custom_explore_fn=_Inside(sweep),
        )
    return None


class _Inside:
    """Keeps numbers that were changed by a factor in their range."""

    def __init__(self, sweep: Sweep):
        self._ranges = {name: space for name, space in sweep.search.items() if space.is_range}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        return config | {name: space.nearest(config[name]) for name, space in self._ranges.items()}


class _Progress(tune.Callback):
    """Shows a line when a trial begins, ends, and now and then between."""

    request: ClassVar[EndRequest | None] = None  # of the class, as Ray restores stored instances

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._shown: dict[str, float] = {}

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Asks Ray to stop, which listens now, if a signal came before."""
        if self.request is not None and self.request.is_set():
            signal.raise_signal(signal.SIGUSR1)

    def on_trial_start(
        self, iteration: int, trials: list[Scheduled], trial: Scheduled, **info: Any
    ) -> None:
        self._line(trial, f"trains with {runs.described(trial.config)}")

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Scheduled],
        trial: Scheduled,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        name, now = trial.trial_id, time.monotonic()
        if now - self._shown.get(name, 0.0) < _SECONDS_BETWEEN_LINES:
            return
        self._shown[name] = now
        self._line(trial, f"{result['frames']:,} frames, score {runs.text(result['score'])}")

    def on_trial_complete(
        self, iteration: int, trials: list[Scheduled], trial: Scheduled, **info: Any
    ) -> None:
        last = trial.last_result
        ended = "ended" if last.get("is_whole") else "was stopped early"
        frames, score = last.get("frames", 0), runs.text(last.get("score"))
        self._line(trial, f"{ended} after {frames:,} frames, score {score}")

    def on_trial_recover(
        self, iteration: int, trials: list[Scheduled], trial: Scheduled, **info: Any
    ) -> None:
        self._line(trial, f"failed, and is started again: {_cause(trial.error_file)}")

    def on_trial_error(
        self, iteration: int, trials: list[Scheduled], trial: Scheduled, **info: Any
    ) -> None:
        self._line(trial, f"failed: {_cause(trial.error_file)} (see {trial.error_file})")

    def _line(self, trial: Scheduled, text: str) -> None:
        self._show(f"trial {trial.trial_id}: {text}")


def _cause(file: str) -> str:
    """Returns the last error in a file of Ray's, in a line: of all that it says, the learner's."""
    text = pathlib.Path(file).read_text(errors="replace").rpartition("Failure # ")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if " ERROR " in line or line.startswith("impala: ")]
    return (errors or lines)[-1]
