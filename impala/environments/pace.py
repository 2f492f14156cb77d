"""How fast environments step, and what helps where they are the limit."""

from impala.config.schema import EnvironmentConfig
from impala.parts import components
from impala.runtime.printable import duration

_MOST = 0.5  # share of the time


def advice(environment: EnvironmentConfig, num_envs: int) -> str:
    """Returns what makes a slow environment less of a limit, as the end of a sentence.

    Args:
      environment: that is played.
      num_envs: environments of each actor.
    """
    if components.steps_together(environment.id):
        return "more actors help (--num-actors)"
    if environment.vectorization == "async":
        return (
            f"more environments help (--actor.num-envs {2 * num_envs}), and more actors "
            "(--num-actors) on further cores or hosts"
        )
    condition = " (if it is a gymnasium.Env)" if components.is_attribute(environment.id) else ""
    return (
        f"--environment.vectorization async gives each of an actor's {num_envs} environments a "
        f"process{condition}"
    )


def slow(share: float, step_seconds: float) -> str:
    """Returns how much of an actor's time its environments take, as a clause; empty if not most.

    Args:
      share: of the time.
      step_seconds: mean time of a step, resets included; 0: there was none yet.
    """
    if share <= _MOST:
        return ""
    step = f"{duration(step_seconds)} a step" if step_seconds else "and no step has ended"
    return f"environments take {share:.0%} of the actors' time, {step}"
