"""Two ways to act without programming a network: an executable policy, and the learner itself."""

import abc
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from session import Session


class Version(NamedTuple):
    """Of parameters."""

    incarnation: int
    version: int


class Agent(abc.ABC):
    """Acts for a group of environments."""

    @abc.abstractmethod
    def begin(self, num_envs: int) -> Version:
        """Takes the newest parameters for the next unroll, and returns which they are."""

    @abc.abstractmethod
    def act(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Acts once.

        Args:
          given: leaves of the observations, `timestep/step_type` and the core state [E, ...].

        Returns:
          `output/...`, and the core state before the next step with the prefix `next/`.
        """


class Executable(Agent):
    """Runs the graph that the learner makes, with the parameters as it sends them.

    Args:
      session: with the learner.
      random: for actions.
    """

    def __init__(self, session: Session, random: np.random.Generator) -> None:
        self._session, self._random = session, random
        self._graph = _graph(session)
        self._outputs = [value.name for value in self._graph.get_outputs()]
        self._drawn = {
            value.name: value.shape[1:]
            for value in self._graph.get_inputs()
            if value.name in ("uniform", "normal", "epsilon_final")
        }
        self._epsilons: np.ndarray | None = None

    def begin(self, num_envs: int) -> Version:
        parameters = self._session.newest_parameters()
        self._version = Version(parameters.incarnation, parameters.version)
        self._parameters = {f"parameters/{i}": array for i, array in enumerate(parameters.arrays)}
        if "epsilon_final" in self._drawn and self._epsilons is None:  # once for each environment
            told = self._session.reply.settings.agent.epsilon
            weights = np.array(told.weights) / sum(told.weights)
            self._epsilons = self._random.choice(told.finals, num_envs, p=weights).astype(
                np.float32
            )
        return self._version

    def act(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        num_envs = len(given["timestep/step_type"])
        draw: Any = {"uniform": self._random.random, "normal": self._random.standard_normal}
        drawn = {
            name: self._epsilons
            if name == "epsilon_final"
            else draw[name]((num_envs, *shape), np.float32)
            for name, shape in self._drawn.items()
        }
        results = self._graph.run(self._outputs, {**given, **drawn, **self._parameters})
        said = dict(zip(self._outputs, results, strict=True))
        if self._session.reply.settings.agent.random_warm_up and self._version.version == 0:
            (space,) = self._session.reply.action_space
            action = said["output/action"]
            low, high = (np.array(bounds) for bounds in (space.low, space.high))
            drawn_evenly = self._random.uniform(low, high, action.reshape(num_envs, -1).shape)
            said["output/action"] = drawn_evenly.astype(action.dtype).reshape(action.shape)
        return said


def _graph(session: Session) -> onnxruntime.InferenceSession:
    """Returns the graph of a run."""
    answer = session.executable_policy()
    if hashlib.sha256(answer.onnx).hexdigest() != answer.digest:
        raise ValueError("The executable policy is not what its digest says.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the other cores belong to other actors
    return onnxruntime.InferenceSession(answer.onnx, options, providers=["CPUExecutionProvider"])
