"""Checks of single numbers: their byte order, and whether an observation is in its space."""

from collections.abc import Sequence

import numpy as np

from learner.checks.violations import Kind, ProtocolViolation
from protos.impala.v1 import learner_pb2 as pb

_LOOKED_AT = 256  # numbers of a leaf, for their byte order
_FEW = 8  # numbers that are not 0: fewer tell nothing
_ODD, _PLAIN = 20.0, 16.0  # mean |log2|x||: of numbers read the wrong way round, and of any others
_LARGE = 2**16  # numbers of a leaf of a message; of larger ones only the last row is looked at
_CHOICES = (pb.Space.KIND_DISCRETE, pb.Space.KIND_MULTI_DISCRETE, pb.Space.KIND_MULTI_BINARY)


def is_swapped(array: np.ndarray) -> bool:
    """Returns whether numbers are plausible only with their bytes in the opposite order.

    The bytes of 1.0 are a number of 1e-41 then, those of other floats numbers of any size, and
    those of small integers huge ones.
    """
    if array.dtype.itemsize == 1 or not array.size:
        return False
    numbers = array[array != 0]
    numbers = numbers[:: max(1, numbers.size // _LOOKED_AT)]
    if numbers.size < _FEW:
        return False
    return _oddness(numbers) > _ODD and _oddness(numbers.byteswap()) < _PLAIN


def byte_order(name: str) -> ProtocolViolation:
    """Returns the violation that a leaf of this name is big endian."""
    return ProtocolViolation(
        Kind.BYTE_ORDER,
        f"the numbers in {name} are plausible only with their bytes in the opposite order: send "
        "little endian.",
    )


class Spaces:
    """The spaces of an observation's leaves.

    Args:
      spaces: of a JoinReply.
    """

    def __init__(self, spaces: Sequence[pb.Space]) -> None:
        self._limits = {space.name: _limits(space) for space in spaces}

    def outside(self, name: str, array: np.ndarray) -> ProtocolViolation | None:
        """Looks for numbers outside of a space: exactly if they are whole ones.

        Environments pass their own bounds by a little, so other numbers are only outside if they
        are beyond a bound by the width of the space.

        Args:
          name: of the leaf.
          array: [T + 1, E, ...].
        """
        low, high, slack_low, slack_high = self._limits[name]
        if array.dtype.kind == "f":
            low, high = low - slack_low, high + slack_high
        elif array.dtype.kind == "b" or _holds(array.dtype, low, high):
            return None
        looked_at = array[-1:] if array.size > _LARGE else array
        if low.size == 1:
            if looked_at.size and low <= looked_at.min() and looked_at.max() <= high:
                return None
        else:
            low, high = (bound.reshape(looked_at.shape[2:]) for bound in (low, high))
        wrong = (looked_at < low) | (looked_at > high)
        if not wrong.any():
            return None
        value = looked_at[wrong].flat[0]
        low, high = (np.broadcast_to(x, looked_at.shape)[wrong].flat[0] for x in (low, high))
        return ProtocolViolation(
            Kind.OBSERVATION,
            f"{name} holds {value}, its space is at most {low:g} to {high:g}: send observations as "
            "the environment gives them.",
        )


def _limits(space: pb.Space) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of a leaf, and how far a float may be beyond them."""
    if space.kind in _CHOICES:
        low = np.array(space.start, np.float64)
        high = low + np.array(space.n, np.float64) - 1.0
    else:
        low, high = np.array(space.low, np.float64), np.array(space.high, np.float64)
    low, high = np.broadcast_arrays(low, high)
    width = np.where(np.isfinite(low) & np.isfinite(high), high - low, 0.0)
    slack_low, slack_high = (np.maximum(width, 1.0 + np.abs(bound)) for bound in (low, high))
    return low, high, slack_low, slack_high


def _holds(dtype: np.dtype, low: np.ndarray, high: np.ndarray) -> bool:
    """Whether all integers of a dtype are within bounds."""
    info = np.iinfo(dtype)
    return bool((low <= info.min).all() and (high >= info.max).all())


def _oddness(numbers: np.ndarray) -> float:
    """How far numbers are from 1, in powers of two, on average."""
    with np.errstate(all="ignore"):
        sizes = np.abs(np.log2(np.abs(numbers.astype(np.float64))))
    sizes[~np.isfinite(sizes)] = 1000.0
    return float(sizes.mean())
