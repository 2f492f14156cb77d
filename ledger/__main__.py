"""`make results`: runs experiments, records them, and renders the pages that show them."""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence

from impala.runtime import process
from ledger import records, rendering, running
from ledger.experiments import EXPERIMENTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
_STOPPED = 75  # exit status, as that of `impala train`


def main() -> int:
    """Runs a command line. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ledger", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the experiments, and what is recorded of them")
    commands.add_parser("render", help="write pages and pictures from the records")
    commands.add_parser("check", help="fail if a page or picture is not what its records give")
    run = commands.add_parser("run", help="run what has no record yet; resumes what was stopped")
    run.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help="see list")
    run.add_argument("--arms", nargs="+", default=[], help="only these")
    run.add_argument("--seeds", nargs="+", type=int, default=[], help="instead of its own")
    run.add_argument(
        "--work", type=pathlib.Path, default=ROOT / "runs/ledger", help="for log directories"
    )
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "list":
                return _list()
            case "render":
                print("\n".join(rendering.render(ROOT)) or "All pages are up to date.")
            case "check":
                return _check()
            case "run":
                process.outlive_readers()
                experiment = EXPERIMENTS[arguments.name]
                running.run(experiment, ROOT, arguments.work, arguments.arms, arguments.seeds)
    except running.Stopped as stopped:
        print(stopped, file=sys.stderr)
        return _STOPPED
    except (records.RecordError, rendering.RenderError, running.RunError) as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1
    return 0


def _list() -> int:
    """Prints what is recorded, and how many commits of learning ago."""
    ledger = records.read(ROOT)
    since = functools.cache(lambda commit: running.commits_since(ROOT, commit))
    for experiment in EXPERIMENTS.values():
        print(f"{experiment.name}: {experiment.question}")
        for arm in experiment.arms:
            found = ledger.get((experiment.name, arm), [])
            seeds = [record.seed for record in found]
            missing = [seed for seed in experiment.seeds if seed not in seeds]
            print(f"  {arm}: recorded {_listed(seeds)}; missing {_listed(missing)}")
            for commit in dict.fromkeys(record.commit for record in found):
                count = since(commit)
                known = "unknown" if count is None else count
                print(f"    {commit[:7]}, commits of learning since: {known}")
    return 0


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"


def _check() -> int:
    problems = rendering.check(ROOT)
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        print("Run make results, look at what it writes, and commit it.", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
