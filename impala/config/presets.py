"""The named presets, from which runs start."""

import dataclasses
from collections.abc import Sequence

from impala.config.schema import (
    ActorConfig,
    ActorCriticConfig,
    AgentConfig,
    AtariConfig,
    Config,
    EnvironmentConfig,
    EpsilonConfig,
    EvaluatorConfig,
    ImpalaConfig,
    LearnerConfig,
    MixConfig,
    ObjectiveConfig,
    OptimiserConfig,
    QLearningConfig,
    ReplayConfig,
    SacConfig,
    TasksConfig,
)

_CATCH = Config(
    environment=EnvironmentConfig(id="Catch"),
    agent=AgentConfig(torso="mlp", hidden_sizes=(64, 64)),
    optimiser=OptimiserConfig(name="adam", learning_rate=2e-3, epsilon=1e-7),
    mix=MixConfig(fresh=32),
    learner=LearnerConfig(unroll_length=9),
    total_frames=400_000,
)


_CARTPOLE = Config(
    environment=EnvironmentConfig(id="CartPole-v1", vectorization="own"),
    agent=AgentConfig(torso="mlp", hidden_sizes=(64, 64)),
    # An agent that stops failing no longer sees failures, so half of each batch is replay. The
    # entropy bonus is annealed to 0, otherwise it keeps the policy from becoming deterministic.
    objective=ObjectiveConfig(reward_scale=0.1),
    impala=ImpalaConfig(entropy_anneal=0.5),
    optimiser=OptimiserConfig(name="adam", learning_rate=1e-3, epsilon=1e-7),
    mix=MixConfig(fresh=8, replayed=8),
    replay=ReplayConfig(capacity_frames=1_500_000),
    learner=LearnerConfig(queue_unrolls=32),
    total_frames=1_500_000,
)


_CARTPOLE_A3C = dataclasses.replace(
    _CARTPOLE,
    algorithm="actor_critic",
    actor_critic=ActorCriticConfig(entropy_anneal=0.5, gae_lambda=0.95),
    mix=MixConfig(fresh=16),
    learner=LearnerConfig(queue_unrolls=16, max_in_flight=1),
)


# Eight updates of 256 steps for every 64 steps played. Replay holds all steps of the run, because
# an agent that stops failing no longer sees failures.
_CARTPOLE_Q = Config(
    environment=EnvironmentConfig(id="CartPole-v1", vectorization="own"),
    objective=ObjectiveConfig(reward_scale=0.1),
    agent=AgentConfig(
        hidden_sizes=(128, 128),
        policy="epsilon_greedy",
        epsilon=EpsilonConfig(anneal=0.2, finals=(0.1, 0.01), weights=(0.5, 0.5)),
    ),
    algorithm="q_learning",
    q_learning=QLearningConfig(steps=3, double=True, target_updates=200),
    optimiser=OptimiserConfig(name="adam", learning_rate=1e-3, epsilon=1e-5),
    mix=MixConfig(fresh=8, replayed=32, learn_from_fresh=False, updates=8),
    replay=ReplayConfig(rule="fifo", capacity_frames=200_000),
    learner=LearnerConfig(unroll_length=8, queue_unrolls=8, max_in_flight=1, threads=1),
    actor=ActorConfig(num_envs=16),
    total_frames=200_000,
)


# One group of environments: a call of so small a network costs as much as all of its rows. With a
# learning rate that falls to 0 some runs stay at half the return.
_MINATAR = Config(
    environment=EnvironmentConfig(id="MinAtar/Breakout-v1"),
    agent=AgentConfig(torso="small"),
    optimiser=OptimiserConfig(name="adam", learning_rate=2e-3, epsilon=1e-5, decay_to_zero=False),
    mix=MixConfig(fresh=16),
    actor=ActorConfig(num_envs=64, num_groups=1),
    total_frames=5_000_000,
)


# MinAtar's DQN with fewer and larger updates, for two cores: four updates of 256 steps for every
# 128 steps played, so each step is used 8 times instead of 32. 3-step double Q-learning targets
# compensate for it. Half of the environments end at epsilon 0.01, so that long games are seen.
_MINATAR_Q = Config(
    environment=EnvironmentConfig(id="MinAtar/Breakout-v1"),
    agent=AgentConfig(
        torso="small",
        policy="epsilon_greedy",
        epsilon=EpsilonConfig(anneal=0.05, finals=(0.1, 0.01), weights=(0.5, 0.5)),
    ),
    algorithm="q_learning",
    q_learning=QLearningConfig(steps=3, double=True, target_updates=250),
    optimiser=OptimiserConfig(name="adam", learning_rate=5e-4, epsilon=1e-5),
    mix=MixConfig(fresh=16, replayed=32, learn_from_fresh=False, updates=4, warm_up_unrolls=625),
    replay=ReplayConfig(rule="fifo", capacity_frames=100_000),
    learner=LearnerConfig(unroll_length=8, queue_unrolls=16, max_in_flight=1, threads=1),
    actor=ActorConfig(num_envs=32),
    total_frames=5_000_000,
)


_MINIGRID = Config(
    environment=EnvironmentConfig(id="MiniGrid-DoorKey-5x5-v0"),
    agent=AgentConfig(torso="auto", hidden_sizes=(128,)),
    optimiser=OptimiserConfig(name="adam", learning_rate=2e-3, epsilon=1e-5),
    mix=MixConfig(fresh=16),
    total_frames=500_000,
)


# One update of 256 replayed steps for each step played. Ten greedy episodes test the agent at
# intervals, beside training.
_PENDULUM = Config(
    environment=EnvironmentConfig(id="Pendulum-v1"),
    evaluator=EvaluatorConfig(every_frames=5_000, episodes=10, greedy=True),
    agent=AgentConfig(hidden_sizes=(256, 256), random_warm_up=True),
    algorithm="sac",
    optimiser=OptimiserConfig(
        name="adam", learning_rate=1e-3, epsilon=1e-8, decay_to_zero=False, clip_global_norm=0.0
    ),
    mix=MixConfig(fresh=2, replayed=64, learn_from_fresh=False, updates=8, warm_up_unrolls=250),
    replay=ReplayConfig(rule="fifo", capacity_frames=1_000_000),
    learner=LearnerConfig(unroll_length=4, queue_unrolls=2, max_in_flight=1, threads=1),
    actor=ActorConfig(num_envs=4),
    total_frames=30_000,
)


# As pendulum, with a decaying learning rate, a larger target step and a warm-up of 10,000 steps;
# one update for each second step. With a discount of 0.99 some runs only learn to hover.
_LUNAR_LANDER = dataclasses.replace(
    _PENDULUM,
    environment=EnvironmentConfig(id="LunarLanderContinuous-v3"),
    objective=ObjectiveConfig(discount=0.98),
    sac=SacConfig(target_step=0.01),
    optimiser=dataclasses.replace(_PENDULUM.optimiser, learning_rate=7.3e-4, decay_to_zero=True),
    mix=dataclasses.replace(_PENDULUM.mix, updates=4, warm_up_unrolls=2_500),
    total_frames=300_000,
)


# The network, discount, learning rate and target step of rl-baselines3-zoo.
_BIPEDAL_WALKER = dataclasses.replace(
    _LUNAR_LANDER,
    environment=EnvironmentConfig(id="BipedalWalker-v3"),
    agent=AgentConfig(hidden_sizes=(400, 300), random_warm_up=True),
    mix=dataclasses.replace(_LUNAR_LANDER.mix, updates=8),
    sac=SacConfig(critic_hidden_sizes=(400, 300), target_step=0.02),
)


# As pendulum, with running normalisation and the papers' learning rate.
_MUJOCO = dataclasses.replace(
    _PENDULUM,
    environment=EnvironmentConfig(id="HalfCheetah-v5"),
    agent=dataclasses.replace(_PENDULUM.agent, normalise_observations=True),
    optimiser=dataclasses.replace(_PENDULUM.optimiser, learning_rate=3e-4),
    total_frames=300_000,
)


_ATARI = Config(
    environment=EnvironmentConfig(id="ALE/Pong-v5"),
    agent=AgentConfig(torso="shallow", frame_stack=4),
    objective=ObjectiveConfig(reward_clipping="abs_one"),
    actor=ActorConfig(num_envs=64),
)


# Every setting that Espeholt et al. 2018 publish for Atari, with the shallow network.
_ATARI_PAPER = dataclasses.replace(
    _ATARI,
    agent=dataclasses.replace(_ATARI.agent, standardise_images=False),
    total_frames=200_000_000,
)


# Tuned to learn Pong in few frames on two cores: small batches, three replayed unrolls for each
# fresh one, and a lower entropy cost than the paper's, which is set for 200M frames. The learning
# rate is high; cloning the policy on the short replay limits how far an update moves it (KL to
# the behaviour policy 0.03 instead of 0.2).
_ATARI_CPU = dataclasses.replace(
    _ATARI,
    impala=ImpalaConfig(
        entropy_cost=0.004,
        entropy_anneal=0.4,
        entropy_cost_end=0.001,
        policy_cloning_cost=0.05,
        value_cloning_cost=0.0,
    ),
    optimiser=OptimiserConfig(name="adam", learning_rate=4e-4, epsilon=1e-5),
    mix=MixConfig(fresh=4, replayed=12),
    replay=ReplayConfig(rule="fifo", capacity_frames=32_000),
    learner=LearnerConfig(queue_unrolls=16, max_in_flight=1, bfloat16=True),
    actor=ActorConfig(num_envs=32),
    total_frames=10_000_000,
)


# As atari, for a GPU and many cores: four times the batch, for a policy lag of some 20 updates. A
# GPU has time for more replay: with 16 fresh and 48 replayed unrolls Pong takes more frames. One
# group of environments, as there is an actor for each core, and few of them: what is learned shows
# in returns when the games that all of them play have ended. The learning rate falls to
# 0 over total_frames; over 10M frames, some seeds stay at 15 in Pong for a million.
_ATARI_GPU = dataclasses.replace(
    _ATARI_CPU,
    optimiser=dataclasses.replace(_ATARI_CPU.optimiser, learning_rate=1e-3),
    mix=MixConfig(fresh=8, replayed=56),
    replay=ReplayConfig(rule="fifo", capacity_frames=128_000),
    learner=LearnerConfig(queue_unrolls=64, max_in_flight=1, bfloat16=True),
    actor=ActorConfig(num_envs=16, num_groups=1),
    total_frames=5_000_000,
)


_SIX_GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "BeamRider")

# Those of Espeholt et al. 2018, arXiv 1802.01561.
_GAMES = (
    *("Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone"),
    *("BeamRider", "Berzerk", "Bowling", "Boxing", "Breakout", "Centipede", "ChopperCommand"),
    *("CrazyClimber", "Defender", "DemonAttack", "DoubleDunk", "Enduro", "FishingDerby", "Freeway"),
    *("Frostbite", "Gopher", "Gravitar", "Hero", "IceHockey", "Jamesbond", "Kangaroo", "Krull"),
    *("KungFuMaster", "MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong"),
    *("PrivateEye", "Qbert", "Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing"),
    *("Solaris", "SpaceInvaders", "StarGunner", "Surround", "Tennis", "TimePilot", "Tutankham"),
    *("UpNDown", "Venture", "VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon"),
)


def _at_once(config: Config, games: Sequence[str], frames: int) -> Config:
    """Returns the configuration of one agent for several games, with frames of each.

    An action is the same in all of them, rewards are not clipped but values normalised by game.
    Batches are twice as large, as an actor's round of unrolls is of one game, and what is fresh
    stays of that game for several updates. Agents are only evaluated at both ends: returns in
    training tell the rest.
    """
    fresh, replayed = 2 * config.mix.fresh, 2 * config.mix.replayed
    capacity = 4 * config.replay.capacity_frames
    return dataclasses.replace(
        config,
        environment=dataclasses.replace(
            config.environment, atari=AtariConfig(full_action_set=True)
        ),
        tasks=TasksConfig(
            environments=tuple(f"ALE/{game}-v5" for game in games), order="simultaneous"
        ),
        agent=dataclasses.replace(config.agent, popart=True),
        objective=ObjectiveConfig(),
        mix=MixConfig(fresh=fresh, replayed=replayed),
        replay=dataclasses.replace(config.replay, capacity_frames=capacity),
        evaluator=EvaluatorConfig(every_frames=frames * len(games), episodes=1),
        total_frames=frames * len(games),
    )


# Nearly on-policy: one group of few environments, with a policy lag of about six updates. RMSProp
# as in A3C, with epsilon scaled for gradients that are summed over the batch. total_frames is
# larger than the game needs, so that the learning rate has not decayed before the score rises. The
# entropy cost starts high, so that the policy stays close to uniform until the baseline is useful;
# with a low entropy cost from the start, the policy learns to return balls but not to score.
_ATARI_A3C = dataclasses.replace(
    _ATARI,
    environment=EnvironmentConfig(atari=AtariConfig(action_table=True)),
    algorithm="actor_critic",
    objective=ObjectiveConfig(reward_clipping="sign"),
    actor_critic=ActorCriticConfig(entropy_cost=0.008, entropy_anneal=0.4, entropy_cost_end=0.001),
    optimiser=OptimiserConfig(epsilon=0.0025),
    mix=MixConfig(fresh=4, max_policy_lag=30),
    learner=LearnerConfig(queue_unrolls=16, max_in_flight=1, bfloat16=True),
    actor=ActorConfig(num_envs=16, num_groups=1, env_threads=2),
    total_frames=20_000_000,
)


# The images and the network of A3C's code: 47x47 pixels, four convolutions without padding, an LSTM
# of 256, and nothing else as an input. Images are standardised, as shares of white are too small:
# with them Adam needs four times the frames, and RMSProp learns nothing.
_ATARI_A3C_SMALL = dataclasses.replace(
    _ATARI_A3C,
    environment=EnvironmentConfig(atari=AtariConfig(action_table=True, height=47, width=47)),
    agent=AgentConfig(torso="strided_valid", core="lstm"),
    optimiser=OptimiserConfig(name="adam", learning_rate=3e-4, epsilon=1e-5),
)


# Asynchronous one-step Q-learning as published: no replay, unrolls of five steps. The interval of
# target copies is the paper's: the code's 2,000 episodes would be a handful of copies in this run.
_ATARI_Q = Config(
    environment=EnvironmentConfig(
        id="ALE/Breakout-v5",
        atari=AtariConfig(frame_skip=2, frame_skip_most=4, max_pool=False),  # as Gym's Breakout-v0
    ),
    agent=AgentConfig(
        torso="shallow",
        frame_stack=4,
        standardise_images=False,
        policy="epsilon_greedy",
        epsilon=EpsilonConfig(anneal=0.4),
    ),
    objective=ObjectiveConfig(reward_clipping="sign"),
    algorithm="q_learning",
    q_learning=QLearningConfig(target_frames=40_000),
    optimiser=OptimiserConfig(
        *("rmsprop", 2.5e-4),
        decay=0.95,
        centred=True,
        decay_to_zero=False,
        epsilon=0.01,
        clip_global_norm=1.0,
    ),
    mix=MixConfig(fresh=8),
    learner=LearnerConfig(unroll_length=5, queue_unrolls=16, max_in_flight=1, bfloat16=True),
    actor=ActorConfig(num_envs=16, num_groups=1),
    total_frames=10_000_000,
)


# As minatar-q: four updates of 256 replayed steps for every 128 steps played.
_ATARI_Q_REPLAY = dataclasses.replace(
    _ATARI_Q,
    environment=EnvironmentConfig(id="ALE/Breakout-v5"),
    agent=dataclasses.replace(
        _ATARI_Q.agent,
        standardise_images=True,
        epsilon=EpsilonConfig(anneal=0.1, finals=(0.1, 0.01), weights=(0.5, 0.5)),
    ),
    q_learning=QLearningConfig(steps=3, double=True, target_updates=500),
    optimiser=OptimiserConfig(name="adam", learning_rate=2.5e-4, epsilon=1e-5),
    mix=MixConfig(fresh=16, replayed=32, learn_from_fresh=False, updates=4, warm_up_unrolls=1_600),
    replay=ReplayConfig(rule="fifo", capacity_frames=1_000_000),
    learner=LearnerConfig(unroll_length=8, queue_unrolls=16, max_in_flight=1, bfloat16=True),
    actor=ActorConfig(num_envs=32, env_threads=2),
)


# Actor-critic has no off-policy correction: with a lag of several updates the policy collapses to
# one arm or degrades again. Hence few environments in one group, and unrolls of a quarter of an
# episode. Rewards are scaled so that returns are about 1, which the baseline fits within few
# updates. With twice the learning rate, most seeds fall to one arm for a while.
_BANDIT = Config(
    environment=EnvironmentConfig(
        id="Bandit/DependentUniform-v0",
        vectorization="own",
        last_action=True,
        last_reward=True,
        time_in_episode=True,
    ),
    agent=AgentConfig(torso="mlp", hidden_sizes=(), core="lstm", lstm_size=48),
    objective=ObjectiveConfig(discount=0.9, reward_scale=0.1),
    algorithm="actor_critic",
    actor_critic=ActorCriticConfig(
        baseline_cost=1.0, entropy_cost=0.01, entropy_anneal=0.5, gae_lambda=0.9
    ),
    optimiser=OptimiserConfig(name="adam", learning_rate=1e-3, epsilon=1e-7),
    mix=MixConfig(fresh=32),
    learner=LearnerConfig(unroll_length=25, queue_unrolls=32, max_in_flight=1),
    actor=ActorConfig(num_envs=32, num_groups=1),
    total_frames=4_000_000,
)


# With independent arms, exploration pays off later. The entropy cost stays high for most of the
# run, so that memory and baseline are trained before the policy prefers an arm; it stays above 0.
_BANDIT_INDEPENDENT = dataclasses.replace(
    _BANDIT,
    environment=dataclasses.replace(_BANDIT.environment, id="Bandit/Independent-v0"),
    agent=dataclasses.replace(_BANDIT.agent, lstm_size=128),
    objective=ObjectiveConfig(discount=0.95, reward_scale=0.1),
    optimiser=dataclasses.replace(_BANDIT.optimiser, learning_rate=2e-3),
    actor_critic=dataclasses.replace(
        _BANDIT.actor_critic, entropy_cost=0.08, entropy_anneal=0.7, entropy_cost_end=0.003
    ),
    total_frames=9_990_000,
)


# With five pulls, the first must be the informative arm, which itself pays little. A policy that
# follows rewards stops pulling it before the memory has learned to use it: hence a large entropy
# cost, and replay that uses every unroll sixteen times.
_BANDIT_ELEVEN = dataclasses.replace(
    _BANDIT,
    environment=dataclasses.replace(
        _BANDIT.environment, id="Bandit/ElevenArms-v0", kwargs='{"pulls": 5}'
    ),
    objective=ObjectiveConfig(discount=0.95, reward_scale=0.1),
    algorithm="impala",
    impala=ImpalaConfig(
        baseline_cost=1.0,
        entropy_cost=0.1,
        entropy_anneal=0.8,
        policy_cloning_cost=0.002,
        value_cloning_cost=0.0,
    ),
    optimiser=dataclasses.replace(_BANDIT.optimiser, learning_rate=4e-3),
    mix=MixConfig(fresh=32, replayed=128, learn_from_fresh=False, updates=4),
    replay=ReplayConfig(rule="fifo", capacity_frames=12_000),
    learner=dataclasses.replace(_BANDIT.learner, unroll_length=6),
    actor=ActorConfig(num_envs=64),
    total_frames=600_000,
)


PRESETS: dict[str, tuple[str, Config]] = {
    "catch": ("Catch on a 10x5 board; solved in half a minute on two cores.", _CATCH),
    "cartpole": (
        "CartPole-v1 with replay; solved in less than a minute on two cores.",
        _CARTPOLE,
    ),
    "cartpole-a3c": ("CartPole-v1 with on-policy actor-critic.", _CARTPOLE_A3C),
    "cartpole-q": ("CartPole-v1 with Q-learning from replay.", _CARTPOLE_Q),
    "minatar": (
        "MinAtar Breakout with V-trace; other games by --environment.id (extra: minatar).",
        _MINATAR,
    ),
    "minatar-q": (
        "MinAtar Breakout with Q-learning from replay (extra: minatar).",
        _MINATAR_Q,
    ),
    "minigrid": (
        "MiniGrid's DoorKey-5x5 with V-trace; other ids by --environment.id (extra: minigrid).",
        _MINIGRID,
    ),
    "pendulum": ("Pendulum-v1 with soft actor-critic.", _PENDULUM),
    "lunar-lander": (
        "LunarLanderContinuous-v3 with soft actor-critic (extra: box2d).",
        _LUNAR_LANDER,
    ),
    "bipedal-walker": (
        "BipedalWalker-v3 with soft actor-critic (extra: box2d).",
        _BIPEDAL_WALKER,
    ),
    "mujoco": (
        "HalfCheetah-v5 with soft actor-critic; other ids by --environment.id (extra: mujoco).",
        _MUJOCO,
    ),
    "atari": (
        "Pong on two cores, shallow network; other games by --environment.id.",
        _ATARI_CPU,
    ),
    "atari-gpu": (
        "Pong on a GPU and many cores, shallow network; also other games.",
        _ATARI_GPU,
    ),
    "atari-multi": (
        "One agent for six games at once; others by --tasks.environments.",
        _at_once(_ATARI_CPU, _SIX_GAMES, frames=5_000_000),
    ),
    "atari-57": (
        "One agent for all of IMPALA's 57 games at once, for a GPU and many cores.",
        _at_once(_ATARI_GPU, _GAMES, frames=50_000_000),
    ),
    "atari-paper": (
        "IMPALA's published settings, 200M frames; --agent.torso deep for its deep network.",
        _ATARI_PAPER,
    ),
    "atari-deep": (
        "Pong, deep residual network, for a GPU; not the paper's schedule and image scaling.",
        dataclasses.replace(_ATARI, agent=AgentConfig(torso="deep", frame_stack=4)),
    ),
    "atari-lstm": (
        "Pong, LSTM instead of stacked frames; not the paper's schedule and image scaling.",
        dataclasses.replace(
            _ATARI,
            environment=dataclasses.replace(_ATARI.environment, last_action=True, last_reward=True),
            agent=AgentConfig(torso="shallow", core="lstm"),
        ),
    ),
    "atari-a3c": (
        "Pong with actor-critic (A3C), without replay and V-trace; also other games.",
        _ATARI_A3C,
    ),
    "atari-a3c-small": (
        "Pong as atari-a3c, with the small network of A3C's code: 47x47 images and an LSTM.",
        _ATARI_A3C_SMALL,
    ),
    "atari-q": (
        "Breakout with asynchronous one-step Q-learning, without replay.",
        _ATARI_Q,
    ),
    "atari-q-replay": (
        "Breakout with double three-step Q-learning from replay.",
        _ATARI_Q_REPLAY,
    ),
    "bandit": (
        "Meta-learning: an LSTM finds the better of two dependent arms.",
        _BANDIT,
    ),
    "bandit-independent": (
        "Meta-learning with two independent arms.",
        _BANDIT_INDEPENDENT,
    ),
    "bandit-eleven": (
        "Meta-learning: five pulls of eleven arms, one of which is informative.",
        _BANDIT_ELEVEN,
    ),
}
"""Name -> (one line for `impala presets`, configuration)."""
