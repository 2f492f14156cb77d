"""A learner's variables by name, as checkpoints hold them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from impala.config.schema import AgentConfig
from impala.logdir.checkpoint import Checkpoint, CheckpointError

T = TypeVar("T")


def named(prefix: str, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns variables by position and name: "agent/003/linear/w:0" and so on."""
    return {f"{prefix}/{i:03d}/{v.name}": v for i, v in enumerate(variables)}


def assign(values: Mapping[str, np.ndarray], variables: Mapping[str, Any]) -> None:
    """Assigns saved values to variables.

    Raises:
      CheckpointError: names or shapes do not match, so the saved run had another network, algorithm
        or optimiser.
    """
    hint = "This run has another network, algorithm or optimiser; start over with --fresh."
    if unmatched := sorted(variables.keys() ^ values.keys()):
        raise CheckpointError(
            f"Only one of the checkpoint and the run has {unmatched[0]!r}. {hint}"
        )
    for name, variable in variables.items():
        if tuple(variable.shape) != values[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {values[name].shape} in the checkpoint and "
                f"{tuple(variable.shape)} in the run. {hint}"
            )
    for name, variable in variables.items():
        variable.assign(values[name])


# Of names of variables.
_POLICY_HEAD, _BASELINE_HEAD, _NORMALISER = "agent/policy/", "agent/baseline/", "normaliser/"


def initialise(
    variables: Sequence[Any], saved: Checkpoint, agent: AgentConfig
) -> tuple[float, list[str]]:
    """Assigns the values of another run's agent to variables of the same name and shape.

    Args:
      variables: the agent's.
      saved: the other run's.
      agent: settings of the agent that has `variables`.

    Returns:
      Which share of the numbers in `variables` was taken, and lines that list what was, and what
      was not and why.

    Raises:
      CheckpointError: nothing fits.
    """
    values = {_own_name(name): value for name, value in of_agent(saved.variables).items()}
    taken: dict[str, int] = {}
    lines: list[str] = []
    shapes = {each.name: tuple(each.shape) for each in variables}
    if "popart/mean:0" in values and "popart/mean:0" not in shapes:
        lines.append("The baseline's head gave normalised values (agent.popart): it is not taken.")
        values = {n: value for n, value in values.items() if not n.startswith(_BASELINE_HEAD)}
    if saved.config.agent.policy != agent.policy:
        lines.append(
            f"The policy's head was {saved.config.agent.policy}, agent.policy is {agent.policy}: "
            "it is not taken."
        )
        values = {n: value for n, value in values.items() if not n.startswith(_POLICY_HEAD)}
    mean = f"{_NORMALISER}mean:0"
    if mean in values and mean in shapes and values[mean].shape != shapes[mean]:
        lines.append("The statistics are of other observations: they are not taken.")
        values = {n: value for n, value in values.items() if not n.startswith(_NORMALISER)}
    for variable in variables:
        value = values.pop(variable.name, None)
        if value is None:
            lines.append(f"New: {variable.name} {tuple(variable.shape)}.")
        elif value.shape != tuple(variable.shape):
            lines.append(f"New: {variable.name} {tuple(variable.shape)}, which was {value.shape}.")
        else:
            variable.assign(value)
            taken[variable.name] = value.size
    lines += [f"Not taken: {name} {value.shape}." for name, value in values.items()]
    if not taken:
        raise CheckpointError(f"Nothing of that agent fits this one. {' '.join(lines)}")
    share = sum(taken.values()) / sum(math.prod(each.shape) for each in variables)
    what = f"{share:.0%} of this agent's weights from one of {saved.counters.frames:,} frames"
    return share, [f"Taken: {what}: {', '.join(taken)}.", *lines]


def of_agent(named: Mapping[str, T]) -> dict[str, T]:
    """Returns the agent's part of what `named` returned."""
    return {name: value for name, value in named.items() if name.startswith("agent/")}


def _own_name(name: str) -> str:
    """Returns the variable's own part of a name from `named`."""
    return name.split("/", 2)[2]
