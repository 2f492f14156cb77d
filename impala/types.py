"""The tuples that travel: between environment, agent, actor, wire and learner.

Rows and time. In an `Unroll`, row t holds the time step that the environment gave at t and the
agent output that *led to it*: the action in row t was chosen from the observation in row t - 1.
Row 0 repeats the last row of the unroll before, so consecutive unrolls overlap by one row.

Episode ends. The last observation of an episode is in the stream (LAST); the action after it is
ignored by the environment, which answers with the first observation of the next episode (FIRST).
That LAST -> FIRST row is the *seam*: it is not experience, and `impala.algorithms.losses.align`
masks it out.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

# A nest (dm-tree) of arrays: NumPy on the way to the learner, tensors inside it.
Array = Any
Nest = Any


class StepType(enum.IntEnum):
    """Where in its episode a time step stands; stored as int8."""

    FIRST = 0
    MID = 1
    LAST = 2


class TimeStep(NamedTuple):
    """What an environment says, one row per environment."""

    observation: Nest  # [...] as the environment gave it; single frames, uint8, never float
    reward: Array  # [...] float32, raw: clipping and scaling belong to the learner
    discount: Array  # [...] float32, 0 on termination or life loss, else 1 (also at a time limit)
    step_type: Array  # [...] int8, a StepType


class EnvironmentFault(NamedTuple):
    """One environment of an actor's many that failed and was started again."""

    environment: int  # its index among the actor's
    kind: Literal["crashed", "hung"]  # it ended or raised; it did not answer in time
    detail: str  # for people, such as the exception's last line
    where: str = ""  # FILE:LINE, in FUNCTION of the environment's code; stays on the actor's host


class EnvironmentStep(NamedTuple):
    """What one step of E vectorised environments gives to the actor."""

    timestep: TimeStep  # [E, ...]
    frames: np.ndarray  # [E] int32, environment frames this step played; 0 on FIRST
    info: Mapping[str, np.ndarray]  # name -> [E], numeric scalars to report at episode ends
    faults: Sequence[EnvironmentFault] = ()  # since the step before; not one for each environment


class AgentOutput(NamedTuple):
    """What the agent says when it acts."""

    action: Nest  # structured like the action space
    policy: Array  # [..., P] float32, parameters of the distribution the action was drawn from
    baseline: Array  # [...] float32, the value estimate


class NetworkOutput(NamedTuple):
    """What the agent's network says of observations, before any action is drawn."""

    policy: Array  # [..., P] float32
    baseline: Array  # [...] float32


class Unroll(NamedTuple):
    """One environment's contiguous experience; with E or B environments, axis 1 counts them."""

    timestep: TimeStep  # [T + 1, ...], row 0 is the previous unroll's row T, bit for bit
    output: AgentOutput  # [T + 1, ...], row t led to time step t
    core_state: Nest  # [...] state before row 0 (frame stack, LSTM, ...); () if there is none
    frames: Array  # [] int32, frames played in rows 1..T, seams left out
    parameter_version: Array  # [] int64, holds for rows 1..T; row 0 came with the unroll before


class Batch(NamedTuple):
    """What one update learns from."""

    unroll: Unroll  # [T + 1, B, ...]; core_state, frames and parameter_version are [B, ...]
    is_replay: Array  # [B] bool


class Parameters(NamedTuple):
    """A published state of the agent."""

    incarnation: int  # drawn when a learner starts; another one means: pull, whatever the version
    version: int  # learner updates they contain
    progress: float  # share of the run done, 0..1: what annealed exploration reads
    frames: int  # environment frames learned from when they were published
    values: Sequence[np.ndarray]  # agent.variables, in order


class Episode(NamedTuple):
    """A finished episode, as it travels with the unroll in which it ended."""

    episode_return: float  # sum of raw rewards
    length: int  # agent steps
    frames: int  # environment frames
    info: Mapping[str, float]  # the environment's numeric info at the last step


class ActorUnrolls(NamedTuple):
    """What the E environments of one group of an actor gave together."""

    unroll: Unroll  # [T + 1, E, ...]; core_state, frames [E, ...], parameter_version an int
    task: int  # that was played
    incarnation: int  # of the learner whose parameters acted in rows 1..T
    episodes: list[Episode]  # that ended in rows 1..T
    faults: Sequence[EnvironmentFault] = ()  # of the group's environments, in rows 1..T


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one leaf of a nest."""

    shape: tuple[int, ...]
    dtype: np.dtype
