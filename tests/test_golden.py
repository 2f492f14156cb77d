"""The golden files of the compliance kit are what the program computes."""

import json
import subprocess
from typing import Any

import golden as making
import node
import numpy as np
import pytest
from google.protobuf import json_format

from impala.config import values
from impala.config.presets import PRESETS
from impala.conform import golden
from protos import codec, policy
from protos.impala.v1 import learner_pb2 as pb
from protos.network import Network

NETWORKS = {case["name"]: case for case in golden.load("networks")}


def _same(found: Any, expected: Any, at: str = "") -> None:
    """Compares JSON; numbers may differ by rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key in expected:
            _same(found[key], expected[key], f"{at}/{key}")
    elif isinstance(expected, list) and not (expected and isinstance(expected[0], dict)):
        if all(isinstance(value, str) for value in expected):
            assert found == expected, at
        else:
            np.testing.assert_allclose(found, expected, 1e-4, 1e-4, err_msg=at)
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            _same(one, other, f"{at}[{i}]")
    else:
        assert found == expected, at


def _reply(case: dict[str, Any]) -> pb.JoinReply:
    return json_format.ParseDict(case["reply"], pb.JoinReply())


def _parameters(reply: pb.JoinReply) -> list[np.ndarray]:
    return [
        golden.parameter(i, tuple(spec.shape), name)
        for i, (spec, name) in enumerate(
            zip(reply.parameter_specs, reply.network.parameters, strict=True)
        )
    ]


@pytest.mark.parametrize("name", ["catch", "pendulum", "policies", "message"])
def test_golden_files_are_what_the_program_computes(name: str) -> None:
    made = {
        "catch": lambda: making.run("catch"),
        "pendulum": lambda: making.run("pendulum"),
        "policies": lambda: [making.drawn(case["name"]) for case in golden.load("policies")],
        "message": making.message,
    }[name]()
    _same(made, golden.load(name))


@pytest.mark.parametrize("preset", ["catch", pytest.param("pendulum", marks=pytest.mark.slow)])
def test_golden_graphs_are_byte_by_byte_what_a_learner_makes(preset: str) -> None:
    config = values.overlay(PRESETS[preset][1], {"learner": {"unroll_length": 3}, "seed": 9})
    assert making.executable(config) == golden.run(preset).onnx


@pytest.mark.parametrize("name", ["mlp, lstm, what happened before", "small, frame stack"])
def test_golden_networks_are_those_of_the_agent(name: str) -> None:
    _same(making.forward(name), NETWORKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", making.NETWORKS)
def test_all_golden_networks_are_those_of_the_agent(name: str) -> None:
    _same(making.forward(name), NETWORKS[name])


def test_what_is_described_computes_the_golden_networks() -> None:
    assert NETWORKS.keys() == making.NETWORKS.keys()
    for case in NETWORKS.values():
        reply = _reply(case)
        specs = reply.unroll_specs
        states = specs[len(specs) - reply.num_core_state_specs :]
        computed = Network(reply).unroll(
            _parameters(reply),
            {
                spec.name: np.array(case["observation"][spec.name], codec.numpy_dtype(spec.dtype))[
                    :, np.newaxis
                ]
                for spec in specs
                if spec.name in case["observation"]
            },
            np.array(case["step_type"], np.int8)[:, np.newaxis],
            [np.zeros((1, *spec.shape), codec.numpy_dtype(spec.dtype)) for spec in states],
        )
        width = computed.outputs.shape[-1]  # behind it stands epsilon
        _same(computed.outputs[:, 0].tolist(), np.array(case["policy"])[:, :width].tolist())
        _same(computed.baseline[:, 0].tolist(), case["baseline"])
        for one, other in zip(computed.core_state, case["core_state"], strict=True):
            _same(one[0].tolist(), other)


def test_descriptions_give_the_golden_probabilities() -> None:
    for case in golden.load("policies"):
        reply = _reply(case)
        (space,) = reply.action_space
        log_prob = policy.log_prob(
            policy.factors(reply),
            np.array(case["parameters"], np.float32),
            {space.name: np.array(case["action"])},
        )
        np.testing.assert_allclose(log_prob, case["log_prob"], 1e-4, 1e-4)


def test_the_golden_message_has_the_golden_bytes() -> None:
    case = golden.load("message")
    sent = json_format.ParseDict(case["message"], pb.Unrolls())
    assert sent == pb.Unrolls.FromString(bytes.fromhex(case["bytes"]))
    unroll_specs = [json_format.ParseDict(each, pb.TensorSpec()) for each in case["unroll_specs"]]
    assert codec.fingerprint(unroll_specs, [], case["agreed"]) == sent.fingerprint
    specs = codec.with_environments(unroll_specs, case["num_core_state_specs"], sent.num_envs)
    arrays = [np.array(case["tensors"][spec.name], codec.numpy_dtype(spec.dtype)) for spec in specs]
    assert codec.encode(arrays) == list(sent.tensors)


def test_the_actor_in_node_computes_the_golden_networks() -> None:
    """Those that it knows; others it refuses."""
    answers = json.loads(
        subprocess.run(
            [node.needed(), str(node.TESTS / "node_golden.mjs")],
            input=json.dumps([*NETWORKS.values()]),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    )
    known = [name for name, answer in answers.items() if "error" not in answer]
    assert known == ["mlp, categorical", "mlp, tanh normal, separate baseline"]
    for name in known:
        _same(answers[name]["policy"], NETWORKS[name]["policy"])
        _same(answers[name]["baseline"], NETWORKS[name]["baseline"])
