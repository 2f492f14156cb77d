"""The records that a learner keeps about its callers."""

import collections
from typing import NamedTuple, Self

from impala.config.schema import Config
from learner.fleet.accounts import Accounts
from learner.fleet.info_names import InfoNames
from learner.fleet.quarantine import Quarantine
from learner.fleet.roster import Roster
from learner.fleet.violations import Violations

_REFUSED_OUTPUTS = 256  # kept; beyond it, the oldest are forgotten


class RefusedOutput(NamedTuple):
    """A message refused for numbers that the actor's network computed.

    With bad variables every honest actor sends such numbers, so nobody is blamed before the guard
    has tried the learner's own network.
    """

    actor: str
    why: str  # as in its receipt
    version: int | None  # of the parameters that acted; None if they were an earlier learner's


class Records(NamedTuple):
    """The records of a learner. Each of them is thread-safe."""

    accounts: Accounts  # unrolls: received, learned, queued, dropped and why
    roster: Roster  # members of the fleet and their state
    quarantine: Quarantine  # actors blamed for contents that no honest actor sends
    info_names: InfoNames  # which numbers of episodes' info are recorded
    refused_outputs: collections.deque[RefusedOutput]  # not judged yet
    violations: Violations  # of actors: valid numbers that mean something else than they should

    @classmethod
    def begin(cls, config: Config, *, own_actors: bool = False) -> Self:
        """Returns empty records.

        Args:
          config: the run.
          own_actors: as for `Quarantine`.
        """
        return cls(
            Accounts(max_in_flight=config.learner.max_in_flight),
            Roster(),
            Quarantine(config.quarantine, own_actors=own_actors),
            InfoNames(),
            collections.deque(maxlen=_REFUSED_OUTPUTS),
            Violations(),
        )
