"""Parts of one's own, from a package that is installed beside impala: tests/outside."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import services
import uv
import yaml

from impala.commands import main as cli
from impala.config import layers, rules, values
from impala.config.schema import AgentConfig, Config, MixConfig
from impala.logdir import checkpoint, identity
from impala.parts import sections
from impala.parts.components import Allowed
from impala.play.player import Player
from learner.update import named_variables

OUTSIDE = pathlib.Path(__file__).parent / "outside"
ENVIRONMENT = "outside_parts.environments:Lanes"
TORSO = "outside_parts.torsos:Gated"
ALGORITHM = "outside_parts.algorithms:Awr"
OPTIMISER = "outside_parts.optimisers:Lion"
SINK = "outside_parts.sinks:CsvRows"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the package is installed, with its entry points."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(OUTSIDE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-cache",
        "--no-deps",
    ]
    command += ["--no-build-isolation", "--python", sys.executable, "--target", f"{folder}/site"]
    done = subprocess.run([*command, f"{folder}/source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def bare(installed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The same modules without entry points, as on a path that somebody has set."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(installed / "outside_parts", folder / "outside_parts")
    return folder


@pytest.fixture
def _importable(bare: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(bare)
    for name in [name for name in os.environ if name.startswith(layers.ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside_parts"]:
        del sys.modules[name]


def _printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    assert cli.main([*argv, "--print-config"]) == 0
    printed: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return printed


# ------------------------------------------------------------------------------ settings


@pytest.mark.usefixtures("_importable")
def test_settings_of_a_part_are_a_section_in_every_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"agent: {{torso: '{TORSO}'}}\ngated: {{width: 24, layers: 3}}\n")
    monkeypatch.setenv("IMPALA_ALGORITHM", ALGORITHM)
    monkeypatch.setenv("IMPALA_GATED__LAYERS", "4")
    monkeypatch.setenv("IMPALA_AWR__TEMPERATURE", "0.5")
    flags = ["--optimiser.name", OPTIMISER, "--lion.beta1", "0.8", "--awr.largest-weight", "3"]
    line = ["train", *flags, "catch", "--config", str(file), "--telemetry.sinks", SINK]

    printed = _printed(capsys, *line, "--csv-rows.columns", "frames")

    assert printed["gated"] == {"width": 24, "layers": 4}
    assert (printed["awr"]["temperature"], printed["awr"]["largest_weight"]) == (0.5, 3.0)
    assert printed["lion"] == {"beta1": 0.8, "beta2": 0.99}
    assert printed["csv_rows"] == {"file": "rows.csv", "columns": ["frames"]}
    # What is printed, as what a learner is given, is the same configuration again.
    file.write_text(yaml.safe_dump(printed))
    again = layers.layered("cartpole", file, {})
    assert values.to_dict(again) == printed


@pytest.mark.usefixtures("_importable")
def test_help_explains_the_settings_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["learner", "catch", "--agent.torso", TORSO, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--gated.width INT Units of each layer. (default: 64)" in shown


@pytest.mark.usefixtures("_importable")
def test_a_preset_of_ones_own_has_settings_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    preset = "outside_parts.presets:OUTSIDE_CATCH"
    printed = _printed(capsys, "train", preset, "--gated.layers", "1")
    assert printed["gated"] == {"width": 32, "layers": 1}
    assert printed["awr"]["temperature"] == 0.25
    # A part that a flag replaces takes its section with it.
    printed = _printed(capsys, "train", preset, "--agent.torso", "mlp")
    assert "gated" not in printed and "awr" in printed


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--agent.torso {TORSO} --gated.width 0", "gated.width is 0; it must be at least 1."),
        (f"--agent.torso {TORSO} --gated.wdth 1", "Did you mean '--gated.width'?"),
        (
            f"--agent.torso {ALGORITHM}",
            f"{ALGORITHM} is not a torso: derive it from Torso (from impala.agents.torsos import",
        ),
        (
            f"--agent.core {TORSO}",
            f"{TORSO} is not a core: derive it from Core (from impala.agents.",
        ),
        ("--algorithm outside_parts:No", "outside_parts has no attribute 'No'."),
        (f"--phases {ALGORITHM} impala", "every phase but the last is ALGORITHM:FRAMES"),
        (f"--phases {ALGORITHM}:1000 impala --agent.policy epsilon_greedy", f"which {ALGORITHM}"),
        ("--telemetry.sinks no_such:Sink", "there is no module 'no_such'."),
    ],
)
def test_mistakes_with_parts_are_told_in_a_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "catch", *line.split()]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


@pytest.mark.usefixtures("_importable")
def test_demands_of_an_algorithm_of_ones_own_are_checked() -> None:
    from outside_parts.algorithms import Awr

    from impala.config.demands import Demands

    config = sections.compose(Config(algorithm=ALGORITHM, mix=MixConfig(replayed=4)))
    rules.validate(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Awr, "demands", Demands(on_policy=True))
        with pytest.raises(values.OptionError, match=r"mix\.replayed is 4, but outside_parts"):
            rules.validate(config)


@pytest.mark.usefixtures("_importable")
def test_a_section_that_is_built_in_cannot_be_that_of_a_part() -> None:
    import outside_parts.torsos

    outside_parts.torsos.Learner = type(  # type: ignore[attr-defined]
        "Learner", (outside_parts.torsos.Gated,), {}
    )
    named = Config(agent=AgentConfig(torso="outside_parts.torsos:Learner"))
    with pytest.raises(values.OptionError, match="section 'learner', which is a section that is b"):
        sections.compose(named)


@pytest.mark.usefixtures("_importable")
def test_reading_settings_imports_nothing_that_is_not_allowed() -> None:
    told = {"agent": {"torso": TORSO}, "gated": {"width": 8}}
    config = sections.from_dict(told, Allowed(("outside_parts",)))
    assert sections.for_actors(config) == {"gated": {"width": 8, "layers": 2}}
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside_parts"]:
        del sys.modules[name]
    with pytest.raises(values.OptionError, match=f"--allow {TORSO}"):
        sections.from_dict(told, Allowed())
    with pytest.raises(values.OptionError, match="--allow outside_parts:Games-v0"):
        sections.from_dict({"environment": {"id": "outside_parts:Games-v0"}}, Allowed())
    assert "outside_parts.torsos" not in sys.modules


# ------------------------------------------------------------------------------ the services


def test_an_outside_package_is_trained_and_evaluated(
    tmp_path: pathlib.Path,
    installed: pathlib.Path,
    bare: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(bare), paths]))
    logdir = tmp_path / "run"
    flags = ["--environment.id", ENVIRONMENT, "--lanes.lanes", 5, "--algorithm", ALGORITHM]
    flags += ["--agent.torso", TORSO, "--gated.width", 24]
    flags += [
        "--awr.temperature",
        0.25,
        "--awr.largest-weight",
        1,
        "--optimiser.name",
        OPTIMISER,
        "--lion.beta1",
        0.8,
    ]
    flags += ["--telemetry.sinks", SINK, "--csv-rows.columns", "updates"]
    with ExitStack() as stack:
        # Given a learner whose flags name parts of the package ...
        learner = stack.enter_context(services.learner(logdir, "127.0.0.1:0", *flags))
        address = services.address_of(logdir)

        # ... an actor that may not import them says so in a line, and which flag would allow it ...
        refused = services.run("actor", "--learner", address)
        assert refused.returncode == 1
        lines = [line for line in refused.stderr.splitlines() if "outside_parts" in line]
        assert len(lines) == 1 and f"--allow {ENVIRONMENT}" in lines[0], refused.stderr

        # ... and one that is allowed to acts.
        stack.enter_context(services.actor(logdir, address, "--allow", "outside_parts"))
        services.wait_for_row(logdir, "updates", lambda row: row["updates"] >= 5)
        assert services.stop(learner) == 0

    updates = [float(line) for line in (logdir / "rows.csv").read_text().split()]
    rows = services.rows(logdir)
    assert 0.0 < max(row.get("awr/weight", 0.0) for row in rows) <= 1.0
    assert updates == sorted(updates)
    assert updates[-1] == rows[-1]["updates"] >= 5

    # The checkpoint holds the settings, and is opened only by who may import the part.
    saved = checkpoint.load(logdir)
    assert saved.own["gated"] == {"width": 24, "layers": 2}
    assert saved.own["awr"]["temperature"] == 0.25
    assert {name.split("/", 2)[2] for name in named_variables.of_agent(saved.variables)} >= {
        "Gated/linear_0/w:0"
    }
    assert saved.own["lanes"] == {"lanes": 5, "steps": 8}
    with pytest.raises(ValueError, match=f"--allow {ENVIRONMENT}"):
        Player(saved)

    # Where the package is installed, its entry points are allowance enough.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), paths]))
    report = tmp_path / "report.json"
    played = services.run("evaluate", logdir, "--episodes", 2, "--json", report)
    assert played.returncode == 0, played.stderr
    episodes = json.loads(report.read_text())["episodes"]
    assert [episode["length"] for episode in episodes] == [8, 8]
    recorded = services.run("record", logdir)
    assert "episode.gif: 9 images" in recorded.stdout, recorded.stderr

    # Another width would be another experiment.
    monkeypatch.syspath_prepend(bare)
    other = sections.compose(Config(agent=AgentConfig(torso=TORSO)))
    assert "gated.width: 24 -> 64" in identity.differences(logdir, other)
