"""`make abuse`: one bad caller with credentials beside three honest actors, in three trials.

Fails if the honest actors with quarantine keep less than 80% of their throughput or score less than
0.99, if the caller is not named, or if anything that was saved is not finite or not exact.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from abuse import trial

_TRIALS = {
    "harmless": {"absurd": False},
    "absurd": {"absurd": True},
    "absurd, no quarantine": {"absurd": True, "settings": ("--quarantine.blames", 0)},
}


def report(
    directory: pathlib.Path, count: int, per_second: float, frames: int, seed: int
) -> Iterator[str]:
    """Yields the lines of a report; AssertionError where something does not hold."""
    outcomes = {}
    yield "| caller | score | honest frames/s | accepted of its unrolls | learner's exit status |"
    yield "|---|---:|---:|---:|---:|"
    for place, (name, arguments) in enumerate(_TRIALS.items()):
        outcome = outcomes[name] = trial.run(
            *(directory / str(place),),
            count=count,
            per_second=per_second,
            frames=frames,
            seed=seed,
            **arguments,  # type: ignore[arg-type]
        )
        accepted = sum(outcome.caller["accepted"].values())
        yield (
            f"| {name} | {outcome.score:.3f} | {outcome.honest_frames_per_second:,.0f} | "
            f"{accepted:,} | {outcome.learner_status} |"
        )
    for name, outcome in outcomes.items():
        yield ""
        sent, seconds = outcome.caller["sent"], outcome.caller["seconds"]
        yield f"{name}: {sent:,} messages in {seconds:.0f} s. {outcome.caller['heard']}"
        yield f"Dropped {outcome.accounts['dropped']}, rejected {outcome.accounts['rejected']}."
        yield f"The status says: {outcome.member}"
        assert outcome.learner_status == 0, f"{name}: status {outcome.learner_status}."
    absurd, harmless = outcomes["absurd"], outcomes["harmless"]
    share = absurd.honest_frames_per_second / harmless.honest_frames_per_second
    yield ""
    yield f"Share of the honest throughput: {share:.3f}."
    assert share >= 0.8, f"The honest actors keep {share:.2f} of their throughput."
    assert absurd.score >= 0.99, f"Catch came to {absurd.score}."
    assert int(absurd.member["blamed"]) > 0, "The bad caller is not named."


def main() -> int:
    """Prints the report; status 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=200.0)
    parser.add_argument("--frames", type=int, default=1_500_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="impala-abuse-") as directory:
        try:
            for line in report(
                pathlib.Path(directory),
                *(arguments.count, arguments.per_second, arguments.frames, arguments.seed),
            ):
                print(line, flush=True)
        except AssertionError as error:
            print(f"DOES NOT HOLD: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
