"""Runs the missing arms, then writes table and figure.

`python -m benchmarks.continual DIRECTORY [--tier minutes] [--seeds 1 2 3] [--arms clear ...]`
"""

import argparse
import pathlib
import subprocess
import sys
import time

from benchmarks.continual import report, tiers
from impala.logdir import checkpoint, continual
from impala.schedule import tasks


def main() -> None:
    """Runs the experiment; a run with a `done` file is not repeated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.continual", description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--tier", choices=tiers.TIERS, default="minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="only these")
    arguments = parser.parse_args()
    tier = tiers.TIERS[arguments.tier]
    arms = tiers.arms(tier)
    for name in arguments.arms or ():
        if name not in arms:
            parser.error(f"there is no arm {name!r}; there are {', '.join(arms)}")
    for seed in arguments.seeds:
        for name, flags in arms.items():
            if not arguments.arms or name in arguments.arms:
                run(arguments.directory, tier, name, flags, seed)
    report.write(arguments.directory, tier, arguments.seeds)


def run(directory: pathlib.Path, tier: tiers.Tier, arm: str, flags: list[str], seed: int) -> None:
    """Trains one arm with one seed, or resumes it."""
    logdir = report.logdir(directory, arm, seed)
    done = logdir / "done"
    if done.exists():
        return
    start = time.monotonic()
    logdir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "impala", "train", tier.preset, *tier.flags, *flags]
    with open(logdir / "console.log", "a", encoding="utf-8") as log:
        subprocess.run(
            [*command, "--seed", str(seed), "--logdir", str(logdir)],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    config = continual.read(logdir).config
    frames = checkpoint.load(logdir).counters.frames
    if frames < tasks.total_frames(config):
        raise SystemExit(f"{logdir} was stopped at {frames:,} frames; start again to go on.")
    seconds = time.monotonic() - start
    done.write_text(f"{seconds:.0f}\n", encoding="utf-8")
    print(f"{arm}, seed {seed}: {seconds:.0f} s", flush=True)


main()
