"""Algorithms: the contract of all of them, and IMPALA against a NumPy transcription of its paper.

Those that learn values are in test_values.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import sonnet as snt
import tensorflow as tf

from impala.agents import distributions
from impala.agents.agent import Agent
from impala.algorithms.actor_critic import ActorCritic
from impala.algorithms.base import Algorithm
from impala.algorithms.impala import Impala
from impala.config.schema import (
    ActorCriticConfig,
    AgentConfig,
    Config,
    CriticConfig,
    ImpalaConfig,
    ObjectiveConfig,
)
from impala.parts import build
from impala.testing import algorithms
from impala.testing.algorithms import (
    DISCOUNTS,
    IS_REPLAY,
    SEAMS,
    STEP_TYPES,
    AlgorithmConformance,
    B,
    T,
    descend,
    loss_and_gradients,
)
from impala.types import Batch, Nest, NetworkOutput, StepType, TimeStep

NUM_ACTIONS = 3
OF_POLICIES = ("impala", "actor_critic", "impact", "critic")  # test_values.py has the others
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


class TableAgent(snt.Module):
    """An agent whose policy and baseline in each row are themselves the variables."""

    baseline_variables = variables_of_values = property(lambda self: [self.baseline])
    popart = normaliser = None

    def __init__(self, policy: np.ndarray, baseline: np.ndarray) -> None:
        super().__init__()
        self.distribution = distributions.for_space(gym.spaces.Discrete(policy.shape[-1]))
        self.policy = tf.Variable(policy, dtype=tf.float32)
        self.baseline = tf.Variable(baseline, dtype=tf.float32)

    def initial_state(self, batch_size: int) -> Nest:
        return ()

    def unroll(self, timestep: TimeStep, core_state: Nest) -> tuple[NetworkOutput, Nest]:
        return NetworkOutput(tf.identity(self.policy), tf.identity(self.baseline)), core_state


def table_agent(seed: int = 1) -> TableAgent:
    rng = np.random.default_rng(seed)
    return TableAgent(rng.normal(size=[T + 1, B, NUM_ACTIONS]), rng.normal(size=[T + 1, B]))


def network_agent(core: Literal["feed_forward", "lstm"], separate_baseline: bool = False) -> Agent:
    config = AgentConfig(
        hidden_sizes=(8,), core=core, lstm_size=5, separate_baseline=separate_baseline
    )
    return build.agent(config, gym.spaces.Box(-9, 9, [2]), gym.spaces.Discrete(NUM_ACTIONS))


AGENTS: dict[str, Callable[[], Agent | TableAgent]] = {
    "table": table_agent,
    "feed_forward": lambda: network_agent("feed_forward"),
    "lstm": lambda: network_agent("lstm"),
    "two_lstms": lambda: network_agent("lstm", separate_baseline=True),
}


def impala(
    agent: Agent | TableAgent,
    config: ImpalaConfig = ImpalaConfig(),  # noqa: B008
    objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008
) -> Impala:
    return Impala(agent, objective, config)


def make(name: str, agent: Agent | TableAgent) -> Algorithm:
    """An algorithm with its defaults."""
    return build.algorithm(name, Config(), agent)


def make_arrays(seed: int = 0, **replace: np.ndarray) -> dict[str, np.ndarray]:
    """The leaves of a batch; behaviour policies are far enough from pi that every clip bites."""
    rng = np.random.default_rng(seed)
    rows = STEP_TYPES.shape
    arrays = {
        "observation": rng.normal(size=[*rows, 2]),
        "reward": 2.0 * rng.normal(size=rows),
        "discount": DISCOUNTS,
        "step_type": STEP_TYPES,
        "action": rng.integers(NUM_ACTIONS, size=rows),
        "policy": 1.5 * rng.normal(size=[*rows, NUM_ACTIONS]),
        "baseline": rng.normal(size=rows),
    }
    return {name: np.array(replace.get(name, array)) for name, array in arrays.items()}


def make_batch(arrays: dict[str, np.ndarray], agent: Agent | TableAgent) -> Batch:
    """A batch; half of it is replayed."""
    cast = {"action": np.int64, "observation": np.float32}
    if arrays["observation"].dtype == np.uint8:
        del cast["observation"]
    cast_arrays = {
        name: array.astype(cast.get(name, array.dtype)) for name, array in arrays.items()
    }
    return algorithms.make_batch(cast_arrays, agent, IS_REPLAY)


class _Contract(AlgorithmConformance):
    """What every algorithm promises; here, with agents of every kind."""

    name: str
    agent_name: str

    def make(self, agent: Agent) -> Algorithm:
        return make(self.name, agent)

    def make_agent(self) -> Any:
        return AGENTS[self.agent_name]()

    def test_the_agent_learns_as_a_whole_or_for_its_baseline(self) -> None:
        algorithm = self.make(self.make_agent())
        variables = algorithm.agent.trainable_variables
        batch = make_batch(make_arrays(), algorithm.agent)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(algorithm.loss(batch).loss)
        learned = {id(variable) for variable in algorithm.learned_variables}
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            assert (gradient is not None) == (id(variable) in learned), variable.name


class _SlowToCompile(_Contract):
    """XLA takes ten seconds and more for an LSTM."""

    @pytest.mark.slow
    def test_compiled_it_is_the_same(self) -> None:
        super().test_compiled_it_is_the_same()


_WITH_AGENTS = (
    *itertools.product(("impala",), AGENTS),
    *itertools.product(("critic",), ("table", "lstm", "two_lstms")),
    *itertools.product(("actor_critic", "impact"), ("table", "two_lstms")),
)
for _name, _agent_name in _WITH_AGENTS:
    _words = f"{_name} {_agent_name}".replace("_", " ").title().replace(" ", "")
    _is_slow = "lstm" in _agent_name and (_name, _agent_name) != ("impala", "lstm")
    _base = _SlowToCompile if _is_slow else _Contract
    globals()[f"Test{_words}"] = type(
        f"Test{_words}", (_base,), {"name": _name, "agent_name": _agent_name}
    )


@pytest.mark.parametrize("name", OF_POLICIES)
def test_values_that_are_only_targets_get_no_gradient(name: str) -> None:
    """The last row's value and the value behind a seam are bootstrapped from, never learned."""
    agent = table_agent()
    algorithm = make(name, agent)

    _, gradients = loss_and_gradients(algorithm, make_batch(make_arrays(), agent))

    by_name = {id(v): g for v, g in zip(algorithm.learned_variables, gradients, strict=True)}
    by_baseline = by_name[id(agent.baseline)].numpy()
    assert not by_baseline[-1].any()
    assert not by_baseline[:-1][SEAMS].any()
    assert by_baseline[:-1][~SEAMS].all()


# ---------------------------------------------------------------------------- IMPALA


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def paper(
    arrays: dict[str, np.ndarray],
    agent: TableAgent,
    config: ImpalaConfig,
    objective: ObjectiveConfig,
) -> tuple[np.ndarray, dict[str, float], np.ndarray, np.ndarray]:
    """Loss [T, B], metrics and gradients by the table, one step of one environment at a time."""
    policy, values = agent.policy.numpy().astype(float), agent.baseline.numpy().astype(float)
    log_pi = log_softmax(policy)
    log_mu = log_softmax(arrays["policy"])
    loss = np.zeros([T, B])
    by_policy, by_baseline = np.zeros(policy.shape), np.zeros(values.shape)
    rows, states, clones = [], [], []
    for b in range(B):
        ends = [t for t in range(T) if SEAMS[t, b]]
        rho, c, delta, gamma = (np.zeros(T) for _ in range(4))
        # LASER: KL(pi || mu) of a state says whether its behaviour policy is relevant. Where it is
        # not, rho = c = 0: the trace ends there, and the state has no target.
        kl_mu = (np.exp(log_pi[:-1, b]) * (log_pi[:-1, b] - log_mu[1:, b])).sum(-1)
        far = kl_mu > config.trust_region if config.trust_region else np.zeros(T, np.bool_)
        for t in range(T):
            if t in ends or far[t]:
                continue
            a = arrays["action"][t + 1, b]
            ratio = np.exp(log_pi[t, b, a] - log_mu[t + 1, b, a])
            weight = ratio if config.correction == "vtrace" else 1.0
            rho[t] = min(config.clip_rho_threshold, weight)
            c[t] = config.vtrace_lambda * min(config.clip_c_threshold, weight)
            gamma[t] = objective.discount * arrays["discount"][t + 1, b]
            reward = objective.reward_scale * arrays["reward"][t + 1, b]
            delta[t] = rho[t] * (reward + gamma[t] * values[t + 1, b] - values[t, b])

        def target(
            s: int,
            b: int = b,
            rho: np.ndarray = rho,
            c: np.ndarray = c,
            delta: np.ndarray = delta,
            gamma: np.ndarray = gamma,
        ) -> float:
            if s == T:
                return values[T, b]
            tail = [np.prod(gamma[s:t]) * np.prod(c[s:t]) * delta[t] for t in range(s, T)]
            return values[s, b] + sum(tail)

        for t in range(T):
            if t in ends:
                continue
            a = arrays["action"][t + 1, b]
            ratio = np.exp(log_pi[t, b, a] - log_mu[t + 1, b, a])
            reward = objective.reward_scale * arrays["reward"][t + 1, b]
            vs = target(t)
            advantage = reward + gamma[t] * target(t + 1) - values[t, b]
            if config.correction in ("vtrace", "one_step"):
                advantage *= min(config.clip_pg_rho_threshold, ratio)
            if config.clip_advantage_to_positive:
                advantage = max(advantage, 0.0)
            pi = np.exp(log_pi[t, b])
            h = -(pi * log_pi[t, b]).sum()
            mu = np.exp(log_mu[t + 1, b])
            kl = (mu * (log_mu[t + 1, b] - log_pi[t, b])).sum()
            change = values[t, b] - arrays["baseline"][t + 1, b]
            states.append(
                {
                    "policy/entropy": h,
                    "policy/kl_behaviour": kl,
                    "baseline/mean": values[t, b],
                }
            )
            if config.trust_region:
                states[-1] |= {"trust_region/left_out": far[t], "trust_region/kl": kl_mu[t]}
            if not far[t]:
                terms = {
                    "loss_mean/policy_gradient": -log_pi[t, b, a] * advantage,
                    "loss_mean/baseline": 0.5 * (vs - values[t, b]) ** 2,
                    "loss_mean/entropy": -h,
                    "vtrace/rho_mean": min(config.clip_rho_threshold, ratio),
                    "vtrace/rho_clip_fraction": float(ratio > config.clip_rho_threshold),
                    "vtrace/vs_mean": vs,
                }
                rows.append(terms)
                loss[t, b] = (
                    terms["loss_mean/policy_gradient"]
                    + config.baseline_cost * terms["loss_mean/baseline"]
                    + config.entropy_cost * terms["loss_mean/entropy"]
                )
                by_policy[t, b] = advantage * (pi - np.eye(NUM_ACTIONS)[a])
                by_policy[t, b] += config.entropy_cost * pi * (log_pi[t, b] + h)
                by_baseline[t, b] = config.baseline_cost * (values[t, b] - vs)
            if IS_REPLAY[b]:
                loss[t, b] += config.policy_cloning_cost * kl
                loss[t, b] += config.value_cloning_cost * change**2
                by_policy[t, b] += config.policy_cloning_cost * (pi - mu)
                by_baseline[t, b] += config.value_cloning_cost * 2.0 * change
                clones.append(
                    {"loss_mean/policy_cloning": kl, "loss_mean/value_cloning": change**2}
                )
    metrics = {
        name: np.mean([row[name] for row in some])
        for some in (rows, states, clones)
        for name in some[0]
    }
    for name in ("baseline", "entropy", "policy_cloning", "value_cloning"):
        metrics[f"{name}_cost"] = getattr(config, f"{name}_cost")
    return loss, metrics, by_policy, by_baseline


@pytest.mark.parametrize(
    ("config", "objective"),
    [
        (ImpalaConfig(), ObjectiveConfig()),
        (
            ImpalaConfig(
                baseline_cost=0.3,
                entropy_cost=0.2,
                policy_cloning_cost=0.7,
                value_cloning_cost=0.4,
                clip_rho_threshold=2.0,
                clip_pg_rho_threshold=1.5,
                clip_c_threshold=0.7,
                vtrace_lambda=0.8,
                clip_advantage_to_positive=True,
            ),
            ObjectiveConfig(discount=0.9, reward_scale=0.5),
        ),
        (ImpalaConfig(correction="one_step", clip_pg_rho_threshold=1.5), ObjectiveConfig()),
        (ImpalaConfig(correction="epsilon"), ObjectiveConfig()),
        (ImpalaConfig(correction="none"), ObjectiveConfig()),
        (ImpalaConfig(trust_region=0.7), ObjectiveConfig()),
        (
            ImpalaConfig(
                trust_region=0.7,
                baseline_cost=0.3,
                policy_cloning_cost=0.7,
                value_cloning_cost=0.4,
                clip_rho_threshold=2.0,
                clip_pg_rho_threshold=1.5,
                clip_c_threshold=0.7,
                vtrace_lambda=0.8,
            ),
            ObjectiveConfig(discount=0.9),
        ),
        (ImpalaConfig(trust_region=0.7, correction="one_step"), ObjectiveConfig()),
    ],
    ids=[
        *("defaults", "every number its own", "one step", "epsilon", "no correction"),
        *("trust region", "trust region and numbers", "trust region and one step"),
    ],
)
def test_loss_metrics_and_gradients_are_the_papers(
    config: ImpalaConfig, objective: ObjectiveConfig
) -> None:
    agent, arrays = table_agent(), make_arrays()

    output, gradients = loss_and_gradients(
        impala(agent, config, objective), make_batch(arrays, agent)
    )

    loss, metrics, by_policy, by_baseline = paper(arrays, agent, config, objective)
    assert output.metrics.keys() == {*metrics, "baseline/explained_variance"}
    if config.trust_region:
        assert 0.2 < metrics["trust_region/left_out"] < 0.8
    np.testing.assert_allclose(output.loss, loss, rtol=1e-4, atol=1e-5)
    for name, expected in metrics.items():
        assert output.metrics[name].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    by_name = {id(v): g for v, g in zip(agent.trainable_variables, gradients, strict=True)}
    np.testing.assert_allclose(by_name[id(agent.policy)], by_policy, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(by_name[id(agent.baseline)], by_baseline, rtol=1e-3, atol=1e-5)


def one_environment(
    policy: npt.ArrayLike | None = None,
    baseline: npt.ArrayLike | None = None,
    step_types: Sequence[StepType] | None = None,
    behaviour: npt.ArrayLike | None = None,
    behaviour_values: npt.ArrayLike | None = None,
    **leaves: npt.ArrayLike,
) -> tuple[TableAgent, Batch]:
    """A fresh unroll of one environment in which nothing happens but what is said."""
    rows = len(step_types) if step_types is not None else np.size(leaves["reward"])
    agent = TableAgent(
        np.zeros([rows, 1, NUM_ACTIONS]) if policy is None else np.array(policy)[:, None],
        np.zeros([rows, 1]) if baseline is None else np.array(baseline)[:, None],
    )
    arrays = {
        "observation": np.zeros([rows, 2]),
        "reward": np.zeros(rows),
        "discount": np.ones(rows),
        "step_type": np.full(rows, MID) if step_types is None else np.array(step_types),
        "action": np.zeros(rows),
        "policy": np.zeros([rows, NUM_ACTIONS]) if behaviour is None else np.array(behaviour),
        "baseline": np.zeros(rows) if behaviour_values is None else np.array(behaviour_values),
    }
    arrays |= {name: np.array(value) for name, value in leaves.items()}
    return agent, make_batch({name: array[:, None] for name, array in arrays.items()}, agent)


@pytest.mark.parametrize(
    ("progress", "share", "cost"),
    [(0.0, 0.5, 0.4), (0.25, 0.5, 0.25), (0.5, 0.5, 0.1), (0.9, 0.5, 0.1), (0.9, 0.0, 0.4)],
)
def test_the_entropy_cost_is_annealed_over_a_share_of_the_run(
    progress: float, share: float, cost: float
) -> None:
    agent, batch = one_environment(reward=[0.0, 0.0], policy=[[2.0, 0.0, -1.0]] * 2)
    config = ImpalaConfig(
        baseline_cost=0.0, entropy_cost=0.4, entropy_anneal=share, entropy_cost_end=0.1
    )
    output = impala(agent, config).loss(batch, tf.constant(progress))
    entropy = output.metrics["policy/entropy"].numpy()
    assert output.loss.numpy().sum() == pytest.approx(-cost * entropy)
    assert output.metrics["entropy_cost"].numpy() == pytest.approx(cost)


def values_learned(
    agent: TableAgent, batch: Batch, name: str = "impala", **objective: Any
) -> np.ndarray:
    """The targets of the baseline, read off its gradient: V - vs. [T]; 0 on seams."""
    config = Config(objective=ObjectiveConfig(**{"discount": 0.9, **objective}))
    undecayed = {"gae_lambda": 1.0} if name == "impact" else {}  # as by default in the others
    one = dataclasses.replace(getattr(config, name), baseline_cost=1.0, **undecayed)
    config = dataclasses.replace(config, **{name: one})
    _, gradients = loss_and_gradients(build.algorithm(name, config, agent), batch)
    learned = build.algorithm(name, config, agent).learned_variables
    by_name = {id(v): g for v, g in zip(learned, gradients, strict=True)}
    gradient = by_name[id(agent.baseline)]
    return np.where(gradient == 0, 0, agent.baseline - gradient)[:-1, 0]


@pytest.mark.parametrize("name", OF_POLICIES)
def test_a_time_limit_bootstraps_from_the_last_observation(name: str) -> None:
    """Row 2 is LAST with a value of 7, row 3 the next episode's first with a value of 100."""
    step_types = [MID, MID, LAST, FIRST, MID]
    values = [0.5, 0.5, 7.0, 100.0, 0.5]
    agent, batch = one_environment(baseline=values, step_types=step_types, reward=np.ones(5))

    targets = values_learned(agent, batch, name)

    second = 1.0 + 0.9 * 7.0
    np.testing.assert_allclose(targets[:2], [1.0 + 0.9 * second, second], rtol=1e-5)
    assert targets[2] == 0.0  # The seam learns nothing.
    assert targets[3] == pytest.approx(1.0 + 0.9 * 0.5, rel=1e-4)


@pytest.mark.parametrize(
    "step_types",
    [[MID, MID, LAST, FIRST, MID], [MID, MID, MID, MID, MID]],
    ids=["termination", "life lost"],
)
@pytest.mark.parametrize("name", OF_POLICIES)
def test_a_discount_of_zero_blocks_the_bootstrap(name: str, step_types: Sequence[StepType]) -> None:
    agent, batch = one_environment(
        baseline=[0.5, 0.5, 7.0, 100.0, 0.5],
        step_types=step_types,
        reward=np.ones(5),
        discount=[1.0, 1.0, 0.0, 1.0, 1.0],
    )

    targets = values_learned(agent, batch, name)

    np.testing.assert_allclose(targets[:2], [1.0 + 0.9 * 1.0, 1.0], rtol=1e-5)


@pytest.mark.parametrize(("correction", "share"), [("none", 1.0), ("epsilon", 0.01)])
def test_epsilon_bounds_the_gradient_of_unlikely_actions(
    correction: Literal["none", "epsilon"], share: float
) -> None:
    """log(pi + 1e-6) has pi / (pi + 1e-6) of the gradient of log pi: a hundredth at 1.01e-8."""
    logits = np.zeros([2, NUM_ACTIONS])
    logits[0] = [np.log(1e-6 / 99.0), -50.0, 0.0]
    agent, batch = one_environment(policy=logits, reward=[0.0, 1.0])

    config = ImpalaConfig(correction=correction, entropy_cost=0.0)
    _, gradients = loss_and_gradients(impala(agent, config), batch)

    by_name = {id(v): g for v, g in zip(agent.trainable_variables, gradients, strict=True)}
    found = by_name[id(agent.policy)].numpy()[0, 0]
    np.testing.assert_allclose(found, share * np.array([-1.0, 0.0, 1.0]), rtol=1e-3, atol=1e-6)


def test_epsilon_is_for_choices() -> None:
    """A density has the unit of its box, to which 1e-6 would be nothing, or all."""
    box = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    for action in (box, gym.spaces.Dict(move=gym.spaces.Discrete(3), turn=box)):
        agent = build.agent(AgentConfig(), box, action)
        with pytest.raises(ValueError, match="epsilon, which adds 1e-6 to probabilities"):
            impala(agent, ImpalaConfig(correction="epsilon"))


ALONE = ImpalaConfig(trust_region=0.5, policy_cloning_cost=0.0, value_cloning_cost=0.0)


def test_the_trust_region_hides_no_policy_that_is_not_finite() -> None:
    """The guard at the update has to see it."""
    agent, batch = one_environment(
        reward=[0.0, 1.0, 1.0], policy=[[np.nan, 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    )
    assert not np.isfinite(impala(agent, ALONE).loss(batch).loss.numpy()[0])


SPACES = {
    "choice": gym.spaces.Discrete(3, start=2),
    "choices": gym.spaces.MultiDiscrete([2, 3]),
    "bits": gym.spaces.MultiBinary(2),
    "box": gym.spaces.Box(-2.0, 1.0, (2,), np.float32),
    "nest": gym.spaces.Dict(
        {"move": gym.spaces.Box(-1.0, 1.0, (1,), np.float32), "look": gym.spaces.Discrete(3)}
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_every_distribution_has_a_trust_region(name: str) -> None:
    """Of four steps the second and the third were made by other policies than pi."""
    space = SPACES[name]
    distribution = distributions.for_space(space)
    rng = np.random.default_rng(2)
    pi = rng.normal(size=[5, 1, distribution.num_parameters])
    agent = TableAgent(pi, rng.normal(size=[5, 1]))
    agent.distribution = distribution
    mu = np.concatenate([pi[:1], pi[:-1]])
    mu[2:4] += 4.0 * (-1.0) ** np.arange(distribution.num_parameters)
    space.seed(1)
    actions = [space.sample() for _ in range(5)]
    arrays = {
        "observation": np.zeros([5, 1, 2]),
        "reward": np.ones([5, 1]),
        "discount": np.ones([5, 1]),
        "step_type": np.full([5, 1], MID),
        "action": tf.nest.map_structure(lambda *x: np.stack(x)[:, None], *actions),
        "policy": mu,
        "baseline": np.zeros([5, 1]),
    }
    batch = algorithms.make_batch(arrays, agent, np.array([True]))
    algorithm = impala(agent, ALONE)
    output, gradients = loss_and_gradients(algorithm, batch)

    learned = [True, False, False, True, False]  # nothing is learned of the last row
    assert output.metrics["trust_region/left_out"].numpy() == 0.5
    assert output.metrics["trust_region/kl"].numpy() > 0.25
    assert (output.loss.numpy()[:, 0] != 0.0).tolist() == learned[:4]
    for gradient in gradients:
        assert np.isfinite(gradient.numpy()).all()
        assert gradient.numpy()[:, 0].reshape(5, -1).any(axis=1).tolist() == learned


@pytest.mark.parametrize("name", OF_POLICIES)
def test_rewards_are_scaled_then_clipped_by_the_learner(name: str) -> None:
    agent, batch = one_environment(reward=[0.0, 8.0])

    targets = values_learned(agent, batch, name, reward_clipping="abs_one", reward_scale=0.5)

    assert targets == pytest.approx([1.0], rel=1e-5)


# ---------------------------------------------------------------------------- actor-critic


def generalised_advantages(
    values: np.ndarray,
    rewards: np.ndarray,
    discounts: np.ndarray,
    ends: Sequence[int],
    lambda_: float,
) -> np.ndarray:
    """Schulman et al. 2016, equation 16, of one environment: a sum per step. [T]."""
    steps = range(len(rewards))
    deltas = rewards + discounts * values[1:] - values[:-1]
    advantages = np.zeros(len(rewards))
    for s in steps:
        weight = 1.0
        for t in range(s, len(rewards)):
            if t in ends:
                break
            advantages[s] += weight * deltas[t]
            weight *= lambda_ * discounts[t]
    return advantages


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_actor_critic_learns_from_generalised_advantages(lambda_: float) -> None:
    """Of what was really done, however much likelier or rarer it has become."""
    agent, arrays = table_agent(), make_arrays()
    config = ActorCriticConfig(gae_lambda=lambda_, entropy_cost=0.2, baseline_cost=0.3)
    algorithm = ActorCritic(agent, ObjectiveConfig(discount=0.9), config)

    output, gradients = loss_and_gradients(algorithm, make_batch(arrays, agent))

    policy, values = agent.policy.numpy().astype(float), agent.baseline.numpy().astype(float)
    log_pi = log_softmax(policy)[:-1]
    pi = np.exp(log_pi)
    taken = np.eye(NUM_ACTIONS)[arrays["action"][1:]]
    advantages = np.stack(
        [
            generalised_advantages(
                values[:, b],
                arrays["reward"][1:, b],
                0.9 * arrays["discount"][1:, b],
                np.flatnonzero(SEAMS[:, b]).tolist(),
                lambda_,
            )
            for b in range(B)
        ],
        axis=1,
    )
    h = -(pi * log_pi).sum(-1)
    loss = -(taken * log_pi).sum(-1) * advantages + 0.3 * 0.5 * advantages**2 - 0.2 * h
    by_policy = advantages[..., None] * (pi - taken) + 0.2 * pi * (log_pi + h[..., None])
    np.testing.assert_allclose(output.loss, np.where(SEAMS, 0, loss), rtol=1e-4, atol=1e-5)
    by_name = {id(v): g for v, g in zip(algorithm.learned_variables, gradients, strict=True)}
    np.testing.assert_allclose(
        by_name[id(agent.policy)][:-1],
        np.where(SEAMS[..., None], 0, by_policy),
        rtol=1e-3,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        by_name[id(agent.baseline)][:-1],
        np.where(SEAMS, 0, -0.3 * advantages),
        rtol=1e-3,
        atol=1e-5,
    )


# ---------------------------------------------------------------------------- critic


@pytest.mark.parametrize(
    ("agent_name", "trains", "moves"),
    [
        ("feed_forward", "all", True),
        ("lstm", "all", True),
        ("two_lstms", "all", False),
        ("feed_forward", "baseline", False),
        ("lstm", "baseline", False),
        ("two_lstms", "baseline", False),
    ],
)
def test_the_critic_moves_the_policy_only_through_what_it_shares(
    agent_name: str, trains: Literal["all", "baseline"], moves: bool
) -> None:
    agent = AGENTS[agent_name]()
    config = Config(critic=CriticConfig(trains=trains))
    algorithm = build.algorithm("critic", config, agent)
    batch = make_batch(make_arrays(), agent)
    timestep, core_state = batch.unroll.timestep, batch.unroll.core_state
    before, _ = agent.unroll(timestep, core_state)
    loss = tf.reduce_sum(algorithm.loss(batch).loss)

    for _ in range(20):
        descend(algorithm, batch, rate=0.01)

    after, _ = agent.unroll(timestep, core_state)
    assert np.array_equal(after.policy, before.policy) == (not moves)  # to the last bit
    assert not np.array_equal(after.baseline, before.baseline)
    assert tf.reduce_sum(algorithm.loss(batch).loss) < loss


def test_a_baseline_of_its_own_shares_nothing_with_the_policy() -> None:
    agent = network_agent("lstm", separate_baseline=True)
    shared = network_agent("lstm")
    own = {id(v) for v in agent.baseline_variables}

    batch = make_batch(make_arrays(), agent)
    with tf.GradientTape() as tape:
        output, _ = agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        total = tf.reduce_sum(tf.square(output.policy))
    gradients = tape.gradient(total, agent.trainable_variables)

    for variable, gradient in zip(agent.trainable_variables, gradients, strict=True):
        assert (gradient is None) == (id(variable) in own), variable.name
    heads = 4
    assert len(own) == len(shared.trainable_variables) - heads + 2
    assert len({v.name for v in agent.variables}) == len(agent.variables)
