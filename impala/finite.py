"""Checks that numbers are finite, before they are published, saved or loaded."""

from collections.abc import Mapping

import numpy as np


class NotFiniteError(ArithmeticError):
    """A number that must be finite is NaN or infinite."""


def check(arrays: Mapping[str, np.ndarray], what: str) -> None:
    """Raises an error if a number is NaN or infinite.

    Args:
      arrays: by name, of any shape and dtype.
      what: the failed operation, which begins the error message.

    Raises:
      NotFiniteError: names the first such array and number.
    """
    for name, array in arrays.items():
        if not is_finite(array):
            bad = array[~np.isfinite(array)].flat[0]
            raise NotFiniteError(f"{what}: {name} holds {bad}, and all its numbers must be finite.")


def is_finite(array: np.ndarray) -> bool:
    """Returns whether all numbers of an array are finite."""
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum()):  # one pass, without an array of booleans
            return True
    return bool(np.isfinite(array).all())  # a sum may overflow where no number does
