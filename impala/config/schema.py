"""Every setting of a run, as frozen dataclasses.

Nothing here makes an object or imports TensorFlow: `impala.parts.build` turns names into objects.
The docstring under each field is its help text on the command line, with its unit; ranges are
declared with `Range` and checked by `impala.config.values`.
"""

import dataclasses
import json
from typing import Annotated, Any, ClassVar, Literal

from impala.parts.components import ALGORITHM, CORE, OPTIMISER, SINK, TORSO


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive limits of a number, checked when a configuration is made."""

    low: float
    high: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Operational:
    """Marks a setting, or a section, that changes neither what is played nor what is learned.

    It may differ between the peers of a run, and when a run resumes. Every other setting matters:
    away from its default, a version that does not know it refuses to go on.
    """


OPERATIONAL = Operational()


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """Marks a text that is a JSON object; YAML and Python may give the object itself."""


JSON_OBJECT = JsonObject()


MOST_EVALUATION_EPISODES = 1000  # in one report, whose returns are filed


Positive = Annotated[int, Range(1)]


Count = Annotated[int, Range(0)]


Cost = Annotated[float, Range(0.0)]


Share = Annotated[float, Range(0.0, 1.0)]


Scale = Annotated[float, Range(1e-12)]


Decay = Annotated[float, Range(0.0, 1 - 1e-6)]


Limit = Annotated[float, Range(1e-12, 1e30)]


@dataclasses.dataclass(frozen=True)
class AtariConfig:
    """Preprocessing of ALE games, for environments whose id starts with ALE/."""

    frame_skip: Positive = 4
    """Frames that an action is repeated for."""
    frame_skip_most: Count = 0
    """If it is not 0, an action lasts for a random number of frames, from frame_skip to this one:
    2 to 4 in Gym's v0 games (since Gym 0.9.2 with sticky_actions 0.25). max_pool must be off."""
    max_pool: bool = True
    """The observation is the maximum over the last two frames; otherwise it is the last one."""
    sticky_actions: Share = 0.0
    """Probability that the emulator repeats the previous action (0.25 in ALE/...-v5 elsewhere)."""
    full_action_set: bool = False
    """All 18 joystick actions instead of the game's minimal action set. Needed by tasks of several
    games, whose minimal sets give the same number to different actions."""
    actions: tuple[Count, ...] = ()
    """Restrict the action set to these indices into it; empty means all of them. What leaves out
    FIRE is refused in games in which nothing happens without it, such as Breakout."""
    action_table: bool = False
    """Restrict the action set by game, as A3C's code does: Pong to NOOP, RIGHT and LEFT,
    Breakout to FIRE, RIGHT and LEFT. Other games have all of their actions."""
    height: Annotated[int, Range(16, 210)] = 84
    """Observation height in pixels (47 for torso strided_valid)."""
    width: Annotated[int, Range(16, 160)] = 84
    """Observation width in pixels."""
    noop_max: Annotated[int, Range(0, 2**31 - 1)] = 30
    """At most this many no-op frames at the start of an episode."""
    life_loss_ends: bool = True
    """A lost life sets discount 0 on that step; the game continues without a reset."""
    max_frames_per_episode: Annotated[int, Range(1, 2**31 - 1)] = 108_000
    """Frames after which an episode is truncated (30 minutes of play)."""


@dataclasses.dataclass(frozen=True)
class RepeatConfig:
    """Action repeat of Gymnasium environments (ALE has frame_skip)."""

    most: Positive = 1
    """Frames per action, fewer at the end of an episode; the maximum if the repeat is learned."""
    learned: bool = False
    """The agent chooses the repeat, as one more part of its action."""
    discount: Share = 1.0
    """gamma within a repeated action, usually that of objective.discount. 1: rewards are summed and
    a step is discounted once, however many frames it took. Below 1, reported returns
    are sums of the discounted rewards, lower than the environment's own."""


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """The environment."""

    id: str = "ALE/Pong-v5"
    """ALE/<Game>-v5, Catch, any registered Gymnasium id (module:id imports the module first),
    or one of your own, as module:attribute."""
    kwargs: Annotated[str, JSON_OBJECT] = "{}"
    """Keyword arguments of the environment, or of gymnasium.make, as a JSON object."""
    vectorization: Annotated[Literal["sync", "async", "own"], OPERATIONAL] = "sync"
    """Gymnasium environments: sync, in the actor's process; async, a process for each; own, the
    vector environment registered under the id (CartPole and bandits have one), or sync if there is
    none. ALE games (which have threads), Catch, and classes of your own that are no gymnasium.Env
    cannot be async."""
    repeat: RepeatConfig = RepeatConfig()
    text_characters: Annotated[int, Range(0, 1000)] = 0
    """How texts in observations are seen: 0, which words occur (256 numbers, by hashing); else so
    many of their first characters, each as a choice."""
    last_action: bool = False
    """Add the last action to the observation."""
    last_reward: bool = False
    """Add the last (raw) reward to the observation."""
    time_in_episode: bool = False
    """Add the number of steps since the episode began to the observation."""
    atari: AtariConfig = AtariConfig()

    def keyword_arguments(self) -> dict[str, Any]:
        """Returns what `kwargs` says.

        Raises:
          ValueError: it is not a JSON object.
        """
        return keyword_arguments("environment.kwargs is", self.kwargs)


def keyword_arguments(what: str, text: str) -> dict[str, Any]:
    """Returns keyword arguments that are written as a JSON object.

    Args:
      what: has the text, for the message: "environment.kwargs is".
      text: to be read.

    Raises:
      ValueError: it is not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        arguments, why = None, str(error)
    else:
        why = f"it is a {type(arguments).__name__}"
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{what} {text!r}, which is not a JSON object ({why}). Write one, such as "
            """'{"continuous": true}'."""
        )
    return arguments


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """Several environments (tasks) for one agent. Other environment settings apply to each."""

    environments: tuple[str, ...] = ()
    """Ids, optionally followed by keyword arguments: Catch{"rows":8}. Empty: environment.id."""
    order: Literal["sequential", "simultaneous"] = "sequential"
    """One after another, or all at once."""
    frames: tuple[Count, ...] = ()
    """Environment frames of each task in a cycle, 0 for a task that is only evaluated; the run ends
    after cycles times their sum. Empty: total_frames is divided evenly."""
    cycles: Positive = 1
    """Number of passes over the tasks."""
    anneal_anew: bool = False
    """Anneal learning rate, entropy cost, exploration and teachers' weights anew in each task's
    turn, instead of once over the run (or its phase). Needs sequential tasks."""


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """Evaluators, which play every task with frozen parameters."""

    every_frames: Count = 0
    """Environment frames of training between two evaluations; 0: a fiftieth of total_frames, or
    none if every_seconds is set. The ends of phases and of tasks' turns are evaluated too."""
    every_seconds: Annotated[float, Range(0.0), OPERATIONAL] = 0.0
    """Seconds of training between two evaluations; 0: frames alone count."""
    episodes: Annotated[int, Range(1, MOST_EVALUATION_EPISODES)] = 20
    """Episodes of each task per evaluation."""
    max_steps: Annotated[int, Range(1, 2**31 - 1)] = 108_000
    """Agent steps after which an evaluation cuts an episode off; what follows counts as the next
    one. Lower it for tasks without episodes: then each of the `episodes` has so many steps."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""


@dataclasses.dataclass(frozen=True)
class EpsilonConfig:
    """Exploration of an epsilon-greedy policy: Mnih et al. 2016, supplement 8."""

    anneal: Share = 0.1
    """Share of the phase over which epsilon falls linearly from 1; 0: epsilon is constant."""
    finals: tuple[Share, ...] = (0.1, 0.01, 0.5)
    """Final values of epsilon; each environment draws one of them."""
    weights: tuple[Cost, ...] = (0.4, 0.3, 0.3)
    """Probability of each final value, up to a common factor."""


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The network: [frame stack] -> torso -> [core] -> policy and baseline heads."""

    torso: Annotated[str, TORSO] = "mlp"
    """mlp; small: one convolution, for images as small as MinAtar's; strided: four, with padding;
    strided_valid: four, without, for 47x47; shallow: two; deep: the residual network; auto: shallow
    for images of 32x32 or more, small for smaller ones, else mlp, and for images beside vectors one
    torso for each image and an mlp; or MODULE:CLASS. shallow and deep are those of Espeholt et al.
    2018."""
    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Widths of the mlp torso's layers, in units. shallow and deep end in one layer of 256,
    small in one of 128."""
    core: Annotated[str, CORE] = "feed_forward"
    """Recurrent part between torso and heads: feed_forward (none), lstm, or MODULE:CLASS."""
    lstm_size: Positive = 256
    """Units of the LSTM core."""
    frame_stack: Positive = 1
    """Frames that the torso sees at once. They are kept in the core state, so each is sent once."""
    normalise_observations: bool = False
    """Shift and scale the floating-point numbers of observations to mean 0 and variance 1, clipped
    at 10, by running statistics of all that the learner takes in. They are parameters."""
    standardise_images: bool = True
    """Standardise each image of unsigned integers to mean 0 and variance 1; otherwise divide by the
    largest value, as in the papers. Inputs with a mean far from 0 slow down learning: LeCun et al.
    1998, Efficient BackProp, 4.3."""
    policy: Literal["stochastic", "epsilon_greedy"] = "stochastic"
    """stochastic: the network outputs a distribution of the action; epsilon_greedy: it outputs
    Q-values, as q_learning needs."""
    epsilon: EpsilonConfig = EpsilonConfig()
    random_warm_up: bool = False
    """Draw actions uniformly from their box until the first update, while replay warms up
    (mix.warm_up_unrolls). For sac."""
    separate_baseline: bool = False
    """Give the baseline its own torso and core; otherwise it shares the policy's."""
    popart: bool = False
    """Normalise the baseline's targets and the advantages of each task by the mean and deviation of
    its returns, for tasks whose rewards differ in size (PopArt): van Hasselt et al. 2016, arXiv
    1602.07714; several tasks: Hessel et al. 2018, arXiv 1809.04474."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The return that is maximised, for every algorithm."""

    discount: Share = 0.99
    """gamma, multiplied with the environment's discount."""
    reward_clipping: Literal["none", "sign", "abs_one", "soft_asymmetric"] = "none"
    """none; sign: -1, 0 or 1; abs_one: clip to [-1, 1]; soft_asymmetric: 5 tanh(r / 5), times 0.3
    where r < 0."""
    reward_scale: float = 1.0
    """Multiplies the reward before it is clipped: from 1e-12 to 1e30, or negative. With sign, its
    size has no effect."""


@dataclasses.dataclass(frozen=True)
class PolicyGradientConfig:
    """Weights of the losses of a policy and a baseline."""

    baseline_cost: Cost = 0.5
    """Weight of 0.5 (target - V)^2."""
    entropy_cost: Cost = 0.01
    """Weight of the entropy bonus; with entropy_target, at the start."""
    entropy_anneal: Share = 0.0
    """Share of the phase over which entropy_cost changes linearly to entropy_cost_end, or
    entropy_target to entropy_target_end; 0: never."""
    entropy_cost_end: Cost = 0.0
    """Value of entropy_cost for the rest of the phase."""
    entropy_target: Share = 0.0
    """Learn the weight of the entropy bonus so that the entropy comes to this share of the largest;
    of a box, to that of actions uniform over this share of each dimension. 0: entropy_cost."""
    entropy_target_end: Share = 0.0
    """Value of entropy_target for the rest of the phase, more than 0."""


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(PolicyGradientConfig):
    """V-trace actor-critic: Espeholt et al. 2018, arXiv 1802.01561, with the cloning losses of
    CLEAR: Rolnick et al. 2018, arXiv 1811.11682. Losses are summed over T and B.
    """

    policy_cloning_cost: Cost = 0.01
    """Weight of KL(mu || pi) on replayed unrolls; 0 is off."""
    value_cloning_cost: Cost = 0.005
    """Weight of (V - recorded V)^2 on replayed unrolls; 0 is off."""
    clip_rho_threshold: Cost = 1.0
    """rho-bar: clips the importance weights of the value targets; determines the fixed point."""
    clip_pg_rho_threshold: Cost = 1.0
    """rho-bar of the policy gradient."""
    clip_c_threshold: Cost = 1.0
    """c-bar: clips the trace; influences the speed of convergence."""
    vtrace_lambda: Share = 1.0
    """Decay of the trace, 1 in the paper."""
    correction: Literal["vtrace", "one_step", "epsilon", "none"] = "vtrace"
    """What corrects for an older behaviour policy. The others are section 5.2.2's, for comparison:
    their value targets are n-step returns. one_step: importance weights in the policy
    gradient alone. epsilon: no importance weights, log(pi + 1e-6) in the policy gradient; not for
    actions of a box. none: no correction."""
    clip_advantage_to_positive: bool = False
    """Clip negative advantages of the policy gradient to 0."""
    trust_region: Cost = 0.0
    """Trust region for very old data: Schmitt et al. 2020, arXiv 1909.11583. Steps in whose state
    KL(pi || mu) is larger than this, in nats, are not learned from (cloning excepted), and returns
    bootstrap from the value there. 0 is off."""


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Advantage actor-critic: A3C, Mnih et al. 2016, arXiv 1602.01783, with one learner; or with
    generalised advantages: Schulman et al. 2016, arXiv 1506.02438. Losses are summed over T and B.
    """

    gae_lambda: Share = 1.0
    """1: n-step returns as in A3C, n up to the end of the unroll; less: GAE(lambda)."""


@dataclasses.dataclass(frozen=True)
class ImpactConfig(PolicyGradientConfig):
    """IMPACT, for data that are old or used several times: Luo et al. 2020, arXiv 1912.00167.
    Losses are summed over T and B.
    """

    clip: Share = 0.3
    """epsilon: the surrogate is constant where a ratio is beyond 1 - epsilon or 1 + epsilon."""
    rho: Annotated[float, Range(1.0)] = 2.0
    """Largest ratio of the behaviour policy to the target network's that counts."""
    gae_lambda: Share = 0.995
    """Decay of the trace."""
    target_updates: Positive = 16
    """Updates after which the target network becomes a copy of the agent."""


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """Teachers: trained agents that the policy imitates on its own data, for impala, actor_critic
    and impact: Schmitt et al. 2018 (kickstarting), arXiv 1803.03835. Losses are summed over T and
    B.
    """

    logdirs: tuple[str, ...] = ()
    """Log directories whose newest agent teaches, or checkpoints: one, or one for each task (with
    agent.popart). The run keeps a copy, from which it resumes."""
    policy_cost: Cost = 1.0
    """Weight of KL(teacher || pi); with kl_target, at the start."""
    value_cost: Cost = 0.5
    """Weight of 0.5 (V of the teacher - V)^2; 0 is off."""
    anneal: Share = 0.5
    """Share of the phase over which both weights fall linearly to 0; 0: they stay."""
    kl_target: Cost = 0.0
    """Learn the weight of KL(teacher || pi) so that this comes to so many nats for each part of the
    action; set anneal to 0. 0: policy_cost."""


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """Critic pre-training: fits the baseline to discounted returns, bootstrapped from the last
    value. Losses are summed over T and B.
    """

    trains: Literal["all", "baseline"] = "all"
    """all: every variable that the baseline is computed from, so that a torso which it shares moves
    the policy too; baseline: those that serve the baseline alone (with a shared torso, one linear
    layer), and the policy does not change, but for epsilon and statistics of normalised
    observations."""
    baseline_cost: Cost = 1.0
    """Weight of 0.5 (return - V)^2."""


@dataclasses.dataclass(frozen=True)
class DemonstrationsConfig:
    """Episodes that others have played, for the algorithm clone."""

    source: str = ""
    """minari:DATASET; or MODULE:ATTRIBUTE, a function without arguments that returns an iterable of
    episodes as Minari has them: docs/start-from.md."""


@dataclasses.dataclass(frozen=True)
class CloneConfig:
    """Cloning of demonstrations, as a phase before reinforcement learning: clone:200000 impala. The
    phase counts the frames of the demonstrations, with repetitions. Losses are summed over T and B.
    """

    policy_cost: Cost = 1.0
    """Weight of -log pi(a) of the demonstrated actions."""
    baseline_cost: Cost = 0.5
    """Weight of 0.5 (return - V)^2."""


@dataclasses.dataclass(frozen=True)
class QLearningConfig:
    """Q-learning with a target network: Mnih et al. 2016, arXiv 1602.01783, section 4, with one
    learner; double Q-learning: van Hasselt et al. 2016, arXiv 1509.06461. Summed over T and B.
    """

    steps: Positive = 1
    """Rewards in a target before it is bootstrapped: n, but not beyond the end of the unroll."""
    double: bool = False
    """Double Q-learning: the online network selects the action, the target network evaluates it."""
    target_updates: Positive = 1000
    """Updates between copies of the network into the target network."""
    target_frames: Count = 0
    """Environment frames between these copies, instead of target_updates; 0: count updates."""
    target_episodes: Count = 0
    """Episodes between these copies, instead of target_updates; 0: count updates."""
    huber_delta: Scale = 1.0
    """Threshold of the Huber loss: errors beyond it count linearly."""


@dataclasses.dataclass(frozen=True)
class SacConfig:
    """Soft actor-critic: Haarnoja et al. 2018, arXiv 1801.01290; with a learned temperature: arXiv
    1812.05905. Summed over T and B.
    """

    critic_hidden_sizes: tuple[Positive, ...] = (256, 256)
    """Widths of the layers of both critics and of the value network, in units."""
    value_network: bool = False
    """The form of the first paper: a state-value network V with a target copy, which is trained
    towards the smaller critic and computes the critics' targets; the policy follows the first
    critic, as in its authors' code (the paper has the smaller one). Otherwise the critics have
    target copies, as in the second paper."""
    target_step: Share = 0.005
    """tau: step of the target network towards the network that it follows, at each update."""
    temperature: Scale = 1.0
    """alpha: initial weight of the entropy."""
    learn_temperature: bool = True
    """Adjust alpha so that the policy's entropy reaches entropy_per_dimension; else it is fixed."""
    entropy_per_dimension: float = -1.0
    """Target entropy per dimension of the action, with actions scaled to (-1, 1)."""


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """The optimiser."""

    name: Annotated[str, OPTIMISER] = "rmsprop"
    """rmsprop, adam, adamw, or MODULE:CLASS."""
    learning_rate: Scale = 6e-4
    """Step size at the start of the run, or of a phase."""
    decay_to_zero: bool = True
    """Decay the learning rate linearly to 0 over the run or phase; otherwise it is constant."""
    decay: Share = 0.99
    """rmsprop: decay of the mean square, which starts at one as in the paper's TensorFlow 1."""
    momentum: Share = 0.0
    """rmsprop: momentum."""
    centred: bool = False
    """rmsprop: divide by the root of the variance instead of the mean square: Graves 2013, arXiv
    1308.0850."""
    beta1: Decay = 0.9
    """adam, adamw: decay of the first moment."""
    beta2: Decay = 0.999
    """adam, adamw: decay of the second moment."""
    weight_decay: Cost = 0.01
    """adamw: share of weights, not of biases, that a step of learning rate 1 takes off."""
    epsilon: Annotated[float, Range(0.0)] = 0.0
    """rmsprop: added inside the square root; adam, adamw: added outside it. 0: the optimiser's
    default, 0.01 for rmsprop and 1e-8 for the others. It is 0 again where a file, an environment
    variable or a flag names another optimiser and no epsilon."""
    clip_global_norm: Annotated[float, Range(0.0, 1e30)] = 40.0
    """Gradients are scaled down to this global norm; 0: they are not clipped."""


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Which data an update learns from."""

    fresh: Positive = 32
    """Fresh unrolls taken from the queue for each update, or for each mix.updates updates."""
    replayed: Count = 0
    """Unrolls per update from replay."""
    learn_from_fresh: bool = True
    """Train on fresh unrolls; otherwise they only go to replay."""
    warm_up_unrolls: Positive = 100
    """Unrolls that replay must hold, unless it is full, before updates begin. A phase that begins
    with an empty replay warms up again."""
    updates: Positive = 1
    """Updates per batch of fresh unrolls; more than one needs mix.learn_from_fresh to be false."""
    max_policy_lag: Count = 0
    """Largest policy lag of a fresh unroll, in updates; older ones are dropped, which favours fast
    environments and short episodes. 0: no limit."""
    lag_budget: Count = 0
    """Largest policy lag of a fresh unroll, in updates, kept by pacing: actors wait before they
    begin an unroll, the learner waits for unrolls that are due, and none is dropped for its age. At
    least actor.num_envs / mix.fresh. 0: no pacing."""
    exact_lag: Annotated[int, Range(-1)] = -1
    """Policy lag of every fresh unroll, in updates, however many actors there are: for experiments.
    actor.num_envs must divide mix.fresh. -1: as it comes."""

    @property
    def batch_size(self) -> int:
        """Unrolls that an update learns from, B."""
        return (self.fresh if self.learn_from_fresh else 0) + self.replayed


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Replay, used if mix.replayed is not 0."""

    rule: Literal["reservoir", "fifo"] = "reservoir"
    """reservoir: a uniform sample of everything ever added; fifo: the newest unrolls."""
    capacity_frames: Positive = 10_000_000
    """Environment frames it may hold."""
    memory: Annotated[Count, OPERATIONAL] = 0
    """Bytes of memory for unrolls; those that do not fit are compressed, and kept in the log
    directory or, with storage memory, beside them. 0: a quarter of the host's or container's.
    Demonstrations may take as much again, and are refused if they need more."""
    burn_in: Count = 0
    """Burn-in of recurrent agents, in steps: the first rows of a replayed unroll are not learned
    from, they only bring the core state up to date with the present parameters: Kapturowski et al.
    2019 (R2D2), section 3. Less than learner.unroll_length; 0 is off."""
    across_phases: bool = False
    """Keep what an earlier phase stored; otherwise each phase begins with an empty replay."""
    storage: Annotated[Literal["disk", "memory"], OPERATIONAL] = "disk"
    """disk: in the log directory, and still there after a crash; memory: lost with the process."""


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """The learner service."""

    unroll_length: Positive = 20
    """Agent steps per unroll (T)."""
    queue_unrolls: Positive = 64
    """Capacity of the queue of fresh unrolls; when it is full, receipts wait (back-pressure).
    With permits (mix.lag_budget, mix.exact_lag, deterministic) it has no effect."""
    max_envs_per_message: Annotated[Positive, OPERATIONAL] = 512
    """Largest number of environments whose unrolls one message may hold (E)."""
    max_in_flight: Annotated[int, Range(1, 2**31 - 1)] = 2
    """Messages that an actor may have sent without a receipt."""
    checkpoint_seconds: Annotated[float, Range(1.0), OPERATIONAL] = 300.0
    """Seconds between checkpoints; one is also written at most 30 s after a run's first update, at
    the end and when a learner is stopped."""
    checkpoints_kept: Annotated[Positive, OPERATIONAL] = 3
    """Checkpoints kept to resume from; the oldest are deleted."""
    milestones: Annotated[Count, OPERATIONAL] = 10
    """Keep the agent in LOGDIR/milestones so many times, in equal shares of the run; 0: never."""
    milestone_hours: Annotated[float, Range(0.0), OPERATIONAL] = 0.0
    """Keep the agent in LOGDIR/milestones also every so many hours of training; 0: never."""
    snapshots: Annotated[Literal["auto", "always", "never"], OPERATIONAL] = "auto"
    """Whether to keep snapshots of the agent for evaluators, in LOGDIR/snapshots; training waits
    while 20 are not evaluated. auto: from when the run's first evaluator joins; with impala train,
    if it starts one."""
    inference: Annotated[Literal["auto", "never"], OPERATIONAL] = "auto"
    """Whether the learner acts for actors that have no network of their own. auto: as soon as one
    calls Act, unless actors need permits (mix.lag_budget, mix.exact_lag, deterministic)."""
    log_seconds: Annotated[float, Range(0.1), OPERATIONAL] = 5.0
    """Seconds between rows of telemetry; metrics.jsonl and TensorBoard get rows that cover a 200th
    of the run so far, a minute at most. Not read with deterministic."""
    jit_compile: Annotated[bool, OPERATIONAL] = True
    """Compile the update with XLA where it is computed on a GPU: there it is 1.2 to 1.9 times as
    fast (an H200) once it is compiled, which takes half a minute beside the first updates."""
    bfloat16: bool = False
    """Compute the torso of standardised images in bfloat16 where that is faster: on a GPU, with
    AMX, or with AVX-512 BF16 of AMD. Everything else is computed in float32."""
    threads: Annotated[Count, OPERATIONAL] = 0
    """TensorFlow threads of one operation of the update; 0 means all cores this process may use.
    Operations that do not wait for each other run at the same time, whatever this is."""
    devices: Annotated[Positive | Literal["all"], OPERATIONAL] = 1
    """GPUs of this host that compute each update together, every one of them a part of the batch;
    all: as many as there are. Their number must divide the batch."""


@dataclasses.dataclass(frozen=True)
class QuarantineConfig:
    """Temporary refusal of actors that send what no correct actor sends."""

    blames: Count = 3
    """Number of messages with impossible contents, or of updates made not finite, within ten
    minutes after which an actor is refused: for a minute at first, and twice as long each further
    time, up to an hour. 0: never. impala train ends with status 1 instead, except for updates made
    not finite."""


@dataclasses.dataclass(frozen=True)
class ChecksConfig:
    """Checks of what messages mean, beside those of ranges: whether the policy is the one sent,
    rows follow one another, and episodes add up. impala status names actors that make such
    violations; docs/wire-protocol.md describes them.
    """

    on_violation: Literal["warn", "refuse", "off"] = "warn"
    """warn: count it and log a warning; refuse: also refuse the message and blame the actor, which
    repeatedly leads to quarantine; off: do not look."""


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    """Bounds of what actors send. A message with a number beyond its limit is refused; the receipt
    names the number and the setting. Raise a limit if your environment needs it.
    """

    frames_per_step: Annotated[int, Range(1, 1_000_000)] = 1
    """Most frames of one step of a Gymnasium environment whose info says `frames`, before
    environment.repeat multiplies it. ALE games have environment.atari.frame_skip instead."""
    reward: Limit = 1e6
    """Largest absolute value of a raw reward."""


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """Settings of actors, which the learner sends to each of them."""

    num_envs: Annotated[int, Range(1, 4096)] = 32
    """Environments per actor process, in num_groups groups."""
    num_groups: Annotated[int, Range(1, 8)] = 2
    """Groups of environments: while one steps, the network acts for another. Divides num_envs."""
    env_threads: Positive = 1
    """ALE threads per group; with environment.atari.frame_skip_most each game has its own."""
    hang_seconds: Annotated[float, Range(1.0, 86400.0)] = 600.0
    """Time limit in seconds of an unroll, a step of an evaluator, closing environments and, for
    each task, making them the first time (a learner does so, too): beyond it the process logs where
    it waits, and ends. With environment.vectorization async, a step has a tenth of it and a start
    half; beyond that only the process of that environment is replaced, and its episode truncated.
    """
    max_environment_bytes: Count = 0
    """With environment.vectorization async: resident memory in bytes beyond which the process of an
    environment is replaced at the end of an episode. 0: no limit."""
    step_info: tuple[str, ...] = ()
    """Names in the environment's info whose numbers of every step are recorded, as
    step/TASK/info/NAME; *: all names. Of other names, only the last step of an episode counts."""


@dataclasses.dataclass(frozen=True)
class TelemetryConfig:
    """Where rows of telemetry go."""

    sinks: tuple[Annotated[str, SINK], ...] = ()
    """wandb, mlflow, or sinks of your own, each as MODULE:CLASS: they get every row, as the
    console does."""
    log_episodes: bool = False
    """Log a line for each episode in training: its task, actor, return, length, frames and info."""


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    environment: EnvironmentConfig = EnvironmentConfig()
    tasks: TasksConfig = TasksConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    agent: AgentConfig = AgentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    algorithm: Annotated[str, ALGORITHM] = "impala"
    """impala, actor_critic, impact, critic, clone, q_learning, sac, or MODULE:CLASS. Its settings
    are in the section of the same name, in snake case."""
    phases: tuple[str, ...] = ()
    """Algorithms one after another, each but the last with its number of environment frames, as in
    critic:500000 impala. Empty: algorithm, for the whole run."""
    impala: ImpalaConfig = ImpalaConfig()
    actor_critic: ActorCriticConfig = ActorCriticConfig()
    impact: ImpactConfig = ImpactConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    teacher: TeacherConfig = TeacherConfig()
    critic: CriticConfig = CriticConfig()
    clone: CloneConfig = CloneConfig()
    q_learning: QLearningConfig = QLearningConfig()
    sac: SacConfig = SacConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    mix: MixConfig = MixConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    limits: Annotated[LimitsConfig, OPERATIONAL] = LimitsConfig()
    actor: Annotated[ActorConfig, OPERATIONAL] = ActorConfig()
    quarantine: Annotated[QuarantineConfig, OPERATIONAL] = QuarantineConfig()
    checks: Annotated[ChecksConfig, OPERATIONAL] = ChecksConfig()
    telemetry: Annotated[TelemetryConfig, OPERATIONAL] = TelemetryConfig()
    total_frames: Positive = 25_000_000
    """Environment frames after which training ends, unless tasks.frames says otherwise."""
    total_episodes: Count = 0
    """Episodes in training after which it ends before total_frames, over which schedules still
    extend. 0: only frames count."""
    seed: Annotated[int, Range(0, 2**64 - 1)] = 0
    """Seed of the network's first weights and, with index and incarnation, of every actor."""
    deterministic: bool = False
    """Makes two runs with one actor equal bit for bit: the lag is exact (mix.exact_lag; 0 if that
    is not set), TensorFlow runs one deterministic operation at a time, on one thread unless
    learner.threads says more, actors are not seeded by their incarnation, and a row of telemetry
    comes every 100 updates. Slower: with a lag of 0, the actor and the learner take turns."""

    @property
    def exact_lag(self) -> int | None:
        """The policy lag of every fresh unroll, in updates; None if it is as it comes."""
        if self.mix.exact_lag < 0:
            return 0 if self.deterministic else None
        return self.mix.exact_lag

    @property
    def is_paced(self) -> bool:
        """Whether actors need permits to begin unrolls."""
        return self.exact_lag is not None or self.mix.lag_budget > 0

    own: ClassVar[tuple[Any, ...]] = ()  # `impala.parts.sections.Part`s, of a class made for them
