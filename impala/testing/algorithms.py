"""The contract of algorithms (see `impala.algorithms.base.Algorithm`) as tests."""

from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.algorithms.base import Algorithm, LossOutput
from impala.config.schema import AgentConfig
from impala.parts import build
from impala.testing.precision import plain_float32
from impala.types import AgentOutput, Batch, Nest, StepType, TimeStep, Unroll

_FIRST, _MID, _LAST = StepType.FIRST, StepType.MID, StepType.LAST

# Four environments, seven rows. 0 never ends; 1 ends at a time limit in row 2; 2 ends in row 3
# and loses a life in row 5; 3 begins in row 0 and ends in the very last row.
STEP_TYPES = np.array(
    [
        [_MID, _MID, _MID, _FIRST],
        [_MID, _MID, _MID, _MID],
        [_MID, _LAST, _MID, _MID],
        [_MID, _FIRST, _LAST, _MID],
        [_MID, _MID, _FIRST, _MID],
        [_MID, _MID, _MID, _MID],
        [_MID, _MID, _MID, _LAST],
    ],
    np.int8,
)
DISCOUNTS = np.ones(STEP_TYPES.shape, np.float32)
DISCOUNTS[3, 2] = DISCOUNTS[5, 2] = DISCOUNTS[6, 3] = 0.0
T, B = STEP_TYPES.shape[0] - 1, STEP_TYPES.shape[1]
SEAM_ROWS = STEP_TYPES == _FIRST
SEAM_ROWS[0] = False  # the step of row 0 belongs to the previous unroll
SEAMS = SEAM_ROWS[1:]  # [T, B]
IS_REPLAY = np.array([False, True, True, False])


class AlgorithmConformance:
    """Computes losses and gradients of a batch in which episodes end in every way."""

    observation_space: gym.Space = gym.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space: gym.Space = gym.spaces.Discrete(3)
    agent_config = AgentConfig(hidden_sizes=(8,))
    has_replay = True
    """Whether half of the batch is replayed."""
    is_random = False
    """Whether the loss draws random numbers: XLA draws different ones, so it is not compared."""

    def make(self, agent: Agent) -> Algorithm:
        """Returns a new algorithm for an agent."""
        raise NotImplementedError(f"{type(self).__name__} has to define make(agent).")

    def make_agent(self) -> Agent:
        """Returns the agent, the same one in each call."""
        return build.agent(self.agent_config, self.observation_space, self.action_space, seed=1)

    def test_the_loss_is_finite_one_per_step_and_metrics_are_scalars(self) -> None:
        """[T, B] float32; the learner sums it."""
        algorithm, batch = self._made()
        output = algorithm.loss(batch)
        loss, metrics = output.loss, output.metrics
        assert loss.dtype == tf.float32, f"the loss is {loss.dtype.name}, not float32"
        assert loss.shape == (T, B), f"the loss has the shape {loss.shape}, not [T, B] = {(T, B)}"
        assert np.isfinite(loss.numpy()).all(), "the loss is not finite"
        assert metrics, "there are no metrics"
        for name, metric in metrics.items():
            assert metric.shape == (), f"the metric {name} has the shape {metric.shape}"
            assert np.isfinite(metric.numpy()), f"the metric {name} is not finite"

    def test_the_terms_add_up_to_the_loss(self) -> None:
        """As weighted, step by step, if the algorithm names terms: see `LossOutput.of`."""
        algorithm, batch = self._made()
        output = algorithm.loss(batch)
        if output.terms:
            np.testing.assert_allclose(
                sum(term.numpy() for term in output.terms.values()),
                output.loss,
                rtol=1e-5,
                atol=1e-5,
                err_msg=f"{', '.join(output.terms)} do not add up to the loss",
            )

    def test_the_loss_is_zero_on_seams_and_only_there(self) -> None:
        """The row from LAST to FIRST is not experience: see `impala.algorithms.losses.align`."""
        algorithm, batch = self._made()
        loss = algorithm.loss(batch).loss.numpy()
        assert not loss[SEAMS].any(), "a seam has a loss: mask it"
        assert loss[~SEAMS].all(), "a step of experience has no loss"

    def test_a_seam_row_is_silent(self) -> None:
        """Actions, rewards and other values on a seam change no loss, metric or gradient."""
        agent = self.make_agent()
        algorithm = self.make(agent)
        arrays = self.arrays(agent)

        def update(arrays: dict[str, Any]) -> Nest:
            output, gradients = loss_and_gradients(algorithm, self.batch(arrays, agent))
            return output.loss, output.metrics, gradients  # histograms include seams

        expected = update(arrays)
        for leaf, value in (
            ("reward", 1e6),
            ("reward", np.nan),
            ("discount", 0.0),
            ("discount", np.nan),
            ("baseline", np.inf),
            ("policy", 50.0 * np.arange(arrays["policy"].shape[-1])),
            ("policy", np.nan),
        ):
            changed = {**arrays, leaf: arrays[leaf].copy()}
            changed[leaf][SEAM_ROWS] = value
            message = f"{leaf} {value} on a seam changes the update"
            assert_identical(update(changed), expected, message)
        first = tree.map_structure(lambda leaf: leaf[0, 0], arrays["action"])

        def other(leaf: np.ndarray, value: np.ndarray) -> np.ndarray:
            leaf = leaf.copy()
            leaf[SEAM_ROWS] = value
            return leaf

        action = tree.map_structure(other, arrays["action"], first)
        message = "another action on a seam changes the update"
        assert_identical(update({**arrays, "action": action}), expected, message)

    def test_exactly_the_learned_variables_move(self) -> None:
        """Each of them once; other variables change only in `after_update`."""
        algorithm, batch = self._made()
        learned = [id(variable) for variable in algorithm.learned_variables]
        assert len(set(learned)) == len(learned), "a variable is learned twice"
        everything = {id(variable) for variable in algorithm.variables}
        assert set(learned) <= everything, "a learned variable is not among its variables"
        before = [variable.numpy() for variable in algorithm.variables]
        descend(algorithm, batch, rate=0.1)
        for variable, old in zip(algorithm.variables, before, strict=True):
            moved = not np.array_equal(variable.numpy(), old)
            what = "moves, but is not learned" if moved else "is learned, but does not move"
            assert moved == (id(variable) in learned), f"{variable.name} {what}"

    def test_what_a_checkpoint_holds_says_everything(self) -> None:
        """Another object with the same variables continues identically."""
        algorithm, batch = self._made()
        descend(algorithm, batch, rate=0.1)
        sums = {name: tf.reduce_sum(x) for name, x in algorithm.loss(batch).sums.items()}
        algorithm.after_update(0.5, sums)
        other, _ = self._made()
        for ours, theirs in zip(algorithm.variables, other.variables, strict=True):
            assert ours.name == theirs.name, f"{ours.name} is {theirs.name} the next time"
            theirs.assign(ours)
        message = "what it remembers is not in its variables"
        assert_identical(other.loss(batch), algorithm.loss(batch), message)

    @plain_float32()
    def test_compiled_it_is_the_same(self) -> None:
        """As a graph and by XLA, as the learner compiles it."""
        compilers = (False,) if self.is_random else (False, True)
        algorithm, batch = self._made()
        expected = loss_and_gradients(algorithm, batch)
        for jit_compile in compilers:
            compiled = tf.function(
                lambda batch: loss_and_gradients(algorithm, batch),
                autograph=False,
                jit_compile=jit_compile,
            )
            for a, b in zip(tree.flatten(compiled(batch)), tree.flatten(expected), strict=True):
                if b is None:  # as in `assert_identical`
                    assert a is None
                    continue
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-4)

    def arrays(self, agent: Agent, seed: int = 0) -> dict[str, Any]:
        """Returns the leaves of a batch, with behaviour policies that are far from the agent's."""
        rng = np.random.default_rng(seed)
        rows = STEP_TYPES.shape
        return {
            "observation": _sampled(self.observation_space, seed),
            "reward": 2.0 * rng.normal(size=rows),
            "discount": DISCOUNTS,
            "step_type": STEP_TYPES,
            "action": _sampled(self.action_space, seed),
            "policy": self.behaviour(agent, rng),
            "baseline": rng.normal(size=rows),
        }

    def behaviour(self, agent: Agent, rng: np.random.Generator) -> np.ndarray:
        """Returns parameters of the behaviour policy, [T + 1, B, P]."""
        return 1.5 * rng.normal(size=(*STEP_TYPES.shape, agent.distribution.num_parameters))

    def batch(self, arrays: dict[str, Any], agent: Agent) -> Batch:
        """Returns a batch of these leaves."""
        return make_batch(arrays, agent, IS_REPLAY & self.has_replay)

    def _made(self) -> tuple[Algorithm, Batch]:
        agent = self.make_agent()
        return self.make(agent), self.batch(self.arrays(agent), agent)


def make_batch(arrays: dict[str, Any], agent: Any, is_replay: np.ndarray) -> Batch:
    """Returns a batch from the leaves of its rows, [T + 1, B, ...]."""
    dtypes = {"step_type": tf.int8, "action": None, "observation": None}

    def tensors(name: str) -> Nest:
        dtype = dtypes.get(name, tf.float32)
        return tree.map_structure(lambda leaf: tf.constant(leaf, dtype), arrays[name])

    rows, size = arrays["reward"].shape
    unroll = Unroll(
        timestep=TimeStep(*map(tensors, TimeStep._fields)),
        output=AgentOutput(*map(tensors, AgentOutput._fields)),
        core_state=agent.initial_state(size),
        frames=tf.fill([size], rows - 1),
        parameter_version=tf.zeros([size], tf.int64),
    )
    return Batch(unroll, tf.constant(np.resize(is_replay, size)))


def loss_and_gradients(algorithm: Algorithm, batch: Batch) -> tuple[LossOutput, list[tf.Tensor]]:
    """Returns loss and gradients of the summed loss, as in a learner step."""
    variables = algorithm.learned_variables
    with tf.GradientTape() as tape:
        output = algorithm.loss(batch)
        total = tf.reduce_sum(output.loss)
    return output, tape.gradient(total, variables)


def descend(algorithm: Algorithm, batch: Batch, rate: float) -> None:
    """Applies one step of plain gradient descent."""
    _, gradients = loss_and_gradients(algorithm, batch)
    for variable, gradient in zip(algorithm.learned_variables, gradients, strict=True):
        assert gradient is not None, f"{variable.name} is learned, but has no gradient"
        variable.assign_sub(rate * gradient)


def assert_identical(result: Nest, expected: Nest, message: str = "") -> None:
    """Checks that losses, metrics and gradients are finite and the same to the last bit."""
    for a, b in zip(tree.flatten(result), tree.flatten(expected), strict=True):
        if a is None or b is None:  # `LossOutput.targets` of an algorithm without a baseline
            assert a is b, message
            continue
        assert np.isfinite(a.numpy()).all() and np.array_equal(a.numpy(), b.numpy()), message


def _sampled(space: gym.Space, seed: int) -> Nest:
    """Elements of a space, [T + 1, B, ...]."""
    space.seed(seed)
    drawn = [space.sample() for _ in range(STEP_TYPES.size)]

    def stack(*leaves: Any) -> np.ndarray:
        array = np.stack(leaves)
        return array.reshape(*STEP_TYPES.shape, *array.shape[1:])

    return tree.map_structure(stack, *drawn)
