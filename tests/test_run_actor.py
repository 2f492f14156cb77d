"""An actor process as a user starts it, against the fake learner: it acts, drains and ends."""

import contextlib
import copy
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import services
from fake_learner import FakeLearner

from impala.config.schema import (
    ActorConfig,
    AgentConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
)
from impala.parts import build
from impala.runtime.failures import Shown
from impala.schedule import tasks
from learner.service import settings
from protos import codec

PATIENCE = 120.0  # seconds in which neither an actor works nor its learner hears of it
UNROLL_LENGTH = 5
_started: list[subprocess.Popen[str]] = []


@pytest.fixture
def learner() -> Iterator[FakeLearner]:
    """A learner of Catch."""
    with learner_of_catch(ActorConfig(num_envs=4, num_groups=2)) as learner:
        yield learner


@contextlib.contextmanager
def learner_of_catch(actor: ActorConfig) -> Iterator[FakeLearner]:
    environment, agent = EnvironmentConfig(id="Catch"), AgentConfig(hidden_sizes=(8,))
    with contextlib.closing(build.environment(environment, 1)) as catch:
        spaces = catch.observation_space, catch.action_space
    built = build.agent(agent, *spaces)
    evaluator = EvaluatorConfig(every_frames=100, episodes=3)
    config = Config(environment=environment, agent=agent, actor=actor, evaluator=evaluator)
    with FakeLearner(
        settings=json.loads(
            settings.for_actors(config, tasks.make(config.environment, config.tasks))
        ),
        unroll_length=UNROLL_LENGTH,
        unroll_specs=codec.specs(build.unroll_spec(built, *spaces, UNROLL_LENGTH)),
        parameters=[variable.numpy() for variable in built.variables],
    ) as learner:
        yield learner


def start(learner: FakeLearner, before: str = "", **options: object) -> subprocess.Popen[str]:
    run = "sys.exit(run_actor(sys.argv[1], Options(**{})))"
    code = f"import sys; from actors.run import Options, run_actor; {run}"
    actor = subprocess.Popen(
        [sys.executable, "-c", before + code.format(options), learner.address],
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(actor)
    return actor


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    for actor in _started:
        with actor:  # which closes its pipe
            actor.kill()
    _started.clear()


def end_of(actor: subprocess.Popen[str]) -> str:
    """Waits for an actor's end, and returns its log."""
    services.wait_for("the end of an actor", lambda: actor.poll() is not None)
    return actor.communicate()[1]


def test_it_sends_unrolls_fetches_parameters_and_drains(learner: FakeLearner) -> None:
    actor = start(learner, before="import actors.client as c; c.POLL_SECONDS = 3600.0; ")
    learner.wait_for(lambda: len(learner.messages) >= 4, PATIENCE)
    learner.publish(1)
    learner.wait_for(lambda: learner.messages[-1].parameter_version == 1)
    actor.send_signal(signal.SIGTERM)
    log = end_of(actor)
    assert actor.returncode == 0, log
    assert [m.sequence for m in learner.messages] == list(range(1, len(learner.messages) + 1))
    for message in learner.messages:
        assert message.num_envs == 2
        specs = codec.with_environments(learner.unroll_specs, 0, message.num_envs)
        assert len(codec.decode(message.tensors, specs)) == len(learner.unroll_specs)


def test_it_ends_on_a_signal_when_the_learner_is_away(learner: FakeLearner) -> None:
    actor = start(learner, "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL);")
    learner.wait_for(lambda: len(learner.messages) >= 1, PATIENCE)
    learner.__exit__()
    actor.send_signal(signal.SIGHUP)
    log = end_of(actor)
    assert actor.returncode == 0, log


def test_one_that_waits_for_the_next_run_asks_quietly(learner: FakeLearner) -> None:
    """Given a run that is over, the next one, and its end."""
    often = "import logging; from actors import run; logging.basicConfig(level='INFO'); "
    learner.finished = True
    actor = start(learner, often + "run._IDLE_SECONDS = 0.1; ", when_finished="idle")
    learner.wait_for(lambda: len(learner.joins) >= 3, PATIENCE)
    learner.finished = False
    learner.wait_for(lambda: len(learner.messages) >= 1, PATIENCE)
    joins = len(learner.joins)
    learner.finished = True
    learner.wait_for(lambda: len(learner.joins) >= joins + 3, PATIENCE)
    actor.send_signal(signal.SIGTERM)
    log = end_of(actor)
    incarnations = [each.incarnation for each in learner.joins]
    before, after = set(incarnations[:joins]), set(incarnations[joins:])
    assert len(before) == len(after) == 1 and before != after
    assert log.count("has finished") == 2, log


HANG_IN_THE_SECOND_UNROLL = """
import contextlib, itertools, time
from impala.runtime import hang
from impala.environments.catch import Catch

# In the first unroll, after the setup, the agent is traced, which takes long beside a load.
watched, unwatched = hang.HangWatch.watched, iter([contextlib.nullcontext()] * 2)
hang.HangWatch.watched = lambda self: next(unwatched, None) or watched(self)
step, steps = Catch.recv, itertools.count()
Catch.recv = lambda self: step(self) if next(steps) < {steps} else time.sleep(1000)
"""


def test_it_ends_and_says_where_when_an_environment_hangs(learner: FakeLearner) -> None:
    learner.settings["actor"]["hang_seconds"] = 2.0
    both_groups = 2 * UNROLL_LENGTH
    actor = start(learner, HANG_IN_THE_SECOND_UNROLL.format(steps=both_groups - 1))
    log = end_of(actor)
    assert actor.returncode == 1
    assert "Timeout" in log and "in <lambda>" in log
    assert "actor.hang_seconds is 2: in group 1 of task 0" in log
    assert len(learner.messages) <= 1


def test_who_insists_ends_an_actor_whose_environment_hangs(learner: FakeLearner) -> None:
    actor = start(learner, HANG_IN_THE_SECOND_UNROLL.format(steps=2 * UNROLL_LENGTH))
    learner.wait_for(lambda: len(learner.messages) >= 1, PATIENCE)
    for _ in range(2):
        actor.send_signal(signal.SIGINT)
        time.sleep(1.1)
    end_of(actor)
    assert actor.returncode == -signal.SIGINT


SLOW = """
import time
from impala.runtime import hang
from impala.environments.catch import Catch

hang._SLOW_SECONDS = 0.0
step = Catch.recv
Catch.recv = lambda self: time.sleep(5.0) or step(self)
"""


def test_it_says_when_environments_are_why_no_unroll_comes(
    learner: FakeLearner, tmp_path: pathlib.Path
) -> None:
    shown = Shown(tmp_path / "failures")
    start(learner, f"import pathlib; from pathlib import PosixPath; {SLOW}", failures=shown.path)
    services.wait_for("a notice", shown.path.exists)
    notice = json.loads(shown.path.read_text())
    assert re.match("No unroll for .* s, since environments take .*% of the actors' time", notice)
    assert notice.endswith("more actors help (--num-actors).")


SLEEP_IN_A_STEP = """
import pathlib, time
from pathlib import PosixPath
from impala.environments.catch import Catch

Catch.recv = lambda self: pathlib.Path("{}").touch() or time.sleep(1000.0)
"""


def test_an_evaluator_that_is_to_end_within_a_step_has_not_failed(
    learner: FakeLearner, tmp_path: pathlib.Path
) -> None:
    learner.snapshot(0)
    stepping, failures = tmp_path / "stepping", tmp_path / "failures"
    before = SLEEP_IN_A_STEP.format(stepping)
    evaluator = start(learner, before, role="evaluator", failures=failures)
    services.wait_for("a step", stepping.exists, PATIENCE)
    evaluator.send_signal(signal.SIGTERM)
    log = end_of(evaluator)
    assert evaluator.returncode == 0, log
    assert not failures.exists()


HANG_IN_THE_SECOND_EVALUATION = """
import itertools, time
from impala.environments.catch import Catch

step, steps = Catch.recv, itertools.count()
Catch.recv = lambda self: time.sleep(0.3 if next(steps) < 12 else 1000.0) or step(self)
"""


@pytest.mark.slow
def test_an_evaluator_ends_when_a_step_hangs(
    learner: FakeLearner,
) -> None:
    learner.settings["actor"]["hang_seconds"] = 2.0
    for frames in (0, 100):  # of nine steps in all, each
        learner.snapshot(frames)
    evaluator = start(learner, HANG_IN_THE_SECOND_EVALUATION, role="evaluator")
    log = end_of(evaluator)
    assert evaluator.returncode == 1
    assert "Timeout" in log and "in <lambda>" in log
    assert "no step for" in log and "actor.hang_seconds is 2" in log
    assert [each.frames for each in learner.evaluations] == [0]


HANG_IN_A_CLOSE = """
import itertools, time
from impala.environments.catch import Catch

closes = itertools.count()
Catch.close = lambda self: None if next(closes) < {} else time.sleep(1000.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("role", "closes"), [("evaluator", 1), ("actor", 1), ("actor", 0)])
def test_it_ends_when_a_close_hangs(learner: FakeLearner, role: str, closes: int) -> None:
    """Given that of the environment that was played, or of the first, which shows its spaces."""
    learner.settings["actor"]["hang_seconds"] = 2.0
    learner.snapshot(0)
    before = HANG_IN_A_CLOSE.format(closes)
    if is_played := role == "actor" and closes > 0:
        before += HANG_IN_THE_SECOND_UNROLL.format(steps="float('inf')")
    process = start(learner, before, role=role)
    if is_played:
        learner.wait_for(lambda: len(learner.messages) >= 1, PATIENCE)
        process.send_signal(signal.SIGTERM)
    log = end_of(process)
    assert process.returncode == 1
    assert "Timeout" in log and "in <lambda>" in log
    assert re.search("actor.hang_seconds( times tasks)? is 2", log)


@pytest.mark.slow
def test_waiting_for_parameters_is_no_hanging_environment(
    learner: FakeLearner,
) -> None:
    learner.settings["actor"]["hang_seconds"] = 1.0
    learner.replies.clear()
    actor = start(learner)
    learner.wait_for(lambda: len(learner.pulls) == 1, PATIENCE)
    with pytest.raises(subprocess.TimeoutExpired):
        actor.wait(timeout=4.0)
    actor.send_signal(signal.SIGTERM)
    log = end_of(actor)
    learner.replies.set()
    assert actor.returncode == 0, log


def test_environments_that_the_groups_cannot_share_are_refused(learner: FakeLearner) -> None:
    done = services.run("actor", "--learner", learner.address, "--num-envs", 3)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "impala: --num-envs is 3, but the learner's actor.num_groups is 2, and the groups have the "
        "same size: give a multiple of 2, such as 4."
    )


def test_whatever_ends_an_actor_is_noted_for_train(
    learner: FakeLearner, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Given environments that cannot be made, and a learner that is too different."""
    shown = Shown(tmp_path / "failures")
    words = ("actor", "--learner", learner.address, "--failures", shown.path)
    assert services.run(*words, "--render").returncode == 1
    learner.unroll_specs[0].shape[0] += 1
    assert services.run(*words).returncode == 1
    shown.show()
    window, spec = caplog.messages
    assert window.startswith("An actor has failed: ValueError: Catch has no window")
    assert spec.startswith("An actor has failed: LearnerError: unroll tensor")
    assert shown.last.startswith("LearnerError: unroll tensor")


def test_an_evaluator_plays_the_same_episodes_for_every_snapshot(learner: FakeLearner) -> None:
    for frames, seed in ((0, 3), (100, 3), (200, 4)):
        learner.snapshot(frames, seed=seed)
    evaluator = start(learner, role="evaluator")
    learner.wait_for(lambda: len(learner.evaluations) == 3, PATIENCE)
    evaluator.send_signal(signal.SIGTERM)
    log = end_of(evaluator)
    assert evaluator.returncode == 0, log
    first, second, other = learner.evaluations
    assert [each.frames for each in learner.evaluations] == [0, 100, 200]
    assert [episode.length for episode in first.episodes] == [9, 9, 9]
    assert first.episodes == second.episodes  # the parameters were equal
    assert first.episodes != other.episodes
    assert not learner.pulls


@pytest.mark.slow
def test_an_evaluator_takes_the_settings_of_a_new_learner(
    learner: FakeLearner,
) -> None:
    """Given a learner that is started again with fewer episodes, which end earlier."""
    learner.snapshot(0)
    evaluator = start(learner, role="evaluator")
    learner.wait_for(lambda: len(learner.evaluations) == 1, PATIENCE)
    learner.__exit__()
    settings = copy.deepcopy(learner.settings)
    settings["evaluator"] |= {"episodes": 2, "max_steps": 4}
    with FakeLearner(
        incarnation=6,
        settings=settings,
        unroll_length=UNROLL_LENGTH,
        unroll_specs=learner.unroll_specs,
        parameters=learner.parameters,
        port=learner.port,
    ) as again:
        again.snapshot(100)
        again.wait_for(lambda: len(again.evaluations) == 1, PATIENCE)
    evaluator.send_signal(signal.SIGTERM)
    assert evaluator.wait() == 0
    assert [episode.length for episode in learner.evaluations[0].episodes] == [9, 9, 9]
    assert [episode.length for episode in again.evaluations[0].episodes] == [4, 4]
