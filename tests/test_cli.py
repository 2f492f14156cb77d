"""The command line: what it understands, what it says of what it does not, and what it starts."""

import base64
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest
import services
import yaml

from impala.commands import foreign, playing, record, train
from impala.commands import main as cli
from impala.commands.actor import Actor, _flags
from impala.commands.evaluate import Evaluate
from impala.commands.parsing import parse
from impala.config import layers, values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.environments import EnvironmentFailed
from impala.logdir import checkpoint
from impala.play import video
from impala.play.player import Player
from impala.runtime import installation, listen, process
from impala.runtime.failures import Failure, note
from protos import codec


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(layers.ENVIRONMENT_PREFIX):
            monkeypatch.delenv(name)


def _run(*argv: str) -> int:
    """The exit status of a command line, whether returned or raised."""
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def _printed_config(capsys: pytest.CaptureFixture[str], *argv: str) -> Config:
    assert _run(*argv, "--print-config") == 0
    return values.from_dict(Config, yaml.safe_load(capsys.readouterr().out))


def test_help_and_mistakes_load_no_tensorflow() -> None:
    script = """
import sys
from impala.commands import main as cli
for command in ["train", "learner", "actor", "evaluate", "record", "report", "presets"]:
    try:
        cli.main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
assert cli.main(["--help"]) == 0
assert cli.main(["presets"]) == 0
assert cli.main(["train", "catch", "--print-config"]) == 0
assert cli.main(["train", "cacht"]) == 2
heavy = {"tensorflow", "sonnet", "gymnasium", "ale_py", "grpc", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for path in values.flatten(Config()):
        assert "--" + path.replace("_", "-") in done.stdout
    for preset in PRESETS:
        assert preset in done.stdout


def test_every_setting_has_a_help_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "learner", "actor", "evaluate", "record", "report"):
        assert _run(command, "--help") == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        bare = re.findall(r"(--\S+) (?:\S+ |\[INT \[INT \S+ )?\(default", text)
        assert not bare, bare


def test_help_shows_the_defaults_of_preset_and_layers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPALA_LEARNER__UNROLL_LENGTH", "17")
    assert _run("train", "catch", "--help") == 0
    text = capsys.readouterr().out

    assert "(default: Catch)" in text
    assert "(default: 17)" in text


def test_flags_cover_variables_cover_the_file_covers_the_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 1\ntotal_frames: 1\noptimiser: {decay_to_zero: false, beta1: 0.1}\n")
    monkeypatch.setenv("IMPALA_SEED", "2")
    monkeypatch.setenv("IMPALA_TOTAL_FRAMES", "2")

    config = _printed_config(
        capsys,
        *["train", "--config", str(file), "catch", "--seed", "3"],
        *["--agent.hidden-sizes", "8", "9", "--impala.vtrace-lambda", "0.5"],
        *["--environment.atari.no-life-loss-ends"],
    )

    assert config.seed == 3
    assert config.total_frames == 2
    assert config.optimiser.beta1 == 0.1
    assert config.optimiser.decay_to_zero is False
    assert config.agent.hidden_sizes == (8, 9)
    assert config.impala.vtrace_lambda == 0.5
    assert config.environment.atari.life_loss_ends is False
    assert config.optimiser.name == PRESETS["catch"][1].optimiser.name


def test_the_printed_configuration_feeds_back_in(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    first = _printed_config(capsys, "learner", "atari-lstm", "--optimiser.learning-rate", "1e-4")
    file = tmp_path / "printed.yaml"
    file.write_text(values.to_yaml(first))

    assert _printed_config(capsys, "train", "catch", "--config", str(file)) == first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian catch", "Did you mean 'train'?"),
        ("train catch --optimiser.lerning-rate 1", "Did you mean '--optimiser.learning-rate'?"),
        ("train catch --learning-rate=1", "no --learning-rate; ours is --optimiser.learning-rate."),
        ("actor --security.token_fil x", "Did you mean '--security.token-file'?"),
        ("actor --secure", "actor has no flag --secure. See impala actor --help."),
        ("train catch two", "takes no argument 'two'"),
        ("train catch --optimiser.name adm", "Did you mean 'adam'?"),
        ("train catch --seed one", "'one'"),
        ("train catch --seed -1", "seed is -1; it must be from 0"),
        ("train catch --num-actors 0", "num_actors is 0; it must be from 1 to 256"),
        ("train catch --actor.num-envs 3", "give a multiple of 2, such as 4"),
        ("learner catch --peers a:1,b:1 --peer 2", "This is peer 2, but there are 2 in --peers"),
        ("learner catch --peers a:1,b:1 --peer 0", "give --security.open-peers in a network"),
        ("learner catch --peers a:1,b:1,c:1 --peer 0", "mix.fresh is 32, which 3 peers cannot"),
        ("train catch --tasks.environments Catch Catch", "names Catch twice"),
        ('train catch --tasks.environments Catch{"rows"}', "behind Catch there is"),
        ("train atari-multi --environment.id Catch", "which overrides it: leave it out, or change"),
        ("train catch --phases critic:9 impala --algorithm sac", "phases is critic:9, impala, wh"),
        ("train catch --phases critic:9 impala --sac.temperature 1", "or name sac in phases"),
        ("train catch --render", "--render: Catch has no window"),
        ("actor --role evaluator --render", "--render is for actors, but --role is evaluator"),
        ("actor --role evaluator --num-envs 4", "--num-envs is for actors, but --role is eval"),
        ("actor --learner a:1,b:1", "num-actors is 1, which 2 learners cannot share evenly"),
        ("train", "catch,cartpole"),
        ("evaluate", "LOGDIR"),
        ("evaluate /absent --checkpoint 7", "'7' of /absent is not there"),
        ("record /absent --episodes 3", "--episodes is for a dataset: leave it out, or give"),
        ("record /absent --dataset a/b-v0 --output a.gif", "--output is for a video"),
    ],
)
def test_mistakes_are_named_in_a_line_and_end_with_status_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*line.split()) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())

    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train catch --lr 1e-3", "impala train has no --lr; ours is --optimiser.learning-rate."),
        ("train catch --ent_coef=0.1", "ours is --impala.entropy-cost (another algorithm's is"),
        ("train catch --resume", "no --resume; a run goes on by itself: repeat its command"),
        ("learner catch --num-workers 4", "actors are processes of their own: impala actor"),
        ("train catch --device cuda", "a GPU is used if TensorFlow finds one"),
    ],
)
def test_flags_of_other_libraries_are_answered_with_ours(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert answer in error


@pytest.mark.parametrize("command", ["train", "learner", "actor", "check"])
def test_what_is_said_of_flags_of_other_libraries_is_true(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(command, "--help") == 0
    ours = set(re.findall(r"--[a-z0-9.-]+", capsys.readouterr().out))
    known = foreign.known(command)
    assert not {f"--{name}" for name in known} & ours  # else ours could not be used
    named = {answer.split()[0] for answer in known.values() if answer.startswith("--")}
    assert named
    assert named <= ours


def test_the_versions_that_matter_are_told_without_tensorflow() -> None:
    script = """
import sys
from impala.commands import main as cli
assert cli.main(["--version"]) == 0
assert not {"tensorflow", "sonnet", "grpc"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    protocol = codec.PROTOCOL_VERSION
    assert done.stdout.splitlines() == [
        f"impala {installation.VERSION}",
        f"protocol {protocol.major}.{protocol.minor}",
        f"checkpoint schema {checkpoint.SCHEMA[0]}.{checkpoint.SCHEMA[1]}",
        f"TensorFlow {importlib.metadata.version('tensorflow')}",
    ]


def test_logs_as_json_say_so_too_why_a_service_ends(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    command = "learner catch --listen 127.0.0.1:0 --log-format json --logdir"
    ended = services.run(*command.split(), tmp_path / "file")
    assert (ended.returncode, ended.stdout) == (2, "")
    *_, last = map(json.loads, ended.stderr.splitlines())
    assert (last["level"], "log directory" in last["message"]) == ("ERROR", True)
    code = "from impala.runtime import logs; logs.log_to_stderr('json'); {}['map']"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = json.loads(ended.stderr)
    assert (ended.returncode, last["level"], last["message"]) == (1, "CRITICAL", "'map'")
    assert "KeyError: 'map'" in last["exception"]


def test_several_actors_are_started_with_the_flags_of_one() -> None:
    command = Actor(
        learner="host:1",
        num_actors=3,
        num_envs=8,
        name="-here",
        render=True,
        reconnect_timeout=5.0,
        bfloat16=False,
        allow=("mine", "yours:Part"),
    )
    assert parse("actor", Actor, [*_flags(command), "--num-actors", "3"]) == command


def test_what_is_allowed_may_stand_before_a_log_directory() -> None:
    for words in (
        ["--allow", "mine", "--allow", "yours:Part", "runs/a"],
        ["runs/a", "--allow=mine", "--episodes", "3", "--allow", "yours:Part"],
    ):
        command = parse("evaluate", Evaluate, words)
        assert (command.logdir, command.allow) == (pathlib.Path("runs/a"), ("mine", "yours:Part"))


# `impala train` with children that only pretend.

_PRETENDER = """
import json, os, pathlib, signal, sys, time
role, words = sys.argv[1], sys.argv[2:]
here = pathlib.Path(os.environ["PRETENDERS"])
def leave(*_):
    time.sleep(0.3)  # as long as it takes to be killed, if it is
    (here / (role + ".told")).touch()
    sys.exit(int(words[words.index("--stopped-status") + 1]) if role == "learner" else 0)
if not os.environ["BEGINS"]:
    (here / (role + ".ready")).touch()
    time.sleep(600)
signal.signal(signal.SIGTERM, leave)
if role == "learner":
    settings = pathlib.Path(words[words.index("--config") + 1]).read_text()
    (here / "learner.json").write_text(json.dumps([words, settings]))
    (here / "learner.pid").write_text(str(os.getpid()))
    pathlib.Path(words[words.index("--listen") + 1].removeprefix("unix:")).touch()
    while not (here / "actor.up").exists():
        time.sleep(0.01)
    if os.environ["LEARNER_STATUS"]:
        sys.exit(int(os.environ["LEARNER_STATUS"]))
else:
    print("acting", *words, flush=True)
    if os.environ.get("FAILURES"):
        with open(words[words.index("--failures") + 1], "a") as file:
            file.write(os.environ["FAILURES"])
    (here / "actor.up").touch()
    if os.environ["ACTOR_STATUS"]:
        sys.exit(int(os.environ["ACTOR_STATUS"]))
(here / (role + ".ready")).touch()
time.sleep(600)
"""


def _train(
    tmp_path: pathlib.Path,
    *flags: str,
    learner: str = "",
    actor: str = "",
    begins: bool = True,
) -> "subprocess.Popen[str]":
    """Starts `impala train catch` with a learner and actors that end with the statuses given.

    They handle signals unless they never get so far as to begin. All is one process group.
    """
    (tmp_path / "pretender.py").write_text(_PRETENDER)
    script = f"""
import signal, sys
from impala.commands import main as cli, train
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unless the tests themselves run under nohup
train.process.IMPALA = (sys.executable, "-S", {str(tmp_path / "pretender.py")!r})
sys.exit(cli.main(sys.argv[1:]))
"""
    environ = {
        "PRETENDERS": str(tmp_path),
        "LEARNER_STATUS": learner,
        "ACTOR_STATUS": actor,
        "BEGINS": "yes" if begins else "",
    }
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py"), "train", "catch"]
    command += ["--logdir", str(tmp_path / "run"), *flags]
    return subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for(path: pathlib.Path) -> None:
    services.wait_for(path.name, path.exists)


@pytest.mark.parametrize("status", [0, 7])
def test_train_ends_with_the_learner_and_with_its_status(
    tmp_path: pathlib.Path, status: int
) -> None:
    process = _train(tmp_path, "--seed", "5", "--fresh", learner=str(status))
    _, errors = process.communicate(timeout=60)
    words, written = json.loads((tmp_path / "learner.json").read_text())

    assert process.returncode == status
    why = "the learner ended with status 7" if status else "training finished"
    assert f"Stopping: {why}." in errors
    assert f"Ended with status {status}: {why}." in errors
    settings = yaml.safe_load(written)  # those in force reach the learner
    assert (settings["seed"], settings["environment"]["id"]) == (5, "Catch")
    assert words[0] == "catch"
    assert "--fresh" in words
    acting = (tmp_path / "run" / "actors.log").read_text()
    assert f"--learner {words[words.index('--listen') + 1]}" in acting


def test_train_finds_a_short_path_for_its_socket(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    process = _train(tmp_path, learner="0")
    _, errors = process.communicate(timeout=60)
    words, *_ = json.loads((tmp_path / "learner.json").read_text())

    assert process.returncode == 0, errors
    assert listen.socket_path(words[words.index("--listen") + 1])  # no error


def test_ctrl_c_tells_learner_and_actors_to_end(tmp_path: pathlib.Path) -> None:
    process = _train(tmp_path)
    _wait_for(tmp_path / "learner.ready")
    _wait_for(tmp_path / "actor.ready")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 75  # not 0: `impala train ... && impala evaluate ...` ends here
    assert (tmp_path / "learner.told").exists()
    assert (tmp_path / "actor.told").exists()
    assert "Stopping: SIGINT received." in errors
    assert "Ctrl-C once more, 1 s or more after the first, kills at once" in errors
    assert errors.splitlines()[-1].endswith(
        "Ended with status 75: SIGINT received. The same command goes on with the run."
    )


def test_ctrl_c_again_a_second_later_kills(tmp_path: pathlib.Path) -> None:
    process = _train(tmp_path)
    _wait_for(tmp_path / "learner.ready")
    os.kill(int((tmp_path / "learner.pid").read_text()), signal.SIGSTOP)  # it cannot end
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Killing at once: SIGINT received again." in errors
    assert not (tmp_path / "learner.told").exists()


def test_errors_of_environments_are_shown_once_and_loops_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given actors whose environments raise the same exception twelve times, and another one once...
    gear = Failure("KeyError: 'gear'", "/home/me/game.py:7, in step")
    for failure in (*[gear] * 11, Failure("OSError: no server", ""), gear):
        note(tmp_path / "failures", failure)
    monkeypatch.setenv("FAILURES", (tmp_path / "failures").read_text())
    process = _train(tmp_path, actor="3")
    assert process.stderr is not None
    errors: list[str] = []
    while "The actors ended with status 3" not in "".join(errors):
        errors.append(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    # ... then each is on the screen once, before the actors' end, and the loop as well.
    said = [line.split(": ", 1)[1] for line in errors if "failed" in line or "failing" in line]
    assert said == [
        "An environment has failed: KeyError: 'gear' (/home/me/game.py:7, in step).\n",
        "Environments keep failing, 10 times so far: "
        "KeyError: 'gear' (/home/me/game.py:7, in step).\n",
        "An environment has failed: OSError: no server.\n",
    ]


# A checkpoint is evaluated and watched.


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The log directory of a Catch run with untrained weights."""
    from impala.logdir import checkpoint
    from impala.parts import build
    from learner.update import named_variables

    config = PRESETS["catch"][1]
    environment = build.environment(config.environment, 1)
    spaces = environment.observation_space, environment.action_space
    agent = build.agent(config.agent, *spaces)
    environment.close()
    saved = checkpoint.Checkpoint(
        config=config,
        counters=checkpoint.Counters(updates=3, frames=1234),
        variables={
            n: v.numpy() for n, v in named_variables.named("agent", agent.variables).items()
        },
        accounts={},
        spaces=spaces,
    )
    path = tmp_path_factory.mktemp("run")
    checkpoint.save(path, saved, keep=1)
    return path


def _impala(*argv: str) -> str:
    """What the command prints, run in a process of its own, for it sets up TensorFlow."""
    command = [sys.executable, "-m", "impala", *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_evaluate_prints_a_table_and_writes_json(
    logdir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "deep" / "result.json"
    output = _impala("evaluate", str(logdir), "--episodes", "5", "--json", str(file))
    result = json.loads(file.read_text())

    assert "Catch: 5 episodes, sampled, after 1,234 frames" in output
    assert result["frames_trained"] == 1234
    assert [abs(episode["episode_return"]) for episode in result["episodes"]] == [1.0] * 5
    assert {episode["length"] for episode in result["episodes"]} == {9}
    assert result["summary"]["episodes"] == 5


def test_an_environment_that_fails_while_played_is_told_in_a_line() -> None:
    error = EnvironmentFailed("environment 0 failed", "KeyError: 'gear'", "walk.py:7, in step")
    says = re.escape("An environment has failed: KeyError: 'gear' (walk.py:7, in step).")
    with pytest.raises(values.OptionError, match=says), playing.played():
        raise error


def test_a_report_shows_the_best_agent(logdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    row = {"frames": 100, "seconds": 1, "episode/Catch/return_recent": 1.0}
    (logdir / "metrics.jsonl").write_text(json.dumps(row))
    file = tmp_path / "report.html"
    assert _impala("report", str(logdir), "--output", str(file)) == f"{file}\n"

    page = file.read_text()
    assert "checkpoint newest, greedy: 10 images, return" in page
    (gif,) = re.findall('src="data:image/gif;base64,([^"]+)"', page)
    film = tmp_path / "episode.gif"
    film.write_bytes(base64.b64decode(gif))
    with PIL.Image.open(film) as picture:
        assert picture.info["duration"] == 50
    images = _images(film)
    assert len(images) > 1 and (images[0] != images[-1]).any()
    assert cli.main(["report", str(logdir), "--output", str(file), "--no-video"]) == 0
    assert "Best agent" not in file.read_text()


def _without_opengl() -> np.ndarray:
    raise RuntimeError("an OpenGL platform library has not been loaded")  # as MuJoCo says


def _without_its_library() -> np.ndarray:
    raise ImportError("Unable to load OpenGL library")  # as PyOpenGL says


def _without_pygame() -> np.ndarray:
    raise gym.error.DependencyNotInstalled("pygame is not installed, run `pip install ...`")


@pytest.mark.parametrize(
    ("render", "says"),
    [
        (_without_pygame, r": pygame is not installed, run `pip"),
        (gym.Env().render, r": it has no render\. Define render\(self\), which returns uint8"),
        (_without_opengl, r", as nothing draws here: an OpenGL .* loaded\. MuJoCo takes MUJOCO_GL"),
        (_without_its_library, r", as nothing draws here: Unable to .* MuJoCo takes MUJOCO_GL"),
    ],
)
def test_record_says_so_if_an_environment_draws_nothing(
    logdir: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    render: Callable[[], np.ndarray],
    says: str,
) -> None:
    player = Player(checkpoint.choose(logdir))
    environment = player.environment(1)
    monkeypatch.setattr(environment, "render", render)
    says = f"Catch cannot be recorded{says}"
    with contextlib.closing(environment), pytest.raises(values.OptionError, match=says):
        next(record._images(player, environment, record.Record(logdir=logdir), []))


def _images(path: pathlib.Path) -> list[np.ndarray]:
    with PIL.Image.open(path) as picture:
        return [np.array(image.convert("RGB")) for image in PIL.ImageSequence.Iterator(picture)]


def test_videos_keep_their_colours_and_say_what_they_need(tmp_path: pathlib.Path) -> None:
    red, blue = (np.full((6, 8, 3), colour, np.uint8) for colour in ([255, 0, 0], [0, 0, 255]))
    video.write(tmp_path / "two.gif", iter([red, blue]))

    images = _images(tmp_path / "two.gif")
    assert len(images) == 2
    np.testing.assert_array_equal(images[0], red)
    np.testing.assert_array_equal(images[1], blue)
    with pytest.raises(ValueError, match=r"must end in \.gif or \.mp4"):
        video.check(tmp_path / "film")


@pytest.mark.parametrize(
    ("words", "is_evaluated"),
    [
        ("catch", False),
        ("catch --evaluator.every-frames 1000", True),
        ("pendulum", True),
        ("bipedal-walker", True),
        ("pendulum --evaluate no", False),
        ("pendulum --learner.snapshots never", False),
        ("catch --learner.snapshots always", True),
    ],
)
def test_a_run_that_says_how_often_to_evaluate_has_an_evaluator(
    words: str, is_evaluated: bool
) -> None:
    """The presets of SAC do: ten greedy episodes beside training."""
    command = parse("train", train.Train, words.split())
    assert train.is_evaluated(command) == is_evaluated
    if words == "pendulum":
        assert command.settings.evaluator.episodes == 10 and command.settings.evaluator.greedy


@pytest.mark.parametrize(
    ("words", "has_gpu", "cores", "expected"),
    [
        ("atari", True, 16, "A GPU, 16 cores: 13 actors of 32 environments, batches of 4 fresh"),
        ("atari-gpu", True, 2, "A GPU, 2 cores: 1 actor of 16"),
        ("atari", False, 16, "No GPU, 16 cores: 1 actor of 32"),
        ("atari --mix.fresh 32 --deterministic", True, 16, "A GPU, 16 cores: 1 actor of 32"),
        ("atari --num-actors 3", True, 1, "A GPU, 1 core: 3 actors of 32"),
        ("catch", True, 16, "A GPU, 16 cores: 1 actor of 32"),
        ("pendulum", False, 2, "4 environments, batches of 64 replayed unrolls of 4 steps."),
    ],
)
def test_a_run_is_planned_for_the_machine(
    words: str, has_gpu: bool, cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impala.runtime.process.available_cores", lambda: cores)
    monkeypatch.setattr("impala.runtime.process.has_gpu", lambda: has_gpu)
    assert expected in train._plan(parse("train", train.Train, words.split()))


def test_help_may_be_cut_off() -> None:
    """As by `impala train cartpole --help | head -1`."""
    with subprocess.Popen(
        [*process.IMPALA, "train", "cartpole", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


_WRITES = """
import sys
from impala.runtime import process
process._STALLED_SECONDS = {seconds}
process.outlive_readers(waits=False)
for number in range(5000):
    print(f"{{number:06}}", "." * 40, flush=True)
    print("." * 40, file=sys.stderr)
"""


@pytest.mark.parametrize("made", [os.pipe, os.openpty])
def test_a_run_outlives_a_terminal_that_was_stopped(made: Callable[[], tuple[int, int]]) -> None:
    here, there = ends = made()
    code = _WRITES.format(seconds=0.2)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=there, stderr=there, timeout=60)
        assert done.returncode == 0
        assert os.read(here, 6) == b"000000"
    finally:
        for end in ends:
            os.close(end)


def test_who_reads_slowly_misses_nothing() -> None:
    command = [sys.executable, "-c", _WRITES.format(seconds=60)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        time.sleep(2.0)  # it has filled the pipe
        lines = child.stdout.read().splitlines()
    assert child.returncode == 0
    assert [int(line.split()[0]) for line in lines] == [*range(5000)]


def test_without_tensorboard_its_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _run("train", "catch", "--tensorboard", "--logdir", str(tmp_path / "run")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tensorboard needs TensorBoard" in line and "install the package tensorboard" in line


def test_tensorboard_runs_beside_a_run_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Here TensorBoard is a program that writes what it writes, and when it was asked to end."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").touch()
    (tmp_path / "tensorboard" / "main.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "assert sys.argv[1] == '--logdir' and sys.argv[2].endswith('run/tensorboard')\n"
        "print('TensorBoard 9.9 at http://localhost:6006/ (Press CTRL+C to quit)', flush=True)\n"
        "time.sleep(600)\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    process = _train(tmp_path, "--tensorboard")
    _wait_for(tmp_path / "actor.ready")
    assert process.stderr is not None
    said = ""
    while "TensorBoard 9.9 at http://localhost:6006/\n" not in said:
        said += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert (tmp_path / "ended").exists()
