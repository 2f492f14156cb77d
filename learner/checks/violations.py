"""Protocol violations: numbers that are valid, and mean something else than they should."""

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
    """The kinds of violations; docs/wire-protocol.md describes them."""

    BYTE_ORDER = "byte_order"
    BEHAVIOUR_POLICY = "behaviour_policy"
    IMPOSSIBLE_ACTION = "impossible_action"
    ROW_0 = "row_0"
    SEAM = "seam"
    SEAM_FRAMES = "seam_frames"
    MISSING_FRAMES = "missing_frames"
    EPISODES = "episodes"
    EPISODE_RETURN = "episode_return"
    OBSERVATION = "observation"
    VERSION = "version"


class ProtocolViolation(NamedTuple):
    """Something that no actor sends which keeps to the protocol."""

    kind: Kind
    detail: str  # names the value and the fix

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
