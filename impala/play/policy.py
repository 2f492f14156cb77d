"""A trained agent as a function from observations to actions, for a custom loop."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents.distributions import EpsilonGreedy
from impala.environments import base, to_gymnasium
from impala.environments.spaces import SEEN, TASK, is_wrapped, limits
from impala.environments.wrappers import History
from impala.play.evaluation import Acting
from impala.play.player import Player, has_value
from impala.types import AgentOutput, Nest, StepType, TimeStep


class _Shown(NamedTuple):
    """The form of an observation."""

    num_envs: int  # E
    is_batch: bool  # if not, E is 1 and the observation has no such dimension
    missing: frozenset[str]  # parts that wrappers add and the observation does not have

    def __str__(self) -> str:
        without = f" without {', '.join(sorted(self.missing))}" if self.missing else ""
        return f"{self.num_envs if self.is_batch else 'one'} environment(s){without}"


class Policy:
    """Acts in one environment, or in several that step together, depending on the observation.

        policy = impala.load("runs/catch")
        environment = policy.environment()
        observation, _ = environment.reset(seed=0)
        while True:
            observation, reward, terminated, truncated, _ = environment.step(policy(observation))
            if terminated or truncated:
                observation, _ = environment.reset()
                policy.reset()

    The agent's core state is kept between calls, and so are the last action and the time in the
    episode if the agent sees them. If it sees the last reward, that must be passed.

    Args:
      player: has the agent and makes its environments.
      greedy: use the most likely action instead of a sampled one.
      seed: of the sampled actions.
      device: TensorFlow device for the agent; None: TensorFlow's choice.
    """

    def __init__(
        self, player: Player, greedy: bool = False, seed: int = 0, device: str | None = None
    ) -> None:
        self._player = player
        self._agent = player.agent
        self.algorithm = player.algorithm
        """Which trained it last."""
        self._greedy, self._seed, self._device = greedy, seed, device
        self.observation_space, self.action_space = player.spaces
        """What the agent sees, with what wrappers add to it, and the actions that it returns."""
        self.config, self.counters = player.config, player.counters
        """The settings of its run, without those of parts of one's own that only a learner makes;
        and how far that was: frames, updates and others."""
        self._shown: _Shown | None = None  # the form of the observations of these episodes
        self._first: np.ndarray | None = None  # [E], where an episode begins; None: in all
        self._action: Nest | None = None  # [E, ...], the last one

    def __call__(self, observation: Nest, reward: Any = None) -> Nest:
        """Returns the action for an observation.

        Args:
          observation: an element of `observation_space`, or [E, ...] of E environments. Where the
            agent sees its last action, last reward or time in the episode, the environment's own
            observation without them is sufficient.
          reward: [E] of the last step. Only for agents that see it, if the observation does not
            have it; ignored where an episode begins.

        Returns:
          An element of `action_space`, or [E, ...].

        Raises:
          ValueError: the observation is not in the space, the number of environments has changed,
            or the agent sees the last reward and it was not passed.
        """
        shown, timestep, self._history = self._timestep(observation, reward)
        with tf.device(self._device):
            self._action = self._acting(timestep)
        self._first = np.zeros(shown.num_envs, np.bool_)
        return _like(shown, self._action)

    def value(self, observation: Nest, reward: Any = None) -> Any:
        """Returns the agent's estimate of the discounted return from an observation on.

        The policy then goes on as if it had not been asked. The unit is that of the rewards that
        were learned from, scaled and clipped by the settings of `objective`.

        Args:
          observation: that the policy would act on next, as for a call.
          reward: as for a call.

        Returns:
          A number, or float32 [E]: the baseline, or of an agent with Q-values the largest of these,
          unless `critic` trained it last.

        Raises:
          ValueError: as a call, or the algorithm has trained neither.
        """
        if not has_value(self.algorithm):
            raise ValueError(
                f"{self.algorithm} has trained no value of observations: its critics, which value "
                "actions too, are not part of the agent."
            )
        shown, output = self._output(observation, reward)
        distribution = self._agent.distribution
        if isinstance(distribution, EpsilonGreedy) and self.algorithm != "critic":
            return _like(
                shown, tf.reduce_max(output.policy[:, : distribution.num_outputs], axis=-1)
            )
        return _like(shown, output.baseline)

    def distribution(self, observation: Nest, reward: Any = None) -> Nest:
        """Returns the distribution from which the agent would sample its action.

        The policy then goes on as if it had not been asked.

        Args:
          observation: that the policy would act on next, as for a call.
          reward: as for a call.

        Returns:
          For Discrete actions their probabilities, float32 [n]; for a Box a
          `impala.agents.distributions.Normal` of the Gaussians that tanh squashes into it; for Dict
          and Tuple such a nest; for MultiDiscrete and MultiBinary a tuple with the probabilities of
          each part. All are [E, ...] of E environments. With Q-values, the best action has a
          probability of 1, less the exploration if actions are sampled.

        Raises:
          ValueError: as a call.
        """
        shown, output = self._output(observation, reward)
        return _like(shown, self._agent.distribution.described(output.policy))

    def _output(self, observation: Nest, reward: Any) -> tuple[_Shown, AgentOutput]:
        """Returns what the next call would act by: tensors [E, ...]."""
        shown, timestep, _ = self._timestep(observation, reward)
        with tf.device(self._device):
            return shown, self._acting.output(timestep)

    def _timestep(self, observation: Nest, reward: Any) -> tuple[_Shown, TimeStep, History]:
        """Returns the form of an observation, what the agent sees, and the history from then on."""
        shown, values = _look(self.observation_space, observation)
        if self._first is None and shown != self._shown:
            self._shown = shown
            self._acting = Acting(self._agent, self._greedy, self._seed, shown.num_envs)
            self._history = History(self.action_space, shown.num_envs, shown.missing)
        elif shown != self._shown:
            raise ValueError(
                f"The observation is of {shown}, the one before of {self._shown}. Call reset() "
                "before other environments are shown."
            )
        first = np.ones(shown.num_envs, np.bool_) if self._first is None else self._first
        history = copy.copy(self._history)
        if shown.missing:
            if "last_reward" in shown.missing and reward is None and not first.all():
                raise ValueError(
                    "The agent sees its last reward: call policy(observation, reward) with what "
                    "step returned."
                )
            rewards = np.reshape(0.0 if reward is None else reward, (-1,))
            action = None if self._first is None else self._action  # not that of episodes before
            values = {**values, **history.before(first, action, rewards)}
            if TASK in shown.missing:  # no action depends on it
                values[TASK] = np.full(shown.num_envs, self._player.number)
        timestep = TimeStep(
            values,
            reward=np.zeros(shown.num_envs, np.float32),  # the agent uses neither
            discount=np.ones(shown.num_envs, np.float32),
            step_type=np.where(first, StepType.FIRST, StepType.MID).astype(np.int8),
        )
        return shown, timestep, history

    def reset(self, where: Any = None) -> None:
        """Marks the next observation as the first of an episode.

        Args:
          where: [E] bool, in which of several environments; None: in all.
        """
        if self._first is None:
            return
        assert self._shown is not None
        if self._shown.is_batch and where is not None:
            self._first = self._first | np.asarray(where, np.bool_)
        elif where is None or where:
            self._first = None
            if not self._shown.is_batch:
                # `impala evaluate` also acts on the last observation of an episode, where the
                # action is ignored. An equal number of draws gives equal actions.
                self._acting.skip()

    @overload
    def environment(
        self, num_envs: None = None, render_mode: str | None = None
    ) -> to_gymnasium.SingleEnv: ...
    @overload
    def environment(
        self, num_envs: int, render_mode: str | None = None
    ) -> to_gymnasium.SeveralEnvs: ...
    def environment(
        self, num_envs: int | None = None, render_mode: str | None = None
    ) -> to_gymnasium.SingleEnv | to_gymnasium.SeveralEnvs:
        """Returns the environment that the agent was trained in, with its wrappers.

        Args:
          num_envs: None for one `gymnasium.Env`; else the size of a `VectorEnv`, which resets
            environments in the step after their episode's end.
          render_mode: None; rgb_array, for `render`; or human, for a window. Of the first one.

        Raises:
          ValueError: it cannot be made, for instance because a package is missing.
        """
        if num_envs is None:
            return to_gymnasium.SingleEnv(
                lambda: self._player.environment(1, render_mode), render_mode
            )
        return to_gymnasium.SeveralEnvs(
            lambda: self._player.environment(num_envs, render_mode), render_mode
        )


def _like(shown: _Shown, nest: Nest) -> Nest:
    """Returns arrays or tensors [E, ...] as arrays; without E if the observation has none."""
    arrays = tree.map_structure(np.array, nest)  # copies, into which an environment may write
    return arrays if shown.is_batch else tree.map_structure(lambda leaf: leaf[0], arrays)


def _look(space: gym.Space, observation: Nest) -> tuple[_Shown, Nest]:
    """Returns the form of an observation, and its arrays [E, ...] in the space's types.

    Raises:
      ValueError: it is not in the space.
    """
    missing: frozenset[str] = frozenset()
    if is_wrapped(space):
        names = set(space.spaces)
        is_whole = isinstance(observation, Mapping) and {"observation"} <= set(observation) <= names
        if is_whole and isinstance(space["observation"], gym.spaces.Dict):
            inner = observation["observation"]  # or is it a key of the Dict?
            is_whole = isinstance(inner, Mapping) and set(inner) == set(space["observation"])
        observation = dict(observation) if is_whole else {"observation": observation}
        missing = frozenset(names - set(observation))
        if unknown := sorted(missing - SEEN - {TASK}):
            raise ValueError(
                f"The observation has no {', '.join(unknown)}. Play in an environment made by "
                "policy.environment(), or give a dict with "
                f"{', '.join(sorted({'observation', *unknown}))}."
            )
        space = gym.spaces.Dict({n: s for n, s in space.spaces.items() if n not in missing})
    counts: set[int | None] = set()

    def as_batch(name: str, space: gym.Space, value: Any) -> np.ndarray:
        if isinstance(value, str):
            raise ValueError(
                f"{name} is a text, of which the agent sees {space}: play in an environment made "
                "by policy.environment()."
            )
        array, shape = np.asarray(value), tuple(space.shape or ())
        assert space.dtype is not None
        if array.shape != shape and array.shape[1:] != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape} or (E, *{shape}).")
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise ValueError(f"{name} is {array.dtype}, expected {space.dtype}.")
        with np.errstate(over="ignore"):
            values = array.astype(space.dtype, copy=False)
        good = np.isfinite(values) if values.dtype.kind == "f" else values == array
        kind = f"a finite number that {space.dtype} can hold"
        if not isinstance(space, gym.spaces.Box):
            low, high = limits(space)
            good, kind = good & (values >= low) & (values <= high), f"in {space}"
        if not good.all():
            place = tuple(map(int, np.argwhere(~good)[0]))
            at = f"[{', '.join(map(str, place))}]" if place else ""
            raise ValueError(f"{name}{at} is {array[place]}; it must be {kind}.")
        is_batch = values.ndim > len(shape)
        counts.add(len(values) if is_batch else None)
        return values if is_batch else values[np.newaxis]

    values = base.map_leaves(as_batch, "observation", space, observation)
    if len(counts) != 1:
        raise ValueError(f"The parts of the observation are of {counts} environments.")
    (count,) = counts
    return _Shown(1 if count is None else count, count is not None, missing), values
