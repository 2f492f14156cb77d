"""The contract of torsos (see `impala.agents.torsos.Torso`) as tests."""

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents.observation import Features
from impala.agents.torsos import Torso
from impala.parts import checks
from impala.testing.precision import plain_float32
from impala.types import Nest

_ROWS = 5


class TorsoConformance:
    """Applies a torso to random observations, as an agent does."""

    observation_space: gym.Space
    """A space whose observations the torso accepts."""

    def make(self, name: str) -> Torso:
        """Returns a new torso, as a module of this name."""
        raise NotImplementedError(f"{type(self).__name__} has to define make(name).")

    def test_it_is_one_that_an_agent_takes(self) -> None:
        """Features are vectors [N, F], and each depends on its own observation alone."""
        checks.check_torso("the torso", self.make("torso"), self.observation_space)

    def test_features_are_finite(self) -> None:
        """Those of one observation and of several."""
        features = self._features()
        for rows in (1, _ROWS):
            output = features(self._observations(rows))
            assert output.dtype == tf.float32, f"features are {output.dtype.name}, not float32"
            assert np.isfinite(output.numpy()).all(), "features are not finite"

    def test_observations_that_differ_give_features_that_differ(self) -> None:
        """The torso uses its input."""
        output = self._features()(self._observations(_ROWS)).numpy()
        assert len(np.unique(output, axis=0)) > 1, "all observations give the same features"

    def test_the_same_observation_gives_the_same_features(self) -> None:
        """A torso has neither noise nor memory."""
        features, observations = self._features(), self._observations(_ROWS)
        first = features(observations).numpy()
        features(self._observations(_ROWS, seed=1))
        np.testing.assert_array_equal(features(observations), first)

    def test_variables_are_made_in_the_first_call_and_learn(self) -> None:
        """Later variables are in no checkpoint; those without a gradient are never trained."""
        features, observations = self._features(), self._observations(_ROWS)
        variables = features.trainable_variables
        with tf.GradientTape() as tape:
            output = features(observations)
            loss = tf.reduce_sum(tf.square(output - tf.cast(tf.range(output.shape[1]), tf.float32)))
        assert {id(v) for v in features.trainable_variables} == {id(v) for v in variables}
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            assert gradient is not None, f"{variable.name} has no gradient"
            assert np.isfinite(gradient).all(), f"the gradient of {variable.name} is not finite"

    def test_its_name_is_passed_on(self) -> None:
        """The torsos of an agent are distinguished by the names of their variables."""
        torsos = [self.make(name) for name in ("one", "two")]
        for torso in torsos:
            Features(torso, self.observation_space)(self._observations(1))
        one, two = ({variable.name for variable in torso.variables} for torso in torsos)
        assert not one & two, f"two torsos have variables of the same name: {sorted(one & two)}"

    @plain_float32()
    def test_compiled_it_says_the_same(self) -> None:
        """As a graph, and by XLA."""
        features, observations = self._features(), self._observations(_ROWS)
        expected = features(observations)
        for jit_compile in (False, True):
            graph = tf.function(features, autograph=False, jit_compile=jit_compile)
            np.testing.assert_allclose(graph(observations), expected, rtol=1e-3, atol=1e-3)

    def _features(self) -> Features:
        """Returns a torso, wrapped as in an agent, with its variables made."""
        tf.random.set_seed(0)
        features = Features(self.make("torso"), self.observation_space)
        features(self._observations(1))
        return features

    def _observations(self, rows: int, seed: int = 0) -> Nest:
        self.observation_space.seed(seed)
        sampled = [self.observation_space.sample() for _ in range(rows)]
        return tree.map_structure(lambda *leaves: tf.convert_to_tensor(np.stack(leaves)), *sampled)
