"""`make abuse`: attacks that no test has the time for, an hour of them on two cores.

Parts: `caller`, one bad caller with credentials beside three honest actors; `fuzz`, a million
fuzzed messages; `damage`, ten thousand damaged files and fifty starts on them; `strangers`, what
callers without credentials cost. Ends with status 1 if something does not hold.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from abuse import trial

_FUZZED = 1_000_000  # messages, half of them by the decoder and half on a live port
_CASES, _STARTS = 10_000, 50  # of damage
_LEAST_SHARE = 0.8  # of the honest throughput that is left beside a bad caller
_LEAST_SCORE = 0.99  # of Catch
_TRIALS = {
    "harmless": {"absurd": False},
    "absurd": {"absurd": True},
    # Nor the relay, which turns away a connection that is refused too often: all of it comes in.
    "absurd, no quarantine": {
        "absurd": True,
        "guarded": False,
        "settings": ("--quarantine.blames", 0),
    },
}


def caller(arguments: argparse.Namespace) -> int:
    """Prints what became of three trials."""
    with tempfile.TemporaryDirectory(prefix="impala-abuse-") as directory:
        try:
            for line in _trials(pathlib.Path(directory), arguments):
                print(line, flush=True)
        except AssertionError as error:
            print(f"DOES NOT HOLD: {error}")
            return 1
    return 0


def _trials(directory: pathlib.Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of a report; AssertionError where something does not hold."""
    outcomes: dict[str, trial.Outcome] = {}
    yield "| caller | score | honest frames/s | unrolls accepted of it | learner's exit status |"
    yield "|---|---:|---:|---:|---:|"
    for place, (name, settings) in enumerate(_TRIALS.items()):
        outcome = outcomes[name] = trial.run(
            directory / str(place),
            count=arguments.messages,
            per_second=arguments.per_second,
            frames=arguments.frames,
            seed=arguments.seed,
            **settings,  # type: ignore[arg-type]
        )
        yield (
            f"| {name} | {outcome.score:.3f} | {outcome.honest_frames_per_second:,.0f} | "
            f"{sum(outcome.caller['accepted'].values()):,} | {outcome.learner_status} |"
        )
    for name, outcome in outcomes.items():
        sent, seconds = outcome.caller["sent"], outcome.caller["seconds"]
        yield f"\n{name}: {sent:,} messages in {seconds:.0f} s. {outcome.caller['heard']}"
        yield f"Dropped {outcome.accounts['dropped']}, rejected {outcome.accounts['rejected']}."
        yield f"The status says: {outcome.member}"
        assert outcome.learner_status == 0, f"{name}: status {outcome.learner_status}."
    absurd, harmless = outcomes["absurd"], outcomes["harmless"]
    share = absurd.honest_frames_per_second / harmless.honest_frames_per_second
    yield f"\nShare of the honest throughput that is left: {share:.3f}."
    assert share >= _LEAST_SHARE, f"The honest actors keep {share:.2f} of their throughput."
    assert absurd.score >= _LEAST_SCORE, f"Catch came to {absurd.score}."
    assert int(absurd.member["blamed"]) > 0, "The bad caller is not named."


def fuzz(arguments: argparse.Namespace) -> int:
    """Runs the slow tests of fuzzed messages with more of them."""
    del arguments
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow", "-k", "fuzzed"]
    environ = {**os.environ, "FUZZED": str(_FUZZED // 2)}
    return subprocess.run([*command, "tests/test_attacks.py"], env=environ, check=False).returncode


def damage(arguments: argparse.Namespace) -> int:
    """Damages the files of a run."""
    numbers = ("--cases", str(_CASES), "--starts", str(_STARTS), "--seed", str(arguments.seed))
    return subprocess.run([sys.executable, "-m", "damage", *numbers], check=False).returncode


def strangers(arguments: argparse.Namespace) -> int:
    """Measures what callers without credentials cost."""
    del arguments
    return subprocess.run([sys.executable, "-m", "benchmarks", "attack"], check=False).returncode


_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "caller": caller,
    "fuzz": fuzz,
    "damage": damage,
    "strangers": strangers,
}


def main() -> int:
    """Runs the parts that were asked for; all of them by default."""
    parser = argparse.ArgumentParser(
        prog="make abuse", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(_PARTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=20_000, help="of the caller")
    parser.add_argument("--per-second", type=float, default=200.0, help="messages of the caller")
    parser.add_argument("--frames", type=int, default=1_500_000, help="of each trial's training")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - _PARTS.keys():
        parser.error(f"no part {sorted(unknown)[0]!r}; there are {', '.join(_PARTS)}")
    failed = []
    for part in arguments.parts or _PARTS:
        print(f"\n# {part}\n", flush=True)
        if _PARTS[part](arguments):
            failed.append(part)
    print(f"\nDoes not hold: {', '.join(failed)}." if failed else "\nAll of it holds.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
