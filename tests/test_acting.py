"""The acting step as a function, and as an ONNX graph: they do what the agent does."""

import asyncio
import functools
import hashlib
import math
import pathlib
from typing import Any

import gymnasium as gym
import messages
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.acting import ActingStep
from impala.agents.agent import Agent
from impala.config import values
from impala.config.schema import AgentConfig, Config, EpsilonConfig
from impala.environments.spaces import ACTION_MASK, Spaces
from impala.parts import build
from impala.play import export, onnx_model, policy_graph
from impala.types import TimeStep
from learner.fleet.refusals import NotOffered, Unavailable
from learner.service.executable import ExecutablePolicy


def _floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


IMAGE = gym.spaces.Box(0, 255, (16, 16, 1), np.uint8)
VECTOR = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
EVERYTHING = gym.spaces.Dict(
    [  # not in alphabetical order
        ("turn", gym.spaces.Box(_floats(-2.0, 0.0), _floats(2.0, 9.0), dtype=np.float32)),
        ("move", gym.spaces.Discrete(3, start=1)),
        ("keys", gym.spaces.MultiDiscrete([2, 3])),
    ]
)
MASKED = gym.spaces.Dict({"observation": VECTOR, ACTION_MASK: gym.spaces.Box(0, 1, (3,), np.int8)})
EVERY_ACTION, GREEDY = "MLP, every action", "MLP, epsilon-greedy, mask"
CASES: dict[str, tuple[AgentConfig, Spaces]] = {
    EVERY_ACTION: (
        AgentConfig(hidden_sizes=(8,), popart=True, normalise_observations=True),
        (VECTOR, EVERYTHING),
    ),
    GREEDY: (
        AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy"),
        (MASKED, gym.spaces.Discrete(3)),
    ),
    "convolutions, frame stack, LSTM, every action": (
        AgentConfig(torso="small", core="lstm", lstm_size=8, frame_stack=4),
        (IMAGE, EVERYTHING),
    ),
    "residual, PopArt, discrete": (
        AgentConfig(torso="deep", popart=True),
        (IMAGE, gym.spaces.Discrete(4)),
    ),
    "MLP, own baseline, Box": (
        AgentConfig(hidden_sizes=(8,), separate_baseline=True, core="lstm", lstm_size=5),
        (VECTOR, gym.spaces.Box(-2.0, 2.0, (1,), np.float32)),
    ),
}
CASE = [
    pytest.param(name, marks=[] if name == EVERY_ACTION else [pytest.mark.slow]) for name in CASES
]


def _agent(name: str) -> Agent:
    """The agent of a case, with weights by which outputs differ much."""
    config, spaces = CASES[name]
    agent = build.agent(config, *spaces, seed=3)
    rng = np.random.default_rng(1)
    for variable in agent.variables:
        change = rng.normal(0.0, 0.3, variable.shape).astype(np.float32)
        variable.assign_add(change if variable.trainable else abs(change))
    if name == GREEDY:
        agent.distribution.progress.assign(0.04)  # type: ignore[attr-defined]
    return agent


class _Played:
    """Time steps of B environments on random observations, with the core state of the agent."""

    def __init__(self, step: ActingStep, agent: Agent, spaces: Spaces, num_envs: int = 5) -> None:
        self._step, self._agent, self._spaces, self._num_envs = step, agent, spaces, num_envs
        self._rng = np.random.default_rng(0)
        self._state = agent.initial_state(num_envs)
        self.parameters = {
            f"parameters/{i}": np.asarray(variable.numpy())
            for i, variable in enumerate(agent.variables)
        }
        spaces[0].seed(0)

    def rows(self, count: int) -> Any:
        """Yields what a step is given by name, and the agent's output and core state after it."""
        for number in range(count):
            samples = [self._spaces[0].sample() for _ in range(self._num_envs)]
            seen = tree.map_structure(lambda *leaves: np.stack(leaves), *samples)
            step_type = self._rng.integers(0, 3 if number else 1, self._num_envs).astype(np.int8)
            given = [*tree.flatten(seen), step_type, *map(np.asarray, tree.flatten(self._state))]
            for spec in self._step.inputs[len(given) : self._step.num_inputs]:
                shape = [self._num_envs, *spec.shape[1:]]
                given.append(self._rng.random(shape, np.float32))
            ones = np.ones(self._num_envs, np.float32)
            timestep = tree.map_structure(tf.constant, TimeStep(seen, ones, ones, step_type))
            seed = tf.constant([7, number])
            output, self._state = self._agent.step(timestep, self._state, seed)
            names = [spec.name for spec in self._step.inputs]
            yield dict(zip(names, given, strict=False)), output, self._state


@pytest.mark.parametrize("name", CASE)
def test_graph_with_parameters_as_inputs_equals_the_agent(name: str) -> None:
    """Given a graph that was made of an agent with other weights than those that it is fed."""
    config, spaces = CASES[name]
    graph = policy_graph.made(build.agent(config, *spaces), spaces)
    agent = _agent(name)
    step = ActingStep(agent, spaces)
    import onnx

    model = onnx.load_from_string(graph)
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 18)]
    session = onnx_model.session(model)
    assert [value.name for value in session.get_inputs()] == [spec.name for spec in step.inputs]
    assert [value.name for value in session.get_outputs()] == step.outputs
    for value, spec in zip(session.get_inputs()[: step.num_inputs], step.inputs, strict=False):
        assert value.shape == ["B", *spec.shape[1:]]
    played, outputs = _Played(step, agent, spaces), agent.distribution.num_outputs
    for given, output, state in played.rows(4):
        got = dict(
            zip(step.outputs, session.run(None, {**given, **played.parameters}), strict=True)
        )
        wanted = {"output/baseline": output.baseline.numpy()}
        got["output/policy"] = got["output/policy"][:, :outputs]  # its epsilons are drawn
        wanted["output/policy"] = output.policy.numpy()[:, :outputs]
        after = [name for name in step.outputs if name.startswith("next/")]
        wanted |= {n: x.numpy() for n, x in zip(after, tree.flatten(state), strict=True)}
        for key, right in wanted.items():
            assert export.differences(right, got[key]).max(initial=0.0) < 1e-5, key
        actions = [n for n in step.outputs if n.startswith("output/action")]
        action = tree.unflatten_as(output.action, [got[n] for n in actions])
        for env in range(5):
            assert tree.map_structure(lambda x, env=env: x[env], action) in spaces[1]


def _many(name: str, num_envs: int, **fixed: np.ndarray) -> tuple[dict[str, np.ndarray], Agent]:
    """Returns what an acting step draws in many environments that see the same."""
    _, spaces = CASES[name]
    agent = _agent(name)
    step = ActingStep(agent, spaces)
    given, _, _ = next(_Played(step, agent, spaces, 1).rows(1))
    rng = np.random.default_rng(2)
    tensors = {key: np.repeat(value, num_envs, axis=0) for key, value in given.items()}
    for key in tensors.keys() & {"uniform", "normal"}:
        drawn = rng.random if key == "uniform" else rng.standard_normal
        tensors[key] = drawn(tensors[key].shape, np.float32)
    tensors |= fixed
    names = [spec.name for spec in step.inputs[: step.num_inputs]]
    traced = step.trace()
    said = traced(*(tf.constant(tensors[n]) for n in names), *agent.variables)
    return dict(zip(step.outputs, [x.numpy() for x in said], strict=True)), agent


def test_actions_have_the_probabilities_that_the_policy_says() -> None:
    count = 20_000
    got, agent = _many(EVERY_ACTION, count)
    policy = tf.constant(got["output/policy"][:1])
    turn, move, keys = agent.distribution._parts(policy)  # type: ignore[attr-defined]
    for logits, chosen in (
        (move, got["output/action/move"] - 1),
        (keys[:, :2], got["output/action/keys"][:, 0]),
        (keys[:, 2:], got["output/action/keys"][:, 1]),
    ):
        expected = tf.nn.softmax(logits)[0].numpy()
        frequencies = np.bincount(chosen, minlength=len(expected)) / count
        np.testing.assert_allclose(frequencies, expected, atol=4.0 * 0.5 / math.sqrt(count))
    # Of a Gaussian that is squashed, the quantiles are those of the Gaussian, squashed.
    of_box = agent.distribution._components[0]  # type: ignore[attr-defined]
    mean, log_deviation = (x.numpy()[0] for x in of_box._gaussian(turn))
    found = np.arctanh(of_box.unit(tf.constant(got["output/action/turn"])).numpy())
    z = (found - mean) / np.exp(log_deviation)
    np.testing.assert_allclose(
        np.quantile(z, [0.16, 0.5, 0.84], axis=0).T, [[-1, 0, 1]] * 2, 0, 0.04
    )


def test_epsilon_anneals_and_masked_choices_are_never_taken() -> None:
    count = 20_000
    finals = np.full(count, 0.5, np.float32)
    mask = np.repeat(np.array([[1, 0, 1]], np.int8), count, axis=0)
    fixed: dict[str, np.ndarray] = {
        "epsilon_final": finals,
        f"timestep/observation/{ACTION_MASK}": mask,
    }
    got, agent = _many(GREEDY, count, **fixed)
    share = 0.04 / EpsilonConfig().anneal
    np.testing.assert_allclose(got["output/policy"][:, 3], 1.0 + share * (0.5 - 1.0), rtol=1e-6)
    probabilities = agent.distribution._probabilities(  # type: ignore[attr-defined]
        tf.constant(got["output/policy"][:1])
    )
    frequencies = np.bincount(got["output/action"], minlength=3) / count
    np.testing.assert_allclose(frequencies, probabilities[0], atol=4.0 * 0.5 / math.sqrt(count))
    assert frequencies[1] == 0.0


@pytest.mark.parametrize(
    ("output", "change"),
    [
        ("output/policy", math.nan),
        ("output/policy", 0.01),
        ("output/baseline", 0.01),
        ("output/action", 1),
    ],
)
def test_a_graph_that_does_something_else_is_refused(
    output: str, change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = onnx_model.session

    class Changed:
        def __init__(self, model: Any) -> None:
            self._session = make(model)

        def run(self, names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
            said = self._session.run(names, given)
            changed = said[names.index(output)]
            allowed = changed[-1] > -1e8
            changed[-1] += np.where(allowed, change, 0).astype(changed.dtype)
            return said

    monkeypatch.setattr(onnx_model, "session", Changed)
    spaces = CASES[GREEDY][1][0], gym.spaces.Discrete(3)  # with a mask
    config = AgentConfig(hidden_sizes=(8,))
    with pytest.raises(onnx_model.OnnxError, match="differ from the agent's by up to"):
        policy_graph.made(build.agent(config, *spaces), spaces)


def test_variables_that_cannot_be_replaced_are_named() -> None:
    """Given a torso that reads its variable past what operations on it read."""
    config, spaces = CASES[GREEDY]
    agent = build.agent(config, *spaces)
    head = agent._policy_head
    agent.hidden = head  # where its variables are still found
    read = functools.partial(tf.raw_ops.ReadVariableOp, resource=head.w.handle, dtype=tf.float32)
    agent._policy_head = lambda x: x @ read() + head.b
    with pytest.raises(ValueError, match="variables agent/policy/w"):
        ActingStep(agent, spaces).trace()


def test_a_graph_that_was_not_made_for_lack_of_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a process that is killed, then one that makes the graph; and one that cannot make it ...
    policy = ExecutablePolicy(Config(), messages.SPACES)
    ends = [(-9, "Its process was killed."), (0, "")]

    def run(request: bytes, output: pathlib.Path) -> tuple[int, str]:
        output.write_bytes(b"graph")
        return ends.pop(0)

    monkeypatch.setattr(policy, "_run", run)
    with pytest.raises(Unavailable, match=r"was killed\. Ask for it again later"):
        asyncio.run(policy.get())
    assert asyncio.run(policy.get()).onnx == b"graph"
    refusing = ExecutablePolicy(Config(), messages.SPACES)
    ends.append((1, "ImportError: no onnx"))
    monkeypatch.setattr(refusing, "_run", run)
    # ... then it is not tried again.
    for _ in range(2):
        with pytest.raises(NotOffered, match="no onnx It was tried at the learner"):
            asyncio.run(refusing.get())


@pytest.mark.slow
def test_a_learner_makes_its_graph_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = values.from_dict(Config, {"environment": {"id": "Catch"}})
    spaces = (gym.spaces.Box(0, 1, (10, 5), np.uint8), gym.spaces.Discrete(3))

    async def made(policy: ExecutablePolicy) -> Any:
        return [*await asyncio.gather(policy.get(), policy.get()), await policy.get()]

    first, second, third = asyncio.run(made(ExecutablePolicy(config, spaces)))
    assert first is second is third
    assert first.digest == hashlib.sha256(first.onnx).hexdigest()
    begun, made_it = (record.getMessage() for record in caplog.records)
    assert begun.startswith("Making the executable policy") and "Made the" in made_it
