"""Makes the golden files of the compliance kit: `make golden` writes them.

`test_golden.py` compares them with what the program computes. An actor in another language compares
itself with them: docs/wire-protocol.md describes their form.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import messages
import numpy as np
import tree
from google.protobuf import json_format

from impala.agents.agent import Agent
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig, Config, EpsilonConfig
from impala.conform import golden
from impala.environments.spaces import Spaces
from impala.parts import build
from impala.play import policy_graph
from impala.types import StepType, TimeStep
from learner.data.ingest import wire_specs
from learner.plan import plan_of
from learner.service import description, settings
from learner.service.terms import terms
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

ROWS = (StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID)
_CHOICE = gym.spaces.Discrete(3)
_VECTOR = gym.spaces.Box(-4.0, 4.0, (3,), np.float32)
_BOX = gym.spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 5.0]), (2,), np.float64)
_PLAYED = gym.spaces.Dict(  # as our wrappers add what happened before
    {
        "observation": _VECTOR,
        "last_action": gym.spaces.Discrete(4, start=-1),
        "last_reward": gym.spaces.Box(-np.inf, np.inf, (), np.float32),
        "time_in_episode": gym.spaces.Box(0, np.inf, (), np.float32),
    }
)
_GREEDY = AgentConfig(
    "mlp", (8,), policy="epsilon_greedy", epsilon=EpsilonConfig(finals=(0.1,), weights=(1.0,))
)


def _image(size: int, channels: int) -> gym.Space:
    return gym.spaces.Box(0, 255, (size, size, channels), np.uint8)


# Every torso, core and family; images are as small as their torsos allow.
NETWORKS: Mapping[str, tuple[AgentConfig, gym.Space, gym.Space]] = {
    "mlp, categorical": (AgentConfig("mlp", (16, 8)), _VECTOR, _CHOICE),
    "mlp, tanh normal, separate baseline": (
        AgentConfig("mlp", (16,), separate_baseline=True),
        _VECTOR,
        _BOX,
    ),
    "mlp, epsilon-greedy": (_GREEDY, _VECTOR, _CHOICE),
    "mlp, lstm, what happened before": (
        AgentConfig("mlp", (8,), core="lstm", lstm_size=4),
        _PLAYED,
        _CHOICE,
    ),
    "mlp, bytes, popart": (AgentConfig("mlp", (8,), popart=True), _image(3, 2), _CHOICE),
    "small, frame stack": (AgentConfig("small", frame_stack=3), _image(5, 1), _CHOICE),
    "shallow": (AgentConfig("shallow"), _image(20, 1), _CHOICE),
    "strided": (AgentConfig("strided"), _image(11, 1), _CHOICE),
    "strided_valid": (AgentConfig("strided_valid"), _image(31, 1), _CHOICE),
    "deep, not standardised": (
        AgentConfig("deep", standardise_images=False),
        _image(9, 2),
        _CHOICE,
    ),
}
RUNS = ("catch", "pendulum")


def parameters_of(agent: Agent) -> list[np.ndarray]:
    """Gives the agent the golden parameters, and returns them."""
    for number, variable in enumerate(agent.variables):
        variable.assign(golden.parameter(number, tuple(variable.shape), variable.name))
    return [variable.numpy() for variable in agent.variables]


def run(preset: str) -> dict[str, Any]:
    """The reply to the first Join of a run, and the string of the learner in its fingerprint."""
    config: Config = PRESETS[preset][1]
    plan = plan_of(config)
    of_run = terms(config, plan.phases.agent.variables, plan.unroll_spec, plan.played, plan.spaces)
    reply = messages.service(terms=of_run, config=config).join(messages.join_request())
    reply.ClearField("version")
    return {"agreed": settings.agreed(config, plan.played), "reply": _plain(reply)}


def executable(config: Config) -> bytes:
    """The executable policy of a run."""
    plan = plan_of(config)
    return policy_graph.made(plan.phases.agent, plan.spaces, config.agent)


def forward(name: str) -> dict[str, Any]:
    """What a network computes of five rows of one environment, in which an episode ends."""
    config, observation_space, action_space = NETWORKS[name]
    agent = build.agent(config, observation_space, action_space)
    parameters_of(agent)
    spec = build.unroll_spec(agent, observation_space, action_space, len(ROWS) - 1)
    unroll_specs, num_core_state_specs = wire_specs(spec)
    whole = dataclasses.replace(Config(), agent=config)
    spaces: Spaces = (observation_space, action_space)
    reply = description.of(whole, agent.variables, spaces, messages.bounds())
    reply.ClearField("limits")
    parameter_specs = codec.specs(list(agent.variables))
    reply.unroll_specs.extend(unroll_specs)
    reply.num_core_state_specs = num_core_state_specs
    reply.parameter_specs.extend(parameter_specs)
    reply.fingerprint = codec.fingerprint(unroll_specs, parameter_specs, "{}")
    seen = {
        space.name: golden.observation(space, spec_of.dtype, tuple(spec_of.shape))
        for space, spec_of in zip(reply.observation_space, unroll_specs, strict=False)
    }
    nest = tree.unflatten_as(
        spec.timestep.observation, [each[:, np.newaxis] for each in seen.values()]
    )
    rows = TimeStep(
        nest,
        np.zeros((len(ROWS), 1), np.float32),
        np.ones((len(ROWS), 1), np.float32),
        np.array(ROWS, np.int8)[:, np.newaxis],
    )
    state = tree.map_structure(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), spec.core_state)
    output, after = agent.unroll(rows, state)
    return {
        "name": name,
        "reply": _plain(reply),
        "step_type": list(map(int, ROWS)),
        "observation": {leaf: each.tolist() for leaf, each in seen.items()},
        "policy": _rounded(output.policy[:, 0]),
        "baseline": _rounded(output.baseline[:, 0]),
        "core_state": [_rounded(leaf[0]) for leaf in tree.flatten(after)],
    }


def drawn(name: str) -> dict[str, Any]:
    """Log-probabilities, or log-densities, of some actions under a family of policies."""
    config, observation_space, action_space = NETWORKS[name]
    agent = build.agent(config, observation_space, action_space)
    reply = pb.JoinReply(
        action_space=description.leaves(action_space, description.ACTION),
        policy=description.policy(
            config,
            (observation_space, action_space),
            [variable.name.removesuffix(":0") for variable in agent.variables],
        ),
    )
    count = sum(factor.num_parameters for factor in reply.policy.factors)
    parameters = 2.0 * np.sin(np.arange(4.0 * count)).reshape(4, count)
    if config.policy == "epsilon_greedy":
        parameters[:, -1] = 0.25
    if isinstance(action_space, gym.spaces.Box):
        action = np.array([[-1.9, 0.1], [0.0, 2.5], [1.0, 4.9], [0.5, 3.0]])
    else:
        action = np.array([0, 1, 2, 1])
    log_prob = agent.distribution.log_prob(
        parameters.astype(np.float32), action.astype(action_space.dtype)
    )
    return {
        "name": name,
        "reply": _plain(reply),
        "parameters": parameters.astype(np.float32).tolist(),
        "action": action.tolist(),
        "log_prob": _rounded(log_prob),
    }


def message() -> dict[str, Any]:
    """A message of two environments: its numbers, its fields and its bytes."""
    unroll_specs, num_core_state_specs = wire_specs(messages.spec())
    fingerprint = codec.fingerprint(unroll_specs, [], "{}")
    sent = messages.message(3, fingerprint=fingerprint, arrays=messages.unroll())
    specs = codec.with_environments(unroll_specs, num_core_state_specs, sent.num_envs)
    arrays = codec.decode(sent.tensors, specs)
    return {
        "unroll_specs": [_plain(spec) for spec in unroll_specs],
        "num_core_state_specs": num_core_state_specs,
        "agreed": "{}",
        "tensors": {spec.name: array.tolist() for spec, array in zip(specs, arrays, strict=True)},
        "message": _plain(sent),
        "bytes": sent.SerializeToString(deterministic=True).hex(),
    }


def made() -> dict[str, Any]:
    """The contents of every golden file, by its name."""
    families = ("mlp, categorical", "mlp, tanh normal, separate baseline", "mlp, epsilon-greedy")
    return {
        **{preset: run(preset) for preset in RUNS},
        "networks": [forward(name) for name in NETWORKS],
        "policies": [drawn(name) for name in families],
        "message": message(),
    }


def _plain(sent: Any) -> dict[str, Any]:
    return json_format.MessageToDict(sent, preserving_proto_field_name=True)


def _text(content: Any) -> str:
    """JSON with a line for each entry: of the reply of a run, for each of its fields."""
    if isinstance(content, dict):
        lines = [
            f"{json.dumps(key)}: {_text(of) if key == 'reply' else json.dumps(of)}"
            for key, of in content.items()
        ]
        return "{" + ",\n ".join(lines) + "}"
    return "[" + ",\n ".join(map(json.dumps, content)) + "]"


def _rounded(array: Any) -> Any:
    return np.asarray(array, np.float64).round(6).tolist()


def main() -> None:
    """Writes the files."""
    for name, content in made().items():
        golden.HERE.joinpath(f"{name}.json").write_text(_text(content) + "\n", "utf-8")
    for preset in RUNS:
        golden.HERE.joinpath(f"{preset}.onnx").write_bytes(executable(PRESETS[preset][1]))


if __name__ == "__main__":
    main()
