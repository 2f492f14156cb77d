"""The experiments whose results are published: their arms, seeds and evaluations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ledger import sequences

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
    """Name -> arguments of `impala train`, without seed and log directory. {seed} is the seed, and
    {ARM} the log directory of another arm, which comes before, with the same seed."""
    before: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Name of an arm -> arguments of an `impala` command to run before it, likewise."""
    seeds: Sequence[int] = (101, 102, 103)
    score: str = "return"
    """The score in the table of results, one of `ledger.statistics.SCORES`."""
    evaluation: Sequence[str] = ("--episodes", "100", "--greedy")
    """Arguments of `impala evaluate`, for each task."""
    info: Sequence[str] = ()
    """Infos of each episode that are recorded with its return."""
    step_info: Sequence[str] = ()
    """Infos of each step that are recorded of the episodes that `evaluation` has --steps for."""
    milestones: Sequence[float] = ()
    """Training returns whose first row of telemetry is recorded, however the curve is thinned."""


def _preset(name: str, **options: Any) -> Experiment:
    """Returns the experiment that runs a preset to its end."""
    question = f"What does the preset {name} come to at its end?"
    return Experiment(name=name, question=question, **{"arms": {name: (name,)}} | options)


_EACH_SECOND = ("--learner.log-seconds", "1")  # for runs of a minute
_OF_MINUTES = range(101, 111)
"""Seeds of presets that take minutes; those that take hours have three."""
_PONG = (-18.0, 0.0, 10.0, 18.0)
_PULLS = ("--episodes", "3000", "--num-envs", "1000")  # sampled: exploring is what is learned
_BANDITS: dict[str, Any] = {"evaluation": _PULLS, "info": ("regret",), "score": "regret"}

# As long as in Wang et al. 2016, arXiv 1611.05763: 20,000 episodes, and an LSTM of 48.
_AS_IN_THE_PAPER: dict[str, Any] = {
    "evaluation": (*_PULLS, "--steps", "100"),
    "info": ("regret",),
    "step_info": ("best",),
}
_PAPER_EPISODES = 20_000


def _at_lag(lag: int, *learner: str) -> Sequence[str]:
    """Returns arguments for CartPole without replay: each row is as old as the exact lag."""
    flags = {
        "--mix.fresh": "32",
        "--mix.replayed": "0",
        "--mix.exact-lag": str(lag),
    }
    return ("cartpole", *_EACH_SECOND, *(word for flag in flags.items() for word in flag), *learner)


def _arms_at(lags: Sequence[int], **learners: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Returns an arm for each learner, by name and arguments, and each exact lag."""
    return {
        f"{name.replace('_', '-')}-lag-{lag}": _at_lag(lag, *learner)
        for name, learner in learners.items()
        for lag in lags
    }


_VTRACE_AT_LAG = Experiment(
    name="vtrace-at-lag",
    question="What do V-trace, one-step importance sampling and IMPACT correct at an exact lag?",
    arms=_arms_at(
        (0, 10, 25, 50, 200),
        vtrace=("--impala.correction", "vtrace"),
        one_step=("--impala.correction", "one_step"),
        none=("--impala.correction", "none"),
        impact=("--algorithm", "impact"),
    ),
    seeds=range(101, 111),
)

_VTRACE_SETTINGS_AT_LAG = Experiment(
    name="vtrace-settings-at-lag",
    question="Which settings of V-trace help at an exact lag?",
    arms=_arms_at(
        (50, 200),
        lambda_0_9=("--impala.vtrace-lambda", "0.9"),
        lambda_0_5=("--impala.vtrace-lambda", "0.5"),
        rho_4=("--impala.clip-rho-threshold", "4", "--impala.clip-pg-rho-threshold", "4"),
        baseline_cost_0_1=("--impala.baseline-cost", "0.1"),
        baseline_cost_2=("--impala.baseline-cost", "2"),
    ),
    seeds=range(101, 111),
)

# What no task of a sequence may do to the next: end its learning.
_STEADY = ("--optimiser.no-decay-to-zero",)
_SAMPLED = ("--episodes", "100")


def _sequence(
    name: str, of: sequences.Tasks, *, has_reservoirs: bool = False, **options: Any
) -> Experiment:
    """Returns the experiment that trains tasks in turn, with and without CLEAR.

    Args:
      name: of the experiment.
      of: the tasks.
      has_reservoirs: also with reservoirs of several sizes.
      options: of the experiment.
    """
    return Experiment(
        name=name,
        question="What does CLEAR keep of tasks that are trained in turn, and what of it counts?",
        arms={**sequences.arms(of), **(sequences.reservoirs(of) if has_reservoirs else {})},
        evaluation=_SAMPLED,
        **options,
    )


# Boards of different height put the paddle in different rows: they can be told apart, and no
# action means the same in two of them.
_BOARDS = ("Catch", 'Catch{"rows": 9, "shift": 1}', 'Catch{"rows": 8, "shift": 2}')
_CATCH_BOARDS = sequences.Tasks(
    preset="catch",
    # A policy that is certain of one board's controls must still explore on the next.
    flags=(*_STEADY, *_EACH_SECOND, "--impala.entropy-cost", "0.05", "--evaluator.episodes", "32"),
    tasks=_BOARDS,
    frames=45_000,
    cycles=2,
    fresh=16,
    unroll_length=9,
)

# In alphabetical order, as they were chosen; each is learned alone.
_MINATAR_GAMES = ("Asterix", "Breakout", "SpaceInvaders")

_ALL_SIX_ACTIONS = '{"use_minimal_action_set": false}'

_MINATAR_SEQUENCE = sequences.Tasks(
    preset="minatar",
    flags=(*_STEADY, "--environment.kwargs", _ALL_SIX_ACTIONS),
    tasks=tuple(f"MinAtar/{game}-v1" for game in _MINATAR_GAMES),
    frames=2_500_000,
    cycles=2,
    fresh=16,
    unroll_length=20,
)

# CORA's six games (Powers et al. 2022, arXiv 2110.10067, and its code): 50M frames of each, five
# cycles, all 18 actions; its CLEAR has RMSProp with 4e-4 and 32 + 32 unrolls of 20 steps.
_CORA_ATARI = sequences.Tasks(
    preset="atari-deep",
    flags=(
        *("--tasks.anneal-anew", "--environment.atari.full-action-set"),
        *("--optimiser.learning-rate", "4e-4"),
        *("--optimiser.epsilon", "0.01"),
        *("--impala.entropy-cost", "0.01", "--evaluator.every-frames", "5_000_000"),
        *("--evaluator.episodes", "10"),
    ),
    tasks=tuple(
        f"ALE/{game}-v5"
        for game in ("SpaceInvaders", "Krull", "BeamRider", "Hero", "StarGunner", "MsPacman")
    ),
    frames=50_000_000,
    cycles=5,
    fresh=32,
    unroll_length=20,
    frame_skip=4,
)


def _corrections(game: str) -> Experiment:
    """Returns the experiment that compares corrections on a game, with and without replay.

    Those with replay take as many unrolls per update from the newest 10,000; nothing is cloned.
    """
    every = (
        *("minatar", "--environment.id", f"MinAtar/{game}-v1", "--total-frames", "2_000_000"),
        *("--impala.policy-cloning-cost", "0", "--impala.value-cloning-cost", "0"),
        *("--replay.rule", "fifo", "--replay.capacity-frames", "200_000"),
    )
    mixes = {"": "0", "-replay": "16"}
    return Experiment(
        name=f"vtrace-{game.lower()}",
        question="Which correction is best with and without replay?",
        arms={
            f"{correction.replace('_', '-')}{suffix}": (
                *(*every, "--impala.correction", correction, "--mix.replayed", replayed),
            )
            for suffix, replayed in mixes.items()
            for correction in ("vtrace", "one_step", "epsilon", "none")
        },
        evaluation=_SAMPLED,
    )


# All that is learned from is 1,000 to 1,100 updates old. With the preset's learning rate, policies
# so far apart differ by several nats, and what is learned collapses in both arms.
_VERY_OLD = (
    *("cartpole", *_EACH_SECOND, "--mix.exact-lag", "1000", "--mix.no-learn-from-fresh"),
    *("--mix.fresh", "8", "--mix.replayed", "16", "--actor.num-envs", "8"),
    *("--replay.rule", "fifo", "--replay.capacity-frames", "16_000"),
    *("--optimiser.learning-rate", "1e-4"),
    *("--impala.policy-cloning-cost", "0", "--impala.value-cloning-cost", "0"),
)

# Pulls must be remembered over an episode of 100, in unrolls of 40.
_REPLAYED_MEMORY = (
    *("bandit", "--algorithm", "impala", "--impala.baseline-cost", "1"),
    *("--impala.entropy-anneal", "0.5", "--impala.vtrace-lambda", "0.9"),
    *("--mix.fresh", "8", "--learner.unroll-length", "40", "--mix.replayed"),
)

# A teacher of half the return.
_TEACHER = ("minatar", *_EACH_SECOND, "--total-frames", "900_000")
_TAUGHT = (
    *("minatar", *_EACH_SECOND, "--teacher.logdirs", "{teacher}"),
    *("--teacher.policy-cost", "2", "--teacher.anneal", "0.3"),
)
_SPECIALISTS = {
    "asterix": ("minatar", "--environment.id", "MinAtar/Asterix-v1"),
    "space-invaders": ("minatar", "--environment.id", "MinAtar/SpaceInvaders-v1"),
}
_BOTH = (
    *("minatar", "--tasks.order", "simultaneous", "--agent.popart"),
    *("--tasks.environments", "MinAtar/Asterix-v1", "MinAtar/SpaceInvaders-v1"),
    *("--teacher.logdirs", "{asterix}", "{space-invaders}", "--total-frames", "10_000_000"),
)
_CLONED = (
    *("minigrid", *_EACH_SECOND, "--demonstrations.source", "minari:doorkey/seed{seed}-v0"),
    *("--phases", "clone:50_000", "impala", "--total-frames", "550_000"),
)

_PRE_TRAINING = 100_000  # frames


def _with_critic(*flags: str, is_first: bool) -> Sequence[str]:
    """Returns arguments for IMPALA on CartPole, after a critic if it is first."""
    frames, of_critic = 750_000, _PRE_TRAINING if is_first else 0
    phases = ("--phases", f"critic:{of_critic}", "impala") if is_first else ()
    return ("cartpole", *_EACH_SECOND, *flags, *phases, "--total-frames", str(frames + of_critic))


# Each of 2,048 steps is used ten times; rewards are scaled so that returns are about 1.
_IMPACT_PENDULUM = (
    *("pendulum", "--algorithm", "impact", "--impact.gae-lambda", "0.95"),
    *("--impact.entropy-cost", "0.001", "--objective.discount", "0.9"),
    *("--objective.reward-scale", "0.1", "--agent.hidden-sizes", "64", "64"),
    *("--agent.no-random-warm-up", "--actor.num-envs", "16", "--learner.unroll-length", "32"),
    *("--learner.queue-unrolls", "32", "--mix.fresh", "16", "--mix.replayed", "16"),
    *("--mix.updates", "10", "--mix.warm-up-unrolls", "16", "--replay.capacity-frames", "2048"),
    *("--optimiser.clip-global-norm", "40", "--optimiser.decay-to-zero"),
    *("--total-frames", "400_000", "--evaluate", "no", *_EACH_SECOND),
)

_GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "BeamRider")


_STICKY = ("--environment.atari.sticky-actions", "0.25")


def _atari_game(game: str, *flags: str) -> Sequence[str]:
    """Returns arguments for the preset atari on a game of the six."""
    return ("atari", "--environment.id", f"ALE/{game}-v5", "--total-frames", "5_000_000", *flags)


_ALL = (
    Experiment(
        name="critic-first",
        question="Does IMPALA learn in fewer frames from a pre-trained critic?",
        arms={
            "from-scratch": _with_critic(is_first=False),
            "critic-first": _with_critic(is_first=True),
            "critic-head-first": _with_critic("--critic.trains", "baseline", is_first=True),
            "separate-from-scratch": _with_critic("--agent.separate-baseline", is_first=False),
            "separate-critic-first": _with_critic("--agent.separate-baseline", is_first=True),
        },
        milestones=(100.0, 200.0, 400.0, 475.0),
    ),
    Experiment(
        name="trust-region",
        question="What does a trust region make of data that are 1,000 updates old?",
        arms={
            "without": _VERY_OLD,
            "trust-region": (*_VERY_OLD, "--impala.trust-region", "0.3"),
        },
    ),
    Experiment(
        name="burn-in",
        question="What does burn-in make of replayed unrolls of a recurrent agent?",
        arms={
            "without": (*_REPLAYED_MEMORY, "24"),
            "burn-in-20": (*_REPLAYED_MEMORY, "24", "--replay.burn-in", "20"),
            "as-many-rows": (*_REPLAYED_MEMORY, "12"),
        },
        **_BANDITS,
    ),
    Experiment(
        name="atari-games",
        question="What does the preset atari come to on six games after 5M frames, tuned on none?",
        arms={game.lower(): _atari_game(game, *_STICKY) for game in _GAMES},
        seeds=(101, 102),
        evaluation=_SAMPLED,
    ),
    Experiment(
        name="atari-5m",
        question="What does the preset atari come to beside Sample Factory's own settings?",
        arms={game.lower(): _atari_game(game) for game in _GAMES[:2]},
        seeds=(101,),
        evaluation=_SAMPLED,
    ),
    Experiment(
        name="atari-multi",
        question="Does one agent play six games as well as the specialist of each?",
        arms={
            "together": ("atari-multi",),
            **{
                game.lower(): (
                    *("atari-multi", "--tasks.environments", f"ALE/{game}-v5"),
                    *("--total-frames", "5_000_000"),
                )
                for game in _GAMES
            },
        },
        seeds=(101, 102),
        evaluation=_SAMPLED,
    ),
    Experiment(
        name="entropy-target",
        question="Is one target for the entropy as good as the schedule that was tuned on Pong?",
        arms={
            game.lower(): _atari_game(
                game,
                *_STICKY,
                *("--impala.entropy-target", "0.8", "--impala.entropy-target-end", "0.25"),
                *("--impala.entropy-anneal", "0.4"),
            )
            for game in _GAMES[:3]
        },
        seeds=(101,),
        evaluation=_SAMPLED,
    ),
    *map(_corrections, _MINATAR_GAMES[:2]),
    _sequence("clear-minatar", _MINATAR_SEQUENCE, has_reservoirs=True),
    # One arm's runs of one seed differ by as much as arms do, hence ten seeds; in three orders.
    _sequence("clear-catch", _CATCH_BOARDS, has_reservoirs=True, seeds=range(101, 105)),
    *(
        _sequence(
            f"clear-catch-from-{first + 1}",
            dataclasses.replace(_CATCH_BOARDS, tasks=_BOARDS[first:] + _BOARDS[:first]),
            has_reservoirs=True,
            seeds=seeds,
        )
        for first, seeds in {1: range(105, 108), 2: range(108, 111)}.items()
    ),
    _sequence("clear-atari", _CORA_ATARI),
    _VTRACE_AT_LAG,
    _VTRACE_SETTINGS_AT_LAG,
    Experiment(
        name="impact-pendulum",
        question="Does IMPACT learn continuous actions?",
        arms={"impact": _IMPACT_PENDULUM},
    ),
    _preset("catch", arms={"catch": ("catch", *_EACH_SECOND)}, seeds=_OF_MINUTES),
    _preset("cartpole", arms={"cartpole": ("cartpole", *_EACH_SECOND)}, seeds=_OF_MINUTES),
    _preset("cartpole-a3c", seeds=_OF_MINUTES),
    _preset("cartpole-q", seeds=_OF_MINUTES),
    _preset("pendulum", seeds=_OF_MINUTES),
    _preset(
        "bandit",
        arms={
            "easy": ("bandit", "--environment.id", "Bandit/DependentEasy-v0"),
            "medium": ("bandit", "--environment.id", "Bandit/DependentMedium-v0"),
            "uniform": ("bandit",),
            "uniform-without-reward": ("bandit", "--environment.no-last-reward"),
        },
        seeds=_OF_MINUTES,
        **_BANDITS,
    ),
    _preset("bandit-independent", seeds=_OF_MINUTES, **_BANDITS),
    _preset("bandit-eleven", seeds=_OF_MINUTES, **_BANDITS | {"score": "return"}),
    Experiment(
        name="bandit-paper",
        question="What regret is left after the paper's 20,000 episodes, with its LSTM of 48?",
        arms={
            "independent": (
                *("bandit-independent", "--agent.lstm-size", "48"),
                *("--total-frames", str(100 * _PAPER_EPISODES)),
            ),
            **{
                problem.lower(): (
                    *("bandit", "--environment.id", f"Bandit/Dependent{problem}-v0"),
                    *("--total-frames", str(100 * _PAPER_EPISODES)),
                )
                for problem in ("Uniform", "Easy", "Medium", "Hard")
            },
        },
        score="regret",
        **_AS_IN_THE_PAPER,
    ),
    Experiment(
        name="bandit-eleven-paper",
        question="What is paid by the eleven arms after the paper's 20,000 episodes?",
        arms={"eleven": ("bandit-eleven", "--total-frames", str(5 * _PAPER_EPISODES))},
        **_AS_IN_THE_PAPER,
    ),
    Experiment(
        name="teachers",
        question="How much sooner does an agent learn from another one, and does it go beyond it?",
        arms={"alone": ("minatar", *_EACH_SECOND), "teacher": _TEACHER, "taught": _TAUGHT},
        seeds=range(113, 119),  # three do not tell the arms apart; 101 to 112 had other settings
        evaluation=_SAMPLED,
    ),
    Experiment(
        name="specialists",
        question="Does one agent that two specialists teach play as well as each of them?",
        arms={**_SPECIALISTS, "both": _BOTH},
        evaluation=_SAMPLED,
    ),
    Experiment(
        name="demonstrations",
        question="How much sooner does an agent learn that has cloned 100 episodes of another one?",
        arms={"alone": ("minigrid", *_EACH_SECOND), "cloned": _CLONED},
        before={"cloned": ("record", "{alone}", "--dataset", "doorkey/seed{seed}-v0")},
        milestones=(0.85,),
        evaluation=_SAMPLED,
    ),
    _preset("atari-a3c-small", seeds=(101,)),
    Experiment(
        name="breakout",
        question="What do IMPALA, A3C and Q-learning come to on Breakout after 10M frames?",
        arms={
            "atari": ("atari", "--environment.id", "ALE/Breakout-v5"),
            "atari-a3c": (
                *("atari-a3c", "--environment.id", "ALE/Breakout-v5"),
                *("--total-frames", "10_000_000"),
            ),
            "atari-q": ("atari-q",),
            "atari-q-replay": ("atari-q-replay",),
        },
        seeds=(101,),
        evaluation=_SAMPLED,  # a greedy policy may never serve
    ),
    _preset("bipedal-walker", seeds=(101,)),
    _preset("atari", milestones=_PONG),
    _preset("atari-a3c", seeds=(101,)),
    _preset("minatar", seeds=_OF_MINUTES),
    _preset("minigrid", seeds=_OF_MINUTES),
    _preset("mujoco"),
    _preset("minatar-q", seeds=(101,)),
    _preset("lunar-lander"),
)

EXPERIMENTS: Mapping[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
