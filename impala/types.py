"""The tuples passed between environment, agent, actor, wire and learner.

Rows and time. In an `Unroll`, row t holds the time step that the environment gave at t and the
agent output that *led to it*: the action in row t was chosen from the observation in row t - 1.
Row 0 repeats the last row of the unroll before, so consecutive unrolls overlap by one row.

Episode ends. The last observation of an episode is in the stream (LAST); the next action is ignored
by the environment, which returns the first observation of the next episode (FIRST). That
LAST -> FIRST row is the *seam*: it is not experience, and `impala.algorithms.losses.align` masks it
out.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

# A nest (dm-tree) of arrays: NumPy up to the learner, tensors inside it.
Array = Any
Nest = Any


class StepType(enum.IntEnum):
    """The position of a time step in its episode; stored as int8."""

    FIRST = 0
    MID = 1
    LAST = 2


class TimeStep(NamedTuple):
    """The output of an environment, one row per environment."""

    observation: Nest  # [...] as the environment gave it, of its dtype; single frames
    reward: Array  # [...] float32, raw: clipping and scaling belong to the learner
    discount: Array  # [...] float32, 0 on termination or life loss, else 1 (also at a time limit)
    step_type: Array  # [...] int8, a StepType


class EnvironmentFault(NamedTuple):
    """A failure of one of an actor's environments, which was restarted."""

    environment: int  # its index in the actor
    kind: Literal["crashed", "hung"]  # it ended or raised an error; it did not answer in time
    detail: str  # a description, such as the exception's last line
    where: str = ""  # FILE:LINE, in FUNCTION of the environment's code; stays on the actor's host
    cuts: bool = True  # an episode off; not where it begins; stays on the actor's host

    @property
    def error(self) -> str:
        """Returns the description without the number of the environment's failures before it."""
        return re.sub(r"^fault \d+, ", "", self.detail)


class EnvironmentStep(NamedTuple):
    """The result of one step of E vectorised environments."""

    timestep: TimeStep  # [E, ...]
    frames: np.ndarray  # [E] int32, environment frames this step played; 0 on FIRST
    info: Mapping[str, np.ndarray]  # name -> [E], numeric scalars to report at episode ends
    faults: Sequence[EnvironmentFault] = ()  # since the previous step; any number


class AgentOutput(NamedTuple):
    """The agent's output when it acts."""

    action: Nest  # structured like the action space
    policy: Array  # [..., P] float32, parameters of the distribution the action was drawn from
    baseline: Array  # [...] float32, the value estimate


class NetworkOutput(NamedTuple):
    """The network's output for observations, before actions are drawn."""

    policy: Array  # [..., P] float32
    baseline: Array  # [...] float32


class Unroll(NamedTuple):
    """One environment's contiguous experience; with E or B environments, axis 1 counts them."""

    timestep: TimeStep  # [T + 1, ...], row 0 is the previous unroll's row T, bit for bit
    output: AgentOutput  # [T + 1, ...], row t led to time step t
    core_state: Nest  # [...] state before row 0 (frame stack, LSTM, ...); () if there is none
    frames: Array  # [] int32, frames played in rows 1..T, seams left out
    parameter_version: Array  # [] int64, of rows 1..T; row 0 belongs to the previous unroll


class Batch(NamedTuple):
    """The data of one update."""

    unroll: Unroll  # [T + 1, B, ...]; core_state, frames and parameter_version are [B, ...]
    is_replay: Array  # [B] bool


class Parameters(NamedTuple):
    """A published state of the agent."""

    incarnation: int  # of the learner's start; if it differs, pull regardless of the version
    version: int  # number of updates they contain
    progress: float  # share of the run done, 0 to 1
    frames: int  # environment frames learned from when they were published
    values: Sequence[np.ndarray]  # agent.variables, in order


MOST_INFO = 100_000
"""Numbers in the `info` of all episodes of a message."""


class Episode(NamedTuple):
    """A finished episode, sent with the unroll in which it ended."""

    episode_return: float  # sum of raw rewards
    length: int  # agent steps
    frames: int  # environment frames
    info: Mapping[str, float]  # the environment's numeric info at the last step


class ActorUnrolls(NamedTuple):
    """The unrolls of the E environments of one group of an actor."""

    unroll: Unroll  # [T + 1, E, ...]; core_state, frames [E, ...], parameter_version an int
    task: int  # the task played
    incarnation: int  # of the learner whose parameters acted in rows 1..T
    episodes: list[Episode]  # that ended in rows 1..T
    faults: Sequence[EnvironmentFault] = ()  # of the group's environments, in rows 1..T
    step_info: Mapping[str, np.ndarray] = {}  # name -> [N], numbers in rows 1..T without seams
    environment_seconds: float = 0.0  # that the group's environments took for them


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one leaf of a nest."""

    shape: tuple[int, ...]
    dtype: np.dtype
