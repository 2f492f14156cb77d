"""Exponential back-off."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Pauses between attempts, which double from `first` to `longest` seconds."""

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """Returns the seconds to wait after so many consecutive failures, at least one."""
        return min(self.first * 2.0 ** min(failures - 1, 64), self.longest)
