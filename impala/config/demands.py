"""Demands of algorithms on the rest of the configuration, checked before anything is made.

An algorithm declares its demands as the class attribute `demands`. Those of built-in algorithms are
here, so that they are known before TensorFlow is loaded.
"""

import dataclasses
from collections.abc import Sequence

from impala.config.schema import Config
from impala.config.values import OptionError
from impala.parts.components import ALGORITHM
from impala.schedule import phases


@dataclasses.dataclass(frozen=True)
class Demands:
    """What an algorithm requires; the defaults require nothing but a policy."""

    policies: tuple[str, ...] = ("stochastic",)
    """Values of agent.policy that it can learn."""
    on_policy: bool = False
    """It has no off-policy correction: no replay."""
    changes_policy: bool = True
    """It improves the policy. Until an algorithm does, the policy in replay is about the current
    one: a critic moves it through a shared torso at most."""
    feed_forward: bool = False
    """It uses single observations: no core and no frame stack."""
    warms_up_randomly: bool = False
    """Its actions fill a box, and its loss does not depend on the behaviour policy: until the first
    update, actions may be uniformly random."""
    burns_in: bool = False
    """It leaves out the burn-in of replayed unrolls: `Algorithm.burn_in`."""
    from_demonstrations: bool = False
    """It learns from demonstrations, not from what actors play: `demonstrations.source`."""
    has_teachers: bool = False
    """It is a `PolicyGradient`, whose policy imitates teachers: `teacher.logdirs`."""
    normalises_values: bool = False
    """It divides what it learns of values by `Algorithm.value_scales`, and returns their targets:
    `agent.popart`."""


IMPALA = Demands(burns_in=True, has_teachers=True, normalises_values=True)
ACTOR_CRITIC = Demands(on_policy=True, has_teachers=True, normalises_values=True)
IMPACT = Demands(burns_in=True, has_teachers=True)
CRITIC = Demands(
    policies=("stochastic", "epsilon_greedy"),
    on_policy=True,
    changes_policy=False,
    burns_in=True,
    normalises_values=True,
)
# It changes the policy, but nothing was played before that could be replayed.
CLONE = Demands(changes_policy=False, from_demonstrations=True, normalises_values=True)
Q_LEARNING = Demands(policies=("epsilon_greedy",), burns_in=True)
SAC = Demands(feed_forward=True, warms_up_randomly=True)

BUILT_IN = {
    "impala": IMPALA,
    "actor_critic": ACTOR_CRITIC,
    "impact": IMPACT,
    "critic": CRITIC,
    "clone": CLONE,
    "q_learning": Q_LEARNING,
    "sac": SAC,
}


def check(config: Config) -> None:
    """Checks that a configuration meets the demands of its algorithms.

    Raises:
      OptionError: names the setting, the algorithm and valid values.
    """
    names = [word.algorithm for word in phases.words(config)]
    made = [(name, _of(config, name)) for name in names]
    for name, demands in made:
        if config.agent.policy not in demands.policies:
            raise OptionError(
                f"agent.policy is {config.agent.policy}, which {name} cannot learn: set it to "
                f"{' or '.join(demands.policies)}, or choose another algorithm."
            )
        if demands.feed_forward:
            _check_feed_forward(config, name)
        if demands.from_demonstrations:
            _check_demonstrations(config, name)
        if config.agent.popart and not demands.normalises_values:
            raise OptionError(
                f"agent.popart is set, but {name} does not normalise a baseline: unset "
                "it, or learn with impala, actor_critic, critic or clone."
            )
    if config.teacher.logdirs and not any(demands.has_teachers for _, demands in made):
        raise OptionError(
            f"teacher.logdirs is {', '.join(config.teacher.logdirs)}, but {' and '.join(names)} "
            "learns from no teacher: leave it out, or learn with impala, actor_critic or impact."
        )
    if config.demonstrations.source and not any(d.from_demonstrations for _, d in made):
        raise OptionError(
            f"demonstrations.source is {config.demonstrations.source}, but {' and '.join(names)} "
            "learns from none: begin with a phase that does, as in --phases clone:100000 "
            f"{names[0]}."
        )
    for i, (name, demands) in enumerate(made):
        if demands.from_demonstrations and i:
            raise OptionError(
                f"phases is {' '.join(names)}, but {name} learns from demonstrations before actors "
                "play: let it be the first phase."
            )
        changed = any(earlier.changes_policy for _, earlier in made[: i + 1])
        if config.mix.replayed and demands.on_policy and changed:
            raise OptionError(
                f"mix.replayed is {config.mix.replayed}, but {name} does not correct for what an "
                "older policy did. Set mix.replayed to 0, or learn with impala or impact."
            )
        if config.agent.random_warm_up and not demands.warms_up_randomly:
            raise OptionError(
                f"agent.random_warm_up is true, but {name} needs the actions of its own policy: "
                "set it to false (--agent.no-random-warm-up), or learn with sac."
            )
        if config.replay.burn_in and not demands.burns_in:
            raise OptionError(
                f"replay.burn_in is {config.replay.burn_in}, but {name} does not leave these steps "
                "out of its loss. Set it to 0, or learn with impala, impact, critic or q_learning."
            )


def learn_from_actors(config: Config) -> list[bool]:
    """Returns for each phase whether its algorithm learns from what actors play."""
    return [not _of(config, word.algorithm).from_demonstrations for word in phases.words(config)]


def _of(config: Config, name: str) -> Demands:
    if name in BUILT_IN:
        return BUILT_IN[name]
    own: Sequence[Demands] = [
        part.component.demands for part in config.own if (part.kind, part.name) == (ALGORITHM, name)
    ]
    return own[0] if own else Demands()


def _check_demonstrations(config: Config, name: str) -> None:
    if not config.demonstrations.source:
        raise OptionError(
            f"{name} learns from demonstrations, but demonstrations.source is not set: name them, "
            "such as minari:DATASET."
        )
    if config.is_paced:
        raise OptionError(
            f"{name} learns from demonstrations while actors wait, which no bound of the policy "
            "lag allows for: leave out deterministic, mix.exact_lag and mix.lag_budget."
        )
    if len(config.tasks.environments) > 1:
        raise OptionError(
            f"{name} learns from demonstrations of one task, but tasks.environments has "
            f"{len(config.tasks.environments)}: train it on one."
        )


def _check_feed_forward(config: Config, name: str) -> None:
    for setting, value, needed in (
        ("core", config.agent.core, "feed_forward"),
        ("frame_stack", config.agent.frame_stack, 1),
    ):
        if value != needed:
            raise OptionError(
                f"agent.{setting} is {value}, but {name} sees one observation at a time: set it to "
                f"{needed}, or choose another algorithm."
            )
