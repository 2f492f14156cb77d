"""How fast environments step, and what helps where they are the limit."""

from impala.config.schema import EnvironmentConfig


def advice(environment: EnvironmentConfig, num_envs: int) -> str:
    """Returns what makes a slow environment less of a limit, as the end of a sentence.

    Args:
      environment: that is played.
      num_envs: environments of each actor.
    """
    if environment.id == "Catch" or environment.id.startswith("ALE/"):
        return "more actors help (--num-actors)"
    if environment.vectorization == "async":
        return (
            f"more environments help (--actor.num-envs {2 * num_envs}), and more actors "
            "(--num-actors) on further cores or hosts"
        )
    return (
        f"--environment.vectorization async gives each of an actor's {num_envs} environments a "
        "process"
    )


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
