"""Draws learning curves of log directories: `python -m benchmarks.curves OUTPUT.png LOGDIR...`."""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    """Reads each run's metrics.jsonl and draws its mean return of the last hundred episodes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("logdirs", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    figure, (over_frames, over_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for logdir in arguments.logdirs:
        lines = (logdir / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if _return(row) is not None]
        returns = [_return(row) for row in rows]
        over_frames.plot([row["frames"] / 1e6 for row in rows], returns, label=logdir.name)
        over_time.plot([row["seconds"] / 60 for row in rows], returns, label=logdir.name)
    over_frames.set(xlabel="million frames", ylabel="return, mean of the last 100 episodes")
    over_time.set(xlabel="minutes of training")
    over_frames.legend()
    figure.tight_layout()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=100)


def _return(row: dict[str, float]) -> float | None:
    return next((v for name, v in row.items() if name.endswith("/return_recent")), None)


if __name__ == "__main__":
    main()
