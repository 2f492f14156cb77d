"""Rules between settings, beyond the range of each."""

import dataclasses
from collections.abc import Collection, Sequence

from impala.config import demands
from impala.config.schema import Config, PolicyGradientConfig, TeacherConfig
from impala.config.values import OptionError, changed, flatten, overlay, shown, to_dict
from impala.parts import components
from impala.schedule import phases, tasks
from impala.schedule.phases import Phase
from impala.schedule.tasks import Task

# Settings that have no effect where another one has a value.
_OVERRIDDEN = (
    ("environment.id", "tasks.environments"),
    ("total_frames", "tasks.frames"),
    ("algorithm", "phases"),
    ("q_learning.target_updates", "q_learning.target_frames"),
    ("q_learning.target_updates", "q_learning.target_episodes"),
)


def validate(config: Config) -> Config:
    """Returns `config` if all values are in their ranges and consistent.

    Raises:
      OptionError: names the settings, their values and valid ones.
    """
    overlay(config, to_dict(config))
    environments, groups = config.actor.num_envs, config.actor.num_groups
    if environments % groups:
        raise OptionError(
            f"actor.num_envs is {environments} and actor.num_groups {groups}: the groups have the "
            f"same size, so give a multiple of {groups}, "
            f"such as {-(-environments // groups) * groups}."
        )
    if environments // groups > config.learner.max_envs_per_message:
        raise OptionError(
            f"actor.num_envs is {environments} in {groups} groups, which sends "
            f"{environments // groups} unrolls per message; learner.max_envs_per_message is "
            f"{config.learner.max_envs_per_message}. Raise it, or have fewer environments."
        )
    try:
        config.environment.keyword_arguments()
        played = tasks.make(config.environment, config.tasks)
        tasks.blocks(config)
        of_run = phases.make(config)
    except ValueError as error:
        raise OptionError(str(error)) from error
    demands.check(config)
    _check_vectorization(config, played)
    if config.mix.batch_size == 0:
        raise OptionError(
            "mix.learn_from_fresh is false and mix.replayed is 0: there is nothing to learn from. "
            "Set one of them."
        )
    if config.mix.updates > 1 and config.mix.learn_from_fresh:
        raise OptionError(
            f"mix.updates is {config.mix.updates}, but fresh unrolls are learned from once: set "
            "mix.learn_from_fresh to false (--mix.no-learn-from-fresh), or mix.updates to 1."
        )
    _check_epsilon(config)
    _check_reward_scale(config)
    _check_correction(config)
    _check_entropy_target(config)
    _check_teachers(config, len(played))
    _check_burn_in(config)
    _check_lag(config)
    _check_frames(config, played)
    _check_warm_up(config, of_run)
    return config


def check_overridden(given: Collection[str], config: Config, varies: Collection[str] = ()) -> None:
    """Refuses settings, given by name, that another one overrides which does not vary."""
    values_of = flatten(config)
    for name, by in _OVERRIDDEN:
        if name in given and by not in varies and values_of[by]:
            raise OptionError(
                f"{name} is given, but {by} is {shown(values_of[by])}, which overrides it: leave "
                f"it out, or change {by}."
            )


def check_read(given: Collection[str], config: Config) -> None:
    """Refuses settings, given by name, of algorithms that the run does not learn with."""
    learns_with = [word.algorithm for word in phases.words(config)]
    for name in given:
        section = name.partition(".")[0]
        if section in demands.BUILT_IN and section not in learns_with:
            raise OptionError(
                f"{name} is given, but the run learns with {' and '.join(learns_with)}, which does "
                f"not read it: leave it out, or name {section} in "
                f"{'phases' if config.phases else 'algorithm'}."
            )


def _check_vectorization(config: Config, played: Sequence[Task]) -> None:
    """Refuses processes for environments that cannot have them."""
    if config.environment.vectorization != "async":
        return
    ids = [task.environment.id for task in played]
    if all(map(components.steps_together, ids)):
        raise OptionError(
            f"environment.vectorization is async, but {ids[0]} steps all environments of a "
            "group together: set it to sync. ALE games have threads (actor.env_threads)."
        )


def _check_epsilon(config: Config) -> None:
    """Refuses an exploration of which not each final value has a probability."""
    finals, weights = config.agent.epsilon.finals, config.agent.epsilon.weights
    if config.agent.policy != "epsilon_greedy":
        return
    if not finals or len(finals) != len(weights) or not any(weights):
        raise OptionError(
            f"agent.epsilon.finals is {finals} and agent.epsilon.weights {weights}: give as many "
            "of one as of the other, one or more, and weights that are not all 0."
        )


def _check_reward_scale(config: Config) -> None:
    """Refuses scales that make every reward 0 or infinite."""
    scale = config.objective.reward_scale
    if not 1e-12 <= abs(scale) <= 1e30:
        raise OptionError(
            f"objective.reward_scale is {scale:g}; its absolute value must be from 1e-12 to 1e+30."
        )


def _check_correction(config: Config) -> None:
    """Refuses thresholds of V-trace that would scale down what has no importance weights."""
    impala = config.impala
    if impala.correction == "vtrace":
        return
    for name in ("clip_rho_threshold", "clip_pg_rho_threshold", "clip_c_threshold"):
        if (threshold := getattr(impala, name)) < 1.0:
            raise OptionError(
                f"impala.{name} is {threshold:g} and impala.correction {impala.correction}, whose "
                "returns have weights of 1, which a threshold below 1 would clip: leave it at 1 or "
                "above, or set impala.correction to vtrace."
            )


def _check_entropy_target(config: Config) -> None:
    """Refuses a target for the entropy whose weight cannot be learned, or that ends nowhere."""
    for name in (field.name for field in dataclasses.fields(config)):
        settings = getattr(config, name)
        if not isinstance(settings, PolicyGradientConfig):
            continue
        if settings.entropy_target and not settings.entropy_cost:
            raise OptionError(
                f"{name}.entropy_target is {settings.entropy_target:g} and {name}.entropy_cost 0, "
                "from which no weight can be learned: it starts there and changes by factors. "
                "Leave it out, or set it to 0.01."
            )
        if settings.entropy_target and settings.entropy_anneal and not settings.entropy_target_end:
            raise OptionError(
                f"{name}.entropy_target is {settings.entropy_target:g} and {name}.entropy_anneal "
                f"{settings.entropy_anneal:g}: say to which {name}.entropy_target_end it changes, "
                "more than 0; or set entropy_anneal to 0."
            )


def _check_teachers(config: Config, num_tasks: int) -> None:
    """Refuses settings without a teacher, a wrong number of teachers, and an unlearnable weight."""
    teacher = config.teacher
    if not teacher.logdirs and teacher != TeacherConfig():
        given = ", ".join(f"teacher.{name}" for name in changed(teacher))
        raise OptionError(
            f"{given} is set, but teacher.logdirs names no teacher: name its log directory, or "
            "leave these settings out."
        )
    if (count := len(teacher.logdirs)) > 1:
        if count != num_tasks:
            raise OptionError(
                f"teacher.logdirs has {count} teachers, and the number of tasks is {num_tasks}: "
                "give one for each, in the order of tasks.environments, or one for all."
            )
        if not config.agent.popart:
            raise OptionError(
                f"teacher.logdirs has {count} teachers: set agent.popart, by which the learner "
                "knows the task of each step."
            )
    if teacher.kl_target and teacher.anneal:
        raise OptionError(
            f"teacher.kl_target is {teacher.kl_target:g} and teacher.anneal {teacher.anneal:g}: "
            "the weight that is learned would rise while it is annealed. Set teacher.anneal to 0."
        )
    if teacher.kl_target and not teacher.policy_cost:
        raise OptionError(
            f"teacher.kl_target is {teacher.kl_target:g} and teacher.policy_cost 0, from which no "
            "weight can be learned: it starts there and changes by factors. Set it to 1."
        )


def _check_burn_in(config: Config) -> None:
    """Refuses a burn-in that leaves nothing to learn from, or has nothing to bring up to date."""
    rows, unroll_length = config.replay.burn_in, config.learner.unroll_length
    if not rows:
        return
    if rows >= unroll_length:
        raise OptionError(
            f"replay.burn_in is {rows} and learner.unroll_length {unroll_length}: nothing of a "
            "replayed unroll would be learned from. Lower the first, or raise the second."
        )
    if config.agent.core == "feed_forward":
        raise OptionError(
            f"replay.burn_in is {rows}, but agent.core is feed_forward, which has no state to "
            "bring up to date (stacked frames do not depend on parameters): set the first to 0, or "
            "the second to lstm."
        )
    if not config.mix.replayed:
        raise OptionError(
            f"replay.burn_in is {rows}, but mix.replayed is 0: nothing is replayed. Set one of "
            "them."
        )


def _check_lag(config: Config) -> None:
    """Refuses bounds of the policy lag that contradict each other, or fit no round of unrolls."""
    mix, environments = config.mix, config.actor.num_envs
    bounds = {
        "mix.max_policy_lag": mix.max_policy_lag > 0,
        "mix.lag_budget": mix.lag_budget > 0,
        "deterministic" if mix.exact_lag < 0 else "mix.exact_lag": config.exact_lag is not None,
    }
    chosen = [name for name, is_set in bounds.items() if is_set]
    if len(chosen) > 1:
        raise OptionError(
            f"{' and '.join(chosen)} are set: each of them bounds the policy lag in its own way. "
            "Keep one."
        )
    if not config.is_paced:
        return
    if mix.updates > 1:
        raise OptionError(
            f"{chosen[0]} counts updates from batches of fresh unrolls, but mix.updates is "
            f"{mix.updates}: set it to 1."
        )
    if mix.lag_budget and environments > mix.lag_budget * mix.fresh:
        raise OptionError(
            f"actor.num_envs is {environments}, but mix.lag_budget {mix.lag_budget} and mix.fresh "
            f"{mix.fresh} leave room for {mix.lag_budget * mix.fresh} unrolls that begin at once: "
            "lower the first, or raise one of the others."
        )
    empties_replay = len(phases.words(config)) > 1 and not config.replay.across_phases
    if config.deterministic and config.exact_lag and mix.replayed and empties_replay:
        raise OptionError(
            f"deterministic, phases and mix.exact_lag {mix.exact_lag} are set: by chance, replay "
            "is emptied at the end of a phase before or after the next batch was made. Set "
            "replay.across_phases, or mix.exact_lag to 0."
        )
    if config.exact_lag is not None and mix.fresh % environments:
        raise OptionError(
            f"actor.num_envs is {environments} and mix.fresh {mix.fresh}: with an exact lag "
            f"({chosen[0]}) a batch is made of whole rounds of unrolls, so the first must divide "
            "the second."
        )


def _check_frames(config: Config, played: Sequence[Task]) -> None:
    """Refuses unrolls whose frames exceed an int32 or the capacity of replay."""
    steps = config.learner.unroll_length
    most, task = max((tasks.frames_per_step(task, config.limits), task.name) for task in played)
    frames = f"An unroll of {task} can have {most * steps} frames ({steps} steps of up to {most})"
    fewer = "lower learner.unroll_length, the frame skip or environment.repeat.most"
    if most * steps > 2**31 - 1:
        raise OptionError(f"{frames}, more than the {2**31 - 1} that can be counted: {fewer}.")
    if config.mix.replayed and most * steps > config.replay.capacity_frames:
        raise OptionError(
            f"{frames}, but replay.capacity_frames is {config.replay.capacity_frames}: raise it, "
            f"or {fewer}."
        )


def _check_warm_up(config: Config, of_run: Sequence[Phase]) -> None:
    """Refuses phases that end before replay is warm, so that nothing is learned in them."""
    mix, replay = config.mix, config.replay
    if not mix.replayed:
        return
    # At least: where episodes have one step, every second row of an unroll begins one.
    steps = mix.warm_up_unrolls * config.learner.unroll_length // 2
    frames = min(steps, replay.capacity_frames)
    is_cold = True
    for phase, learns_from_actors in zip(of_run, demands.learn_from_actors(config), strict=True):
        if learns_from_actors and is_cold and phase.end - phase.start <= frames:
            raise OptionError(
                f"{phase.algorithm} has {phase.end - phase.start:,} frames, and replay needs "
                f"{frames:,} or more to warm up (mix.warm_up_unrolls {mix.warm_up_unrolls}): "
                "nothing would be learned. Let it last longer, or lower mix.warm_up_unrolls."
            )
        is_cold = is_cold and not (learns_from_actors and replay.across_phases)
