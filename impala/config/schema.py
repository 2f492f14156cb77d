"""Every setting of a run, as frozen dataclasses.

Nothing here makes an object or imports TensorFlow: `impala.build` turns names into objects.
The docstring under each field is its help text on the command line, with its unit; ranges are
declared with `Range` and checked by `impala.config.values`.
"""

import dataclasses
from typing import Annotated, Literal


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive limits of a number, checked when a configuration is made."""

    low: float
    high: float = float("inf")


MOST_EVALUATION_EPISODES = 1000  # in one report, whose returns are filed


Positive = Annotated[int, Range(1)]


Count = Annotated[int, Range(0)]


Cost = Annotated[float, Range(0.0)]


Share = Annotated[float, Range(0.0, 1.0)]


Scale = Annotated[float, Range(1e-12)]


Limit = Annotated[float, Range(1e-12, 1e30)]


AlgorithmName = Literal["impala", "actor_critic", "critic", "q_learning", "sac"]


@dataclasses.dataclass(frozen=True)
class AtariConfig:
    """How ALE games are played and seen. Used by environments whose id starts with ALE/."""

    frame_skip: Positive = 4
    """Frames that an action is repeated for; the observation is the maximum over the last two."""
    sticky_actions: Share = 0.0
    """Probability that the emulator repeats the previous action (0.25 in ALE/...-v5 elsewhere)."""
    full_action_set: bool = False
    """All 18 joystick actions instead of those the game reads."""
    actions: tuple[Count, ...] = ()
    """Restrict the action set to these indices into it; empty means all of them."""
    height: Annotated[int, Range(16, 210)] = 84
    """Observation height in pixels (47 for the small A3C torso)."""
    width: Annotated[int, Range(16, 160)] = 84
    """Observation width in pixels."""
    noop_max: Count = 30
    """At most this many no-op frames at the start of an episode."""
    life_loss_ends: bool = True
    """A lost life sets discount 0 on that step; the game goes on and nothing is reset."""
    max_frames_per_episode: Positive = 108_000
    """Frames after which an episode is truncated (30 minutes of play)."""


@dataclasses.dataclass(frozen=True)
class RepeatConfig:
    """How many frames of a Gymnasium environment an action is held for (ALE has frame_skip)."""

    most: Positive = 1
    """This many, or fewer at the end of an episode; if it is learned, at most."""
    learned: bool = False
    """Whether the agent chooses how many: one more part of its action."""
    discount: Share = 1.0
    """gamma of the rewards within a step and of what comes after it, as a rule objective.discount;
    1: rewards are summed, and a step is discounted as one however long it took."""


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """What the agent plays."""

    id: str = "ALE/Pong-v5"
    """ALE/<Game>-v5, Catch, or any registered Gymnasium id (module:id imports the module first)."""
    kwargs: str = "{}"
    """Keyword arguments of gymnasium.make as a JSON object."""
    vectorization: Literal["sync", "async", "own"] = "sync"
    """Gymnasium environments in the actor's process; a process each; or, own: as the environment
    vectorises itself, if it does (bandits do). ALE has its own threads."""
    repeat: RepeatConfig = RepeatConfig()
    last_action: bool = False
    """Add the last action to the observation."""
    last_reward: bool = False
    """Add the last (raw) reward to the observation."""
    time_in_episode: bool = False
    """Add the number of steps since the episode began to the observation."""
    atari: AtariConfig = AtariConfig()


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """Several environments for one agent; what is not said here is as for one environment."""

    environments: tuple[str, ...] = ()
    """Ids, each maybe with keyword arguments behind it: Catch{"rows":8}. Empty: environment.id."""
    order: Literal["sequential", "simultaneous"] = "sequential"
    """One after another, or all at once."""
    frames: tuple[Count, ...] = ()
    """Environment frames of each task in a cycle, 0 for one that is only evaluated; the run ends
    after cycles times their sum. Empty: total_frames is dealt out evenly."""
    cycles: Positive = 1
    """How often the tasks come one after another."""


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """What evaluators do, which play every task with frozen parameters."""

    every_frames: Count = 0
    """Environment frames of training between two evaluations; 0: a fiftieth of the run."""
    episodes: Annotated[int, Range(1, MOST_EVALUATION_EPISODES)] = 20
    """Episodes of each task per evaluation."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""


@dataclasses.dataclass(frozen=True)
class EpsilonConfig:
    """How much an epsilon-greedy policy explores: Mnih et al. 2016, supplement 8."""

    anneal: Share = 0.1
    """Share of the phase over which epsilon falls from 1; 0: it is final from the beginning."""
    finals: tuple[Share, ...] = (0.1, 0.01, 0.5)
    """What it falls to; each environment draws one of these."""
    weights: tuple[Cost, ...] = (0.4, 0.3, 0.3)
    """How likely each of them is."""


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The network: [frame stack] -> torso -> [core] -> policy and baseline heads."""

    torso: Literal["mlp", "small", "strided", "shallow", "deep"] = "mlp"
    """mlp; small: one convolution, for images as small as MinAtar's; strided: four, for small ones;
    shallow: two; deep: the residual network. The last two are those of Espeholt et al. 2018."""
    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Widths of the mlp torso's layers, in units. shallow and deep end in one layer of 256,
    small in one of 128."""
    core: Literal["feed_forward", "lstm"] = "feed_forward"
    """What stands between torso and heads."""
    lstm_size: Positive = 256
    """Units of the LSTM core."""
    frame_stack: Positive = 1
    """Frames that the torso sees at once; kept in the core state, so each frame travels once."""
    standardise_images: bool = True
    """Whether convolutions see each image of unsigned integers with mean 0 and variance 1, or else
    as shares of the largest value, as in the papers. A background far from 0, which all weights
    see, drowns what little moves in front of it: LeCun et al. 1998, Efficient BackProp, 4.3."""
    policy: Literal["stochastic", "epsilon_greedy"] = "stochastic"
    """stochastic: the network says a distribution of the action; epsilon_greedy: the values of the
    actions, as q_learning learns them."""
    epsilon: EpsilonConfig = EpsilonConfig()
    separate_baseline: bool = False
    """A torso and a core of its own for the baseline; otherwise it shares the policy's."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What return is to be maximised, whatever the algorithm."""

    discount: Share = 0.99
    """gamma, multiplied with the environment's discount."""
    reward_clipping: Literal["none", "abs_one", "soft_asymmetric"] = "none"
    """none; abs_one: clip to [-1, 1]; soft_asymmetric: 5 tanh(r / 5), times 0.3 where r < 0."""
    reward_scale: float = 1.0
    """Multiplies the reward before it is clipped."""


@dataclasses.dataclass(frozen=True)
class PolicyGradientConfig:
    """What every loss of a policy and a baseline weighs."""

    baseline_cost: Cost = 0.5
    """Weight of 0.5 (target - V)^2."""
    entropy_cost: Cost = 0.01
    """Weight of the entropy bonus."""
    entropy_anneal: Share = 0.0
    """Share of the phase over which entropy_cost changes linearly to entropy_cost_end; 0: never."""
    entropy_cost_end: Cost = 0.0
    """What entropy_cost has become after that, for the rest of the phase."""


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(PolicyGradientConfig):
    """V-trace actor-critic: Espeholt et al. 2018, arXiv 1802.01561, with the cloning losses of
    CLEAR: Rolnick et al. 2018, arXiv 1811.11682. Losses are summed over T and B.
    """

    policy_cloning_cost: Cost = 0.01
    """Weight of KL(mu || pi) on replayed unrolls; 0 is off."""
    value_cloning_cost: Cost = 0.005
    """Weight of (V - V then)^2 on replayed unrolls; 0 is off."""
    clip_rho_threshold: Cost = 1.0
    """rho-bar: clips the importance weights of the value targets; the fixed point depends on it."""
    clip_pg_rho_threshold: Cost = 1.0
    """rho-bar of the policy gradient."""
    clip_c_threshold: Cost = 1.0
    """c-bar: clips the trace; convergence speed depends on it."""
    vtrace_lambda: Share = 1.0
    """Decay of the trace, 1 in the paper."""
    clip_advantage_to_positive: bool = False
    """Learn the policy only from advantages above 0."""


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Advantage actor-critic: A3C, Mnih et al. 2016, arXiv 1602.01783, with one learner; or with
    generalised advantages: Schulman et al. 2016, arXiv 1506.02438. Losses are summed over T and B.
    """

    gae_lambda: Share = 1.0
    """1: n-step returns as in A3C, n up to the end of the unroll; less: GAE(lambda)."""


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """Critic pre-training: only what serves the baseline alone learns; the policy stays as it is.
    Targets are discounted returns, bootstrapped from the last value. Summed over T and B.
    """

    baseline_cost: Cost = 1.0
    """Weight of 0.5 (return - V)^2."""


@dataclasses.dataclass(frozen=True)
class QLearningConfig:
    """Q-learning with a target network: Mnih et al. 2016, arXiv 1602.01783, section 4, with one
    learner; double Q-learning: van Hasselt et al. 2016, arXiv 1509.06461. Summed over T and B.
    """

    steps: Positive = 1
    """Rewards in a target before it is bootstrapped: n, but not beyond the end of the unroll."""
    double: bool = False
    """The network that learns chooses the action whose value the target network tells."""
    target_updates: Positive = 1000
    """Updates after which the target network becomes what the network is by then."""
    huber_delta: Scale = 1.0
    """Errors beyond this count linearly."""


@dataclasses.dataclass(frozen=True)
class SacConfig:
    """Soft actor-critic: Haarnoja et al. 2018, arXiv 1801.01290; with a learned temperature: arXiv
    1812.05905. Summed over T and B.
    """

    critic_hidden_sizes: tuple[Positive, ...] = (256, 256)
    """Widths of the layers of both critics, in units."""
    target_step: Share = 0.005
    """tau: how far the target critics move towards the critics, each update."""
    temperature: Scale = 1.0
    """alpha, at first."""
    learn_temperature: bool = True
    """Move it so that the policy's entropy becomes entropy_per_dimension; otherwise it stays."""
    entropy_per_dimension: float = -1.0
    """Entropy that is wanted, per dimension of the action, as if the action's box were (-1, 1)."""


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """How gradients become steps."""

    name: Literal["rmsprop", "adam"] = "rmsprop"
    """Which optimiser."""
    learning_rate: Scale = 6e-4
    """Step size at the start of the run, or of a phase."""
    decay_to_zero: bool = True
    """Decay the learning rate linearly to 0 over the run or phase; otherwise it is constant."""
    decay: Share = 0.99
    """rmsprop: decay of the mean square, which starts at one as in the paper's TensorFlow 1."""
    momentum: Share = 0.0
    """rmsprop: momentum."""
    beta1: Share = 0.9
    """adam: decay of the first moment."""
    beta2: Share = 0.999
    """adam: decay of the second moment."""
    epsilon: Scale = 0.01
    """rmsprop: added inside the square root; adam: added outside it."""
    clip_global_norm: Scale = 40.0
    """Gradients are scaled down to this global norm."""


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Which data an update learns from."""

    fresh: Positive = 32
    """Unrolls per update from the queue."""
    replayed: Count = 0
    """Unrolls per update from replay."""
    learn_from_fresh: bool = True
    """Whether fresh unrolls are learned from; otherwise they only go to replay."""
    warm_up_unrolls: Positive = 100
    """Unrolls that replay must hold before the first update; until then they only go there."""
    updates: Positive = 1
    """Updates for each time that fresh unrolls are taken; several need mix.no-learn-from-fresh."""
    max_policy_lag: Count = 0
    """Updates that a fresh unroll may be behind; older ones are dropped. 0: any number."""

    @property
    def batch_size(self) -> int:
        """Unrolls that an update learns from, B."""
        return (self.fresh if self.learn_from_fresh else 0) + self.replayed


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """What is kept of the past, if mix.replayed is not 0."""

    rule: Literal["reservoir", "fifo"] = "reservoir"
    """reservoir: a uniform sample of everything ever added; fifo: the newest."""
    capacity_frames: Positive = 10_000_000
    """Environment frames it may hold."""
    capacity_bytes: Count = 0
    """Compressed bytes it may hold; 0 is no limit."""
    storage: Literal["disk", "memory"] = "disk"
    """disk: in the log directory, and still there after a crash; memory: lost with the process."""
    on_damage: Literal["empty", "refuse"] = "empty"
    """What to do about a damaged replay on disk. empty: move it aside and go on with an empty one;
    refuse: end, until it is restored or --empty-replay gives it up. One that is missing, or holds
    less than the checkpoint counts, is refused in either case: somebody moved or replaced it."""


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """The learner service."""

    unroll_length: Positive = 20
    """Agent steps per unroll (T)."""
    queue_unrolls: Positive = 64
    """Unrolls that wait between the wire and the batch; when they are this many, receipts wait."""
    max_envs_per_message: Positive = 512
    """Largest number of environments whose unrolls one message may hold (E)."""
    max_in_flight: Positive = 2
    """Messages without a receipt that an actor may have."""
    checkpoint_seconds: Annotated[float, Range(1.0)] = 300.0
    """Seconds between checkpoints; one is also written at most 30 s after a run's first update, at
    the end and when a learner is stopped."""
    checkpoints_kept: Positive = 3
    """Checkpoints kept; the oldest are deleted."""
    log_seconds: Annotated[float, Range(0.1)] = 5.0
    """Seconds between rows of telemetry."""
    jit_compile: bool = False
    """Compile the update with XLA: worth trying on a GPU, slower on a CPU."""
    bfloat16: bool = False
    """Compute the update's convolutions and products in bfloat16 if the CPU has instructions for it
    (AVX-512 BF16 or AMX): faster and coarser."""
    threads: Count = 0
    """TensorFlow threads of the update; 0 means all cores this process may use."""


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """When updates that are not finite, with no unroll to blame, are too many. The variables then
    go back to the newest checkpoint; if it happens again soon, the run ends with status 1.
    """

    max_skips: Positive = 5
    """Skipped batches among the last window_updates that are too many."""
    window_updates: Positive = 100
    """Batches that are looked back on; also the good updates after which another return to a
    checkpoint is allowed."""


@dataclasses.dataclass(frozen=True)
class QuarantineConfig:
    """When the learner refuses an actor that sends what no honest actor sends."""

    blames: Count = 3
    """Messages with impossible contents, and updates spoilt, after which an actor is refused for a
    while; 0: never."""
    window_seconds: Annotated[float, Range(1.0)] = 600.0
    """Seconds within which so many count together."""
    seconds: Annotated[float, Range(1.0, 3600.0)] = 60.0
    """Seconds of a first quarantine. Each further one lasts twice as long, an hour at most;
    after an hour without blame it is the first again."""


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    """What the learner takes from actors. A message with a number beyond its limit is refused, and
    the receipt names the number and the setting. Generous: raise one if your environment needs it.
    """

    info_names: Annotated[int, Range(0, 1000)] = 64
    """Names of numbers in episodes' info that a run records; the rest is counted and left out."""
    frames_per_step: Annotated[int, Range(1, 1_000_000)] = 1
    """Most frames of one step of a Gymnasium environment whose info says `frames`, before
    environment.repeat multiplies it. ALE games have environment.atari.frame_skip instead."""
    reward: Limit = 1e6
    """Largest absolute value of a raw reward."""
    observation: Limit = 1e10
    """Largest absolute value of a number in an observation or a core state."""
    policy_parameter: Annotated[float, Range(1e-12, 4e8)] = 1e7
    """Largest absolute value of a parameter of the behaviour policy: a logit, an action value, a
    mean. -1e9, which stands for a masked choice, is always taken."""
    baseline: Limit = 1e8
    """Largest absolute value of a value estimate."""


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """What the learner tells every actor."""

    num_envs: Annotated[int, Range(1, 4096)] = 32
    """Environments per actor process, in num_groups groups."""
    num_groups: Annotated[int, Range(1, 8)] = 2
    """Groups of environments: while one steps, another is inferred. Divides num_envs."""
    env_threads: Positive = 1
    """ALE threads per group."""
    hang_seconds: Annotated[float, Range(1.0, 86400.0)] = 600.0
    """If an unroll takes longer than this, an environment hangs: the actor says where, and ends.
    For environments in processes of their own see environment_seconds, which must be much shorter.
    """
    environment_seconds: Annotated[float, Range(0.1, 86400.0)] = 60.0
    """If a step of an environment in a process of its own takes longer than this, its process is
    replaced and its episode cut as by a time limit; its start may take five times as long. Six
    times this must be less than hang_seconds."""
    max_environment_bytes: Count = 0
    """Memory in bytes that the process of one environment may hold; if it holds more at the end of
    an episode, it is replaced. 0: any."""
    max_memory_bytes: Count = 0
    """Memory in bytes that an actor may hold together with all its processes; if it holds more
    after an unroll, it starts anew. 0: any."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: what is played, what is learned and how."""

    environment: EnvironmentConfig = EnvironmentConfig()
    tasks: TasksConfig = TasksConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    agent: AgentConfig = AgentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    algorithm: AlgorithmName = "impala"
    """What is learned; its settings are those under the same name."""
    phases: tuple[str, ...] = ()
    """Algorithms one after another, each but the last with its environment frames, as in
    critic:500000 impala. Empty: algorithm, from beginning to end."""
    impala: ImpalaConfig = ImpalaConfig()
    actor_critic: ActorCriticConfig = ActorCriticConfig()
    critic: CriticConfig = CriticConfig()
    q_learning: QLearningConfig = QLearningConfig()
    sac: SacConfig = SacConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    mix: MixConfig = MixConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    limits: LimitsConfig = LimitsConfig()
    actor: ActorConfig = ActorConfig()
    guard: GuardConfig = GuardConfig()
    quarantine: QuarantineConfig = QuarantineConfig()
    total_frames: Positive = 25_000_000
    """Environment frames after which training ends, unless tasks.frames says otherwise."""
    seed: Count = 0
    """Seed of the network's first weights and, with index and incarnation, of every actor."""
