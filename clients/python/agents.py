"""Two ways to act without programming a network: an executable policy, and the learner itself."""

import abc
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from session import DTYPES, Session, Version


class Agent(abc.ABC):
    """Acts for a group of environments."""

    version: Version
    """Version of the parameters that act in the present unroll."""

    @abc.abstractmethod
    def begin(self, num_envs: int) -> None:
        """Begins an unroll, with the newest parameters."""

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

    def begin(self, num_envs: int) -> None:
        self.version, arrays = self._session.parameters()
        self._parameters = {f"parameters/{i}": array for i, array in enumerate(arrays)}
        if "epsilon_final" in self._drawn and self._epsilons is None:  # once for each environment
            epsilon = self._session.settings["agent"]["epsilon"]
            weights = np.array(epsilon["weights"]) / sum(epsilon["weights"])
            self._epsilons = self._random.choice(epsilon["finals"], num_envs, p=weights).astype(
                np.float32
            )

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
        if self._session.settings["agent"]["random_warm_up"] and self.version.version == 0:
            (space,) = self._session.reply.action_space
            action = said["output/action"]
            low, high = (np.array(bounds) for bounds in (space.low, space.high))
            drawn_evenly = self._random.uniform(low, high, action.reshape(num_envs, -1).shape)
            said["output/action"] = drawn_evenly.astype(action.dtype).reshape(action.shape)
        return said


class AtLearner(Agent):
    """Acts by a stream of rows to the learner, which computes the actions.

    Args:
      session: with the learner.
      random: not needed, as the learner draws the actions.
    """

    def __init__(self, session: Session, random: np.random.Generator) -> None:
        del random
        self._session, self._begins = session, True
        specs = session.reply.unroll_specs
        states = [spec.name for spec in specs[len(specs) - session.reply.num_core_state_specs :]]
        self._inputs = [
            *(spec.name for spec in specs if spec.name.startswith("timestep/observation")),
            *("timestep/step_type", *states),
        ]
        # Of one environment: a row of what has rows.
        self._outputs = [
            (spec.name, DTYPES[spec.dtype], tuple(spec.shape[1:]))
            for spec in specs
            if spec.name.startswith("output/")
        ]
        self._outputs += [
            (f"next/{spec.name}", DTYPES[spec.dtype], tuple(spec.shape))
            for spec in specs
            if spec.name in states
        ]

    def begin(self, num_envs: int) -> None:
        self._begins = True

    def act(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        num_envs = len(given["timestep/step_type"])
        reply = self._session.act(
            begins=self._begins,
            num_envs=num_envs,
            tensors=[np.ascontiguousarray(given[name]).tobytes() for name in self._inputs],
        )
        self._begins = False
        self.version = Version(reply.learner_incarnation, reply.parameter_version)
        return {
            name: np.frombuffer(tensor, dtype).reshape(num_envs, *shape)
            for (name, dtype, shape), tensor in zip(self._outputs, reply.tensors, strict=True)
        }


def _graph(session: Session) -> Any:
    """Returns the graph of a run."""
    import onnxruntime  # which nobody needs who has the learner act

    answer = session.executable_policy()
    if hashlib.sha256(answer.onnx).hexdigest() != answer.digest:
        raise ValueError("The executable policy is not what its digest says.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the other cores belong to other actors
    return onnxruntime.InferenceSession(answer.onnx, options, providers=["CPUExecutionProvider"])
