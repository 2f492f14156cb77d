"""Teachers: their losses against sums written out, whom they can teach, and copies of them."""

import dataclasses
import math
import pathlib
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import services
import tensorflow as tf
import test_algorithms

from impala import environments
from impala.agents.agent import Agent
from impala.algorithms.impala import Impala
from impala.algorithms.policy_gradient import PolicyGradient
from impala.algorithms.teachers import Teacher, Teachers
from impala.config import rules, values
from impala.config.schema import (
    AgentConfig,
    Config,
    EnvironmentConfig,
    ObjectiveConfig,
    RepeatConfig,
    TasksConfig,
    TeacherConfig,
    TelemetryConfig,
)
from impala.config.values import OptionError
from impala.environments.spaces import FORBIDDEN, Spaces
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, Counters
from impala.parts import build, sections
from impala.parts.components import Allowed
from impala.play import teachers
from impala.testing.algorithms import (
    AlgorithmConformance,
    make_batch,
)
from impala.types import StepType
from learner.plan import make_plan
from learner.update import named_variables, output_judge

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete

SPACES: Spaces = (Box(-9.0, 9.0, (2,), np.float32), Discrete(3))
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def taught(agent: Agent, teacher: Agent, name: str, **settings: float) -> PolicyGradient:
    section = {"baseline_cost": 0.0, "entropy_cost": 0.0}
    whole = Config(
        teacher=TeacherConfig(("its",), **settings),
        **{name: dataclasses.replace(getattr(Config(), name), **section)},
    )
    made = build.algorithm(name, whole, agent, [Teacher(teacher, SPACES, SPACES)])
    assert isinstance(made, PolicyGradient)
    return made


class TestTaught(AlgorithmConformance):
    """What every algorithm promises."""

    def make(self, agent: Agent) -> Impala:
        spaces = self.observation_space, self.action_space
        teacher = build.agent(AgentConfig(hidden_sizes=(5,)), *spaces, seed=7)
        config = Config(teacher=TeacherConfig(("its",), kl_target=0.1))
        made = build.algorithm("impala", config, agent, [Teacher(teacher, *[spaces] * 2)])
        assert isinstance(made, Impala)
        return made


@pytest.mark.parametrize("name", ["impala", "actor_critic", "impact"])
def test_the_losses_are_the_distance_to_the_teacher(name: str) -> None:
    """KL(teacher || pi) and half the squared distance of values; not on seams; after an anneal."""
    agent, teacher = test_algorithms.table_agent(1), test_algorithms.table_agent(2)
    made = taught(agent, teacher, name, policy_cost=2.0, value_cost=0.6, anneal=0.8)
    plain = taught(agent, teacher, name, policy_cost=0.0, value_cost=0.0)
    arrays = test_algorithms.make_arrays()
    batch = test_algorithms.make_batch(arrays, agent)

    def changes(progress: float) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        found = []
        for algorithm in (made, plain):
            with tf.GradientTape() as tape:
                loss = algorithm.loss(batch, progress).loss
                total = tf.reduce_sum(loss)
            variables = [agent.policy, agent.baseline]
            found.append((loss.numpy(), [x.numpy() for x in tape.gradient(total, variables)]))
        (loss, gradients), (other, others) = found
        pairs = zip((agent.policy, agent.baseline), gradients, others, strict=True)
        return loss - other, {id(v): a - b for v, a, b in pairs}

    loss, gradients = changes(0.2)

    def probabilities(logits: tf.Variable) -> np.ndarray:
        exp = np.exp(logits.numpy().astype(np.float64)[:-1])
        return exp / exp.sum(axis=-1, keepdims=True)

    p, q = probabilities(teacher.policy), probabilities(agent.policy)
    error = (agent.baseline - teacher.baseline).numpy().astype(np.float64)[:-1]
    is_step = (arrays["step_type"][1:] != FIRST).astype(np.float64)
    kl = (p * np.log(p / q)).sum(axis=-1)
    expected = is_step * 0.75 * (2.0 * kl + 0.6 * 0.5 * error**2)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    by_policy = is_step[..., np.newaxis] * 0.75 * 2.0 * (q - p)
    np.testing.assert_allclose(gradients[id(agent.policy)][:-1], by_policy, atol=1e-5)
    np.testing.assert_allclose(
        gradients[id(agent.baseline)][:-1], is_step * 0.75 * 0.6 * error, atol=1e-5
    )
    loss, _ = changes(0.8)
    np.testing.assert_allclose(loss, 0.0, atol=1e-6)


def test_the_weight_rises_while_the_policy_is_too_far() -> None:
    agent, teacher = test_algorithms.table_agent(1), test_algorithms.table_agent(2)
    algorithm = taught(agent, teacher, "impala", policy_cost=0.5, kl_target=0.2, anneal=0.0)
    batch = test_algorithms.make_batch(test_algorithms.make_arrays(), agent)
    output = algorithm.loss(batch)
    algorithm.after_update(0.0, {name: tf.reduce_sum(x) for name, x in output.sums.items()})
    excess = float(output.metrics["loss_mean/teacher_policy"]) - 0.2
    after = algorithm.loss(batch).metrics["teacher_policy_cost"].numpy()
    assert after == pytest.approx(0.5 * math.exp(0.01 * excess), rel=1e-6)
    assert abs(excess) > 0.1


def test_each_task_has_a_teacher_that_sees_its_own_task() -> None:
    """Padded observations, actions that a task does not have, and a mask of the student's."""
    own: list[Spaces] = [
        (Box(0, 1, (3, 2), np.float32), Discrete(2)),
        (Box(0, 1, (4, 1), np.float32), Discrete(3)),
    ]
    joint = environments.join(["a", "b"], own, numbered=True)
    student = build.agent(AgentConfig(hidden_sizes=(4,), popart=True), *joint)
    agents = [build.agent(AgentConfig(hidden_sizes=(5,)), *spaces, seed=3) for spaces in own]
    for agent in agents:  # far from the uniform policy of new networks
        for variable in agent.trainable_variables:
            variable.assign(tf.random.stateless_normal(variable.shape, [1, 2]))
    rng = np.random.default_rng(0)
    rows, tasks = (6, 2), [0, 1]
    seen = [rng.random(shape, np.float32) for shape in ((6, 3, 2), (6, 4, 1))]
    padded = np.zeros((6, 2, 4, 2), np.float32)
    padded[:, 0, :3], padded[:, 1, :, :1] = seen
    mask = np.tile(np.array([[1, 1, 0], [1, 0, 1]], np.int8), (6, 1, 1))
    arrays = {
        "observation": {"observation": padded, "action_mask": mask,
                        "popart_task": np.tile(np.array(tasks), (6, 1))},
        "reward": np.zeros(rows), "discount": np.ones(rows),
        "step_type": np.full(rows, MID), "action": np.zeros(rows, np.int64),
        "policy": np.zeros((*rows, 3)), "baseline": np.zeros(rows),
    }  # fmt: skip
    batch = make_batch(arrays, student, np.zeros(2, bool))
    pairs = zip(agents, own, strict=True)
    made = Teachers(
        TeacherConfig(), [Teacher(agent, spaces, joint) for agent, spaces in pairs], num_parts=1
    )

    found = made._outputs(student, batch)

    for task, agent in enumerate(agents):
        one = batch.unroll.timestep
        one = one._replace(
            observation=seen[task][:, np.newaxis],
            **{n: getattr(one, n)[:, :1] for n in ("reward", "discount", "step_type")},
        )
        expected, _ = agent.unroll(one, ())
        np.testing.assert_allclose(found.baseline[:, task], expected.baseline[:, 0], rtol=1e-5)
        logits = expected.policy[:, 0].numpy()
        allowed = [0, 1] if task == 0 else [0, 2]
        np.testing.assert_allclose(
            found.policy.numpy()[:, task, allowed], logits[:, allowed], rtol=1e-4, atol=1e-5
        )
        forbidden = ({0, 1, 2} - set(allowed)).pop()
        assert (found.policy.numpy()[:, task, forbidden] == FORBIDDEN).all()
    kl = student.distribution.kl(found.policy, student.unroll(batch.unroll.timestep, ())[0].policy)
    assert np.isfinite(kl).all()


@pytest.mark.parametrize("frame_stack", [1, 2, 3])
def test_a_teacher_may_see_fewer_frames(frame_stack: int) -> None:
    """Its stack goes on from the student's, over the end of an unroll and of an episode."""
    space = Box(0, 255, (10, 10, 1), np.uint8)
    spaces = space, Discrete(3)
    student = build.agent(AgentConfig(torso="small", frame_stack=3), *spaces)
    agent = build.agent(AgentConfig(torso="small", frame_stack=frame_stack), *spaces, seed=5)
    rows = (11, 2)
    rng = np.random.default_rng(1)
    step_type = np.full(rows, MID)
    step_type[0] = FIRST
    step_type[[6, 7], [0, 0]] = LAST, FIRST
    arrays = {
        "observation": rng.integers(0, 255, (*rows, *space.shape), np.uint8),
        "reward": np.zeros(rows), "discount": np.ones(rows), "step_type": step_type,
        "action": np.zeros(rows, np.int64), "policy": np.zeros((*rows, 3)),
        "baseline": np.zeros(rows),
    }  # fmt: skip
    whole = make_batch(arrays, student, np.zeros(2, bool)).unroll.timestep
    expected, _ = agent.unroll(whole, agent.initial_state(2))
    first = tf.nest.map_structure(lambda x: x[:5], whole)
    _, state = student.unroll(first, student.initial_state(2))
    batch = make_batch({n: x[5:] for n, x in arrays.items()}, student, np.zeros(2, bool))
    batch = batch._replace(unroll=batch.unroll._replace(core_state=state))

    found = Teacher(agent, spaces, spaces).outputs(student, batch)

    np.testing.assert_allclose(found.policy, expected.policy[5:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.baseline, expected.baseline[5:], rtol=1e-4, atol=1e-6)


CATCH = Config(environment=EnvironmentConfig(id="Catch"), agent=AgentConfig(hidden_sizes=(8,)))
Q = AgentConfig(policy="epsilon_greedy")


def saved(config: Config) -> Checkpoint:
    """Returns the checkpoint of an agent that has not learned."""
    plan = make_plan(config)
    variables = named_variables.named("agent", plan.phases.agent.variables)
    arrays = {name: variable.numpy() for name, variable in variables.items()}
    return Checkpoint(
        config, Counters(), arrays, accounts={}, algorithm=config.algorithm, spaces=plan.spaces
    )


def playing(id: str, **settings: object) -> Config:
    environment = EnvironmentConfig(id=id, **settings)  # type: ignore[arg-type]
    return dataclasses.replace(CATCH, environment=environment)


@pytest.mark.parametrize(
    ("teacher", "run", "message"),
    [
        (
            playing("Catch", kwargs='{"rows": 8}'),
            {},
            r"sees Box\(.*\(8, 5\).* and does .*; this run sees Box\(.*\(10, 5\).* and does",
        ),
        (playing("CartPole-v1"), {}, r"does Discrete\(2\); this run sees .* Discrete\(3\)"),
        (
            dataclasses.replace(CATCH, agent=AgentConfig(core="lstm")),
            {},
            "has the core lstm, whose state is not in this run's",
        ),
        (
            dataclasses.replace(CATCH, agent=AgentConfig(frame_stack=4)),
            {},
            "sees 4 frames at once, this run's agent 1: raise agent.frame_stack",
        ),
        (
            dataclasses.replace(CATCH, algorithm="q_learning", agent=Q),
            {},
            "has Q-values and no policy",
        ),
        (
            playing("Catch", last_reward=True),
            {},
            "also sees last_reward, which this run does not observe",
        ),
        (
            dataclasses.replace(CATCH, objective=ObjectiveConfig(discount=0.5)),
            {},
            "of another return .objective.discount 0.5, here 0.99.: set teacher.value_cost to 0",
        ),
        (
            playing("CartPole-v1", repeat=RepeatConfig(discount=0.9)),
            {"environment": EnvironmentConfig(id="CartPole-v1")},
            "another return .environment.repeat.discount 0.9, here 1.0.: set teacher.value_cost",
        ),
        (
            dataclasses.replace(
                CATCH,
                tasks=TasksConfig(environments=("Catch", 'Catch{"shift": 1}')),
                agent=AgentConfig(popart=True),
            ),
            {},
            "with agent.popart on several tasks, each with values of its own: set teacher.value",
        ),
    ],
)
def test_who_cannot_teach_is_refused_with_the_reason(
    teacher: Config, run: dict[str, object], message: str
) -> None:
    config = dataclasses.replace(CATCH, teacher=TeacherConfig(("a",)))
    config = dataclasses.replace(config, **run)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=message):
        make_plan(config, found=[saved(teacher)] * len(config.teacher.logdirs))


def test_sac_teaches_no_values() -> None:
    config = dataclasses.replace(
        playing("Pendulum-v1"), teacher=TeacherConfig(("a",)), algorithm="impala"
    )
    teacher = saved(dataclasses.replace(playing("Pendulum-v1"), algorithm="sac"))
    with pytest.raises(OptionError, match="trained with sac, which has no baseline: set teacher"):
        make_plan(config, found=[teacher])
    config = dataclasses.replace(config, teacher=TeacherConfig(("a",), value_cost=0.0))
    make_plan(config, found=[teacher])


def test_an_agent_of_several_tasks_teaches_its_policy() -> None:
    """To a run that knows no number of a task."""
    several = TasksConfig(environments=("Catch", 'Catch{"shift": 1}'))
    teacher = dataclasses.replace(CATCH, tasks=several, agent=AgentConfig(popart=True))
    found = saved(teacher)
    config = dataclasses.replace(CATCH, teacher=TeacherConfig(("a",), value_cost=0.0))
    plan = make_plan(config, found=[found])
    (made,) = plan.phases.teachers
    batch = output_judge.blank(plan.unroll_spec)
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    assert np.isfinite(made.outputs(plan.phases.agent, batch).policy).all()


def test_an_algorithm_without_teachers_is_refused() -> None:
    config = dataclasses.replace(CATCH, algorithm="critic", teacher=TeacherConfig(("a",)))
    with pytest.raises(OptionError, match="critic learns from no teacher: leave it out, or learn"):
        rules.validate(config)


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ((), "has 2 teachers, and the number of tasks is 1: give one for each"),
        (("Catch", 'Catch{"shift": 1}'), "2 teachers: set agent.popart, by which"),
    ],
)
def test_several_teachers_need_as_many_tasks_to_tell_apart(
    environments: tuple[str, ...], message: str
) -> None:
    config = dataclasses.replace(
        CATCH,
        teacher=TeacherConfig(("a", "a")),
        tasks=dataclasses.replace(CATCH.tasks, environments=environments),
    )
    with pytest.raises(OptionError, match=message):
        rules.validate(config)


def test_settings_for_teachers_need_one() -> None:
    config = dataclasses.replace(CATCH, teacher=TeacherConfig(policy_cost=5.0))
    with pytest.raises(OptionError, match=r"teacher\.policy_cost is set.*teacher\.logdirs"):
        rules.validate(config)


def test_copies_have_the_settings_of_own_parts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose agent has the same part can make the teacher's; others say what is missing."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "examples"))
    own = dataclasses.replace(CATCH, agent=AgentConfig(torso="custom_torso:Gated"))
    wide = sections.from_dict(
        {**values.to_dict(own), "gated": {"width": 24}}, Allowed(("custom_torso:Gated",))
    )
    teacher, sinks = tmp_path / "teacher", TelemetryConfig(sinks=("no_such:Sink",))
    made = saved(wide)._replace(config=dataclasses.replace(wide, telemetry=sinks))
    checkpoint.save(teacher, made, keep=1)
    run = dataclasses.replace(own, teacher=TeacherConfig((str(teacher),)))
    run = sections.compose(run)
    found = teachers.read(run)
    teachers.keep(run, tmp_path / "run", found)
    shutil.rmtree(teacher)
    again = teachers.read(run, tmp_path / "run")
    assert teachers.digest(again) == teachers.digest(found)
    make_plan(run, found=again)
    run = dataclasses.replace(CATCH, teacher=run.teacher)
    with pytest.raises(ValueError, match="parts of its own, custom_torso:Gated and feed_forward"):
        teachers.read(run, tmp_path / "run")


_TAUGHT = """
import shutil
import impala

def train(frames, teacher, **more):
    settings = {"agent": {"hidden_sizes": [16]}, "teacher": {"logdirs": teacher}, **more}
    return impala.train(
        "catch", "run", serial=True, progress=False, total_frames=frames, **settings
    )

def refused(*arguments, **more):
    try:
        train(*arguments, **more)
    except ValueError as error:
        return str(error)

shutil.rmtree(TEACHER)
assert f"teacher.logdirs: {TEACHER} -> none" in refused(9_000, [])
assert train(9_000, [TEACHER]).frames >= 9_000
assert f"{TEACHER} has no checkpoint" in refused(9_000, [TEACHER], fresh=True)
"""


def test_a_run_keeps_its_teacher(tmp_path: pathlib.Path) -> None:
    """It resumes when the teacher's own run is gone, and not with another teacher."""
    teacher = tmp_path / "teacher"
    checkpoint.save(teacher, saved(CATCH), keep=1)
    words = ["train", "catch", "--logdir", tmp_path / "run", "--learner.log-seconds", "1"]
    words += ["--agent.hidden-sizes", "16", "--teacher.logdirs", teacher]
    assert services.run(*words, "--total-frames", "5_000").returncode == 0
    rows = services.rows(tmp_path / "run")
    row = [row for row in rows if "loss_mean/teacher_policy" in row][-1]
    assert row["loss_mean/teacher_policy"] > 0.0
    assert row["teacher_policy_cost"] < 1.0

    script = f"TEACHER = {str(teacher)!r}\n{_TAUGHT}"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
