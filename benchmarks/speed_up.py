"""Compares two actors with one at equal total frames: time until Q-learning passes CartPole.

Each run is `impala train cartpole-q --num-actors N`, with an evaluator that plays greedily. In Mnih
et al. 2016 (arXiv 1602.01783) a thread acts and computes gradients; here an actor only acts, and
the one learner makes the same updates for the same frames, however many actors there are.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import passing

PASSED = 475.0  # mean return
PAPER = {1: 1.0, 2: 3.0, 4: 6.3, 8: 13.3, 16: 24.1}
"""Threads -> speed-up of one-step Q-learning on seven Atari games: the paper's table 2."""


def measure(
    actors: Sequence[int] = (1, 2), seeds: Sequence[int] = (1, 2, 3)
) -> dict[int, list[float]]:
    """Returns seconds to the pass line for each number of actors and seed; infinite if never."""
    measured: dict[int, list[float]] = {number: [] for number in actors}
    for seed in seeds:  # alternating, as a shared machine's speed varies
        for number, seconds in measured.items():
            flags = ("--num-actors", str(number), "--seed", str(seed))
            seconds.append(passing.train("cartpole-q", PASSED, *flags).seconds)
            print(f"{number} actors, seed {seed}: {seconds[-1]:.1f} s", flush=True)
    return measured


def speed_ups(measured: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Returns the speed-ups of the medians over the smallest number of actors."""
    medians = {number: statistics.median(seconds) for number, seconds in measured.items()}
    slowest = medians[min(medians)]
    return {number: slowest / median for number, median in medians.items()}


def table(measured: Mapping[int, Sequence[float]]) -> str:
    """Returns a table in Markdown, beside the paper's numbers."""
    ours = speed_ups(measured)
    lines = [
        f"| actors | seconds to {PASSED:.0f}, seed by seed | median | speed-up | paper, threads |",
        "|---:|---|---:|---:|---:|",
    ]
    for number in sorted(ours.keys() | PAPER.keys()):
        cells = ["", "", ""]
        if number in ours:
            seconds = measured[number]
            cells = [
                ", ".join(f"{each:.0f}" for each in seconds),
                f"{statistics.median(seconds):.0f}",
                f"{ours[number]:.2f}",
            ]
        cells.append(f"{PAPER[number]:.1f}" if number in PAPER else "")
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines)
