"""The interface of Gymnasium, and errors that tell what an environment does differently."""

import inspect
from typing import Any

import gymnasium as gym

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class Conforming(gym.Wrapper):
    """An environment whose `reset` and `step` return as many values as Gymnasium expects.

    Args:
      environment: what is wrapped.
      name: of the environment, for messages.

    Raises:
      ValueError: its `reset` takes no seed.
    """

    def __init__(self, environment: gym.Env, name: str) -> None:
        super().__init__(environment)
        try:
            inspect.signature(environment.reset).bind(seed=None)
        except TypeError as error:
            raise ValueError(
                f"{name} has a reset that takes no seed ({error}): define it as reset(self, *, "
                "seed=None, options=None)."
            ) from None
        except ValueError:  # it is written in C
            pass

    def reset(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("options") is None:  # not every reset takes them
            kwargs.pop("options", None)
        observation, info = _checked("reset", self.env.reset(*args, **kwargs), _RESET)
        return observation, info

    def step(self, action: Any) -> Any:
        return checked_step(self.env.step(action))


def conforming(environment: gym.Env, name: str) -> gym.Env:
    """Returns an environment with a check of what its methods return: see `Conforming`.

    The check is within Gymnasium's own wrappers, since these need what it checks, but around those
    of others, which may be there to mend it.
    """
    is_gymnasiums = type(environment).__module__.startswith("gymnasium.")
    if isinstance(environment, gym.Wrapper) and is_gymnasiums:
        environment.env = conforming(environment.env, name)
        return environment
    return Conforming(environment, name)


def checked_step(returned: Any) -> Any:
    """Returns what a `step` has returned.

    Raises:
      ValueError: it is not five values.
    """
    return _checked("step", returned, _STEP)


def _checked(method: str, returned: Any, expected: tuple[str, ...]) -> Any:
    is_some = isinstance(returned, (tuple, list))  # `tuple | list` takes ten times as long
    if is_some and len(returned) == len(expected):
        return returned
    what = f"{len(returned)} values" if is_some else f"one {type(returned).__name__}"
    is_old = method == "step" and is_some and len(returned) == 4
    fix = ": return terminated and truncated instead of done, as Gymnasium does" if is_old else ""
    raise ValueError(f"{method} returned {what}, expected {', '.join(expected)}{fix}")
