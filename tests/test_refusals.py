"""Arguments that cannot be right are refused, in words that name the value and what to give."""

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vtrace
from actors.actor import Actor
from impala.agents import distributions
from impala.agents.cores import Core
from impala.agents.normaliser import Normaliser
from impala.agents.torsos import Torso
from impala.config import rules, values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.environments import joint, to_gymnasium, wrappers
from impala.environments.catch import Catch
from impala.environments.external import External
from impala.parts import checks
from impala.play.evaluation import play_episodes
from impala.runtime.supervisor import Program, Supervisor
from learner import peer_config
from learner.update.replicas import replicas_of

CHOICE, OTHER = gym.spaces.Discrete(3), gym.spaces.Discrete(2)
BOX, BITS = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.MultiBinary(3)
PEERS = ["a:1", "b:2"]


def configured(preset: str = "catch", **changes: Any) -> Config:
    return values.overlay(PRESETS[preset][1], changes)


def vtrace_of(**changed: Any) -> None:
    rows = tf.zeros([3, 2])
    names = ("log_rhos", "discounts", "rewards", "values")
    usual = {**dict.fromkeys(names, rows), "bootstrap_value": tf.zeros([2])}
    vtrace.from_importance_weights(**{**usual, **changed})


class Peeks(Core):
    """The last row acts upon all."""

    def initial_state(self, batch_size: Any) -> Any:
        return (tf.zeros([batch_size, 1]),)

    def __call__(self, inputs: tf.Tensor, is_first: tf.Tensor, state: Any) -> Any:
        return inputs + inputs[-1:], state


class Grows(Peeks):
    def __call__(self, inputs: tf.Tensor, is_first: tf.Tensor, state: Any) -> Any:
        return inputs, (tf.zeros([2, 2]),)


class Blind(Torso):
    sees = "nothing"  # type: ignore[assignment]

    def __call__(self, inputs: Any) -> tf.Tensor:
        raise AssertionError


def environment(**what: Any) -> wrappers.Checked:
    """Catch that reports something else than it should."""

    class Wrong(Catch):
        def recv(self) -> Any:
            step = super().recv()
            return step._replace(timestep=step.timestep._replace(**what))

        def render(self) -> np.ndarray:
            return np.zeros((2, 2))

    made = wrappers.Checked(Wrong(2), "Wrong")
    made.reset(0)
    made.send(np.zeros(2, np.int64))
    return made


def single() -> to_gymnasium.SingleEnv:
    return to_gymnasium.SingleEnv(lambda: Catch(1))


def played_to_its_end() -> to_gymnasium.SingleEnv:
    made = single()
    made.reset(seed=0)
    while not made.step(1)[2]:
        pass
    return made


def start_twice(program: Program) -> None:
    with Supervisor() as supervisor:
        supervisor.start(program)
        supervisor.start(program)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: vtrace_of(lambda_=2.0), r"lambda_ is 2.0; it must be from 0 to 1"),
    "a vector": (lambda: vtrace_of(log_rhos=tf.zeros([3])), r"log_rhos has shape \(3,\)"),
    "no steps": (lambda: vtrace_of(log_rhos=tf.zeros([0, 2])), "T must be 1 or more"),
    "whole numbers": (lambda: vtrace_of(values=tf.zeros([3, 2], tf.int32)), "values is int32"),
    "two dtypes": (lambda: vtrace_of(values=tf.zeros([3, 2], tf.float64)), "cast one"),
    "other parts": (
        lambda: joint.join(["a", "b"], [(gym.spaces.Dict(x=BOX), CHOICE), (BITS, CHOICE)], False),
        "their observations are Dict",
    ),
    "a mask beside more actions": (
        lambda: joint.join(
            ["a", "b"],
            [
                (gym.spaces.Dict(observation=BOX, action_mask=BITS), each)
                for each in (CHOICE, OTHER)
            ],
            False,
        ),
        "a has an action_mask of its own",
    ),
    "no numbers to normalise": (
        lambda: Normaliser(BITS),
        "has no floating-point numbers",
    ),
    "a core that looks ahead": (lambda: checks.check_core("p", Peeks(), 2), "three rows at once"),
    "a core whose state grows": (lambda: checks.check_core("p", Grows(), 2), "the same structure"),
    "a torso that sees nothing": (lambda: checks.check_torso("b", Blind(), BOX), "sees of b is"),
    "an unroll of nothing": (lambda: Actor(lambda task: [], None, 0, 1), "unroll_length is 0"),  # type: ignore[arg-type]
    "no episodes": (lambda: play_episodes(Catch(1), None, 0, True, 1), "num_episodes is 0"),  # type: ignore[arg-type]
    "no image": (lambda: environment().render(), r"Wrong shows float64 \[2, 2\]"),
    "an infinite reward": (
        lambda: environment(reward=np.array([0.0, np.inf], np.float32)).recv(),
        "the reward of environment 1 is inf",
    ),
    "another dtype": (
        lambda: environment(observation=np.zeros((2, 10, 5), np.int64)).recv(),
        "observation is int64, expected uint8",
    ),
    "a step after the end": (lambda: played_to_its_end().step(0), "episode has ended: call reset"),
    "a seed for each": (
        lambda: to_gymnasium.SeveralEnvs(lambda: Catch(2)).reset(seed=[1, 2]),
        "Give one seed",
    ),
    "a played External": (lambda: External(1, BOX, CHOICE).reset(0), "is played by programs"),
    "a space of nothing": (
        lambda: External(1, {"type": "Tuple", "spaces": [{"type": "Disc"}]}, CHOICE),
        "observation_space of External is",
    ),
    "one of one peer": (lambda: peer_config.number([], 1), "there is one learner"),
    "peers at port 0": (lambda: peer_config.number(["a:0", "b:2"], 0), "a:0 needs a port"),
    "a peer twice": (lambda: peer_config.number(["a:1", "a:1"], 0), "are not all different"),
    "a host without number": (lambda: peer_config.number(PEERS, host="box"), "say --peer N"),
    "the third of two": (lambda: peer_config.number(PEERS, host="pod-2"), "the last one is 1"),
    "peers with devices": (
        lambda: peer_config.check(configured(learner={"devices": 2}), 2),
        "each of them uses one device",
    ),
    "more devices than there are": (
        lambda: replicas_of(configured(learner={"devices": 9999})),
        "learner.devices is 9999, but TensorFlow finds",
    ),
    "a policy for Q": (
        lambda: rules.validate(configured("cartpole-q", agent={"policy": "stochastic"})),
        "agent.policy is stochastic, which q_learning cannot learn",
    ),
    "PopArt with Q": (
        lambda: rules.validate(configured("cartpole-q", agent={"popart": True})),
        "does not normalise a baseline",
    ),
    "SAC with a memory": (
        lambda: rules.validate(configured("pendulum", agent={"core": "lstm"})),
        "agent.core is lstm, but sac sees one observation at a time",
    ),
    "a run that ends before replay is warm": (
        lambda: rules.validate(configured("atari", total_frames=1_000)),
        "1,000 or more to warm up .mix.warm_up_unrolls 100.: nothing would be learned",
    ),
    "a phase that ends before replay is warm": (
        lambda: rules.validate(configured("cartpole", phases=["critic:900", "impala"])),
        "critic has 900 frames",
    ),
    **{
        f"a box from {low} to {high}": (
            functools.partial(distributions.for_space, gym.spaces.Box(low, high, (1,), np.float64)),
            "float32 cannot tell its values apart",
        )
        for low, high in ((1e8, 1e8 + 1.0), (-1e300, 1e300), (0.0, 1e-40))
    },
    "a clip that float32 cannot hold": (
        lambda: rules.validate(configured(optimiser={"clip_global_norm": 1e38})),
        r"clip_global_norm is 1e\+38; it must be from 0 to 1e\+30",
    ),
    "a name twice": (lambda: start_twice(Program("a", ["sleep", "9"])), "the name of two programs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_a_peer_has_the_number_of_its_pod() -> None:
    assert peer_config.number(PEERS, host="learner-1.default.svc") == 1
    assert replicas_of(configured(learner={"devices": "all"})).count >= 1


def test_descriptions_of_spaces_may_be_nested() -> None:
    parts = [{"type": "MultiDiscrete", "nvec": [2, 3]}, {"type": "Box", "shape": [2]}]
    made = External(1, {"type": "Tuple", "spaces": parts}, CHOICE)
    assert made.observation_space == gym.spaces.Tuple(
        [gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Box(-np.inf, np.inf, (2,))]
    )
