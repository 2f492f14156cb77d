"""Settings come from four layers, and a wrong name or value is told the right one."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from impala.commands.parsing import parse
from impala.commands.train import Train
from impala.config import layers, rules, values
from impala.config.presets import PRESETS
from impala.config.schema import Config, OptimiserConfig
from impala.config.values import OptionError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json_and_yaml(name: str, tmp_path: pathlib.Path) -> None:
    config = rules.validate(PRESETS[name][1])
    other = "cartpole" if name != "cartpole" else "catch"
    file = tmp_path / "config.yaml"
    file.write_text(values.to_yaml(config))

    assert values.from_dict(Config, json.loads(json.dumps(values.to_dict(config)))) == config
    assert values.to_dict(layers.layered(other, file, {})) == values.to_dict(config)


@pytest.mark.parametrize(
    ("preset", "file", "environ", "flag", "epsilon"),
    [
        ("catch", "", None, "", 1e-7),  # adam with an epsilon of its own
        ("catch", "", None, "adam", 1e-7),  # not another one
        ("catch", "", None, "rmsprop", 0.0),
        ("atari-a3c", "", None, "", 0.0025),
        ("atari-a3c", "", None, "adam", 0.0),
        ("atari-a3c", "name: adam", None, "", 0.0),
        ("atari-a3c", "epsilon: 0.3", None, "adam", 0.0),
        ("atari-a3c", "name: adam, epsilon: 0.3", None, "adam", 0.3),
        ("atari-a3c", "name: adam", "0.4", "", 0.4),
        ("atari-a3c", "name: adam", "0.4", "rmsprop", 0.0),
    ],
)
def test_another_optimiser_takes_its_own_epsilon(
    preset: str, file: str, environ: str | None, flag: str, epsilon: float, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"optimiser: {{{file}}}\n")
    variables = {} if environ is None else {"IMPALA_OPTIMISER__EPSILON": environ}
    argv = ["--optimiser.name", flag] if flag else []

    config = layers.layered(preset, path, variables, argv)

    assert config.optimiser.epsilon == epsilon


def test_environment_variables_hold_every_kind_of_value() -> None:
    environ = {
        "IMPALA_AGENT__HIDDEN_SIZES": "32,16",
        "IMPALA_ENVIRONMENT__ATARI__ACTIONS": "[0, 2]",
        "IMPALA_ENVIRONMENT__KWARGS": '{"continuous": true}',
        "IMPALA_LEARNER__BFLOAT16": "True",
        "IMPALA_TOTAL_FRAMES": "25e6",
        "IMPALA_TASKS__FRAMES": "1.5e3 2_000",
        "IMPALA_SEED": "9007199254740993",  # no float holds it
    }

    config = layers.layered("catch", None, environ)

    assert config.agent.hidden_sizes == (32, 16)
    assert config.environment.atari.actions == (0, 2)
    assert config.environment.kwargs == '{"continuous": true}'
    assert config.learner.bfloat16 is True
    assert config.total_frames == 25_000_000
    assert config.tasks.frames == (1500, 2000)
    assert config.seed == 9007199254740993


def test_flags_hold_every_kind_of_value_between_other_words() -> None:
    argv = (
        "train --optimiser.learning-rate 3e-4 catch --agent.hidden-sizes --mix.no-learn-from-fresh "
        "--normalised --tasks.frames -1 2.5 --environment.id=Catch --seed -1 "
        "--deterministic --phases critic:9 impala"
    )
    assert layers.from_flags(argv.split()) == (
        {
            "optimiser": {"learning_rate": "3e-4"},
            "agent": {"hidden_sizes": []},
            "mix": {"learn_from_fresh": False},
            "tasks": {"frames": ["-1", "2.5"]},
            "environment": {"id": "Catch"},
            "seed": "-1",
            "deterministic": True,
            "phases": ["critic:9", "impala"],
        },
        ["train", "catch", "--normalised"],
    )
    with pytest.raises(OptionError, match="--seed lacks its value"):
        layers.from_flags(["--seed", "--deterministic"])
    assert layers.from_flags(["--mix.no-learn-from-fresh=false"])[0] == {}  # which is no flag


def test_settings_of_an_algorithm_that_does_not_learn_are_refused() -> None:
    given = ["cartpole", "--impact.entropy-cost", "0.1"]
    with pytest.raises(OptionError, match=r"impact\.entropy_cost is given, but .* with impala,"):
        parse("train", Train, given)
    for others in (["--algorithm", "impact"], ["--phases", "impala:9000", "impact"]):
        assert parse("train", Train, [*given, *others]).settings.impact.entropy_cost == 0.1


def test_kubernetes_service_variables_are_left_alone() -> None:
    environ = {
        "IMPALA_LEARNER_SERVICE_HOST": "10.0.0.1",
        "IMPALA_LEARNER_PORT": "tcp://10.0.0.1:50051",
        "IMPALA_LEARNER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "IMPALA_ACTOR_SERVICE_PORT": "1",
    }

    assert layers.from_environment(environ) == {}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("IMPALA_OPTIMISER__LERNING_RATE", "IMPALA_OPTIMISER__LEARNING_RATE"),
        ("IMPALA_OPTIMIZER__BETA1", "IMPALA_OPTIMISER__BETA1"),
        ("IMPALA_LEARNER_UNROLL_LENGTH", "IMPALA_LEARNER__UNROLL_LENGTH"),
        ("IMPALA_TOTAL_FRAME", "IMPALA_TOTAL_FRAMES"),
    ],
)
def test_a_misspelt_variable_is_told_the_nearest(name: str, right: str) -> None:
    with pytest.raises(OptionError, match=rf"{name}\b.*Did you mean {right}\?"):
        layers.from_environment({name: "1"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"optimizer": {}}, "'optimizer'. Did you mean 'optimiser'?"),
        (
            {"optimiser": {"learning_rte": 1}},
            "'optimiser.learning_rte'. Did you mean 'optimiser.learning_rate'?",
        ),
        (
            {"optimiser": {"lr": 1}},
            "'optimiser.lr'. There are: optimiser.name, optimiser.learning_r",
        ),
        ({"learning_rate": 1}, "'learning_rate'. Did you mean 'optimiser.learning_rate'?"),
        (
            {"actor": {"zzz": 1}},
            "actor.num_envs, actor.num_groups, actor.env_threads, "
            "actor.hang_seconds, actor.max_environment_bytes",
        ),
        ({"optimiser": {"name": "adm"}}, "one of rmsprop, adam, adamw. Did you mean 'adam'?"),
        ({"optimiser": {"learning_rate": "fast"}}, "is 'fast'; it must be a finite number"),
        ({"optimiser": {"learning_rate": -1}}, "is -1.0; it must be at least 1e-12"),
        ({"optimiser": {"learning_rate": float("nan")}}, "it must be a finite number"),
        ({"objective": {"discount": 1.5}}, "objective.discount is 1.5; it must be from 0 to 1"),
        ({"actor": {"num_groups": 9}}, "actor.num_groups is 9; it must be from 1 to 8"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be from 0 to"),
        (
            {"environment": {"atari": {"max_frames_per_episode": 1e10}}},
            "environment.atari.max_frames_per_episode is 10000000000; it must be from 1 to",
        ),
        ({"environment": {"atari": {"noop_max": 2**31}}}, "atari.noop_max is 2147483648; it must"),
        ({"optimiser": {"beta1": 1}}, "optimiser.beta1 is 1.0; it must be from 0 to 0.999999"),
        ({"optimiser": {"beta2": 1}}, "optimiser.beta2 is 1.0; it must be from 0 to 0.999999"),
        ({"seed": True}, "seed is True; it must be a whole number"),
        ({"seed": 0.5}, "seed is 0.5; it must be a whole number"),
        ({"total_frames": "1.5"}, "total_frames is '1.5'; it must be a whole number"),
        ({"learner": {"jit_compile": "maybe"}}, "is 'maybe'; it must be true or false"),
        ({"agent": {"hidden_sizes": 64}}, "agent.hidden_sizes is 64; it must be a list"),
        ({"agent": {"hidden_sizes": [64, 0]}}, "hidden_sizes[1] is 0; it must be at least 1"),
        ({"agent": 3}, "agent holds settings by name, not 3"),
        ({"environment": {"id": 3}}, "environment.id is 3; it must be text"),
    ],
)
def test_wrong_plain_data_is_named_with_what_would_be_right(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        values.from_dict(Config, data)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    rate = np.float32(0.5)
    config = values.from_dict(Config, {"seed": np.int64(3), "optimiser": {"learning_rate": rate}})
    assert (config.seed, type(config.seed)) == (3, int)
    assert type(config.optimiser.learning_rate) is float
    with pytest.raises(OptionError, match=r"seed is np\.True_; it must be a whole number"):
        values.from_dict(Config, {"seed": np.True_})


def test_a_file_may_be_a_pipe() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write("seed: 7\nchecks: {on_violation: off}\n")  # false in YAML 1.1
    config = layers.layered("catch", pathlib.Path(f"/dev/fd/{reading}"), {})
    os.close(reading)
    assert (config.seed, config.checks.on_violation) == (7, "off")


def test_errors_name_the_layer(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: -1\n")
    with pytest.raises(OptionError, match=r"mine\.yaml: seed is -1"):
        layers.layered("catch", file, {})
    with pytest.raises(OptionError, match="Environment variables: seed is -1"):
        layers.layered("catch", None, {"IMPALA_SEED": "-1"})
    with pytest.raises(OptionError, match=r"preset is 'cath'.*Did you mean 'catch'"):
        layers.layered("cath", None, {})
    with pytest.raises(OptionError, match="No such file"):
        layers.layered("catch", tmp_path / "absent.yaml", {})
    for text in ("{", "seed: 2026-13-45", "seed: !!int none", "[" * 3000):
        file.write_text(text)
        with pytest.raises(OptionError, match="is not YAML"):
            layers.layered("catch", file, {})
    file.write_text("learner: {threads: 4}\nseed: 1\nlearner: {checkpoint_seconds: 9}\n")
    with pytest.raises(OptionError, match=r"learner is there twice.*line 3, column 1"):
        layers.layered("catch", file, {})
    file.write_text("base: &b {x: 1}\na: {c: &m {<<: *b, x: 2}}\ntop: {<<: *m, y: 3}\n")
    with pytest.raises(OptionError, match="no setting 'base'"):  # it is YAML
        layers.layered("catch", file, {})
    file.write_text("optimiser.learning_rate: 1e-3\n")
    with pytest.raises(OptionError, match=r"Nest it: optimiser: \{learning_rate: \.\.\.\}\."):
        layers.layered("catch", file, {})
    with pytest.raises(OptionError, match="it must be a whole number"):
        layers.layered("catch", None, {"IMPALA_SEED": "9" * 400})
    file.write_text("just text")
    with pytest.raises(OptionError, match="holds settings by name"):
        layers.layered("catch", file, {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"actor": {"num_envs": 33}}, "give a multiple of 2, such as 34"),
        ({"actor": {"num_envs": 2048}}, "learner.max_envs_per_message is 512"),
        (
            {"environment": {"vectorization": "async"}},
            "environment.vectorization is async, but ALE/Pong-v5 steps all environments of a group",
        ),
        (
            {"environment": {"id": "Catch", "vectorization": "async"}},
            "environment.vectorization is async, but Catch steps all environments of a group",
        ),
        (
            {"environment": {"id": "Catch/Continuing", "vectorization": "async"}},
            "environment.vectorization is async, but Catch/Continuing steps all environments of a",
        ),
        (
            {"impala": {"correction": "one_step", "clip_pg_rho_threshold": 0.5}},
            "impala.clip_pg_rho_threshold is 0.5 and impala.correction one_step, whose returns "
            "have weights of 1, which a threshold below 1 would clip: leave it at 1 or above",
        ),
        (
            {"impala": {"correction": "none", "clip_rho_threshold": 0.99}},
            "impala.clip_rho_threshold is 0.99 and impala.correction none",
        ),
        (
            {"impala": {"correction": "epsilon", "clip_c_threshold": 0}},
            "impala.clip_c_threshold is 0 and impala.correction epsilon",
        ),
        (
            {"impact": {"entropy_target": 0.2, "entropy_cost": 0}},
            "impact.entropy_target is 0.2 and impact.entropy_cost 0, from which no weight can be",
        ),
        (
            {"impala": {"entropy_target": 0.2, "entropy_anneal": 0.5}},
            "impala.entropy_anneal 0.5: say to which impala.entropy_target_end it changes",
        ),
        (
            {"teacher": {"logdirs": ["a"], "kl_target": 0.1}},
            "teacher.anneal 0.5: the weight that is learned would rise",
        ),
        (
            {"teacher": {"logdirs": ["a"], "kl_target": 0.1, "policy_cost": 0, "anneal": 0}},
            "teacher.kl_target is 0.1 and teacher.policy_cost 0, from which no weight can be",
        ),
        (
            {"objective": {"reward_scale": 0}},
            "objective.reward_scale is 0; its absolute value must be from 1e-12 to 1e+30",
        ),
        ({"objective": {"reward_scale": -1e31}}, "objective.reward_scale is -1e+31; its absolute"),
        ({"agent": {"random_warm_up": True}}, "impala needs the actions of its own policy"),
        (
            {
                "algorithm": "q_learning",
                "agent": {"policy": "epsilon_greedy", "epsilon": {"finals": [0.05]}},
            },
            "agent.epsilon.finals is (0.05,) and agent.epsilon.weights (0.4, 0.3, 0.3): give as",
        ),
        (
            {"tasks": {"environments": ["Catch", 'Catch{"rows": 8}'], "frames": [5]}},
            "tasks.frames has 1 numbers for 2 tasks",
        ),
        ({"environment": {"kwargs": "{'a': 1}"}}, "which is not a JSON object"),
        ({"environment": {"kwargs": "[1]"}}, "which is not a JSON object (it is a list)"),
    ],
)
def test_values_that_do_not_go_together_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        rules.validate(values.from_dict(Config, data))
    assert message in str(caught.value)


def test_keyword_arguments_may_be_an_object() -> None:
    data: dict[str, Any] = {"environment": {"kwargs": {"size": [4, 5], "name": None}}}
    kwargs = values.from_dict(Config, data).environment.kwargs
    assert kwargs == '{"size": [4, 5], "name": null}'
    data["environment"]["kwargs"] = {"size": {4}}
    with pytest.raises(
        OptionError, match=r"kwargs is \{'size': \{4\}\}, which is not a JSON object"
    ):
        values.from_dict(Config, data)


def test_tasks_with_processes_may_stand_beside_tasks_without() -> None:
    mixed = {
        "environment": {"vectorization": "async"},
        "tasks": {"environments": ["Catch", "CartPole-v1"]},
    }
    rules.validate(values.from_dict(Config, mixed))


def test_rewards_may_be_scaled_by_a_negative_number() -> None:
    rules.validate(values.from_dict(Config, {"objective": {"reward_scale": -0.5}}))


def test_thresholds_of_vtrace_may_be_below_1() -> None:
    thresholds = dict.fromkeys(
        ("clip_rho_threshold", "clip_pg_rho_threshold", "clip_c_threshold"), 0.5
    )
    rules.validate(values.from_dict(Config, {"impala": thresholds}))
    above = {"correction": "one_step", "clip_pg_rho_threshold": 1.5}
    rules.validate(values.from_dict(Config, {"impala": above}))


def test_validate_checks_what_was_made_in_code() -> None:
    config = Config(optimiser=dataclasses.replace(OptimiserConfig(), decay=2.0))
    with pytest.raises(OptionError, match=r"optimiser\.decay is 2\.0"):
        rules.validate(config)


def test_differences_name_each_changed_setting() -> None:
    old = Config()
    new = values.overlay(old, {"seed": 3, "optimiser": {"name": "adam"}})

    assert values.differences(old, old) == []
    assert values.differences(old, new) == ["optimiser.name: rmsprop -> adam", "seed: 0 -> 3"]
