"""Flags of other libraries, and our equivalents.

Names are those of Stable-Baselines3, CleanRL, RLlib, Sample Factory, TorchBeast and seed_rl. None
is a flag of the same command here.
"""

from collections.abc import Iterable

from impala.config import values

_RUN = {
    "--environment.id": "env env-id env-name environment game level gym-id",
    "--total-frames (environment frames)": (
        "total-timesteps timesteps total-steps num-timesteps num-frames max-frames total-env-steps "
        "total-environment-frames train-for-env-steps"
    ),
    "--optimiser.learning-rate": "lr learning-rate",
    "--optimiser.decay-to-zero": "anneal-lr lr-schedule",
    "--optimiser.name": "optim optimizer",
    "--optimiser.weight-decay": "weight-decay",
    "--optimiser.epsilon": "eps adam-eps rmsprop-eps adam-epsilon",
    "--optimiser.clip-global-norm": (
        "max-grad-norm grad-norm-clipping grad-clip clip-grad clip-grad-norm gradient-clip"
    ),
    "--objective.discount": "gamma discount discounting discount-factor",
    "--objective.reward-clipping": "reward-clip clip-rewards clip-reward reward-clipping",
    "--objective.reward-scale": "reward-scale reward-scaling",
    "--mix.fresh (unrolls per update; --mix.replayed adds replayed ones)": (
        "batch-size train-batch-size minibatch-size num-minibatches nminibatches"
    ),
    "--learner.unroll-length": (
        "n-steps num-steps nsteps unroll-length rollout rollout-length rollout-fragment-length"
    ),
    "--impala.entropy-cost (another algorithm's is under its name)": (
        "ent-coef entropy-coef entropy-coeff entropy-cost exploration-loss-coeff"
    ),
    "--impala.baseline-cost (another algorithm's is under its name)": (
        "vf-coef value-coef vf-loss-coeff value-loss-coeff value-loss-coef baseline-cost"
    ),
    "--actor-critic.gae-lambda": "gae-lambda",
    "--impala.vtrace-lambda": "vtrace-lambda",
    "--impala.clip-rho-threshold": "vtrace-rho vtrace-clip-rho-threshold rho-bar",
    "--impala.clip-c-threshold": "vtrace-c c-bar",
    "--algorithm": "algo alg rl-algo",
    "--sac.target-step": "tau polyak",
    "--q-learning.target-updates": (
        "target-update-interval target-network-frequency target-network-update-freq"
    ),
    "--agent.epsilon.anneal (share of the run)": "exploration-fraction",
    "--replay.capacity-frames": "buffer-size replay-size replay-buffer-size replay-capacity",
    "--mix.warm-up-unrolls": "learning-starts",
    "--agent.random-warm-up (for --mix.warm-up-unrolls)": "start-steps random-steps",
    "--agent.torso": "policy network model encoder encoder-type cnn",
    "--agent.hidden-sizes": "net-arch hidden-size hidden-sizes fcnet-hiddens",
    "--agent.core lstm": "use-lstm use-rnn lstm recurrent",
    "--agent.lstm-size": "rnn-size lstm-size lstm-cell-size",
    "--agent.frame-stack": "frame-stack framestack env-framestack num-stack",
    "--environment.atari.frame-skip": "frame-skip frameskip env-frameskip action-repeat",
    "--environment.atari.sticky-actions": "sticky-actions repeat-action-probability",
    "--actor.num-envs (environments of each actor)": (
        "n-envs num-envs nenvs num-envs-per-worker num-envs-per-env-runner envs-per-worker"
    ),
    "--learner.threads": "num-threads num-learner-threads torch-num-threads",
    "--logdir": (
        "save-dir savedir output-dir output out log-dir logs-dir train-dir checkpoint-dir "
        "local-dir storage-path experiment exp-name experiment-name run-name xpid"
    ),
    "--learner.checkpoint-seconds": (
        "checkpoint-freq checkpoint-frequency checkpoint-interval save-freq save-every-sec"
    ),
    "--learner.checkpoints-kept": "keep-checkpoints keep-checkpoints-num save-total-limit",
    "--learner.log-seconds": "log-interval log-freq log-every",
    "--evaluator.every-frames": "eval-freq eval-interval evaluation-interval",
    "--evaluator.episodes": "eval-episodes n-eval-episodes num-eval-episodes evaluation-duration",
    "--config": "config-file cfg",
    "--fresh": "overwrite restart reset",
    "a run goes on by itself: repeat its command (same --logdir); --fresh starts over": (
        "resume resume-from resume-from-checkpoint restore load load-path"
    ),
    "a GPU is used if TensorFlow finds one; CUDA_VISIBLE_DEVICES= keeps a process off it": (
        "device cuda gpu gpus num-gpus use-gpu use-cuda cpu"
    ),
    "LOGDIR/tensorboard is always written; impala train --tensorboard shows it": (
        "tensorboard-log tb use-tensorboard"
    ),
    "--telemetry.sinks wandb; LOGDIR has TensorBoard files and metrics.jsonl in any case": (
        "wandb with-wandb use-wandb wandb-project track"
    ),
    "impala record LOGDIR writes a video of an episode": "capture-video save-video video",
    "impala evaluate LOGDIR plays with a checkpoint": "mode test play",
}
"""For the commands that start a run: our equivalent -> names in other libraries."""

_COMMANDS = {
    "train": {
        **_RUN,
        "--evaluate": "eval with-eval",
        "--num-actors": "num-workers workers n-workers num-rollout-workers num-env-runners",
    },
    "check": {  # which has a --network of its own, and no log directory
        ours: names.replace("network ", "")
        for ours, names in _RUN.items()
        if ours not in ("--logdir", "--fresh")
    },
    "learner": {
        **_RUN,
        "--listen": "host port address bind server-address",
        "actors are processes of their own: impala actor --num-actors N": (
            "num-workers workers n-workers num-rollout-workers num-env-runners num-actors"
        ),
    },
    "actor": {
        "--learner": "server server-address address host",
        "--num-actors": "num-workers workers n-workers",
        "--num-envs": "n-envs nenvs envs-per-worker",
        "the learner says what is played: impala learner PRESET --environment.id ID": (
            "env env-id env-name environment"
        ),
    },
}


def check(command: str, argv: Iterable[str]) -> None:
    """Refuses the first flag that belongs to another library.

    Args:
      command: of impala.
      argv: its arguments.

    Raises:
      OptionError: names our equivalent.
    """
    names = known(command)
    for word in argv:
        flag = word.split("=")[0]
        name = flag.removeprefix("--").replace("_", "-").lower()
        if flag.startswith("--") and name in names:
            ours = names[name]
            answer = f"ours is {ours}" if ours.startswith("--") else ours
            raise values.OptionError(f"impala {command} has no {flag}; {answer}.")


def known(command: str) -> dict[str, str]:
    """Returns the recognised flags of other libraries, without dashes, and our equivalents."""
    table = _COMMANDS.get(command, {})
    return {name: ours for ours, names in table.items() for name in names.split()}
