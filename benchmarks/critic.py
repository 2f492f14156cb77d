"""IMPALA on CartPole, from scratch and from a pre-trained critic: frames until it passes.

Both have a baseline with a network of its own. Pre-training fits it to the returns of the first,
random policy, which stays as it is; then IMPALA runs for as many frames as it does from scratch.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import passing

PASSED = 475.0  # mean return
_PRE_TRAINING = 100_000  # frames
_IMPALA = 750_000
_VARIANTS = {
    "from scratch": ("--total-frames", str(_IMPALA)),
    "critic first": (
        *("--phases", f"critic:{_PRE_TRAINING}", "impala"),
        *("--total-frames", str(_PRE_TRAINING + _IMPALA)),
    ),
}


def measure(seeds: Sequence[int] = (1, 2, 3, 4, 5)) -> dict[str, list[float]]:
    """Returns frames to the pass line for each variant and seed, including pre-training."""
    measured: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    for seed in seeds:
        for variant, frames in measured.items():
            flags = ("--agent.separate-baseline", "--evaluator.every-frames", "10000")
            passed = passing.train(
                "cartpole", PASSED, *flags, *_VARIANTS[variant], "--seed", str(seed)
            )
            frames.append(passed.frames)
            print(f"{variant}, seed {seed}: {passed.frames:,.0f} frames", flush=True)
    return measured


def table(measured: Mapping[str, Sequence[float]]) -> str:
    """Markdown."""
    lines = [
        f"| IMPALA | frames to {PASSED:.0f}, seed by seed | median | without pre-training |",
        "|---|---|---:|---:|",
    ]
    for variant, frames in measured.items():
        median = statistics.median(frames)
        without = median - (_PRE_TRAINING if variant == "critic first" else 0)
        each = ", ".join(f"{one:,.0f}" for one in frames)
        lines.append(f"| {variant} | {each} | {median:,.0f} | {without:,.0f} |")
    return "\n".join(lines)
