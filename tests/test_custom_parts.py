"""Parts that a user brings: their settings, their help, and what is said of mistakes."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from half_trained import STORED

from impala.commands import main as cli
from impala.config import layers, rules, values
from impala.config.demands import Demands
from impala.config.schema import (
    AgentConfig,
    Config,
    MixConfig,
    OptimiserConfig,
    TelemetryConfig,
)
from impala.logdir import checkpoint, identity
from impala.parts import build, sections
from impala.parts.components import Allowed
from impala.play.player import Player

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
TORSO, ALGORITHM = "custom_torso:Gated", "custom_algorithm:Slow"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in [name for name in os.environ if name.startswith(layers.ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("custom_")]:
        del sys.modules[name]


def _printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    assert cli.main([*argv, "--print-config"]) == 0
    printed: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return printed


def test_settings_of_a_part_are_a_section_in_every_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"agent: {{torso: '{TORSO}'}}\ngated: {{width: 24}}\n")
    monkeypatch.setenv("IMPALA_ALGORITHM", ALGORITHM)
    monkeypatch.setenv("IMPALA_SLOW__STEP", "0.3")
    line = ["train", "--slow.baseline-cost", "3", "catch", "--config", str(file)]

    printed = _printed(capsys, *line)

    assert printed["gated"] == {"width": 24}
    assert (printed["slow"]["step"], printed["slow"]["baseline_cost"]) == (0.3, 3.0)
    # What is printed, as what a learner is given, is the same configuration again.
    file.write_text(yaml.safe_dump(printed))
    again = layers.layered("cartpole", file, {})
    assert values.to_dict(again) == printed


def test_help_explains_the_settings_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["learner", "catch", "--agent.torso", TORSO, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--gated.width INT Units of each layer. (default: 64)" in shown


def test_a_preset_of_ones_own_has_settings_of_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "custom_presets.py").write_text(f"""
import dataclasses
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig
from impala.parts.sections import compose
from custom_torso import Gated
catch = dataclasses.replace(
    PRESETS["catch"][1], agent=AgentConfig(torso="{TORSO}"), algorithm="{ALGORITHM}"
)
MINE = ("Catch with parts.", compose(catch, gated=Gated.Settings(width=32)))
""")
    printed = _printed(capsys, "train", "custom_presets:MINE", "--slow.step", "0.1")
    assert printed["gated"] == {"width": 32} and printed["slow"]["step"] == 0.1
    # A part that a flag replaces takes its section with it.
    printed = _printed(capsys, "train", "custom_presets:MINE", "--agent.torso", "mlp")
    assert "gated" not in printed and "slow" in printed


def test_a_part_has_the_section_of_one_that_it_replaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "custom_other.py").write_text("""
import dataclasses, custom_torso
class Gated(custom_torso.Gated):
    @dataclasses.dataclass(frozen=True)
    class Settings:
        width: int = 5
        depth: int = 1
""")
    other = {"agent": {"torso": "custom_other:Gated"}}
    file = tmp_path / "mine.yaml"
    file.write_text(f"agent: {{torso: '{TORSO}'}}\n")
    flags = ["--agent.torso", "custom_other:Gated", "--gated.depth", "3"]
    config = layers.layered("catch", file, {}, flags)
    assert values.to_dict(config)["gated"] == {"width": 5, "depth": 3}
    config = layers.composed_over(layers.layered("catch", file, {}), other)
    assert values.to_dict(config)["gated"] == {"width": 5, "depth": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--agent.torso {TORSO} --gated.width 0", "gated.width is 0; it must be at least 1."),
        (f"--agent.torso {TORSO} --gated.wdth 1", "Did you mean '--gated.width'?"),
        (
            f"--agent.torso {ALGORITHM}",
            f"{ALGORITHM} is not a torso: derive it from Torso (from impala.agents.torsos import",
        ),
        ("--algorithm custom_torso:No", "custom_torso has no attribute 'No'."),
        (f"--phases {ALGORITHM} impala", "every phase but the last is ALGORITHM:FRAMES"),
        ("--telemetry.sinks no_such:Sink", "there is no module 'no_such'."),
    ],
)
def test_mistakes_with_parts_are_told_in_a_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "catch", *line.split()]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_an_algorithm_of_ones_own_is_checked_as_those_that_it_is_derived_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "custom_policy.py").write_text("""
import dataclasses
from impala.algorithms.policy_gradient import PolicyGradient
from impala.config.schema import PolicyGradientConfig
class Mine(PolicyGradient):
    @dataclasses.dataclass(frozen=True)
    class Settings(PolicyGradientConfig):
        pass
""")
    line = "train catch --algorithm custom_policy:Mine --mine.entropy-target 0.3"
    assert cli.main([*line.split(), "--mine.entropy-cost", "0"]) == 2
    assert "mine.entropy_target is 0.3 and mine.entropy_cost 0" in capsys.readouterr().err
    mine = sections.compose(Config(algorithm="custom_policy:Mine"))
    assert identity.decides_variables("mine.entropy_target", mine)
    assert not identity.decides_variables("mine.entropy_cost", mine)


def test_demands_that_an_algorithm_cannot_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from custom_algorithm import Slow

    spaces = gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Discrete(3)
    config = sections.compose(Config(algorithm=ALGORITHM))
    agent = build.agent(config.agent, *spaces)
    teacher: Any = None
    monkeypatch.setattr(Slow, "demands", Demands(has_teachers=True))
    with pytest.raises(ValueError, match="demands teachers, which PolicyGradient alone has"):
        build.algorithm(ALGORITHM, config, agent, [teacher])


def test_demands_of_a_custom_algorithm_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from custom_algorithm import Slow

    config = sections.compose(Config(algorithm=ALGORITHM, mix=MixConfig(replayed=4)))
    monkeypatch.setattr(Slow, "demands", Demands())
    rules.validate(config)
    monkeypatch.setattr(Slow, "demands", Demands(on_policy=True))
    with pytest.raises(values.OptionError, match=r"mix\.replayed is 4, but custom_algorithm"):
        rules.validate(config)


def test_a_built_in_section_cannot_be_that_of_a_part() -> None:
    import custom_torso

    custom_torso.Learner = type("Learner", (custom_torso.Gated,), {})  # type: ignore[attr-defined]
    named = Config(agent=AgentConfig(torso="custom_torso:Learner"))
    with pytest.raises(values.OptionError, match="section 'learner', which is a section that is b"):
        sections.compose(named)


def test_reading_settings_imports_nothing_that_is_not_allowed() -> None:
    told = {"agent": {"torso": TORSO}, "gated": {"width": 8}}
    config = sections.from_dict(told, Allowed(("custom_torso",)))
    assert sections.for_actors(config) == {"gated": {"width": 8}}
    _forget()
    with pytest.raises(values.OptionError, match=f"--allow {TORSO}"):
        sections.from_dict(told, Allowed())
    with pytest.raises(values.OptionError, match="--allow custom_environment:Games-v0"):
        sections.from_dict({"environment": {"id": "custom_environment:Games-v0"}}, Allowed())
    assert "custom_torso" not in sys.modules


def test_playing_imports_nothing_that_only_training_uses() -> None:
    saved = checkpoint.choose(STORED / "catch")
    trained = dataclasses.replace(
        saved.config,
        algorithm=ALGORITHM,
        optimiser=OptimiserConfig(name="no_such:Optimiser"),
        telemetry=TelemetryConfig(sinks=("no_such:Sink",)),
    )
    own, needs = {"slow": {"step": 0.3}}, frozenset({"slow.step"})
    player = Player(saved._replace(config=trained, own=own, needs=needs))
    assert player.config.algorithm == ALGORITHM
    assert "custom_algorithm" not in sys.modules
    named = dataclasses.replace(trained, agent=AgentConfig(torso=TORSO))
    with pytest.raises(values.OptionError, match=f"--allow {TORSO}"):
        Player(saved._replace(config=named))
    # What may not be ignored, though no part that only training uses has it, is missed.
    with pytest.raises(values.OptionError, match=r"slow\.step"):
        Player(saved._replace(own=own, needs=needs))
