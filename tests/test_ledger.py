"""The ledger: records of learning results, and the pages that show them."""

import dataclasses
import gzip
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent import futures
from statistics import fmean
from typing import Any

import numpy as np
import PIL.Image
import pytest
import services

from impala.config import values
from impala.runtime import process
from ledger import pictures, records, rendering, running, statistics
from ledger.experiments import EXPERIMENTS, Experiment
from ledger.records import Evaluation, Record, RecordError

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("actors", "impala", "learner", "protos", "vtrace")
LOSSES = "impala/algorithms/losses.py"
RESULTS = "docs/results/README.md"


def _tree(root: pathlib.Path) -> pathlib.Path:
    """A copy of the sources, pages and records, without what is measured by and by."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "ledger", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    shutil.copy(ROOT / "README.md", root)
    for path in (root / records.FOLDER).iterdir():
        path.unlink()
    return root


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    return _tree(tmp_path / "tree")


def _record(root: pathlib.Path, seed: int = 101, arm: str = "catch", **changes: Any) -> Record:
    """A record of a preset as if it had just been measured; it is written."""
    config = running.settings([*EXPERIMENTS[arm].arms[arm], "--seed", str(seed)])
    record = Record(
        experiment=arm,
        arm=arm,
        seed=seed,
        command=f"impala train {arm} --seed {seed}",
        commit="0123456789",
        date="2026-11-23",
        machine="2 cores of Some(R) CPU(R) Processor, Python 3.11.7",
        settings=values.to_dict(config),
        frames=400_000,
        seconds=31.5,
        other_cores=0.05,
        sessions=1,
        training={"Catch": [[0, 0.0, -0.6], [200_000, 15.0, 0.5], [400_000, 30.0, 1 - seed / 1e4]]},
        evaluations=[],
        final=[
            Evaluation(
                task="Catch",
                command="impala evaluate LOGDIR --episodes 4 --greedy",
                greedy=True,
                seed=0,
                returns=[1, 1, -1, 1 - seed / 1e3],
                lengths=[9, 9, 9, 9],
                info={},
            )
        ],
    )
    record = dataclasses.replace(record, **changes)
    records.add(root, record)
    return record


def _edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Pages.


def test_a_deleted_page_is_rendered_back_byte_for_byte(tree: pathlib.Path) -> None:
    for seed in (101, 102, 103):
        _record(tree, seed)
    rendering.render(tree)
    pages = {path: (tree / path).read_bytes() for path in rendering.PAGES.values()}
    assert b"`0123456`, Some CPU |\n\nNot measured in this way yet: `cartpole`," in pages[RESULTS]
    for path in pages:
        if path == "README.md":  # of which a part is rendered
            _edit(tree / path, "| 400k |", "| 500k |")
        else:
            (tree / path).unlink()
    assert len(rendering.check(tree)) == len(pages)
    assert set(rendering.render(tree)) == set(pages)
    assert {path: (tree / path).read_bytes() for path in pages} == pages
    assert rendering.check(tree) == []


def test_a_changed_page_or_missing_picture_fails_the_check(tree: pathlib.Path) -> None:
    _record(tree)
    rendering.render(tree)
    picture = tree / "docs/results/presets.png"
    drawn = picture.read_bytes()
    picture.unlink()
    assert rendering.check(tree) == [
        "presets.png on docs/results/README.md is not what its records give."
    ]
    rendering.render(tree)
    assert picture.read_bytes() == drawn
    _edit(tree / RESULTS, "greedy return | 0.47 |", "greedy return | 0.99 |")
    (problem,) = rendering.check(tree)
    assert "-| `impala train catch` | 101 | greedy return | 0.99 | — |" in problem


# Records.


def test_seeds_that_presets_are_tuned_on_are_refused(tree: pathlib.Path) -> None:
    with pytest.raises(RecordError, match=r"seed 7 is not for reporting.* from 101 on"):
        running.run(EXPERIMENTS["catch"], tree, tree / "work", seeds=[101, 7])
    _record(tree, seed=7)
    with pytest.raises(RecordError, match=r"catch\.jsonl\.gz: seed 7 is not for reporting"):
        records.read(tree)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace('"frames": 400000', '"frames": NaN'), "NaN is not a number"),
        (lambda text: re.sub(r'"machine": "[^"]*",', "", text), "missing .*'machine'"),
        (lambda text: text.replace('"machine"', '"computer"'), "unexpected .*'computer'"),
        (lambda text: text.replace('"experiment": "catch"', '"experiment": "x"'), "record of x"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_it(
    tree: pathlib.Path, damage: Callable[[str], str], message: str
) -> None:
    record = _record(tree)
    path = records.path_of(tree, "catch")
    text = gzip.decompress(path.read_bytes()).decode()
    assert records.read(tree)["catch", "catch"] == [record]
    path.write_bytes(gzip.compress(damage(text).encode()))
    with pytest.raises(RecordError, match=message) as error:
        records.read(tree)
    assert str(path) in str(error.value)


def test_a_cut_file_is_an_error_that_names_it(tree: pathlib.Path) -> None:
    _record(tree)
    path = records.path_of(tree, "catch")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match="git checkout"):
        records.read(tree)


def test_records_that_are_added_at_the_same_time_are_all_kept(tree: pathlib.Path) -> None:
    first = _record(tree)
    seeds = range(101, 141)
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda s: records.add(tree, dataclasses.replace(first, seed=s)), seeds))
    measured = records.read(tree)["catch", "catch"]
    assert [record.seed for record in measured] == list(seeds)


@pytest.mark.parametrize(
    "arms",
    [pytest.param(1, id="first arms"), pytest.param(None, id="all arms", marks=pytest.mark.slow)],
)
def test_every_experiment_can_be_run(arms: int | None) -> None:
    for name, experiment in EXPERIMENTS.items():
        assert name == experiment.name
        assert experiment.score in statistics.SCORES
        assert all(re.fullmatch(r"[a-z0-9-]+", arm) for arm in experiment.arms)
        for arguments in list(experiment.arms.values())[:arms]:
            assert running.settings(arguments).total_frames > 0
        for seed in experiment.seeds:
            records.check_seed(seed)


# Runs.


def _rows(*rows: Sequence[float]) -> str:
    names = ("frames", "seconds", "episode/Catch/return_recent")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_a_curve_is_thinned_and_keeps_milestones(tmp_path: pathlib.Path) -> None:
    curve = [(100 * i, i, -1.0 + (i >= 777)) for i in range(1001)]
    (tmp_path / "metrics.jsonl").write_text(_rows((5, 1, -9.0), (200, 2, -9.0), *curve))
    kept = running.training(tmp_path, milestones=[0.0])["Catch"]
    assert len(kept) <= 102
    assert [77_700, 777, 0] in kept
    assert kept[0] == [0, 0, -1]  # resumed from a checkpoint before the first rows
    assert kept[-1] == [100_000, 1000, 0]
    assert [row[0] for row in kept] == sorted({row[0] for row in kept})


def test_a_tree_that_differs_from_its_commit_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("a.py", "docs/page.md"):
        (tmp_path / name).write_text("1\n")
    committed = _commit(tmp_path)
    (tmp_path / "docs/page.md").write_text("2\n")
    assert running.commit(tmp_path) == committed
    (tmp_path / "b.py").write_text("1\n")
    with pytest.raises(running.RunError, match=r"(?s)differs from its commit.*b\.py.*Commit or"):
        running.commit(tmp_path)


def _git(root: pathlib.Path, *words: str) -> str:
    name = ("-c", "user.name=n", "-c", "user.email=e")
    done = subprocess.run(["git", *name, *words], cwd=root, capture_output=True, check=True)
    return done.stdout.decode().strip()


def _commit(root: pathlib.Path) -> str:
    _git(root, "init", "--quiet")
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "--message", "All")
    return _git(root, "rev-parse", "HEAD")


def test_commits_that_change_learning_are_counted(tmp_path: pathlib.Path) -> None:
    counted = (
        *("learner/data/mix.py", "vtrace/vtrace.py", "actors/actor.py", "impala/acting.py"),
        *("impala/environments/catch.py", "impala/schedule/tasks.py", "impala/parts/build.py"),
        "impala/config/presets.py",
    )
    for path in counted:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1\n")
    first = _commit(tmp_path)
    for path in (*counted, "README.md"):
        (tmp_path / path).write_text("2\n")
        _commit(tmp_path)
    assert running.commits_since(tmp_path, first) == len(counted)
    assert running.commits_since(tmp_path, "0" * 40) is None


def test_a_seed_does_not_join_seeds_of_other_settings(tree: pathlib.Path) -> None:
    def run_one_more(**changes: Any) -> None:
        before = _record(tree).settings
        _record(tree, settings=before | {name: before[name] | x for name, x in changes.items()})
        running.run(EXPERIMENTS["catch"], tree, tree / "work", seeds=[102])

    said = (
        r"catch, catch: seed 101 .* seed 102 .*\(optimiser\.learning_rate: 0\.5 -> 0\.002\)\. "
        r"Run it from commit 0123456, or delete the arm's records"
    )
    with pytest.raises(running.RunError, match=said):
        run_one_more(optimiser={"learning_rate": 0.5}, learner={"threads": 9})
    # Operational ones may differ, and those of another version: the run begins.
    with pytest.raises(running.RunError, match="git status"):  # which this tree has not
        run_one_more(optimiser={"gone": 1}, learner={"threads": 9})


TINY = """
import pathlib, signal, sys
from impala.runtime import process
from ledger import running
from ledger.experiments import Experiment

tiny = Experiment(
    name="tiny",
    question="?",
    arms={"tiny": ("catch", "--total-frames", "5000")},
    seeds=(101,),
    evaluation=("--episodes", "8"),
)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unless the tests themselves run under nohup
if sys.argv[3:]:  # instead of the command
    process.IMPALA = (sys.executable, "-S", "-c", sys.argv[3])
try:
    running.run(tiny, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
except running.Stopped:
    sys.exit(75)
except running.RunError as error:
    sys.exit(str(error))
"""


# Stands for `impala train`: it says which signal ends it.
WAITING = """
import signal, sys, time
def leave(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, leave)
print("up", flush=True)
time.sleep(600)
"""


def _start(tree: pathlib.Path, work: pathlib.Path, *code: str) -> subprocess.Popen[str]:
    """Starts `run` of a tiny experiment in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", TINY, str(tree), str(work), *code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("sent", "received", "status"),
    [(signal.SIGHUP, "SIGHUP", 75), (signal.SIGKILL, "SIGTERM", -signal.SIGKILL)],
)
def test_a_run_ends_with_who_has_started_it(
    tree: pathlib.Path, tmp_path: pathlib.Path, sent: signal.Signals, received: str, status: int
) -> None:
    """As when an ssh connection is lost, or the process is killed."""
    _commit(tree)
    console = tmp_path / "work/tiny/tiny-seed101/console.log"

    def shows(text: str) -> bool:
        return console.exists() and text in console.read_text()

    with _start(tree, tmp_path / "work", WAITING) as process:
        services.wait_for("the run", lambda: shows("up"))
        process.send_signal(sent)
        assert process.wait() == status
    services.wait_for("its end", lambda: shows(f"got {received}"))


def test_an_arm_may_start_from_another_one(
    tree: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands name the other's log directory; its record does not."""
    _commit(tree)
    echo = "import os, sys; print(os.environ['MINARI_DATASETS_PATH'], *sys.argv[1:])"
    monkeypatch.setattr(process, "IMPALA", (sys.executable, "-S", "-c", echo))
    experiment = Experiment(
        name="two",
        question="?",
        arms={"one": ("catch",), "next": ("catch", "--teacher.logdirs", "{one}")},
        before={"next": ("record", "{one}", "--dataset", "x/seed{seed}-v0")},
    )
    with pytest.raises(FileNotFoundError, match=r"final-0\.json"):  # nothing was evaluated
        running.run(experiment, tree, tmp_path, arms=["next"], seeds=[103])
    console = (tmp_path / "two/next-seed103/console.log").read_text().splitlines()
    folder = tmp_path / "two"
    assert console[:2] == [
        f"{folder}/datasets record {folder}/one-seed103 --dataset x/seed103-v0",
        f"{folder}/datasets train catch --teacher.logdirs {folder}/one-seed103 --seed 103 "
        f"--logdir {folder}/next-seed103",
    ]
    begun = json.loads((folder / "next-seed103.json").read_text())
    assert begun["settings"]["teacher"]["logdirs"] == ["{one}"]


def test_a_run_that_is_stopped_goes_on_and_is_not_repeated(
    tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    committed = _commit(tree)

    def start() -> subprocess.Popen[str]:
        return _start(tree, tmp_path / "work")

    path = records.path_of(tree, "tiny")
    with start() as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "tiny, tiny, seed 101: running\n"
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait() == 75
    assert not path.exists()
    _edit(tree / LOSSES, "0.5 *", "0.25 *")  # with another loss it must not go on
    _commit(tree)
    with start() as refused:
        assert "differs by 1 commits of learning" in refused.communicate()[1]
    _git(tree, "reset", "--quiet", "--hard", committed)
    # Of a session that was killed only the telemetry is there.
    telemetry = tmp_path / "work/tiny/tiny-seed101/metrics.jsonl"
    with open(telemetry, "a", encoding="utf-8") as file:
        file.write(_rows((1, 5000.5, 0.0)))
    with start() as resumed:
        assert resumed.communicate()[1] == ""
        assert resumed.wait() == 0
    (record,) = records.load(path)
    assert (record.sessions, record.seconds) == (2, 5000.5)
    assert (record.frames >= 5_000, record.commit) == (True, committed)
    assert record.settings["total_frames"] == 5_000
    assert len(record.final[0].returns) == 8
    assert record.training["Catch"][-1][0] >= 5_000
    assert record.other_cores >= 0
    written = path.stat().st_mtime_ns
    with start() as again:
        assert again.communicate()[0] == "tiny, tiny, seed 101: recorded already\n"
    assert path.stat().st_mtime_ns == written


# Statistics.


def test_an_interval_is_bootstrapped_over_seeds() -> None:
    found = statistics.interval([1.0, 2.0, 6.0])
    assert found.mean == 3.0
    assert (found.low, found.high) == (1.0, 6.0)  # 1 in 27 resamplings is of one seed alone
    assert statistics.interval([1.0, 2.0, 6.0]) == found
    assert statistics.interval([5.0, 5.0, 5.0])[:3] == (5.0, 5.0, 5.0)
    assert statistics.interval([5.0])[:3] == (5.0, 5.0, 5.0)
    assert statistics.interquartile([1.0, 2.0, 6.0]) == found
    seeds = [-99.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 99.0]
    assert statistics.interquartile(seeds).mean == fmean(seeds[2:-2])


def test_training_return_is_a_mean_over_the_whole_run(
    tree: pathlib.Path,
) -> None:
    record = dataclasses.replace(
        _record(tree), training={"Catch": [[100.0, 1.0, 2.0], [200.0, 2.0, 6.0]]}
    )
    assert statistics.SCORES["return in training"](record) == (2.0 + 4.0) / 2


def test_choices_over_an_episode_are_drawn_from_records(
    tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    page = rendering._Page(records.read(tree))
    assert page.choices("x.png", "", "best", "bandit-paper") == "No choices have been recorded yet."
    plain = _record(tree)
    steps = {"best": [[float(pull > episode) for pull in range(100)] for episode in range(40)]}
    played = dataclasses.replace(plain.final[0], steps=steps)
    for arm in ("easy", "independent"):
        records.add(
            tree, dataclasses.replace(plain, experiment="bandit-paper", arm=arm, final=[played])
        )
    page = rendering._Page(records.read(tree))
    assert page.choices("x.png", "Choices", "best", "bandit-paper") == "![Choices](x.png)"
    picture = page._drawn["x.png"]
    assert picture == pictures.Picture(
        tuple(pictures.Grid(arm, steps["best"]) for arm in ("independent", "easy"))
    )
    pictures.draw(picture, tmp_path / "x.png")
    shown = np.asarray(PIL.Image.open(tmp_path / "x.png").convert("L"))
    assert (shown < 10).mean() > 0.3  # the triangles in which the best arm was pulled


def test_frames_are_counted_to_what_another_arm_ended_with(tree: pathlib.Path) -> None:
    plain = _record(tree)
    for arm, seed, curve in (
        *(
            ("alone", 107, (2, 4, 4, 8)),
            ("teacher", 107, (2, 1, 3, 5)),
            ("taught", 107, (3, 3, 3, 3)),
        ),
        *(
            ("alone", 108, (1, 4, 4, 8)),
            ("teacher", 108, (5, 5, 2, 4)),
            ("taught", 108, (3, 3, 3, 3)),
        ),
    ):
        training = {"Catch": [[1e5 * i, float(i), value] for i, value in enumerate(curve, 2)]}
        record = dataclasses.replace(
            plain, experiment="teachers", arm=arm, seed=seed, frames=500_000, training=training
        )
        records.add(tree, record)
    page = rendering._Page(records.read(tree))
    assert page.frames_to("teachers", "teacher").splitlines() == [
        "| arm | 107: 4.00 | 108: 3.00 | together |",
        "|---|---|---|---|",
        "| alone | 300k | 300k | 600k |",
        "| taught | > 500k | 200k | > 700k |",
    ]


def test_an_agent_of_several_games_is_compared_with_their_specialists(tree: pathlib.Path) -> None:
    plain = _record(tree)
    for arm, of_games in (
        ("pong", {"Pong": 10.0}),
        ("breakout", {"Breakout": 40.0}),
        ("together", {"Pong": 0.0, "Breakout": 30.0}),
    ):
        final = [
            dataclasses.replace(plain.final[0], task=f"ALE/{game}-v5", returns=[mean - 1, mean + 1])
            for game, mean in of_games.items()
        ]
        records.add(
            tree, dataclasses.replace(plain, experiment="atari-multi", arm=arm, final=final)
        )
    scales = {"Pong": (-20.0, 20.0), "Seaquest": (0.0, 1.0), "Breakout": (0.0, 20.0)}
    page = rendering._Page(records.read(tree))
    # Normalised: 30 and 20 of 40, 40 and 30 of 20.
    assert page.human_normalised("atari-multi", "together", scales).splitlines()[2:] == [
        "| Pong | 10.00 | 0.00 | 0.75 | 0.50 | 0.67 |",
        "| Breakout | 40.00 | 30.00 | 2.00 | 1.50 | 0.75 |",
        "| mean |  |  | 1.38 | 1.00 |  |",
    ]
    alone = {key: of_seeds for key, of_seeds in records.read(tree).items() if key[1] == "together"}
    page = rendering._Page(alone)
    assert page.human_normalised("atari-multi", "together", scales).splitlines()[2:] == [
        "| Pong | — | 0.00 | — | 0.50 | — |",
        "| Breakout | — | 30.00 | — | 1.50 | — |",
        "| mean |  |  | — | 1.00 |  |",
    ]


def test_arms_are_tabled_and_drawn_beside_each_other(
    tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for seed in (101, 102, 103):
        _record(tree, seed)
        _record(tree, seed, arm="pendulum")
    page = rendering._Page(records.read(tree))
    assert page.arms("catch", "return").splitlines()[2] == (
        "| catch | 101 to 103 | **0.47** (0.47 to 0.47) | 2026-11-23, `0123456`, Some CPU |"
    )
    assert "| 101 to 103 | — | — |" in page.arms("catch", "transfer", "forgetting")  # not evaluated
    for seed, last in enumerate((-9.0, 0.0, 1.0, 2.0, 9.0), 101):
        final = [dataclasses.replace(_record(tree).final[0], returns=[last])]
        _record(tree, seed, arm="cartpole", final=final)
    row = rendering._Page(records.read(tree)).results("cartpole").splitlines()[2]
    shown = r"\| \*\*0\.60\*\* \(−.* to .*\) \| 1\.00 \| 1\.00 \(−.* to .*\) \| −9\.00 to 9\.00 \|"
    assert re.search(shown, row)
    of_arms = {name: records.read(tree)[name, name] for name in ("catch", "pendulum")}
    (panel,) = pictures.panels("both", of_arms, "training")
    assert [len(of_seeds) for of_seeds in panel.lines.values()] == [3, 3]
    picture = pictures.Picture((panel,))
    pictures.draw(picture, tmp_path / "both.png")
    assert pictures.digest_in(tmp_path / "both.png") == picture.digest
    assert picture.digest != pictures.Picture((panel._replace(title="other"),)).digest


def test_returns_are_drawn_over_frames_and_over_minutes(
    tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    training = {"Catch": [[0.0, 60.0, -0.5], [400_000.0, 180.0, 0.5]]}
    peer: dict[str, Any] = {"experiment": "peers", "arm": "slower", "training": training}
    records.add(tree, dataclasses.replace(_record(tree), **peer))
    page = rendering._Page(records.read(tree))
    lines = {"here": "catch/catch", "slower": "peers/slower", "not run": "peers/other"}
    assert page.beside("x.png", "Returns", {"Catch": lines}) == "![Returns](x.png)"
    frames, minutes = page._drawn["x.png"].panels
    assert isinstance(frames, pictures.Panel) and isinstance(minutes, pictures.Panel)
    assert (list(frames.lines), frames.x) == (["here", "slower"], "environment frames")
    assert frames.lines["slower"] == [[(0.0, -0.5), (400_000.0, 0.5)]]
    assert (minutes.lines["slower"], minutes.x) == ([[(1.0, -0.5), (3.0, 0.5)]], "minutes")
    pictures.draw(page._drawn["x.png"], tmp_path / "x.png")
    none = {"Catch": {"not run": "peers/other"}}
    assert page.beside("y.png", "", none) == "No curves have been recorded yet."
