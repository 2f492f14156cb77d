"""Violations that neither shapes nor ranges show: each is named, and no honest actor ever is."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import messages
import numpy as np
import pytest
import tree

from actors import messages as of_actors
from actors import policy
from actors.actor import Actor
from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Config, QuarantineConfig
from impala.environments import base
from impala.environments.spaces import Spaces
from impala.parts import build
from impala.types import EnvironmentFault, EnvironmentStep, Nest, Parameters, TimeStep
from learner.checks import checks as checks_module
from learner.checks import continuity
from learner.checks.numbers import Spaces as SpacesOfNumbers
from learner.checks.numbers import is_swapped
from learner.checks.violations import Kind, ProtocolViolation
from learner.data.ingest import Ingest
from learner.fleet.quarantine import Quarantine
from learner.fleet.violations import Violations
from learner.plan import Plan, make_plan
from learner.service.service import LearnerService
from learner.service.terms import terms
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

FIRST, MID, LAST = 0, 1, 2
VERSION = 3


class Flaky(base.Environment):
    """Random observations, rewards and ends; environments crash now and then.

    Args:
      spaces: of observations and actions.
      num_envs: E.
      seed: decides everything.
    """

    def __init__(self, spaces: Spaces, num_envs: int, seed: int) -> None:
        self.observation_space, self.action_space = spaces
        self.num_envs = num_envs
        self._random = np.random.default_rng(seed)
        self._ended = np.zeros(num_envs, bool)

    def reset(self, seed: int) -> TimeStep:
        return base.first_timestep(self._seen(), self.num_envs)

    def send(self, action: Nest) -> None:
        pass

    def recv(self) -> EnvironmentStep:
        random, num_envs, first = self._random, self.num_envs, self._ended
        terminated, cut, crashed = (random.random(num_envs) < p for p in (0.05, 0.03, 0.02))
        crashed &= ~first
        timestep = base.next_timestep(
            self._seen(),
            np.where(first | crashed, 0.0, random.normal(0.0, 3.0, num_envs)),
            terminated & ~first & ~crashed,
            (cut | crashed) & ~first,
            first,
        )
        self._ended = timestep.step_type == LAST
        frames = np.where(first, 0, 1).astype(np.int32)
        info = {"lives": random.integers(0, 3, num_envs)}
        faults = [EnvironmentFault(int(i), "crashed", "gone") for i in np.flatnonzero(crashed)]
        return EnvironmentStep(timestep, frames, info, faults)

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _seen(self) -> Nest:
        def drawn(name: str, space: gym.Space) -> np.ndarray:
            if isinstance(space, gym.spaces.Box):
                low, high = (np.clip(bound, -3.0, 3.0) for bound in (space.low, space.high))
                shape = (self.num_envs, *space.shape)
                numbers = self._random.uniform(low, high, shape)
                return (
                    np.round(numbers).astype(space.dtype)
                    if space.dtype.kind in "iu"
                    else numbers.astype(space.dtype)
                )
            if isinstance(space, gym.spaces.MultiBinary):
                return self._random.integers(0, 2, (self.num_envs, *space.shape)).astype(np.int8)
            assert isinstance(space, gym.spaces.Discrete)
            return space.start + self._random.integers(0, space.n, self.num_envs)

        return base.map_leaves(drawn, "observation", self.observation_space)


@dataclasses.dataclass
class Sent:
    """A message and its tensors by name, which a test may change before it is sent."""

    message: pb.Unrolls
    arrays: dict[str, np.ndarray]


class Story:
    """A learner with its checks, and an actor that plays for it.

    Args:
      config: of the run.
      scale: of the network's weights: how decided its policy is.
      on_violation: `checks.on_violation`.
    """

    def __init__(self, config: Config, scale: float = 3.0, on_violation: str = "warn") -> None:
        self.config = values.overlay(config, {"checks": {"on_violation": on_violation}})
        self.plan: Plan = make_plan(self.config)
        self.agent = self.plan.phases.agent
        rng = np.random.default_rng(5)
        for variable in self.agent.variables:
            fan_in = math.prod(variable.shape[:-1])
            drawn = rng.normal(0.0, scale * fan_in**-0.5, variable.shape)
            drawn *= 0.1 if "/b:" in variable.name else 1.0  # what is seen decides
            if variable.name.startswith(("popart/variance", "progress")):
                drawn = np.full(variable.shape, 0.7)
            variable.assign(drawn)
        self.parameters = [variable.numpy() for variable in self.agent.variables]
        of_run = terms(
            self.config,
            self.agent.variables,
            self.plan.unroll_spec,
            self.plan.played,
            self.plan.spaces,
        )
        self.quarantine = Quarantine(QuarantineConfig())
        self.ingest = Ingest(1 << 20)
        self.service: LearnerService = messages.service(
            terms=of_run, config=self.config, ingest=self.ingest, quarantine=self.quarantine
        )
        self.publish(VERSION)
        self.reply = self.service.join(messages.join_request())
        self.names = [spec.name for spec in self.reply.unroll_specs]

    def publish(self, version: int, values: Sequence[np.ndarray] | None = None) -> None:
        given = self.parameters if values is None else values
        self.service.publish(Parameters(messages.LEARNER, version, 0.0, 0, given))
        self.service.get_parameters(pb.GetParametersRequest())  # somebody gets them

    def play(
        self,
        rounds: int,
        *,
        num_envs: int = 6,
        groups: int = 2,
        version: int = VERSION,
        environment: Callable[[int, int], base.Environment] | None = None,
        compiled: bool = False,
        tasks: Callable[[], int] = lambda: 0,
        values: Sequence[np.ndarray] | None = None,
    ) -> Iterator[Sent]:
        """Yields the messages of an honest actor.

        Args:
          rounds: for each group.
          num_envs: of each group.
          groups: that take turns.
          version: that acts.
          environment: makes those of a task and a group; None: those of the configuration.
          compiled: act by TensorFlow.
          tasks: what to play in the next round.
          values: of the agent, other than the story's.
        """

        def made(task: int) -> list[base.Environment]:
            if environment is not None:
                return [environment(task, group) for group in range(groups)]
            return [
                build.environment(
                    self.plan.played[task].environment,
                    num_envs,
                    joint=self.plan.spaces,
                    task=task,
                )
                for _ in range(groups)
            ]

        acting = (
            policy.Compiled(self.agent)
            if compiled
            else policy.make_policy(self.agent, self.config.agent, self.plan.spaces)
        )
        actor = Actor(
            *(made, acting, self.config.learner.unroll_length, 1),
            random_warm_up=self.config.agent.random_warm_up,
        )
        held = Parameters(messages.LEARNER, version, 0.0, 0, values or self.parameters)
        stream = actor.run(lambda: held, tasks)
        for number in range(1, rounds * groups + 1):
            unrolls = next(stream)
            message, _ = of_actors.unrolls("a", 1, self.reply, unrolls)
            message.sequence = number
            leaves = tree.flatten(
                (unrolls.unroll.timestep, unrolls.unroll.output, unrolls.unroll.core_state)
            )
            yield Sent(message, {n: np.array(x) for n, x in zip(self.names, leaves, strict=True)})

    def send(self, sent: Sent) -> pb.Receipt:
        """Submits a message to the learner."""
        message = pb.Unrolls.FromString(sent.message.SerializeToString())
        message.tensors.extend(codec.encode(sent.arrays.values()))
        receipt = asyncio.run(self.service.submit(message))
        while self.ingest.get(0.0) is not None:
            pass
        return receipt

    @property
    def counts(self) -> Mapping[str, int]:
        (member,) = self.service.get_status().members
        return dict(member.violations)

    @property
    def last(self) -> str:
        (member,) = self.service.get_status().members
        return member.last_violation


def configured(preset: str, **changes: Any) -> Config:
    return values.overlay(PRESETS[preset][1], changes)


# ------------------------------------------------------------------------------ honest actors

SMALL = {"agent": {"hidden_sizes": [8]}, "learner": {"unroll_length": 7}}
HONEST: dict[str, tuple[Config, dict[str, Any]]] = {
    "catch": (configured("catch"), {}),
    "lstm, what happened before, two networks": (
        configured(
            "catch",
            environment={"last_action": True, "last_reward": True, "time_in_episode": True},
            agent={"core": "lstm", "lstm_size": 8, "separate_baseline": True},
        ),
        {},
    ),
    "frame stack": (configured("catch", agent={"frame_stack": 3}), {}),
    "images": (
        configured(
            "catch", agent={"torso": "small", "frame_stack": 2, "core": "lstm", "lstm_size": 8}
        ),
        {"rounds": 12},
    ),
    "epsilon-greedy": (configured("cartpole-q", **SMALL), {}),
    "a box": (configured("pendulum", **SMALL), {"num_envs": 3}),
    "a box, at its edges": (configured("pendulum", **SMALL), {"num_envs": 3, "scale": 8.0}),
    "uniform until the first update": (
        configured("pendulum", **{**SMALL, "agent": {"random_warm_up": True}}),
        {"version": 0},
    ),
    "learned repeat": (
        configured("cartpole", environment={"repeat": {"most": 4, "learned": True}}, **SMALL),
        {},
    ),
    "several tasks, masks, PopArt": (
        configured(
            "cartpole",
            tasks={"environments": ["CartPole-v1", "Acrobot-v1"], "order": "simultaneous"},
            agent={"popart": True, "hidden_sizes": [8]},
        ),
        {"rotates": True},
    ),
}


def play_honestly(story: Story, how: dict[str, Any]) -> Iterator[Sent]:
    turns = iter(range(10**6))
    told = {"rounds": 40, **how}
    told.pop("scale", None)
    if told.pop("rotates", False):
        told["tasks"] = lambda: next(turns) // 3 % 2
    return story.play(told.pop("rounds"), **told)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_actor_is_never_named(name: str) -> None:
    """Every message is accepted by a learner that refuses violations."""
    config, how = HONEST[name]
    story = Story(config, how.get("scale", 3.0), on_violation="refuse")
    if how.get("version") == 0:
        story.publish(0)
    statuses = [story.send(sent).status for sent in play_honestly(story, how)]
    assert (set(statuses), story.counts) == ({pb.STATUS_ACCEPTED}, {}), story.last


TASKS = configured(
    "cartpole",
    tasks={"environments": ["CartPole-v1", "Acrobot-v1"], "order": "simultaneous"},
    **SMALL,
)


@pytest.mark.parametrize("config", [configured("cartpole", **SMALL), TASKS], ids=["", "masks"])
def test_environments_that_restart_name_nobody(config: Config) -> None:
    """Given environments that end, are cut off and crash at random, with any rewards and masks."""
    story = Story(config, on_violation="refuse")
    spaces = story.plan.spaces
    faults = 0
    for sent in story.play(60, environment=lambda task, group: Flaky(spaces, 5, 7 + group)):
        faults += len(sent.message.environment_faults)
        assert story.send(sent).status == pb.STATUS_ACCEPTED, story.last
    assert story.counts == {} and faults > 20


def test_messages_that_come_again_or_get_lost_name_nobody() -> None:
    """Given groups whose messages are resent, rejected, or went to a learner of before."""
    story = Story(configured("cartpole", **SMALL), on_violation="refuse")
    rng = np.random.default_rng(0)
    rejected = 0
    for sent in story.play(80, groups=3):
        if rng.random() < 0.1:  # what the environment gave cannot be used: the unroll is lost
            spoilt = Sent(pb.Unrolls.FromString(sent.message.SerializeToString()), {**sent.arrays})
            spoilt.arrays["timestep/reward"] = np.full_like(sent.arrays["timestep/reward"], 1e9)
            assert story.send(spoilt).reason == pb.REASON_RANGE
            story.quarantine._records.clear()
            rejected += 1
            continue
        assert story.send(sent).status == pb.STATUS_ACCEPTED, story.last
        while rng.random() < 0.3:
            assert story.send(sent).status == pb.STATUS_DUPLICATE
    assert story.counts == {} and rejected > 10


# ------------------------------------------------------------------------------- the violations


def continuous(
    sents: Sequence[Sent], groups: int, change: Callable[[dict[str, np.ndarray]], None]
) -> None:
    """Changes the rows of each group as if they were one unroll, [N * T + 1, E, ...]."""
    for group in range(groups):
        own = sents[group::groups]
        length = len(own[0].arrays["timestep/reward"]) - 1
        rows = {
            name: np.concatenate([own[0].arrays[name][:1], *(x.arrays[name][1:] for x in own)])
            for name in own[0].arrays
            if not name.startswith("core_state")
        }
        change(rows)
        for number, sent in enumerate(own):
            at = slice(number * length, (number + 1) * length + 1)
            sent.arrays.update({name: array[at].copy() for name, array in rows.items()})


def shifted(*names: str, by: int) -> Callable[[Sequence[Sent]], None]:
    def change(rows: dict[str, np.ndarray]) -> None:
        for name in names:
            rows[name] = np.roll(rows[name], by, axis=0)

    return lambda sents: continuous(sents, 2, change)


def each(change: Callable[[Sent], None]) -> Callable[[Sequence[Sent]], None]:
    def changed(sents: Sequence[Sent]) -> None:
        for sent in sents:
            change(sent)

    return changed


def swapped(sent: Sent) -> None:
    for name, array in sent.arrays.items():
        if array.dtype.kind == "f":
            sent.arrays[name] = array.byteswap()


def all_swapped(sent: Sent) -> None:
    for name, array in sent.arrays.items():
        sent.arrays[name] = array.byteswap()


def other_actions(sent: Sent) -> None:
    action = sent.arrays["output/action"]
    sent.arrays["output/action"] = np.random.default_rng(3).integers(0, 3, action.shape)


def without_overlap(sents: Sequence[Sent]) -> None:
    """Each unroll begins with the row after the last one's: it has T + 1 rows of its own."""
    for group in range(2):
        own = sents[group::2]
        length = len(own[0].arrays["timestep/reward"]) - 1
        rows = {
            name: np.concatenate([own[0].arrays[name][:1], *(x.arrays[name][1:] for x in own)])
            for name in own[0].arrays
        }
        for number, sent in enumerate(own[: len(own) - len(own) // (length + 1) - 1]):
            at = slice(number * (length + 1), (number + 1) * (length + 1))
            sent.arrays.update({name: array[at].copy() for name, array in rows.items()})
            is_step = sent.arrays["timestep/step_type"][1:] != FIRST
            sent.message.frames[:] = is_step.sum(axis=0).tolist()


def rewards_on_seams(rows: dict[str, np.ndarray]) -> None:
    is_first = rows["timestep/step_type"] == FIRST
    is_first[0] = False
    for name in ("timestep/reward", "timestep/discount"):
        rows[name][is_first] = np.roll(rows[name], 1, axis=0)[is_first]


def seam_frames(sent: Sent) -> None:
    sent.message.frames[:] = [len(sent.arrays["timestep/reward"]) - 1] * sent.message.num_envs


def no_frames(sent: Sent) -> None:
    sent.message.frames[:] = [0] * sent.message.num_envs


def no_episodes(sent: Sent) -> None:
    del sent.message.episodes[:]


def more_episodes(sent: Sent) -> None:
    sent.message.episodes.add(episode_return=1.0, length=9, frames=9)


def other_lengths(sent: Sent) -> None:
    for episode in sent.message.episodes:
        episode.length, episode.frames = episode.length + 1, episode.frames + 1


def other_returns(sent: Sent) -> None:
    for episode in sent.message.episodes:
        episode.episode_return *= 0.5


def scaled(sent: Sent) -> None:
    sent.arrays["timestep/observation"] *= 255


# The runs in which a violation is made, what is changed in honest messages, and what else may be
# named, since one violation can be seen in several ways.
CATCH, CARTPOLE = configured("catch"), configured("cartpole", **SMALL)
VIOLATIONS: dict[str, tuple[Kind, Config, Callable[[Sequence[Sent]], None], set[Kind]]] = {
    "1 actions a row early": (Kind.BEHAVIOUR_POLICY, CATCH, shifted("output/action", by=-1), set()),
    "1 actions a row late": (Kind.BEHAVIOUR_POLICY, CATCH, shifted("output/action", by=1), set()),
    "2 big-endian floats": (Kind.BYTE_ORDER, CARTPOLE, each(swapped), set()),
    "2 big-endian floats, few": (Kind.BYTE_ORDER, CATCH, each(swapped), set()),
    "2 big-endian numbers": (Kind.BYTE_ORDER, CATCH, each(all_swapped), set()),
    "3 other actions": (Kind.BEHAVIOUR_POLICY, CATCH, each(other_actions), {Kind.ROW_0}),
    "5 no overlap": (Kind.ROW_0, CARTPOLE, without_overlap, {Kind.EPISODES, Kind.EPISODE_RETURN}),
    "6 rewards on seams": (
        Kind.SEAM,
        CATCH,
        lambda sents: continuous(sents, 2, rewards_on_seams),
        {Kind.EPISODE_RETURN},
    ),
    "7 frames of seams": (Kind.SEAM_FRAMES, CATCH, each(seam_frames), set()),
    "8 no frames": (Kind.MISSING_FRAMES, CATCH, each(no_frames), set()),
    "9 no episodes": (Kind.EPISODES, CATCH, each(no_episodes), set()),
    "9 invented episodes": (Kind.EPISODES, CATCH, each(more_episodes), set()),
    "9 other lengths": (Kind.EPISODES, CATCH, each(other_lengths), set()),
    "10 other returns": (Kind.EPISODE_RETURN, CATCH, each(other_returns), set()),
    "11 scaled": (Kind.OBSERVATION, CATCH, each(scaled), {Kind.BEHAVIOUR_POLICY}),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_named(name: str) -> None:
    kind, config, make, besides = VIOLATIONS[name]
    story = Story(config)
    sents = list(story.play(60))
    make(sents)
    for sent in sents:
        story.send(sent)
    story.quarantine._records.clear()
    assert kind in story.counts, story.counts
    assert set(story.counts) - besides == {kind}, story.last
    assert story.service.get_status().violations == story.counts


def test_an_action_that_is_masked_is_impossible() -> None:
    story = Story(TASKS)  # CartPole has two of Acrobot's three actions
    for number, sent in enumerate(story.play(4)):
        if number % 2:
            sent.arrays["output/action"][2] = 2
        story.send(sent)
    assert story.counts == {Kind.IMPOSSIBLE_ACTION: 4}
    assert "6 actions are impossible by output/policy of their row" in story.last


def test_an_epsilon_beyond_1_makes_no_action_possible() -> None:
    story = Story(configured("cartpole-q", **SMALL))
    for sent in story.play(3):
        policy = sent.arrays["output/policy"]
        policy[2, :, -1] = 3.0  # by which the best one has less than no probability
        sent.arrays["output/action"][2] = policy[2, :, :-1].argmax(axis=-1)
        story.send(sent)
    assert Kind.IMPOSSIBLE_ACTION in story.counts


@pytest.mark.parametrize("kind", ["1 actions a row early", "10 other returns"])
def test_violations_are_refused_and_blamed_if_asked_for(kind: str) -> None:
    story = Story(CATCH, on_violation="refuse")
    sents = list(story.play(40))
    VIOLATIONS[kind][2](sents)
    receipts = [story.send(sent) for sent in sents]
    assert receipts[-1].reason == pb.REASON_QUARANTINED
    if kind == "10 other returns":
        refused = [receipt for receipt in receipts if receipt.reason == pb.REASON_MEANING]
        assert len(refused) == 3 and "episode_return" in refused[0].detail


def test_violations_are_not_looked_for_if_not_asked_for() -> None:
    story = Story(CATCH, on_violation="off")
    for sent in story.play(10):
        no_episodes(sent)
        assert story.send(sent).status == pb.STATUS_ACCEPTED
    assert story.counts == {}


def test_repeated_unpublished_versions_are_a_violation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that is started over refuses some of an honest actor's, until it has pulled."""
    now = [0.0]
    violations = Violations(lambda: now[0])
    for _ in range(100):  # in an instant
        violations.refused_version("a", "version 9")
    violations.accepted("a")
    for _ in range(40):
        now[0] += 3.0
        violations.refused_version("b", "version 9")
    assert violations.of("a").counts == {}
    assert violations.of("b") == ({Kind.VERSION: 8}, "version: version 9")
    assert [record.getMessage() for record in caplog.records] == [
        f"b makes a violation (version, number {number}): version 9" for number in (1, 2, 4, 8)
    ]


# ----------------------------------------------------------------------- the checks themselves


def test_a_caller_with_ever_new_names_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    violations = Violations(lambda: now[0])
    for number in range(2000):  # a minute of one host's Joins
        now[0] += 0.03
        violations.add(f"a{number}", ProtocolViolation(Kind.VERSION, "x"))
    assert 32 <= len(caplog.messages) <= 32 + 6
    assert violations.totals() == {Kind.VERSION: 2000}


HONEST_NUMBERS = (
    np.zeros(9, np.float32),
    np.array([1e-12, -3e-9, 0.0], np.float32),
    np.array([0.1, -1e9, 3.0], np.float32),
    np.array([1e10, 2e10], np.float64),
    np.array([2**40, -(2**39)], np.int64),
    np.array([0, 255], np.uint8),
    1e-36 * 0.8 ** np.arange(30, dtype=np.float32),  # something that fades away
    np.array([], np.float32),
    np.random.default_rng(0).normal(size=100).astype(np.float32),
)


@pytest.mark.parametrize("array", HONEST_NUMBERS)
def test_plausible_numbers_are_the_right_way_round(array: np.ndarray) -> None:
    assert not is_swapped(np.resize(array, 16) if array.size else array)  # fewer are not judged


def test_observations_are_in_their_space_or_a_little_beside_it() -> None:
    numbers = SpacesOfNumbers(
        [
            pb.Space(name="box", kind=pb.Space.KIND_BOX, low=[-1.0, 0.0], high=[1.0, math.inf]),
            pb.Space(name="bytes", kind=pb.Space.KIND_BOX, low=[0], high=[1]),
            pb.Space(name="choice", kind=pb.Space.KIND_DISCRETE, start=[2], n=[3]),
        ]
    )

    def outside(name: str, *values: float, dtype: Any = np.float32) -> ProtocolViolation | None:
        return numbers.outside(name, np.array(values, dtype).reshape(1, 1, -1))

    assert outside("box", 1.2, 1e9) is outside("box", -1.5, -0.5) is None
    for wrong in ((4.0, 0.0), (0.0, -2.0), (255.0, 255.0)):
        assert outside("box", *wrong) is not None
    assert outside("bytes", 0, 1, dtype=np.uint8) is None
    found = outside("bytes", 0, 255, dtype=np.uint8)
    assert found is not None and "bytes holds 255, its space is at most 0 to 1" in found.detail
    assert outside("choice", 2, 4, dtype=np.int64) is None
    assert outside("choice", 5, dtype=np.int64) is not None


def test_resets_in_every_unroll_are_named_once_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert continuity._MOST_ENVS == 4096
    monkeypatch.setattr(continuity, "_MOST_ENVS", 60)
    story = Story(CATCH)
    (first,) = story.play(1, groups=1)
    checks = story.service._checks
    assert checks is not None
    found = []
    for number in range(1, 21):
        first.message.sequence = number
        first.arrays["output/baseline"][-1] += 1.0  # no two end alike
        found += checks.check(first.message, list(first.arrays.values()))
    assert {violation.kind for violation in found} == {Kind.ROW_0} and len(found) == 10


def test_groups_of_other_sizes_are_others_whatever_their_checksums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuity, "_checksum", lambda *_: 7)  # as a sender could forge it
    story = Story(CATCH)
    (sent,) = story.play(1, groups=1)
    checks, sizes = story.service._checks, (sent.message.num_envs, 2)
    assert checks is not None and sizes[0] > 2
    for number, num_envs in enumerate(sizes, 1):
        sent.message.sequence, sent.message.num_envs = number, num_envs
        of_core = len(checks._rows)
        arrays = [
            array[:, :num_envs] if i < of_core else array[:num_envs]
            for i, array in enumerate(sent.arrays.values())
        ]
        checks.check(sent.message, arrays)
    assert checks._num_envs == sum(sizes)


def test_memory_of_actors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "_MOST_ENVS", 30)
    story = Story(CATCH)
    (sent,) = story.play(1, groups=1)
    checks = story.service._checks
    assert checks is not None
    for number in range(20):
        sent.message.actor = f"a{number}"
        assert checks.check(sent.message, list(sent.arrays.values())) == []
    assert len(checks._senders) == 5 and checks._num_envs == 30
    monkeypatch.setattr(checks_module, "_MOST_SENDERS", 3)
    assert checks.check(sent.message, list(sent.arrays.values())) == []
    assert len(checks._senders) == 3
