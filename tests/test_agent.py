"""The agent: `unroll` is `step` repeated, whatever the torso, the core and the episode ends."""

import collections
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.agents import cores, observation, torsos
from impala.agents.agent import Agent
from impala.agents.images import Frames
from impala.agents.torsos import MLP, DeepResidual, Shallow, Small, Strided, StridedValid, Torso
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig
from impala.parts import build
from impala.testing.torsos import TorsoConformance
from impala.types import ArraySpec, Nest, StepType, TimeStep

spaces = gym.spaces

PIXELS = spaces.Box(0, 255, (20, 20, 1), np.uint8)
LARGER = spaces.Box(0, 255, (47, 47, 1), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (4,), np.float32)
CHOICE = spaces.Discrete(3)
NESTED = spaces.Dict(
    {
        "b": spaces.Tuple((VECTOR, LARGER, CHOICE)),
        "a": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    }
)
SEED = tf.constant([3, 5], tf.int32)
T, B = 8, 4


def wrapped(space: gym.Space) -> spaces.Dict:
    """What the environment wrappers make of an observation space."""
    return spaces.Dict(
        {
            "observation": space,
            "last_action": spaces.Discrete(4, start=-1),
            "last_reward": spaces.Box(-np.inf, np.inf, (), np.float32),
            "time_in_episode": spaces.Box(0, 2**31 - 2, (), np.int32),
        }
    )


def booleans(*shape: int) -> spaces.Box:
    # Gymnasium makes such a box, but its types know none.
    return spaces.Box(0, 1, shape, np.bool_)  # type: ignore[arg-type]


def sample(space: gym.Space, *leading: int, seed: int = 0) -> Nest:
    """Random elements of a space, [*leading, ...]."""
    space.seed(seed)
    elements = [tree.map_structure(np.asarray, space.sample()) for _ in range(np.prod(leading))]
    return tree.map_structure(
        lambda *leaves: np.stack(leaves).reshape(*leading, *leaves[0].shape), *elements
    )


def experience(space: gym.Space, rows: int = T, seed: int = 0) -> TimeStep:
    """[rows, B, ...] in which episodes end at random: in row 0, in consecutive rows, never."""
    rng = np.random.default_rng(seed)
    step_type = rng.choice([StepType.FIRST, StepType.MID, StepType.LAST], (rows, B)).astype(np.int8)
    step_type[0, 0] = step_type[4:6, 0] = StepType.FIRST
    step_type[0, 1] = StepType.MID
    step_type[:, 2] = StepType.MID
    zeros = np.zeros((rows, B), np.float32)
    return TimeStep(sample(space, rows, B, seed=seed), zeros, zeros, step_type)


def random_state(agent: Agent, seed: int = 0) -> Nest:
    """A core state from the middle of some episode."""
    rng = np.random.default_rng(seed)
    return tree.map_structure(
        lambda leaf: (
            rng.integers(0, 256, leaf.shape).astype(np.uint8)
            if leaf.dtype == tf.uint8
            else rng.normal(size=leaf.shape).astype(leaf.dtype.as_numpy_dtype)
        ),
        agent.initial_state(B),
    )


def row(timestep: TimeStep, t: int) -> TimeStep:
    return tree.map_structure(lambda leaf: leaf[t], timestep)


def assert_close(found: Nest, expected: Nest, atol: float = 0.0, rtol: float = 1e-7) -> None:
    tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), expected, found)


AGENTS = {
    f"{torso}-{core}-{frame_stack}": (
        AgentConfig(torso, (8,), core, lstm_size=5, frame_stack=frame_stack),
        PIXELS,
    )
    for torso, core, frame_stack in (
        ("mlp", "feed_forward", 1),
        ("mlp", "lstm", 4),
        ("shallow", "feed_forward", 4),
        ("shallow", "lstm", 1),
        ("deep", "lstm", 4),
    )
} | {
    "vector-stack": (AgentConfig(hidden_sizes=(8,), frame_stack=3), VECTOR),
    "small": (AgentConfig("small"), booleans(10, 10, 4)),
    "strided-valid": (AgentConfig("strided_valid", core="lstm", lstm_size=5), LARGER),
    "strided": (AgentConfig("strided", core="lstm", lstm_size=5), wrapped(PIXELS)),
    "two networks": (
        AgentConfig("mlp", core="lstm", lstm_size=5, frame_stack=2, separate_baseline=True),
        VECTOR,
    ),
    "auto": (AgentConfig("auto", (8,), "lstm", lstm_size=5), wrapped(NESTED)),
    "wrapped-stack": (
        AgentConfig("shallow", core="lstm", lstm_size=5, frame_stack=2),
        wrapped(PIXELS),
    ),
}


Case = tuple[Agent, gym.Space]  # and the space of its observations


@pytest.fixture(params=AGENTS, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    config, observation_space = AGENTS[request.param]
    return build.agent(config, observation_space, CHOICE, seed=1), observation_space


def test_the_network_of_a3cs_code() -> None:
    config = PRESETS["atari-a3c-small"][1].agent
    agent = build.agent(config, LARGER, CHOICE)
    shapes = {variable.name: tuple(variable.shape) for variable in agent.trainable_variables}
    assert shapes == {
        "strided_valid/conv_0/w:0": (3, 3, 1, 32),
        **{f"strided_valid/conv_{i}/w:0": (3, 3, 32, 32) for i in (1, 2, 3)},
        **{f"strided_valid/conv_{i}/b:0": (32,) for i in range(4)},
        # 47 -> 23 -> 11 -> 5 -> 2 pixels without padding, and nothing else goes in.
        "lstm/from_input/w:0": (2 * 2 * 32, 4 * 256),
        "lstm/from_input/b:0": (4 * 256,),
        "lstm/from_hidden/w:0": (256, 4 * 256),
        "agent/policy/w:0": (256, 3),
        "agent/policy/b:0": (3,),
        "agent/baseline/w:0": (256, 1),
        "agent/baseline/b:0": (1,),
    }
    torso = StridedValid()
    images = np.random.default_rng(0).uniform(size=(2, 47, 47, 1)).astype(np.float32)
    expected = torso(tf.constant(images))
    weights = {variable.name.split("/", 1)[1]: variable for variable in torso.variables}
    for i in range(4):
        w, b = weights[f"conv_{i}/w:0"], weights[f"conv_{i}/b:0"]
        images = np.maximum(tf.nn.conv2d(images, w, 2, "VALID") + b, 0.0)
    assert_close(expected, images.reshape(2, -1), atol=1e-5)


class TestUnroll:
    def test_is_step_repeated(self, case: Case) -> None:
        agent, space = case
        timestep, state = experience(space), random_state(agent)
        output, final_state = agent.unroll(timestep, state)
        assert output.policy.shape == (T, B, 3)
        assert output.baseline.shape == (T, B)
        for t in range(T):
            one, state = agent.step(row(timestep, t), state, SEED + t)
            assert_close(one.policy, output.policy[t], atol=1e-5)
            assert_close(one.baseline, output.baseline[t], atol=1e-5)
        assert_close(state, final_state, atol=1e-5)

    def test_the_state_before_an_episode_has_no_influence(self, case: Case) -> None:
        agent, space = case
        timestep = experience(space)
        output, state = agent.unroll(timestep, random_state(agent, seed=1))
        other, other_state = agent.unroll(timestep, random_state(agent, seed=2))
        began = np.logical_or.accumulate(timestep.step_type == StepType.FIRST, axis=0)
        np.testing.assert_array_equal(other.policy[began], output.policy[began])
        np.testing.assert_array_equal(other.baseline[began], output.baseline[began])
        assert_close(
            tree.map_structure(lambda leaf: leaf[began[-1]], other_state),
            tree.map_structure(lambda leaf: leaf[began[-1]], state),
        )
        # Where none began it has, or there is no state.
        assert not began.all()
        if tree.flatten(state):
            assert (other.policy.numpy()[0] != output.policy.numpy()[0])[~began[0]].any()

    def test_gradients_reach_every_variable(self, case: Case) -> None:
        agent, space = case
        with tf.GradientTape() as tape:
            output, _ = agent.unroll(experience(space), agent.initial_state(B))
            loss = tf.reduce_sum(output.policy**2) + tf.reduce_sum(output.baseline**2)
        for variable, gradient in zip(
            agent.trainable_variables, tape.gradient(loss, agent.trainable_variables), strict=True
        ):
            assert gradient is not None, variable.name
            assert np.isfinite(gradient).all(), variable.name
            assert np.any(gradient != 0), variable.name


class TestInitialState:
    def test_is_empty_without_a_stateful_part(self) -> None:
        agent = build.agent(AgentConfig(), VECTOR, CHOICE)
        assert agent.initial_state(7) == ()
        assert agent.unroll(experience(VECTOR), ())[1] == ()


ACTION_SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(2),
    "box": spaces.Box(-2.0, 2.0, (2,), np.float32),
    "dict": spaces.Dict({"move": spaces.Discrete(3), "aim": spaces.Box(-1, 1, (1,), np.float32)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
}


@pytest.mark.parametrize("action_space", ACTION_SPACES.values(), ids=ACTION_SPACES)
class TestActing:
    @pytest.fixture
    def agent(self, action_space: gym.Space) -> Agent:
        config = AgentConfig(hidden_sizes=(8,), core="lstm", lstm_size=5)
        return build.agent(config, VECTOR, action_space)

    def test_steps_take_the_sample_of_their_seed_and_greedy_ones_the_mode(
        self, agent: Agent, action_space: gym.Space
    ) -> None:
        timestep, state = row(experience(VECTOR), 0), random_state(agent)
        greedy, greedy_state = agent.greedy_step(timestep, state)
        output, output_state = agent.step(timestep, state, SEED)
        sampled, _ = agent.distribution.sample_and_log_prob(output.policy, SEED)
        assert_close(output.action, sampled)
        assert_close(greedy.action, agent.distribution.mode(output.policy))
        assert_close((greedy.policy, greedy.baseline), (output.policy, output.baseline))
        assert_close(greedy_state, output_state)

    def test_the_first_policy_is_almost_the_one_of_zero_parameters(
        self, agent: Agent, action_space: gym.Space
    ) -> None:
        """Nearly uniform: learning starts from exploring everything."""
        output, _ = agent.unroll(experience(VECTOR), agent.initial_state(B))
        zeros = tf.zeros_like(output.policy)
        assert np.max(agent.distribution.kl(output.policy, zeros)) < 0.05

    def test_the_spec_is_what_an_unroll_holds(self, agent: Agent, action_space: gym.Space) -> None:
        timestep, state = experience(VECTOR, rows=2), agent.initial_state(B)
        output, _ = agent.step(row(timestep, 0), state, SEED)
        spec = build.unroll_spec(agent, VECTOR, action_space, unroll_length=1)

        def from_arrays(leaf: Any, rows: Sequence[int]) -> ArraySpec:
            return ArraySpec((*rows, *leaf.shape[1:]), np.dtype(np.asarray(leaf).dtype))

        assert spec.timestep == tree.map_structure(
            lambda leaf: from_arrays(leaf, [2]), row(timestep, 0)
        )
        assert spec.output == tree.map_structure(lambda leaf: from_arrays(leaf, [2]), output)
        assert spec.core_state == tree.map_structure(lambda leaf: from_arrays(leaf, []), state)
        assert (spec.frames, spec.parameter_version) == ((), ())


class TestFrameStack:
    """Against a deque per environment, which starts an episode full of its first frame."""

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Box(0, 255, (3, 2, 1), np.uint8),
            spaces.Box(0, 255, (3, 2), np.uint8),
            spaces.Box(0, 255, (3, 2, 3), np.uint8),
            VECTOR,
        ],
        ids=["pixels", "pixels_without_channel", "colours", "vector"],
    )
    @pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
    def test_is_the_last_frames_of_the_episode(self, space: gym.Space, jit_compile: bool) -> None:
        size = 4  # of which bytes of one channel are packed
        frame_stack = observation.FrameStack(size, space)
        stack = tf.function(frame_stack, autograph=False, jit_compile=jit_compile)
        timestep = experience(space, rows=12)
        is_first = timestep.step_type == StepType.FIRST
        is_first[0] = True

        # Two unrolls, of 7 rows and of 5: the state joins them.
        early, state = stack(timestep.observation[:7], is_first[:7], frame_stack.initial_state(B))
        late, _ = stack(timestep.observation[7:], is_first[7:], state)
        parts = [x.pixels if isinstance(x, Frames) else x for x in (early, late)]
        stacked = np.concatenate(parts)

        assert stacked.dtype == space.dtype
        assert stacked.shape[2:] == frame_stack.observation_space.shape
        for b in range(B):
            frames: collections.deque[np.ndarray] = collections.deque(maxlen=size)
            for t in range(12):
                frame = timestep.observation[t, b]
                frame = frame[..., np.newaxis] if frame.ndim == 2 else frame
                frames.extend([frame] * (size if is_first[t, b] else 1))
                np.testing.assert_array_equal(stacked[t, b], np.concatenate(frames, axis=-1))

    def test_the_spec_keeps_single_frames(self) -> None:
        """What travels is one frame a row; the stack is in the state, once an unroll."""
        agent = build.agent(AgentConfig("shallow", frame_stack=4), PIXELS, CHOICE)
        spec = build.unroll_spec(agent, PIXELS, CHOICE, unroll_length=20)
        assert spec.timestep.observation.shape == (21, 20, 20, 1)
        assert spec.core_state[0].shape == (3, 20, 20, 1)


@pytest.mark.parametrize("frame_stack", [1, 4])
@pytest.mark.parametrize("shape", [(24, 20, 3), (20, 24, 1)])
def test_images_with_channels_first_are_seen_as_with_channels_last(
    shape: tuple[int, ...], frame_stack: int
) -> None:
    last = spaces.Box(0, 255, shape, np.uint8)
    first = spaces.Box(0, 255, (shape[-1], *shape[:-1]), np.uint8)
    config = AgentConfig("shallow", frame_stack=frame_stack)
    timestep = experience(last, rows=6)
    moved = timestep._replace(observation=np.moveaxis(timestep.observation, -1, -3).copy())
    found = []
    for space, rows in ((last, timestep), (first, moved)):
        agent = build.agent(config, space, CHOICE, seed=1)
        output, state = agent.unroll(rows, agent.initial_state(B))
        row = tree.map_structure(lambda x: x[0], rows)
        acted, after = agent.step(row, state, tf.constant([1, 2]))
        found.append(tree.map_structure(np.asarray, (output, state, acted, after)))
    tree.map_structure(np.testing.assert_array_equal, *found)


def test_lstm_is_the_textbook_one() -> None:
    lstm = cores.LSTM(AgentConfig(lstm_size=5))
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(T, B, 3)).astype(np.float32)
    is_first = rng.random((T, B)) < 0.3
    state = cores.LSTMState(*rng.normal(size=(2, B, 5)).astype(np.float32))
    outputs, final_state = lstm(tf.constant(inputs), tf.constant(is_first), state)

    from_hidden, bias, from_input = (variable.numpy() for variable in lstm.variables)
    hidden, cell = state
    for t in range(T):
        hidden, cell = (np.where(is_first[t][:, np.newaxis], 0, x) for x in (hidden, cell))
        gates = inputs[t] @ from_input + bias + hidden @ from_hidden
        new, enter, forget, leave = np.split(gates, 4, axis=-1)
        cell = _sigmoid(forget + 1) * cell + _sigmoid(enter) * np.tanh(new)
        hidden = _sigmoid(leave) * np.tanh(cell)
        np.testing.assert_allclose(outputs[t], hidden, atol=1e-5)
    np.testing.assert_allclose(final_state.cell, cell, atol=1e-5)
    np.testing.assert_array_equal(final_state.hidden, outputs[-1])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class TestTorso:
    """With a network of no layers the features are the inputs."""

    def features(self, space: gym.Space, *observations: Nest) -> np.ndarray:
        torso = observation.Features(torsos.MLP(AgentConfig(hidden_sizes=())), space)
        stacked = tree.map_structure(lambda *leaves: tf.stack(leaves), *observations)
        return torso(stacked).numpy()

    def test_choices_are_one_hot(self) -> None:
        space = spaces.Dict(
            {
                "b": spaces.Discrete(3, start=-1),
                "a": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2))),
                "c": spaces.Box(-9, 9, (), np.float64),
            }
        )
        observation = {
            "b": np.int64(1),
            "a": (np.array([1, 0]), np.array([1, 0], np.int8)),
            "c": np.float64(4.5),
        }
        found = self.features(space, observation)
        np.testing.assert_allclose(found, [[0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 4.5]])

    def test_what_wrappers_added_stands_behind_the_features(self) -> None:
        space = wrapped(VECTOR)
        observation = {
            "observation": np.array([1, 2, 3, 4], np.float32),
            "last_action": np.int64(-1),
            "last_reward": np.float32(-20),
            "time_in_episode": np.int32(0),
        }
        later = {
            **observation,
            "last_action": np.int64(2),
            "last_reward": np.float32(0.5),
            "time_in_episode": np.int32(100),
        }
        np.testing.assert_allclose(
            self.features(space, observation, later),
            [
                [1, 2, 3, 4, 1, 0, 0, 0, -np.log(21), 0],
                [1, 2, 3, 4, 0, 0, 0, 1, np.log(1.5), np.log(101) / 5],
            ],
            rtol=1e-6,
        )

    def test_a_dict_of_the_environments_own_is_not_a_wrapped_one(self) -> None:
        space = spaces.Dict({"observation": VECTOR, "desired_goal": VECTOR})
        observation = {
            "observation": np.array([1, 2, 3, 4], np.float32),
            "desired_goal": np.zeros(4, "f"),
        }
        found = self.features(space, observation)
        np.testing.assert_allclose(found, [[0, 0, 0, 0, 1, 2, 3, 4]])

    def images(self, space: gym.Space, *observations: np.ndarray, **options: Any) -> np.ndarray:
        """What an image network is shown."""

        class Shown(torsos.Torso):
            def __call__(self, images: tf.Tensor) -> tf.Tensor:
                return images

        return observation.Features(Shown(), space, **options)(tf.stack(observations)).numpy()

    def test_or_is_shown_as_shares_of_white(self) -> None:
        space = spaces.Box(0, 255, (20, 20, 4), np.uint8)
        image = sample(space, 1)[0]
        shown = self.images(space, image, standardise_images=False)
        np.testing.assert_allclose(shown, [image / 255.0], rtol=1e-6)
        config = AgentConfig("shallow", standardise_images=False)
        agent = build.agent(config, PIXELS, CHOICE)
        standardised = build.agent(AgentConfig("shallow"), PIXELS, CHOICE)
        for mine, theirs in zip(agent.variables, standardised.variables, strict=True):
            theirs.assign(mine)
        timestep = experience(PIXELS)
        ours, others = (a.unroll(timestep, ())[0].baseline for a in (agent, standardised))
        assert not np.allclose(ours, others, rtol=1e-3)

    def test_each_image_is_standardised(self) -> None:
        space = spaces.Box(0, 255, (20, 20, 4), np.uint8)
        light = sample(space, 1)[0]
        dark = light // 4 + 50
        expected = [(image - image.mean()) / image.std() for image in (light, dark)]
        shown = self.images(space, light, dark)
        np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-5)
        grey = self.images(space, np.full((20, 20, 4), 87, np.uint8))
        np.testing.assert_allclose(grey, 0.0, atol=1e-4)


class TestAuto:
    """The torso that is chosen for an observation."""

    @pytest.mark.parametrize(
        ("space", "expected"),
        [
            (VECTOR, "mlp"),
            (CHOICE, "mlp"),
            (spaces.Box(-1.0, 1.0, (50, 40), np.float32), "mlp"),  # a table
            (spaces.Box(0, 255, (2, 90), np.uint8), "mlp"),
            (spaces.Box(0, 255, (10, 5), np.uint8), "small"),
            (booleans(10, 10, 4), "small"),
            (spaces.Box(0, 255, (84, 31, 3), np.uint8), "small"),
            (LARGER, "shallow"),
            (spaces.Box(0, 255, (3, 64, 64), np.uint8), "shallow"),
            (spaces.Dict({"a": VECTOR, "b": spaces.Tuple([CHOICE])}), "mlp"),
            (spaces.Dict({"a": VECTOR, "b": spaces.Tuple([PIXELS])}), "auto"),
        ],
    )
    def test_is_the_one_that_fits(self, space: gym.Space, expected: str) -> None:
        assert observation.fitting("auto", space) == expected
        assert observation.fitting("deep", space) == "deep"

    @pytest.mark.parametrize("frame_stack", [1, 4])
    @pytest.mark.parametrize(
        ("space", "torso"),
        [(VECTOR, "mlp"), (spaces.Box(-1.0, 1.0, (5, 4)), "mlp"), (LARGER, "shallow")],
    )
    def test_of_one_array_it_is_as_if_named(
        self, space: gym.Space, torso: str, frame_stack: int
    ) -> None:
        chosen, named = (
            build.agent(AgentConfig(name, frame_stack=frame_stack), space, CHOICE, seed=3)
            for name in ("auto", torso)
        )
        assert [v.name for v in chosen.variables] == [v.name for v in named.variables]
        for one, other in zip(chosen.variables, named.variables, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_each_image_has_a_torso_and_an_mlp_joins_them(self) -> None:
        agent = build.agent(AgentConfig("auto", (8,)), NESTED, CHOICE)
        shapes = {variable.name: tuple(variable.shape) for variable in agent.variables}
        assert shapes["auto/small_0/conv/w:0"] == (3, 3, 3, 16)
        assert shapes["auto/shallow_2/conv_0/w:0"] == (8, 8, 1, 16)
        assert shapes["auto/mlp/linear_0/w:0"] == (128 + 4 + 256 + 3, 8)
        # Given an observation of which one leaf changes, then whichever that is, the policy does.
        rows = experience(NESTED, rows=2)
        leaves = tree.flatten(rows.observation)
        policies = []
        for changed in [None, *range(len(leaves))]:
            shown = [x[:1] if i == changed else x[1:] for i, x in enumerate(leaves)]
            seen = tree.unflatten_as(rows.observation, shown)
            timestep = tree.map_structure(lambda x: x[1:], rows)._replace(observation=seen)
            policies.append(agent.unroll(timestep, ())[0].policy.numpy()[0, 3])
        assert len(np.unique(policies, axis=0)) == 1 + len(leaves)


class _Contract(TorsoConformance):
    """What every torso promises."""

    torso: type[Torso]
    observation_space = PIXELS

    def make(self, name: str) -> Torso:
        return self.torso(AgentConfig(hidden_sizes=(8, 6)), name=name)


for _torso in (MLP, Small, Strided, Shallow, DeepResidual):
    globals()[f"Test{_torso.__name__}"] = type(
        f"Test{_torso.__name__}", (_Contract,), {"torso": _torso}
    )


class TestStridedValid(_Contract):
    torso = StridedValid
    observation_space = LARGER


class TestVariables:
    def test_their_order_is_the_order_in_which_they_travel(self) -> None:
        config = AgentConfig("shallow", core="lstm", lstm_size=5, frame_stack=4)
        agent = build.agent(config, wrapped(PIXELS), CHOICE)
        assert [(variable.name, tuple(variable.shape)) for variable in agent.variables] == [
            ("agent/baseline/b:0", (1,)),
            ("agent/baseline/w:0", (5, 1)),
            ("lstm/from_hidden/w:0", (5, 20)),
            ("lstm/from_input/b:0", (20,)),
            ("lstm/from_input/w:0", (256 + 4 + 1 + 1, 20)),
            ("agent/policy/b:0", (3,)),
            ("agent/policy/w:0", (5, 3)),
            ("shallow/conv_0/b:0", (16,)),
            ("shallow/conv_0/w:0", (8, 8, 4, 16)),
            ("shallow/conv_1/b:0", (32,)),
            ("shallow/conv_1/w:0", (4, 4, 16, 32)),
            ("shallow/linear/b:0", (256,)),
            ("shallow/linear/w:0", (32, 256)),
        ]

    def test_the_seed_decides_the_first_weights(self) -> None:
        first, again, other = (
            build.agent(AgentConfig("shallow", core="lstm"), PIXELS, CHOICE, seed=seed)
            for seed in (4, 4, 5)
        )
        for one, same, different in zip(
            first.variables, again.variables, other.variables, strict=True
        ):
            np.testing.assert_array_equal(one, same)
            if one.shape.rank > 1:  # Biases start at zero.
                assert (one.numpy() != different.numpy()).any(), one.name


@pytest.mark.parametrize(
    ("config", "space", "message"),
    [
        (
            AgentConfig("shallow"),
            spaces.Box(0, 255, (84, 16, 1), np.uint8),
            "Shallow torso needs images of 20x20 pixels or more, not 84x16",
        ),
        (
            AgentConfig("small"),
            booleans(2, 10, 4),
            "Small torso needs images of 3x3 pixels or more, not 2x10",
        ),
        (AgentConfig("deep"), VECTOR, "DeepResidual torso sees images .*Set torso to auto"),
        (AgentConfig("shallow"), spaces.Dict({"a": PIXELS}), "Shallow torso sees images"),
        (AgentConfig(frame_stack=4), CHOICE, "frame_stack is 4.*Set frame_stack to 1"),
        (AgentConfig(), spaces.Text(5), "Text"),
        (AgentConfig(hidden_sizes=(2**60,)), VECTOR, r"too large .*\[4,1152921504606846976\]"),
        (AgentConfig(hidden_sizes=(2**62,)), VECTOR, r"too large .*\[4,4611686018427387904\]"),
        (AgentConfig(), spaces.Dict({"a": spaces.Sequence(CHOICE)}), "Sequence"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_fix(
    config: AgentConfig, space: gym.Space, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build.agent(config, space, CHOICE)
