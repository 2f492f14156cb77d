"""What a JoinReply says of spaces, policy and network, against the agent itself."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import gymnasium as gym
import messages
import numpy as np
import pytest
import test_agent
import test_numpy_agent
import tree
from test_agent import experience, random_state, sample
from test_distributions import CASES

from impala.agents import distributions
from impala.agents.agent import Agent
from impala.agents.torsos import MLP
from impala.config.schema import AgentConfig, Config
from impala.environments.spaces import ACTION_MASK, Spaces, choices
from impala.parts import build, sections
from impala.parts.components import CORE, TORSO, Allowed
from impala.types import Nest
from learner.service import description
from protos import codec, policy
from protos.impala.v1 import learner_pb2 as pb
from protos.network import Network, NotDescribed

spaces = gym.spaces

CHOICE, VECTOR = test_agent.CHOICE, test_agent.VECTOR
_NAMED = (
    *("sees pixels", "sees integers", "sees choices", "sees nested", "sees wrapped choices"),
    *("chooses multi_discrete_matrix", "chooses nested", "no layer", "separate lstm"),
    *("masked epsilon-greedy", "stacks channels", "stacks wrapped", "stacks for two"),
    *("popart", "popart of two, separate"),
)
AGENTS: Mapping[str, test_numpy_agent.CASE] = {
    **{name: test_numpy_agent.AGENTS[name] for name in _NAMED},
    **{
        name: (*test_agent.AGENTS[name], CHOICE)
        for name in ("shallow-lstm-4", "small", "strided-valid", "strided", "wrapped-stack")
    },
    "odd image": (
        AgentConfig("deep", core="lstm", lstm_size=5, standardise_images=False),
        spaces.Box(0, 200, (17, 22, 3), np.uint8),
        CHOICE,
    ),
    "image of floats": (AgentConfig("small"), spaces.Box(-1, 1, (9, 7), np.float32), CHOICE),
}
FRAMES_OF_BYTES = spaces.Box(0, 255, (4, 4), np.uint8)


def reply_of(agent: Agent, config: AgentConfig, of: Spaces) -> pb.JoinReply:
    whole = dataclasses.replace(Config(), agent=config)
    reply = description.of(whole, agent.variables, of, messages.bounds())
    return pb.JoinReply.FromString(reply.SerializeToString())


def by_name(nest: Nest, name: str) -> dict[str, np.ndarray]:
    """The leaves of a nest by the names that they have on the wire."""
    paths = tree.flatten_with_path(nest)
    return {"/".join([name, *map(str, path)]): np.asarray(leaf) for path, leaf in paths}


def randomised(agent: Agent) -> list[np.ndarray]:
    """Gives the agent's variables values that matter, and returns them."""
    rng = np.random.default_rng(2)
    for variable in agent.variables:
        fan_in = max(1, math.prod(variable.shape[:-1]))
        values = rng.normal(0.0, fan_in**-0.5, variable.shape)
        variable.assign(np.abs(values) if "variance" in variable.name else values)
    return [variable.numpy() for variable in agent.variables]


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_described_computes_what_the_agent_computes(name: str) -> None:
    """Over rows in which episodes begin and end at random, from a state amid an episode."""
    config, observation_space, action_space = AGENTS[name]
    agent = build.agent(config, observation_space, action_space)
    parameters = randomised(agent)
    reply = reply_of(agent, config, (observation_space, action_space))
    rows, state = experience(observation_space), random_state(agent)

    expected, expected_state = agent.unroll(rows, state)
    found = Network(reply).unroll(
        parameters,
        by_name(rows.observation, description.OBSERVATION),
        rows.step_type,
        list(map(np.asarray, tree.flatten(state))),
    )

    assert np.std(expected.baseline) > 1e-3
    np.testing.assert_allclose(found.outputs, expected.policy, 2e-4, 2e-4)
    np.testing.assert_allclose(found.baseline, expected.baseline, 2e-4, 2e-4)
    for one, other in zip(found.core_state, tree.flatten(expected_state), strict=True):
        np.testing.assert_allclose(one, other, 2e-4, 2e-4)


def test_every_torso_and_core_is_described() -> None:
    assert {config.torso for config, _, _ in AGENTS.values()} == set(TORSO.built_in)
    assert {config.core for config, _, _ in AGENTS.values()} == set(CORE.built_in)


def test_a_part_of_ones_own_is_named_and_not_described() -> None:
    own = f"{__name__}:OwnTorso"
    config = dataclasses.replace(Config(), agent=AgentConfig(own, hidden_sizes=(4,)))
    found = sections.found(
        sections.class_of(config, allow=Allowed((__name__,)))(agent=config.agent)
    )
    agent = build.agent(config.agent, VECTOR, CHOICE, own=found)
    reply = reply_of(agent, config.agent, (VECTOR, CHOICE))
    assert reply.network.not_described == own
    assert "OwnTorso" in reply.network.parameters[-1]
    with pytest.raises(NotDescribed, match=f"does not describe {own}"):
        Network(reply)
    assert policy.factors(reply)  # which is described all the same


class OwnTorso(MLP):
    """Somebody's own, though it computes what ours does."""

    def __init__(self, settings: None, name: str | None = None) -> None:
        super().__init__(AgentConfig(hidden_sizes=(4,)), name=name)


def test_what_is_of_a_newer_protocol_is_not_guessed() -> None:
    agent = build.agent(AgentConfig(hidden_sizes=(4,)), VECTOR, CHOICE)
    reply = reply_of(agent, AgentConfig(hidden_sizes=(4,)), (VECTOR, CHOICE))
    reply.network.shared.add().kind = 99  # type: ignore[assignment]
    with pytest.raises(NotDescribed, match=r"unknown kinds \[99\]"):
        Network(reply)
    reply.policy.factors[0].family = 99  # type: ignore[assignment]
    with pytest.raises(NotDescribed, match="family 99"):
        policy.factors(reply)
    for of_an_older_learner in (Network, policy.factors):
        with pytest.raises(NotDescribed, match="impala 0"):
            of_an_older_learner(pb.JoinReply(version="impala 0"))


# ------------------------------------------------------------------------------------ spaces


def test_spaces_describe_each_leaf_in_order_of_the_wire() -> None:
    space = spaces.Dict(
        [
            ("z", spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary((2, 2))))),
            ("b", spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[5, -2]]))),
            ("a", spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, 2.5]), dtype=np.float64)),
            ("c", FRAMES_OF_BYTES),
        ]
    )
    told = description.leaves(space, "x")
    a, b, c, z0, z1 = told
    assert [each.name for each in told] == ["x/a", "x/b", "x/c", "x/z/0", "x/z/1"]
    assert [spec.name for spec in codec.specs({"x": _like(space)})] == [each.name for each in told]
    assert [list(a.low), list(a.high)] == [[-1.0, -math.inf], [1.0, 2.5]]
    assert [list(b.start), list(b.n)] == [[5, -2], [2, 3]]
    assert [list(c.low), list(c.high)] == [[0.0], [255.0]]
    assert [list(z0.start), list(z0.n)] == [[-1], [3]]
    assert [list(z1.start), list(z1.n)] == [[0] * 4, [2] * 4]
    assert [pb.Space.Kind.Name(each.kind) for each in told] == [
        *("KIND_BOX", "KIND_MULTI_DISCRETE", "KIND_BOX", "KIND_DISCRETE", "KIND_MULTI_BINARY")
    ]


def _like(space: gym.Space) -> Nest:
    return tree.map_structure(lambda leaf: leaf[0], sample(space, 1))


# ------------------------------------------------------------------------------------ policy


def _policies() -> Iterator[tuple[str, AgentConfig, gym.Space]]:
    for name, space in CASES.items():
        yield name, AgentConfig(hidden_sizes=(4,)), space
    yield "epsilon-greedy", test_numpy_agent.GREEDY, spaces.Discrete(4, start=2)
    unsorted = [("b", spaces.Discrete(2)), ("a", spaces.Box(-1, 3, (2,), np.float32))]
    yield "unsorted dict", AgentConfig(hidden_sizes=(4,)), spaces.Dict(unsorted)


@pytest.mark.parametrize(("config", "space"), [case[1:] for case in _policies()])
def test_actions_are_as_probable_as_the_learner_finds(
    config: AgentConfig, space: gym.Space
) -> None:
    """For actions all over the space, of policies with masked choices among others."""
    mask = spaces.Box(0, 1, (sum(choices(space)),), np.int8)
    seen = spaces.Dict({"observation": VECTOR, ACTION_MASK: mask}) if choices(space) else VECTOR
    agent = build.agent(config, seen, space)
    reply = reply_of(agent, config, (seen, space))
    distribution = agent.distribution
    for field in ("num_outputs", "num_parameters", "num_choices"):
        total = sum(getattr(factor, field) for factor in reply.policy.factors)
        assert total == getattr(distribution, field), field

    rng = np.random.default_rng(3)
    outputs = rng.normal(0.0, 2.0, (40, distribution.num_outputs)).astype(np.float32)
    if choices(space):
        outputs = distribution.mask(outputs, rng.integers(0, 2, (40, sum(choices(space)))))
    parameters = np.asarray(distribution.behaviour(outputs, np.array([3, 5], np.int32)))
    actions = sample(space, 40)

    expected = distribution.log_prob(parameters, actions).numpy()
    named = by_name(actions, description.ACTION)
    found = policy.log_prob(policy.factors(reply), parameters, named)
    assert isinstance(distribution, distributions.Distribution) and np.isfinite(found).any()
    possible = expected > -1e8  # what is masked is as good as impossible in both
    np.testing.assert_array_equal(found > -1e8, possible)
    np.testing.assert_allclose(found[possible], expected[possible], 1e-4, 1e-4)
