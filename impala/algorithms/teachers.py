"""Teachers: trained agents, whose policies and values a student imitates on its own data.

Schmitt et al. 2018, "Kickstarting Deep Reinforcement Learning", arXiv 1803.03835.
"""

from collections.abc import Sequence

import sonnet as snt
import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import Sums, Term
from impala.algorithms.losses import Aligned
from impala.algorithms.multiplier import Multiplier
from impala.config.schema import TeacherConfig
from impala.environments import base
from impala.environments.spaces import (
    ACTION_MASK,
    FORBIDDEN,
    TASK,
    Spaces,
    added,
    has_action_mask,
    is_wrapped,
    main_space,
    written,
)
from impala.types import Batch, Nest, NetworkOutput


class Teacher:
    """An agent that never changes. It is no module: no checkpoint of the student has it.

    It sees and does what is possible in its own spaces, of which those of the student may be a
    joint for several tasks: `impala.environments.join`.

    Args:
      agent: has no core, whose state the student's unrolls would not hold.
      spaces: of the teacher.
      student_spaces: of the student, which stacks as many frames as the teacher or more.
    """

    def __init__(self, agent: Agent, spaces: Spaces, student_spaces: Spaces) -> None:
        self._agent = agent
        self._space, self._student_space = spaces[0], student_spaces[0]

    def outputs(self, student: Agent, batch: Batch) -> NetworkOutput:
        """Returns what it would do and expect in every row: [T + 1, B, ...], without gradient.

        Args:
          student: has the form of the policy's parameters.
          batch: [T + 1, B, ...] of the student.
        """
        timestep = batch.unroll.timestep
        state = self._agent.initial_state(1)
        if state:
            (stacked,) = state
            _, count, *shape = stacked.shape
            state = (_crop(batch.unroll.core_state[0][:, -count:], shape),)
        seen = (
            timestep.observation
            if is_wrapped(self._student_space)
            else {"observation": timestep.observation}
        )
        # No policy depends on the number of its task.
        own = self._own({**seen, TASK: tf.zeros(tf.shape(timestep.reward), tf.int64)})
        output, _ = self._agent.unroll(timestep._replace(observation=own), state)
        policy = output.policy
        if lacking := student.distribution.num_outputs - self._agent.distribution.num_outputs:
            policy = tf.pad(policy, [[0, 0], [0, 0], [0, lacking]], constant_values=FORBIDDEN)
        if has_action_mask(self._student_space):
            policy = student.distribution.mask(policy, seen[ACTION_MASK])
        return NetworkOutput(tf.stop_gradient(policy), tf.stop_gradient(output.baseline))

    def _own(self, parts: dict[str, Nest]) -> Nest:
        """Returns of the parts of a student's observation what the teacher sees."""
        space, observation = self._space, parts["observation"]
        if is_wrapped(space):
            observation = {name: parts[name] for name in space.spaces}
        return base.map_leaves(
            lambda _, leaf, value: _crop(value, leaf.shape), "observation", space, observation
        )


class Teachers(snt.Module):
    """The teachers of a run: one, or one for each task, which observations tell.

    Args:
      config: the weights of the losses.
      teachers: one or more.
      num_parts: of the student's action.
    """

    def __init__(self, config: TeacherConfig, teachers: Sequence[Teacher], num_parts: int) -> None:
        super().__init__(name="teachers")
        self._config = config
        self._teachers = teachers
        self._num_parts = num_parts
        self._policy_cost: Multiplier | None = None
        if config.kl_target:
            self._policy_cost = Multiplier(config.policy_cost, num_parts)

    def terms(
        self,
        student: Agent,
        batch: Batch,
        steps: Aligned,
        scales: tf.Tensor | None,
        progress: tf.Tensor | float,
    ) -> tuple[dict[str, Term], dict[str, tf.Tensor]]:
        """Returns the terms of a loss, and what its `LossOutput.sums` must have.

        Args:
          student: who learns.
          batch: [T + 1, B, ...].
          steps: the same, aligned with the student's outputs.
          scales: [T, B] by which PopArt divides values; None: it does not.
          progress: [] share of the phase done.
        """
        config, (policy, baseline) = self._config, self._outputs(student, batch)
        kls = student.distribution.kl(policy[:-1], steps.target_policy)
        values, targets = (losses.normalised(x, scales) for x in (steps.values, baseline[:-1]))
        remaining = losses.annealed(1.0, 0.0, progress, config.anneal)
        cost, sums = config.policy_cost, {}
        if self._policy_cost is not None:
            cost = self._policy_cost.value
            excess = kls - config.kl_target * self._num_parts
            sums = {"teacher_excess": losses.masked(excess, steps.mask), "taught_steps": steps.mask}
        terms = {
            "teacher_policy": Term(kls, steps.mask, cost * remaining),
            "teacher_value": Term(
                losses.baseline(values, targets), steps.mask, config.value_cost * remaining
            ),
        }
        return terms, sums

    def after_update(self, sums: Sums) -> None:
        """Moves the weight of the policies' distance, if that has a target."""
        if self._policy_cost is not None:
            self._policy_cost.update(sums["teacher_excess"], sums["taught_steps"])

    def _outputs(self, student: Agent, batch: Batch) -> NetworkOutput:
        """Returns what the teacher of each row would do and expect: [T + 1, B, ...]."""
        found, *others = [teacher.outputs(student, batch) for teacher in self._teachers]
        for number, other in enumerate(others, 1):
            is_its_task = tf.equal(batch.unroll.timestep.observation[TASK], number)
            found = NetworkOutput(
                tf.where(is_its_task[..., tf.newaxis], other.policy, found.policy),
                tf.where(is_its_task, other.baseline, found.baseline),
            )
        return found


def check(name: str, of_teacher: Spaces, *of_students: Spaces) -> None:
    """Checks that an agent can teach a student in one of some pairs of spaces.

    Args:
      name: of the teacher, for the message.
      of_teacher: its spaces.
      *of_students: of the student's task alone, or of all its tasks.

    Raises:
      ValueError: says what both see and do.
    """
    seen, actions = of_teacher
    for space, own_actions in of_students:
        if main_space(seen) == main_space(space) and actions == own_actions:
            if lacking := sorted(added(seen) - added(space) - {TASK}):
                raise ValueError(
                    f"The teacher {name} also sees {', '.join(lacking)}, which this run does not "
                    "observe (environment.last_action and others): observe the same, or choose "
                    "another teacher."
                )
            return
    space, own_actions = of_students[0]
    raise ValueError(
        f"The teacher {name} sees {written(main_space(seen))} and does {written(actions)}; this "
        f"run sees {written(main_space(space))} and does {written(own_actions)}. Both must be the "
        "same."
    )


def _crop(value: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns the beginning of the last dimensions of a tensor [..., *at least shape]."""
    return value[(..., *(slice(size) for size in shape))]
