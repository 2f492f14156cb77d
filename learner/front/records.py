"""What a learner records about those who call it."""

from typing import NamedTuple, Self

from impala.config.schema import Config
from learner.front.accounts import Accounts
from learner.front.info_names import InfoNames
from learner.front.quarantine import Quarantine
from learner.front.refused_outputs import RefusedOutputs
from learner.front.roster import Roster


class Records(NamedTuple):
    """The records of a learner. Each of them is thread-safe."""

    accounts: Accounts  # unrolls: received, learned, queued, dropped and why
    roster: Roster  # who takes part, and how each of them is doing
    quarantine: Quarantine  # who sent contents that no honest actor sends, and is refused
    info_names: InfoNames  # which numbers of episodes' info are recorded
    refused_outputs: RefusedOutputs  # messages refused for what the actor's network computed

    @classmethod
    def begin(cls, config: Config) -> Self:
        """Returns the records of a learner that nobody has called."""
        return cls(
            Accounts(max_in_flight=config.learner.max_in_flight),
            Roster(),
            Quarantine(config.quarantine),
            InfoNames(config.limits.info_names),
            RefusedOutputs(),
        )
