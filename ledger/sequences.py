"""Experiments of continual learning: sequences of tasks, and the arms that are compared on them."""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks that are trained in turn, and with what."""

    preset: str
    flags: Sequence[str]
    """Those of every arm, of whatever task."""
    tasks: Sequence[str]
    frames: int
    """Frames of each task in a cycle."""
    cycles: int
    fresh: int
    """Unrolls per update, in every arm, so that all make as many updates."""
    unroll_length: int
    frame_skip: int = 1

    @property
    def history(self) -> int:
        """Environment frames of a run in which every task is trained."""
        return self.frames * len(self.tasks) * self.cycles


SEPARATE = "separate-"  # prefix of the arms that train one task alone, by its number


def arms(of: Tasks) -> Mapping[str, Sequence[str]]:
    """Returns the arms: name -> arguments of `impala train`.

    docs/continual-learning.md says what each is. All but `clear` differ in one thing from another.
    """
    fresh = ("--mix.fresh", str(of.fresh))
    fresh_only = (*fresh, "--mix.replayed", "0")
    half = (*fresh, "--mix.replayed", str(of.fresh))
    only = (*fresh, "--mix.replayed", str(2 * of.fresh), "--mix.no-learn-from-fresh")
    cloning, no_cloning = _cloning("0.01", "0.005"), _cloning("0", "0")
    recent = 4 * of.fresh * of.unroll_length * of.frame_skip  # frames: those of four updates
    equal_compute = (*half, *no_cloning, *_replay("fifo", recent))
    simultaneous = ("--tasks.order", "simultaneous", "--tasks.no-anneal-anew")
    varied = {
        "simultaneous": (*fresh_only, *simultaneous),
        "simultaneous-equal-compute": (*equal_compute, *simultaneous),
        "sequential": fresh_only,
        "sequential-equal-compute": equal_compute,
        "clear": (*half, *cloning, *_replay("reservoir", of.history // 2)),
        "clear-20th": (*half, *cloning, *_replay("reservoir", of.history // 20)),
        "fifo-20th": (*half, *cloning, *_replay("fifo", of.history // 20)),
        "no-cloning-20th": (*half, *no_cloning, *_replay("reservoir", of.history // 20)),
        "replay-only": (*only, *cloning, *_replay("reservoir", of.history // 2)),
    }
    alone = {
        f"{SEPARATE}{task}": (*fresh_only, *_tasks(of, {task})) for task in range(len(of.tasks))
    }
    return _of_every(of, alone) | _of_every(of, varied, _all_tasks(of))


def reservoirs(of: Tasks) -> Mapping[str, Sequence[str]]:
    """Returns arms that say what makes a reservoir too small; each differs from `clear-20th`."""
    cloning, fresh = _cloning("0.01", "0.005"), ("--mix.fresh", str(of.fresh))
    varied = {
        f"clear-{name}": (
            *(*fresh, "--mix.replayed", str(times * of.fresh)),
            *(*cloning, *_replay("reservoir", of.history // share)),
        )
        for name, share, times in (
            ("8th", 8, 1),
            ("200th", 200, 1),
            ("20th-three-quarters", 20, 3),
        )
    }
    return _of_every(of, varied, _all_tasks(of))


def _of_every(
    of: Tasks, arms: Mapping[str, Sequence[str]], flags: Sequence[str] = ()
) -> dict[str, Sequence[str]]:
    every = (of.preset, *of.flags, "--learner.unroll-length", str(of.unroll_length))
    return {arm: (*every, *own, *flags) for arm, own in arms.items()}


def _all_tasks(of: Tasks) -> Sequence[str]:
    return _tasks(of, set(range(len(of.tasks))))


def _tasks(of: Tasks, trained: set[int]) -> Sequence[str]:
    frames = [str(of.frames if task in trained else 0) for task in range(len(of.tasks))]
    return (
        *("--tasks.environments", *of.tasks, "--tasks.frames", *frames),
        *("--tasks.cycles", str(of.cycles)),
    )


def _replay(rule: str, frames: int) -> Sequence[str]:
    return ("--replay.rule", rule, "--replay.capacity-frames", str(frames))


def _cloning(policy: str, value: str) -> Sequence[str]:
    return ("--impala.policy-cloning-cost", policy, "--impala.value-cloning-cost", value)
