"""The agent: a network over time and an action distribution."""

from collections.abc import Sequence

import sonnet as snt
import tensorflow as tf
import tree

from impala.agents.cores import Core
from impala.agents.distributions import Distribution
from impala.agents.normaliser import Normaliser
from impala.agents.observation import Features, FrameStack
from impala.agents.popart import PopArt
from impala.environments.spaces import ACTION_MASK
from impala.types import AgentOutput, Nest, NetworkOutput, StepType, TimeStep


class Agent(snt.Module):
    """[frame stack] -> torso -> [core] -> policy and baseline heads. The only agent class.

    The baseline may have its own torso and core, so that it can be trained alone. The core state is
    a tuple with one entry for each component that has a state, in that order; () if none has. Where
    a time step is FIRST, the previous state has no influence.

    Args:
      torso: observations [N, ...] to features [N, F].
      core: recurrent part between torso and heads; None for a feed-forward agent.
      distribution: of the action.
      frame_stack: stacks frames for the torso; None for single frames.
      baseline_torso: the baseline's own; None to share torso and core with the policy.
      baseline_core: the baseline's own, behind its own torso.
      masks_actions: whether observations have an `action_mask` [..., num_choices], obeyed by
        the policy.
      popart: normalises the baseline; None not to.
      normaliser: by which the torsos normalise observations; None: they do not.
    """

    def __init__(
        self,
        torso: Features,
        core: Core | None,
        distribution: Distribution,
        frame_stack: FrameStack | None = None,
        baseline_torso: Features | None = None,
        baseline_core: Core | None = None,
        masks_actions: bool = False,
        popart: PopArt | None = None,
        normaliser: Normaliser | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.distribution = distribution
        self._frame_stack = frame_stack
        self._masks_actions = masks_actions
        self._torso = torso
        self._core = core
        self._baseline_torso = baseline_torso
        self._baseline_core = baseline_core
        self.popart = popart
        """Statistics by which the baseline is normalised; None: it is not."""
        self.normaliser = normaliser
        """Statistics by which observations are normalised; None: they are not."""
        # Small initial weights: an almost uniform policy, values near 0.
        small = snt.initializers.VarianceScaling(scale=0.01)
        self._policy_head = snt.Linear(distribution.num_outputs, w_init=small, name="policy")
        outputs = 1 if popart is None else popart.num_tasks
        self._baseline_head = snt.Linear(outputs, w_init=small, name="baseline")

    @property
    def baseline_variables(self) -> Sequence[tf.Variable]:
        """Returns the variables that only the baseline depends on."""
        parts = (self._baseline_torso, self._baseline_core, self._baseline_head)
        return [v for part in parts if part is not None for v in part.trainable_variables]

    @property
    def variables_of_values(self) -> Sequence[tf.Variable]:
        """Returns all trained variables that the baseline depends on."""
        own = self._baseline_torso, self._baseline_core, self._baseline_head
        parts = own if self._baseline_torso is not None else (self._torso, self._core, own[-1])
        return [v for part in parts if part is not None for v in part.trainable_variables]

    @property
    def policy_variables(self) -> Sequence[tf.Variable]:
        """Returns all other trained variables, on which the policy depends."""
        of_baseline = {id(variable) for variable in self.baseline_variables}
        return [v for v in self.trainable_variables if id(v) not in of_baseline]

    @property
    def observation_size(self) -> int:
        """F of `observation_vector`."""
        return self._torso.vector_size

    def observation_vector(self, observation: Nest) -> tf.Tensor:
        """Flattens observations [N, ...] to [N, F], discrete values as one-hot."""
        return self._torso.vector(observation)

    def initial_state(self, batch_size: int | tf.Tensor) -> Nest:
        """Returns the core state [B, ...] before the first time step, which must be FIRST."""
        parts = (self._frame_stack, self._core, self._baseline_core)
        return tuple(part.initial_state(batch_size) for part in parts if part is not None)

    def step(
        self, timestep: TimeStep, core_state: Nest, seed: tf.Tensor
    ) -> tuple[AgentOutput, Nest]:
        """Acts once: applies the network to one row and samples an action.

        Args:
          timestep: [B, ...].
          core_state: [B, ...] before it.
          seed: [2] int32, different for every step; an actor's first number never changes.

        Returns:
          Output [B, ...], and the core state after it.
        """
        output, acting = self.act(timestep, self.acting(core_state), seed)
        return output, self.core_state(acting)

    def greedy_step(self, timestep: TimeStep, core_state: Nest) -> tuple[AgentOutput, Nest]:
        """Acts as `step`, with the distribution's mode instead of a sample."""
        output, acting = self.act(timestep, self.acting(core_state), seed=None)
        return output, self.core_state(acting)

    def acting(self, core_state: Nest) -> Nest:
        """Returns the state from which `act` goes on: frames are stacked already."""
        if self._frame_stack is None:
            return core_state
        return self._frame_stack.window(core_state[0]), *core_state[1:]

    def act(
        self, timestep: TimeStep, acting: Nest, seed: tf.Tensor | None
    ) -> tuple[AgentOutput, Nest]:
        """Acts as `step`, or as `greedy_step` if `seed` is None, in less time.

        Args:
          timestep: [B, ...].
          acting: from `acting` or from this method before, instead of a core state.
          seed: as for `step`.

        Returns:
          Output [B, ...], and the state from which to go on.
        """
        output, acting = self._row(timestep, acting)
        policy = self.distribution.behaviour(output.policy, seed)
        if seed is None:
            action = self.distribution.mode(policy)
        else:
            action, _ = self.distribution.sample_and_log_prob(policy, seed)
        return AgentOutput(action, policy, output.baseline), acting

    def core_state(self, acting: Nest) -> Nest:
        """Returns the core state [B, ...] before the next row."""
        if self._frame_stack is None:
            return acting
        return self._frame_stack.state(acting[0]), *acting[1:]

    def recurrent_state(self, core_state: Nest) -> Nest:
        """Returns the part of a core state that the network computed: all but stacked frames."""
        return core_state if self._frame_stack is None else core_state[1:]

    def forget(self, core_state: Nest) -> Nest:
        """Returns a core state [B, ...] with the initial state of all cores; frames are kept."""
        size = tf.shape(tree.flatten(core_state)[0])[0]
        kept = len(core_state) - len(self.recurrent_state(core_state))
        return (*core_state[:kept], *self.initial_state(size)[kept:])

    def state_of_frames(self, timestep: TimeStep) -> Nest:
        """Returns the core state [B, ...] after T rows of which only frames are remembered.

        Args:
          timestep: [T, B, ...], as many rows as are stacked or more.
        """
        state = self.initial_state(tf.shape(timestep.reward)[1])
        if self._frame_stack is None:
            return state
        _, frames = self._frame_stack(timestep.observation, _is_first(timestep), state[0])
        return (frames, *state[1:])

    def renormalise(self, observation: Nest, targets: tf.Tensor, weights: tf.Tensor) -> None:
        """Updates the statistics of PopArt; values stay what they are.

        Args:
          observation: [T, B, ...].
          targets: [T, B], of the values; not normalised.
          weights: [T, B], how often each counts; 0 for what does not.
        """
        if self.popart is not None:
            self.popart.update(self._baseline_head, observation, targets, weights)

    def unroll(self, timestep: TimeStep, core_state: Nest) -> tuple[NetworkOutput, Nest]:
        """Applies the network to T rows.

        Args:
          timestep: [T, B, ...].
          core_state: [B, ...] before row 0.

        Returns:
          Outputs [T, B, ...], and the core state after row T - 1.
        """
        timestep, core_state = tree.map_structure(tf.convert_to_tensor, (timestep, core_state))
        observation, is_first = timestep.observation, _is_first(timestep)
        if self._frame_stack is None:
            return self._network(timestep, observation, is_first, core_state)
        observation, stacked = self._frame_stack(observation, is_first, core_state[0])
        output, after = self._network(timestep, observation, is_first, core_state[1:])
        return output, (stacked, *after)

    def _row(self, timestep: TimeStep, acting: Nest) -> tuple[NetworkOutput, Nest]:
        """Applies the network to one row."""
        timestep = tree.map_structure(tf.convert_to_tensor, timestep)
        observation, is_first = timestep.observation, _is_first(timestep)
        window: tuple[Nest, ...] = ()
        if self._frame_stack is not None:
            observation, pushed = self._frame_stack.push(observation, is_first, acting[0])
            window, acting = (pushed,), acting[1:]
        timestep, observation, is_first = tree.map_structure(
            lambda x: tf.expand_dims(x, 0), (timestep, observation, is_first)
        )
        output, after = self._network(timestep, observation, is_first, acting)
        return tree.map_structure(lambda x: tf.squeeze(x, 0), output), (*window, *after)

    def _network(
        self, timestep: TimeStep, observation: Nest, is_first: tf.Tensor, core_state: Nest
    ) -> tuple[NetworkOutput, tuple[Nest, ...]]:
        """Applies everything behind the frame stack to T rows."""
        before, after = list(core_state), []
        features = snt.BatchApply(self._torso)(observation)
        if self._core is not None:
            features, state = self._core(features, is_first, before.pop(0))
            after.append(state)

        baseline_features = features
        if self._baseline_torso is not None:
            baseline_features = snt.BatchApply(self._baseline_torso)(observation)
        if self._baseline_core is not None:
            baseline_features, state = self._baseline_core(
                baseline_features, is_first, before.pop(0)
            )
            after.append(state)

        policy = self.distribution.bound(snt.BatchApply(self._policy_head)(features))
        if self._masks_actions:
            policy = self.distribution.mask(policy, timestep.observation[ACTION_MASK])
        baseline = snt.BatchApply(self._baseline_head)(baseline_features)
        if self.popart is None:
            baseline = tf.squeeze(baseline, axis=-1)
        else:
            baseline = self.popart.values(baseline, timestep.observation)
        return NetworkOutput(policy, baseline), tuple(after)


def _is_first(timestep: TimeStep) -> tf.Tensor:
    return tf.equal(timestep.step_type, tf.cast(StepType.FIRST, tf.int8))
