"""Runs experiments: trains each arm with each seed, evaluates it, and writes its record.

What has a record is skipped. A run that was stopped is resumed by `impala train` in its log
directory, as long as the source that its result depends on is the same.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.setting import machine
from impala.commands.parsing import parse
from impala.commands.train import Train
from impala.config import values
from impala.config.schema import Config
from impala.logdir import atomic, json_lines, rows
from impala.runtime import process
from impala.runtime.signals import EndRequest
from impala.runtime.tether import tethered
from impala.schedule import tasks
from ledger import records
from ledger.experiments import Experiment
from ledger.records import Evaluation, Record

LEARNING = (
    *("vtrace", "impala/algorithms", "impala/agents", "learner/update", "learner/data"),
    *("actors", "impala/acting.py", "impala/environments", "impala/schedule", "impala/parts"),
    "impala/config/presets.py",
)
"""Where a change may change results."""
_POINTS = 100  # of a recorded training curve
_WAKE_SECONDS = 0.2


class RunError(RuntimeError):
    """An experiment cannot be run; the message says what to do."""


class Stopped(RuntimeError):
    """An experiment was stopped before its end; the same command resumes it."""


def run(
    experiment: Experiment,
    root: pathlib.Path,
    work: pathlib.Path,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> None:
    """Runs what has no record yet, seed by seed, and prints a line for each run.

    Args:
      experiment: what to run.
      root: of the source tree, which gets the records.
      work: the log directories are WORK/NAME/ARM-seedN.
      arms: only these; (): all of them.
      seeds: instead of the experiment's own.

    Raises:
      RunError: the source tree differs from its commit, an arm is unknown or has records with
        other settings, a run fails or was begun with other code.
      RecordError: a seed is not for reporting, or a record is damaged.
      Stopped: by a signal.
    """
    for arm in arms:
        if arm not in experiment.arms:
            raise RunError(f"{experiment.name} has no arm {arm!r}; it has {list(experiment.arms)}.")
    for seed in seeds or experiment.seeds:
        records.check_seed(seed)
    work = work.resolve()
    of_arms = [(seed, arm) for seed in seeds or experiment.seeds for arm in arms or experiment.arms]
    with EndRequest() as end:
        for seed, arm in of_arms:
            name = f"{experiment.name}, {arm}, seed {seed}"
            measured = records.read(root).get((experiment.name, arm), [])
            if seed in [record.seed for record in measured]:
                print(f"{name}: recorded already", flush=True)
                continue
            _check_alike(settings([*experiment.arms[arm], "--seed", str(seed)]), measured)
            print(f"{name}: running", flush=True)
            record = _Run(experiment, arm, seed, root, work, end).record()
            records.add(root, record)
            print(f"{name}: {record.frames:,} frames in {record.seconds:.0f} s", flush=True)


def _check_alike(config: Config, measured: Sequence[Record]) -> None:
    """Checks that a further seed of an arm has the settings of its records.

    Raises:
      RunError: a setting that both have, and that changes what is played or learned, differs.
    """
    for record in measured:
        differing = [
            each
            for each in values.differences(record.settings, values.to_dict(config))
            if (path := each.partition(":")[0]) != "seed"
            and not values.is_operational(type(config), path)
        ]
        if differing:
            raise RunError(
                f"{record.experiment}, {record.arm}: seed {record.seed} was recorded with other "
                f"settings than seed {config.seed} would have now ({'; '.join(differing)}). Run it "
                f"from commit {record.commit[:7]}, or delete the arm's records and run all of its "
                "seeds anew."
            )


def settings(arguments: Sequence[str]) -> Config:
    """Returns the settings of `impala train ARGUMENTS`, whatever the environment variables."""
    return _settings(tuple(arguments))


@functools.cache
def _settings(arguments: tuple[str, ...]) -> Config:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(_without_settings(before))
    try:
        return parse("train", Train, list(arguments)).settings
    finally:
        os.environ.clear()
        os.environ.update(before)


def commit(root: pathlib.Path) -> str:
    """Returns the commit that is checked out.

    Raises:
      RunError: files differ from it, other than documentation and records.
    """
    changed = _git(root, "status", "--porcelain", "--", ".", ":!docs", ":!*.md", ":!ledger/records")
    if changed:
        raise RunError(
            "The source differs from its commit, so a record could not say what was run:\n"
            f"{changed}\nCommit or stash these changes."
        )
    return _git(root, "rev-parse", "HEAD")


def commits_since(root: pathlib.Path, commit: str) -> int | None:
    """Returns how many commits changed what is learned since a commit; None: it is unknown."""
    try:
        return int(_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *LEARNING))
    except RunError:
        return None


def _git(root: pathlib.Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"git {words[0]} in {root}: {done.stderr.strip()}")
    return done.stdout.rstrip()


@dataclasses.dataclass
class _Begun:
    """What is known of a run before its end, kept beside its log directory."""

    commit: str
    settings: dict[str, Any]
    seconds: float = 0.0
    other_cpu_seconds: float = 0.0
    sessions: int = 0
    is_trained: bool = False
    is_prepared: bool = False


class _Run:
    """An arm with a seed."""

    def __init__(
        self,
        experiment: Experiment,
        arm: str,
        seed: int,
        root: pathlib.Path,
        work: pathlib.Path,
        end: EndRequest,
    ):
        """Reads what an earlier session has left.

        Raises:
          RunError: it was begun with other code or settings.
        """
        self._experiment, self._arm, self._seed, self._root = experiment, arm, seed, root
        self._end = end
        self._arguments = [*experiment.arms[arm], "--seed", str(seed)]
        self._config = settings(self._arguments)
        self._logdir = work / experiment.name / f"{arm}-seed{seed}"
        self._file = self._logdir.with_name(f"{self._logdir.name}.json")
        self._logdir.mkdir(parents=True, exist_ok=True)
        now = _Begun(commit(root), values.to_dict(self._config))
        self._begun = now
        if self._file.exists():
            self._begun = _Begun(**json.loads(self._file.read_text()))
        self._check()

    def record(self) -> Record:
        """Trains and evaluates, as far as that was not done before; returns the record."""
        begun = self._begun
        if not begun.is_trained:
            if not begun.is_prepared:
                if before := self._experiment.before.get(self._arm):
                    self._impala(*before)
                begun.is_prepared = True
                self._save()
            self._train()
        self._check()
        of_tasks = tasks.make(self._config.environment, self._config.tasks)
        played = [self._evaluate(number) for number in range(len(of_tasks))]
        return Record(
            experiment=self._experiment.name,
            arm=self._arm,
            seed=self._seed,
            command=f"impala train {shlex.join(self._arguments)}",
            commit=begun.commit,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            machine=machine(),
            settings=begun.settings,
            frames=played[0][1],
            seconds=round(max(begun.seconds, trained_seconds(self._logdir)), 1),
            other_cores=round(max(0.0, begun.other_cpu_seconds) / begun.seconds, 2),
            sessions=begun.sessions,
            training=training(self._logdir, self._experiment.milestones),
            evaluations=json_lines.read(self._logdir / "evaluations.jsonl", _rounded_report),
            final=[evaluation for evaluation, _ in played],
        )

    def _check(self) -> None:
        changed = commits_since(self._root, self._begun.commit)
        if changed != 0 or self._begun.settings != values.to_dict(self._config):
            what = "its settings" if changed == 0 else f"{changed or 'unknown'} commits of learning"
            raise RunError(
                f"{self._logdir} was begun at commit {self._begun.commit[:7]}, from which this "
                f"source differs by {what}. Check that commit out, or move {self._logdir} and "
                f"{self._file.name} away to begin again."
            )

    def _train(self) -> None:
        start, others = time.monotonic(), _cpu_seconds_of_others()
        self._begun.sessions += 1
        self._save()
        try:
            self._impala("train", *self._arguments, "--logdir", str(self._logdir))
            self._begun.is_trained = True
        finally:
            self._begun.seconds += time.monotonic() - start
            self._begun.other_cpu_seconds += _cpu_seconds_of_others() - others
            self._save()

    def _evaluate(self, task: int) -> tuple[Evaluation, int]:
        """Returns the evaluation of a task, and the frames that the agent was trained for."""
        output = self._logdir / f"final-{task}.json"
        words = [*self._experiment.evaluation, *(["--task", str(task)] if task else [])]
        self._impala("evaluate", str(self._logdir), *words, "--json", str(output))
        result = json.loads(output.read_text(encoding="utf-8"))
        episodes = result["episodes"]
        evaluation = Evaluation(
            task=result["environment"],
            command=f"impala evaluate LOGDIR {shlex.join(words)}",
            greedy=result["greedy"],
            seed=result["seed"],
            returns=[records.rounded(episode["episode_return"]) for episode in episodes],
            lengths=[episode["length"] for episode in episodes],
            info={
                name: [records.rounded(episode["info"][name]) for episode in episodes]
                for name in self._experiment.info
            },
            steps={
                name: [[records.rounded(x) for x in steps[name]] for steps in result["steps"]]
                for name in self._experiment.step_info
            },
        )
        return evaluation, result["frames_trained"]

    def _impala(self, *words: str) -> None:
        """Runs the `impala` command of the source tree, with its output in console.log.

        Args:
          words: its arguments, in which {ARM} and {seed} are replaced.

        Raises:
          Stopped: it was stopped by a signal, which is passed on to it.
          RunError: it failed.
        """
        console = self._logdir / "console.log"
        datasets = str(self._logdir.with_name("datasets"))
        environ = _without_settings(os.environ)
        environ |= {"PYTHONPATH": str(self._root), "MINARI_DATASETS_PATH": datasets}
        words = tuple(self._resolved(word) for word in words)
        with open(console, "a", encoding="utf-8") as log:
            # In a session of its own: it gets a signal once, from here or when this process dies.
            child = subprocess.Popen(
                tethered([*process.IMPALA, *words]),
                cwd=self._root,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while child.poll() is None and not self._end.wait(_WAKE_SECONDS):
                pass
            if self._end.received is not None:
                child.send_signal(self._end.received)
            status = child.wait()
        if self._end.is_set():
            raise Stopped(f"Stopped in {self._logdir}; the same command resumes it.")
        if status:
            raise RunError(f"impala {words[0]} ended with status {status}: see {console}.")

    def _resolved(self, word: str) -> str:
        for arm in self._experiment.arms:
            word = word.replace(
                f"{{{arm}}}", str(self._logdir.with_name(f"{arm}-seed{self._seed}"))
            )
        return word.replace("{seed}", str(self._seed))

    def _save(self) -> None:
        atomic.write(self._file, json.dumps(dataclasses.asdict(self._begun), indent=1).encode())


def training(logdir: pathlib.Path, milestones: Sequence[float]) -> dict[str, list[list[float]]]:
    """Returns the curve of the training return of each task, with about a hundred points.

    Args:
      logdir: of a run.
      milestones: returns whose first row stays.

    Returns:
      Task -> rows of frames, seconds and the mean return of the last 100 episodes.
    """
    curves: dict[str, list[list[float]]] = {}
    for row in rows.read(logdir):
        for task, value in rows.recent_returns(row).items():
            curve = curves.setdefault(task, [])
            while curve and curve[-1][0] >= row["frames"]:
                curve.pop()  # the run was resumed from a checkpoint before these
            curve.append([records.rounded(x) for x in (row["frames"], row["seconds"], value)])
    return {task: _thinned(curve, milestones) for task, curve in curves.items()}


def trained_seconds(logdir: pathlib.Path) -> float:
    """Returns the seconds of training in a run's telemetry, also of sessions that were killed."""
    return max((row["seconds"] for row in rows.read(logdir)), default=0.0)


def _thinned(curve: list[list[float]], milestones: Sequence[float]) -> list[list[float]]:
    last = len(curve) - 1
    steps = min(last, _POINTS - 1)
    kept = {round(i * last / steps) for i in range(steps + 1)} if steps else {0}
    for milestone in milestones:
        kept |= set([i for i, row in enumerate(curve) if row[2] >= milestone][:1])
    return [curve[i] for i in sorted(kept)]


def _rounded_report(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of evaluations.jsonl with shorter numbers."""
    returns = {name: [*map(records.rounded, line[name])] for name in ("returns",) if name in line}
    return line | returns | {"time": round(line["time"])}


def _without_settings(environ: Any) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("IMPALA_")}


def _cpu_seconds_of_others() -> float:
    """Returns the CPU time that all but this process and its ended children have used so far."""
    ticks = list(map(int, pathlib.Path("/proc/stat").read_text().split()[1:9]))
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and waiting for the disk
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return busy / os.sysconf("SC_CLK_TCK") - ours
