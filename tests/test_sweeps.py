"""Sweeps: what their files may say, and whole ones on this host."""

import csv
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import services
import yaml

from impala.commands import main
from impala.config.schema import Config
from impala.config.values import OptionError
from impala.sweeps import description
from impala.sweeps import results as sweep_results

RATES = {"optimiser.learning_rate": {"log_uniform": [1e-5, 1e-2]}}


def made(**changes: Any) -> dict[str, Any]:
    return {"preset": "catch", "trials": 4, "search": RATES} | changes


def test_trials_that_fail_before_they_have_a_score_are_counted(tmp_path: pathlib.Path) -> None:
    good = {
        "trial_id": "a",
        "done": True,
        "is_whole": True,
        "score": 1.0,
        "frames": 9,
        "copied": "",
    }
    grid: Any = [
        SimpleNamespace(metrics=good | {"config": {"seed": 1}}, error=None),
        SimpleNamespace(metrics={}, error=RuntimeError("crashed")),
        SimpleNamespace(metrics=None, error=None),  # stopped before its first report
    ]
    (candidate,), lost = sweep_results.of(grid, tmp_path)
    assert [trial.trial for trial in candidate.trials] == ["a"] and lost == 1


# Files.


def test_a_file_says_what_every_trial_has_and_what_is_searched(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "preset: catch\n"
        "settings: {total_frames: 1e6, optimiser: {name: rmsprop}}\n"
        "search:\n"
        "  optimiser.learning_rate: {log_uniform: [1e-5, 1e-2]}  # text in YAML 1.1\n"
        "  agent.hidden_sizes: {grid: [[64], [256, 256]]}\n"
        "  actor.num_envs: {uniform: [8, 64]}\n"
    )
    sweep = description.read(file)
    assert sweep.total_frames == 1_000_000
    assert sweep.config.optimiser.epsilon == Config().optimiser.epsilon  # as on a command line
    rate, sizes, envs = sweep.search.values()
    assert rate == description.Space("log_uniform", (1e-5, 1e-2)) and not rate.is_whole
    assert sizes.values == ([64], [256, 256])
    assert envs.is_whole
    assert [rate.nearest(x) for x in (1e-6, 1e-3, 0.5)] == [1e-5, 1e-3, 1e-2]
    assert [envs.nearest(x) for x in (9.6, 70)] == [10, 64]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "holds preset, search and more by name"),
        (made(preset=""), "preset is missing"),
        (made(preset="catsh"), "catch"),
        (made(trails=4), "'trails'.*trials"),
        (made(search={}), "search is missing"),
        (made(search={"optimizer.learning_rate": {"choice": [1]}}), "optimiser.learning_rate"),
        (made(search={True: {"choice": [1]}}), "search: True is no text; it must be the name"),
        (made(search={"seed": [1, 2]}), r"search.seed is \[1, 2\]; it must be one of choice"),
        (made(search={"seed": {"chioce": [1]}}), "search.seed.*choice"),
        (made(search={"seed": {"choice": [1, "x"]}}), "search.seed: seed is 'x'"),
        (
            made(search={"optimiser.learning_rate": {"uniform": [-1, 1]}}),
            "search.optimiser.learning_rate: optimiser.learning_rate is -1",
        ),
        (made(search={"seed": {"uniform": [2, 1]}}), r"is \[2, 1\]; it must be the smallest"),
        (made(search={"seed": {"log_uniform": [0, 1]}}), "begins at 0; it must begin above 0"),
        (made(settings={"sed": 1}), "settings: .*'sed'"),
        (made(search={"seed": {"grid": [1]}}, sampler="optuna"), "sampler: optuna does not do"),
        (made(search={"seed": {"grid": [1]}}, scheduler="pbt"), "scheduler: pbt does not do"),
        *(
            (made(search={**RATES, "seed": {"choice": [1, 2]}}, **{name: kind}), f"{kind} compares")
            for name, kind in (("sampler", "optuna"), ("scheduler", "asha"), ("scheduler", "pbt"))
        ),
        (made(scheduler="pbt", sampler="optuna"), "use sampler: random"),
        (made(scheduler="pbt", trials=1), "at least 2 members"),
        (
            made(scheduler="asha", search={"total_frames": {"choice": [10, 20]}}),
            "search.total_frames: scheduler: asha compares trials after as many frames",
        ),
        (
            made(scheduler="pbt", search={"optimiser.name": {"choice": ["adam", "rmsprop"]}}),
            "cannot copy an agent of one with another optimiser.name",
        ),
        (
            made(scheduler="pbt", search={"agent.hidden_sizes": {"choice": [[8], [9]]}}),
            "cannot copy an agent of one with another agent.hidden_sizes",
        ),
        *(
            (
                made(
                    scheduler="pbt",
                    search={name: {"choice": [0.1, 0.5]}},
                    settings={"teacher": {"logdirs": ["runs/a"], "anneal": 0.0}},
                ),
                f"cannot copy an agent of one with another {name}",
            )
            for name in (
                *("impala.entropy_target", "actor_critic.entropy_target"),
                *("impact.entropy_target", "teacher.kl_target"),
            )
        ),
        (
            made(
                scheduler="pbt",
                settings={"environment": {"id": "own:Looked"}},
                search={"looked.scale": {"choice": [1.0, 2.0]}},
            ),
            "cannot copy an agent of one with another looked.scale",
        ),
        (
            made(preset="atari-multi", search={"environment.id": {"choice": ["Catch"]}}),
            "environment.id is given, but tasks.environments is .*, which overrides it",
        ),
        (
            made(search={"impact.clip": {"choice": [0.1, 0.2]}}),
            "impact.clip is given, but the run learns with impala, which does not read it",
        ),
        (
            made(num_actors=2, settings={"deterministic": True}),
            "num_actors is 2, but a deterministic run has one actor",
        ),
        (
            made(scheduler="pbt"),  # by default, 1,000,000 and 400,000
            "pbt.every_frames is 1000000, but a trial ends after 400000 frames.*set it to 40000",
        ),
        (
            made(scheduler="asha", asha={"grace_frames": 400_000}),
            "asha.grace_frames is 400000, but a trial ends after 400000 frames",
        ),
    ],
)
def test_what_no_trial_can_be_made_of_is_refused(data: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        description.parse(data)


def test_a_setting_may_be_searched_with_what_makes_it_matter() -> None:
    for preset, search in (
        ("atari-q", {"q_learning.target_frames": [0], "q_learning.target_updates": [500, 1000]}),
        ("catch", {"algorithm": ["impala", "impact"], "impact.clip": [0.1, 0.2]}),
    ):
        spaces = {name: {"choice": values} for name, values in search.items()}
        assert description.parse(made(preset=preset, search=spaces)).search.keys() == search.keys()


def test_a_population_may_search_where_an_entropy_target_ends() -> None:
    end = {"impala.entropy_target_end": {"uniform": [0.1, 0.5]}}
    target = {"entropy_target": 0.5, "entropy_anneal": 0.5, "entropy_target_end": 0.2}
    settings = {"total_frames": 2e6, "impala": target}
    assert description.parse(made(scheduler="pbt", search=end, settings=settings)).search


def test_an_output_of_another_sweep_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "sweep.yaml", tmp_path / "output"
    (output / "ray").mkdir(parents=True)
    (output / "sweep.yaml").write_text(yaml.safe_dump(made(trials=5)))
    file.write_text(yaml.safe_dump(made()))
    assert main.main(["sweep", str(file), "--output", str(output)]) == 2
    assert f"{file} says something else: give another --output" in capsys.readouterr().err


# Members of a population.


def test_a_trial_is_where_the_sweep_was_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from impala.sweeps import trial

    monkeypatch.chdir("/")  # and back, in the end
    monkeypatch.setattr(trial.Trial, "trial_id", "a")
    begun = object.__new__(trial.Trial)
    for directory in (tmp_path, tmp_path / "of another host"):
        begun.setup({}, description.parse(made()), str(tmp_path), str(directory))
        assert pathlib.Path.cwd() == tmp_path


def tell(logdir: pathlib.Path, score: float, **scalars: float) -> None:
    """Adds a row of telemetry."""
    logdir.mkdir(parents=True, exist_ok=True)
    row = {"frames": 9_000, "seconds": 1, "episode/Catch/return_recent": score} | scalars
    with open(logdir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def saved(folder: pathlib.Path, score: float, **scalars: float) -> str:
    """A checkpoint of trial a."""
    tell(folder / "saved", score, **scalars)
    (folder / "saved/origin").write_text("a 1")
    return str(folder / "saved")


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts trial b, with a function in the place of `impala.train`."""
    pytest.importorskip("ray")
    from impala.sweeps import trial

    started = []

    def start(train: Callable[..., str], rate: float = 0.1) -> Any:
        def trained(config: Config, logdir: pathlib.Path, **arguments: Any) -> SimpleNamespace:
            return SimpleNamespace(status=train(logdir, arguments["stop"]))

        monkeypatch.setattr(trial.Trial, "trial_id", "b")
        monkeypatch.setattr("impala.train", trained)
        begun = object.__new__(trial.Trial)
        settings = {"optimiser.learning_rate": rate}
        begun.setup(settings, description.parse(made()), str(tmp_path), str(tmp_path))
        started.append(begun)
        return begun

    yield start
    for each in started:
        each.cleanup()


def until_stopped(logdir: pathlib.Path, stop: threading.Event) -> str:
    tell(logdir, 2.0)
    stop.wait()
    return "stopped"


def to_the_end(logdir: pathlib.Path, stop: threading.Event) -> str:
    tell(logdir, 3.0, progress=1.0)
    return "finished"


def test_a_member_that_copies_one_at_its_end_is_at_its_end(
    tmp_path: pathlib.Path, start: Callable[..., Any]
) -> None:
    """A learner would refuse its changed settings, with which nothing would be learned."""
    member = start(to_the_end)
    member.load_checkpoint(saved(tmp_path, 0.5, progress=1.0))
    ended = {"score": 0.5, "frames": 9_000, "copied": "a", "is_whole": True, "done": True}
    assert member.step() == ended | {"should_checkpoint": False}


def test_a_finished_run_ends_with_its_last_evaluations(
    tmp_path: pathlib.Path, start: Callable[..., Any]
) -> None:
    tell(tmp_path / "trials/b", 0.5, progress=1.0)  # it was stopped while they were under way
    result = start(to_the_end).step()
    assert (result["score"], result["done"]) == (3.0, True)


def test_with_new_settings_the_same_member_is_copied_again(
    tmp_path: pathlib.Path, start: Callable[..., Any]
) -> None:
    copied, metrics = saved(tmp_path, 0.5), tmp_path / "trials/b/metrics.jsonl"
    for rate in (0.1, 0.2):
        start(to_the_end, rate).load_checkpoint(copied)
        of_copy = metrics.read_text()
        assert len(of_copy.splitlines()) == 1
        tell(metrics.parent, 2.0)
    start(to_the_end, rate).load_checkpoint(copied)  # after a failure
    assert len(metrics.read_text().splitlines()) == 2


def test_a_member_that_has_copied_one_saves_a_checkpoint(
    tmp_path: pathlib.Path, start: Callable[..., Any]
) -> None:
    """It could not be restored from the other's, once Ray has deleted that."""
    member = start(until_stopped)
    member.load_checkpoint(saved(tmp_path, 0.5))
    assert member.step()["should_checkpoint"]
    own = tmp_path / "own"
    own.mkdir()
    member.save_checkpoint(str(own))
    assert not member.step()["should_checkpoint"]


def test_a_run_that_was_stopped_from_outside_has_not_ended(start: Callable[..., Any]) -> None:
    from impala.sweeps.trial import TrialError

    def stopped(logdir: pathlib.Path, stop: threading.Event) -> str:
        tell(logdir, 2.0)
        return "stopped"

    with pytest.raises(TrialError, match="trials/b was stopped, but not by this sweep"):
        start(stopped).step()


# Scores.


def test_the_score_is_a_mean_over_all_tasks() -> None:
    pytest.importorskip("ray")
    from impala.sweeps import trial

    a, b, loss = "episode/a/return_recent", "episode/b/return_recent", "loss/total"
    told = [{loss: 9.0}, {a: 1.0}, {a: 2.0, b: 4.0}, {loss: 8.0}, {b: 6.0}]  # the last two: resumed
    assert trial.scores(told, "") == [None, 1.0, 3.0, 3.0, 4.0]
    assert trial.scores(told, loss) == [9.0, None, None, 8.0, None]


SEEDS = {**RATES, "seed": {"grid": [1, 2]}}


def ended(folder: pathlib.Path, trials: Sequence[tuple[float, int | None, float]]) -> Any:
    """The candidates of trials with a learning rate, a seed and a score."""
    pytest.importorskip("ray")
    from impala.sweeps import results

    found = []
    for number, (rate, seed, score) in enumerate(trials):
        logdir = folder / str(number)
        logdir.mkdir()
        rows = [
            {"frames": frames, "seconds": 1, "episode/Catch/return_recent": value}
            for frames, value in ((0, 0.0), (100, score))
        ]
        (logdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"optimiser.learning_rate": rate} | ({} if seed is None else {"seed": seed})
        found.append(results.Result(f"t{number}", "finished", score, 100, settings, "", logdir))
    return results.ranked(found)


def test_settings_are_ranked_by_the_mean_of_their_seeds(tmp_path: pathlib.Path) -> None:
    trials = [(1e-3, 1, 9.0), (1e-3, 2, 1.0), (1e-4, 1, 6.0), (1e-4, 2, 8.0)]
    found, sweep = ended(tmp_path, trials), description.parse(made(search=SEEDS))
    from impala.sweeps import results

    results.write(found, sweep, tmp_path)
    with open(tmp_path / "results.csv", newline="") as file:
        first, second = csv.DictReader(file)
    names = ("trial", "score", "lowest", "highest", "seeds", "optimiser.learning_rate")
    assert [first[name] for name in names] == ["t3 t2", "7.0", "6.0", "8.0", "2 1", "0.0001"]
    assert [second[name] for name in names] == ["t0 t1", "5.0", "1.0", "9.0", "1 2", "0.001"]
    assert (tmp_path / "best").resolve() == tmp_path / "3"


def test_without_seeds_each_trial_is_by_itself(tmp_path: pathlib.Path) -> None:
    found = ended(tmp_path, [(1e-3, None, 1.0), (1e-3, None, 2.0)])
    from impala.sweeps import results

    lines = results.table(found, description.parse(made())).splitlines()
    assert [line.split() for line in lines] == [
        ["trial", "score", "frames", "status", "optimiser.learning_rate"],
        ["t1", "2", "100", "finished", "0.001"],
        ["t0", "1", "100", "finished", "0.001"],
    ]


def test_the_picture_tells_settings_apart_by_name_and_line(tmp_path: pathlib.Path) -> None:
    trials = [(1e-5 * n, seed, float(n + seed)) for n in range(1, 13) for seed in (1, 2)]
    found, sweep = ended(tmp_path, trials), description.parse(made(search=SEEDS))
    from impala.sweeps import results

    figure = results.figure(found, sweep)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    best = [f"optimiser.learning_rate {rate:.4g}" for rate in (12e-5, 11e-5, 10e-5)]
    assert (names[:3], len(names), names[-1]) == (best, 8, "5 more")
    assert len({(str(x.get_color()), x.get_linestyle()) for x in legend.get_lines()}) == 8
    over_frames, over_rates = figure.axes  # there is none for the seed
    assert len(over_frames.get_lines()) == len(over_frames.collections) == 12
    assert over_rates.get_xlabel() == "optimiser.learning_rate"


# Whole sweeps.


def begin(folder: pathlib.Path, data: Mapping[str, Any]) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(dict(data)))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "impala", "sweep", "sweep.yaml"),
            *("--output", "output"),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(folder: pathlib.Path, data: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a whole sweep's table."""
    with begin(folder, data) as sweep:
        said = sweep.communicate()[0]
    print(said)
    assert sweep.returncode == 0, said
    with open(folder / "output/results.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert (folder / "output/results.png").stat().st_size > 10_000
    assert (folder / "output/best").resolve().name == found[0]["trial"].split()[0]
    return found


def scores(found: list[dict[str, str]]) -> list[float]:
    return [float(row["score"]) for row in found]


QUICK = {"total_frames": 150_000, "learner": {"log_seconds": 1}}


@pytest.mark.slow
def test_a_stopped_or_killed_sweep_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    data = made(settings=QUICK | {"total_frames": 300_000}, cpus=1)
    trials = tmp_path / "output/trials"

    def is_training() -> bool:
        return any(path.stat().st_size > 0 for path in trials.glob("*/metrics.jsonl"))

    with begin(tmp_path, data) as stopped:
        services.wait_for("a trial's telemetry", is_training)
        stopped.send_signal(signal.SIGINT)
        said = stopped.communicate()[0]
    assert stopped.returncode == 75, said
    assert "The same command goes on with the sweep." in said
    begun = sorted(path.name for path in trials.iterdir())
    with begin(tmp_path, data) as killed:
        assert killed.stdout is not None
        lines = iter(killed.stdout.readline, "")
        assert any("frames, score" in line for line in lines)
        killed.kill()
    found = results(tmp_path, data)
    assert [row["status"] for row in found] == ["finished"] * 4
    assert set(begun) <= {row["trial"] for row in found}
    assert all(int(row["frames"]) >= 300_000 for row in found)


def test_a_trial_that_fails_says_why_in_a_line(tmp_path: pathlib.Path) -> None:
    from impala.sweeps import tuning  # here, as it loads Ray

    lines: list[str] = []
    shown = tuning._Progress(lines.append)
    trial: Any = SimpleNamespace(trial_id="a", error_file=str(tmp_path / "error.txt"))
    ended = "Traceback:\n  in step\nTrainingError: Training in a failed: the learner ended.\n"
    for text in (
        f"{ended}  frames 0\n  impala: mine:Mine: there is no module 'mine'.\n\n",
        f"{ended}  10:00 ERROR learner.run: Stopping: full\n  frames 0\n",
        f"{ended}  Traceback:\n  KeyError: 'gear'\n",
        "The actor died unexpectedly.\n",
    ):
        with open(trial.error_file, "a") as file:  # as Ray does, for each failure
            file.write(f"Failure # 1 (occurred at 10:00)\n{text}\n")
        shown.on_trial_recover(1, [], trial)
    shown.on_trial_error(1, [], trial)
    assert lines == [
        "trial a: failed, and is started again: impala: mine:Mine: there is no module 'mine'.",
        "trial a: failed, and is started again: 10:00 ERROR learner.run: Stopping: full",
        "trial a: failed, and is started again: KeyError: 'gear'",
        "trial a: failed, and is started again: The actor died unexpectedly.",
        f"trial a: failed: The actor died unexpectedly. (see {trial.error_file})",
    ]


@pytest.mark.slow
def test_trials_find_what_is_in_the_working_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv as Mine\n"
    )
    settings = {"environment": {"id": "mine:Mine"}, "total_frames": 4_000}
    found = results(tmp_path, made(preset="cartpole", trials=1, settings=settings, cpus=1))
    assert [row["status"] for row in found] == ["finished"]


@pytest.mark.slow
def test_each_sample_is_tried_with_every_seed(tmp_path: pathlib.Path) -> None:
    data = made(trials=2, search=SEEDS, settings={"total_frames": 4_000}, cpus=1)
    found = results(tmp_path, data | {"score": "loss/total"})
    assert [sorted(row["seeds"].split()) for row in found] == [["1", "2"]] * 2
    assert len({row["optimiser.learning_rate"] for row in found}) == 2


@pytest.mark.slow
def test_successive_halving_finds_a_good_learning_rate(
    tmp_path: pathlib.Path,
) -> None:
    found = results(
        tmp_path,
        made(
            preset="cartpole",
            trials=8,
            scheduler="asha",
            asha={"grace_frames": 100_000, "reduction": 2},
            settings={"learner": {"log_seconds": 1}, "seed": 101},
            cpus=1,
        ),
    )
    assert {row["status"] for row in found} == {"finished", "stopped early"}
    report = tmp_path / "report.json"
    played = services.run("evaluate", tmp_path / "output/best", "--greedy", "--json", report)
    assert played.returncode == 0, played.stdout + played.stderr
    assert json.loads(report.read_text())["summary"]["return_mean"] >= 475.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102, 103])
def test_a_population_is_better_than_its_median_member_alone(
    tmp_path: pathlib.Path, seed: int
) -> None:
    # All learning rates are smaller than the preset's; all but the largest learn next to nothing.
    data = made(
        settings=QUICK | {"total_frames": 600_000, "seed": seed},
        search={"optimiser.learning_rate": {"log_uniform": [1e-6, 1e-3]}},
        seed=seed,
        cpus=0.5,
    )
    alone = results(tmp_path / "alone", data)
    population = results(
        tmp_path / "population", data | {"scheduler": "pbt", "pbt": {"every_frames": 60_000}}
    )
    assert {row["status"] for row in population} == {"finished"}
    assert any(row["copied"] != "none" for row in population)
    trials = list((tmp_path / "population/output/ray").glob("Trial_*"))
    assert trials
    for trial in trials:
        assert len(list(trial.glob("checkpoint_*"))) <= 3
    assert statistics.median(scores(population)) > statistics.median(scores(alone))
    print(f"seed {seed}: alone {scores(alone)}, population {scores(population)}")
