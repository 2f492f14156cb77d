"""The experiment's tasks and arms, as flags of `impala train`."""

from typing import NamedTuple


class Tier(NamedTuple):
    """Tasks, and how long they are trained."""

    preset: str
    tasks: tuple[str, ...]
    frames: int  # of each task in a cycle
    cycles: int
    flags: tuple[str, ...]
    fresh: int  # unrolls per update


MINUTES = Tier(
    preset="catch",
    tasks=(
        'Catch{"shift": 0, "marked": true}',
        'Catch{"shift": 1, "marked": true}',
        'Catch{"shift": 2, "marked": true}',
    ),
    frames=45_000,
    cycles=2,
    flags=(
        *("--evaluator.episodes", "32", "--optimiser.no-decay-to-zero"),
        # A policy that is certain of one task's controls must still explore in the next.
        *("--impala.entropy-cost", "0.05"),
    ),
    fresh=16,
)

HOURS = Tier(
    preset="atari",
    tasks=("ALE/SpaceInvaders-v5", "ALE/Krull-v5", "ALE/BeamRider-v5"),
    frames=5_000_000,
    cycles=2,
    flags=("--evaluator.episodes", "10", "--optimiser.no-decay-to-zero"),
    fresh=8,
)

TIERS = {"minutes": MINUTES, "hours": HOURS}


def arms(tier: Tier) -> dict[str, list[str]]:
    """Arm -> flags. "separate" stands for one run per task: separate-0, separate-1, ..."""
    fresh = str(tier.fresh)  # per update, equal in every arm, so that all make as many updates
    history = tier.frames * tier.cycles * len(tier.tasks)
    fresh_only = ["--mix.fresh", fresh, "--mix.replayed", "0"]
    clear = [
        *["--mix.fresh", fresh, "--mix.replayed", fresh],
        *["--replay.rule", "reservoir", "--replay.capacity-frames", str(history // 2)],
        *["--impala.policy-cloning-cost", "0.01", "--impala.value-cloning-cost", "0.005"],
    ]
    no_cloning = [*["--impala.policy-cloning-cost", "0", "--impala.value-cloning-cost", "0"]]
    return {
        **{
            f"separate-{task}": [*fresh_only, *_frames(tier, only=task)]
            for task in range(len(tier.tasks))
        },
        "simultaneous": [*fresh_only, *_frames(tier), "--tasks.order", "simultaneous"],
        "sequential": [*fresh_only, *_frames(tier)],
        "clear": [*clear, *_frames(tier)],
        "without cloning": [*clear, *no_cloning, *_frames(tier)],
        "small replay": [
            *[*clear, *_frames(tier)],
            *["--replay.capacity-frames", str(history // 20)],
        ],
        "replay only": [
            *[*clear, *_frames(tier)],
            *["--mix.replayed", str(2 * tier.fresh), "--mix.no-learn-from-fresh"],
        ],
    }


def _frames(tier: Tier, only: int | None = None) -> list[str]:
    frames = [str(tier.frames if only in (None, task) else 0) for task in range(len(tier.tasks))]
    cycles = str(tier.cycles)
    return [
        "--tasks.environments",
        *tier.tasks,
        "--tasks.frames",
        *frames,
        "--tasks.cycles",
        cycles,
    ]
