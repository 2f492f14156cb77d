"""The experiments whose results are published: their arms, seeds and evaluations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

REPORTING_SEEDS = 101  # and up; presets are tuned on seeds 1 to 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs of `impala train` that differ in arm and seed; each ends with an evaluation.

    To define one, add it to EXPERIMENTS, and show it on a page with the functions of
    `ledger.rendering`.
    """

    name: str
    question: str
    """What the experiment answers, for `python -m ledger list`."""
    arms: Mapping[str, Sequence[str]]
    """Name -> arguments of `impala train`, without seed and log directory."""
    seeds: Sequence[int] = (101, 102, 103)
    score: str = "return"
    """The score in the table of results, one of `ledger.statistics.SCORES`."""
    evaluation: Sequence[str] = ("--episodes", "100", "--greedy")
    """Arguments of `impala evaluate`, for each task."""
    info: Sequence[str] = ()
    """Infos of each episode that are recorded with its return."""
    milestones: Sequence[float] = ()
    """Training returns whose first row of telemetry is recorded, however the curve is thinned."""


def _preset(name: str, **options: Any) -> Experiment:
    """Returns the experiment that runs a preset to its end."""
    question = f"What does the preset {name} come to at its end?"
    return Experiment(name=name, question=question, **{"arms": {name: (name,)}} | options)


_EACH_SECOND = ("--learner.log-seconds", "1")  # for runs of a minute
_PONG = (-18.0, 0.0, 10.0, 18.0)
_PULLS = ("--episodes", "3000", "--num-envs", "1000")  # sampled: exploring is what is learned
_BANDITS: dict[str, Any] = {"evaluation": _PULLS, "info": ("regret",), "score": "regret"}


def _at_lag(correction: str, lag: int) -> Sequence[str]:
    """Returns arguments for CartPole without replay: each row is as old as the exact lag."""
    flags = {
        "--mix.fresh": "32",
        "--mix.replayed": "0",
        "--mix.exact-lag": str(lag),
        "--impala.correction": correction,
    }
    return ("cartpole", *_EACH_SECOND, *(word for flag in flags.items() for word in flag))


_VTRACE_AT_LAG = Experiment(
    name="vtrace-at-lag",
    question="What do V-trace and one-step importance sampling correct at an exact policy lag?",
    arms={
        f"{correction.replace('_', '-')}-lag-{lag}": _at_lag(correction, lag)
        for correction in ("vtrace", "one_step", "none")
        for lag in (0, 50, 200)
    },
)

_ALL = (
    _VTRACE_AT_LAG,
    _preset("catch", arms={"catch": ("catch", *_EACH_SECOND)}),
    _preset("cartpole", arms={"cartpole": ("cartpole", *_EACH_SECOND)}),
    _preset("cartpole-a3c"),
    _preset("cartpole-q"),
    _preset("pendulum"),
    _preset(
        "bandit",
        arms={
            "easy": ("bandit", "--environment.id", "Bandit/DependentEasy-v0"),
            "medium": ("bandit", "--environment.id", "Bandit/DependentMedium-v0"),
            "uniform": ("bandit",),
            "uniform-without-reward": ("bandit", "--environment.no-last-reward"),
        },
        **_BANDITS,
    ),
    _preset("bandit-independent", **_BANDITS),
    _preset("bandit-eleven", **_BANDITS | {"score": "return"}),
    _preset("atari", milestones=_PONG),
    _preset("atari-a3c", seeds=(101,), milestones=_PONG),
    _preset("minatar-q", seeds=(101,)),
    _preset("lunar-lander", seeds=(101,)),
)

EXPERIMENTS: Mapping[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
